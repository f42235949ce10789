"""Creating and checking topics, on a real Kafka and on the embedded cluster."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

from relaygr.devbroker import LocalBroker
from relaygr.kafka.admin import check_topics, create_topics, delete_topics, require_topics
from relaygr.kafka.clients import make_admin
from relaygr.kafka.rights import Role
from relaygr.kafka.settings import Affinity, KafkaSettings
from relaygr.kafka.topic_check import Severity
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import CATALOGUE, Topic
from tests.worlds.own_broker import own_broker


def fresh(broker: LocalBroker, partitions: int = 12) -> KafkaSettings:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    return broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=partitions))


def eventually(holds: Callable[[], bool]) -> None:
    """Waits for a condition: brokers apply a change some time after the controller has acknowledged it."""
    ends_s = time.monotonic() + 10
    while not holds() and time.monotonic() < ends_s:
        time.sleep(0.02)


@pytest.mark.slow
def test_topics_that_were_created_pass_the_check(kafka_settings: KafkaSettings) -> None:
    found = require_topics(kafka_settings, Role.ADMIN)
    assert found.ok
    assert {row.topic: row.partitions for row in found.rows} == {
        topic: spec.partition_count(kafka_settings.partitions) for topic, spec in CATALOGUE.items()
    }


def test_a_start_without_topics_is_refused_with_the_command_that_makes_them(broker: LocalBroker) -> None:
    kafka = fresh(broker)
    with pytest.raises(RelayError, match="run `relaygr topics create`") as refusal:
        require_topics(kafka, Role.ADMIN)
    assert kafka.topic(Topic.RANKING) in str(refusal.value)
    assert kafka.bootstrap in str(refusal.value)


def test_the_embedded_cluster_creates_no_topics_for_others_and_says_who_does(embedded_broker: LocalBroker) -> None:
    with pytest.raises(RelayError, match=r"embedded cluster.*the process that started it"):
        create_topics(fresh(embedded_broker))


@pytest.mark.kafka
def test_creation_can_be_repeated_and_says_what_it_made(real_broker: LocalBroker) -> None:
    kafka = fresh(real_broker)
    planned = create_topics(kafka, dry_run=True)
    assert all(row.created for row in planned.rows)
    assert all(row.partitions is None for row in check_topics(kafka).rows)
    first = create_topics(kafka)
    assert first.ok
    assert all(row.created for row in first.rows)
    again = create_topics(kafka)
    assert again.ok
    assert not any(row.created for row in again.rows)
    assert len(delete_topics(kafka)) == len(CATALOGUE)


@pytest.mark.kafka
def test_a_topic_with_another_count_is_refused_before_anything_is_created(real_broker: LocalBroker) -> None:
    kafka = fresh(real_broker)
    admin = make_admin(kafka, "test")
    for future in admin.create_topics([NewTopic(kafka.topic(Topic.RANKING), num_partitions=3)]).values():
        future.result(15)
    eventually(lambda: kafka.topic(Topic.RANKING) in admin.list_topics(timeout=5).topics)
    with pytest.raises(RelayError, match=r"set `partitions` to 3.*`topic_prefix`"):
        create_topics(kafka)
    assert sum(row.partitions is not None for row in check_topics(kafka).rows) == 1
    delete_topics(kafka)


@pytest.mark.kafka
def test_settings_that_someone_changed_are_found_and_repaired(real_broker: LocalBroker) -> None:
    kafka = fresh(real_broker)
    create_topics(kafka)
    admin = make_admin(kafka, "test")
    changed = ConfigResource(
        ConfigResource.Type.TOPIC,
        kafka.topic(Topic.HISTORY),
        incremental_configs=[
            ConfigEntry("cleanup.policy", "delete", incremental_operation=AlterConfigOpType.SET),
            ConfigEntry("segment.ms", "1000000", incremental_operation=AlterConfigOpType.SET),
        ],
    )
    for future in admin.incremental_alter_configs([changed]).values():
        future.result(15)
    eventually(lambda: len(check_topics(kafka).findings) == 2)
    found = check_topics(kafka)
    assert [finding.severity for finding in found.findings] == [Severity.ERROR, Severity.WARNING]
    assert {finding.topic for finding in found.findings} == {kafka.topic(Topic.HISTORY)}
    assert create_topics(kafka, repair=True).findings == ()
    delete_topics(kafka)


@pytest.mark.kafka
def test_more_replicas_than_brokers_are_refused_with_the_number_that_fits(real_broker: LocalBroker) -> None:
    kafka = fresh(real_broker).model_copy(update={"replication_factor": 31})
    with pytest.raises(RelayError, match=r"replication_factor is 31, .* has \d+ broker"):
        create_topics(kafka)


KAFKAS_DEFAULTS = {
    "group.consumer.heartbeat.interval.ms": "5000",
    "group.consumer.min.heartbeat.interval.ms": "5000",
    "group.consumer.session.timeout.ms": "45000",
    "group.consumer.min.session.timeout.ms": "45000",
}


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("properties", "told"),
    [
        (KAFKAS_DEFAULTS, r"heartbeat\.interval\.ms=5000.*to 200 on the brokers, or set `affinity` to range"),
        ({"group.coordinator.rebalance.protocols": "classic"}, r"do not offer group\.protocol=consumer.*use Kafka 4"),
    ],
    ids=["Kafka's defaults", "switched off"],
)
def test_a_start_with_the_consumer_protocol_is_refused_by_brokers_that_do_not_suit_it(
    properties: dict[str, str], told: str
) -> None:
    with own_broker({}, properties) as broker:
        kafka = KafkaSettings(bootstrap=broker.bootstrap, partitions=1)
        create_topics(kafka)
        for role in (Role.TRIGGER, Role.WORKER):
            assert require_topics(kafka, role).ok
            with pytest.raises(RelayError, match=told):
                require_topics(kafka.model_copy(update={"affinity": Affinity.CONSUMER_PROTOCOL}), role)


@pytest.mark.kafka
def test_one_topic_creates_no_topic_of_jobs(real_broker: LocalBroker) -> None:
    kafka = fresh(real_broker).model_copy(update={"affinity": Affinity.ONE_TOPIC})
    found = create_topics(kafka)
    assert found.ok and Topic.PREINFER not in {row.topic for row in found.rows}
    assert kafka.topic(Topic.PREINFER) not in make_admin(kafka, "test").list_topics(timeout=10).topics
    delete_topics(kafka)
