"""What a worker leaves to its successor, and takes over from its predecessor: prefixes in DRAM, and finished offsets.

    attach      when a worker is prepared, with the lock or without: memory is mapped and pinned, nothing is changed
    read_ahead  while it stands by: so that little is left to be read later
    begin       holding the lock, before it joins the group: the predecessor's finished offsets
    restore     likewise, or while it joins: the predecessor's prefixes; until then nothing is spilled

Offsets are always kept, since they are small. Prefixes are kept where `worker.shared_path` says so, or where a
supervisor keeps a standby for the worker; else the DRAM tier is plain memory.
"""

from __future__ import annotations

import getpass
import os
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
from relaygr.worker.model.interface import Engine
from relaygr.worker.process.memory import arena_shape
from relaygr.worker.settings import WorkerConfig
from relaygr.worker.shared.arena import SharedArena
from relaygr.worker.shared.lock import ArenaLock
from relaygr.worker.shared.mapped_file import memory_folder

log = structlog.get_logger()

_PATIENCE_S = 5.0
"""Beside `drain_s`: how long a predecessor that was told to stop may take."""


@dataclass(frozen=True, slots=True)
class Handover:
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


def attach(config: WorkerConfig, engine: Engine, folder: Path, lock: ArenaLock, *, keeps_prefixes: bool) -> Handover:
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
    return Handover(finished, arena)


def shared_folder(config: WorkerConfig) -> Path:
    """The folder of this worker id."""
    root = config.worker.shared_path or memory_folder() / f"relaygr-{_user()}"
    return root / config.kafka.workers_group / config.worker.worker_id


def claim(lock: ArenaLock, config: WorkerConfig) -> None:
    """Takes the lock; waits a while for a predecessor that is stopping. Raises RelayError if it stays."""
    if lock.try_acquire() is not None:
        return
    log.info("waits for its predecessor to end", worker_id=config.worker.worker_id, pid=lock.holder())
    if lock.acquire(timeout_s=config.worker.drain_s + _PATIENCE_S) is None:
        raise RelayError(
            f"{config.worker.worker_id} runs already on this machine, as process {lock.holder() or 'unknown'}: stop it "
            "first, or give this one a `worker.worker_id` of its own. For workers of two clusters set "
            "`worker.shared_path` apart."
        )


def _user() -> str:
    """A container may run as a number that has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
