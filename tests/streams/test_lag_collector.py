"""Lag on real clusters: the figures equal those of Kafka's own tool, and values that cannot be read are reported."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from relaygr.cluster.admin import is_embedded
from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import ProducerKind, make_admin, make_group_consumer, make_producer
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import Affinity, KafkaSettings
from relaygr.lag.monitor import LagMonitor
from relaygr.lag.report import LagReport, PartitionReport, TimeLagSource
from relaygr.lag.settings import LagSettings
from relaygr.lag.status import LagStatus
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from tests.promised import unavailable
from tests.waiting import until

FAST = LagSettings(interval_s=0.1, window_polls=3)
PARTITIONS = 12


def send(kafka: KafkaSettings, topic: Topic, each: int, timestamp: int = 0) -> None:
    producer = make_producer(kafka, ProducerKind.DURABLE, "test")
    for partition in range(PARTITIONS):
        for _ in range(each):
            producer.produce(kafka.topic(topic), b"x" * 3000, partition=partition, timestamp=timestamp)
    assert producer.flush(10) == 0


def keep_for_ever(kafka: KafkaSettings, topic: Topic) -> None:
    """The broker would soon delete records of 1970. The embedded cluster deletes none, and has no settings."""
    admin = make_admin(kafka, "test")
    if is_embedded(admin.list_topics(timeout=10)):
        return
    entry = ConfigEntry("retention.ms", "-1", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, kafka.topic(topic), incremental_configs=[entry])
    for altered in admin.incremental_alter_configs([resource]).values():
        altered.result(10)


def commit(kafka: KafkaSettings, group: str, topic: str, offsets: dict[int, int]) -> None:
    """Commits offsets without joining, so the group has no members."""
    consumer = make_group_consumer(kafka, group, "test")
    consumer.commit(offsets=[TopicPartition(topic, p, o) for p, o in offsets.items()], asynchronous=False)
    consumer.close()


class PollingMember:
    """A group member that polls whenever `owns` is called."""

    def __init__(self, kafka: KafkaSettings, topics: list[Topic], name: str) -> None:
        self.consumer: Consumer = make_group_consumer(kafka, kafka.workers_group, name)
        self.consumer.subscribe([kafka.topic(topic) for topic in topics])

    def owns(self, count: int) -> bool:
        self.consumer.poll(0.02)
        return len(self.consumer.assignment()) == count


@pytest.fixture
def real_kafka(real_broker: LocalBroker) -> Iterator[KafkaSettings]:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    kafka = real_broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=PARTITIONS))
    real_broker.create_topics(kafka)
    yield kafka
    real_broker.delete_topics(kafka)


def rows(report: LagReport, topic: str) -> list[PartitionReport]:
    [group] = report.groups
    return [row for row in group.partitions if row.topic == topic]


def test_committed_offsets_ends_and_partitions_without_a_commit_are_told_apart(kafka_settings: KafkaSettings) -> None:
    kafka = kafka_settings
    ranking = kafka.topic(Topic.RANKING)
    send(kafka, Topic.RANKING, 5)
    commit(kafka, kafka.workers_group, ranking, {0: 2, 1: 5})
    monitor = LagMonitor(KafkaSession(kafka, "test"), FAST)
    report = monitor.poll()
    monitor.stop()
    [group] = report.groups
    assert group.group == kafka.workers_group
    measured = rows(report, ranking)
    assert [(row.committed, row.end, row.lag) for row in measured[:3]] == [(2, 5, 3), (5, 5, 0), (None, 5, None)]
    assert group.without_commit == 2 * PARTITIONS - 2
    assert measured[0].time_lag is not None
    assert measured[0].time_lag.source is TimeLagSource.RECORD
    assert 0 <= measured[0].time_lag.seconds < 30


def test_records_whose_time_stamps_are_seconds_have_an_unknown_lag_in_seconds(kafka_settings: KafkaSettings) -> None:
    """It was 1,794,010,590 s."""
    kafka = kafka_settings
    keep_for_ever(kafka, Topic.RANKING)
    send(kafka, Topic.RANKING, 5, timestamp=int(time.time()))
    commit(kafka, kafka.workers_group, kafka.topic(Topic.RANKING), {0: 2, 1: 5})
    monitor = LagMonitor(KafkaSession(kafka, "test"), FAST)
    [group] = monitor.poll().groups
    monitor.stop()
    measured = [row for row in group.partitions if row.topic == kafka.topic(Topic.RANKING)]
    assert [(row.lag, row.time_lag is None) for row in measured[:2]] == [(3, True), (0, False)]
    assert (group.lag, group.max_time_lag) == (3, None)


def test_seconds_come_from_polls_once_a_message_arrives_between_two(kafka_settings: KafkaSettings) -> None:
    kafka = kafka_settings
    commit(kafka, kafka.workers_group, kafka.topic(Topic.RANKING), dict.fromkeys(range(PARTITIONS), 0))
    monitor = LagMonitor(KafkaSession(kafka, "test"), FAST)
    until(lambda: all(row.end == 0 for row in monitor.poll().groups[0].partitions), "the new topic has leaders")
    send(kafka, Topic.RANKING, 1)
    report = monitor.poll()
    monitor.stop()
    sources = {row.time_lag.source for row in rows(report, kafka.topic(Topic.RANKING)) if row.time_lag}
    assert sources == {TimeLagSource.INTERPOLATED}


def test_the_embedded_cluster_measures_lag_and_says_that_members_are_not_known(embedded_broker: LocalBroker) -> None:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    kafka = embedded_broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=PARTITIONS))
    embedded_broker.create_topics(kafka)
    commit(kafka, kafka.workers_group, kafka.topic(Topic.RANKING), {0: 0})
    monitor = LagMonitor(KafkaSession(kafka, "test"), FAST)
    [group] = monitor.poll().groups
    monitor.stop()
    embedded_broker.delete_topics(kafka)
    assert group.members is None
    assert any("does not describe groups" in problem for problem in group.problems)


def test_a_group_that_was_asked_for_and_is_not_there_is_not_measured(kafka_settings: KafkaSettings) -> None:
    monitor = LagMonitor(KafkaSession(kafka_settings, "test"), FAST, ["no-such-group"])
    report = monitor.poll()
    monitor.stop()
    [group] = report.groups
    assert report.status is LagStatus.UNKNOWN
    assert any("no member and no commit" in problem for problem in group.problems)


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_an_error_with_its_address() -> None:
    monitor = LagMonitor(KafkaSession(KafkaSettings(bootstrap="127.0.0.1:1", connect_timeout_s=0.5), "test"), FAST)
    with pytest.raises(RelayError, match=r"127\.0\.0\.1:1"):
        monitor.poll()
    assert monitor.state.failures == 1
    monitor.stop()


@pytest.mark.kafka
def test_figures_equal_those_of_kafkas_own_tool_on_a_quiet_topic(real_kafka: KafkaSettings) -> None:
    home = os.environ.get("KAFKA_HOME")
    if not home:
        unavailable("broker", "the tool is in KAFKA_HOME")
    kafka = real_kafka
    member = PollingMember(kafka, [Topic.PREINFER, Topic.RANKING], "worker-00")
    until(lambda: member.owns(2 * PARTITIONS), "joined")
    send(kafka, Topic.RANKING, 7)
    ranking = kafka.topic(Topic.RANKING)
    offsets = [TopicPartition(ranking, partition, partition % 8) for partition in range(PARTITIONS - 1)]
    member.consumer.commit(offsets=offsets, asynchronous=False)

    tool = Path(home) / "bin" / "kafka-consumer-groups.sh"
    command = [str(tool), "--bootstrap-server", kafka.bootstrap, "--describe", "--group", kafka.workers_group]
    environment = {**os.environ, "KAFKA_HEAP_OPTS": "-Xmx128m"}
    said = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=True).stdout
    theirs = {}
    for line in said.splitlines():
        fields = line.split()
        if fields[:1] == [kafka.workers_group]:
            theirs[(fields[1], int(fields[2]))] = tuple(fields[3:9])
    monitor = LagMonitor(KafkaSession(kafka, "test"), FAST)
    report = monitor.poll()
    monitor.stop()
    member.consumer.close()

    def told(number: int | None) -> str:
        return "-" if number is None else str(number)

    ours = {}
    for row in report.groups[0].partitions:
        assert row.owner is not None
        ours[(row.topic, row.partition)] = (
            told(row.committed), told(row.end), told(row.lag),
            row.owner.member_id, row.owner.host, row.owner.client_id,
        )  # fmt: skip
    assert len(ours) == 2 * PARTITIONS
    assert ours == theirs


@pytest.mark.kafka
def test_a_member_of_one_topic_only_is_an_owner_split_and_whole_members_are_not(real_kafka: KafkaSettings) -> None:
    kafka = real_kafka
    whole = PollingMember(kafka, [Topic.PREINFER, Topic.RANKING], "whole")
    until(lambda: whole.owns(2 * PARTITIONS), "joined")
    monitor = LagMonitor(KafkaSession(kafka, "test"), FAST)
    assert monitor.poll().groups[0].owner_split == ()
    half = PollingMember(kafka, [Topic.RANKING], "half")
    until(lambda: whole.owns(18) and half.owns(6), "shared")
    [group] = monitor.poll().groups
    monitor.stop()
    whole.consumer.close()
    half.consumer.close()
    assert len(group.owner_split) == 6
    assert (group.state, group.members, group.assignor) == ("stable", 2, "range")


@pytest.mark.kafka
def test_a_group_of_the_new_protocol_is_measured_and_its_members_are_named(real_kafka: KafkaSettings) -> None:
    kafka = real_kafka.model_copy(update={"affinity": Affinity.CONSUMER_PROTOCOL})
    member = PollingMember(kafka, [Topic.PREINFER, Topic.RANKING], "worker-00")
    until(lambda: member.owns(2 * PARTITIONS), "joined")
    send(kafka, Topic.RANKING, 1)
    member.consumer.commit(offsets=[TopicPartition(kafka.topic(Topic.RANKING), 0, 0)], asynchronous=False)
    monitor = LagMonitor(KafkaSession(kafka, "test"), FAST)
    [group] = monitor.poll().groups
    monitor.stop()
    member.consumer.close()
    assert (group.protocol, group.members, group.lag) == ("consumer", 1, 1)
    assert {row.owner.client_id for row in group.partitions if row.owner} == {"worker-00"}


@pytest.mark.kafka
def test_a_group_without_members_that_is_behind_is_stopped(real_kafka: KafkaSettings) -> None:
    kafka = real_kafka
    send(kafka, Topic.RANKING, 2)
    commit(kafka, kafka.workers_group, kafka.topic(Topic.RANKING), {0: 1})
    monitor = LagMonitor(KafkaSession(kafka, "test"), FAST)
    for _ in range(FAST.window_polls):
        report = monitor.poll()
    monitor.stop()
    assert (report.groups[0].state, report.groups[0].members) == ("empty", 0)
    assert report.status is LagStatus.STOP


@pytest.mark.kafka
def test_a_group_whose_members_left_before_any_commit_does_not_make_the_others_unknown(
    real_kafka: KafkaSettings,
) -> None:
    """`relaygr lag` ended with 3 for ten minutes after a bridge had found only bad records, until Kafka forgot it."""
    kafka, group = real_kafka, f"{real_kafka.group_prefix}.bridge"
    commit(kafka, kafka.workers_group, kafka.topic(Topic.RANKING), {0: 0})
    member = make_group_consumer(kafka, group, "bridge", options={"enable.auto.commit": False})
    member.subscribe([kafka.topic(Topic.BEHAVIOURS)])
    until(lambda: bool(member.assignment()), "it has joined", meanwhile=lambda: member.poll(0.1))
    member.close()
    monitor = LagMonitor(KafkaSession(kafka, "test"), FAST)
    report = monitor.poll()
    monitor.stop()
    assert [each.group for each in report.groups] == [kafka.workers_group]
    assert report.status is not LagStatus.UNKNOWN


@pytest.mark.kafka
def test_a_group_that_kept_up_is_stopped_as_soon_as_its_last_member_has_gone(real_kafka: KafkaSettings) -> None:
    """It was ok for a whole window, since it had kept up at the window's beginning."""
    kafka = real_kafka
    member = PollingMember(kafka, [Topic.PREINFER, Topic.RANKING], "worker-00")
    until(lambda: member.owns(2 * PARTITIONS), "joined")
    offsets = [TopicPartition(kafka.topic(Topic.RANKING), partition, 0) for partition in range(PARTITIONS)]
    member.consumer.commit(offsets=offsets, asynchronous=False)
    monitor = LagMonitor(KafkaSession(kafka, "test"), LagSettings())
    for _ in range(3):
        assert monitor.poll().status is LagStatus.OK
    member.consumer.close()
    send(kafka, Topic.RANKING, 4)
    until(lambda: monitor.poll().groups[0].members == 0, "the member has left")
    assert monitor.state.report is not None
    assert monitor.state.report.status is LagStatus.STOP
    monitor.stop()


@pytest.mark.kafka
def test_a_topic_that_was_deleted_leaves_the_report_and_the_rest_is_measured(real_kafka: KafkaSettings) -> None:
    kafka = real_kafka
    group = f"{kafka.group_prefix}.other"
    admin: AdminClient = make_admin(kafka, "test")
    results, ranking = kafka.topic(Topic.RESULTS), kafka.topic(Topic.RANKING)
    commit(kafka, group, results, {0: 0})
    commit(kafka, group, ranking, {0: 0})
    monitor = LagMonitor(KafkaSession(kafka, "test"), FAST, [group])
    assert {row.topic for row in monitor.poll().groups[0].partitions} == {results, ranking}
    [deletion] = admin.delete_topics([results]).values()
    deletion.result(30)
    until(lambda: {row.topic for row in monitor.poll().groups[0].partitions} == {ranking}, "the topic is gone")
    assert monitor.poll().groups[0].partitions[0].committed == 0
    monitor.stop()
