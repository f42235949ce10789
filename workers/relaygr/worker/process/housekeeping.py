"""The poll thread's work between messages: follows the assignment, publishes the status, bounds the backlog."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog
from confluent_kafka import KafkaException, Producer

from relaygr.admission.latency import Stage
from relaygr.consumer import ConsumerLoop
from relaygr.runtime.clock import Clock
from relaygr.schemas.codec import encode
from relaygr.schemas.headers import WORKERS_GROUP, Headers
from relaygr.schemas.messages import WorkerState, WorkerStatus
from relaygr.schemas.partitioner import users_in
from relaygr.schemas.topics import Topic
from relaygr.worker.cache.cache import PrefixCache
from relaygr.worker.cache.stats import TierStats
from relaygr.worker.executor.executor import Executor
from relaygr.worker.history.follower import HistoryFollower
from relaygr.worker.history.store import HistoryStore
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.results import QueueWaits
from relaygr.worker.settings import WorkerConfig, WorkerSettings

log = structlog.get_logger()

_MOVED_INTERVAL_US: Final = 1_000_000
_SCAN_INTERVAL_US: Final = 1_000_000
_QUALITY_INTERVAL_US: Final = 10_000_000
_STOP_S: Final = 2.0

_PAUSES_AT: Final = 0.75
"""The part of `worker.ranking_queue_bytes` at which the ranking partitions pause. The rest is for received messages."""


@dataclass(frozen=True, slots=True)
class StatusSources:
    """The parts that a status is read from, and the producer that sends it."""

    producer: Producer
    loop: ConsumerLoop
    executor: Executor
    cache: PrefixCache
    waits: QueueWaits
    overflow_partitions: Callable[[], tuple[int, ...] | None] = lambda: None
    """The overflow partitions on which this worker takes diverted requests; None while `worker.divert` is off."""


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
                self._topic, encode(status), status.worker_id.encode(), headers=self._headers
            )
        except (BufferError, KafkaException) as error:
            log.debug("status not sent", error=str(error))

    def _read(self) -> WorkerStatus:
        executor = self._sources.executor
        loop, stats, engine = self._sources.loop.status(), self._sources.cache.stats(), executor.engine
        latency = executor.latency_of_prefixes
        self._overflow_partitions = self._overflow_now()
        return WorkerStatus(
            worker_id=self._settings.worker_id,
            state=self.state,
            written_at_us=self._clock.wall_us(),
            assignment_epoch=loop.assignment_epoch,
            partitions=tuple(sorted(loop.partitions)),
            model_revision=engine.revision,
            kv_bytes_per_token=engine.geometry.bytes_per_token,
            contextual_tokens=engine.layout.contextual_tokens,
            tokens_per_behaviour=engine.layout.tokens_per_behaviour,
            max_prefix_behaviours=engine.limits.max_prefix_behaviours,
            hbm_capacity_bytes=_usable_bytes(int(self._settings.hbm_bytes), stats.hbm, stats.hbm_page_bytes),
            hbm_free_bytes=(stats.hbm.free + stats.hbm.evictable) * stats.hbm_page_bytes,
            dram_capacity_bytes=_usable_bytes(int(self._settings.dram_bytes), stats.dram, stats.dram_page_bytes),
            dram_free_bytes=(stats.dram.free + stats.dram.evictable) * stats.dram_page_bytes,
            ranking_queue_p99_us=self._sources.waits.p99_us(),
            preinfer_queue_us=executor.preinfer_backlog_us,
            ranking_backlog_us=executor.backlog.predicted_us,
            latency=latency.coefficients,
            full_path=executor.full_path_report(latency),
            lead_times=executor.lead_time_report(),
            reuses_prefixes=engine.rules.is_reusable,
            host=self._host,
            metrics_url=self.metrics_url,
            length_ratios=executor.length_ratios(),
            predictions_off=self.predictions_off,
            overflow_partitions=self._overflow_partitions,
            active_since_us=self.active_since_us,
        )


def _usable_bytes(taken_bytes: int, tier: TierStats, page_bytes: int) -> int:
    """The size of a tier, or its limit."""
    return taken_bytes if tier.limit == tier.capacity else tier.limit * page_bytes


class WarmUpOffers:
    """Offers the executor the users who will probably return: those with the newest behaviours.

    A warm-up lasts `worker.warm_up_s`. Meanwhile the store is scanned, on a thread of its own, whenever it has more or
    fewer users than before. The poll thread calls `tick`; any thread may call `begin`.
    """

    def __init__(self, settings: WorkerSettings, executor: Executor, store: HistoryStore) -> None:
        self._settings = settings
        self._executor = executor
        self._store = store
        self._partitions: frozenset[int] = frozenset()
        self._wanted = self._stopping = False
        self._ends_us = 0
        self._scan_at_us = 0
        self._users = 0
        self._thread: threading.Thread | None = None

    def begin(self, partitions: frozenset[int] | None = None) -> None:
        """Begins a warm-up at the next tick. `partitions`: those that the worker owns from now on."""
        if partitions is not None:
            self._partitions = partitions
        self._wanted = self._settings.warm_up_users > 0

    def tick(self, now_us: int) -> None:
        """Never blocks. Monotonic µs."""
        if self._wanted:
            self._wanted = False
            self._ends_us, self._scan_at_us = now_us + int(self._settings.warm_up_s * 1e6), now_us
            self._users = 0
            self._executor.post(self._executor.begin_warm_up)
        if not self._ends_us or self._stopping or (self._thread is not None and self._thread.is_alive()):
            return
        if now_us >= self._ends_us:
            self._ends_us = 0
            self._executor.post(partial(self._executor.offer_warm_ups, ()))
        elif now_us >= self._scan_at_us:
            self._scan_at_us = now_us + _SCAN_INTERVAL_US
            self._thread = threading.Thread(target=self._scan, name="warm-up", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the scan, so that the store may be closed."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _scan(self) -> None:
        try:
            users = self._store.user_count
            if users != self._users:
                self._users = users
                wanted = self._settings.warm_up_users
                recent = self._store.recent_users(self._partitions, wanted, lambda: not self._stopping)
                self._executor.post(partial(self._executor.offer_warm_ups, recent))
        except Exception as error:
            log.debug("the store was not scanned for a warm-up", error=repr(error))


class Housekeeping:
    """The poll thread calls it; no call blocks."""

    def __init__(
        self, config: WorkerConfig, sources: StatusSources, status: StatusReport, follower: HistoryFollower,
        store: HistoryStore, metrics: WorkerMetrics, clock: Clock,
    ) -> None:  # fmt: skip
        self.warm_up = WarmUpOffers(config.worker, sources.executor, store)
        self._settings = config.worker
        self._partitions = config.kafka.partitions
        self._ranking_topic = config.kafka.topic(Topic.RANKING)
        self._loop = sources.loop
        self._executor = sources.executor
        self._cache = sources.cache
        self._status = status
        self._follower = follower
        self._metrics = metrics
        self._clock = clock
        self._owned: frozenset[int] = frozenset()
        self._left_us: dict[int, int] = {}
        """When this worker gave up each partition that it does not own, or found at its start that it does not."""
        self._moved_prefix_us = int(config.worker.moved_prefix_s * 1e6)
        self._moved_at_us = 0
        self._status_at_us = 0
        self._quality_at_us = 0
        self._off: frozenset[Stage] = frozenset()
        self._ranking_paused = False
        self.diverted_from: set[int] = set()
        """Partitions of users whose requests were diverted here. Another poll thread adds them."""

    def take_over(self, partitions: frozenset[int]) -> None:
        """From now on the worker owns these partitions and no others. It drops what it has of the others after
        `worker.moved_prefix_s`.
        """
        self._follower.follow(partitions)
        self.warm_up.begin(partitions)
        now_us = self._clock.monotonic_us()
        left = self._owned - partitions
        self._metrics.partitions_gained.inc(len(partitions - self._owned))
        self._metrics.partitions_left.inc(len(left))
        self._owned = partitions
        self._left_us = {
            other: self._left_us.get(other, now_us) for other in range(self._partitions) if other not in partitions
        }
        threading.Thread(target=self._demote_others, args=(partitions, left), name="demote", daemon=True).start()
        self._status_at_us = 0
        log.info("owns partitions", worker_id=self._settings.worker_id, partitions=sorted(partitions))

    def tick(self, now_us: int) -> None:
        """Called every few milliseconds. Monotonic µs."""
        if now_us >= self._moved_at_us:
            self._moved_at_us = now_us + _MOVED_INTERVAL_US
            while self.diverted_from:
                # Their prefixes are those of another worker's users, too.
                if (partition := self.diverted_from.pop()) not in self._owned:
                    self._left_us.setdefault(partition, now_us)
            self._drop_moved(now_us)
        if now_us >= self._status_at_us or self._status.is_outdated:
            self._status_at_us = now_us + self._settings.status_interval_ms * 1000
            self._status.publish()
            self._metrics.outstanding.set(self._executor.ranking_outstanding)
            self._metrics.preinfer_queue_seconds.set(self._executor.preinfer_backlog_us / 1e6)
        if now_us >= self._quality_at_us:
            self._quality_at_us = now_us + _QUALITY_INTERVAL_US
            self._watch_predictions()
        self.warm_up.tick(now_us)
        self._bound_backlog()

    def _watch_predictions(self) -> None:
        """Says once when the predictions of a stage are off, and when they are right again."""
        found = {stage: quality for stage in Stage if (quality := self._executor.prediction_quality(stage)) is not None}
        off = frozenset(stage for stage, quality in found.items() if quality.is_off)
        for stage in off - self._off:
            log.warning(
                "predicted device times are off",
                stage=stage.value,
                predicted_over_measured=round(found[stage].ratio_p50, 2),
                advice="measure the device again: relaygr calibrate",
            )
        for stage in self._off - off:
            log.info("predicted device times are right again", stage=stage.value)
        self._off = off
        self._status.predictions_off = bool(off)

    def _demote_others(self, partitions: frozenset[int], left: frozenset[int]) -> None:
        """Runs on a thread of its own, since it visits every user in the cache."""
        if left:
            self._metrics.moved_prefix_bytes.inc(self._cache.held_bytes(users_in(left, self._partitions)))
        mine = users_in(partitions, self._partitions)
        self._cache.demote(lambda user_id: not mine(user_id))

    def _drop_moved(self, now_us: int) -> None:
        """Removes prefixes and histories of partitions that moved to another worker long ago: only that worker reads
        the deletions of their users.
        """
        moved = {part for part, left_us in self._left_us.items() if now_us - left_us >= self._moved_prefix_us}
        if moved:
            self._left_us = {part: left_us for part, left_us in self._left_us.items() if part not in moved}
            self._follower.forget(frozenset(moved))
            threading.Thread(target=self._drop, args=(moved,), name="drop-moved", daemon=True).start()

    def _drop(self, partitions: set[int]) -> None:
        dropped = self._cache.invalidate_users(users_in(partitions, self._partitions))
        if dropped:
            log.info("prefixes of moved partitions dropped", prefixes=dropped)

    def _bound_backlog(self) -> None:
        """Pauses the ranking partitions when a bound is reached, until half of the backlog is answered."""
        outstanding = self._executor.ranking_outstanding
        filled = max(
            outstanding / self._settings.ranking_queue_max,
            self._executor.ranking_outstanding_bytes / (_PAUSES_AT * self._settings.ranking_queue_bytes),
        )
        if not self._ranking_paused and filled >= 1:
            self._ranking_paused = True
            self._loop.pause(self._ranking_topic, range(self._partitions))
            log.warning("ranking paused: too many requests outstanding", outstanding=outstanding)
        elif self._ranking_paused and filled <= 0.5:
            self._ranking_paused = False
            self._loop.resume(self._ranking_topic, range(self._partitions))
