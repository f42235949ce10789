"""Reads the topics of histories and behaviours into a folder, without a consumer group.

* Only committed records are read. The folder's files say where to go on (`relaygr.training.collect.files`).
* The histories are read to their end first: tombstones in them then delete nothing that was just written.
* A record without a user, of another partition or that cannot be decoded is counted and skipped.
* A snapshot that a worker wrote repeats what both topics said before. It is taken only if the folder may lack that:
  below `Manifest.past_to`, and if the snapshot that it replaced was not read, which Kafka drops then. Behaviours whose
  records the folder reads itself are left out of it.
* When Kafka has deleted behaviours unread, the histories are read again for them from the beginning.
* At most `MOST_ROWS` rows wait for their files.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import structlog
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from relaygr.kafka.clients import READ_COMMITTED, make_assigned_consumer
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.settings import KafkaSettings
from relaygr.kafka.topic_identity import TopicIdentity, TopicIdentityWatch, identify_topics
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from relaygr.training.collect.deletions import Deletion
from relaygr.training.collect.files import CollectedFolder
from relaygr.training.collect.folder import Kind, Manifest, Origin
from relaygr.training.collect.records import LogRows, add_event, add_snapshot, deletion_of
from relaygr.worker.history.batches import EventRecord, HistoryRecord
from relaygr.worker.history.decode import Rejected, read_event, read_record
from relaygr.worker.history.rules import TimeRules, continuation_of

_log = structlog.get_logger(__name__)

CLIENT_ID: Final = "relaygr-collect"
MOST_ROWS: Final = 2_000_000
POLL_S: Final = 0.2
BATCH_RECORDS: Final = 1000
CURRENT_INTERVAL_MS: Final = 3600 * 1000
_ANSWER_S: Final = 10.0
_OPTIONS: Final = {
    # Offsets alone do not show the end of a compacted log.
    "enable.partition.eof": True,
    # Records that were deleted before they were read must be counted, not skipped.
    "auto.offset.reset": "error",
    **READ_COMMITTED,
}
_LASTING: Final = frozenset(
    (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
)

Log = tuple[Kind, int]
"""A partition of a topic."""


@dataclass(frozen=True, slots=True)
class FileLimits:
    """When rows go to a file."""

    file_rows: int
    file_s: float
    """After the first record that is in no file."""


@dataclass(slots=True)
class Collected:
    """What a run did."""

    behaviours: int = 0
    """Rows that were written."""
    records: int = 0
    """Snapshots and records of behaviours that were read, bad ones included."""
    repeats: int = 0
    """Snapshots of workers that repeat what both topics said before."""
    bad: Counter[str] = field(default_factory=Counter)
    """Bad records by reason."""
    deleted_users: int = 0
    deleted_rows: int = 0
    """Rows of deleted users that were removed from the folder or not written."""
    lost: dict[str, int] = field(default_factory=dict)
    """Offsets by topic that Kafka deleted before they were read."""
    reached_end: bool = False
    """Every partition was read to the end that it had when the run began."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    behaviours: int
    read: int
    """Offsets read, of `total`."""
    total: int
    """Offsets between the folder's files and the ends of the logs when the run began."""


def manifest_of(kafka: KafkaSettings, has_ratings: bool) -> Manifest:
    """The manifest that a new folder of the present logs has. Raises RelayError if Kafka does not answer."""
    names = kafka.topic(Topic.HISTORY), kafka.topic(Topic.BEHAVIOURS)
    asked_ms = SystemClock().wall_us() // 1000
    try:
        found = identify_topics(kafka, names, CLIENT_ID, _ANSWER_S)
        consumer = make_assigned_consumer(kafka, CLIENT_ID, options=_OPTIONS)
        try:
            partitions = range(kafka.partitions)
            ends = _offsets(consumer, names[0], partitions, OFFSET_END)
            starts = [_offsets(consumer, name, partitions, OFFSET_BEGINNING) for name in names]
        finally:
            consumer.close()
    except KafkaException as error:
        raise RelayError(
            f"Kafka at {kafka.bootstrap} does not describe its topics: {error.args[0].str()}. Check that its "
            "brokers run, and that the user has the rights of the role collector."
        ) from error
    if found.cluster_id in found.topic_ids.values():  # Both are made up.
        raise RelayError(
            "The ids of the topics cannot be asked for, since this process may start no other: a folder without them "
            "could mix two logs. Raise the limit of processes (ulimit -u)."
        )
    ids = [found.topic_ids[name] for name in names]
    origin = Origin(found.cluster_id, names[0], ids[0], names[1], ids[1], kafka.partitions)
    past_to = tuple(ends[partition] for partition in partitions)
    histories_from, behaviours_from = (tuple(found[each] for each in partitions) for found in starts)
    return Manifest(origin, has_ratings, past_to, histories_from, behaviours_from, asked_ms)


class Collector:
    """Collects into one folder. One thread uses it."""

    def __init__(
        self,
        kafka: KafkaSettings,
        folder: CollectedFolder,
        limits: FileLimits,
        rules: TimeRules,
        is_stopping: Callable[[], bool],
        on_progress: Callable[[Progress], object] = lambda _: None,
        clock: Clock | None = None,
    ) -> None:
        self._kafka = kafka
        self._folder = folder
        self._origin = folder.manifest.origin
        self._limits = limits
        self._rules = rules
        self._is_stopping = is_stopping
        self._on_progress = on_progress
        self._clock = clock or SystemClock()
        self._topics = {Kind.HISTORIES: kafka.topic(Topic.HISTORY), Kind.BEHAVIOURS: kafka.topic(Topic.BEHAVIOURS)}
        self._kinds = {name: kind for kind, name in self._topics.items()}
        self._partitions = range(kafka.partitions)
        self._rows: dict[Log, LogRows] = {}
        """Where each log is read, with the rows that are in no file."""
        self._waiting = 0
        """Rows that are in no file."""
        self._deleted: dict[int, dict[str, Deletion]] = {}
        """Deletions of each partition that are not applied to the files."""
        self._unread: dict[Log, int] = {}
        """The logs that were not read to the end that they had at the beginning, and that end."""
        self._gaps: dict[int, list[range]] = {each: [] for each in self._partitions}
        """Offsets of the histories without a record, since the log was last read to its end. A snapshot that replaced
        one of these is in the log before that end."""
        self._consumer: Consumer | None = None
        self._past_to = list(folder.manifest.past_to)
        """That of the manifest, as far as it matters to this run."""
        self._again_from: dict[int, int] = {}
        """Where each partition of the histories is read again, for behaviours that were lost."""
        self._lost_to: dict[Log, int] = {}
        """The beginnings of the logs of which records were lost."""
        self._asked_ms = 0
        self._ends: dict[int, int] | None = None
        """The ends of the histories at `_asked_ms`; None: the folder is current to that time."""
        self._first_at_s: float | None = None
        """When the first record was read that is in no file."""
        self._total = self._done = 0
        self._renewed: frozenset[str] = frozenset()
        self._collected = Collected()

    def run(self, follow: bool) -> Collected:
        """Reads to the ends of the logs, or until it shall stop, and writes what was read.

        Raises RelayError if a log cannot be read any more or the folder cannot be written. The next run reads again
        what is in no file then.
        """
        origin = self._origin
        ids = {origin.history_topic: origin.history_id, origin.behaviours_topic: origin.behaviours_id}
        identity = TopicIdentity(origin.cluster_id, ids)
        consumer = make_assigned_consumer(self._kafka, CLIENT_ID, options=_OPTIONS)
        self._consumer = consumer
        watch = TopicIdentityWatch(self._kafka, identity, f"{CLIENT_ID}-ids", self._note_renewed)
        watch.start()
        try:
            self._begin(consumer)
            self._read(consumer, Kind.HISTORIES)
            is_reading_all = False
            while not self._is_stopping() and (follow or self._unread):
                if not is_reading_all and not any(kind is Kind.HISTORIES for kind, _ in self._unread):
                    self._read(consumer, Kind.BEHAVIOURS)
                    is_reading_all = True
                for message in consumer.consume(BATCH_RECORDS, POLL_S):
                    self._receive(consumer, message)
                if self._renewed:
                    break
                self._close_due()
                self._mark_current(consumer)
                self._on_progress(Progress(self._collected.behaviours + self._waiting, self._done, self._total))
            if self._renewed:
                # What was received last may be of the new log.
                raise RelayError(
                    f"{', '.join(sorted(self._renewed))} was deleted and created again: collect into another folder."
                )
            self._close_all()
            self._mark_current(consumer)
            if self._lost_to and not self._unread:
                self._folder.begins_at(self._lost_to)
        except KafkaException as error:
            raise RelayError(
                f"Kafka at {self._kafka.bootstrap} cannot be read: {error.args[0].str()}. Run the command again: "
                "it goes on after the last file."
            ) from error
        finally:
            watch.stop()
            self._consumer = None
            consumer.close()
        self._collected.reached_end = not self._unread
        return self._collected

    def _note_renewed(self, topics: frozenset[str]) -> None:
        self._renewed = topics

    def _begin(self, consumer: Consumer) -> None:
        """Finds where to go on in each log."""
        asked_ms = self._clock.wall_us() // 1000
        found = {
            kind: [_offsets(consumer, topic, self._partitions, at) for at in (OFFSET_BEGINNING, OFFSET_END)]
            for kind, topic in self._topics.items()
        }
        self._asked_ms, self._ends = asked_ms, found[Kind.HISTORIES][1]
        for partition in self._partitions:
            for kind, topic in self._topics.items():
                start, end = (offsets[partition] for offsets in found[kind])
                following = self._folder.next_offset(kind, partition)
                if following > end:
                    raise RelayError(
                        f"{self._folder.path} has {topic} [{partition}] up to offset {following - 1:,}, but the log "
                        f"ends at {end:,}: it is another log, or its brokers lost records. Collect into another folder."
                    )
                if following < start:
                    first_history, end_of_histories = (offsets[partition] for offsets in found[Kind.HISTORIES])
                    self._note_lost((kind, partition), following, start, end_of_histories)
                    if kind is Kind.BEHAVIOURS and first_history < end_of_histories:
                        self._again_from[partition] = first_history
                        self._unread[Kind.HISTORIES, partition] = end_of_histories
                start = max(start, following)
                self._rows[kind, partition] = LogRows(start, start)
                if start < end:
                    self._unread[kind, partition] = end
                    self._total += end - start

    def _note_lost(self, log: Log, following: int, start: int, end_of_histories: int) -> None:
        kind, partition = log
        lost, topic = self._collected.lost, self._topics[kind]
        lost[topic] = lost.get(topic, 0) + start - following
        _log.warning(
            "Kafka deleted records before they were read",
            topic=topic,
            partition=partition,
            first=following,
            last=start - 1,
        )
        self._lost_to[log] = start
        if kind is Kind.BEHAVIOURS:
            self._past_to[partition] = end_of_histories
            self._folder.take_snapshots_below(partition, end_of_histories)
        else:
            self._gaps[partition].append(range(following, start))

    def _read(self, consumer: Consumer, kind: Kind) -> None:
        topic = self._topics[kind]
        places = {each: self._rows[kind, each].read_to for each in self._partitions}
        if kind is Kind.HISTORIES:
            places |= self._again_from
        consumer.incremental_assign([TopicPartition(topic, each, place) for each, place in places.items()])

    def _receive(self, consumer: Consumer, message: Message) -> None:
        topic, partition, offset, error = message.topic(), message.partition(), message.offset(), message.error()
        if topic is None or partition is None or topic not in self._kinds:
            self._check(message)
            return
        kind = self._kinds[topic]
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                self._end((kind, partition), offset or 0)
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                self._skip_lost(consumer, kind, partition)
            else:
                self._check(message)
            return
        rows = self._rows[kind, partition]
        # Histories below are read again.
        if offset is None or (offset < rows.read_to and kind is Kind.BEHAVIOURS):
            return
        if self._first_at_s is None:
            self._first_at_s = time.monotonic()
        if kind is Kind.HISTORIES and offset > rows.read_to:
            self._gaps[partition].append(range(rows.read_to, offset))
        before = len(rows)
        self._take(kind, partition, rows, message, offset)
        self._waiting += len(rows) - before
        if offset >= rows.read_to:
            self._collected.records += 1
            self._done += offset + 1 - rows.read_to
            rows.read_to = offset + 1
        if offset + 1 >= self._unread.get((kind, partition), offset + 2):
            del self._unread[kind, partition]
        if len(rows) >= self._limits.file_rows:
            self._close((kind, partition))
        while self._waiting > MOST_ROWS:
            self._close(max(self._rows, key=lambda log: len(self._rows[log])))

    def _end(self, log: Log, offset: int) -> None:
        """Notes that a log was read to its end, which markers of transactions may precede."""
        rows, (kind, partition) = self._rows[log], log
        if offset > rows.read_to:
            self._done += offset - rows.read_to
            rows.read_to = offset
        self._unread.pop(log, None)
        if kind is Kind.HISTORIES:
            self._gaps[partition].clear()

    def _check(self, message: Message) -> None:
        """Raises RelayError for an error that does not end by itself. librdkafka tries on after any other."""
        error = message.error()
        if error is not None and (error.fatal() or error.code() in _LASTING):
            self._close_all()
            raise RelayError(
                f"{message.topic() or 'Kafka'} cannot be read any more: {error.str()}. What was read is in "
                f"{self._folder.path}."
            )

    def _skip_lost(self, consumer: Consumer, kind: Kind, partition: int) -> None:
        """Goes on at the beginning of a log whose next records were deleted before they were read."""
        self._close_all()
        histories = self._topics[Kind.HISTORIES]
        start = _offsets(consumer, self._topics[kind], [partition], OFFSET_BEGINNING)[partition]
        end_of_histories = _offsets(consumer, histories, [partition], OFFSET_END)[partition]
        read_to = self._rows[kind, partition].read_to
        if start <= read_to:
            raise RelayError(
                f"{self._topics[kind]} [{partition}] does not go on at offset {read_to:,}: it was deleted and created "
                "again, or its brokers lost records. Collect into another folder."
            )
        self._note_lost((kind, partition), read_to, start, end_of_histories)
        self._rows[kind, partition] = LogRows(start, start)
        places = {self._topics[kind]: start}
        if kind is Kind.BEHAVIOURS:
            places[histories] = _offsets(consumer, histories, [partition], OFFSET_BEGINNING)[partition]
            self._unread[Kind.HISTORIES, partition] = end_of_histories
        consumer.incremental_unassign([TopicPartition(topic, partition) for topic in places])
        consumer.incremental_assign([TopicPartition(topic, partition, place) for topic, place in places.items()])

    def _take(self, kind: Kind, partition: int, rows: LogRows, message: Message, offset: int) -> None:
        content = message.key(), message.value(), partition, len(self._partitions)
        written_at_ms = max(0, message.timestamp()[1])
        entry = (
            read_event(*content, offset, written_at_ms)
            if kind is Kind.BEHAVIOURS
            else read_record(*content, offset, written_at_ms, headers_of(message))
        )
        now_ms = self._clock.wall_us() // 1000
        if isinstance(entry, Rejected):
            if offset >= rows.read_to:
                self._note_bad(entry.reason, message)
        elif isinstance(entry, EventRecord):
            add_event(rows, entry, self._rules, now_ms)
        elif entry.history is None:
            self._delete(partition, entry, now_ms)
        else:
            self._take_snapshot(partition, rows, entry, now_ms)

    def _note_bad(self, reason: str, message: Message) -> None:
        self._collected.bad[reason] += 1
        if self._collected.bad[reason] == 1:
            place = {"topic": message.topic(), "partition": message.partition(), "offset": message.offset()}
            _log.warning("a bad message was skipped; more of this reason are only counted", reason=reason, **place)

    def _delete(self, partition: int, entry: HistoryRecord, now_ms: int) -> None:
        deletion = deletion_of(entry, self._rules, now_ms, self._origin)
        self._folder.deletions.add(entry.user_id, deletion)
        pending = self._deleted.setdefault(partition, {})
        before = pending.get(entry.user_id)
        pending[entry.user_id] = deletion if before is None else before.and_then(deletion)

    def _take_snapshot(self, partition: int, rows: LogRows, entry: HistoryRecord, now_ms: int) -> None:
        history = entry.history
        assert history is not None
        taken = np.ones(len(history.behaviours), bool)
        tail = continuation_of(history, partition, self._origin.history_id, self._origin.behaviours_id)
        is_again = entry.offset < rows.read_to
        if tail is None and is_again:
            return
        if tail is not None:
            deletion = self._folder.deletions.of(entry.user_id)
            is_late = deletion is not None and tail.next_offset < deletion.next_snapshot
            if is_late or (not is_again and self._is_known(partition, entry.offset, tail.next_offset - 1)):
                self._collected.repeats += not is_again
                return
            if is_again:  # All but the behaviours below was judged before.
                taken[:] = False
            if tail.offsets.size:
                reads_on_at = self._rows[Kind.BEHAVIOURS, partition].first
                is_read = self._folder.has_read(partition, tail.offsets) | (tail.offsets >= reads_on_at)
                taken[-tail.offsets.size :] = ~is_read
        add_snapshot(rows, entry, history, taken, self._rules, now_ms)

    def _is_known(self, partition: int, offset: int, before: int) -> bool:
        """Whether a worker's snapshot repeats what was read. `before`: the offset of the user's record before it."""
        if offset < self._past_to[partition]:
            return False
        gaps = self._gaps[partition]
        place = bisect_right(gaps, before, key=lambda gap: gap.start) - 1
        return place < 0 or before not in gaps[place]

    def _mark_current(self, consumer: Consumer) -> None:
        """Marks the folder as current once all tombstones up to known ends are applied; asks for new ends hourly."""
        now_ms = self._clock.wall_us() // 1000
        if self._ends is None:
            if now_ms - self._asked_ms >= CURRENT_INTERVAL_MS:
                self._asked_ms = now_ms
                # A broker that is away is asked again later.
                with suppress(KafkaException):
                    topic = self._topics[Kind.HISTORIES]
                    self._ends = _offsets(consumer, topic, self._partitions, OFFSET_END)
            return
        for partition, end in self._ends.items():
            rows = self._rows[Kind.HISTORIES, partition]
            if rows.first < rows.read_to or rows.read_to < end:
                return
        self._folder.mark_current(self._asked_ms)
        _log.info("folder is current", behaviours=self._collected.behaviours, records=self._collected.records)
        self._ends = None

    def _close_due(self) -> None:
        for partition in [each for each, users in self._deleted.items() if len(users) >= self._limits.file_rows]:
            self._close((Kind.HISTORIES, partition))
        if self._first_at_s is not None and time.monotonic() - self._first_at_s >= self._limits.file_s:
            self._close_all()

    def _close_all(self) -> None:
        # Histories first: their tombstones concern behaviours that wait.
        for log in sorted(self._rows, key=lambda each: (each[0] is Kind.BEHAVIOURS, each[1])):
            self._close(log)
        self._first_at_s = None

    def _close(self, log: Log) -> None:
        kind, partition = log
        rows = self._rows[log]
        if kind is Kind.HISTORIES:
            deleted = self._deleted.pop(partition, {})
            if deleted:
                now_ms = self._clock.wall_us() // 1000
                self._collected.deleted_rows += self._folder.delete(partition, deleted, now_ms)
                self._collected.deleted_users += len(deleted)
        else:
            deleted = {user: each for user in rows.users if (each := self._folder.deletions.of(user)) is not None}
        if rows.read_to == rows.first and not len(rows):
            return
        if kind is Kind.HISTORIES and self._gaps[partition]:
            self._note_gaps(partition)
        left_out = self._folder.write(kind, partition, rows, deleted)
        self._collected.behaviours += len(rows) - left_out
        self._collected.deleted_rows += left_out
        self._waiting -= len(rows)
        self._rows[log] = LogRows(rows.read_to, rows.read_to)

    def _note_gaps(self, partition: int) -> None:
        """Lets a run that goes on after this file, without knowledge of the gaps, take all snapshots up to the end."""
        assert self._consumer is not None
        place = TopicPartition(self._topics[Kind.HISTORIES], partition)
        _, end = self._consumer.get_watermark_offsets(place, cached=True)
        if end > self._rows[Kind.HISTORIES, partition].read_to:
            self._folder.take_snapshots_below(partition, end)


def _offsets(consumer: Consumer, topic: str, partitions: Iterable[int], at: int) -> dict[int, int]:
    """The offsets of the beginnings or of the last stable ends. Raises KafkaException without an answer."""
    asked = [TopicPartition(topic, partition, at) for partition in partitions]
    found = consumer.offsets_for_times(asked, timeout=_ANSWER_S)
    for each in found:
        if each.error is not None:
            raise KafkaException(each.error)
    return {each.partition: max(0, each.offset) for each in found}
