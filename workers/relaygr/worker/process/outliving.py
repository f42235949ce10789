"""What a worker leaves to its successor, and takes over from its predecessor: prefixes in DRAM, and finished offsets.

    attach      when a worker is prepared, with the lock or without: memory is mapped and pinned, nothing is changed
    read_ahead  while it stands by: so that little is left to be read later
    begin       holding the lock, before it joins the group: the predecessor's finished offsets
    restore     likewise, or while it joins: the predecessor's prefixes; until then nothing is spilled

Offsets are always kept, since they are small. Prefixes are kept where `worker.shared_path` says so, or where a
supervisor keeps a standby for the worker; else the DRAM tier is plain memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import structlog
from confluent_kafka import KafkaException

from relaygr.consumer import FinishedOffsets
from relaygr.kafka.topic_identity import identify_topics
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from relaygr.worker.cache import PrefixCache
from relaygr.worker.cache.build import DramMemory
from relaygr.worker.model.engine import Engine
from relaygr.worker.process.config import WorkerConfig
from relaygr.worker.process.memory import arena_shape
from relaygr.worker.shared.arena import SharedArena
from relaygr.worker.shared.lock import ArenaLock

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Outliving:
    """`arena` None: the DRAM tier ends with the process."""

    finished: FinishedOffsets
    arena: SharedArena | None

    @property
    def dram(self) -> DramMemory | None:
        """For the cache."""
        arena = self.arena
        return DramMemory(arena.tensor, arena.journal, arena.journal) if arena is not None else None

    def read_ahead(self) -> None:
        """Decodes what the active worker has recorded by now."""
        if self.arena is not None:
            self.arena.read_ahead()

    def begin(self) -> None:
        """Raises ValueError unless this process holds the lock."""
        self.finished.begin()

    def restore(self, cache: PrefixCache, namespace: bytes, now_us: int) -> None:
        """Puts the predecessor's prefixes of this model into `cache`. Raises ValueError unless the lock is held."""
        if self.arena is not None:
            started_s = time.monotonic()
            stored = self.arena.adopt(namespace)
            cache.restore(stored, now_us)
            log.info("prefixes restored", prefixes=len(stored), took_ms=round((time.monotonic() - started_s) * 1e3, 1))


def attach(config: WorkerConfig, engine: Engine, folder: Path, lock: ArenaLock, *, keeps_prefixes: bool) -> Outliving:
    """Maps what is there, and makes what is not. Raises RelayError if there is no room, or no broker."""
    kafka, settings = config.kafka, config.worker
    topics = [kafka.topic(Topic.PREINFER), kafka.topic(Topic.RANKING)]
    try:
        identity = identify_topics(kafka, topics, config.client_id, kafka.connect_timeout_s)
    except KafkaException as error:
        raise RelayError(f"Kafka at {kafka.bootstrap} does not tell its topics' ids: {error.args[0]}.") from error
    finished = FinishedOffsets(folder / "finished", identity, kafka.partitions, lock)
    arena = None
    if keeps_prefixes and (shape := arena_shape(engine, settings)) is not None:
        arena = SharedArena.attach(folder, shape, engine.device, lock)
        arena.read_ahead()
    return Outliving(finished, arena)
