"""What the worker tells the fleet: its status, on the `workers` topic, a few times a second."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import structlog
from confluent_kafka import KafkaException, Producer

from relaygr.runtime.clock import Clock
from relaygr.schemas.codec import encode
from relaygr.schemas.messages import LatencyCoefficients, WorkerState, WorkerStatus
from relaygr.worker.kv import KvGeometry, PrefixLayout

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What does not change while a worker runs."""

    worker_id: str
    geometry: KvGeometry
    layout: PrefixLayout
    hbm_capacity_bytes: int
    dram_capacity_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """What does change, as of one moment."""

    model_revision: str
    max_prefix_behaviours: int
    partitions: frozenset[int]
    assignment_epoch: int
    hbm_free_bytes: int
    dram_free_bytes: int
    ranking_queue_p99_us: int
    preinfer_queue_us: int
    latency: LatencyCoefficients


class QueueWaits:
    """P99 of the latest waits of ranking requests. One writer; readers may come from other threads."""

    def __init__(self, window: int = 512) -> None:
        self._waits_us: deque[int] = deque(maxlen=window)

    def observe(self, wait_us: int) -> None:
        self._waits_us.append(wait_us)

    def p99_us(self) -> int:
        """0 before the first."""
        waits = sorted(self._waits_us.copy())
        return waits[min(len(waits) - 1, int(0.99 * len(waits)))] if waits else 0


class StatusPublisher:
    """Writes statuses, keyed by the worker's id. Belongs to the poll thread."""

    def __init__(self, producer: Producer, topic: str, facts: WorkerFacts, clock: Clock) -> None:
        self._producer = producer
        self._topic = topic
        self._facts = facts
        self._clock = clock

    def publish(self, state: WorkerState, reading: WorkerReading) -> None:
        """Never raises and never blocks: the next status comes soon."""
        facts = self._facts
        status = WorkerStatus(
            worker_id=facts.worker_id,
            state=state,
            written_at_us=self._clock.wall_us(),
            assignment_epoch=reading.assignment_epoch,
            partitions=tuple(sorted(reading.partitions)),
            model_revision=reading.model_revision,
            kv_bytes_per_token=facts.geometry.bytes_per_token,
            contextual_tokens=facts.layout.contextual_tokens,
            tokens_per_behaviour=facts.layout.tokens_per_behaviour,
            max_prefix_behaviours=reading.max_prefix_behaviours,
            hbm_capacity_bytes=facts.hbm_capacity_bytes,
            hbm_free_bytes=reading.hbm_free_bytes,
            dram_capacity_bytes=facts.dram_capacity_bytes,
            dram_free_bytes=reading.dram_free_bytes,
            ranking_queue_p99_us=reading.ranking_queue_p99_us,
            preinfer_queue_us=reading.preinfer_queue_us,
            latency=reading.latency,
        )
        try:
            self._producer.produce(self._topic, encode(status), facts.worker_id.encode())
        except (BufferError, KafkaException) as error:
            log.debug("status not sent", error=str(error))
