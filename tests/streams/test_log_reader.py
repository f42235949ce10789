"""The one reader of logs: what a log decides, and what a reader does on a broker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from relaygr.kafka import session
from relaygr.kafka.client_errors import ClientErrors
from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.log_reader import (
    END,
    REPORT_LOST,
    Batch,
    Failure,
    LastRecord,
    Log,
    LogReader,
    Loss,
    LostPosition,
    before_end,
)
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.topics import Topic
from tests.waiting import until

POLL_S = 0.1


# Decisions


@dataclass(frozen=True)
class Record:
    """A record as the consumer returns it."""

    at: int
    body: bytes | None = b"body"
    epoch: int | None = 4
    time_ms: int = 1_700_000_000_000

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return "topic"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self.at

    def key(self) -> bytes:
        return b"key"

    def value(self) -> bytes | None:
        return self.body

    def leader_epoch(self) -> int | None:
        return self.epoch

    def timestamp(self) -> tuple[int, int]:
        return 1, self.time_ms


def message(at: int, **content: Any) -> Message:
    return cast(Message, Record(at, **content))


def going_on(start: int, last: int, is_compacted: bool = False) -> Log:
    """A log that was read to `start`; the record at `last` was the last one."""
    return Log("topic", 0, start, LastRecord.of(message(last)), is_compacted)


def loss_of(act: Callable[[], object]) -> Loss:
    with pytest.raises(LostPosition) as lost:
        act()
    return lost.value.loss


def test_a_log_that_nobody_has_read_begins_at_its_beginning_and_every_record_is_new() -> None:
    log = Log("topic", 0)
    assert (log.first, log.read_to, log.caught_up) == (-2, 0, False)
    assert [log.receive(message(at)) for at in (3, 4, 9)] == [True] * 3
    assert log.read_to == 10 and not log.caught_up
    log.reach_end(12)
    assert log.read_to == 12 and log.caught_up


def test_where_a_log_begins() -> None:
    assert Log("topic", 0, 0).first == -2
    assert Log("topic", 0, END).first == -1
    assert Log("topic", 0, before_end(32)).first == -2032
    assert Log("topic", 0, 7).first == 7
    assert going_on(7, last=6).first == 6
    assert going_on(7, last=9).first == 7, "a restart reads dead letters that were not delivered again"


def test_the_last_record_is_recognised_and_not_new() -> None:
    log = going_on(7, last=5)
    assert not log.receive(message(5, epoch=6)), "another broker led the partition"
    assert log.known is None and not log.caught_up
    assert log.receive(message(7)) and log.read_to == 8


def test_records_before_the_last_one_are_new_if_they_were_not_stored() -> None:
    log = going_on(3, last=5)
    assert [log.receive(message(at)) for at in (3, 4, 5, 6)] == [True] * 4


@pytest.mark.parametrize(
    "other",
    [message(5, body=b"other"), message(5, body=None), message(5, time_ms=1_700_000_000_001)],
    ids=["value", "tombstone", "time"],
)
def test_another_record_at_the_offset_is_another_log(other: Message) -> None:
    for is_compacted in (False, True):
        assert loss_of(lambda: going_on(7, 5, is_compacted).receive(other)) is Loss.LOG_REPLACED  # noqa: B023


@pytest.mark.parametrize("end", [0, 5, 6])
def test_a_log_that_ends_before_what_was_read_is_another_one(end: int) -> None:
    for is_compacted in (False, True):
        assert loss_of(lambda: going_on(7, 5, is_compacted).reach_end(end)) is Loss.LOG_REPLACED  # noqa: B023


def test_a_log_that_ends_before_what_was_read_is_another_one_although_it_has_the_last_record() -> None:
    log = going_on(9, last=5)
    log.receive(message(5))
    assert loss_of(lambda: log.reach_end(7)) is Loss.LOG_REPLACED


def test_a_record_leaves_a_log_alone_only_where_it_is_compacted() -> None:
    assert loss_of(lambda: going_on(7, 5).receive(message(8))) is Loss.LOG_REPLACED
    assert loss_of(lambda: going_on(7, 5).reach_end(7)) is Loss.LOG_REPLACED
    compacted = going_on(7, 5, is_compacted=True)
    assert compacted.receive(message(8)) and compacted.told_by_epoch
    assert not compacted.receive(message(8)), "it comes again after the seek"
    ended = going_on(7, 5, is_compacted=True)
    ended.reach_end(7)
    assert ended.told_by_epoch and ended.caught_up


@pytest.mark.parametrize(
    ("begins", "ends", "loss"),
    [
        (6, 9, None),
        (7, 7, None),
        (8, 9, Loss.OFFSET_OUT_OF_RANGE),
        (0, 4, Loss.LOG_REPLACED),
        (5, 9, Loss.LOG_REPLACED),
        (6, 6, Loss.LOG_REPLACED),
    ],
)
def test_of_a_log_that_begins_later_nothing_may_be_missing_that_was_not_read(
    begins: int, ends: int, loss: Loss | None
) -> None:
    log = going_on(7, last=5)
    if loss is None:
        log.leave_range(begins, ends, "out of range")
        assert (log.known, log.first) == (None, 7)
    else:
        assert loss_of(lambda: log.leave_range(begins, ends, "out of range")) is loss


def test_a_log_without_a_known_record_that_lacks_the_offset_has_lost_records_or_is_another_one() -> None:
    log = Log("topic", 0, 7)
    assert loss_of(lambda: log.leave_range(8, 9, "out of range")) is Loss.OFFSET_OUT_OF_RANGE
    assert loss_of(lambda: log.leave_range(0, 6, "out of range")) is Loss.LOG_REPLACED


def test_a_log_to_which_records_come_all_the_time_is_caught_up_with() -> None:
    log = Log("topic", 0)
    log.end = 3
    for at in range(3):
        assert not log.caught_up
        log.receive(message(at))
    assert log.caught_up and not log.at_end


# The client's errors


@dataclass(frozen=True)
class FetchError:
    """An error that `poll` returns in the place of a record."""

    code: int
    partition_: int | None = 0
    is_fatal: bool = False

    def error(self) -> KafkaError:
        return KafkaError(self.code, "text", self.is_fatal)

    def topic(self) -> str | None:
        return None if self.partition_ is None else "topic"

    def partition(self) -> int | None:
        return self.partition_

    def value(self) -> None:
        return None


Noted = list[tuple[str, int]]
"""The topic and the code of each error that a session was told."""


class Scripted:
    """A client that returns these messages."""

    def __init__(self, *messages: Any) -> None:
        self._messages = [*messages]

    def poll(self, _timeout_s: float) -> Any:
        return self._messages.pop(0) if self._messages else None

    def consume(self, most: int, _timeout_s: float) -> list[Any]:
        taken, self._messages = self._messages[:most], self._messages[most:]
        return taken

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LogReader]:
    """A reader of one log, whose client returns these messages."""

    def made(*messages: Any, noted: Noted | None = None) -> LogReader:
        own = KafkaSession(KafkaSettings(), "test")

        def client(_kafka: KafkaSettings, _client_id: str, errors: ClientErrors, _options: object) -> Scripted:
            own.tell_error = errors  # type: ignore[attr-defined]
            return Scripted(*messages)

        monkeypatch.setattr(session, "make_assigned_consumer", client)
        if noted is not None:
            monkeypatch.setattr(own, "note", lambda topic, error: noted.append((topic, error.code())))
        return LogReader(own, "test-reader", ("topic",))

    return made


def test_errors_of_fetches_are_noted_and_reported_and_records_behind_them_are_read(
    scripted: Callable[..., LogReader],
) -> None:
    noted: Noted = []
    refused, silent = KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._TIMED_OUT
    errors = FetchError(refused), FetchError(silent, partition_=None)
    with scripted(*errors, Record(3), noted=noted) as reader:
        reader.read(Log("topic", 0))
        batch = reader.batch(POLL_S)
    assert [(each.error.code(), each.topic, each.partition) for each in batch.failures] == [
        (refused, "topic", 0),
        (silent, None, None),
    ]
    assert noted == [("topic", refused), ("topic", silent)]
    assert [each.offset() for each in batch.records] == [3]


def test_an_error_of_the_client_is_reported_once_and_counts_as_one_of_the_first_topic(
    scripted: Callable[..., LogReader],
) -> None:
    noted: Noted = []
    reader, error = scripted(noted=noted), KafkaError(KafkaError._TRANSPORT)
    with reader:
        reader._session.tell_error(error)  # type: ignore[attr-defined]
        assert reader.batch(0).failures == [Failure(error)]
        assert reader.batch(0).failures == []
        reader._session.tell_error(error)  # type: ignore[attr-defined]
    with reader:
        assert reader.batch(0).failures == [], "of the client before"
    assert noted == [("topic", KafkaError._TRANSPORT)] * 2


def test_a_client_that_can_read_no_more_raises(scripted: Callable[..., LogReader]) -> None:
    with scripted(FetchError(KafkaError._FATAL, is_fatal=True)) as reader, pytest.raises(KafkaException):
        reader.batch(POLL_S)


def test_of_a_log_that_is_lost_or_not_read_no_further_record_is_taken(scripted: Callable[..., LogReader]) -> None:
    known = LastRecord.of(message(5, body=b"other"))
    with scripted(Record(4), Record(5), Record(6)) as reader:
        reader.read(Log("topic", 0, 4, known))
        batch = reader.batch(POLL_S)
    assert [each.offset() for each in batch.records] == [4]
    assert [each.loss for each in batch.lost] == [Loss.LOG_REPLACED]


# On a broker


def write(kafka: KafkaSettings, *values: bytes, partition: int = 0) -> None:
    producer = make_producer(kafka, ProducerKind.DURABLE, "test-writer")
    for value in values:
        producer.produce(kafka.topic(Topic.RETRIEVAL), value, b"key", partition=partition)
    assert producer.flush(10) == 0


def reader_of(kafka: KafkaSettings, **options: Any) -> LogReader:
    return LogReader(KafkaSession(kafka, "test"), "test-reader", (kafka.topic(Topic.RETRIEVAL),), **options)


def retrieval(kafka: KafkaSettings, partition: int = 0, *position: Any) -> Log:
    return Log(kafka.topic(Topic.RETRIEVAL), partition, *position)


def collected(reader: LogReader, is_over: Callable[[], bool]) -> Batch:
    """All batches until it is over, as one."""
    found = Batch()

    def read() -> bool:
        batch = reader.batch(POLL_S)
        found.records += batch.records
        found.lost += batch.lost
        found.failures += batch.failures
        return is_over()

    until(read, "read")
    return found


def values(batch: Batch) -> list[bytes | None]:
    return [each.value() for each in batch.records]


@pytest.mark.slow
def test_logs_are_read_from_their_beginning_their_end_and_an_offset_before_it(kafka_settings: KafkaSettings) -> None:
    write(kafka_settings, b"0", b"1", b"2")
    write(kafka_settings, b"a", b"b", b"c", partition=1)
    write(kafka_settings, b"x", partition=2)
    whole, newest, coming = (
        retrieval(kafka_settings),
        retrieval(kafka_settings, 1, before_end(2)),
        retrieval(kafka_settings, 2, END),
    )
    with reader_of(kafka_settings) as reader:
        reader.read(whole, newest, coming)
        found = collected(reader, lambda: whole.caught_up and newest.caught_up and coming.caught_up)
        assert sorted(values(found), key=str) == [b"0", b"1", b"2", b"b", b"c"]
        assert (whole.read_to, newest.read_to, coming.read_to) == (3, 3, 1)
        write(kafka_settings, b"y", partition=2)
        assert values(collected(reader, lambda: coming.read_to == 2)) == [b"y"]


@pytest.mark.slow
def test_an_empty_log_is_caught_up_with(kafka_settings: KafkaSettings) -> None:
    log = retrieval(kafka_settings)
    with reader_of(kafka_settings) as reader:
        reader.read(log)
        assert collected(reader, lambda: log.caught_up) == Batch()


@pytest.mark.slow
def test_a_batch_is_bounded_and_says_whether_there_may_be_more(kafka_settings: KafkaSettings) -> None:
    write(kafka_settings, *(b"%d" % number for number in range(50)))
    log, sizes = retrieval(kafka_settings), []
    with reader_of(kafka_settings, options={"enable.partition.eof": False}) as reader:
        reader.read(log)

        def read() -> bool:
            batch = reader.batch(POLL_S, most=20)
            sizes.append((len(batch.records), batch.is_full))
            return log.read_to == 50

        until(read, "read")
    assert sum(size for size, _ in sizes) == 50
    assert all(size <= 20 and is_full is (size == 20) for size, is_full in sizes)


@pytest.mark.slow
def test_a_log_that_was_left_is_read_on_where_it_was_left_and_others_go_on(kafka_settings: KafkaSettings) -> None:
    log, other = retrieval(kafka_settings), retrieval(kafka_settings, 1)
    with reader_of(kafka_settings) as reader:
        reader.read(log, other)
        write(kafka_settings, b"0")
        assert values(collected(reader, lambda: log.read_to == 1)) == [b"0"]
        reader.leave(log)
        reader.leave(log)
        write(kafka_settings, b"1")
        write(kafka_settings, b"a", partition=1)
        assert values(collected(reader, lambda: other.read_to == 1)) == [b"a"]
        assert log.read_to == 1
        again = retrieval(kafka_settings, 0, log.read_to)
        reader.read(again)
        assert values(collected(reader, lambda: again.caught_up)) == [b"1"]


@pytest.mark.slow
def test_each_entry_has_a_new_client_and_new_logs(kafka_settings: KafkaSettings) -> None:
    write(kafka_settings, b"0")
    reader = reader_of(kafka_settings)
    for _ in range(2):
        with reader:
            log = retrieval(kafka_settings)
            reader.read(log)
            assert values(collected(reader, lambda log=log: log.caught_up)) == [b"0"]


@pytest.mark.slow
@pytest.mark.parametrize("is_same", [True, False])
def test_reading_goes_on_after_the_last_record_and_another_one_is_another_log(
    kafka_settings: KafkaSettings, is_same: bool
) -> None:
    write(kafka_settings, b"0", b"1")
    log = retrieval(kafka_settings)
    with reader_of(kafka_settings, options=REPORT_LOST) as reader:
        reader.read(log)
        last = LastRecord.of(collected(reader, lambda: log.caught_up).records[-1])
    write(kafka_settings, b"2")
    write(kafka_settings, b"a", partition=1)
    again = retrieval(kafka_settings, 0, 2, last if is_same else replace(last, time_ms=1))
    beside = retrieval(kafka_settings, 1)
    with reader_of(kafka_settings, options=REPORT_LOST) as reader:
        reader.read(again, beside)
        found = collected(reader, lambda: again.known is None and beside.caught_up and again.caught_up is is_same)
        if is_same:
            assert sorted(values(found), key=str) == [b"2", b"a"] and not found.lost
        else:
            assert values(found) == [b"a"], "the log is left, and the other goes on"
            assert [(each.log, each.loss) for each in found.lost] == [(again, Loss.LOG_REPLACED)]


@pytest.mark.slow
@pytest.mark.parametrize("start", [1, 9])
def test_an_offset_that_the_log_does_not_have_is_reported_only_to_a_caller_who_stores_what_it_read(
    kafka_settings: KafkaSettings, start: int
) -> None:
    write(kafka_settings, b"0", b"1")
    log = retrieval(kafka_settings, 0, start)
    with reader_of(kafka_settings, options=REPORT_LOST) as reader:
        reader.read(log)
        lost: list[LostPosition] = []
        until(lambda: lost.extend(reader.batch(POLL_S).lost) or lost or log.caught_up, "read")
        assert [each.loss for each in lost] == ([Loss.LOG_REPLACED] if start == 9 else [])
    log = retrieval(kafka_settings, 0, start)
    with reader_of(kafka_settings) as reader:
        reader.read(log)
        assert values(collected(reader, lambda: log.caught_up)) == ([b"0", b"1"] if start == 9 else [b"1"])


@pytest.mark.slow
def test_ends_and_how_much_is_behind_are_known(kafka_settings: KafkaSettings) -> None:
    write(kafka_settings, b"0", b"1")
    log, unread = retrieval(kafka_settings), retrieval(kafka_settings, 1)
    write(kafka_settings, b"a", partition=1)  # Both partitions have leaders now.
    with reader_of(kafka_settings) as reader:
        assert reader.ends((), 5.0) == {}
        assert reader.ends((log, unread), 5.0) == {log: 2, unread: 1}
        assert reader.ends((log, Log(f"{kafka_settings.topic_prefix}.missing", 0)), 5.0) == {log: 2}
        reader.read(log)
        collected(reader, lambda: log.caught_up)
        assert reader.behind(log) == 0
        assert kafka_settings.topic(Topic.RETRIEVAL) in reader.cluster(5.0).topics
