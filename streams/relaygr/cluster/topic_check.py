"""Compares a cluster's topics with the catalogue, without I/O.

`compare` takes the observed topics and the settings, and returns findings: each states the problem and the remedy.
With an ERROR the system does not work correctly, so a process refuses to start. A WARNING costs memory, disk space
or balance. A NOTE states what could not be checked.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from relaygr.kafka.settings import Affinity, GroupProtocol, KafkaSettings
from relaygr.schemas.topics import CATALOGUE, CO_PARTITIONED, Topic

LEAST_PARTITIONS_PER_WORKER = 8
"""With fewer, one partition is more than an eighth of a worker's load."""
LONGEST_HEARTBEAT_MS = 1000
"""The broker's heartbeat with which the consumer protocol hands partitions over in time; Kafka's default is 5000."""
LONGEST_SESSION_MS = 15_000
_HEARTBEATS_A_SESSION = 3
_MIN_IN_SYNC = "min.insync.replicas"
_HEARTBEAT = "group.consumer.heartbeat.interval.ms"
_SESSION = "group.consumer.session.timeout.ms"


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
    in_sync: int | None = None
    """Replicas in sync of the partition that has the fewest; None: all."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The topics and the settings of a cluster that are checked."""

    topics: Mapping[Topic, ObservedTopic]
    """The catalogue's topics that exist."""
    embedded: bool = False
    broker_config: Mapping[str, str] = field(default_factory=dict)
    """Settings of a broker by Kafka's names; a setting that is not readable is absent."""
    offsets_replicas: int | None = None
    """Replicas of `__consumer_offsets`; None: the topic does not exist, or this user may not see it."""
    brokers: int | None = None
    """Brokers that are up; None: not known."""
    internal: frozenset[str] = frozenset()
    """Kafka's internal topics that exist and that this user may see."""


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


_INTERNAL: Final = {
    "__consumer_offsets": (
        "offsets.topic.replication.factor",
        "no group gets partitions, so triggers and workers read nothing",
    ),
    "__share_group_state": (
        "share.coordinator.state.topic.replication.factor",
        "pre-infer workers get no jobs",
    ),
    "__transaction_state": (
        "transaction.state.log.replication.factor",
        "`relaygr publish --from` (a bridge) waits for ever",
    ),
}
"""By internal topic, the brokers' setting of its replicas, and what does not work without the topic."""


def report(
    observed: Observed, kafka: KafkaSettings, workers: int | None = None, topics: Collection[Topic] | None = None
) -> TopicReport:
    """The report on `topics` (none: those of the deployment), with the findings of `compare`."""
    topics = kafka.catalogue if topics is None else topics
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
    observed: Observed, kafka: KafkaSettings, workers: int | None = None, topics: Collection[Topic] | None = None
) -> tuple[Finding, ...]:
    """All findings on `topics` (none: those of the deployment), errors first.

    `workers`: how many workers will share the partitions, if known.
    """
    wanted_topics = kafka.catalogue if topics is None else topics
    findings = [*_existence(observed, kafka, wanted_topics), *_counts(observed, kafka)]
    for topic, seen in observed.topics.items():
        findings += _replication(kafka.topic(topic), seen, kafka)
        if seen.config is not None:
            wanted = kafka.topic_config(topic, seen.replication_factor)
            findings += _settings(kafka.topic(topic), wanted, seen.config)
            findings += _durability(kafka.topic(topic), wanted, seen, seen.config)
    findings += _cluster(observed, kafka, workers)
    findings += _failover(observed, kafka)
    findings += _internal(observed)
    findings += _affinity(observed, kafka)
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


def _settings(name: str, all_wanted: Mapping[str, str], config: Mapping[str, str]) -> list[Finding]:
    findings = []
    for key, wanted in all_wanted.items():
        found = config.get(key)
        if found is None or found == wanted or key == _MIN_IN_SYNC:
            continue
        severity = Severity.WARNING
        if key == "max.message.bytes":
            if int(found) >= int(wanted):
                continue
            severity = Severity.ERROR
        elif key == "cleanup.policy":
            severity = Severity.ERROR
        what = f"{name} has {key}={found}, expected {wanted}"
        mend = "run `relaygr topics create --repair`; if the cluster refuses the value, set another in `topic_settings`"
        findings.append(Finding(severity, name, what, mend))
    return findings


def _durability(
    name: str, all_wanted: Mapping[str, str], seen: ObservedTopic, config: Mapping[str, str]
) -> list[Finding]:
    """Whether the topic accepts messages, also without one broker, and keeps what it acknowledged."""
    if _MIN_IN_SYNC not in config:
        return []
    found, replicas = int(config[_MIN_IN_SYNC]), seen.replication_factor
    wanted = int(all_wanted.get(_MIN_IN_SYNC, found))
    set_to = f"{name} has {_MIN_IN_SYNC}={found}"
    if found > replicas:
        what = f"{set_to}, but {replicas} {'replica' if replicas == 1 else 'replicas'}: it refuses every message"
        return [Finding(Severity.ERROR, name, what, "run `relaygr topics create --repair`")]
    findings = []
    if found != wanted:
        what = f"{set_to}, expected {wanted}"
        findings.append(Finding(Severity.WARNING, name, what, "run `relaygr topics create --repair`"))
    elif found == replicas > 1:
        what = f"{set_to}, as many as it has replicas: it refuses messages while any of their brokers is away"
        mend = f"set `min_insync_replicas` to {replicas - 1}, and run `relaygr topics create --repair`"
        findings.append(Finding(Severity.WARNING, name, what, mend))
    if seen.in_sync is not None and seen.in_sync < found:
        what = f"{set_to}, but a partition with {seen.in_sync} in sync: it refuses messages"
        findings.append(Finding(Severity.WARNING, name, what, "start the brokers that are away"))
    return findings


def _failover(observed: Observed, kafka: KafkaSettings) -> list[Finding]:
    """Whether the groups survive the loss of a broker, where the topics do."""
    if kafka.replication_factor == 1:
        return []
    findings = []
    config = observed.broker_config
    replicas = observed.offsets_replicas
    if replicas is None and "offsets.topic.replication.factor" in config:
        replicas = int(config["offsets.topic.replication.factor"])
    if replicas is not None and replicas < min(3, kafka.replication_factor):
        what = (
            f"__consumer_offsets has {replicas} {'replica' if replicas == 1 else 'replicas'}: while a broker is away, "
            "groups on it can neither commit nor move partitions"
        )
        mend = "set offsets.topic.replication.factor=3 on the brokers; add replicas with `kafka-reassign-partitions.sh`"
        findings.append(Finding(Severity.WARNING, None, what, mend))
    fenced_ms = int(config.get("broker.session.timeout.ms", 0))
    if kafka.group_protocol is GroupProtocol.CLASSIC and fenced_ms >= kafka.session_timeout_ms:
        what = (
            f"a broker that dies is replaced after {fenced_ms} ms (broker.session.timeout.ms), and a worker's session "
            f"is {kafka.session_timeout_ms} ms, so workers lose their partitions meanwhile"
        )
        mend = "set broker.session.timeout.ms on controllers and brokers to 2000, or raise `session_timeout_ms`"
        findings.append(Finding(Severity.WARNING, None, what, mend))
    return findings


def _internal(observed: Observed) -> list[Finding]:
    """Whether the brokers can create the internal topics that they need. If not, clients wait for ever."""
    findings = []
    for topic, (key, consequence) in _INTERNAL.items():
        wanted = int(observed.broker_config.get(key, 0))
        if observed.brokers is None or topic in observed.internal or wanted <= observed.brokers:
            continue
        are = "broker is" if observed.brokers == 1 else "brokers are"
        what = f"{key}={wanted}, but {observed.brokers} {are} up, so Kafka cannot create {topic}: {consequence}"
        mend = f"set {key} to {observed.brokers} on the brokers, or start {wanted - observed.brokers} more"
        findings.append(Finding(Severity.WARNING, None, what, mend))
    return findings


def _affinity(observed: Observed, kafka: KafkaSettings) -> list[Finding]:
    """Whether the cluster is as `affinity` needs it."""
    if kafka.affinity is Affinity.ONE_TOPIC and Topic.PREINFER in observed.topics:
        name = kafka.topic(Topic.PREINFER)
        what = f"{name} exists, but no worker reads it with affinity=one_topic: jobs of a trigger with another setting"
        return [Finding(Severity.WARNING, name, f"{what} would be lost", "delete the topic")]
    if kafka.group_protocol is not GroupProtocol.CONSUMER or observed.embedded:
        return []
    config = observed.broker_config
    if not config:
        what = "the brokers' settings cannot be read: their group.consumer.* settings were not checked"
        return [Finding(Severity.NOTE, None, what, "")]
    return [
        Finding(severity, None, what, f"{mend}, or set `affinity` to range")
        for severity, what, mend in _consumer_protocol(config)
    ]


def _consumer_protocol(config: Mapping[str, str]) -> Iterator[tuple[Severity, str, str]]:
    """Severity, problem and remedy of each broker setting that does not suit `group.protocol=consumer`."""
    enabled = config.get("group.coordinator.rebalance.protocols", "consumer").split(",")
    if _HEARTBEAT not in config or "consumer" not in enabled:
        what = "affinity is consumer_protocol, but the brokers do not offer group.protocol=consumer"
        yield Severity.ERROR, what, "use Kafka 4 with `consumer` among group.coordinator.rebalance.protocols"
        return
    assignors = config.get("group.consumer.assignors", Affinity.CONSUMER_PROTOCOL.assignor)
    names = [name.rpartition(".")[2].lower().removesuffix("assignor") for name in assignors.split(",")]
    if Affinity.CONSUMER_PROTOCOL.assignor not in names:
        what = f"group.consumer.assignors={assignors} lacks range, which keeps a user's jobs and requests together"
        yield Severity.ERROR, what, "add range to group.consumer.assignors on the brokers"
    heartbeat_ms, session_ms = int(config[_HEARTBEAT]), int(config.get(_SESSION, 0))
    if heartbeat_ms > LONGEST_HEARTBEAT_MS:
        what = (
            f"{_HEARTBEAT}={heartbeat_ms}: partitions are handed over in steps of one heartbeat, so at each change of "
            "workers requests would wait for seconds"
        )
        mend = f"set {_HEARTBEAT} and group.consumer.min.heartbeat.interval.ms to 200 on the brokers"
        yield Severity.ERROR, what, mend
    if 0 < session_ms < _HEARTBEATS_A_SESSION * heartbeat_ms:
        what = f"{_SESSION}={session_ms} is less than {_HEARTBEATS_A_SESSION} heartbeats of {heartbeat_ms} ms"
        yield Severity.ERROR, f"{what}: members would be expelled", f"raise {_SESSION} on the brokers"
    elif session_ms > LONGEST_SESSION_MS:
        what = f"{_SESSION}={session_ms}: for so long nobody serves the partitions of a worker that died"
        mend = f"set {_SESSION} and group.consumer.min.session.timeout.ms to 6000 on the brokers"
        yield Severity.WARNING, what, mend


def _cluster(observed: Observed, kafka: KafkaSettings, workers: int | None) -> list[Finding]:
    findings = []
    if observed.embedded:
        what = "the embedded cluster does not report topic settings: only existence and partition counts were checked"
        findings.append(Finding(Severity.NOTE, None, what, ""))
    elif any(seen.config is None for seen in observed.topics.values()):
        what = "topic settings cannot be read (are DescribeConfigs rights missing?): only counts were checked"
        findings.append(Finding(Severity.NOTE, None, what, ""))
    if observed.broker_config.get("auto.create.topics.enable") == "true":
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
