"""The status that a worker publishes on the workers topic."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from confluent_kafka import KafkaException, Producer

from relaygr.consumer.interface import Loop
from relaygr.runtime.clock import Clock
from relaygr.schemas.codec import encode
from relaygr.schemas.headers import WORKERS_GROUP, Headers
from relaygr.schemas.messages import PreInferSlots, WorkerState, WorkerStatus
from relaygr.schemas.topics import Topic
from relaygr.worker.cache.cache import PrefixCache
from relaygr.worker.executor.executor import Executor
from relaygr.worker.executor.status import status_of
from relaygr.worker.latest_answers import QueueWaits
from relaygr.worker.settings import WorkerConfig

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StatusSources:
    """The components that a status is read from, and the producer that sends it."""

    producer: Producer
    loop: Loop
    executor: Executor
    cache: PrefixCache
    waits: QueueWaits
    overflow_partitions: Callable[[], tuple[int, ...] | None] = lambda: None
    """The overflow partitions on which this worker takes diverted requests; None while `worker.divert` is off."""
    pre_infer: Callable[[], PreInferSlots | None] = lambda: None
    """The slots of a pre-infer worker, which owns no partition."""


class StatusReport:
    """Reads and publishes the worker's status.

    The poll thread owns it; the main thread sets `state` and `metrics_url`.
    """

    def __init__(self, config: WorkerConfig, sources: StatusSources, clock: Clock) -> None:
        self.state = WorkerState.STARTING
        self.metrics_url: str | None = None
        """Set once the probes are served."""
        self.active_since_us: int | None = None
        """Set when the process begins to serve."""
        self.predictions_off: bool | None = None
        """Whether the predictions of a stage were off lately; None before the first look."""
        self._host = socket.gethostname() or None
        self._settings = config.worker
        self._topic = config.kafka.topic(Topic.WORKERS)
        self._headers: Headers = [(WORKERS_GROUP, config.kafka.workers_group.encode())]
        self._sources = sources
        self._clock = clock
        self._overflow_partitions: tuple[int, ...] | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether other workers must hear at once that diverted requests may come, or may come no longer."""
        return self._overflow_now() != self._overflow_partitions

    def _overflow_now(self) -> tuple[int, ...] | None:
        partitions = self._sources.overflow_partitions()
        return () if partitions and self.state is not WorkerState.READY else partitions

    def publish(self) -> None:
        """Never blocks. A status that cannot be sent is dropped, since the next one follows soon."""
        status = self._read()
        try:
            self._sources.producer.produce(
                self._topic,
                encode(status),
                status.worker_id.encode(),
                headers=self._headers,
            )
        except (BufferError, KafkaException) as error:
            log.debug("status not sent", error=str(error))

    def _read(self) -> WorkerStatus:
        sources = self._sources
        loop = sources.loop.status()
        self._overflow_partitions = self._overflow_now()
        pre_infer = sources.pre_infer()
        return status_of(
            sources.executor,
            sources.cache.stats(),
            self._settings,
            worker_id=self._settings.worker_id,
            state=self.state,
            written_at_us=self._clock.wall_us(),
            assignment_epoch=loop.assignment_epoch,
            partitions=loop.partitions if pre_infer is None else frozenset(),
            ranking_queue_p99_us=sources.waits.p99_us(),
            active_since_us=self.active_since_us,
            host=self._host,
            metrics_url=self.metrics_url,
            predictions_off=self.predictions_off,
            overflow_partitions=self._overflow_partitions,
            pre_infer=pre_infer,
        )
