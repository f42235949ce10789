"""The poll thread's work between messages: follows the assignment, has the status published, bounds the backlog."""

from __future__ import annotations

import threading
from typing import Final

import structlog

from relaygr.admission.latency import Stage
from relaygr.runtime.clock import Clock
from relaygr.schemas.partitioner import users_in
from relaygr.schemas.topics import Topic
from relaygr.worker.history.follower import HistoryFollower
from relaygr.worker.history.store import HistoryStore
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.process.status import StatusReport, StatusSources
from relaygr.worker.process.warm_up_offers import WarmUpOffers
from relaygr.worker.settings import WorkerConfig

log = structlog.get_logger()

_MOVED_INTERVAL_US: Final = 1_000_000
_QUALITY_INTERVAL_US: Final = 10_000_000
_PAUSES_AT: Final = 0.75
"""The part of `worker.ranking_queue_bytes` at which the ranking partitions pause. The rest is for received messages."""


class PeriodicWork:
    """The poll thread calls it between messages; no call blocks."""

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
        self._metrics.moved_partitions["gained"].inc(len(partitions - self._owned))
        self._metrics.moved_partitions["left"].inc(len(left))
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
