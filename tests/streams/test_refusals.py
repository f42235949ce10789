"""A process that Kafka refuses something is not ready, and says so once, until the brokers grant every right again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import structlog
from confluent_kafka import KafkaError

from relaygr.cluster import rights
from relaygr.cluster.admin_process import CannotStart
from relaygr.cluster.rights import Role, RoleRights
from relaygr.kafka import session as module
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from tests.waiting import becomes

WITHIN_S = 20.0
REFUSED = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
SENTENCE = "worker may not Write topic relaygr.results, as a worker must"


class Brokers:
    """What the brokers answer about rights: sentences, or an error."""

    def __init__(self) -> None:
        self.answer: tuple[str, ...] | Exception = ()
        self.asked = threading.Semaphore(0)
        self.while_asked: Callable[[], None] = lambda: None

    def __call__(self, kafka: KafkaSettings, role: Role, admin: object) -> tuple[str, ...]:
        assert role is Role.WORKER
        self.while_asked()
        answer = self.answer
        self.asked.release()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Brokers:
    brokers = Brokers()
    monkeypatch.setattr(rights, "missing_rights", brokers)
    monkeypatch.setattr(module, "ASK_S", 0.01)
    return brokers


@pytest.fixture
def session(brokers: Brokers) -> Iterator[KafkaSession]:
    kafka = KafkaSettings(bootstrap="127.0.0.1:1")
    made = KafkaSession(kafka, "worker-00", RoleRights(kafka, Role.WORKER))
    yield made
    made.close()


def ask_twice(brokers: Brokers) -> None:
    for _ in range(2):
        assert brokers.asked.acquire(timeout=WITHIN_S)


def test_a_refusal_names_the_topic_and_the_remedy_until_the_brokers_grant_all(
    brokers: Brokers, session: KafkaSession
) -> None:
    assert session.refusal is None
    brokers.answer = RelayError("no answer")
    with structlog.testing.capture_logs() as lines:
        for _ in range(100):
            session.note("relaygr.results", REFUSED)
        ask_twice(brokers)
        assert session.refusal is not None
        assert "relaygr.results" in session.refusal
        assert "relaygr topics acls --role worker" in session.refusal
        brokers.answer = (SENTENCE,)
        assert becomes(lambda: session.refusal == SENTENCE)
        ask_twice(brokers)
        assert session.refusal == SENTENCE
        brokers.answer = ()
        assert becomes(lambda: session.refusal is None)
    assert [line["log_level"] for line in lines] == ["error", "info"]


def test_one_answer_is_not_enough(brokers: Brokers, session: KafkaSession) -> None:
    """A client does not tell that a right is taken away again within seconds, so only a second answer would."""
    said: list[str | None] = []
    brokers.while_asked = lambda: said.append(session.refusal)
    session.note("relaygr.results", REFUSED)
    assert becomes(lambda: session.refusal is None)
    assert len(said) == 2 and None not in said


def test_a_refusal_while_the_brokers_are_asked_counts(brokers: Brokers, session: KafkaSession) -> None:
    brokers.while_asked = lambda: session.note("relaygr.results", REFUSED)
    session.note("relaygr.results", REFUSED)
    ask_twice(brokers)
    assert session.refusal is not None
    brokers.while_asked = lambda: None
    assert becomes(lambda: session.refusal is None)


def test_a_right_that_is_taken_away_twice_is_said_twice(brokers: Brokers, session: KafkaSession) -> None:
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            session.note("relaygr.results", REFUSED)
            assert becomes(lambda: session.refusal is None)
    assert [line["log_level"] for line in lines] == ["error", "info"] * 2


@pytest.mark.parametrize("code", [KafkaError.MSG_SIZE_TOO_LARGE, KafkaError._MSG_TIMED_OUT])
def test_other_errors_are_no_refusals(session: KafkaSession, code: int) -> None:
    session.note("relaygr.results", KafkaError(code))
    assert session.refusal is None


def test_where_nobody_can_ask_a_refusal_counts_until_none_follows(brokers: Brokers, session: KafkaSession) -> None:
    """The thread ended with the error, and the process was not ready for ever."""
    brokers.answer = CannotStart("cannot start")
    brokers.while_asked = lambda: session.note("relaygr.results", REFUSED)
    session.note("relaygr.results", REFUSED)
    ask_twice(brokers)
    assert session.refusal is not None
    brokers.while_asked = lambda: None
    assert becomes(lambda: session.refusal is None)


@pytest.mark.parametrize("topic", ["relaygr.retrieval", "another-team.results"])
def test_a_topic_that_the_role_does_not_use_is_logged_only(brokers: Brokers, session: KafkaSession, topic: str) -> None:
    """An application may publish histories with a gateway's client. Without the right to, the gateway was not ready."""
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            session.note(topic, REFUSED)
    assert session.refusal is None
    assert [(line["log_level"], line["topic"]) for line in lines] == [("warning", topic)]


def test_nobody_is_asked_after_the_close(brokers: Brokers, session: KafkaSession) -> None:
    session.close()
    session.note("relaygr.results", REFUSED)
    assert not brokers.asked.acquire(timeout=0.1)
