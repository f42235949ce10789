"""The pure comparison of a cluster's topics with the catalogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from relaygr.cluster.topic_check import Finding, Observed, ObservedTopic, Severity, compare, count_conflicts, report
from relaygr.kafka.settings import Affinity, KafkaSettings
from relaygr.schemas.topics import CATALOGUE, CO_PARTITIONED, Topic

KAFKA = KafkaSettings(partitions=16)
REPLICATED = KafkaSettings(partitions=16, replication_factor=3)
CONSUMER_PROTOCOL = KAFKA.model_copy(update={"affinity": Affinity.CONSUMER_PROTOCOL})
ONE_TOPIC = KAFKA.model_copy(update={"affinity": Affinity.ONE_TOPIC})
QUICK_BROKER = {
    "group.coordinator.rebalance.protocols": "classic,consumer,streams",
    "group.consumer.assignors": "uniform,range",
    "group.consumer.heartbeat.interval.ms": "200",
    "group.consumer.session.timeout.ms": "3000",
}


def as_wanted(kafka: KafkaSettings = KAFKA) -> dict[Topic, ObservedTopic]:
    return {
        topic: ObservedTopic(
            spec.partition_count(kafka.partitions), kafka.replication_factor, kafka.topic_config(topic)
        )
        for topic, spec in CATALOGUE.items()
    }


def with_config(topic: Topic, kafka: KafkaSettings = KAFKA, **changes: str) -> dict[Topic, ObservedTopic]:
    topics = as_wanted(kafka)
    config = {**(topics[topic].config or {}), **{key.replace("_", "."): value for key, value in changes.items()}}
    return {**topics, topic: replace(topics[topic], config=config)}


def only(findings: tuple[Finding, ...]) -> Finding:
    [finding] = findings
    return finding


def test_topics_as_the_catalogue_says_have_no_findings() -> None:
    found = report(Observed(as_wanted()), KAFKA, workers=2)
    assert found.ok
    assert found.findings == ()
    assert [row.partitions for row in found.rows] == [row.wanted_partitions for row in found.rows]


def test_missing_topics_are_one_error_that_names_the_command() -> None:
    topics = as_wanted()
    del topics[Topic.RANKING], topics[Topic.RESULTS]
    finding = only(compare(Observed(topics), KAFKA))
    assert finding.severity is Severity.ERROR
    assert "relaygr.ranking, relaygr.results do not exist" in finding.what
    assert "relaygr topics create" in finding.mend


@pytest.mark.parametrize("odd", CO_PARTITIONED)
def test_unequal_counts_of_co_partitioned_topics_are_an_error_that_lists_them(odd: Topic) -> None:
    topics = as_wanted()
    topics[odd] = replace(topics[odd], partitions=8)
    finding = only(compare(Observed(topics), KAFKA))
    assert finding.severity is Severity.ERROR
    assert f"relaygr.{odd} 8" in finding.what
    assert "topic_prefix" in finding.mend


def test_a_deployment_with_another_count_says_which_setting_fits_it() -> None:
    finding = only(compare(Observed(as_wanted(KafkaSettings(partitions=12))), KAFKA))
    assert finding.severity is Severity.ERROR
    assert "have 12 partitions each, the setting is 16" in finding.what
    assert finding.mend.startswith("set `partitions` to 12")


@pytest.mark.parametrize(
    ("topic", "severity"),
    [
        (Topic.RESULTS, Severity.ERROR),
        (Topic.WORKERS, Severity.ERROR),
        (Topic.OVERFLOW, Severity.WARNING),
        (Topic.DEAD_LETTERS, Severity.WARNING),
    ],
)
def test_another_count_elsewhere_is_as_bad_as_what_depends_on_it(topic: Topic, severity: Severity) -> None:
    topics = as_wanted()
    topics[topic] = replace(topics[topic], partitions=5)
    finding = only(compare(Observed(topics), KAFKA))
    assert (finding.severity, finding.topic) == (severity, f"relaygr.{topic}")


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({"cleanup_policy": "delete"}, Severity.ERROR),
        ({"max_message_bytes": "1000"}, Severity.ERROR),
        ({"retention_ms": "5"}, Severity.WARNING),
        ({"segment_ms": "5"}, Severity.WARNING),
        ({"segment_bytes": "5"}, Severity.WARNING),
        ({"max_compaction_lag_ms": "5"}, Severity.WARNING),
    ],
)
def test_a_setting_that_differs_is_found_with_both_values(changes: dict[str, str], severity: Severity) -> None:
    finding = only(compare(Observed(with_config(Topic.HISTORY, **changes)), KAFKA))
    [value] = changes.values()
    assert finding.severity is severity
    assert f"={value}" in finding.what
    assert "--repair" in finding.mend


def test_a_bound_in_bytes_which_would_delete_messages_before_their_time_is_found() -> None:
    """A topic that does not set it has the default of the brokers, and behaviours would be gone within hours."""
    finding = only(compare(Observed(with_config(Topic.BEHAVIOURS, retention_bytes="1073741824")), KAFKA))
    assert (finding.severity, finding.topic) == (Severity.WARNING, "relaygr.behaviours")
    assert "retention.bytes=1073741824, expected -1" in finding.what


def test_a_topic_that_takes_larger_messages_is_fine() -> None:
    assert compare(Observed(with_config(Topic.HISTORY, max_message_bytes="100000000")), KAFKA) == ()


def test_fewer_replicas_than_set_are_a_warning() -> None:
    finding = only(compare(Observed(as_wanted()), KAFKA.model_copy(update={"replication_factor": 3}))[:1])
    assert finding.severity is Severity.WARNING
    assert "1 replicas, the setting is 3" in finding.what


def test_only_topics_whose_messages_must_survive_need_more_than_one_replica_in_sync() -> None:
    least = {topic: REPLICATED.topic_config(topic)["min.insync.replicas"] for topic in Topic}
    assert {topic for topic, count in least.items() if count == "2"} == {
        Topic.HISTORY,
        Topic.BEHAVIOURS,
        Topic.DEAD_LETTERS,
    }
    assert {count for topic, count in least.items()} == {"1", "2"}
    assert compare(Observed(as_wanted(REPLICATED)), REPLICATED) == ()


@pytest.mark.parametrize(
    ("least", "severity", "what", "mend"),
    [
        ("4", Severity.ERROR, "min.insync.replicas=4, but 3 replicas: it refuses every message", "--repair"),
        ("1", Severity.WARNING, "min.insync.replicas=1, expected 2", "--repair"),
        ("3", Severity.WARNING, "min.insync.replicas=3, expected 2", "--repair"),
    ],
)
def test_a_durable_topic_with_another_number_of_replicas_in_sync_is_found(
    least: str, severity: Severity, what: str, mend: str
) -> None:
    finding = only(compare(Observed(with_config(Topic.HISTORY, REPLICATED, min_insync_replicas=least)), REPLICATED))
    assert finding.severity is severity
    assert what in finding.what and mend in finding.mend


def test_a_deployment_that_cannot_lose_one_broker_is_told_so() -> None:
    kafka = REPLICATED.model_copy(update={"min_insync_replicas": 3})
    for finding in compare(Observed(as_wanted(kafka)), kafka):
        assert finding.severity is Severity.WARNING
        assert "while any of their brokers is away" in finding.what
        assert finding.mend.startswith("set `min_insync_replicas` to 2")


def test_a_topic_that_refuses_messages_for_want_of_brokers_is_named() -> None:
    topics = {topic: replace(seen, in_sync=1) for topic, seen in as_wanted(REPLICATED).items()}
    findings = compare(Observed(topics), REPLICATED)
    assert {finding.topic for finding in findings} == {
        "relaygr.history",
        "relaygr.behaviours",
        "relaygr.dead-letters",
    }
    assert all("1 in sync: it refuses messages" in finding.what for finding in findings)
    assert all(finding.mend == "start the brokers that are away" for finding in findings)


def test_a_repair_never_asks_for_more_replicas_in_sync_than_a_topic_has() -> None:
    """It would make the topic refuse every message."""
    assert REPLICATED.topic_config(Topic.HISTORY, replicas=1)["min.insync.replicas"] == "1"


@pytest.mark.parametrize(
    ("observed", "what"),
    [
        ({"offsets_replicas": 1}, "__consumer_offsets has 1 replica: while a broker is away"),
        ({"broker_config": {"offsets.topic.replication.factor": "1"}}, "__consumer_offsets has 1 replica"),
        ({"broker_config": {"broker.session.timeout.ms": "9000"}}, "replaced after 9000 ms"),
    ],
)
def test_groups_that_do_not_survive_a_broker_are_a_warning_where_topics_are_replicated(
    observed: dict[str, Any], what: str
) -> None:
    finding = only(compare(Observed(as_wanted(REPLICATED), **observed), REPLICATED))
    assert finding.severity is Severity.WARNING
    assert what in finding.what
    assert compare(Observed(as_wanted(), **observed), KAFKA) == ()


@pytest.mark.parametrize(
    ("key", "topic"),
    [
        ("offsets.topic.replication.factor", "__consumer_offsets"),
        ("share.coordinator.state.topic.replication.factor", "__share_group_state"),
        ("transaction.state.log.replication.factor", "__transaction_state"),
    ],
)
def test_an_internal_topic_that_the_brokers_cannot_create_is_a_warning(key: str, topic: str) -> None:
    seen = Observed(as_wanted(), broker_config={key: "5"}, brokers=2)
    finding = only(compare(seen, KAFKA))
    assert finding.severity is Severity.WARNING
    assert f"{key}=5, but 2 brokers are up, so Kafka cannot create {topic}: " in finding.what
    assert finding.mend == f"set {key} to 2 on the brokers, or start 3 more"
    for works in ({"internal": frozenset((topic,))}, {"brokers": 5}, {"brokers": None}):
        assert compare(replace(seen, **works), KAFKA) == ()


def test_brokers_that_create_topics_by_themselves_are_a_warning() -> None:
    finding = only(compare(Observed(as_wanted(), broker_config={"auto.create.topics.enable": "true"}), KAFKA))
    assert finding.severity is Severity.WARNING
    assert "auto.create.topics.enable" in finding.mend


@pytest.mark.parametrize(("workers", "warned"), [(None, False), (2, False), (3, True)])
def test_fewer_than_eight_partitions_a_worker_are_a_warning(workers: int | None, warned: bool) -> None:
    assert bool(compare(Observed(as_wanted()), KAFKA, workers)) is warned


def test_the_embedded_cluster_is_checked_by_counts_and_that_is_said() -> None:
    topics = {topic: replace(seen, config=None) for topic, seen in as_wanted().items()}
    found = report(Observed(topics, embedded=True), KAFKA)
    assert found.ok
    assert only(found.findings).severity is Severity.NOTE
    assert "only existence and partition counts" in only(found.findings).what


def test_settings_that_may_not_be_read_are_noted() -> None:
    topics = as_wanted()
    topics[Topic.HISTORY] = replace(topics[Topic.HISTORY], config=None)
    assert "cannot be read" in only(compare(Observed(topics), KAFKA)).what


def test_errors_come_before_warnings_and_notes() -> None:
    topics = as_wanted()
    del topics[Topic.WORKERS]
    observed = Observed(topics, embedded=True, broker_config={"auto.create.topics.enable": "true"})
    severities = [finding.severity for finding in compare(observed, KAFKA)]
    assert severities == [Severity.ERROR, Severity.WARNING, Severity.NOTE]


def test_creation_is_held_up_by_counts_that_differ_but_not_by_missing_topics() -> None:
    topics = as_wanted()
    del topics[Topic.RETRIEVAL]
    assert count_conflicts(Observed(topics), KAFKA) == ()
    topics[Topic.RANKING] = replace(topics[Topic.RANKING], partitions=8)
    assert len(count_conflicts(Observed(topics), KAFKA)) == 1


@pytest.mark.parametrize(
    ("changes", "severity", "what", "mend"),
    [
        ({"group.coordinator.rebalance.protocols": "classic"}, Severity.ERROR, "do not offer", "use Kafka 4"),
        ({"group.consumer.heartbeat.interval.ms": None}, Severity.ERROR, "do not offer", "use Kafka 4"),
        ({"group.consumer.assignors": "uniform"}, Severity.ERROR, "lacks range", "add range"),
        ({"group.consumer.heartbeat.interval.ms": "5000", "group.consumer.session.timeout.ms": "15000"},
         Severity.ERROR, "interval.ms=5000", "to 200 on the brokers, or set `affinity` to range"),
        ({"group.consumer.session.timeout.ms": "500"}, Severity.ERROR, "less than 3 heartbeats", "raise"),
        ({"group.consumer.session.timeout.ms": "45000"}, Severity.WARNING, "timeout.ms=45000", "to 6000"),
    ],
)  # fmt: skip
def test_brokers_that_do_not_suit_the_consumer_protocol_are_found_with_what_to_set(
    changes: dict[str, str | None], severity: Severity, what: str, mend: str
) -> None:
    config = {name: value for name, value in {**QUICK_BROKER, **changes}.items() if value is not None}
    observed = Observed(as_wanted(), broker_config=config)
    finding = only(compare(observed, CONSUMER_PROTOCOL))
    assert finding.severity is severity
    assert what in finding.what and mend in finding.mend
    assert compare(observed, KAFKA) == (), "other modes do not need these settings"


def test_brokers_set_for_the_consumer_protocol_have_no_findings() -> None:
    assert compare(Observed(as_wanted(), broker_config=QUICK_BROKER), CONSUMER_PROTOCOL) == ()
    assignors = "org.apache.kafka.coordinator.group.assignor.RangeAssignor"
    named_by_class = {**QUICK_BROKER, "group.consumer.assignors": assignors}
    assert compare(Observed(as_wanted(), broker_config=named_by_class), CONSUMER_PROTOCOL) == ()


def test_brokers_whose_settings_cannot_be_read_are_noted() -> None:
    finding = only(compare(Observed(as_wanted()), CONSUMER_PROTOCOL))
    assert finding.severity is Severity.NOTE and "group.consumer" in finding.what


def test_one_topic_needs_no_topic_of_jobs_and_warns_of_one_that_exists() -> None:
    topics = as_wanted(ONE_TOPIC)
    finding = only(compare(Observed(topics), ONE_TOPIC))
    assert (finding.severity, finding.topic) == (Severity.WARNING, "relaygr.preinfer")
    del topics[Topic.PREINFER]
    found = report(Observed(topics), ONE_TOPIC)
    assert found.findings == ()
    assert Topic.PREINFER not in {row.topic for row in found.rows}
