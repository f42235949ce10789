"""The last lag report as Prometheus metrics. A scrape sends no request to Kafka.

The metrics have the names and labels of kafka-lag-exporter, which public dashboards use; additional ones begin with
`relaygr_lag_`. A figure that is unknown is not exported, because 0 would look like a group that keeps up. A report
older than `max_age_s` is not exported, because constant values would look like a stalled group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relaygr.lag.monitor import LagMonitor
from relaygr.lag.report import GroupReport, LagReport, PartitionReport
from relaygr.lag.settings import LagSettings
from relaygr.lag.status import LagStatus
from relaygr.runtime.clock import Clock, SystemClock

_GROUP: Final = ["cluster_name", "group"]
_PARTITION: Final = ["cluster_name", "group", "topic", "partition", "member_host", "consumer_id", "client_id"]
_POLLS_KEPT: Final = 3
_MARGIN_S: Final = 3.0
"""A poll that takes longer is overdue: Kafka is frozen or dead."""


class LagExporter(Collector):
    """A collector to register in a Prometheus registry."""

    def __init__(self, monitor: LagMonitor, settings: LagSettings, clock: Clock | None = None) -> None:
        self._monitor = monitor
        self._clock = clock or SystemClock()
        self._cluster_name = settings.cluster_name
        self.overdue_s = settings.interval_s + settings.record_timeout_s + _MARGIN_S
        self.max_age_s = _POLLS_KEPT * settings.interval_s + settings.request_timeout_s + settings.record_timeout_s

    @property
    def fresh_report(self) -> LagReport | None:
        """The last report; None if it is too old or if there is none."""
        report = self._monitor.state.report
        if report is None or self._clock.monotonic_us() - report.polled_at_us > self.max_age_s * 1e6:
            return None
        return report

    @property
    def problem(self) -> str | None:
        """Why lag is not measured now; None if the last poll succeeded and the next one is not overdue."""
        state = self._monitor.state
        if state.error is not None:
            return state.error
        if state.report is None:
            return "not polled yet"
        silent_s = (self._clock.monotonic_us() - state.report.polled_at_us) / 1e6
        if silent_s > self.overdue_s:
            return f"Kafka has not answered for {silent_s:.1f} s"
        return None

    def describe(self) -> Iterable[Metric]:
        """Describes nothing, because the series depend on the cluster."""
        return ()

    def collect(self) -> Iterable[Metric]:
        state, report = self._monitor.state, self.fresh_report
        polls = CounterMetricFamily("relaygr_lag_polls", "Polls of the Kafka cluster")
        polls.add_metric([], state.polls)
        failures = CounterMetricFamily("relaygr_lag_poll_failures", "Polls that failed")
        failures.add_metric([], state.failures)
        yield polls
        yield failures
        if report is not None:
            yield from _metrics(report, self._cluster_name or report.cluster_id)


def _metrics(report: LagReport, cluster: str) -> Iterable[Metric]:
    offset = GaugeMetricFamily("kafka_consumergroup_group_offset", "Committed offset of the group", labels=_PARTITION)
    lag = GaugeMetricFamily("kafka_consumergroup_group_lag", "Lag in messages", labels=_PARTITION)
    seconds = GaugeMetricFamily("kafka_consumergroup_group_lag_seconds", "Lag in seconds", labels=_PARTITION)
    max_lag = GaugeMetricFamily(
        "kafka_consumergroup_group_max_lag", "Largest lag of a partition, in messages", labels=_GROUP
    )
    max_seconds = GaugeMetricFamily(
        "kafka_consumergroup_group_max_lag_seconds", "Largest lag of a partition, in seconds", labels=_GROUP
    )
    sum_lag = GaugeMetricFamily(
        "kafka_consumergroup_group_sum_lag", "Sum of the lag of all partitions, in messages", labels=_GROUP
    )
    topic_lag = GaugeMetricFamily(
        "kafka_consumergroup_group_topic_sum_lag", "Sum of the lag by topic, in messages", labels=[*_GROUP, "topic"]
    )
    latest = GaugeMetricFamily(
        "kafka_partition_latest_offset", "End offset of the log", labels=["cluster_name", "topic", "partition"]
    )
    earliest = GaugeMetricFamily(
        "kafka_partition_earliest_offset", "Start offset of the log", labels=["cluster_name", "topic", "partition"]
    )
    lost = GaugeMetricFamily(
        "kafka_consumergroup_group_messages_lost",
        "Messages deleted by retention that the group had not read",
        labels=_PARTITION,
    )
    status = GaugeMetricFamily(
        "relaygr_lag_group_status",
        "1 for the current status of the group, 0 for the others",
        labels=[*_GROUP, "status"],
    )
    split = GaugeMetricFamily(
        "relaygr_lag_owner_split_partitions",
        "Partitions that different members own on co-partitioned topics",
        labels=_GROUP,
    )
    ends: dict[tuple[str, int], int] = {}
    starts: dict[tuple[str, int], int] = {}
    for group in report.groups:
        labels = [cluster, group.group]
        if group.max_lag is not None and group.lag is not None:
            max_lag.add_metric(labels, group.max_lag)
            sum_lag.add_metric(labels, group.lag)
        if group.max_time_lag is not None:
            max_seconds.add_metric(labels, group.max_time_lag.seconds)
        if group.members is not None:
            split.add_metric(labels, len(group.owner_split))
        for name in LagStatus:
            status.add_metric([*labels, name.value], int(group.status is name))
        for topic, messages in _by_topic(group).items():
            topic_lag.add_metric([*labels, topic], messages)
        for row in group.partitions:
            row_labels = _labels(cluster, group, row)
            if row.committed is not None:
                offset.add_metric(row_labels, row.committed)
            if row.lag is not None:
                lag.add_metric(row_labels, row.lag)
            if row.time_lag is not None:
                seconds.add_metric(row_labels, row.time_lag.seconds)
            if row.end is not None:
                ends[(row.topic, row.partition)] = row.end
            if row.start is not None:
                starts[(row.topic, row.partition)] = row.start
                lost.add_metric(row_labels, row.lost)
    for (topic, partition), end in ends.items():
        latest.add_metric([cluster, topic, str(partition)], end)
    for (topic, partition), start in starts.items():
        earliest.add_metric([cluster, topic, str(partition)], start)
    return (
        offset, lag, seconds, max_lag, max_seconds, sum_lag, topic_lag, latest, earliest, lost, status, split,
    )  # fmt: skip


def _labels(cluster: str, group: GroupReport, row: PartitionReport) -> list[str]:
    owner = row.owner
    host, member_id, client_id = (owner.host, owner.member_id, owner.client_id) if owner else ("", "", "")
    return [cluster, group.group, row.topic, str(row.partition), host, member_id, client_id]


def _by_topic(group: GroupReport) -> dict[str, int]:
    sums: dict[str, int] = {}
    for row in group.partitions:
        if row.lag is not None:
            sums[row.topic] = sums.get(row.topic, 0) + row.lag
    return sums
