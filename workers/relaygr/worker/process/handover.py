"""The handover from a worker to its successor: prefixes in DRAM and finished offsets, in the worker's shared folder.

    claim       a primary worker acquires the lock of the folder before it prepares
    attach      while a worker prepares, with or without the lock: maps and pins memory, changes no data
    read_ahead  while a standby waits: decodes the index, so that little is left to decode at the take-over
    begin       with the lock, before the worker joins the group: reads the predecessor's finished offsets, and what it
                had on the device at its end
    restore     with the lock: puts the predecessor's prefixes into the cache, which spills none until then

Finished offsets are always kept, since they are small. Prefixes are kept if `worker.shared_path` is set or a supervisor
runs a standby; otherwise the DRAM tier is private memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import structlog
from confluent_kafka import KafkaException

from relaygr.cluster.topic_identity import TopicIdentity, identify_topics
from relaygr.consumer.finished import FinishedOffsets
from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import map_private
from relaygr.schemas.topics import Topic
from relaygr.worker.cache import PrefixCache
from relaygr.worker.cache.build import DramMemory
from relaygr.worker.executor.device_record import RECORD_BYTES, DeviceRecord
from relaygr.worker.model.interface import Engine
from relaygr.worker.process.allocation import arena_shape
from relaygr.worker.settings import WorkerConfig
from relaygr.worker.shared.dram_tier import SharedArena
from relaygr.worker.shared.lock import ArenaLock

log = structlog.get_logger()

_PATIENCE_S = 5.0
"""Time in addition to `drain_s` within which a stopping predecessor must end."""


@dataclass(frozen=True, slots=True)
class Handover:
    """`arena` None: the DRAM tier is private memory."""

    identity: TopicIdentity
    """The ids of every topic that the worker reads as a log of its own."""
    finished: FinishedOffsets
    device_record: DeviceRecord
    arena: SharedArena | None

    @property
    def dram(self) -> DramMemory | None:
        """Memory and journal of the DRAM tier, for the cache; None for private memory."""
        arena = self.arena
        return DramMemory(arena.tensor, arena.journal, arena.journal) if arena is not None else None

    def read_ahead(self) -> None:
        """Decodes the prefixes that the active worker has recorded so far."""
        if self.arena is not None:
            self.arena.read_ahead()

    def begin(self) -> None:
        """Raises ValueError unless this process holds the lock."""
        self.finished.begin()
        self.device_record.begin()

    def restore(self, cache: PrefixCache, namespace: bytes, now_us: int) -> None:
        """Puts the predecessor's prefixes of this model into `cache`. Raises ValueError without the lock."""
        if self.arena is not None:
            started_s = time.monotonic()
            stored = self.arena.adopt(namespace)
            cache.restore(stored, now_us)
            log.info("prefixes restored", prefixes=len(stored), took_ms=round((time.monotonic() - started_s) * 1e3, 1))


def attach(config: WorkerConfig, engine: Engine, folder: Path, lock: ArenaLock, *, keeps_prefixes: bool) -> Handover:
    """Opens or creates the files. Raises RelayError without memory for them, or without a broker."""
    kafka, settings = config.kafka, config.worker
    topics = [kafka.topic(topic) for topic in config.topics]
    others = [Topic.HISTORY, Topic.BEHAVIOURS, *([Topic.OVERFLOW] if settings.divert else [])]
    names = [*topics, *map(kafka.topic, others)]
    try:
        identity = identify_topics(kafka, names, config.client_id, kafka.connect_timeout_s)
    except KafkaException as error:
        raise RelayError(f"Kafka at {kafka.bootstrap} does not return its topic ids: {error.args[0]}.") from error
    owned = TopicIdentity(identity.cluster_id, {name: identity.topic_ids[name] for name in topics})
    finished = FinishedOffsets(folder / "finished", owned, kafka.partitions, lock)
    device_record = DeviceRecord(map_private(folder / "device", RECORD_BYTES, "worker.shared_path"))
    arena = None
    if keeps_prefixes and (shape := arena_shape(engine, settings)) is not None:
        arena = SharedArena.attach(folder, shape, engine.device, lock)
        arena.read_ahead()
    return Handover(identity, finished, device_record, arena)


def claim(lock: ArenaLock, config: WorkerConfig) -> None:
    """Acquires the lock; waits for a predecessor that is stopping. Raises RelayError if the predecessor stays."""
    if lock.try_acquire() is not None:
        return
    log.info("waiting for the predecessor to end", worker_id=config.worker.worker_id, pid=lock.holder())
    if lock.acquire(timeout_s=config.worker.drain_s + _PATIENCE_S) is None:
        raise RelayError(
            f"{config.worker.worker_id} runs already on this machine, as process {lock.holder() or 'unknown'}: stop "
            "that process, or set another `worker.worker_id`. Workers of two clusters need different values of "
            "`worker.shared_path`."
        )
