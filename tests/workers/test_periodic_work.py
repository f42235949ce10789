"""The poll thread's periodic work: prefixes of partitions that moved away, and the bound of the backlog in bytes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from relaygr.admission.corrector import PredictionQuality
from relaygr.admission.latency import Stage
from relaygr.admission.settings import AdmissionSettings
from relaygr.consumer.settings import ConsumerSettings
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.partitioner import partition_for
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.process.periodic import PeriodicWork
from relaygr.worker.process.status import StatusSources
from relaygr.worker.settings import WorkerConfig, WorkerSettings

PARTITIONS = 4
MOVED_S = 60
MIB = 1024 * 1024
USERS = [f"user-{number}" for number in range(40)]


class FakeCache:
    def __init__(self) -> None:
        self.users = set(USERS)

    def demote(self, users: Any) -> int:
        return 0

    def held_bytes(self, users: Any) -> int:
        """A byte a user."""
        return sum(map(users, self.users))

    def invalidate_users(self, deleted: Any) -> int:
        self.users -= set(filter(deleted, self.users))
        return 0


class World:
    def __init__(self) -> None:
        self.clock = ManualClock(monotonic_us=5_000_000)
        self.cache = FakeCache()
        self.paused: list[str] = []
        self.forgotten: set[int] = set()
        config = WorkerConfig(
            KafkaSettings(partitions=PARTITIONS),
            WorkerSettings(moved_prefix_s=MOVED_S, ranking_queue_bytes=64 * MIB),
            AdmissionSettings(),
            ConsumerSettings(),
        )
        loop = SimpleNamespace(
            pause=lambda *_: self.paused.append("paused"), resume=lambda *_: self.paused.append("resumed")
        )
        self.executor: Any = SimpleNamespace(ranking_outstanding=0, preinfer_backlog_us=0, ranking_outstanding_bytes=0)
        self.quality: dict[Stage, PredictionQuality] = {}
        self.executor.prediction_quality = self.quality.get
        sources = StatusSources(None, loop, self.executor, self.cache, None)  # type: ignore[arg-type]
        self.registry = CollectorRegistry()
        self.work = PeriodicWork(
            config,
            sources,
            SimpleNamespace(publish=lambda: None, is_outdated=False),  # type: ignore[arg-type]
            SimpleNamespace(follow=lambda partitions: None, forget=self.forgotten.update),  # type: ignore[arg-type]
            SimpleNamespace(),  # type: ignore[arg-type]
            WorkerMetrics(self.registry),
            self.clock,
        )

    def own(self, *partitions: int) -> None:
        self.work.take_over(frozenset(partitions))

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"relaygr_worker_{name}_total", labels) or 0.0

    def after(self, seconds: float) -> None:
        self.clock.advance_us(int(seconds * 1e6))
        self.tick()

    def tick(self) -> None:
        self.work.tick(self.clock.monotonic_us())
        for thread in threading.enumerate():
            if thread.name in ("demote", "drop-moved"):
                thread.join()

    @property
    def partitions(self) -> set[int]:
        return {partition_for(user.encode(), PARTITIONS) for user in self.cache.users}


def test_prefixes_of_a_partition_that_moved_away_are_dropped_after_a_stated_time() -> None:
    """Nobody tells this worker when one of their users is deleted."""
    world = World()
    world.own(0, 1, 2, 3)
    world.own(0, 1)
    world.after(MOVED_S - 2)
    assert world.partitions == {0, 1, 2, 3}
    assert world.forgotten == set()
    world.after(3)
    assert world.partitions == {0, 1}
    assert world.forgotten == {2, 3}, "their histories are deleted too"


def test_partitions_that_move_are_counted_with_the_bytes_that_the_worker_held_of_their_users() -> None:
    world = World()
    world.own(0, 1, 2, 3)
    world.own(0, 1, 2, 3)
    world.after(1)
    assert world.counted("moved_partitions", direction="gained") == 4
    assert world.counted("moved_prefix_bytes") == 0, "an assignment that changes nothing moves nothing"
    world.own(0, 1)
    world.own(0, 1, 2)
    world.after(1)
    assert world.counted("moved_partitions", direction="left") == 2
    assert world.counted("moved_partitions", direction="gained") == 5
    left = sum(partition_for(user.encode(), PARTITIONS) in (2, 3) for user in USERS)
    assert world.counted("moved_prefix_bytes") == left > 0


def test_prefixes_of_diverted_requests_of_other_workers_users_are_dropped_after_that_time_too() -> None:
    world = World()
    world.own(0, 1)
    world.after(MOVED_S + 1)
    world.cache.users = set(USERS)
    world.work.diverted_from.update({1, 2})
    world.after(2)
    world.after(MOVED_S - 2)
    assert world.partitions == {0, 1, 2, 3}
    world.after(3)
    assert world.partitions == {0, 1, 3}
    world.work.diverted_from.add(3)
    world.after(2)
    world.after(MOVED_S + 1)
    assert world.partitions == {0, 1}


def test_a_worker_says_once_that_its_predictions_are_off_and_once_that_they_are_right_again() -> None:
    world = World()
    with structlog.testing.capture_logs() as logs:
        for ratio, count in ((1.0, 512), (2.0, 5), (2.0, 512), (2.0, 512), (1.2, 512)):
            world.quality[Stage.FULL] = PredictionQuality(1.0, ratio, ratio, ratio, count=count)
            world.after(10)
    assert [(line["log_level"], line["stage"]) for line in logs] == [("warning", "full"), ("info", "full")]
    assert logs[0]["predicted_over_measured"] == 2.0


def test_a_partition_that_comes_back_in_time_keeps_its_prefixes() -> None:
    world = World()
    world.own(0, 1, 2, 3)
    world.own(0)
    world.after(MOVED_S - 2)
    world.own(0, 1, 2, 3)
    world.after(MOVED_S)
    assert world.partitions == {0, 1, 2, 3}


def test_restored_prefixes_of_partitions_that_the_worker_does_not_get_are_dropped_too() -> None:
    world = World()
    world.own(3)
    world.after(MOVED_S)
    assert world.partitions == {3}


def test_rebalances_in_between_do_not_prolong_the_time() -> None:
    world = World()
    world.own(0, 1)
    for other in (0, 1, 0):
        world.after(MOVED_S / 3)
        world.own(other)
    world.after(1)
    assert world.partitions == {0, 1}


def test_ranking_pauses_at_three_quarters_of_its_bytes_and_goes_on_at_half_of_that() -> None:
    world = World()
    for mib, expected in ((47, []), (48, ["paused"]), (25, ["paused"]), (24, ["paused", "resumed"])):
        world.executor.ranking_outstanding_bytes = mib * MIB
        world.tick()
        assert world.paused == expected
