"""Reads the parts for the worker's status message."""

from __future__ import annotations

from relaygr.consumer import ConsumerLoop
from relaygr.runtime.clock import Clock
from relaygr.schemas.messages import WorkerState
from relaygr.schemas.topics import Topic
from relaygr.worker.cache.cache import PrefixCache
from relaygr.worker.executor import Executor
from relaygr.worker.process.config import WorkerConfig
from relaygr.worker.process.prepare import Prepared
from relaygr.worker.status import QueueWaits, StatusPublisher, WorkerFacts, WorkerReading


class StatusReport:
    """Publishes the status as it is when asked. Belongs to the poll thread; `state` is the main thread's."""

    def __init__(
        self,
        config: WorkerConfig,
        prepared: Prepared,
        cache: PrefixCache,
        executor: Executor,
        loop: ConsumerLoop,
        waits: QueueWaits,
        clock: Clock,
    ) -> None:
        engine, settings = prepared.engine, config.worker
        self.state = WorkerState.STARTING
        self._cache = cache
        self._executor = executor
        self._loop = loop
        self._waits = waits
        self._publisher = StatusPublisher(
            prepared.producer,
            config.kafka.topic(Topic.WORKERS),
            WorkerFacts(
                worker_id=settings.worker_id,
                geometry=engine.geometry,
                layout=engine.layout,
                hbm_capacity_bytes=int(settings.hbm_bytes),
                dram_capacity_bytes=int(settings.dram_bytes),
            ),
            clock,
        )

    def publish(self) -> None:
        """Never raises and never blocks."""
        loop, stats, engine = self._loop.status(), self._cache.stats(), self._executor.engine
        self._publisher.publish(
            self.state,
            WorkerReading(
                model_revision=engine.revision,
                max_prefix_behaviours=engine.limits.max_prefix_behaviours,
                partitions=loop.partitions,
                assignment_epoch=loop.assignment_epoch,
                hbm_free_bytes=(stats.hbm.free + stats.hbm.evictable) * stats.hbm_page_bytes,
                dram_free_bytes=(stats.dram.free + stats.dram.evictable) * stats.dram_page_bytes,
                ranking_queue_p99_us=self._waits.p99_us(),
                preinfer_queue_us=self._executor.preinfer_backlog_us,
                latency=self._executor.latency_of_prefixes.coefficients,
            ),
        )
