"""Topic administration: creates the catalogue's topics, and compares a cluster's topics with the catalogue.

`check_topics` reports the differences, `create_topics` creates missing topics, and `require_topics` is the check
at a process's start: it raises a RelayError that names the command to run. Each call waits `connect_timeout_s` for
the connection and `ADMIN_TIMEOUT_S` for each request after it. A process that serves calls the check, which therefore
asks for settings in a child process (`relaygr.cluster.admin_process`). librdkafka's embedded cluster supports no admin
requests, so only the existence and the partition counts of its topics are checked.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import structlog
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ClusterMetadata,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)

from relaygr.cluster.admin_process import AdminProcess, CannotStart, ask
from relaygr.cluster.rights import START_OF_CHECK_S, Role, require_rights, topics_of
from relaygr.cluster.topic_check import Observed, ObservedTopic, TopicReport, count_conflicts, report
from relaygr.kafka.client_errors import NOT_OFFERED
from relaygr.kafka.clients import await_metadata, make_admin, require_broker
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import CATALOGUE, Topic

_log = structlog.get_logger()

ADMIN_TIMEOUT_S: Final = 30.0
_HEARD_OF_TOPIC_S: Final = 5.0
_RETRY_S: Final = 0.1
_LOOK_S: Final = 0.05
SHARE_GROUP: Final = {
    "share.auto.offset.reset": "earliest",
    "share.isolation.level": "read_uncommitted",
    # A job whose worker died comes back after this time, the shortest that brokers accept by default.
    "share.record.lock.duration.ms": "15000",
}
"""Settings of the pre-infer workers' group."""
OFFSETS_TOPIC: Final = "__consumer_offsets"
EMBEDDED_CLUSTER_ID: Final = "mockCluster"
"""The cluster id of librdkafka's embedded cluster begins with this."""

_CLIENT_ID: Final = "relaygr-topics"
_PATIENT: Final = {"socket.timeout.ms": int(ADMIN_TIMEOUT_S * 1000)}
"""A cluster may need long to create or delete topics, and librdkafka waits no longer than this for an answer."""

# A policy of the cluster refuses a value, or the cluster does not let anybody set it.
_SETTING_REFUSED: Final = frozenset((KafkaError.POLICY_VIOLATION, KafkaError.INVALID_CONFIG))
_UNREADABLE: Final = NOT_OFFERED | {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}
"""Why the settings of a topic cannot be read, today or tomorrow. They are a finding, and no reason not to start."""
_ACCEPT: Final = (
    "set `topic_settings` (such as `--set 'topic_settings={workers: {segment.bytes: 52428800}}'`), "
    "`replication_factor` or `partitions` to what it accepts"
)

_T = TypeVar("_T")


def check_topics(kafka: KafkaSettings, workers: int | None = None) -> TopicReport:
    """Compares the cluster's topics with the catalogue. Raises RelayError if the cluster cannot be reached."""
    return report(_ask(kafka, CATALOGUE), kafka, workers)


def require_topics(kafka: KafkaSettings, role: Role) -> TopicReport:
    """Checks the topics that a role uses, and its rights on them. The caller logs the warnings.

    Raises RelayError if the role lacks a right or if a finding is an error.
    """
    topics = topics_of(role, kafka)
    found = report(_ask(kafka, topics, role), kafka, topics=topics)
    if not found.ok:
        lines = "; ".join(f"{error.what}: {error.mend}" for error in found.errors)
        raise RelayError(f"Topics at {kafka.bootstrap} are not usable. {lines}")
    return found


def create_topics(kafka: KafkaSettings, dry_run: bool = False, repair: bool = False) -> TopicReport:
    """Creates the missing topics and keeps existing ones. A second call changes nothing.

    `dry_run` changes nothing and reports what would be created. `repair` also sets the settings of existing
    topics to the catalogue's. When it ends, every broker knows the topics.

    Raises RelayError, before anything is created, if a topic exists with another partition count; also if the cluster
    refuses a topic, after all others were created, and if a broker does not know a topic within `ADMIN_TIMEOUT_S`.
    """
    cluster = require_broker(kafka)
    admin = make_admin(kafka, _CLIENT_ID, options=_PATIENT)
    observed = _observe(kafka, cluster, admin)
    conflicts = count_conflicts(observed, kafka)
    if conflicts:
        raise RelayError("; ".join(f"{conflict.what}: {conflict.mend}" for conflict in conflicts))
    missing = [topic for topic in kafka.catalogue if topic not in observed.topics]
    if (missing or repair) and observed.embedded and not dry_run:
        raise RelayError(
            f"Kafka at {kafka.bootstrap} is librdkafka's embedded cluster, which supports no admin requests: "
            "the process that started it creates its topics"
        )
    if missing and not observed.embedded:
        _create(kafka, admin, missing, len(cluster.brokers), dry_run)
    if not dry_run:
        if not observed.embedded:
            _set_share_group(kafka, admin)
        if repair:
            _repair(kafka, admin, observed.topics)
        observed = _await_topics(kafka, admin, repaired=repair)
    else:
        observed = replace(observed, topics={**_as_created(kafka, missing), **observed.topics})
    found = report(observed, kafka)
    return replace(found, rows=tuple(replace(row, created=row.topic in missing) for row in found.rows))


def delete_topics(kafka: KafkaSettings) -> tuple[str, ...]:
    """Deletes the catalogue's topics under this prefix and their messages. Returns the names of the deleted topics.

    Histories that are shared (`history_prefix`) stay.
    """
    cluster = require_broker(kafka)
    names = [name for topic in CATALOGUE if (name := topic.named(kafka.topic_prefix)) in cluster.topics]
    if not names:
        return ()
    admin = make_admin(kafka, _CLIENT_ID, options=_PATIENT)
    futures = admin.delete_topics(names, request_timeout=ADMIN_TIMEOUT_S, operation_timeout=ADMIN_TIMEOUT_S)
    _require_success(kafka, "delete", futures, KafkaError.UNKNOWN_TOPIC_OR_PART)
    # A command that follows must not take them for topics that exist.
    _await_brokers(kafka, admin, names, exist=False)
    return tuple(names)


def is_embedded(cluster: ClusterMetadata) -> bool:
    """Whether this is librdkafka's embedded cluster."""
    return (cluster.cluster_id or "").startswith(EMBEDDED_CLUSTER_ID)


def _as_created(kafka: KafkaSettings, topics: Iterable[Topic]) -> dict[Topic, ObservedTopic]:
    """The topics as they would be created."""
    return {
        topic: ObservedTopic(
            CATALOGUE[topic].partition_count(kafka.partitions),
            kafka.replication_factor,
            kafka.topic_config(topic, kafka.replication_factor),
        )
        for topic in topics
    }


@dataclass(frozen=True, slots=True)
class _ReadSettings:
    """Settings of topics by name, and those of a broker. By default nothing was readable."""

    topics: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    broker: Mapping[str, str] = field(default_factory=dict)


def _read_settings(admin: AdminClient, names: Iterable[str], broker_id: int) -> _ReadSettings:
    """Raises RelayError without an answer."""
    return _ReadSettings(_topic_configs(admin, names), _broker_config(admin, broker_id))


def _ask(kafka: KafkaSettings, topics: Collection[Topic], role: Role | None = None) -> Observed:
    """These topics, asked by a child process. `role`: raises RelayError if this user lacks a right of the role."""
    cluster = require_broker(kafka)
    settings = _ReadSettings()
    if not is_embedded(cluster):
        names = tuple(_existing(kafka, cluster, topics).values())
        with AdminProcess(kafka, _CLIENT_ID, START_OF_CHECK_S) as admin:
            if role is not None:
                require_rights(kafka, role, admin)
            try:
                settings = admin.call(3 * ADMIN_TIMEOUT_S, _read_settings, names, min(cluster.brokers))
            except CannotStart as error:
                _log.warning("topic settings were not checked", cause=error.args[0].str())
            except KafkaException as error:
                cause = error.args[0].str()
                raise RelayError(f"Topic settings at {kafka.bootstrap} cannot be read: {cause}") from error
    return _observed(kafka, cluster, settings, topics)


def _existing(kafka: KafkaSettings, cluster: ClusterMetadata, topics: Iterable[Topic] = CATALOGUE) -> dict[Topic, str]:
    return {topic: kafka.topic(topic) for topic in topics if kafka.topic(topic) in cluster.topics}


def _observe(kafka: KafkaSettings, cluster: ClusterMetadata, admin: AdminClient) -> Observed:
    settings = _ReadSettings()
    if not is_embedded(cluster):
        settings = _read_settings(admin, _existing(kafka, cluster).values(), min(cluster.brokers))
    return _observed(kafka, cluster, settings)


def _observed(
    kafka: KafkaSettings,
    cluster: ClusterMetadata,
    settings: _ReadSettings,
    wanted: Iterable[Topic] = CATALOGUE,
) -> Observed:
    topics = {}
    for topic, name in _existing(kafka, cluster, wanted).items():
        partitions = cluster.topics[name].partitions.values()
        replicas = _least_replicas(cluster, name)
        in_sync = min((len(partition.isrs) for partition in partitions), default=0)
        topics[topic] = ObservedTopic(len(partitions), replicas, settings.topics.get(name), in_sync)
    offsets_replicas = _least_replicas(cluster, OFFSETS_TOPIC) if OFFSETS_TOPIC in cluster.topics else None
    internal = frozenset(name for name in cluster.topics if name.startswith("__"))
    return Observed(topics, is_embedded(cluster), settings.broker, offsets_replicas, len(cluster.brokers), internal)


def _least_replicas(cluster: ClusterMetadata, name: str) -> int:
    return min((len(partition.replicas) for partition in cluster.topics[name].partitions.values()), default=0)


def _topic_configs(admin: AdminClient, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Settings by topic. A topic whose settings this user may not read, or the cluster does not tell, is absent.

    The broker that is asked may not have heard yet of a topic that another one has just shown.
    """
    resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
    configs: dict[str, dict[str, str]] = {}
    ends_s = time.monotonic() + _HEARD_OF_TOPIC_S
    while resources:
        unheard_of = []
        for resource, future in admin.describe_configs(resources, request_timeout=ADMIN_TIMEOUT_S).items():
            try:
                entries = _result(future).values()
                configs[resource.name] = {entry.name: entry.value for entry in entries if entry.value is not None}
            except KafkaException as exception:
                error = exception.args[0]
                if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART and time.monotonic() < ends_s:
                    unheard_of.append(resource)
                elif error.code() not in _UNREADABLE:
                    raise RelayError(f"The settings of {resource.name} cannot be read: {error.str()}") from exception
        resources = unheard_of
        if resources:
            time.sleep(_RETRY_S)
    return configs


def _broker_config(admin: AdminClient, broker_id: int) -> dict[str, str]:
    """A broker's settings; empty if this user may not read them, as on some managed clusters."""
    resource = ConfigResource(ConfigResource.Type.BROKER, str(broker_id))
    [future] = admin.describe_configs([resource], request_timeout=ADMIN_TIMEOUT_S).values()
    try:
        return {entry.name: entry.value for entry in _result(future).values() if entry.value is not None}
    except KafkaException:
        return {}


def _set_share_group(kafka: KafkaSettings, admin: AdminClient) -> None:
    """The settings of the pre-infer workers' group. A cluster that has no share groups refuses them."""
    resource = ConfigResource(
        ConfigResource.Type.GROUP,
        kafka.pool_group,
        incremental_configs=[
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in SHARE_GROUP.items()
        ],
    )
    [future] = admin.incremental_alter_configs([resource], request_timeout=ADMIN_TIMEOUT_S).values()
    try:
        _result(future)
    except KafkaException as error:
        cause = error.args[0].str()
        _log.info("the share group of the pre-infer workers has no settings", group=kafka.pool_group, cause=cause)


def has_share_groups(kafka: KafkaSettings) -> bool:
    """Whether the cluster has share groups. Raises RelayError without an answer."""
    if is_embedded(require_broker(kafka)):
        return False
    try:
        return ask(kafka, _CLIENT_ID, 2 * ADMIN_TIMEOUT_S, _knows_share_groups, kafka.pool_group)
    except CannotStart:
        return True
    except KafkaException as error:
        cause = error.args[0].str()
        raise RelayError(f"Kafka at {kafka.bootstrap} does not say whether it has share groups: {cause}") from error


def _knows_share_groups(admin: AdminClient, group: str) -> bool:
    resource = ConfigResource(ConfigResource.Type.GROUP, group)
    [future] = admin.describe_configs([resource], request_timeout=ADMIN_TIMEOUT_S).values()
    try:
        return next(iter(SHARE_GROUP)) in _result(future)
    except KafkaException as error:
        # Old brokers know no settings of groups.
        if error.args[0].code() in NOT_OFFERED | {KafkaError.INVALID_REQUEST, KafkaError.INVALID_CONFIG}:
            return False
        raise


def _create(
    kafka: KafkaSettings, admin: AdminClient, topics: Iterable[Topic], broker_count: int, is_trial: bool
) -> None:
    """`is_trial`: the cluster creates nothing, and says what it would refuse."""
    if kafka.replication_factor > broker_count:
        raise RelayError(
            f"replication_factor is {kafka.replication_factor}, but Kafka at {kafka.bootstrap} has {broker_count} "
            f"{'broker' if broker_count == 1 else 'brokers'} up: start the missing ones, or set `replication_factor` "
            f"to {broker_count} at most"
        )
    wanted = [
        NewTopic(
            kafka.topic(topic),
            num_partitions=CATALOGUE[topic].partition_count(kafka.partitions),
            replication_factor=kafka.replication_factor,
            config=kafka.topic_config(topic, kafka.replication_factor),
        )
        for topic in topics
    ]
    futures = admin.create_topics(
        wanted, request_timeout=ADMIN_TIMEOUT_S, operation_timeout=ADMIN_TIMEOUT_S, validate_only=is_trial
    )
    try:
        # Another process may create one meanwhile: the check afterwards compares it with the catalogue.
        _require_success(kafka, "create", futures, KafkaError.TOPIC_ALREADY_EXISTS)
    except RelayError as refusal:
        # The others are there, and the next command must see them.
        created = [name for name, future in futures.items() if future.exception() is None]
        if not is_trial:
            try:
                _await_brokers(kafka, admin, created)
            except RelayError as late:
                raise RelayError(f"{refusal}. {late}") from refusal
        raise


def _repair(kafka: KafkaSettings, admin: AdminClient, topics: Mapping[Topic, ObservedTopic]) -> None:
    resources = [
        ConfigResource(
            ConfigResource.Type.TOPIC,
            kafka.topic(topic),
            incremental_configs=[
                ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
                for key, value in kafka.topic_config(topic, seen.replication_factor).items()
            ],
        )
        for topic, seen in topics.items()
    ]
    if not resources:
        return
    futures = admin.incremental_alter_configs(resources, request_timeout=ADMIN_TIMEOUT_S)
    _require_success(kafka, "set the settings of", {resource.name: future for resource, future in futures.items()})


def _require_success(
    kafka: KafkaSettings, action: str, futures: Mapping[str, Future[Any]], allowed: int | None = None
) -> None:
    """Waits for all answers. Raises one RelayError for all topics that are refused with another code than `allowed`."""
    causes: dict[str, list[str]] = {}
    refuses_setting = False
    for name, future in futures.items():
        try:
            _result(future)
        except KafkaException as error:
            code = error.args[0].code()
            if code != allowed:
                causes.setdefault(error.args[0].str(), []).append(name)
                refuses_setting = refuses_setting or code in _SETTING_REFUSED
    if not causes:
        return
    listed = "; ".join(f"{', '.join(names)} ({cause})" for cause, names in causes.items())
    count = sum(map(len, causes.values()))
    mend = f": {_ACCEPT}, and run it again" if refuses_setting else ""
    raise RelayError(f"Kafka at {kafka.bootstrap} refuses to {action} {count} of {len(futures)} topics, {listed}{mend}")


def _await_topics(kafka: KafkaSettings, admin: AdminClient, repaired: bool) -> Observed:
    """Waits until every broker knows all topics and leaders and, if `repaired`, the brokers report the new settings.

    The controller acknowledges a change before all brokers have it.
    """
    ends_s = time.monotonic() + ADMIN_TIMEOUT_S
    names = [kafka.topic(topic) for topic in kafka.catalogue]
    _await_brokers(kafka, admin, names)
    while True:
        observed = _observe(kafka, _metadata(kafka, admin), admin)
        if not repaired or time.monotonic() >= ends_s or report(observed, kafka).ok:
            return observed
        time.sleep(_LOOK_S)


def _await_brokers(kafka: KafkaSettings, admin: AdminClient, names: Collection[str], *, exist: bool = True) -> None:
    """Waits until each broker knows that the topics exist and have leaders, or that they do not exist.

    Raises RelayError with those that a broker does not know within `ADMIN_TIMEOUT_S`.
    """
    ends_s = time.monotonic() + ADMIN_TIMEOUT_S
    brokers = _metadata(kafka, admin).brokers.values()
    for broker in brokers:
        host = broker.host or ""
        host = f"[{host}]" if ":" in host else host
        own = kafka.model_copy(update={"bootstrap": f"{host}:{broker.port}"})
        while True:
            # The first question of a client goes to its bootstrap address, and later ones to any broker.
            cluster = _metadata(own, admin if len(brokers) == 1 else make_admin(own, _CLIENT_ID))
            late = [
                name for name in names if (name in cluster.topics if not exist else not _has_leaders(cluster, name))
            ]
            if not late:
                break
            if time.monotonic() >= ends_s:
                what = "the creation" if exist else "the deletion"
                raise RelayError(
                    f"broker {broker.id} does not know {what} of {', '.join(late)} after {ADMIN_TIMEOUT_S:.0f} s: "
                    "check the brokers before the next command"
                )
            time.sleep(_LOOK_S)


def _metadata(kafka: KafkaSettings, admin: AdminClient) -> ClusterMetadata:
    try:
        return await_metadata(admin, ADMIN_TIMEOUT_S)
    except KafkaException as error:
        raise RelayError(f"Kafka at {kafka.bootstrap} stopped answering: {error.args[0].str()}") from error


def _has_leaders(cluster: ClusterMetadata, name: str) -> bool:
    topic = cluster.topics.get(name)
    return topic is not None and bool(topic.partitions) and all(p.leader >= 0 for p in topic.partitions.values())


def _result(future: Future[_T]) -> _T:
    """The future's result. The request has its own time-out; the longer one here is a safety margin."""
    return future.result(timeout=2 * ADMIN_TIMEOUT_S)
