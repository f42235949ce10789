"""A trigger without a right on the broker: the probe names the right, and the trigger can be stopped at any time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from confluent_kafka.admin import AclBinding, AclBindingFilter, AclOperation, AclPermissionType, ResourcePatternType
from confluent_kafka.admin import ResourceType as Kind
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from relaygr.cluster.admin import create_topics
from relaygr.cluster.rights import Role, RoleRights
from relaygr.kafka import session as session_module
from relaygr.kafka.clients import make_admin
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings, SaslMechanism, Security, SecurityProtocol
from relaygr.schemas.topics import Topic
from relaygr.trigger.app import TriggerApp
from relaygr.trigger.settings import TriggerSettings
from tests.worlds.own_broker import own_broker

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

WITHIN_S = 60.0


class Rights:
    """Gives rights to the user `trigger`, as the super user."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._admin = make_admin(kafka, "rights")

    def give(self, kind: Kind, name: str, operation: AclOperation) -> None:
        rule = AclBinding(
            kind, name, ResourcePatternType.PREFIXED, "User:trigger", "*", operation, AclPermissionType.ALLOW
        )
        [answer] = self._admin.create_acls([rule]).values()
        answer.result(30)

    def take(self, kind: Kind, name: str) -> None:
        rules = AclBindingFilter(
            kind, name, ResourcePatternType.PREFIXED, "User:trigger", None, AclOperation.ANY, AclPermissionType.ANY
        )
        [answer] = self._admin.delete_acls([rules]).values()
        assert answer.result(30)


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[KafkaSettings, KafkaSettings]]:
    """A broker with access rules: the settings of the super user, and those of the user `trigger`."""
    jaas = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    properties = {
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": f'{jaas} user_trigger="secret";',
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    with own_broker({"SASL_PLAINTEXT": "SASL_PLAINTEXT"}, properties) as broker:
        owner = KafkaSettings(bootstrap=broker.bootstrap, topic_prefix="guarded", partitions=2)
        create_topics(owner)
        security = Security(
            protocol=SecurityProtocol.SASL_PLAINTEXT,
            sasl_mechanism=SaslMechanism.PLAIN,
            sasl_username="trigger",
            sasl_password=SecretStr("secret"),
        )
        place = {"bootstrap": broker.others["SASL_PLAINTEXT"], "security": security, "connect_timeout_s": 30}
        yield owner, owner.model_copy(update=place)


@contextlib.asynccontextmanager
async def running(kafka: KafkaSettings) -> AsyncIterator[TriggerApp]:
    """A trigger that must end within seconds after it is told to stop."""
    session = KafkaSession(kafka, "trigger-00", RoleRights(kafka, Role.TRIGGER))
    app = TriggerApp(session, TriggerSettings(), registry=CollectorRegistry())
    stop = asyncio.Event()
    task = asyncio.create_task(app.run(stop))
    try:
        yield app
    finally:
        stop.set()
        async with asyncio.timeout(15):
            await task
        await asyncio.to_thread(session.close)


async def until(condition: Callable[[], bool], app: TriggerApp) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end_s, app.readiness()
        await asyncio.sleep(0.05)


@pytest.mark.kafka
async def test_a_missing_right_is_named_until_it_is_given_at_the_start_and_later(
    guarded: tuple[KafkaSettings, KafkaSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "ASK_S", 1.0)
    owner, kafka = guarded
    rights = Rights(owner)
    rights.give(Kind.TOPIC, "guarded.", AclOperation.DESCRIBE)
    rights.give(Kind.GROUP, kafka.unjoined_group, AclOperation.DESCRIBE)
    for topic in (Topic.RETRIEVAL, Topic.PREINFER):
        rights.give(Kind.TOPIC, kafka.topic(topic), AclOperation.READ)
    for topic in (Topic.PREINFER, Topic.DEAD_LETTERS):
        rights.give(Kind.TOPIC, kafka.topic(topic), AclOperation.WRITE)
    async with running(kafka) as app:
        checks = app.readiness

        def names(check: str, sentence: str) -> Callable[[], bool]:
            return lambda: any(each.name == check and sentence in each.detail for each in checks().checks)

        await until(names("assigned", "give this user the right to read as this group"), app)
        await until(names("fleet", "Kafka refuses the workers topic"), app)
        assert not checks().ready
        rights.give(Kind.GROUP, kafka.trigger_group, AclOperation.READ)
        rights.give(Kind.TOPIC, kafka.topic(Topic.WORKERS), AclOperation.READ)
        await until(lambda: checks().ready, app)
        # Nothing is written, so that no message tells that a right is back.
        for topic in (Topic.WORKERS, Topic.RETRIEVAL):
            rights.take(Kind.TOPIC, kafka.topic(topic))
        await until(names("fleet", "Kafka refuses the workers topic"), app)
        await until(names("rights", f"may not Read topic {kafka.topic(Topic.RETRIEVAL)}"), app)
        for topic in (Topic.WORKERS, Topic.RETRIEVAL):
            rights.give(Kind.TOPIC, kafka.topic(topic), AclOperation.READ)
        await until(lambda: checks().ready, app)


async def test_a_trigger_is_stopped_while_it_starts() -> None:
    nobody = KafkaSettings(bootstrap="127.0.0.1:1", connect_timeout_s=600)
    async with running(nobody):
        await asyncio.sleep(0.2)
    while any(thread.name == "trigger-call" for thread in threading.enumerate()):
        await asyncio.sleep(0.05)
