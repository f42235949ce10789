"""The least rights (ACLs) of each role, and the check at a process's start.

In Kafka, Read, Write and Delete include Describe, and Write on a topic is enough for an idempotent producer. A role has
no rights on the topics of other roles.

`missing_rights` asks the brokers which operations this user may do. An authorization error in the middle of the work
says less, and comes later: a worker that may not read histories would run and answer without them. The check is a
courtesy: where the process that asks cannot start, `require_rights` warns, and the caller goes on.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient

from relaygr.cluster.admin_process import AdminProcess, CannotStart
from relaygr.kafka.client_errors import NO_COORDINATOR, NOT_OFFERED
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.runtime.loggers import Logger
from relaygr.schemas.topics import CATALOGUE, Topic

_log = Logger(__name__)


class Role(enum.StrEnum):
    """The purpose of a Kafka user."""

    GATEWAY = "gateway"
    TRIGGER = "trigger"
    WORKER = "worker"
    WORKER_DIVERT = "worker-divert"
    """A worker with `worker.divert`."""
    WORKER_PRE_INFER = "worker-pre-infer"
    TRIGGER_POOL = "trigger-pool"
    """A trigger with a scenario whose jobs go to the pre-infer workers."""
    LAG = "lag"
    UI = "ui"
    HISTORY_PUBLISHER = "history-publisher"
    COLLECTOR = "collector"
    ADMIN = "admin"


class Resource(enum.StrEnum):
    """Kafka's kinds of resources that a role needs."""

    TOPIC = "topic"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class Right:
    """Operations, by Kafka's names, on one topic or consumer group."""

    resource: Resource
    name: str
    operations: tuple[str, ...]


START_OF_CHECK_S: Final = 10.0
"""How long a start waits for the process that asks, since the answers are a courtesy."""
_COORDINATOR_RETRY_S: Final = 0.1
_ABSENT: Final = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.GROUP_ID_NOT_FOUND))
_OPERATIONS: Final = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Describe": AclOperation.DESCRIBE,
    "Create": AclOperation.CREATE,
    "Delete": AclOperation.DELETE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
    "AlterConfigs": AclOperation.ALTER_CONFIGS,
}
_TOPICS: Final[dict[Role, dict[Topic, tuple[str, ...]]]] = {
    Role.GATEWAY: {
        Topic.RETRIEVAL: ("Write",),
        Topic.RANKING: ("Write",),
        Topic.RESULTS: ("Read",),
        Topic.DEAD_LETTERS: ("Write",),
    },
    Role.TRIGGER: {
        Topic.RETRIEVAL: ("Read",),
        Topic.PREINFER: ("Read", "Write"),
        Topic.WORKERS: ("Read",),
        Topic.DEAD_LETTERS: ("Write",),
    },
    Role.WORKER: {
        Topic.PREINFER: ("Read",),
        Topic.RANKING: ("Read",),
        Topic.RESULTS: ("Write",),
        Topic.HISTORY: ("Read", "Write"),
        Topic.BEHAVIOURS: ("Read",),
        Topic.WORKERS: ("Write",),
        Topic.DEAD_LETTERS: ("Write",),
    },
    Role.WORKER_PRE_INFER: {
        Topic.PREINFER_POOL: ("Read",),
        Topic.PREINFER: ("Write",),
        Topic.HISTORY: ("Read",),
        Topic.BEHAVIOURS: ("Read",),
        Topic.WORKERS: ("Write",),
        Topic.DEAD_LETTERS: ("Write",),
    },
    Role.LAG: dict.fromkeys((Topic.RETRIEVAL, Topic.PREINFER, Topic.RANKING, Topic.OVERFLOW), ("Read",)),
    Role.UI: dict.fromkeys(
        (Topic.RETRIEVAL, Topic.PREINFER, Topic.RANKING, Topic.RESULTS, Topic.OVERFLOW, Topic.WORKERS), ("Read",)
    ),
    Role.HISTORY_PUBLISHER: {Topic.HISTORY: ("Write",), Topic.BEHAVIOURS: ("Write",)},
    Role.COLLECTOR: {Topic.HISTORY: ("Read",), Topic.BEHAVIOURS: ("Read",)},
    Role.ADMIN: dict.fromkeys(CATALOGUE, ("Create", "Delete", "DescribeConfigs", "AlterConfigs")),
}
_TOPICS[Role.TRIGGER_POOL] = _TOPICS[Role.TRIGGER] | {Topic.PREINFER_POOL: ("Write",)}
_TOPICS[Role.WORKER_DIVERT] = _TOPICS[Role.WORKER] | dict.fromkeys((Topic.OVERFLOW, Topic.WORKERS), ("Read", "Write"))


def topics_of(role: Role, kafka: KafkaSettings) -> dict[Topic, tuple[str, ...]]:
    """The topics that a role uses, with the operations that it needs."""
    needed = dict(_TOPICS[role])
    jobs = needed.pop(Topic.PREINFER, ()) if Topic.PREINFER not in kafka.catalogue else ()
    if jobs:
        needed[kafka.jobs_topic] = tuple(dict.fromkeys((*needed.get(kafka.jobs_topic, ()), *jobs)))
    return needed


def rights_of(role: Role, kafka: KafkaSettings) -> tuple[Right, ...]:
    """The least rights of a role, on the topics and groups of these settings."""
    return (
        *(Right(Resource.TOPIC, kafka.topic(topic), needed) for topic, needed in topics_of(role, kafka).items()),
        *(Right(Resource.GROUP, name, needed) for name, needed in _groups_of(role, kafka).items()),
    )


def _groups_of(role: Role, kafka: KafkaSettings) -> dict[str, tuple[str, ...]]:
    unjoined: dict[str, tuple[str, ...]] = {kafka.unjoined_group: ("Describe",)}
    measured = (kafka.trigger_group, kafka.workers_group, kafka.overflow_group, kafka.unjoined_group)
    groups: dict[Role, dict[str, tuple[str, ...]]] = {
        Role.GATEWAY: unjoined,
        Role.TRIGGER: {kafka.trigger_group: ("Read",), **unjoined},
        Role.TRIGGER_POOL: {kafka.trigger_group: ("Read",), **unjoined},
        Role.WORKER: {kafka.workers_group: ("Read",), **unjoined},
        Role.WORKER_DIVERT: {kafka.workers_group: ("Read",), kafka.overflow_group: ("Read",), **unjoined},
        Role.WORKER_PRE_INFER: {kafka.pool_group: ("Read", "DescribeConfigs"), **unjoined},
        Role.LAG: dict.fromkeys(measured, ("Describe",)),
        Role.UI: dict.fromkeys(measured, ("Describe",)),
        Role.COLLECTOR: unjoined,
        # Without Describe, Kafka does not tell which of the others a user has.
        Role.ADMIN: {kafka.pool_group: ("Describe", "DescribeConfigs", "AlterConfigs")},
    }
    return groups.get(role, {})


def missing_rights(kafka: KafkaSettings, role: Role, admin: AdminProcess | None = None) -> tuple[str, ...]:
    """A sentence for each right that this user lacks. Topics and groups that do not exist are left out.

    Not for librdkafka's embedded cluster. `admin`: the process that asks; none: one for this call. Raises RelayError
    without an answer, CannotStart if the process cannot start.
    """
    rights = rights_of(role, kafka)
    # Topics, groups, and the wait for their coordinators.
    timeout_s = (2 + len(rights)) * kafka.connect_timeout_s
    try:
        with contextlib.ExitStack() as own:
            if admin is None:
                admin = own.enter_context(AdminProcess(kafka, f"relaygr-{role}-rights", START_OF_CHECK_S))
            allowed = admin.call(timeout_s, _allowed, rights, kafka.connect_timeout_s)
    except CannotStart:
        raise
    except KafkaException as error:
        raise RelayError(
            f"Kafka at {kafka.bootstrap} does not answer a question about rights: {error.args[0].str()}"
        ) from error
    user = kafka.security.sasl_username or "This user"
    missing = []
    for right, operations in zip(rights, allowed, strict=True):
        lacking = [each for each in right.operations if operations is not None and each not in operations]
        if lacking:
            missing.append(f"{user} may not {' and '.join(lacking)} {right.resource} {right.name}, as a {role} must")
    return tuple(missing)


def require_rights(kafka: KafkaSettings, role: Role, admin: AdminProcess | None = None) -> None:
    """Raises RelayError that names each right that this user lacks."""
    try:
        missing = missing_rights(kafka, role, admin)
    except CannotStart as error:
        _log.warning("rights were not checked", role=role.value, cause=error.args[0].str())
        return
    if missing:
        command = f"relaygr topics acls --role {role}"
        raise RelayError(f"{'; '.join(missing)}. `{command}` prints the commands that grant it.")


class RoleRights:
    """What a role lacks, asked again and again by a `KafkaSession`."""

    def __init__(self, kafka: KafkaSettings, role: Role) -> None:
        self.advice = f"grant the rights that `relaygr topics acls --role {role}` prints"
        self.topics = frozenset(kafka.topic(topic) for topic in topics_of(role, kafka))
        self._kafka = kafka
        self._role = role
        self._admin: AdminProcess | None = None

    def missing(self) -> tuple[str, ...]:
        """A sentence for each right that this user lacks; none where the process that asks cannot start.

        Raises RelayError and OSError without an answer.
        """
        try:
            with AdminProcess(self._kafka, f"relaygr-{self._role}-rights") as self._admin:
                return missing_rights(self._kafka, self._role, self._admin)
        except CannotStart:
            return ()

    def close(self) -> None:
        """Ends a call of `missing`."""
        if self._admin is not None:
            self._admin.close()


def _allowed(admin: AdminClient, rights: Sequence[Right], timeout_s: float) -> list[frozenset[str] | None]:
    """What this user may do on the resource of each right. None: not known, as it does not exist, there are no ACLs, or
    the cluster does not tell.

    Raises KafkaException and TimeoutError without an answer.
    """
    options: dict[str, Any] = {"include_authorized_operations": True, "request_timeout": timeout_s}
    topics = [right.name for right in rights if right.resource is Resource.TOPIC]
    described: dict[str, Future[Any]] = admin.describe_topics(TopicCollection(topics), **options)
    ends_s = time.monotonic() + timeout_s
    allowed = []
    for right in rights:
        if right.resource is Resource.TOPIC:
            allowed.append(_operations(described[right.name], timeout_s))
            continue
        while True:
            [answer] = admin.describe_consumer_groups([right.name], **options).values()
            try:
                allowed.append(_operations(answer, timeout_s))
                break
            except KafkaException as error:
                if error.args[0].code() not in NO_COORDINATOR:
                    raise
                # The first group of a new cluster: its coordinator is there soon. Or the coordinator is away.
                if time.monotonic() >= ends_s:
                    allowed.append(None)
                    break
                time.sleep(_COORDINATOR_RETRY_S)
    return allowed


def _operations(answer: Future[Any], timeout_s: float) -> frozenset[str] | None:
    try:
        found: Collection[AclOperation] | None = answer.result(2 * timeout_s).authorized_operations
    except KafkaException as error:
        code = error.args[0].code()
        if code in (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED):
            return frozenset()
        if code in _ABSENT or code in NOT_OFFERED:
            return None
        raise
    return None if found is None else frozenset(name for name, each in _OPERATIONS.items() if each in found)
