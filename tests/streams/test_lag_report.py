"""Reports from several polls: owner split, lag and status; and their metrics."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from relaygr.consumer.watermark import TopicPartition
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.lag.exporter import LagExporter
from relaygr.lag.model import GroupMember, GroupSnapshot, PartitionOffsets, Snapshot, owner_split
from relaygr.lag.monitor import LagMonitor, MonitorState
from relaygr.lag.report import LagTracker, TimeLag, TimeLagSource
from relaygr.lag.settings import LagSettings
from relaygr.lag.status import LagStatus
from relaygr.runtime.clock import ManualClock

PRE, RANK = "relaygr.preinfer", "relaygr.ranking"
TOPICS = (PRE, RANK)
GROUP = "relaygr.workers"
START_US = 1_794_010_590_000_000
START_MS = START_US // 1000


def member(name: str, *partitions: tuple[str, int]) -> GroupMember:
    return GroupMember(f"{name}-id", name, "/10.0.0.1", name, frozenset(TopicPartition(*tp) for tp in partitions))


def group(
    members: tuple[GroupMember, ...] | None, offsets: tuple[PartitionOffsets, ...] = (), state: str = "stable"
) -> GroupSnapshot:
    return GroupSnapshot(GROUP, state, "classic", "range", members, offsets)


def snapshot(
    second: int, members: tuple[GroupMember, ...] | None, *offsets: tuple[str, int, int | None, int]
) -> Snapshot:
    rows = tuple(
        PartitionOffsets(TopicPartition(topic, partition), committed, end)
        for topic, partition, committed, end in offsets
    )
    return Snapshot("cluster", second * 1_000_000, START_US + second * 1_000_000, (group(members, rows),))


@pytest.mark.parametrize(
    ("members", "split"),
    [
        pytest.param((member("a", (PRE, 0), (RANK, 0)), member("b", (PRE, 1), (RANK, 1))), set(), id="whole sets"),
        pytest.param((member("a", (PRE, 0), (RANK, 1)), member("b", (PRE, 1), (RANK, 0))), {0, 1}, id="crossed"),
        pytest.param((member("a", (PRE, 0), (RANK, 0), (PRE, 1)),), {1}, id="one topic has fewer partitions"),
        pytest.param((member("a", (PRE, 0), (RANK, 0)), member("b", (RANK, 1))), {1}, id="one topic only"),
        pytest.param((), set(), id="nobody"),
        pytest.param(None, set(), id="members not known"),
    ],
)
def test_an_owner_split_is_a_partition_without_one_owner_for_all_topics(
    members: tuple[GroupMember, ...] | None, split: set[int]
) -> None:
    assert owner_split(group(members), TOPICS) == split


@pytest.mark.parametrize(("start", "end"), [(0, 32), (0, 0), (7, 32)])
def test_the_commit_of_a_topic_that_was_made_anew_leaves_its_whole_log_to_read(start: int, end: int) -> None:
    """A group that had committed 65 was said to keep up with a log of 32 messages, of which it read none."""
    tracker = LagTracker(LagSettings(), {})
    offsets = PartitionOffsets(TopicPartition(RANK, 0), 65, end, start)
    last = Snapshot("cluster", 0, 0, (group((member("a", (RANK, 0)),), (offsets,)),))
    tracker.observe(last)
    [found] = tracker.report(last).groups
    assert (found.status, found.lag, found.lost) == (LagStatus.BEYOND_END, end - start, 0)


def test_nothing_is_said_of_owners_amid_a_rebalance() -> None:
    crossed = (member("a", (PRE, 0)), member("b", (RANK, 0)))
    assert owner_split(group(crossed, state="preparing_rebalancing"), TOPICS) == frozenset()


def test_lag_is_never_negative_and_no_commit_is_no_lag() -> None:
    assert PartitionOffsets(TopicPartition(PRE, 0), 9, 7).lag == 0
    assert PartitionOffsets(TopicPartition(PRE, 0), None, 7).lag is None


def test_a_report_tells_sums_the_worst_partition_and_who_owns_it() -> None:
    tracker = LagTracker(LagSettings(window_polls=3), {GROUP: TOPICS})
    owner = member("a", (PRE, 0), (RANK, 0))
    for second in range(4):
        poll = snapshot(second, (owner,), (PRE, 0, 5, 5 + second), (RANK, 0, 7, 7), (RANK, 1, None, 0))
        tracker.observe(poll)
    report = tracker.report(poll)
    [reported] = report.groups
    assert report.settled
    assert (reported.lag, reported.max_lag, reported.without_commit) == (3, 3, 1)
    assert reported.max_time_lag == TimeLag(2.0, TimeLagSource.INTERPOLATED)
    assert reported.status is report.status is LagStatus.STALL
    assert [row.owner for row in reported.partitions] == [owner, owner, None]


def test_a_record_is_read_where_polls_can_not_tell_and_only_once() -> None:
    tracker = LagTracker(LagSettings(), {})
    poll = snapshot(0, None, (PRE, 0, 5, 9), (PRE, 1, 3, 3))
    tracker.observe(poll)
    tp = TopicPartition(PRE, 0)
    assert tracker.unknown_times(poll) == {tp: 5}
    tracker.learn({tp: (5, START_MS - 2_000)})
    assert tracker.unknown_times(poll) == {}
    assert tracker.report(poll).groups[0].partitions[0].time_lag == TimeLag(2.0, TimeLagSource.RECORD)


def test_groups_at_different_places_of_one_log_keep_their_lag_in_seconds() -> None:
    """The record that was read for one group replaced that of the other, so that each had a lag at every other poll."""
    tracker = LagTracker(LagSettings(), {})
    tp = TopicPartition(RANK, 0)
    read: list[int] = []
    for second in range(4):
        groups = tuple(
            GroupSnapshot(name, "stable", "classic", "range", None, (PartitionOffsets(tp, committed, 1000),))
            for name, committed in (("a", 10), ("b", 500), ("c", 10))
        )
        poll = Snapshot("cluster", second * 1_000_000, START_US + second * 1_000_000, groups)
        tracker.observe(poll)
        unknown = tracker.unknown_times(poll)
        read += unknown.values()
        tracker.learn({place: (offset, START_MS - 100_000 + offset) for place, offset in unknown.items()})
    assert read == [10, 500], "each record once, also for two groups"
    lags = [row.max_time_lag for row in tracker.report(poll).groups]
    assert lags == [TimeLag(seconds, TimeLagSource.RECORD) for seconds in (102.99, 102.5, 102.99)]


def test_a_record_whose_time_can_not_be_true_leaves_the_lag_in_seconds_unknown() -> None:
    """The group showed 0 s at most while messages waited on a partition whose lag in seconds nobody knew."""
    tracker = LagTracker(LagSettings(), {})
    poll = snapshot(0, None, (PRE, 0, 5, 9), (PRE, 1, 3, 3))
    tracker.observe(poll)
    tracker.learn({TopicPartition(PRE, 0): (5, START_MS // 1000)})
    assert tracker.unknown_times(poll) == {}, "the record is not read again"
    [reported] = tracker.report(poll).groups
    assert [row.time_lag for row in reported.partitions] == [None, TimeLag(0.0, TimeLagSource.CAUGHT_UP)]
    assert (reported.lag, reported.max_time_lag) == (4, None)


def test_a_record_is_forgotten_when_its_group_has_moved_on() -> None:
    tracker = LagTracker(LagSettings(), {})
    tp = TopicPartition(PRE, 0)
    for committed in (5, 6, 5):
        poll = snapshot(0, None, (PRE, 0, committed, 9))
        tracker.observe(poll)
        assert tracker.unknown_times(poll) == {tp: committed}
        tracker.learn({tp: (committed, START_MS)})


def test_a_group_that_is_gone_is_forgotten() -> None:
    tracker = LagTracker(LagSettings(window_polls=3), {})
    for second in range(5):
        tracker.observe(snapshot(second, None, (PRE, 0, 5, 9)))
    tracker.observe(Snapshot("cluster", 6_000_000, 0, ()))
    back = snapshot(7, None, (PRE, 0, 5, 9))
    tracker.observe(back)
    assert tracker.report(back).status is LagStatus.JUDGING, "polls before the group was gone do not count"


class Scrapes:
    """An exporter with a monitor that never polls a cluster."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        settings = LagSettings(interval_s=1)
        self.monitor = LagMonitor(KafkaSession(KafkaSettings(), "test"), settings, clock=self.clock)
        self.registry = CollectorRegistry()
        self.exporter = LagExporter(self.monitor, settings, self.clock)
        self.registry.register(self.exporter)

    def show(self, poll: Snapshot) -> None:
        tracker = LagTracker(LagSettings(), {GROUP: TOPICS})
        tracker.observe(poll)
        self.monitor.state = MonitorState(tracker.report(poll), polls=1)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"cluster_name": "cluster", "group": GROUP, **labels})


def test_metrics_have_the_names_and_labels_that_dashboards_know() -> None:
    scrapes = Scrapes()
    scrapes.show(snapshot(0, (member("a", (PRE, 0)),), (PRE, 0, 5, 9), (RANK, 0, 5, 5)))
    owner = {"topic": PRE, "partition": "0", "member_host": "/10.0.0.1", "consumer_id": "a-id", "client_id": "a"}
    assert scrapes.value("kafka_consumergroup_group_lag", **owner) == 4
    assert scrapes.value("kafka_consumergroup_group_offset", **owner) == 5
    assert scrapes.value("kafka_consumergroup_group_max_lag") == 4
    assert scrapes.value("kafka_consumergroup_group_sum_lag") == 4
    assert scrapes.value("kafka_consumergroup_group_max_lag_seconds") is None, "that of one partition is not known"
    assert scrapes.value("relaygr_lag_group_status", status="judging") == 1
    assert scrapes.value("relaygr_lag_owner_split_partitions") == 1
    nobody = {"topic": RANK, "partition": "0", "member_host": "", "consumer_id": "", "client_id": ""}
    assert scrapes.value("kafka_consumergroup_group_lag_seconds", **nobody) == 0


def test_a_group_that_could_not_be_measured_has_no_figures() -> None:
    """Its lag was 0 and its owners were not split, so a scaler took workers away."""
    scrapes = Scrapes()
    unknown = GroupSnapshot(GROUP, "unknown", "unknown", "", None, (), ("Its coordinator is away",), answered=False)
    other = GroupSnapshot("other", "stable", "classic", "range", (), (PartitionOffsets(TopicPartition(PRE, 0), 5, 9),))
    scrapes.show(Snapshot("cluster", 0, START_US, (unknown, other)))
    assert scrapes.value("relaygr_lag_group_status", status="unknown") == 1
    assert scrapes.value("relaygr_lag_group_status", status="ok") == 0
    exported = {
        sample.name
        for metric in scrapes.registry.collect()
        for sample in metric.samples
        if sample.labels.get("group") == GROUP
    }
    assert exported == {"relaygr_lag_group_status"}
    assert scrapes.value("kafka_consumergroup_group_sum_lag", group="other") == 4


def test_messages_that_retention_deleted_unread_are_lost_and_not_behind() -> None:
    scrapes = Scrapes()
    offsets = PartitionOffsets(TopicPartition(PRE, 0), committed=5, end=30, start=20)
    assert (offsets.position, offsets.lag, offsets.lost) == (20, 10, 15)
    scrapes.show(Snapshot("cluster", 0, 0, (group(None, (offsets,)),)))
    labels = {"topic": PRE, "partition": "0", "member_host": "", "consumer_id": "", "client_id": ""}
    assert scrapes.value("kafka_consumergroup_group_messages_lost", **labels) == 15
    assert scrapes.value("kafka_consumergroup_group_lag", **labels) == 10
    log = {"cluster_name": "cluster", "topic": PRE, "partition": "0"}
    assert scrapes.registry.get_sample_value("kafka_partition_earliest_offset", log) == 20


def test_figures_that_are_too_old_are_not_exported() -> None:
    scrapes = Scrapes()
    scrapes.show(snapshot(0, None, (PRE, 0, 5, 9)))
    assert scrapes.value("kafka_consumergroup_group_sum_lag") == 4
    scrapes.clock.advance_us(int(scrapes.exporter.max_age_s * 1e6) + 1)
    assert scrapes.value("kafka_consumergroup_group_sum_lag") is None
    assert scrapes.registry.get_sample_value("relaygr_lag_polls_total") == 1


def test_a_poll_that_fails_or_is_overdue_is_a_problem_at_once() -> None:
    """The probe was ready for nine seconds after the broker had died, with figures of before."""
    scrapes = Scrapes()
    assert scrapes.exporter.problem == "not polled yet"
    scrapes.show(snapshot(0, None, (PRE, 0, 5, 9)))
    assert scrapes.exporter.problem is None
    scrapes.clock.advance_us(int(scrapes.exporter.overdue_s * 1e6) + 1)
    assert scrapes.exporter.problem == "Kafka has not answered for 5.0 s"
    scrapes.monitor.state = MonitorState(scrapes.monitor.state.report, "Kafka does not answer", polls=2, failures=1)
    assert scrapes.exporter.problem == "Kafka does not answer"
