"""Reads logs, which are partitions of topics, without a group, from the offsets that the caller gives.

    with LogReader(session, "client-id", (topic,)) as reader:
        log = Log(topic, partition=0)
        reader.read(log)
        while not log.caught_up:
            for message in reader.batch(timeout_s).records:
                ...

`Log` is pure: it knows how far a log is read, and decides whether it is the log that was read before. `LogReader` owns
the client and does what `Log` decides. A reader belongs to one thread. Each `with` block has a new client, which reads
the present certificates, and needs new logs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import ClassVar, Final

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import ClusterMetadata

from relaygr.kafka.clients import Options, learn_leaders, read_watermarks
from relaygr.kafka.session import KafkaSession
from relaygr.schemas.record import record

BEGINNING: Final = OFFSET_BEGINNING
END: Final = OFFSET_END
MOST_RECORDS: Final = 2048
MOST_BYTES: Final = 4 * 1024 * 1024
"""Of one batch. The last record may exceed it."""
REPORT_LOST: Final[Options] = {"auto.offset.reset": "error"}
"""For a caller who stores what it has read: an offset that the log does not have is another log, or lost records, and
comes as `LostPosition`. Without it the client goes on at the beginning of the log."""
_RANGE_S: Final = 2.0
_TAIL: Final = -2000
"""librdkafka's offset for the end of a log. An offset lower by n begins n records before the end."""


def before_end(records: int) -> int:
    """The `start` of a log that is read from so many offsets before its end."""
    return _TAIL - records


@record(frozen=True, slots=True)
class LastRecord:
    """The last record that was read of a log. A log that has another one at this offset is another log."""

    offset: int
    leader_epoch: int
    """-1: unknown."""
    time_ms: int
    """The record's timestamp; -1: none."""
    digest: bytes
    """Of key and value, `DIGEST_BYTES` long."""

    DIGEST_BYTES: ClassVar[int] = 8

    @classmethod
    def of(cls, message: Message) -> LastRecord:
        key, value, offset, epoch = message.key(), message.value(), message.offset(), message.leader_epoch()
        assert offset is not None
        # Without the length of the key, another division of the same bytes would have the same digest.
        digest = blake2b(b"%d " % len(key or b"") + (key or b""), digest_size=cls.DIGEST_BYTES)
        digest.update(b"deleted" if value is None else b"=" + value)
        return cls(offset, -1 if epoch is None else epoch, message.timestamp()[1], digest.digest())

    def is_same(self, other: LastRecord) -> bool:
        """Whether the records are the same one, whatever brokers led the partition."""
        return (self.offset, self.time_ms, self.digest) == (other.offset, other.time_ms, other.digest)


class Loss(enum.StrEnum):
    """Why reading cannot go on where it was."""

    OFFSET_OUT_OF_RANGE = "offset_out_of_range"
    """Records that were not read yet are gone."""
    LOG_REPLACED = "log_replaced"
    """The log lacks records that were read, and may have others at their offsets."""
    RANGE_UNKNOWN = "range_unknown"
    """No record can be read at the offset, and Kafka did not say which offsets the log has: try again."""


class LostPosition(Exception):  # noqa: N818 - it is an event of a batch, too
    """Reading of `log` cannot go on where it was, and has ended. The caller may read the log again, as a new `Log`."""

    def __init__(self, log: Log, loss: Loss, cause: str) -> None:
        super().__init__(cause)
        self.log, self.loss, self.cause = log, loss, cause


@dataclass(slots=True, eq=False)
class Log:
    """How far one partition of a topic is read.

    With `known`, reading begins no later than at that record. It is looked whether the log still has it:

    | at its offset | the log is |
    |---|---|
    | the same time and digest | the same |
    | another time or digest; or the log ends before it, or before `start` | another one: `LostPosition` |
    | nothing, and the topic is not compacted | another one, since records leave it together with all before them |
    | nothing, and the topic is compacted | the same, if the broker finds that its leader epoch reaches to it |
    | nothing, since the log begins later, but not after `start` | taken for the same |
    """

    topic: str
    partition: int
    start: int = BEGINNING
    """The offset before which all was read; or `BEGINNING`, `END`, or what `before_end` gives. 0 is the beginning."""
    known: LastRecord | None = None
    """The last record that was read before, until it is seen whether the log has it; None: there is none to be seen."""
    is_compacted: bool = False
    """Whether the topic is: a record may then leave it alone."""
    told_by_epoch: bool = field(default=False, init=False)
    """The known record has left the log, so only the leader epoch told that the log is the same."""
    read_to: int = field(init=False)
    """The offset after the last record that was received, or the end that was reached after it."""
    end: int | None = field(default=None, init=False)
    """The end of the log when its first record arrived; records of open transactions are before it."""
    at_end: bool = field(default=False, init=False)
    """Whether a fetch has found no more records. Offsets alone do not show the end of a compacted log."""
    _goes_on: bool = field(init=False)
    """Records before `read_to` are read again, and are not new."""

    def __post_init__(self) -> None:
        self.read_to = max(0, self.start)
        self._goes_on = self.known is not None

    @property
    def first(self) -> int:
        """The offset to begin at: not after that of the known record, so that it is seen whether the log has it."""
        return (self.start or BEGINNING) if self.known is None else min(self.start, self.known.offset)

    @property
    def caught_up(self) -> bool:
        """Whether all that the log had when reading began is read."""
        return self.known is None and (self.at_end or (self.end is not None and self.read_to >= self.end))

    def receive(self, message: Message) -> bool:
        """Takes a record. Returns whether it is new. Raises LostPosition."""
        offset = message.offset()
        assert offset is not None
        if self.known is not None and offset >= self.known.offset:
            self._recognise(self.known, offset, message)
        if self._goes_on and offset < self.read_to:
            return False
        self.read_to = offset + 1
        return True

    def reach_end(self, end: int) -> None:
        """There is no record at `end` yet. Raises LostPosition."""
        if self._goes_on and (end < self.read_to or (self.known is not None and end <= self.known.offset)):
            raise LostPosition(self, Loss.LOG_REPLACED, f"it ends at {end}, and was read further before")
        if self.known is not None:
            self._recognise(self.known, end)
        self.read_to = max(self.read_to, end)
        self.at_end = True

    def _recognise(self, known: LastRecord, offset: int, message: Message | None = None) -> None:
        """`offset`: of the first `message` that is not before the known record; without one: the end of the log."""
        self.known = None
        if message is not None and offset == known.offset:
            if not known.is_same(LastRecord.of(message)):
                raise LostPosition(self, Loss.LOG_REPLACED, f"another record is at {offset} than was read there")
        elif not self.is_compacted:
            raise LostPosition(self, Loss.LOG_REPLACED, f"no record is at {known.offset}, where one was read")
        else:
            self.told_by_epoch = True

    def leave_range(self, begins: int, ends: int, cause: str) -> None:
        """No record can be read at the offset, or the broker has found that the log is another; it has these offsets.

        Reading goes on at `start` if all that was read has left the log, and nothing that was not. Otherwise it raises
        LostPosition.
        """
        if self.known is not None and self.known.offset < begins <= self.read_to <= ends:
            self.known = None
            return
        loss = Loss.OFFSET_OUT_OF_RANGE if self.read_to < begins else Loss.LOG_REPLACED
        raise LostPosition(self, loss, f"{cause}; it has {begins} to {ends}")


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of a fetch, or of the client."""

    error: KafkaError
    topic: str | None = None
    """None for an error of the client, which is logged already. Without the right to describe a topic, this is all."""
    partition: int | None = None


@dataclass(slots=True)
class Batch:
    """What was read at once."""

    records: list[Message] = field(default_factory=list)
    """The new records, those of each log in its order."""
    lost: list[LostPosition] = field(default_factory=list)
    """The records of these logs, in this batch too, may be of other logs than before."""
    failures: list[Failure] = field(default_factory=list)
    is_full: bool = False
    """Whether there may be more."""


class LogReader:
    """Reads logs from `read` to `leave`; implements the module's contract. Its methods raise KafkaException."""

    def __init__(
        self,
        session: KafkaSession,
        client_id: str,
        topics: Sequence[str],
        options: Options | None = None,
    ) -> None:
        """No network. `topics`: all that will be read; an error of the client counts as one of the first.

        `options`: librdkafka's, which override ours.
        """
        self._session = session
        self._client_id = client_id
        self._topics = tuple(topics)
        self._options = {"enable.partition.eof": True, **(options or {})}
        self._made: Consumer | None = None
        self._logs: dict[tuple[str | None, int | None], Log] = {}
        self._client_failures: list[Failure] = []

    def __enter__(self) -> LogReader:
        """Makes the client. Raises RelayError for settings that no client can use."""
        self._made = self._session.assigned_consumer(
            self._client_id, self._topics[0], self._note_client_error, self._options
        )
        learn_leaders(self._made, self._topics)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._made = None
        self._logs.clear()
        self._client_failures.clear()

    @property
    def _client(self) -> Consumer:
        assert self._made is not None, "only within the context"
        return self._made

    def read(self, *logs: Log) -> None:
        """Reads these new logs from now on, beside those that are read already."""
        self._logs |= {(log.topic, log.partition): log for log in logs}
        self._client.incremental_assign([_place(log, log.first) for log in logs])

    def leave(self, *logs: Log) -> None:
        """Reads these logs no more. A log that is not read is left out."""
        left = [log for log in logs if self._logs.get((log.topic, log.partition)) is log]
        for log in left:
            del self._logs[log.topic, log.partition]
        if left:
            self._client.incremental_unassign([_place(log) for log in left])

    def batch(self, timeout_s: float, most: int = MOST_RECORDS) -> Batch:
        """What has arrived, `most` records and about `MOST_BYTES` at most. Waits `timeout_s` for the first.

        A log that is lost is left. Raises KafkaException if the client can read no more.
        """
        found = Batch()
        for message in self._drain(timeout_s, most, found):
            log = self._logs.get((message.topic(), message.partition()))
            error = message.error()
            try:
                if error is not None:
                    self._take_error(message, error, log, found)
                elif log is not None and self._take(message, log):
                    found.records.append(message)
            except LostPosition as lost:
                self.leave(lost.log)
                found.lost.append(lost)
        found.failures += self._client_failures
        self._client_failures.clear()
        return found

    def ends(self, logs: Iterable[Log], timeout_s: float) -> dict[Log, int]:
        """The present ends of these logs, read or not. A log without an answer is missing.

        They are the last stable offsets for a client that reads what is committed.
        """
        by_place = {(log.topic, log.partition): log for log in logs}
        if not by_place:
            return {}
        # One request for all: each one waits for the fetch before it.
        wanted = [_place(log, END) for log in by_place.values()]
        found = self._client.offsets_for_times(wanted, timeout=timeout_s)
        return {
            by_place[each.topic, each.partition]: each.offset
            for each in found
            if each.error is None and each.offset >= 0
        }

    def behind(self, log: Log) -> int:
        """The offsets that are not read yet, by the last fetch."""
        known = self._client.get_watermark_offsets(_place(log), cached=True)
        return max(0, known[1] - log.read_to) if known is not None else 0

    def cluster(self, timeout_s: float) -> ClusterMetadata:
        """The cluster's metadata: a client is told nothing of a topic that is gone."""
        found: ClusterMetadata = self._client.list_topics(timeout=timeout_s)
        return found

    def _drain(self, timeout_s: float, most: int, found: Batch) -> list[Message]:
        first = self._client.poll(timeout_s)
        if first is None:
            return []
        messages = [first]
        size_bytes = len(first.value() or b"")
        # `consume` with a time-out would wait for the whole time-out.
        while len(messages) < most and size_bytes < MOST_BYTES:
            more = self._client.consume(min(16, most - len(messages)), 0)
            if not more:
                return messages
            messages += more
            size_bytes += sum(len(message.value() or b"") for message in more)
        found.is_full = True
        return messages

    def _take(self, message: Message, log: Log) -> bool:
        """Whether the record is new. Raises LostPosition."""
        if log.end is None:
            known = self._client.get_watermark_offsets(_place(log), cached=True)
            log.end = known[1] if known is not None and known[1] >= 0 else None
        before = log.known
        is_new = log.receive(message)
        self._ask_epoch(log, before)
        return is_new

    def _take_error(self, message: Message, error: KafkaError, log: Log | None, found: Batch) -> None:
        """Raises LostPosition, and KafkaException for a fatal error."""
        topic, code = message.topic(), error.code()
        if code == KafkaError._PARTITION_EOF:
            end = message.offset()
            if log is not None and end is not None:
                before = log.known
                log.reach_end(end)
                self._ask_epoch(log, before)
        elif code == KafkaError._AUTO_OFFSET_RESET and log is not None:
            self._leave_range(log, error)
        elif error.fatal():
            raise KafkaException(error)
        else:
            self._session.note(topic or self._topics[0], error)
            found.failures.append(Failure(error, topic, message.partition()))

    def _ask_epoch(self, log: Log, known: LastRecord | None) -> None:
        """If the log lacks the known record, the broker looks where that record's epoch ends.

        An assignment does not make it look if the leader is known.
        """
        if known is not None and log.known is None and log.told_by_epoch:
            place = TopicPartition(log.topic, log.partition, known.offset + 1, leader_epoch=known.leader_epoch)
            self._client.seek(place)

    def _leave_range(self, log: Log, error: KafkaError) -> None:
        """Raises LostPosition, unless reading goes on."""
        try:
            begins, ends = read_watermarks(self._client, _place(log), _RANGE_S)
        except KafkaException as failure:
            raise LostPosition(log, Loss.RANGE_UNKNOWN, str(failure)) from failure
        log.leave_range(begins, ends, error.str())
        self._client.incremental_unassign([_place(log)])
        self._client.incremental_assign([_place(log, log.first)])

    def _note_client_error(self, error: KafkaError) -> None:
        self._client_failures.append(Failure(error))


def _place(log: Log, offset: int | None = None) -> TopicPartition:
    place = TopicPartition(log.topic, log.partition)
    if offset is not None:
        place.offset = offset
    return place
