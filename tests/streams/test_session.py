"""What a process hears of its Kafka clients comes to one place."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from relaygr.kafka import session as module
from relaygr.kafka.clients import ProducerKind
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings, SaslMechanism, Security, SecurityProtocol
from relaygr.runtime.clock import ManualClock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from tests.waiting import until
from tests.worlds.faulty_cluster import FaultyCluster, faulty_cluster

NOBODY = KafkaSettings(bootstrap="127.0.0.1:1")
REFUSED = KafkaError.TOPIC_AUTHORIZATION_FAILED


class Noting(KafkaSession):
    """Keeps what it is told."""

    def __init__(self, kafka: KafkaSettings) -> None:
        super().__init__(kafka, "test", registry=CollectorRegistry())
        self.noted: list[tuple[str, int]] = []

    def note(self, topic: str, error: KafkaError) -> None:
        self.noted.append((topic, error.code()))


class Renewed:
    """A client that is made anew, after some failures."""

    def __init__(self, password: Path, failures: int = 0) -> None:
        self._password, self._failures = password, failures
        self.tried: list[str] = []

    def renew(self) -> None:
        self.tried.append(self._password.read_text())
        if len(self.tried) <= self._failures:
            raise RelayError("no connection")


@pytest.fixture(scope="module")
def cluster() -> Iterator[FaultyCluster]:
    with faulty_cluster() as started:
        yield started


@pytest.mark.parametrize("kind", [ProducerKind.LATENCY, ProducerKind.PREINFER])
def test_a_session_hears_of_each_message_that_kafka_refuses(cluster: FaultyCluster, kind: ProducerKind) -> None:
    """A worker without the right to write results was ready, and every request timed out."""
    session, topic = Noting(cluster.kafka), cluster.kafka.topic(Topic.RESULTS)
    producer, reports = session.producer(kind, "test"), list[KafkaError | None]()
    producer.list_topics(topic, timeout=10)
    cluster.answer_produce(REFUSED)
    producer.produce(topic, b"refused", on_delivery=lambda error, _: reports.append(error))
    producer.flush(10)
    other = cluster.kafka.topic(Topic.RANKING)
    producer.produce(other, b"taken", b"key", headers=[("a", b"b")], on_delivery=lambda error, _: reports.append(error))
    producer.produce(other, b"nobody waits for its report")
    producer.flush(10)
    assert [error and error.code() for error in reports] == [REFUSED, None]
    assert session.noted == [(topic, REFUSED)]


def test_a_message_that_is_refused_at_once_is_heard_of_and_the_caller_is_told(cluster: FaultyCluster) -> None:
    session, topic = Noting(cluster.kafka), cluster.kafka.topic(Topic.RESULTS)
    producer = session.producer(ProducerKind.LATENCY, "test")
    with pytest.raises(KafkaException):
        producer.produce(topic, bytes(9 << 20))
    assert session.noted == [(topic, KafkaError.MSG_SIZE_TOO_LARGE)]


def test_a_refused_user_is_remembered_until_a_broker_accepts_the_process_or_for_a_while() -> None:
    clock = ManualClock(monotonic_us=1)
    session = KafkaSession(NOBODY, "test", clock=clock)
    refused = session._errors("test", None, None)
    refused(KafkaError(KafkaError._TRANSPORT, "Connection refused"))
    assert session.rejection is None
    refused(KafkaError(KafkaError._AUTHENTICATION, "sasl/x:9/1: SASL authentication error: no such user"))
    assert session.rejection == "SASL authentication error: no such user"
    session.accepted()
    assert session.rejection is None
    refused(KafkaError(KafkaError._AUTHENTICATION, "no such user"))
    clock.advance_us(module.REJECTION_MEMORY_US + 1)
    assert session.rejection is None


def with_password(path: Path) -> KafkaSettings:
    security = Security(
        protocol=SecurityProtocol.SASL_PLAINTEXT,
        sasl_mechanism=SaslMechanism.PLAIN,
        sasl_username="u",
        sasl_password_file=path,
    )
    return KafkaSettings(security=security)


def test_a_process_ends_for_new_files_only_if_a_client_of_the_files_before_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong new password was refused on one new client, and ended a process whose connections went on."""
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    ended, made = list[int](), list[int]()
    kill = SimpleNamespace(kill=lambda _process_id, number: ended.append(number), getpid=os.getpid)
    monkeypatch.setattr(module, "os", kill)
    password = tmp_path / "password"
    password.write_text("one")
    session, refusal = KafkaSession(with_password(password), "test"), KafkaError(KafkaError._AUTHENTICATION, "no")
    refuse_before = session._errors("before", None, None)

    class Newer:
        def renew(self) -> None:
            session._errors("newer", None, None)(refusal)
            made.append(1)

    newer = Newer()
    session.on_new_files(newer.renew)
    session.follow_files(ends_process=True)
    password.write_text("wrong")
    until(lambda: made, "the client is made anew")
    assert session.rejection is not None
    password.write_text("wrong, too")
    until(lambda: len(made) == 2 and session._files_changed == 2, "and again, after a look at the rejection")
    assert not ended
    refuse_before(refusal)
    until(lambda: ended, "the process ends")
    session.close()


def test_a_client_that_cannot_be_made_with_new_files_is_made_again_and_the_others_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    password = tmp_path / "password"
    password.write_text("one")
    session = KafkaSession(with_password(password), "test")
    failing, other = Renewed(password, failures=2), Renewed(password)
    session.on_new_files(failing.renew)
    session.on_new_files(other.renew)
    session.follow_files()
    password.write_text("two")
    until(lambda: len(failing.tried) == 3, "the client is made")
    password.write_text("three")
    until(lambda: len(failing.tried) == 4 and len(other.tried) == 2, "both are made anew")
    session.close()
    assert failing.tried == ["two", "two", "two", "three"] and other.tried == ["two", "three"]


def test_a_session_keeps_no_producer_alive() -> None:
    """Its client stayed connected after the close."""
    session = KafkaSession(NOBODY, "test")
    producer = session.durable_producer("test")
    gone = weakref.ref(producer)
    del producer
    assert gone() is None


def test_a_session_without_files_has_no_thread() -> None:
    security = Security(
        protocol=SecurityProtocol.SASL_PLAINTEXT,
        sasl_mechanism=SaslMechanism.PLAIN,
        sasl_username="u",
        sasl_password=SecretStr("secret"),
    )
    session = KafkaSession(KafkaSettings(security=security), "test")
    session.follow_files()
    assert session._following is None
    session.close()
