"""The pure comparison of a cluster's topics with the catalogue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relaygr.kafka.settings import KafkaSettings
from relaygr.kafka.topic_check import Finding, Observed, ObservedTopic, Severity, compare, count_conflicts, report
from relaygr.schemas.topics import CATALOGUE, CO_PARTITIONED, Topic

KAFKA = KafkaSettings(partitions=16)


def as_wanted(kafka: KafkaSettings = KAFKA) -> dict[Topic, ObservedTopic]:
    return {
        topic: ObservedTopic(spec.partition_count(kafka.partitions), kafka.replication_factor, spec.config())
        for topic, spec in CATALOGUE.items()
    }


def with_config(topic: Topic, **changes: str) -> dict[Topic, ObservedTopic]:
    topics = as_wanted()
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


def test_a_topic_that_takes_larger_messages_is_fine() -> None:
    assert compare(Observed(with_config(Topic.HISTORY, max_message_bytes="100000000")), KAFKA) == ()


def test_fewer_replicas_than_set_are_a_warning() -> None:
    finding = only(compare(Observed(as_wanted()), KAFKA.model_copy(update={"replication_factor": 3}))[:1])
    assert finding.severity is Severity.WARNING
    assert "1 replicas, the setting is 3" in finding.what


def test_brokers_that_create_topics_by_themselves_are_a_warning() -> None:
    finding = only(compare(Observed(as_wanted(), auto_create=True), KAFKA))
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
    severities = [finding.severity for finding in compare(Observed(topics, embedded=True, auto_create=True), KAFKA)]
    assert severities == [Severity.ERROR, Severity.WARNING, Severity.NOTE]


def test_creation_is_held_up_by_counts_that_differ_but_not_by_missing_topics() -> None:
    topics = as_wanted()
    del topics[Topic.RETRIEVAL]
    assert count_conflicts(Observed(topics), KAFKA) == ()
    topics[Topic.RANKING] = replace(topics[Topic.RANKING], partitions=8)
    assert len(count_conflicts(Observed(topics), KAFKA)) == 1
