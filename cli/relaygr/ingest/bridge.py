"""Passes the JSON objects of another topic on as behaviours or histories, for `relaygr publish --from kafka:TOPIC`.

    other topic --> batch --> messages and the group's offsets, in one transaction --> behaviours or history topic

The transaction makes each record count once: what was delivered and how far the topic was read are committed together,
so a bridge that dies, or is fenced by another one of its group, leaves neither a gap nor a repeat. Workers read what is
committed. A bad record is counted and left out. While all records are bad nothing is committed: the map may be wrong.
Records are read in the order of their partitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar, cast

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from relaygr.cluster.admin import is_embedded
from relaygr.kafka.clients import READ_COMMITTED, ProducerKind, make_group_consumer, make_producer
from relaygr.kafka.settings import GroupProtocol, KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import BehaviourEvent, History
from relaygr.schemas.times import in_ms, unit_of

T = TypeVar("T")

SOURCE: Final = "kafka:"
KEY_HEADER: Final = "__key_schema_id"
VALUE_HEADER: Final = "__value_schema_id"
"""Where Confluent's `HeaderSchemaIdSerializer` writes the schemas of a record."""
_BATCH: Final = 1000
_BATCH_S: Final = 0.2
_TIMEOUT_S: Final = 5.0
"""Of one call, which is repeated while the broker is away."""
_TRANSACTION_MS: Final = 30_000
"""A bridge that dies holds up readers of the target for this time at most, unless it is started again."""
_ATTEMPTS: Final = 5
"""Of one batch whose transaction is aborted."""
_SHOW_S: Final = 5.0
_SESSION_S: Final = 60.0
"""Longer than Kafka's default sessions. The partitions of a bridge that died are with the next one by then."""
_SHOWN_BAD: Final = 20
_MOST_BAD_FIRST: Final = 1000
"""A bridge ends after so many bad records without a good one."""

_FENCED: Final = frozenset((KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH))
_GROUP_CHANGED: Final = frozenset(
    (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION, KafkaError.REBALANCE_IN_PROGRESS)
)
"""The group has removed this member, for example while the broker was away."""
_REFUSED: Final = frozenset(
    (
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    )
)


@dataclass(frozen=True, slots=True)
class Passed:
    """What is published for a record."""

    key: bytes
    value: bytes | None
    """None deletes the user of the key."""
    made: BehaviourEvent | History | None = None
    """The content of the value."""


Convert = Callable[[Message], Passed]
"""What is published for a record. Raises ValueError for a bad one."""


@dataclass(slots=True)
class BridgeReport:
    """What a bridge has committed so far."""

    published: int = 0
    bad: int = 0
    lost: int = 0
    """Offsets that were deleted before they were read."""
    lag: int = 0
    """Records that are not read yet."""


def time_of(record: Message) -> int:
    """The record's timestamp in ms; now, if it has none: many producers write 0 or -1 then."""
    time_ms: int = record.timestamp()[1]
    return in_ms(time_ms) if unit_of(time_ms) is not None else int(time.time() * 1000)


def header_of(record: Message, name: str) -> bytes | None:
    """The first header of a name; None without one."""
    headers = cast("list[tuple[str, bytes | None]]", record.headers() or [])  # Of a message that was read.
    return next((value for header, value in headers if header == name), None)


class Bridge:
    """Raises RelayError if `kafka:TOPIC` names no topic that is there. The caller calls `run` once."""

    def __init__(
        self,
        kafka: KafkaSettings,
        source: str,
        target: str,
        convert: Convert,
        on_published: Callable[[Passed], None],
        tell: Callable[[str], None],
    ) -> None:
        """`on_published` gets what was committed, and each record once."""
        if not source.startswith(SOURCE):
            raise RelayError(f"--from is {source!r}, expected {SOURCE}TOPIC.")
        source = source.removeprefix(SOURCE)
        self.report = BridgeReport()
        self.group = f"{kafka.group_prefix}.bridge.{source}.{target}"
        self._source, self._target = source, target
        self._convert, self._on_published, self._tell = convert, on_published, tell
        if source == target:
            raise RelayError(f"--from {SOURCE}{source} is the topic that is written: give the one of your pipeline.")
        reading = {**READ_COMMITTED, "enable.auto.commit": False}
        self._consumer: Consumer = make_group_consumer(kafka, self.group, "relaygr-bridge", options=reading)
        cluster = self._consumer.list_topics(source, timeout=kafka.connect_timeout_s)
        if (error := cluster.topics[source].error) is not None:
            self._consumer.close()
            raise RelayError(f"Kafka at {kafka.bootstrap} refuses the topic of --from {SOURCE}{source}: {error.str()}.")
        self._partitions = len(cluster.topics[source].partitions)
        self._is_embedded = is_embedded(cluster)
        writing = {
            "transactional.id": self.group,
            "transaction.timeout.ms": _TRANSACTION_MS,
            "message.timeout.ms": _TRANSACTION_MS,
        }
        self._producer: Producer = make_producer(kafka, ProducerKind.DURABLE, "relaygr-bridge", options=writing)
        self._next: dict[int, int] = {}
        self._ended: set[int] = set()
        """Partitions whose end was reached."""
        self._last: dict[int, Message] = {}
        """The last record of each partition that was read and is not committed."""
        self._read_to: dict[int, int] = {}
        """The offset before which all of a partition was read, by this bridge or the one before it."""
        self._is_incremental = kafka.group_protocol is GroupProtocol.CONSUMER
        self._missing, self._missing_since_s = 0, 0.0
        """The partitions that the group has not given, and since when there are so many."""
        self._is_closing = False
        self._first_bad = ""

    def run(self, until_end: bool, stopping: Callable[[], bool]) -> BridgeReport:
        """Passes records on until `stopping`, or until every partition's end was reached.

        Raises RelayError if it cannot go on, or if all records are bad.
        """
        shown_s = time.monotonic()
        try:
            _repeated(self._producer.init_transactions, stopping, self._tell_wait)
            self._subscribe(stopping)
            while not stopping() and not (until_end and self._is_at_end()):
                if records := self._read():
                    self._pass_on(records, stopping)
                if time.monotonic() - shown_s >= _SHOW_S:
                    shown_s = time.monotonic()
                    self._note_lag()
                    self._tell(self.text())
                    if until_end:
                        self._wait_for_partitions()
            if self._first_bad and not self.report.published:
                raise self._all_bad()
        except KafkaException as error:
            raise self._ended_by(error.args[0]) from error
        finally:
            self._note_lag()
            self._is_closing = True
            self._consumer.close()
        return self.report

    def text(self) -> str:
        """A line for people."""
        done = self.report
        lost = f"{done.lost:,} deleted before they were read, " if done.lost else ""
        return f"{done.published:,} records published, {done.bad:,} bad ones left out, {lost}lag {done.lag:,}"

    def _tell_wait(self, error: KafkaError) -> None:
        self._tell(
            f"waits for Kafka, which does not answer: {error.str()}. `relaygr topics check` names settings of the "
            "brokers that keep transactions from working"
        )

    def _subscribe(self, stopping: Callable[[], bool]) -> None:
        """Reading goes on at what is committed, here and after each change of the group.

        The commits have leader epochs: where a log came back shorter and grew again, it is read from the record on at
        which it differs.
        """

        def begin(consumer: Consumer, assigned: list[TopicPartition]) -> None:
            if self._is_closing:
                return
            for each in assigned:
                self._last.pop(each.partition, None)
                self._read_to.pop(each.partition, None)
                self._ended.discard(each.partition)
            ask = partial(consumer.committed, assigned)
            found = _repeated(ask, stopping, self._tell_wait) if assigned else []
            assign = consumer.incremental_assign if self._is_incremental else consumer.assign
            assign(found)
            for each in found:
                if each.offset < 0:
                    continue
                self._read_to[each.partition] = each.offset
                if each.leader_epoch is not None:
                    # An assignment does not make the client compare the epochs if it knows the leader.
                    consumer.seek(each)

        self._last.clear()
        self._ended.clear()
        self._consumer.subscribe([self._source], on_assign=begin)

    def _read(self) -> list[Message]:
        records = []
        for message in self._consumer.consume(_BATCH, _BATCH_S):
            error = message.error()
            if error is None:
                records.append(message)
                self._look_for_lost_records(*_place(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                partition, offset = _place(message)
                self._ended.add(partition)
                self._next[partition] = offset
            elif not error.retriable() and error.code() != KafkaError._MAX_POLL_EXCEEDED:
                raise KafkaException(error)
        return records

    def _look_for_lost_records(self, partition: int, offset: int) -> None:
        read_to = self._read_to.get(partition, offset)
        self._read_to[partition] = offset + 1
        if offset < read_to:
            self._tell(
                f"partition {partition} of {self._source} has lost records: it was read to offset {read_to}, and has "
                f"others from offset {offset} on, which are read now"
            )
        elif offset > read_to:  # A marker of a transaction, and what compaction took away, leave gaps, too.
            place = TopicPartition(self._source, partition)
            start, _ = self._consumer.get_watermark_offsets(place, cached=True)
            if read_to < start <= offset:
                self.report.lost += start - read_to
                self._tell(
                    f"partition {partition} of {self._source} has lost records: those from offset {read_to} to "
                    f"{start - 1} were deleted before they were read. Keep records longer (retention.ms)"
                )

    def _pass_on(self, records: Sequence[Message], stopping: Callable[[], bool]) -> None:
        """One batch, in one transaction, with the bad records before it."""
        bad_before = self.report.bad
        messages = [(record, message) for record in records if (message := self._converted(record)) is not None]
        self._last |= {_place(record)[0]: record for record in records}
        offsets = [
            TopicPartition(self._source, partition, _place(record)[1] + 1, leader_epoch=record.leader_epoch())
            for partition, record in self._last.items()
        ]
        attempt, one_by_one = 1, False
        while messages or self.report.published:
            self._producer.begin_transaction()
            refused = self._send(messages, one_by_one)
            try:
                group = self._consumer.consumer_group_metadata()
                _repeated(
                    partial(self._producer.send_offsets_to_transaction, offsets, group), stopping, self._tell_wait
                )
                _repeated(self._producer.commit_transaction, stopping, self._tell_wait)
                if self._is_embedded:  # librdkafka's cluster keeps no offsets of transactions.
                    self._consumer.commit(offsets=offsets, asynchronous=False)
            except KafkaException as error:
                if not error.args[0].txn_requires_abort() or attempt == _ATTEMPTS:
                    raise
                _repeated(self._producer.abort_transaction, stopping, self._tell_wait)
                if error.args[0].code() in _GROUP_CHANGED:
                    # The batch is read again.
                    self.report.bad = bad_before
                    self._consumer.unsubscribe()
                    self._subscribe(stopping)
                    return
                if refused is not None:
                    attempt = 1
                    record, message = messages.pop(refused)
                    size = len(message.value or b"")
                    self._note_bad(
                        record,
                        f"its message of {size:,} bytes is larger than max.message.bytes of {self._target} "
                        "(`relaygr topics check`)",
                    )
                elif error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE and not one_by_one:
                    one_by_one = True
                else:
                    attempt += 1
                continue
            self.report.published += len(messages)
            for _, message in messages:
                self._on_published(message)
            self._next.update({each.partition: each.offset for each in offsets})
            self._last.clear()
            return
        if self.report.bad >= _MOST_BAD_FIRST:
            raise self._all_bad()

    def _send(self, messages: Sequence[tuple[Message, Passed]], one_by_one: bool) -> int | None:
        """Produces the messages. One by one, it waits for each, and returns the index of one that is too large.

        Kafka refuses a whole batch, and does not say because of which message.
        """
        refused: list[int] = []

        def delivered(index: int, error: KafkaError | None, _: Message) -> None:
            if error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                refused.append(index)

        for index, (_, message) in enumerate(messages):
            try:
                self._produce(message.key, message.value, partial(delivered, index) if one_by_one else None)
            except KafkaException as error:
                if error.args[0].code() != KafkaError._STATE:
                    raise
                break  # The transaction has failed; the next request says why.
            while one_by_one and self._producer.flush(_TIMEOUT_S):
                pass
            if refused:
                return index
        return None

    def _converted(self, record: Message) -> Passed | None:
        """The message of a record; None for a bad one, which is counted."""
        try:
            return self._convert(record)
        except ValueError as error:
            self._note_bad(record, str(error).removeprefix(": "))
            return None

    def _note_bad(self, record: Message, cause: str) -> None:
        reason = f"partition {record.partition()} offset {record.offset()}: {cause}"
        self._first_bad = self._first_bad or reason
        if self.report.bad < _SHOWN_BAD:
            self._tell(reason)
        self.report.bad += 1

    def _produce(
        self, key: bytes, value: bytes | None, on_delivery: Callable[[KafkaError | None, Message], None] | None
    ) -> None:
        while True:
            try:
                self._producer.produce(self._target, value, key, on_delivery=on_delivery)
                return
            except BufferError:
                self._producer.poll(_BATCH_S)

    def _all_bad(self) -> RelayError:
        return RelayError(
            f"all {self.report.bad:,} records that the bridge read of {self._source} are bad, so the options are "
            f"probably wrong. The first: {self._first_bad.rstrip('.?')}. Nothing was committed: correct --columns, "
            f"--actions, --model or --schema-registry and start it again. To skip these records, move the offsets of "
            f"the group {self.group}."
        )

    def _another_runs(self, effect: str = "") -> RelayError:
        return RelayError(
            f"another bridge from {self._source} runs, with the same group {self.group}{effect}: let only one run."
        )

    def _ended_by(self, error: KafkaError) -> RelayError:
        if error.code() in _FENCED:
            return self._another_runs(f", and took over (or this one had no broker for {_TRANSACTION_MS // 1000} s)")
        rights = (
            " It needs Read on the topic and its group, Write on the target, and Write on the transactional id "
            f"{self.group}."
        )
        return RelayError(
            f"the bridge from {self._source} cannot go on: {error.str()}. Start it again: it goes on where it stopped."
            + (rights if error.code() in _REFUSED else "")
        )

    def _wait_for_partitions(self) -> None:
        """Raises RelayError if the group gives some partitions, and not those that are missing."""
        missing, now_s = self._partitions - len(self._consumer.assignment()), time.monotonic()
        if missing != self._missing:
            self._missing, self._missing_since_s = missing, now_s
            if missing > 0:
                self._tell(
                    f"waits for {missing} partitions of {self._source}: those of a bridge that died come when its "
                    "session ends"
                )
        elif 0 < missing < self._partitions and now_s - self._missing_since_s >= _SESSION_S:
            raise self._another_runs()

    def _is_at_end(self) -> bool:
        """Not before the group has given each partition: a bridge that died keeps some until its session ends."""
        return len(self._ended) >= self._partitions

    def _note_lag(self) -> None:
        lag = 0
        for each in self._consumer.assignment():
            low, high = self._consumer.get_watermark_offsets(each, cached=True)
            lag += max(0, high - self._next.get(each.partition, max(low, 0)))
        self.report.lag = lag


def _repeated(
    call: Callable[[float], T],
    stopping: Callable[[], bool],
    tell_wait: Callable[[KafkaError], None],
) -> T:
    """Calls with a time-out, and again after an error that a repeat may mend. Raises KafkaException.

    `tell_wait` gets the error of the first call that took the whole time-out.
    """
    is_told = False
    while True:
        try:
            return call(_TIMEOUT_S)
        except KafkaException as error:
            if not error.args[0].retriable() or stopping():
                raise
            if not is_told and error.args[0].code() == KafkaError._TIMED_OUT:
                is_told = True
                tell_wait(error.args[0])


def _place(message: Message) -> tuple[int, int]:
    """Partition and offset of a message that was read."""
    partition, offset = message.partition(), message.offset()
    assert partition is not None and offset is not None
    return partition, offset
