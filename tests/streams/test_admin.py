"""Creating and checking topics, on a real Kafka and on the embedded cluster."""

from __future__ import annotations

import os
import subprocess
import uuid
import zipfile
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

import relaygr.cluster.admin
from relaygr.cluster.admin import (
    SHARE_GROUP,
    _await_brokers,
    _metadata,
    _topic_configs,
    check_topics,
    create_topics,
    delete_topics,
    has_share_groups,
    require_topics,
)
from relaygr.cluster.rights import Resource, Right, Role, _allowed
from relaygr.cluster.topic_check import Severity
from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import make_admin
from relaygr.kafka.settings import Affinity, KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import CATALOGUE, Topic
from tests.promised import program, unavailable
from tests.waiting import until
from tests.worlds.own_broker import own_broker, own_cluster

APPLIED = "the brokers have applied the change, some time after the controller acknowledged it"


def fresh(broker: LocalBroker, partitions: int = 12) -> KafkaSettings:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    return broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=partitions))


@pytest.mark.slow
def test_topics_that_were_created_pass_the_check(kafka_settings: KafkaSettings) -> None:
    found = require_topics(kafka_settings, Role.ADMIN)
    assert found.ok
    assert {row.topic: row.partitions for row in found.rows} == {
        topic: spec.partition_count(kafka_settings.partitions) for topic, spec in CATALOGUE.items()
    }


def test_a_broker_that_has_not_heard_of_a_new_topic_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
    asked: list[list[str]] = []

    class SlowBroker:
        def describe_configs(self, resources: list[ConfigResource], **_: Any) -> dict[ConfigResource, Future[Any]]:
            asked.append([each.name for each in resources])
            answers: dict[ConfigResource, Future[Any]] = {each: Future() for each in resources}
            for resource, future in answers.items():
                if resource.name == "new" and len(asked) < 3:
                    future.set_exception(unknown)
                else:
                    future.set_result({"retention.ms": ConfigEntry("retention.ms", "60000")})
            return answers

    slow: Any = SlowBroker()
    expected = {"retention.ms": "60000"}
    assert _topic_configs(slow, ["old", "new"]) == {"old": expected, "new": expected}
    assert asked == [["old", "new"], ["new"], ["new"]]
    monkeypatch.setattr(relaygr.cluster.admin, "_HEARD_OF_TOPIC_S", 0)
    asked.clear()
    with pytest.raises(RelayError, match="The settings of new cannot be read"):
        _topic_configs(slow, ["new"])


def test_settings_that_a_cluster_does_not_tell_are_unknown_and_stop_nobody() -> None:
    """Some managed clusters do not know the request, refuse it as a whole, or answer without a value."""
    refusals = {"old": KafkaError._UNSUPPORTED_FEATURE, "managed": KafkaError.CLUSTER_AUTHORIZATION_FAILED}

    class Terse:
        def describe_configs(self, resources: list[ConfigResource], **_: Any) -> dict[ConfigResource, Future[Any]]:
            answers: dict[ConfigResource, Future[Any]] = {each: Future() for each in resources}
            for resource, future in answers.items():
                if resource.name in refusals:
                    future.set_exception(KafkaException(KafkaError(refusals[resource.name])))
                else:
                    values = {"retention.ms": "60000", "min.insync.replicas": None}
                    future.set_result({key: SimpleNamespace(name=key, value=value) for key, value in values.items()})
            return answers

    terse: Any = Terse()
    assert _topic_configs(terse, ["old", "managed", "other"]) == {"other": {"retention.ms": "60000"}}


def test_rights_that_a_cluster_does_not_tell_are_not_demanded() -> None:
    class Old:
        def refuse(self, asked: Any, **_: Any) -> dict[str, Future[Any]]:
            future: Future[Any] = Future()
            future.set_exception(KafkaException(KafkaError(KafkaError._UNSUPPORTED_FEATURE)))
            return {"asked": future}

        describe_consumer_groups = refuse

        def describe_topics(self, topics: Any, **_: Any) -> dict[str, Future[Any]]:
            return {"t": self.refuse(topics)["asked"]}

    old: Any = Old()
    rights = [Right(Resource.TOPIC, "t", ("Read",)), Right(Resource.GROUP, "g", ("Read",))]
    assert _allowed(old, rights, 1) == [None, None]


class LateBroker:
    """Hears of a change of topics a few questions later."""

    def __init__(self, before: list[str], after: list[str], late: int) -> None:
        self._before, self._after, self._late = before, after, late
        self.asked = 0

    def list_topics(self, timeout: float) -> Any:
        assert timeout > 0
        self.asked += 1
        names = self._before if self.asked <= self._late else self._after
        topic = SimpleNamespace(partitions={0: SimpleNamespace(leader=1)})
        return SimpleNamespace(brokers={1: SimpleNamespace(id=1, host="b", port=1)}, topics=dict.fromkeys(names, topic))


@pytest.mark.parametrize(("before", "after", "exist"), [(["old"], ["old", "new"], True), (["new"], [], False)])
def test_a_command_ends_when_the_brokers_know_what_it_did_and_says_if_one_does_not(
    before: list[str], after: list[str], exist: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker: Any = LateBroker(before, after, late=4)
    _await_brokers(KafkaSettings(), broker, ["new"], exist=exist)
    assert broker.asked == 5
    monkeypatch.setattr(relaygr.cluster.admin, "ADMIN_TIMEOUT_S", 0.1)
    broker = LateBroker(before, after, late=1000)
    with pytest.raises(RelayError, match=r"broker 1 does not know the (creation|deletion) of new after"):
        _await_brokers(KafkaSettings(), broker, ["new"], exist=exist)


class NoBrokerAtFirst:
    """A cluster whose controller takes its brokers for dead for a moment."""

    def __init__(self, empty: int) -> None:
        self.empty = empty

    def list_topics(self, timeout: float) -> object:
        self.empty -= 1
        return SimpleNamespace(brokers={} if self.empty >= 0 else {1: SimpleNamespace(host="here", port=1)})


def test_a_cluster_that_lists_no_broker_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: Any = NoBrokerAtFirst(3)
    assert _metadata(KafkaSettings(), cluster).brokers
    monkeypatch.setattr(relaygr.cluster.admin, "ADMIN_TIMEOUT_S", 0.1)
    with pytest.raises(RelayError, match="lists no broker"):
        _metadata(KafkaSettings(), NoBrokerAtFirst(10**6))  # type: ignore[arg-type]


@pytest.mark.kafka
@pytest.mark.outage
def test_every_broker_of_a_cluster_knows_the_topics_when_their_creation_or_deletion_ends() -> None:
    with own_cluster(2) as cluster:
        kafka = KafkaSettings(bootstrap=cluster.bootstrap, partitions=5)
        addresses = cluster.bootstrap.split(",")
        for change in (create_topics, delete_topics):
            change(kafka)
            for address in addresses:
                admin = make_admin(KafkaSettings(bootstrap=address), "test")
                known = {kafka.topic(topic) for topic in CATALOGUE} & admin.list_topics(timeout=30).topics.keys()
                assert len(known) == (len(CATALOGUE) if change is create_topics else 0)


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
    until(lambda: kafka.topic(Topic.RANKING) in admin.list_topics(timeout=5).topics, APPLIED)
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
    until(lambda: len(check_topics(kafka).findings) == 2, APPLIED)
    found = check_topics(kafka)
    assert [finding.severity for finding in found.findings] == [Severity.ERROR, Severity.WARNING]
    assert {finding.topic for finding in found.findings} == {kafka.topic(Topic.HISTORY)}
    assert create_topics(kafka, repair=True).findings == ()
    delete_topics(kafka)


@pytest.mark.kafka
def test_more_replicas_than_brokers_are_refused_with_the_number_that_fits(real_broker: LocalBroker) -> None:
    kafka = fresh(real_broker).model_copy(update={"replication_factor": 31})
    with pytest.raises(
        RelayError, match=r"replication_factor is 31, .* has \d+ brokers? up: start the missing ones, or"
    ):
        create_topics(kafka)


POLICY = """
import java.util.Map;
import org.apache.kafka.common.errors.PolicyViolationException;
import org.apache.kafka.server.policy.AlterConfigPolicy;
import org.apache.kafka.server.policy.CreateTopicPolicy;

public class LeastSizes implements CreateTopicPolicy, AlterConfigPolicy {
    public void validate(CreateTopicPolicy.RequestMetadata topic) { check(topic.configs()); }
    public void validate(AlterConfigPolicy.RequestMetadata topic) { check(topic.configs()); }
    private void check(Map<String, String> settings) {
        if (Long.parseLong(settings.getOrDefault("segment.bytes", "52428800")) < 52428800)
            throw new PolicyViolationException("segment.bytes must be at least 52428800");
        if (Long.parseLong(settings.getOrDefault("segment.ms", "3600000")) < 3600000)
            throw new PolicyViolationException("segment.ms must be at least 3600000");
    }
    public void configure(Map<String, ?> settings) {}
    public void close() {}
}
"""
SHORT = [Topic.RETRIEVAL, Topic.PREINFER, Topic.PREINFER_POOL, Topic.RANKING, Topic.RESULTS, Topic.OVERFLOW]


@pytest.fixture
def home_with_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KAFKA_HOME with one more jar."""
    given, javac = os.environ.get("KAFKA_HOME") or unavailable("broker", "KAFKA_HOME is not set"), program("jdk")
    home, source = tmp_path / "kafka", tmp_path / "LeastSizes.java"
    (home / "libs").mkdir(parents=True)
    for path in (Path(given) / "bin", Path(given) / "config", *(Path(given) / "libs").glob("*.jar")):
        (home / path.relative_to(given)).symlink_to(path.resolve())
    source.write_text(POLICY)
    subprocess.run([javac, "-cp", f"{given}/libs/*", "-d", str(tmp_path), str(source)], check=True)
    with zipfile.ZipFile(home / "libs" / "policy.jar", "w") as jar:
        jar.write(source.with_suffix(".class"), "LeastSizes.class")
    monkeypatch.setenv("KAFKA_HOME", str(home))


@pytest.mark.kafka
@pytest.mark.usefixtures("home_with_policy")
def test_all_refusals_of_a_cluster_are_one_sentence_and_settings_meet_them() -> None:
    """Eight of nine topics were made, and `create` and `check` named each other as the remedy."""
    policies = dict.fromkeys(("create.topic.policy.class.name", "alter.config.policy.class.name"), "LeastSizes")
    with own_broker({}, policies) as broker:
        kafka = KafkaSettings(bootstrap=broker.bootstrap, partitions=1)
        short = ", ".join(map(kafka.topic, SHORT))
        for dry_run in (True, False):
            with pytest.raises(RelayError) as refusal:
                create_topics(kafka, dry_run=dry_run)
            said = str(refusal.value)
            assert "refuses to create 7 of 10 topics" in said and "set `topic_settings`" in said
            assert f"{short} (" in said and "segment.ms must be at least 3600000" in said
            assert "relaygr.workers (" in said and "segment.bytes must be at least 52428800" in said
            made = {row.topic for row in check_topics(kafka).rows if row.partitions is not None}
            assert made == (set() if dry_run else {Topic.HISTORY, Topic.BEHAVIOURS, Topic.DEAD_LETTERS})
        hour = {"segment.ms": 3_600_000}
        accepted: dict[Topic, dict[str, Any]] = {
            **dict.fromkeys(SHORT, hour),
            Topic.OVERFLOW: {"segment.ms": None},
            Topic.WORKERS: {"segment.bytes": 52_428_800, **hour},
        }
        fits = KafkaSettings(bootstrap=broker.bootstrap, partitions=1, topic_settings=accepted)
        assert create_topics(fits, dry_run=True).findings == create_topics(fits).findings == ()
        assert require_topics(fits, Role.WORKER).ok
        with pytest.raises(RelayError, match=r"refuses to set the settings of 7 of 10 topics, .*`topic_settings`"):
            create_topics(kafka, repair=True)
        assert {finding.severity for finding in check_topics(kafka).findings} == {Severity.WARNING}
        assert create_topics(fits, repair=True).findings == ()


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
def test_the_share_group_of_pre_infer_workers_begins_with_the_earliest_job(real_broker: LocalBroker) -> None:
    kafka = fresh(real_broker)
    create_topics(kafka)
    assert has_share_groups(kafka)
    admin = make_admin(kafka, "test")

    def settings() -> dict[str, str | None]:
        [future] = admin.describe_configs([ConfigResource(ConfigResource.Type.GROUP, kafka.pool_group)]).values()
        return {name: entry.value for name, entry in future.result().items()}

    until(lambda: SHARE_GROUP.items() <= settings().items(), APPLIED)


def test_the_embedded_cluster_has_no_share_groups(embedded_broker: LocalBroker) -> None:
    assert not has_share_groups(fresh(embedded_broker))


@pytest.mark.kafka
def test_one_topic_creates_no_topic_of_jobs(real_broker: LocalBroker) -> None:
    kafka = fresh(real_broker).model_copy(update={"affinity": Affinity.ONE_TOPIC})
    found = create_topics(kafka)
    assert found.ok and Topic.PREINFER not in {row.topic for row in found.rows}
    assert kafka.topic(Topic.PREINFER) not in make_admin(kafka, "test").list_topics(timeout=10).topics
    delete_topics(kafka)
