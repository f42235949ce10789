"""The thread that updates the fleet from the workers topic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import pytest
import structlog.testing
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer

import relaygr.kafka.session
import relaygr.trigger.fleet_reader
from relaygr.admission.worker_table import NoRoomError
from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.log_reader import Batch, Failure, Log
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import SystemClock
from relaygr.schemas.codec import decode, encode
from relaygr.schemas.headers import WORKERS_GROUP
from relaygr.schemas.messages import LatencyCoefficients, PreInferSlots, WorkerState, WorkerStatus
from relaygr.schemas.topics import Topic
from relaygr.trigger.fleet import MAX_CLAIMANTS, Fleet
from relaygr.trigger.fleet_reader import (
    MAX_NAMED_GROUPS,
    NEW_BURST_BYTES,
    NEW_BYTES_PER_S,
    FleetReader,
    StatusIntake,
    _latest,
)
from tests.waiting import becomes

WITHIN_S = 10.0


def status(worker_id: str) -> WorkerStatus:
    return WorkerStatus(
        worker_id, WorkerState.READY, SystemClock().wall_us(), 1, (0, 1), "abc", 1024, 1, 1, 8192, 2**30, 2**30, 0, 0,
        1000, 2000, LatencyCoefficients(300, 2, 0.001, 200, 1.5, 0.0008, 250, 3, 0.002, 20, 0.0001),
    )  # fmt: skip


def unstarted(kafka: KafkaSettings, on_bad: Callable[[], None] | None = None) -> tuple[FleetReader, Fleet]:
    fleet = Fleet(status_stale_ms=60_000)
    return FleetReader(KafkaSession(kafka, "test"), fleet, SystemClock(), "test-fleet", on_bad), fleet


@contextmanager
def reading(kafka: KafkaSettings, on_bad: Callable[[], None] | None = None) -> Iterator[tuple[FleetReader, Fleet]]:
    reader, fleet = unstarted(kafka, on_bad)
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

    monkeypatch.setattr(relaygr.kafka.session, "make_assigned_consumer", make)
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
    """A status as the consumer returns it."""

    def __init__(self, sent: WorkerStatus | None = None, group: bytes | None = None) -> None:
        self._sent = sent or status("worker-00")
        self._group = group

    def key(self) -> bytes:
        return self._sent.worker_id.encode()

    def value(self) -> bytes:
        return encode(self._sent)

    def headers(self) -> list[tuple[str, bytes]] | None:
        return None if self._group is None else [(WORKERS_GROUP, self._group)]

    def offset(self) -> int:
        return 0


def test_a_right_that_is_given_back_is_seen_in_a_fleet_that_never_stops_talking() -> None:
    """Only the end of the topic ended the refusal, and a fetch with data does not tell the end."""
    reader, _ = unstarted(KafkaSettings())
    statuses = Log("relaygr.workers", 0)
    assert not reader._take(
        Batch(failures=[Failure(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), "relaygr.workers", 0)]), statuses
    )
    assert reader.refusal is not None
    assert reader._take(Batch([cast(Message, _Delivered())]), statuses)
    assert reader.refusal is None


def test_a_few_names_of_other_groups_are_logged_once_each_and_without_control_characters() -> None:
    """Each name was kept for ever, and made a line of the log."""
    bad: list[None] = []
    reader, _ = unstarted(KafkaSettings(), lambda: bad.append(None))
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            for number in range(300):
                name = b"\x1b[2Jother" if not number else b"other-%d" % number
                reader._read(cast(Message, _Delivered(group=name)))
    assert len(bad) == 600
    groups = [line["group"] for line in lines]
    assert len(groups) == MAX_NAMED_GROUPS + 1 and groups[1:3] == ["other-1", "other-2"]
    assert groups[0].isprintable() and "other" in groups[0] and "further" in groups[-1]
    assert len(reader._other_groups) == MAX_NAMED_GROUPS + 1


def test_bad_statuses_are_all_counted_and_few_are_logged() -> None:
    bad: list[None] = []
    reader, _ = unstarted(KafkaSettings(), lambda: bad.append(None))
    wrong = replace(status("worker-00"), latency=LatencyCoefficients(300, -2, 0.001, 200, 1, 0, 250, 3, 0, 20, 0))
    with structlog.testing.capture_logs() as lines:
        for _ in range(400):
            reader._read(cast(Message, _Delivered(sent=wrong)))
    assert len(bad) == 400 and len(lines) == 1


class _View:
    def __init__(self) -> None:
        self.taken: list[str] = []

    def apply(self, worker_id: str, status: WorkerStatus | None, now_us: int) -> None:
        self.taken.append(worker_id if status is not None else f"no {worker_id}")


def test_statuses_of_workers_that_are_not_known_pass_at_a_bounded_rate_and_those_of_known_ones_always() -> None:
    """After 4,200 made-up workers the status of a real one was not read for a minute."""
    view, now_us = _View(), 1_700_000_000_000_000
    intake = StatusIntake(view.apply)

    def take(sent: WorkerStatus) -> bool:
        try:
            intake.take(cast(Message, _Delivered(sent=sent)), now_us)
        except NoRoomError:
            return False
        return True

    large = replace(status("made-up"), partitions=tuple(range(1_700)))
    assert take(status("real"))
    passed = sum(take(replace(large, worker_id=f"made-up-{number}")) for number in range(1_500))
    assert 0 < passed <= NEW_BURST_BYTES // 1_700 < 1_500
    assert take(status("real")), "it is known"
    assert not take(replace(large, worker_id="made-up-x"))
    now_us += 1_000_000
    assert take(status("later")), "there is room again"
    passed = sum(take(replace(large, worker_id=f"made-up-y{number}")) for number in range(1_500))
    assert 0 < passed <= NEW_BYTES_PER_S // 1_700
    assert take(status("later")) and take(status("real"))


class _Raw:
    """A status in bytes, which another made-up worker sends, too."""

    def __init__(self, worker_id: str, body: bytes) -> None:
        self._worker_id = worker_id.encode()
        self._body = body.replace(b"made-up-0000", self._worker_id)

    def key(self) -> bytes:
        return self._worker_id

    def value(self) -> bytes:
        return self._body


@pytest.mark.slow
def test_thousands_of_workers_known_by_small_statuses_cost_a_bounded_time_and_real_claims_count_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once known, each of them could have claims of 12 KB decoded, as often as it wrote them."""
    fleet, now_us, decoded = Fleet(status_stale_ms=60_000), SystemClock().wall_us(), 0
    intake = StatusIntake(fleet.apply)

    def counting(kind: type[WorkerStatus], value: bytes) -> WorkerStatus:
        nonlocal decoded
        decoded += len(value)
        return decode(kind, value)

    monkeypatch.setattr(relaygr.trigger.fleet_reader, "decode", counting)

    def claim(name: str, *partitions: int) -> bytes:
        return encode(replace(status(name), partitions=partitions))

    def take(name: str, body: bytes) -> bool:
        try:
            intake.take(cast(Message, _Raw(name, body)), now_us)
        except NoRoomError:
            return False
        return True

    made_up, nothing = [f"made-up-{number:04}" for number in range(4_000)], claim("made-up-0000")
    assert take("real", claim("real", *range(16)))
    for name in made_up:
        now_us += 1_000
        assert take(name, nothing), "it is known from now on"
    large, small = (claim("made-up-0000", *range(100, end)) for end in (4_096, 400))
    of_claimants = 3 * MAX_CLAIMANTS * len(large)
    # By a small claim each of them may grow once in vain.
    for body, most, gained in (
        (large, NEW_BURST_BYTES, range(90)),
        (small, NEW_BURST_BYTES + len(made_up) * len(small), range(16, 40)),
    ):
        decoded = 0
        for _ in range(3):
            assert sum(take(name, body) for name in made_up) == MAX_CLAIMANTS
        assert 0 < decoded <= most + of_claimants
        now_us += 1_000
        assert take("real", claim("real", *gained))
        owners = [fleet.owner_of(partition, now_us) for partition in gained]
        assert {owner.worker_id for owner in owners if owner is not None} == {"real"} and None not in owners


@pytest.mark.slow
def test_a_claim_that_is_refused_by_the_allowance_is_taken_when_there_is_room_and_smaller_ones_meanwhile() -> None:
    view, now_us = _View(), 1_700_000_000_000_000
    intake = StatusIntake(view.apply)

    def take(worker_id: str, partitions: int) -> bool:
        sent = replace(status(worker_id), partitions=tuple(range(partitions)))
        try:
            intake.take(cast(Message, _Delivered(sent=sent)), now_us)
        except NoRoomError:
            return False
        return True

    assert take("real", 10)
    assert not all(take(f"made-up-{number}", 1_700) for number in range(1_500))
    assert take("real", 300) and take("real", 500), "larger, but not by much"
    assert not take("real", 4_096) and take("real", 400)
    now_us += 1_000_000
    assert take("real", 4_096) and take("real", 10) and take("real", 4_096)


def test_a_pre_infer_worker_that_claims_partitions_is_refused() -> None:
    sent = replace(status("pre-00"), pre_infer=PreInferSlots(1, 1, 0, 0))
    with pytest.raises(ValueError, match="has no partitions"):
        StatusIntake(_View().apply).take(cast(Message, _Delivered(sent=sent)), 0)


@pytest.mark.slow
def test_real_workers_are_seen_behind_very_many_statuses_of_made_up_ones(kafka_settings: KafkaSettings) -> None:
    """Each status took a step for each worker and partition: nobody saw the real one in time."""
    producer = make_producer(kafka_settings, ProducerKind.DURABLE, "test-writer")
    topic = kafka_settings.topic(Topic.WORKERS)
    own = [(WORKERS_GROUP, kafka_settings.workers_group.encode())]
    with reading(kafka_settings) as (_, fleet):
        producer.produce(topic, encode(status("worker-00")), b"worker-00", headers=own)
        assert producer.flush(10) == 0
        assert becomes(lambda: fleet.owner_of(1, SystemClock().wall_us()) is not None)
        body = encode(replace(status("made-up-0000"), partitions=tuple(range(2, 2_300))))
        for number in range(2_000):
            name = b"made-up-%04d" % number
            producer.produce(topic, body.replace(b"made-up-0000", name), name, headers=own)
            producer.poll(0)
        last = replace(status("worker-00"), assignment_epoch=2, ranking_queue_p99_us=77)
        producer.produce(topic, encode(last), b"worker-00", headers=own)
        assert producer.flush(60) == 0
        assert becomes(
            lambda: (owner := fleet.owner_of(1, SystemClock().wall_us())) and owner.ranking_queue_p99_us == 77
        )
        assert fleet.summary(SystemClock().wall_us()).workers < 100


def test_of_the_statuses_that_are_there_the_last_of_each_worker_and_group_is_read() -> None:
    other = b"shadow.workers"
    first, second = status("worker-00"), replace(status("worker-00"), assignment_epoch=2)
    messages = [
        _Delivered(sent=first), _Delivered(sent=status("worker-01")), _Delivered(sent=second),
        _Delivered(sent=second, group=other),
    ]  # fmt: skip
    assert _latest(cast(list[Message], messages)) == messages[1:]
