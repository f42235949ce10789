"""The thread that updates the fleet from the workers topic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer

import relaygr.trigger.fleet_reader
from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import SystemClock
from relaygr.schemas.codec import encode
from relaygr.schemas.headers import WORKERS_GROUP
from relaygr.schemas.messages import LatencyCoefficients, WorkerState, WorkerStatus
from relaygr.schemas.topics import Topic
from relaygr.trigger.fleet import Fleet
from relaygr.trigger.fleet_reader import FleetReader
from tests.waiting import becomes

WITHIN_S = 10.0


def status(worker_id: str) -> WorkerStatus:
    return WorkerStatus(
        worker_id, WorkerState.READY, SystemClock().wall_us(), 1, (0, 1), "abc", 1024, 1, 1, 8192, 2**30, 2**30, 0, 0,
        1000, 2000, LatencyCoefficients(300, 2, 0.001, 200, 1.5, 0.0008, 250, 3, 0.002, 20, 0.0001),
    )  # fmt: skip


@contextmanager
def reading(kafka: KafkaSettings, on_bad: Callable[[], None] | None = None) -> Iterator[tuple[FleetReader, Fleet]]:
    fleet = Fleet(status_stale_ms=60_000)
    reader = FleetReader(kafka, fleet, SystemClock(), "test-fleet", on_bad)
    reader.start()
    try:
        yield reader, fleet
    finally:
        reader.stop()


def write(kafka: KafkaSettings, *records: tuple[bytes | None, bytes | None]) -> None:
    producer = make_producer(kafka, ProducerKind.DURABLE, "test-writer")
    for key, value in records:
        producer.produce(kafka.topic(Topic.WORKERS), value, key)
    assert producer.flush(10) == 0


@pytest.mark.slow
def test_an_empty_topic_is_read_to_its_end_at_once(kafka_settings: KafkaSettings) -> None:
    with reading(kafka_settings) as (reader, _):
        assert becomes(lambda: reader.caught_up)
        assert reader.heard_us == 0


@pytest.mark.slow
@pytest.mark.parametrize("broker", [pytest.param("kafka", marks=pytest.mark.kafka)], indirect=True)
def test_an_end_without_a_message_is_reached_while_the_fleet_talks_on(
    kafka_settings: KafkaSettings,
) -> None:
    """Each status is followed by the marker of its transaction, so none of them is at the end of the log."""
    stop, talks = threading.Event(), threading.Event()
    producer = Producer(
        {"bootstrap.servers": kafka_settings.bootstrap, "transactional.id": kafka_settings.topic_prefix}
    )
    producer.init_transactions(10)

    def talk() -> None:
        while not stop.wait(0.02):
            producer.begin_transaction()
            producer.produce(kafka_settings.topic(Topic.WORKERS), encode(status("worker-00")), b"worker-00")
            producer.commit_transaction(10)
            talks.set()

    talker = threading.Thread(target=talk)
    talker.start()
    assert talks.wait(WITHIN_S)
    try:
        with reading(kafka_settings) as (reader, _):
            assert becomes(lambda: reader.caught_up)
    finally:
        stop.set()
        talker.join()


@pytest.mark.slow
def test_a_fleet_that_never_stops_talking_is_caught_up_with(kafka_settings: KafkaSettings) -> None:
    """With ten workers a status comes every 50 ms. The end was once looked up only after 200 ms without one: never."""
    stop, talks = threading.Event(), threading.Event()
    producer = make_producer(kafka_settings, ProducerKind.DURABLE, "test-writer")

    def talk() -> None:
        while not stop.wait(0.05):
            producer.produce(kafka_settings.topic(Topic.WORKERS), encode(status("worker-00")), b"worker-00")
            if producer.flush(10) == 0:
                talks.set()

    talker = threading.Thread(target=talk)
    talker.start()
    assert talks.wait(WITHIN_S)
    try:
        with reading(kafka_settings) as (reader, fleet):
            assert becomes(lambda: reader.caught_up)
            assert becomes(lambda: fleet.owner_of(0, SystemClock().wall_us()) is not None)
    finally:
        stop.set()
        talker.join()


@pytest.mark.slow
def test_garbage_is_counted_and_what_follows_is_read(kafka_settings: KafkaSettings) -> None:
    bad: list[None] = []
    write(
        kafka_settings,
        (b"\xff\xfe", b"garbage"),
        (b"", b"\x01\x80"),
        (b"worker-01", encode(status("worker-00"))),
        (b"nobody", None),
        (b"worker-00", encode(status("worker-00"))),
    )
    with reading(kafka_settings, lambda: bad.append(None)) as (reader, fleet):
        assert becomes(lambda: reader.caught_up)
        assert fleet.owner_of(0, SystemClock().wall_us()) is not None
    assert len(bad) == 3


@pytest.mark.slow
def test_a_second_group_on_the_same_topics_does_not_own_partitions(kafka_settings: KafkaSettings) -> None:
    bad: list[None] = []
    producer = make_producer(kafka_settings, ProducerKind.DURABLE, "test-writer")
    topic = kafka_settings.topic(Topic.WORKERS)
    own = [(WORKERS_GROUP, kafka_settings.workers_group.encode())]
    producer.produce(topic, encode(status("worker-00")), b"worker-00", headers=own)
    producer.produce(topic, encode(status("worker-09")), b"worker-09", headers=[(WORKERS_GROUP, b"shadow.workers")])
    producer.produce(topic, None, b"worker-00", headers=[(WORKERS_GROUP, b"shadow.workers")])
    assert producer.flush(10) == 0
    with reading(kafka_settings, lambda: bad.append(None)) as (reader, fleet):
        assert becomes(lambda: reader.caught_up)
        owner = fleet.owner_of(0, SystemClock().wall_us())
    assert owner is not None and owner.worker_id == "worker-00"
    assert len(bad) == 2


@pytest.mark.slow
def test_a_client_that_fails_is_replaced_and_the_fleet_is_not_caught_up_meanwhile(
    kafka_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KafkaException once ended the thread, and `caught_up` stayed true."""
    fails, made = threading.Event(), []

    class Failing(Consumer):
        def poll(self, timeout: float = -1) -> Message | None:
            if fails.is_set():
                fails.clear()
                raise KafkaException(KafkaError(KafkaError._FATAL))
            return super().poll(timeout)

    def make(*_: object) -> Consumer:
        made.append(
            Failing(
                {"bootstrap.servers": kafka_settings.bootstrap, "group.id": "none", "enable.partition.eof": True},
            )
        )
        return made[-1]

    monkeypatch.setattr(relaygr.trigger.fleet_reader, "make_assigned_consumer", make)
    monkeypatch.setattr(relaygr.trigger.fleet_reader, "_RETRY_S", 0.5)
    with reading(kafka_settings) as (reader, view):
        assert becomes(lambda: reader.caught_up)
        fails.set()
        assert becomes(lambda: not reader.caught_up)
        write(kafka_settings, (b"worker-00", encode(status("worker-00"))))
        assert becomes(lambda: view.owner_of(0, SystemClock().wall_us()) is not None)
        assert becomes(lambda: reader.caught_up)
    assert len(made) == 2


class _Delivered:
    """What the consumer returns: a status, or an error."""

    def __init__(self, error: KafkaError | None) -> None:
        self._error = error

    def error(self) -> KafkaError | None:
        return self._error

    def key(self) -> bytes:
        return b"worker-00"

    def value(self) -> bytes:
        return encode(status("worker-00"))

    def headers(self) -> None:
        return None


def test_a_right_that_is_given_back_is_seen_in_a_fleet_that_never_stops_talking() -> None:
    """Only the end of the topic ended the refusal, and a fetch with data does not tell the end."""
    reader = FleetReader(KafkaSettings(), Fleet(status_stale_ms=60_000), SystemClock(), "test-fleet")
    reader._read(cast(Message, _Delivered(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))))
    assert reader.refusal is not None
    reader._read(cast(Message, _Delivered(None)))
    assert reader.refusal is None
