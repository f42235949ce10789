"""What the poll thread does beside messages: takes over partitions, tells the fleet, bounds what is outstanding."""

from __future__ import annotations

import threading

import structlog

from relaygr.consumer import ConsumerLoop
from relaygr.runtime.clock import Clock
from relaygr.schemas.messages import WorkerState
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.worker.cache.cache import PrefixCache
from relaygr.worker.executor.executor import Executor
from relaygr.worker.history.follower import HistoryFollower
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.process.prepare import Prepared
from relaygr.worker.settings import WorkerConfig
from relaygr.worker.status import QueueWaits, StatusPublisher, WorkerFacts, WorkerReading

log = structlog.get_logger()


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


class Housekeeping:
    """Called on the poll thread; never blocks."""

    def __init__(
        self,
        config: WorkerConfig,
        loop: ConsumerLoop,
        executor: Executor,
        cache: PrefixCache,
        follower: HistoryFollower,
        report: StatusReport,
        metrics: WorkerMetrics,
    ) -> None:
        self._settings = config.worker
        self._partitions = config.kafka.partitions
        self._ranking_topic = config.kafka.topic(Topic.RANKING)
        self._loop = loop
        self._executor = executor
        self._cache = cache
        self._follower = follower
        self._report = report
        self._metrics = metrics
        self._status_at_us = 0
        self._ranking_paused = False

    def take_over(self, partitions: frozenset[int]) -> None:
        """These are owned now, and no others."""
        self._follower.follow(partitions)
        threading.Thread(target=self._demote_others, args=(partitions,), name="demote", daemon=True).start()
        self._status_at_us = 0
        log.info("owns partitions", worker_id=self._settings.worker_id, partitions=sorted(partitions))

    def tick(self, now_us: int) -> None:
        """Every few milliseconds. Monotonic µs."""
        if now_us >= self._status_at_us:
            self._status_at_us = now_us + self._settings.status_interval_ms * 1000
            self._report.publish()
            self._metrics.outstanding.set(self._executor.ranking_outstanding)
            self._metrics.preinfer_queue_seconds.set(self._executor.preinfer_backlog_us / 1e6)
        self._bound_ranking()

    def _demote_others(self, partitions: frozenset[int]) -> None:
        """Off the poll thread: it looks at every user in the cache."""
        self._cache.demote(lambda user_id: partition_for(user_id.encode(), self._partitions) not in partitions)

    def _bound_ranking(self) -> None:
        """At either bound the ranking partitions pause, until half of it is answered."""
        outstanding = self._executor.ranking_outstanding
        filled = max(
            outstanding / self._settings.ranking_queue_max,
            self._executor.ranking_outstanding_bytes / self._settings.ranking_queue_bytes,
        )
        if not self._ranking_paused and filled >= 1:
            self._ranking_paused = True
            self._loop.pause(self._ranking_topic, range(self._partitions))
            log.warning("ranking paused: too many requests outstanding", outstanding=outstanding)
        elif self._ranking_paused and filled <= 0.5:
            self._ranking_paused = False
            self._loop.resume(self._ranking_topic, range(self._partitions))
