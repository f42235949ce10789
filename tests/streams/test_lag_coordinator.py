"""The broker that coordinates one group is down: the lag of the other groups is measured all the same."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.cluster.admin import create_topics
from relaygr.cluster.rights import Role, missing_rights
from relaygr.devbroker.kafka import KafkaCluster
from relaygr.kafka.clients import ProducerKind, make_admin, make_group_consumer, make_producer
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.lag.monitor import LagMonitor
from relaygr.lag.report import GroupReport, LagReport
from relaygr.lag.settings import LagSettings
from relaygr.lag.status import LagStatus
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from tests.worlds.own_broker import own_cluster

pytestmark = [pytest.mark.kafka, pytest.mark.outage, pytest.mark.timeout(480)]

WAIT_S = 120


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    with own_cluster(3, {"offsets.topic.replication.factor": 1}) as cluster:
        yield cluster


def coordinator(admin: AdminClient, kafka: KafkaSettings, group: str) -> int:
    """The broker that coordinates a group. The group is created by a commit of offset 1."""
    topic = kafka.topic(Topic.RETRIEVAL if group == kafka.trigger_group else Topic.RANKING)
    consumer = make_group_consumer(kafka, group, "test")
    ends_s = time.monotonic() + WAIT_S
    while time.monotonic() < ends_s:
        with suppress(KafkaException):  # The coordinator loads.
            consumer.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
            break
    consumer.close()
    [described] = admin.describe_consumer_groups([group]).values()
    return int(described.result(30).coordinator.id)


def poll_until(monitor: LagMonitor, measured: set[str]) -> LagReport:
    """Polls until exactly these groups are measured."""
    ends_s, last = time.monotonic() + WAIT_S, "no report"
    while time.monotonic() < ends_s:
        try:
            report = monitor.poll()
        except RelayError as error:
            last = str(error)  # While the broker is down and not yet replaced.
            continue
        if {group.group for group in report.groups if group.lag is not None} == measured:
            return report
        last = str([(group.group, group.lag, group.problems) for group in report.groups])
    raise AssertionError(last)


def named(report: LagReport, name: str) -> GroupReport:
    [found] = [group for group in report.groups if group.group == name]
    return found


@pytest.mark.parametrize("way", ["killed", "frozen"])
def test_the_others_are_measured_while_one_coordinator_is_down(cluster: KafkaCluster, way: str) -> None:
    """`relaygr lag` said that Kafka does not answer, while the relay worked, and a scaler read its silence as 0."""
    admin = make_admin(KafkaSettings(bootstrap=cluster.bootstrap), "test")
    for number in itertools.count():
        kafka = KafkaSettings(
            bootstrap=cluster.bootstrap, group_prefix=f"{way}-{number}", topic_prefix=way, partitions=4,
            replication_factor=3,
        )  # fmt: skip
        create_topics(kafka)
        victim = coordinator(admin, kafka, kafka.trigger_group)
        if coordinator(admin, kafka, kafka.workers_group) != victim:
            break
    others = (f"{kafka.group_prefix}.{place}" for place in itertools.count())
    unlisted = next(group for group in others if coordinator(admin, kafka, group) == victim)
    producer = make_producer(kafka, ProducerKind.DURABLE, "test")
    for _ in range(3):
        producer.produce(kafka.topic(Topic.RANKING), b"x", partition=0)
        producer.produce(kafka.topic(Topic.RETRIEVAL), b"x", partition=0)
    assert producer.flush(30) == 0
    monitor = LagMonitor(KafkaSession(kafka, "test"), LagSettings())
    everyone = {group.group for group in poll_until(monitor, {*_groups(monitor)}).groups}
    assert {kafka.workers_group, kafka.trigger_group, unlisted} <= everyone
    away = {group for group in everyone if coordinator(admin, kafka, group) == victim}

    if way == "killed":
        cluster.kill(victim)
    else:
        cluster.freeze(victim)
    try:
        report = poll_until(monitor, everyone - away)
        assert named(report, kafka.workers_group).lag == 2
        for group in (kafka.trigger_group, unlisted):
            unknown = named(report, group)
            assert (unknown.status, unknown.max_time_lag) == (LagStatus.UNKNOWN, None)
            assert any("coordinator of the group does not answer" in problem for problem in unknown.problems)
        if way == "killed":
            result = CliRunner().invoke(
                app, ["lag", "--bootstrap", kafka.bootstrap, "--set", f"group_prefix={kafka.group_prefix}",
                      "--set", f"topic_prefix={kafka.topic_prefix}", "--set", "partitions=4"]
            )  # fmt: skip
            assert result.exit_code == LagStatus.UNKNOWN.exit_code, result.output
            assert f"{kafka.workers_group}  STOP  2 messages behind" in result.output
            assert f"{kafka.trigger_group}  UNKNOWN  lag unknown" in result.output
            assert missing_rights(kafka, Role.LAG) == (), "a group whose coordinator is away is left out"
    finally:
        if way == "frozen":
            cluster.kill(victim)
        cluster.start(victim)
    report = poll_until(monitor, everyone)
    assert named(report, kafka.trigger_group).lag == 2
    monitor.stop()


def _groups(monitor: LagMonitor) -> list[str]:
    return [group.group for group in monitor.poll().groups]
