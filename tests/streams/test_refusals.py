"""A process that Kafka refuses something is not ready, and says so once, until the brokers grant every right again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import structlog
from confluent_kafka import KafkaError

from relaygr.kafka import refusals as module
from relaygr.kafka.admin_process import CannotStart
from relaygr.kafka.refusals import Refusals
from relaygr.kafka.rights import Role
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
    monkeypatch.setattr(module, "missing_rights", brokers)
    monkeypatch.setattr(module, "ASK_S", 0.01)
    return brokers


@pytest.fixture
def refusals(brokers: Brokers) -> Iterator[Refusals]:
    made = Refusals(KafkaSettings(bootstrap="127.0.0.1:1"), Role.WORKER)
    yield made
    made.close()


def ask_twice(brokers: Brokers) -> None:
    for _ in range(2):
        assert brokers.asked.acquire(timeout=WITHIN_S)


def test_a_refusal_names_the_topic_and_the_remedy_until_the_brokers_grant_all(
    brokers: Brokers, refusals: Refusals
) -> None:
    assert refusals.sentence is None
    brokers.answer = RelayError("no answer")
    with structlog.testing.capture_logs() as lines:
        for _ in range(100):
            refusals.note("relaygr.results", REFUSED)
        ask_twice(brokers)
        assert refusals.sentence is not None
        assert "relaygr.results" in refusals.sentence
        assert "relaygr topics acls --role worker" in refusals.sentence
        brokers.answer = (SENTENCE,)
        assert becomes(lambda: refusals.sentence == SENTENCE)
        ask_twice(brokers)
        assert refusals.sentence == SENTENCE
        brokers.answer = ()
        assert becomes(lambda: refusals.sentence is None)
    assert [line["log_level"] for line in lines] == ["error", "info"]


def test_one_answer_is_not_enough(brokers: Brokers, refusals: Refusals) -> None:
    """A client does not tell that a right is taken away again within seconds, so only a second answer would."""
    said: list[str | None] = []
    brokers.while_asked = lambda: said.append(refusals.sentence)
    refusals.note("relaygr.results", REFUSED)
    assert becomes(lambda: refusals.sentence is None)
    assert len(said) == 2 and None not in said


def test_a_refusal_while_the_brokers_are_asked_counts(brokers: Brokers, refusals: Refusals) -> None:
    brokers.while_asked = lambda: refusals.note("relaygr.results", REFUSED)
    refusals.note("relaygr.results", REFUSED)
    ask_twice(brokers)
    assert refusals.sentence is not None
    brokers.while_asked = lambda: None
    assert becomes(lambda: refusals.sentence is None)


def test_a_right_that_is_taken_away_twice_is_said_twice(brokers: Brokers, refusals: Refusals) -> None:
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            refusals.note("relaygr.results", REFUSED)
            assert becomes(lambda: refusals.sentence is None)
    assert [line["log_level"] for line in lines] == ["error", "info"] * 2


@pytest.mark.parametrize("code", [KafkaError.MSG_SIZE_TOO_LARGE, KafkaError._MSG_TIMED_OUT, None])
def test_other_errors_and_successes_are_no_refusals(refusals: Refusals, code: int | None) -> None:
    refusals.note("relaygr.results", None if code is None else KafkaError(code))
    assert refusals.sentence is None


def test_where_nobody_can_ask_a_refusal_counts_until_none_follows(brokers: Brokers, refusals: Refusals) -> None:
    """The thread ended with the error, and the process was not ready for ever."""
    brokers.answer = CannotStart("cannot start")
    brokers.while_asked = lambda: refusals.note("relaygr.results", REFUSED)
    refusals.note("relaygr.results", REFUSED)
    ask_twice(brokers)
    assert refusals.sentence is not None
    brokers.while_asked = lambda: None
    assert becomes(lambda: refusals.sentence is None)


@pytest.mark.parametrize("topic", ["relaygr.retrieval", "another-team.results"])
def test_a_topic_that_the_role_does_not_use_is_logged_only(brokers: Brokers, refusals: Refusals, topic: str) -> None:
    """An application may publish histories with a gateway's client. Without the right to, the gateway was not ready."""
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            refusals.note(topic, REFUSED)
    assert refusals.sentence is None
    assert [(line["log_level"], line["topic"]) for line in lines] == [("warning", topic)]


def test_nobody_is_asked_after_the_close(brokers: Brokers, refusals: Refusals) -> None:
    refusals.close()
    refusals.note("relaygr.results", REFUSED)
    assert not brokers.asked.acquire(timeout=0.1)
