"""A durable message survives what breaks a client: fatal errors, stale metadata, and a client that cannot be made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from relaygr.kafka import durable, session
from relaygr.kafka.clients import MOST_QUEUED
from relaygr.kafka.durable import DurableProducer
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from tests.waiting import until
from tests.worlds.faulty_cluster import FaultyCluster, faulty_cluster

WITHIN_S = 60.0
HISTORY = Topic.HISTORY


class Reports(list[tuple[bytes, KafkaError | None]]):
    """The reports of messages, in the order in which they came."""

    def send(self, producer: DurableProducer, topic: str, value: bytes) -> None:
        def done(error: KafkaError | None, _: Message | None) -> None:
            self.append((value, error))

        producer.produce(topic, value, b"ann", done)


@pytest.fixture(scope="module")
def cluster() -> Iterator[FaultyCluster]:
    with faulty_cluster() as started:
        yield started


@pytest.fixture
def fresh() -> Iterator[FaultyCluster]:
    with faulty_cluster() as started:
        yield started


@pytest.mark.parametrize(
    "codes",
    [
        pytest.param((0, 45), id="out of order: fatal"),
        pytest.param((0, 45, 45), id="fatal, and the next client is fatal too"),
        pytest.param((0, 47), id="invalid producer epoch"),
        pytest.param((0, 0, 90), id="producer fenced"),
        pytest.param((59, 0, 45), id="unknown producer id, then fatal"),
    ],
)
def test_messages_survive_the_errors_of_an_idempotent_producer(fresh: FaultyCluster, codes: tuple[int, ...]) -> None:
    """A client of librdkafka refuses every message after a fatal error, until its process ends."""
    topic = fresh.kafka.topic(HISTORY)
    producer, reports = KafkaSession(fresh.kafka, "test").durable_producer("test"), Reports()
    producer.connect(topic, 10)
    sent = [b"%d" % number for number in range(30)]
    # A client that has sent nothing yet is given another producer id instead.
    reports.send(producer, topic, sent[0])
    assert producer.flush(WITHIN_S) == 0
    fresh.answer_produce(*codes)
    # One alone: a real broker that refuses it refuses what is under way behind it, too, but this one would not.
    reports.send(producer, topic, sent[1])
    assert producer.flush(WITHIN_S) == 0
    for value in sent[2:]:
        reports.send(producer, topic, value)
        producer.poll(0.005)
    assert producer.flush(WITHIN_S) == 0
    assert sorted(reports) == sorted((value, None) for value in sent)
    assert set(fresh.values(HISTORY, len(sent))) == set(sent)


def test_messages_behind_a_fatal_error_keep_their_order(fresh: FaultyCluster) -> None:
    topic = fresh.kafka.topic(HISTORY)
    producer, reports = KafkaSession(fresh.kafka, "test").durable_producer("test"), Reports()
    producer.connect(topic, 10)
    sent = [b"%02d" % number for number in range(40)]
    reports.send(producer, topic, sent[0])
    assert producer.flush(WITHIN_S) == 0
    fresh.answer_produce(45)
    for value in sent[1:]:
        reports.send(producer, topic, value)
        producer.poll(0.002)
    assert producer.flush(WITHIN_S) == 0
    # All have one key, so they are on one partition.
    assert [*dict.fromkeys(fresh.values(HISTORY, len(sent)))] == sent


class Client:
    """A client of librdkafka whose reports a test writes."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Callable[..., None]]] = []

    def produce(self, _topic: str, *, value: bytes, on_delivery: Callable[..., None], **_: object) -> None:
        self.sent.append((value, on_delivery))

    def poll(self, _timeout_s: float) -> int:
        return 0


def test_messages_whose_reports_come_in_pieces_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second piece was produced again before the first one."""
    client, reports = Client(), Reports()
    monkeypatch.setattr(session, "make_producer", lambda *_: client)
    producer = KafkaSession(KafkaSettings(), "test").durable_producer("test")
    producer.make()
    values = [b"%d" % number for number in range(6)]
    for value in values:
        reports.send(producer, "topic", value)
    for piece in (client.sent[:3], client.sent[3:]):
        for _, report in piece:
            report(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART), None)
        producer.poll()
    until(lambda: len(client.sent) == 12, "they are produced again", meanwhile=producer.poll)
    assert [value for value, _ in client.sent[6:]] == values
    assert reports == []


def test_refusals_of_one_topic_hold_up_no_message_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refused message put off the next attempt of all that waited, and their end, too."""
    client, reports = Client(), Reports()
    monkeypatch.setattr(session, "make_producer", lambda *_: client)
    producer = KafkaSession(KafkaSettings(), "test").durable_producer("test")
    producer.make()
    reports.send(producer, "waits", b"again")
    client.sent[0][1](KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART), None)

    def refuse_another() -> None:
        reports.send(producer, "refused", b"refused")
        client.sent[-1][1](KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), None)
        producer.poll()

    until(
        lambda: [value for value, _ in client.sent].count(b"again") == 2, "it is tried again", meanwhile=refuse_another
    )


@pytest.mark.parametrize("code", [3, 100], ids=["unknown topic", "unknown topic id"])
def test_messages_wait_while_the_metadata_are_stale(fresh: FaultyCluster, code: int) -> None:
    topic = fresh.kafka.topic(HISTORY)
    producer, reports = KafkaSession(fresh.kafka, "test").durable_producer("test"), Reports()
    producer.connect(topic, 10)
    reports.send(producer, topic, b"first")
    assert producer.flush(WITHIN_S) == 0
    fresh.set_topic_error(HISTORY, code)
    # Until the client has read them: then messages wait here.

    def send_next() -> None:
        reports.send(producer, topic, b"next")
        producer.poll(0.02)

    until(lambda: producer._waiting, "a message waits", meanwhile=send_next)
    reports.send(producer, topic, b"last")
    fresh.set_topic_error(HISTORY, 0)
    assert producer.flush(WITHIN_S) == 0
    assert [error for _, error in reports if error is not None] == []
    assert fresh.values(HISTORY, len(reports))[-1] == b"last"


def test_messages_do_not_wait_for_those_of_another_topic(fresh: FaultyCluster) -> None:
    """A history for a topic that is missing held up the retrieval events of all users for 30 s."""
    retrieval, history = fresh.kafka.topic(Topic.RETRIEVAL), fresh.kafka.topic(HISTORY)
    producer, reports = KafkaSession(fresh.kafka, "test").durable_producer("test"), Reports()
    producer.connect(retrieval, 10)
    fresh.set_topic_error(HISTORY, 3)
    reports.send(producer, history, b"history")
    until(lambda: producer._waiting == 1, "the history waits", meanwhile=lambda: producer.poll(0.02))
    reports.send(producer, retrieval, b"event")
    until(lambda: reports == [(b"event", None)], "the event is there", meanwhile=lambda: producer.poll(0.02))
    fresh.set_topic_error(HISTORY, 0)
    assert producer.flush(WITHIN_S) == 0
    assert reports == [(b"event", None), (b"history", None)]


def test_a_message_whose_time_is_over_gets_the_cause(fresh: FaultyCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "DURABLE_S", 0.5)
    fresh.set_topic_error(HISTORY, 3)
    producer, reports = KafkaSession(fresh.kafka, "test").durable_producer("test"), Reports()
    reports.send(producer, fresh.kafka.topic(HISTORY), b"value")
    assert producer.flush(WITHIN_S) == 0
    [(_, error)] = reports
    assert error is not None
    assert "nknown" in error.str()


@pytest.mark.parametrize("code", [10, 29, 32, 44, 87])
def test_a_message_that_no_repetition_helps_fails_at_once(fresh: FaultyCluster, code: int) -> None:
    topic = fresh.kafka.topic(HISTORY)
    producer, reports = KafkaSession(fresh.kafka, "test").durable_producer("test"), Reports()
    producer.connect(topic, 10)
    reports.send(producer, topic, b"first")
    assert producer.flush(WITHIN_S) == 0
    fresh.answer_produce(code)
    reports.send(producer, topic, b"second")
    assert producer.flush(WITHIN_S) == 0
    assert [(value, error and error.code()) for value, error in reports] == [(b"first", None), (b"second", code)]


def test_a_message_that_is_too_large_is_refused(cluster: FaultyCluster) -> None:
    producer, reports = KafkaSession(cluster.kafka, "test").durable_producer("test"), Reports()
    producer.connect(cluster.kafka.topic(HISTORY), 10)
    with pytest.raises(KafkaException, match="size too large"):
        reports.send(producer, cluster.kafka.topic(HISTORY), bytes(9 << 20))
    assert (len(producer), reports) == (0, [])


class Maker:
    """Makes clients as a test tells it: `failures` times it raises, and it waits for `may_make`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int = 0) -> None:
        self.failures = failures
        self.may_make = threading.Event()
        self.threads: list[str] = []
        self._make = session.make_producer
        monkeypatch.setattr(session, "make_producer", self)
        monkeypatch.setattr(durable, "_REMAKE_S", 0.01)

    def __call__(self, *arguments: object) -> object:
        self.threads.append(threading.current_thread().name)
        assert self.may_make.wait(WITHIN_S)
        if self.failures:
            self.failures -= 1
            raise RelayError("the token file must hold one line")
        return self._make(*arguments)  # type: ignore[arg-type]


def test_no_call_waits_for_a_client_that_is_made(cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SASL/OAUTHBEARER a client takes a second, or ten without a valid token."""
    maker = Maker(monkeypatch)
    producer, reports = KafkaSession(cluster.kafka, "test").durable_producer("test"), Reports()
    topic = cluster.kafka.topic(Topic.DEAD_LETTERS)
    for number in range(5):
        reports.send(producer, topic, b"%d" % number)
        producer.poll()
    assert (len(producer), maker.threads, reports) == (5, ["test-connect"], [])
    maker.may_make.set()
    assert producer.flush(WITHIN_S) == 0
    assert [value for value, error in reports if error is None] == [b"%d" % number for number in range(5)]
    assert maker.threads == ["test-connect"]


def test_a_client_that_cannot_be_made_is_tried_again(cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker(monkeypatch, failures=3)
    maker.may_make.set()
    producer, reports = KafkaSession(cluster.kafka, "test").durable_producer("test"), Reports()
    reports.send(producer, cluster.kafka.topic(Topic.DEAD_LETTERS), b"value")
    assert producer.flush(WITHIN_S) == 0
    assert (reports, len(maker.threads)) == ([(b"value", None)], 4)


def test_messages_without_a_client_are_failed_with_its_cause(
    cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = Maker(monkeypatch, failures=1_000_000)
    maker.may_make.set()
    monkeypatch.setattr(durable, "DURABLE_S", 0.2)
    producer, reports = KafkaSession(cluster.kafka, "test").durable_producer("test"), Reports()
    reports.send(producer, cluster.kafka.topic(Topic.DEAD_LETTERS), b"value")
    assert producer.flush(WITHIN_S) == 0
    [(_, error)] = reports
    assert error is not None
    assert "the token file must hold one line" in error.str()


def test_a_renewed_client_takes_the_messages_of_one_that_no_broker_accepts(
    cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an expired certificate they failed after 30 s, though there was another client meanwhile."""
    topic = cluster.kafka.topic(Topic.BEHAVIOURS)
    makers = iter((cluster.kafka.model_copy(update={"bootstrap": "127.0.0.1:1"}), cluster.kafka))
    make = session.make_producer
    monkeypatch.setattr(session, "make_producer", lambda _, *arguments: make(next(makers), *arguments))
    producer, reports = KafkaSession(cluster.kafka, "test").durable_producer("test"), Reports()
    producer.make()
    sent = [b"%02d" % number for number in range(20)]
    for value in sent[:10]:
        reports.send(producer, topic, value)
        producer.poll(0.002)
    producer.renew()
    for value in sent[10:]:
        reports.send(producer, topic, value)
        producer.poll(0.002)
    assert producer.flush(WITHIN_S) == 0
    assert [error for _, error in reports if error is not None] == []
    assert cluster.values(Topic.BEHAVIOURS, len(sent)) == sent


def test_a_renewed_client_neither_loses_nor_doubles_a_message(
    fresh: FaultyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = Maker(monkeypatch, failures=0)
    maker.may_make.set()
    topic = fresh.kafka.topic(HISTORY)
    producer, reports = KafkaSession(fresh.kafka, "test").durable_producer("test"), Reports()
    producer.connect(topic, 10)
    sent: list[bytes] = []

    def send_next() -> None:
        sent.append(b"%04d" % len(sent))
        reports.send(producer, topic, sent[-1])
        producer.poll(0.002)

    def renew() -> None:
        send_next()
        producer.renew()

    until(lambda: len(maker.threads) >= 6, "six clients were made", meanwhile=renew)
    # A client that cannot be made is tried again, and the one before goes on.
    made, maker.failures = len(maker.threads), 2
    producer.renew()
    until(lambda: len(maker.threads) >= made + 3, "three more were tried", meanwhile=send_next)
    assert producer.flush(WITHIN_S) == 0
    assert reports == [(value, None) for value in sent]
    assert fresh.values(HISTORY, len(sent)) == sent


@pytest.mark.parametrize("polls", [0, 1, 20])
def test_a_close_while_a_client_is_renewed_leaves_no_message_without_a_report(polls: int) -> None:
    producer, reports = KafkaSession(KafkaSettings(bootstrap="127.0.0.1:1"), "test").durable_producer("test"), Reports()
    producer.make()
    for number in range(10):
        reports.send(producer, "nowhere", b"%d" % number)
    producer.renew()
    for _ in range(polls):
        producer.poll(0.002)
    assert producer.close(0.0) == 10
    assert len(reports) == 10
    assert all(error is not None for _, error in reports)


def test_no_client_is_made_anew_that_was_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker(monkeypatch)
    producer = KafkaSession(KafkaSettings(bootstrap="127.0.0.1:1"), "test").durable_producer("test")
    producer.renew()
    producer.poll()
    assert maker.threads == []


def test_the_messages_that_wait_are_bounded() -> None:
    producer, reports = KafkaSession(KafkaSettings(bootstrap="127.0.0.1:1"), "test").durable_producer("test"), Reports()
    for _ in range(MOST_QUEUED):
        reports.send(producer, "nowhere", b"")
    with pytest.raises(BufferError):
        reports.send(producer, "nowhere", b"")
    assert len(producer) == MOST_QUEUED
    assert producer.close(0.0) == MOST_QUEUED
    assert len(reports) == MOST_QUEUED
    assert all(error is not None for _, error in reports)
