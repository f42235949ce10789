"""Least rights: the whole relay runs with them on a broker with SCRAM and ACLs, and each that is missing is named."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from relaygr.client import RelayClient
from relaygr.client.outcome import DeliveryReport
from relaygr.client.publisher import EventPublisher
from relaygr.cluster.admin import create_topics, require_topics
from relaygr.cluster.admin_process import AdminProcess
from relaygr.cluster.rights import Resource, Right, Role, missing_rights, require_rights, rights_of
from relaygr.devbroker import BrokerChoice, LocalBroker
from relaygr.devbroker.local import free_ports
from relaygr.ingest.reading import read_interactions
from relaygr.kafka.clients import ProducerKind, make_admin, make_producer
from relaygr.kafka.settings import KafkaSettings, SaslMechanism, Security, SecurityProtocol
from relaygr.processes import CommandProcess
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import RankingResult
from relaygr.schemas.topics import Topic
from relaygr.training.collect import collect
from tests.waiting import until
from tests.worlds.own_broker import own_broker
from tests.worlds.relay import Relay, candidates_of, environment, history_of, jobs_done, new_user

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

PASSWORD = "open sesame"
OPERATIONS = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Describe": AclOperation.DESCRIBE,
    "Create": AclOperation.CREATE,
    "Delete": AclOperation.DELETE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
    "AlterConfigs": AclOperation.ALTER_CONFIGS,
}
KINDS = {Resource.TOPIC: ResourceType.TOPIC, Resource.GROUP: ResourceType.GROUP}
PROCESSES = (Role.GATEWAY, Role.TRIGGER, Role.WORKER, Role.LAG, Role.HISTORY_PUBLISHER, Role.COLLECTOR)
KAFKA = KafkaSettings(topic_prefix="rights", group_prefix="rights", partitions=4, connect_timeout_s=30)
ASKS_EACH_SECOND = ("tests.worlds.impatient", "relaygr.kafka.session.ASK_S=1")
TAKEN: list[dict[Role, tuple[Topic, str]]] = [
    {
        Role.WORKER: (Topic.WORKERS, "Write"),
        Role.TRIGGER: (Topic.PREINFER, "Write"),
        Role.GATEWAY: (Topic.RANKING, "Write"),
    },
    {Role.WORKER: (Topic.HISTORY, "Read"), Role.GATEWAY: (Topic.RETRIEVAL, "Write")},
    {
        Role.WORKER: (Topic.BEHAVIOURS, "Read"),
        Role.TRIGGER: (Topic.DEAD_LETTERS, "Write"),
        Role.GATEWAY: (Topic.RESULTS, "Read"),
    },
    {Role.WORKER: (Topic.RESULTS, "Write")},
    {Role.WORKER: (Topic.DEAD_LETTERS, "Write")},
]
"""Rights without which a running process would only time out. Those of a row are taken at once: none keeps the messages
away by which another process of the row notices.
"""
REMOVABLE = {
    (role, right.resource, operation): right
    for role in PROCESSES
    for right in rights_of(role, KAFKA)
    for operation in right.operations
}
"""One right of each kind of each role: the checks of the others differ by a name only."""


def binding(role: Role, right: Right, operation: str) -> AclBinding:
    return AclBinding(
        KINDS[right.resource], right.name, ResourcePatternType.LITERAL, f"User:{role}", "*",
        OPERATIONS[operation], AclPermissionType.ALLOW,
    )  # fmt: skip


def filter_of(each: AclBinding) -> AclBindingFilter:
    return AclBindingFilter(
        each.restype, each.name, each.resource_pattern_type, each.principal, each.host,
        each.operation, each.permission_type,
    )  # fmt: skip


@dataclass
class GuardedBroker:
    """A broker on which each role's user has exactly the least rights of its role."""

    admin: AdminClient
    secured: KafkaSettings
    asking: dict[Role, AdminProcess] = field(default_factory=dict)
    """A process for each role, which asks as its user."""

    def grant(self, bindings: list[AclBinding]) -> None:
        for future in self.admin.create_acls(bindings, request_timeout=30).values():
            future.result(60)

    def revoke(self, bindings: list[AclBinding]) -> None:
        for future in self.admin.delete_acls([filter_of(each) for each in bindings], request_timeout=30).values():
            assert len(list(future.result(60))) == 1

    def settings(self, role: Role) -> KafkaSettings:
        """The settings of the role's user."""
        security = self.secured.security.model_copy(update={"sasl_username": role.value})
        return self.secured.model_copy(update={"security": security})

    def missing(self, role: Role) -> tuple[str, ...]:
        """A sentence for each right that the role's user lacks now."""
        return missing_rights(self.settings(role), role, self.asking[role])

    @contextmanager
    def without(self, role: Role, right: Right, operations: Sequence[str]) -> Iterator[None]:
        """The role's user lacks these operations while the block runs."""
        taken = [binding(role, right, operation) for operation in operations]
        self.revoke(taken)
        try:
            until(lambda: bool(self.missing(role)), "the right is gone", 30)
            yield
        finally:
            self.grant(taken)
            until(lambda: not self.missing(role), "the right is back", 30)


@pytest.fixture(scope="module")
def guarded(real_broker: LocalBroker) -> Iterator[GuardedBroker]:
    if real_broker.kind is not BrokerChoice.KAFKA:
        pytest.skip("tests run on a Kafka that they did not start")
    scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    properties = {
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.sasl_plaintext.scram-sha-512.sasl.jaas.config": scram,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        # The listener without a login is the administrator's.
        "super.users": "User:ANONYMOUS",
    }
    with own_broker({"SASL_PLAINTEXT": "SASL_PLAINTEXT"}, properties) as broker:
        plain = KAFKA.model_copy(update={"bootstrap": broker.bootstrap})
        admin = make_admin(plain, "test-admin")
        credentials = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        users = [UserScramCredentialUpsertion(role.value, credentials, PASSWORD.encode()) for role in Role]
        for future in admin.alter_user_scram_credentials(users, request_timeout=30).values():
            future.result(60)
        security = Security(
            protocol=SecurityProtocol.SASL_PLAINTEXT,
            sasl_mechanism=SaslMechanism.SCRAM_SHA_512,
            sasl_username="nobody",
            sasl_password=SecretStr(PASSWORD),
        )
        secured = plain.model_copy(update={"bootstrap": broker.others["SASL_PLAINTEXT"], "security": security})
        guarded = GuardedBroker(admin, secured)
        guarded.grant(
            [
                binding(role, right, operation)
                for role in Role
                for right in rights_of(role, KAFKA)
                for operation in right.operations
            ]
        )
        # The administrator's role creates the topics, with its own rights.
        created: list[bool] = []

        def creates() -> bool:
            try:
                created.append(create_topics(guarded.settings(Role.ADMIN), repair=True).ok)
            except RelayError:
                return False
            return True

        until(creates, "the administrator's rights are in effect", 60)
        assert created == [True]
        with ExitStack() as stack:
            for role in Role:
                guarded.asking[role] = stack.enter_context(AdminProcess(guarded.settings(role), f"test-{role}"))
                assert guarded.missing(role) == ()
            yield guarded


def publish_history(kafka: KafkaSettings, user: str) -> None:
    reports: list[DeliveryReport] = []
    publisher = EventPublisher(kafka, "test-history")
    publisher.start(Topic.HISTORY)
    publisher.publish_history(history_of(user, 200), reports.append)
    publisher.close(30)
    assert [each.delivered for each in reports] == [True]


def ranked(client: RelayClient, user: str) -> RankingResult | None:
    """Asks as a gateway does; None without a result."""
    client.publish_retrieval(
        user, expected_ranking_in_ms=200, expected_candidates=20, expected_suffix=0, ranking_budget_ms=5_000
    )
    return client.rank(user, candidates_of(), budget_ms=5_000).result


def post(port: int, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=30).close()


def rights_check(child: CommandProcess) -> dict[str, Any]:
    """The check `rights` of a process's readiness."""
    try:
        body = urllib.request.urlopen(f"http://127.0.0.1:{child.port}/readyz", timeout=30).read()
    except urllib.error.HTTPError as refused:
        body = refused.read()
    [check] = [each for each in json.loads(body)["checks"] if each["name"] == "rights"]
    return dict(check)


def test_the_whole_relay_runs_with_the_least_rights(guarded: GuardedBroker, model: Path, tmp_path: Path) -> None:
    with Relay(guarded.secured, tmp_path, model) as relay:
        worker = relay.start_worker("worker-00", f"security.sasl_username={Role.WORKER}")
        trigger = relay.processes.start("trigger", ["trigger"], "trigger", [f"security.sasl_username={Role.TRIGGER}"])
        relay.processes.await_ready([worker, trigger], 120)
        user = new_user()
        publish_history(guarded.settings(Role.HISTORY_PUBLISHER), user)
        with RelayClient(guarded.settings(Role.GATEWAY), "gateway-00", registry=CollectorRegistry()) as client:
            until(lambda: ranked(client, user) is not None, "a ranked request", 60)

            def has_done_a_job() -> bool:
                """A job that comes after its request is not needed: each try is of another user."""
                other = new_user()
                publish_history(guarded.settings(Role.HISTORY_PUBLISHER), other)
                ranked(client, other)
                return sum(jobs_done(worker).values()) > 0

            until(has_done_a_job, "a pre-infer job", 60)
        lag = subprocess.run(
            [sys.executable, "-m", "relaygr", "lag", "--json", "--config", str(tmp_path / "settings.yaml"),
             "--set", f"security.sasl_username={Role.LAG}"],
            capture_output=True, text=True, timeout=120, env=environment(), check=False,
        )  # fmt: skip
        assert "authoriz" not in (lag.stdout + lag.stderr).lower(), lag.stdout + lag.stderr
        assert KAFKA.workers_group in lag.stdout and KAFKA.trigger_group in lag.stdout
        said = worker.log_tail() + trigger.log_tail()
        assert "authoriz" not in said.lower(), said


def test_behaviours_are_collected_with_the_least_rights(guarded: GuardedBroker, tmp_path: Path) -> None:
    user = new_user()
    publish_history(guarded.settings(Role.HISTORY_PUBLISHER), user)
    kafka = guarded.settings(Role.COLLECTOR)
    require_topics(kafka, Role.COLLECTOR)
    found = collect(
        kafka, tmp_path / "collected", has_ratings=False, max_bytes=16 << 20, max_ahead_ms=0,
        follow_s=None, is_stopping=lambda: False,
    )  # fmt: skip
    assert found.reached_end and user in read_interactions(tmp_path / "collected").users


@pytest.mark.timeout(900)  # One relay loses ten rights, a few at a time.
def test_a_right_that_is_taken_away_at_run_time_makes_the_process_not_ready(
    guarded: GuardedBroker, model: Path, tmp_path: Path
) -> None:
    """Every request timed out, the worker was ready, and its log was empty."""
    (door,) = free_ports(1)
    garbage = make_producer(guarded.settings(Role.GATEWAY), ProducerKind.LATENCY, "test-garbage")

    def use_everything() -> None:
        """Messages of every kind, whose answers do not matter."""
        for topic in (Topic.RANKING, Topic.RETRIEVAL):
            with contextlib.suppress(KafkaException):
                garbage.produce(KAFKA.topic(topic), b"garbage")
        garbage.poll(0)
        user = new_user()
        publish_history(guarded.settings(Role.HISTORY_PUBLISHER), user)
        impression = {"user_id": user, "expected_ranking_in_ms": 200, "expected_candidates": 20}
        post(door, "/v1/retrieval", impression | {"expected_suffix": 0, "ranking_budget_ms": 5_000})
        post(door, "/v1/rank", {"user_id": user, "candidates": candidates_of().tolist(), "budget_ms": 500})

    with Relay(guarded.secured, tmp_path, model) as relay:
        settings = {
            Role.WORKER: ["worker.worker_id=worker-00", f"worker.history_path={tmp_path / 'history'}"],
            Role.TRIGGER: [],
            Role.GATEWAY: [f"gateway.listen_port={door}", "gateway.gateway_id=door"],
        }
        children = {
            role: relay.processes.start(
                str(role), [role], role, [f"security.sasl_username={role}", *own], module=ASKS_EACH_SECOND
            )
            for role, own in settings.items()
        }
        relay.processes.await_ready([*children.values()], 120)
        said = dict.fromkeys(children, 0)
        for taken in TAKEN:
            with ExitStack() as stack:
                for role, (topic, operation) in taken.items():
                    right = Right(Resource.TOPIC, KAFKA.topic(topic), (operation,))
                    stack.enter_context(guarded.without(role, right, [operation]))

                def is_told(role: Role, topic: Topic, operation: str) -> bool:
                    check = rights_check(children[role])
                    return not check["ok"] and f"may not {operation} topic {KAFKA.topic(topic)}" in check["detail"]

                def all_are_told(taken: dict[Role, tuple[Topic, str]] = taken) -> bool:
                    use_everything()
                    return all(is_told(role, *of) for role, of in taken.items())

                until(all_are_told, f"{', '.join(taken)} are not ready without {taken}", 90)
            relay.processes.await_ready([children[role] for role in taken], 90)
            for role in taken:
                said[role] += 1
                lines = children[role].log.read_text().count("Kafka refuses this process, so it is not ready")
                assert lines == said[role], (role, taken, children[role].log_tail())
        garbage.flush(1)


@pytest.mark.parametrize(("role", "resource", "operation"), REMOVABLE, ids=str)
def test_a_missing_right_is_named_in_a_sentence(
    guarded: GuardedBroker, role: Role, resource: Resource, operation: str
) -> None:
    right = REMOVABLE[role, resource, operation]
    with guarded.without(role, right, [operation]), pytest.raises(RelayError) as refused:
        require_rights(guarded.settings(role), role, guarded.asking[role])
    assert str(refused.value) == (
        f"{role} may not {operation} {right.resource} {right.name}, as a {role} must. "
        f"`relaygr topics acls --role {role}` prints the commands that grant it."
    )


@pytest.mark.parametrize(("role", "topic"), [(Role.TRIGGER, Topic.PREINFER), (Role.WORKER, Topic.HISTORY)])
def test_a_process_without_a_right_does_not_start(
    guarded: GuardedBroker, role: Role, topic: Topic, model: Path, tmp_path: Path
) -> None:
    """A worker without the histories was alive and silent, a trigger without the jobs was ready."""
    [right] = [each for each in rights_of(role, KAFKA) if each.name == KAFKA.topic(topic)]
    with guarded.without(role, right, right.operations), Relay(guarded.secured, tmp_path, model) as relay:
        child = relay.processes.start(role.value, [role.value], role.value, [f"security.sasl_username={role}"])
        assert child.process.wait(90) == 1
        operations = " and ".join(right.operations)
        assert f"{role} may not {operations} topic {right.name}" in " ".join(child.log_tail().split())
        relay.forget(child)


def test_a_gateway_without_a_right_does_not_connect(guarded: GuardedBroker) -> None:
    [right] = [each for each in rights_of(Role.GATEWAY, KAFKA) if each.name == KAFKA.topic(Topic.RANKING)]
    client = RelayClient(guarded.settings(Role.GATEWAY), "gateway-01", registry=CollectorRegistry())
    with (
        guarded.without(Role.GATEWAY, right, ["Write"]),
        pytest.raises(RelayError, match=r"gateway may not Write topic rights\.ranking"),
    ):
        client.start()
