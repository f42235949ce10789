"""Compares a cluster's topics with the catalogue, without I/O.

`compare` takes the observed topics and the settings, and returns findings: each states the problem and the remedy.
With an ERROR the system does not work correctly, so a process refuses to start. A WARNING costs memory, disk space
or balance. A NOTE states what could not be checked.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.topics import CATALOGUE, CO_PARTITIONED, Topic, TopicSpec

LEAST_PARTITIONS_PER_WORKER = 8
"""With fewer, one partition is more than an eighth of a worker's load."""


class Severity(enum.StrEnum):
    """The severity of a finding."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference from the catalogue, or a check that was not possible."""

    severity: Severity
    topic: str | None
    """The topic's full name; None: the finding is about the cluster."""
    what: str
    mend: str
    """The remedy; empty for a note."""


@dataclass(frozen=True, slots=True)
class ObservedTopic:
    """One topic as the cluster describes it."""

    partitions: int
    replication_factor: int
    config: Mapping[str, str] | None = None
    """The topic's settings by Kafka's names; None: the cluster does not report them."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The topics and the settings of a cluster that are checked."""

    topics: Mapping[Topic, ObservedTopic]
    """The catalogue's topics that exist."""
    embedded: bool = False
    auto_create: bool | None = None
    """The brokers' `auto.create.topics.enable`; None: not readable."""


@dataclass(frozen=True, slots=True)
class TopicRow:
    """One row of a report: a topic with its wanted and its actual partition count."""

    topic: Topic
    name: str
    wanted_partitions: int
    partitions: int | None
    """None: the topic does not exist."""
    created: bool = False


@dataclass(frozen=True, slots=True)
class TopicReport:
    """The result of a check or a creation."""

    rows: tuple[TopicRow, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity is Severity.ERROR)


def report(
    observed: Observed, kafka: KafkaSettings, workers: int | None = None, topics: Collection[Topic] = CATALOGUE
) -> TopicReport:
    """The report on `topics`, with the findings of `compare`."""
    rows = tuple(
        TopicRow(
            topic,
            kafka.topic(topic),
            spec.partition_count(kafka.partitions),
            observed.topics[topic].partitions if topic in observed.topics else None,
        )
        for topic, spec in CATALOGUE.items()
        if topic in topics
    )
    return TopicReport(rows, compare(observed, kafka, workers, topics))


def compare(
    observed: Observed, kafka: KafkaSettings, workers: int | None = None, topics: Collection[Topic] = CATALOGUE
) -> tuple[Finding, ...]:
    """All findings on `topics`, errors first. `workers`: how many workers will share the partitions, if known."""
    findings = [*_existence(observed, kafka, topics), *_counts(observed, kafka)]
    for topic, seen in observed.topics.items():
        findings += _replication(kafka.topic(topic), seen, kafka)
        if seen.config is not None:
            findings += _settings(kafka.topic(topic), CATALOGUE[topic], seen.config)
    findings += _cluster(observed, kafka, workers)
    order = list(Severity)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))


def count_conflicts(observed: Observed, kafka: KafkaSettings) -> tuple[Finding, ...]:
    """The findings that creation cannot fix: topics that exist with another partition count."""
    return tuple(finding for finding in _counts(observed, kafka) if finding.severity is Severity.ERROR)


def _existence(observed: Observed, kafka: KafkaSettings, topics: Collection[Topic]) -> list[Finding]:
    missing = [kafka.topic(topic) for topic in CATALOGUE if topic in topics and topic not in observed.topics]
    if not missing:
        return []
    what = f"{', '.join(missing)} {'does' if len(missing) == 1 else 'do'} not exist"
    return [Finding(Severity.ERROR, None, what, "run `relaygr topics create`")]


def _counts(observed: Observed, kafka: KafkaSettings) -> list[Finding]:
    findings: list[Finding] = []
    new_prefix = (
        "a topic's count never changes, so set a new `topic_prefix`, run `relaygr topics create`, "
        "and publish the histories again"
    )
    deployed = kafka.partitions
    together = {topic: observed.topics[topic].partitions for topic in CO_PARTITIONED if topic in observed.topics}
    counts = set(together.values())
    if len(counts) > 1:
        listed = ", ".join(f"{kafka.topic(topic)} {count}" for topic, count in together.items())
        what = f"partition counts differ ({listed}), so a user's messages would reach different workers"
        findings.append(Finding(Severity.ERROR, None, what, new_prefix))
    elif counts and counts != {kafka.partitions}:
        [deployed] = counts
        names = ", ".join(map(kafka.topic, together))
        what = f"{names} have {deployed} partitions each, the setting is {kafka.partitions}"
        mend = f"set `partitions` to {deployed}; to have {kafka.partitions}: {new_prefix}"
        findings.append(Finding(Severity.ERROR, None, what, mend))
    for topic, spec in CATALOGUE.items():
        wanted = spec.partition_count(deployed)
        if topic in together or topic not in observed.topics or observed.topics[topic].partitions == wanted:
            continue
        # Gateways select their results partition by the count, and readers of statuses read one partition only.
        severity = Severity.ERROR if topic in (Topic.RESULTS, Topic.WORKERS) else Severity.WARNING
        what = f"{kafka.topic(topic)} has {observed.topics[topic].partitions} partitions, expected {wanted}"
        findings.append(Finding(severity, kafka.topic(topic), what, new_prefix))
    return findings


def _replication(name: str, seen: ObservedTopic, kafka: KafkaSettings) -> list[Finding]:
    if seen.replication_factor >= kafka.replication_factor:
        return []
    what = f"{name} has {seen.replication_factor} replicas, the setting is {kafka.replication_factor}"
    mend = "add replicas with `kafka-reassign-partitions.sh`, or lower `replication_factor`"
    return [Finding(Severity.WARNING, name, what, mend)]


def _settings(name: str, spec: TopicSpec, config: Mapping[str, str]) -> list[Finding]:
    findings = []
    for key, wanted in spec.config().items():
        found = config.get(key)
        if found is None or found == wanted:
            continue
        severity = Severity.WARNING
        if key == "max.message.bytes":
            if int(found) >= int(wanted):
                continue
            severity = Severity.ERROR
        elif key == "cleanup.policy":
            severity = Severity.ERROR
        what = f"{name} has {key}={found}, expected {wanted}"
        findings.append(Finding(severity, name, what, "run `relaygr topics create --repair`"))
    return findings


def _cluster(observed: Observed, kafka: KafkaSettings, workers: int | None) -> list[Finding]:
    findings = []
    if observed.embedded:
        what = "the embedded cluster does not report topic settings: only existence and partition counts were checked"
        findings.append(Finding(Severity.NOTE, None, what, ""))
    elif any(seen.config is None for seen in observed.topics.values()):
        what = "topic settings cannot be read (are DescribeConfigs rights missing?): only counts were checked"
        findings.append(Finding(Severity.NOTE, None, what, ""))
    if observed.auto_create:
        what = (
            "the brokers create unknown topics on first use (auto.create.topics.enable=true), with their own settings"
        )
        findings.append(Finding(Severity.WARNING, None, what, "set auto.create.topics.enable=false on the brokers"))
    if workers is not None and kafka.partitions < LEAST_PARTITIONS_PER_WORKER * workers:
        what = (
            f"{kafka.partitions} partitions for {workers} workers: fewer than {LEAST_PARTITIONS_PER_WORKER} each, "
            "so their loads will differ widely"
        )
        mend = f"use at most {max(1, kafka.partitions // LEAST_PARTITIONS_PER_WORKER)} workers, or a new `topic_prefix`"
        findings.append(Finding(Severity.WARNING, None, what, f"{mend} with more `partitions`"))
    return findings
