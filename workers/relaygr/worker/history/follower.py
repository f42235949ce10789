"""The history follower: copies histories and behaviours into the store, for the partitions that this worker owns.

The follower has a thread and a consumer of its own (`assign`, no group). Contract:

* `follow` sets the partitions, from any thread; the follower's thread applies them at its next turn. It reads a
  partition from the stored offsets. It reads from the beginning if no offset is stored, if a stored offset is out of
  its log's range, if the store is so old that deletions may have been compacted away, or if the store refused records
  of the partition and has space now. Then it deletes the partition's users first.
* In each partition it reads the snapshots to their end, and then the behaviours too. The order does not change the
  result, but it costs less to append behaviours to a snapshot than to put a snapshot below behaviours.
* A batch and its next offsets are stored in one transaction. After any failure the follower waits and reads again
  from the stored offsets.
* `caught_up(p)`: since it began to follow `p`, the follower has reached an end of both logs and stored all before it.
  Compacted logs have gaps, so the broker's end-of-partition event decides, not a count of records.
* An invalid record goes to dead letters. The stored offset does not pass that record until the dead letter is
  delivered. The follower retries a failed delivery, and stops reading while too many are undelivered.
* If the broker is unreachable, reading continues when it is back.
* The follower's thread calls `on_changed` and `on_deleted` after the commit. They must not block. It calls
  `on_deleting` before the commit: if the process dies between the two, its successor reads the tombstone again.
* `forget` deletes the histories of partitions that another worker owns for good.
* Half of `erase_within_s` after a deletion the follower begins to compact the store, a slice each turn. A standby's
  follower does not compact, because nobody has called its `follow` yet.
* Histories of partitions that have caught up are saved on the history topic (`relaygr.worker.history.snapshots`).
* `on_missed` gets partitions whose deletions the follower may not have seen: they are read from the beginning, or
  another process has moved their stored offsets meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import lmdb
import structlog
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from prometheus_client import Counter, Gauge, Histogram

from relaygr.kafka.clients import asking_fetch_wait_ms, make_assigned_consumer
from relaygr.kafka.dead_letters import DeadLetterWriter
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.settings import KafkaSettings
from relaygr.kafka.topic_identity import identify_topics
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.codec import DecodeError, DecodeReason, decode
from relaygr.schemas.fields import FieldError, Text
from relaygr.schemas.headers import RawHeaders, RepeatedTombstone
from relaygr.schemas.messages import BehaviourEvent, History
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import CATALOGUE, Topic
from relaygr.worker.history.snapshots import SnapshotLimits, SnapshotWriter
from relaygr.worker.history.store import (
    ApplyOutcome,
    EventRecord,
    HistoryBatch,
    HistoryRecord,
    HistoryStore,
    StoreFullError,
    StoreOrigin,
)

log = structlog.get_logger()

POLL_S: Final = 0.1
# Poll interval between the slices of a compaction, and while no partition is followed: a new worker must notice its
# first partitions quickly.
IDLE_POLL_S: Final = 0.01
RETRY_S: Final = 1.0
BATCH_RECORDS: Final = 2048
BATCH_BYTES: Final = 4 * 1024 * 1024
MAX_UNDELIVERED: Final = 256
# An older store may have missed deletions: topics that an earlier version created keep a tombstone for a day
# (`delete.retention.ms`).
MAX_STORE_AGE_MS: Final = 20 * 3600 * 1000
# No record of the behaviours topic outlives the tombstones of the history topic.
DELETED_KEPT_MS: Final = CATALOGUE[Topic.HISTORY].delete_retention_ms or MAX_STORE_AGE_MS
CURRENT_INTERVAL_US: Final = 300 * 1_000_000
EXPIRY_US: Final = 24 * 3600 * 1_000_000
"""Time in which the follower looks once at the hash of every deleted user."""
GAUGE_INTERVAL_US: Final = 1_000_000
REFUSED_INTERVAL_US: Final = 10_000_000
METADATA_S: Final = 2.0
ERASE_RETRY_US: Final = 30_000_000

_CONSUMER_OPTIONS: Final = {
    # Offsets alone do not show the end of a compacted log.
    "enable.partition.eof": True,
    # An offset out of range means another log: the consumer must report it, not skip records.
    "auto.offset.reset": "error",
}

KEY_MISMATCH = "key_mismatch"
WRONG_PARTITIONER = "wrong_partitioner"
REASONS = (*DecodeReason, KEY_MISMATCH, WRONG_PARTITIONER)
_USER_ID = Text(256)

_RECORDS = Counter(
    "relaygr_history_records_total",
    "Records read from the history topic: applied, deleted (tombstones), older or repeated (skipped; of both topics), "
    "superseded (written by a worker, but overtaken), refused (the store is full), rejected (to dead letters)",
    ["outcome"],
)
_EVENTS = Counter(
    "relaygr_behaviour_records_total",
    "Records read from the behaviours topic: appended, after_gap (appended, though earlier ones are missing), covered "
    "(by a snapshot or a deletion), duplicate, too_long (the history is full), rejected (to dead letters)",
    ["outcome"],
)
_REJECTED = Counter(
    "relaygr_history_rejected_total", "Records of both topics sent to dead letters, by reason", ["reason"]
)
_FAILURES = Counter(
    "relaygr_history_failures_total", "Failures after which the follower read again from the stored offsets"
)
_RESTARTED_PARTITIONS = Counter(
    "relaygr_history_restarted_partitions_total",
    "Partitions that were read again from the beginning, by reason",
    ["reason"],
)
_APPLY_SECONDS = Histogram(
    "relaygr_history_apply_seconds",
    "Duration of one transaction of the history store",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
_PARTITIONS = Gauge("relaygr_history_partitions", "Followed history partitions by state", ["state"])
_USERS = Gauge("relaygr_history_users", "Users in the history store")
_BYTES = Gauge("relaygr_history_bytes", "Bytes in use in the history store")
_CAPACITY_BYTES = Gauge("relaygr_history_capacity_bytes", "Size limit of the history store")
_UNERASED_SECONDS = Gauge(
    "relaygr_history_unerased_seconds",
    "Time since the first deletion of a user whose bytes may still be in the files of the history store",
)
_COMPACTIONS = Counter(
    "relaygr_history_compactions_total", "Compactions of the history store: done or failed", ["outcome"]
)
_UNDELIVERED = Gauge(
    "relaygr_history_undelivered_dead_letters", "Dead letters of the history topic that wait for their delivery report"
)


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why a record goes to dead letters: one of `REASONS`, and a sentence."""

    reason: str
    detail: str


def read_record(
    key: bytes | None,
    value: bytes | None,
    partition: int,
    partition_count: int,
    offset: int,
    written_at_ms: int = 0,
    headers: RawHeaders = None,
) -> HistoryRecord | Rejected:
    """The decoded snapshot, or why it is rejected. A value of None is a tombstone; an empty value is not."""
    user_id = _user_of(key, partition, partition_count)
    if isinstance(user_id, Rejected):
        return user_id
    try:
        if value is None:
            return HistoryRecord(user_id, offset, None, written_at_ms, RepeatedTombstone.decode(headers))
        history = decode(History, value)
    except DecodeError as error:
        return Rejected(error.reason, str(error))
    if history.user_id != user_id:
        return Rejected(KEY_MISMATCH, "the key is not the user id of the body")
    return HistoryRecord(user_id, offset, history, written_at_ms)


def read_event(
    key: bytes | None,
    value: bytes | None,
    partition: int,
    partition_count: int,
    offset: int,
    written_at_ms: int = 0,
) -> EventRecord | Rejected:
    """The decoded behaviours, or why they are rejected."""
    user_id = _user_of(key, partition, partition_count)
    if isinstance(user_id, Rejected):
        return user_id
    try:
        event = decode(BehaviourEvent, value or b"")
    except DecodeError as error:
        return Rejected(error.reason, str(error))
    if event.user_id != user_id:
        return Rejected(KEY_MISMATCH, "the key is not the user id of the body")
    return EventRecord(event, offset, written_at_ms)


def _user_of(key: bytes | None, partition: int, partition_count: int) -> str | Rejected:
    if not key:
        return Rejected(DecodeReason.EMPTY, "the record needs the user id as its key")
    try:
        user_id = _USER_ID.unpack(key.decode())
    except UnicodeDecodeError:
        return Rejected(DecodeReason.MALFORMED, "the key is not UTF-8")
    except FieldError as error:
        return Rejected(DecodeReason.INVALID_FIELD, f"the key is not a user id: {error}")
    right = partition_for(key, partition_count)
    if right != partition:
        return Rejected(
            WRONG_PARTITIONER,
            f"murmur2 puts this user in partition {right} of {partition_count}, the record is in {partition}: "
            "set the producer's partitioner to murmur2_random",
        )
    return user_id


@dataclass(frozen=True, slots=True)
class _DeadRecord:
    message: Message
    rejected: Rejected

    @property
    def place(self) -> tuple[str, int, int]:
        return _place(self.message)


@dataclass(slots=True)
class _Log:
    """How far one topic of a followed partition is read."""

    read_to: int
    """The offset after the last received record."""
    stored_to: int
    end: int | None = None
    """The end of the log when the first record arrived."""
    at_end: bool = False
    undelivered: set[int] = field(default_factory=set)

    @property
    def may_store_to(self) -> int:
        """The offset from which a restart may read."""
        return min(self.undelivered, default=self.read_to)

    @property
    def reached_end(self) -> bool:
        return self.at_end or (self.end is not None and self.read_to >= self.end)


@dataclass(frozen=True, slots=True)
class _Ends:
    """The ends of both logs of a partition. All records from before `asked_ms` (wall time) are below them."""

    asked_ms: int
    history: int
    behaviours: int


@dataclass(slots=True)
class _Followed:
    """The state of one followed partition."""

    history: _Log
    behaviours: _Log
    ends: _Ends | None = None
    """The ends that were asked for last, until the partition is stored up to them."""
    records: list[HistoryRecord] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)
    reads_behaviours: bool = False
    caught_up: bool = False

    @property
    def stored_to(self) -> tuple[int, int]:
        """The stored offsets of both topics."""
        return self.history.stored_to, self.behaviours.stored_to

    @property
    def may_store_to(self) -> tuple[int, int]:
        """The offsets from which a restart may read."""
        return self.history.may_store_to, self.behaviours.may_store_to


class HistoryFollower:
    """Implements the module's contract."""

    def __init__(
        self,
        kafka: KafkaSettings,
        store: HistoryStore,
        dead_letters: DeadLetterWriter,
        client_id: str,
        on_changed: Callable[[tuple[str, ...]], None],
        on_deleted: Callable[[str], None],
        clock: Clock | None = None,
        on_deleting: Callable[[str], object] = lambda _: None,
        on_missed: Callable[[frozenset[int]], object] = lambda _: None,
        erase_within_s: float = 900.0,
        snapshots: SnapshotLimits | None = None,
        is_idle: Callable[[], bool] = lambda: True,
    ) -> None:
        """`snapshots`: when histories are saved; None: never. `is_idle`: see `SnapshotWriter`."""
        self._kafka = kafka
        self._store = store
        self._dead_letters = dead_letters
        self._client_id = client_id
        self._on_changed = on_changed
        self._on_deleted = on_deleted
        self._on_deleting = on_deleting
        self._on_missed = on_missed
        self._erase_after_ms = int(erase_within_s * 1000 / 2)
        self._clock = clock or SystemClock()
        self._snapshots = (
            SnapshotWriter(kafka, store, client_id, snapshots, self._clock, is_idle) if snapshots is not None else None
        )
        self._topic = kafka.topic(Topic.HISTORY)
        self._behaviours = kafka.topic(Topic.BEHAVIOURS)
        self._thread = threading.Thread(target=self._run, name="history-follower", daemon=True)
        self._stopping = threading.Event()
        # Both sets are replaced as a whole, so readers need no lock.
        self._wanted: frozenset[int] = frozenset()
        self._caught_up: frozenset[int] = frozenset()
        self._is_standby = True
        self._to_forget: deque[frozenset[int]] = deque()
        # Only the thread uses the attributes below.
        self._followed: dict[int, _Followed] = {}
        self._reports: deque[tuple[_DeadRecord, bool]] = deque()
        self._failed: list[_DeadRecord] = []
        self._left_at: dict[int, tuple[int, int]] = {}
        """The stored offsets of each partition that is not followed any more."""
        self._missed: set[int] = set()
        """Partitions that `on_missed` has to get."""
        self._retry_at_us = 0
        self._current_at_us = self._clock.monotonic_us()
        self._gauges_at_us = 0
        self._refused = 0
        self._refused_at_us = 0
        self._erase_at_us = 0

    def start(self) -> None:
        """Starts the thread, which waits for the broker."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Stores the received records and ends the thread. Returns whether the thread ended in time."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def follow(self, partitions: frozenset[int]) -> None:
        """Replaces the set of followed partitions. Reading continues for partitions in both sets."""
        self._wanted = frozenset(partitions)
        self._is_standby = False

    def forget(self, partitions: frozenset[int]) -> None:
        """Deletes the stored histories of these partitions, unless they are followed again."""
        self._to_forget.append(partitions)

    def caught_up(self, partition: int) -> bool:
        """Whether the partition is followed and the follower has reached an end of its log."""
        return partition in self._caught_up and partition in self._wanted

    @property
    def loading(self) -> frozenset[int]:
        """Followed partitions that have not caught up."""
        return self._wanted - self._caught_up

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._store.trust(self._origin())
            except Exception as error:
                # The cause may be a missing broker or topic, or a full disk. The follower retries until it is gone.
                log.warning(
                    "history topics cannot be read yet", topics=[self._topic, self._behaviours], cause=str(error)
                )
                self._stopping.wait(RETRY_S)
                continue
            break
        while not self._stopping.is_set():
            options = {**_CONSUMER_OPTIONS, "fetch.wait.max.ms": asking_fetch_wait_ms(self._kafka)}
            consumer = make_assigned_consumer(self._kafka, self._client_id, options=options)
            try:
                while not self._stopping.is_set():
                    self._turn(consumer)
                self._dead_letters.flush(RETRY_S)
                self._collect_reports()
                self._flush(consumer)
                if self._snapshots is not None:
                    self._snapshots.close(RETRY_S)
            except Exception:
                log.exception("history follower failed: it reads again from the stored offsets")
                _FAILURES.inc()
                self._stopping.wait(RETRY_S)
            finally:
                self._followed.clear()
                self._caught_up = frozenset()
                consumer.close()

    def _turn(self, consumer: Consumer) -> None:
        self._apply_wanted(consumer)
        self._collect_reports()
        self._retry_dead_letters()
        if self._undelivered < MAX_UNDELIVERED:
            may_wait = self._followed and not self._store.is_compacting
            for message in _drain(consumer, POLL_S if may_wait else IDLE_POLL_S):
                self._receive(consumer, message)
        else:
            self._stopping.wait(POLL_S)
        self._flush(consumer)
        self._do_periodic_work(consumer)
        self._forget_moved()
        self._erase_deleted()
        if self._snapshots is not None:
            self._snapshots.turn(self._caught_up & self._wanted)

    def _origin(self) -> StoreOrigin:
        topics = [self._topic, self._behaviours]
        found = identify_topics(self._kafka, topics, f"{self._client_id}-origin", METADATA_S)
        return StoreOrigin(found.cluster_id, self._topic, *(found.topic_ids[topic] for topic in topics))

    def _apply_wanted(self, consumer: Consumer) -> None:
        wanted = self._wanted
        lost = self._followed.keys() - wanted
        gained = wanted - self._followed.keys()
        if lost:
            self._flush(consumer)
            for partition in sorted(lost):
                self._unassign(consumer, partition, self._followed[partition])
            for partition in lost:
                self._left_at[partition] = self._followed.pop(partition).stored_to
            self._publish_caught_up()
        if gained:
            consumer.incremental_assign([self._begin(partition) for partition in sorted(gained)])
            log.info("history partitions taken over", partitions=sorted(gained))
        if self._missed:
            self._on_missed(frozenset(self._missed))
            self._missed.clear()

    def _begin(self, partition: int) -> TopicPartition:
        """Begins to follow a partition. Returns the position to read from."""
        now_ms = self._clock.wall_us() // 1000
        state = self._store.state(partition)
        if state is not None and state.current_at_ms < now_ms - MAX_STORE_AGE_MS:
            self._restart(partition, "deletions_may_be_missing")
            state = None
        elif state is not None and state.refused and self._store.has_room:
            # Users of refused records have the behaviours after those only, so they are read anew, too.
            self._restart(partition, "refused_before")
            state = None
        if state is None:
            self._missed.add(partition)
            self._store.mark_current((partition,), now_ms)
        offset, event = self._store.next_offset(partition), self._store.next_event(partition)
        stored_to = (offset or 0, event or 0)
        if self._left_at.pop(partition, stored_to) != stored_to:
            self._missed.add(partition)
        self._followed[partition] = _Followed(_Log(stored_to[0], stored_to[0]), _Log(stored_to[1], stored_to[1]))
        return TopicPartition(self._topic, partition, OFFSET_BEGINNING if offset is None else offset)

    def _read_behaviours(self, consumer: Consumer, partition: int, followed: _Followed) -> None:
        """Begins to read the behaviours of a partition whose snapshots are read."""
        followed.reads_behaviours = True
        start = followed.behaviours.stored_to or OFFSET_BEGINNING
        consumer.incremental_assign([TopicPartition(self._behaviours, partition, start)])

    def _unassign(self, consumer: Consumer, partition: int, followed: _Followed) -> None:
        topics = [self._topic, self._behaviours] if followed.reads_behaviours else [self._topic]
        consumer.incremental_unassign([TopicPartition(topic, partition) for topic in topics])

    def _restart(self, partition: int, reason: str) -> None:
        self._missed.add(partition)
        users = self._store.forget(partition)
        _RESTARTED_PARTITIONS.labels(reason).inc()
        log.warning("history partition is read from the beginning", partition=partition, reason=reason, forgotten=users)

    def _receive(self, consumer: Consumer, message: Message) -> None:
        error = message.error()
        partition = message.partition()
        followed = None if partition is None else self._followed.get(partition)
        if error is not None:
            self._receive_error(consumer, message, error, followed)
            return
        if followed is None or partition is None:
            return
        topic, offset = message.topic(), message.offset()
        assert topic is not None and offset is not None
        is_event = topic == self._behaviours
        read = followed.behaviours if is_event else followed.history
        if read.end is None:
            tail = consumer.get_watermark_offsets(TopicPartition(topic, partition), cached=True)
            read.end = tail[1] if tail is not None and tail[1] >= 0 else None
        content = message.key(), message.value(), partition, self._kafka.partitions
        written_at_ms = max(0, message.timestamp()[1])
        read.read_to = offset + 1
        entry = (
            read_event(*content, offset, written_at_ms)
            if is_event
            else read_record(*content, offset, written_at_ms, headers_of(message))
        )
        if isinstance(entry, EventRecord):
            followed.events.append(entry)
        elif isinstance(entry, HistoryRecord):
            followed.records.append(entry)
        else:
            read.undelivered.add(offset)
            (_EVENTS if is_event else _RECORDS).labels("rejected").inc()
            _REJECTED.labels(entry.reason).inc()
            self._write_dead_letter(_DeadRecord(message, entry))

    def _receive_error(
        self, consumer: Consumer, message: Message, error: KafkaError, followed: _Followed | None
    ) -> None:
        partition = message.partition()
        if error.code() == KafkaError._PARTITION_EOF:
            if followed is not None:
                read = followed.behaviours if message.topic() == self._behaviours else followed.history
                read.read_to = max(read.read_to, message.offset() or 0)
                read.at_end = True
        elif error.code() == KafkaError._AUTO_OFFSET_RESET and followed is not None and partition is not None:
            # A request must not find the emptied store while the partition counts as caught up.
            del self._followed[partition]
            self._publish_caught_up()
            self._restart(partition, "offset_out_of_range")
            self._unassign(consumer, partition, followed)
        elif error.fatal():
            raise KafkaException(error)
        else:
            log.warning(
                "history topic not readable",
                topic=message.topic(),
                partition=partition,
                error=error.name(),
                cause=error.str(),
            )

    def _flush(self, consumer: Consumer) -> None:
        """Stores the received records. After an exception they are read again from the stored offsets."""
        batches = []
        for partition, followed in self._followed.items():
            offset, event = followed.may_store_to
            if followed.records or followed.events or (offset, event) != followed.stored_to:
                batches.append(HistoryBatch(partition, tuple(followed.records), offset, tuple(followed.events), event))
        for batch in batches:
            for record in batch.records:
                if record.history is None:
                    self._on_deleting(record.user_id)
        if batches:
            try:
                with _APPLY_SECONDS.time():
                    outcome = self._store.apply_all(batches)
            except StoreFullError as error:
                self._report(error.done)
                raise
            for batch in batches:
                followed = self._followed[batch.partition]
                followed.records.clear()
                followed.events.clear()
                followed.history.stored_to, followed.behaviours.stored_to = batch.next_offset, batch.next_event
            self._report(outcome)
        self._note_ends(consumer)

    def _report(self, outcome: ApplyOutcome) -> None:
        for name, count in (
            ("applied", outcome.snapshots),
            ("deleted", len(outcome.deleted)),
            ("refused", len(outcome.refused)),
            ("older", outcome.older),
            ("superseded", outcome.superseded),
            ("repeated", outcome.repeated),
        ):
            _RECORDS.labels(name).inc(count)
        for added, count in outcome.added.items():
            _EVENTS.labels(added.value).inc(count)
        self._refused += len(outcome.refused)
        for user_id in outcome.deleted:
            self._on_deleted(user_id)
        if outcome.changed:
            self._on_changed(tuple(dict.fromkeys(outcome.changed)))

    def _note_ends(self, consumer: Consumer) -> None:
        reached = []
        for partition, followed in self._followed.items():
            if followed.caught_up or not followed.history.reached_end:
                continue
            if not followed.reads_behaviours:
                self._read_behaviours(consumer, partition, followed)
            elif followed.behaviours.reached_end:
                followed.caught_up = True
                reached.append(partition)
        if reached:
            self._publish_caught_up()
            log.info("history partitions caught up", partitions=sorted(reached), loading=len(self.loading))

    def _publish_caught_up(self) -> None:
        self._caught_up = frozenset(partition for partition, followed in self._followed.items() if followed.caught_up)

    def _do_periodic_work(self, consumer: Consumer) -> None:
        """Work at intervals: gauges, the warning of refused records, the ends of the logs. Marks current partitions."""
        now_us = self._clock.monotonic_us()
        if now_us - self._gauges_at_us >= GAUGE_INTERVAL_US:
            self._gauges_at_us = now_us
            loading = len(self.loading)
            _PARTITIONS.labels("loading").set(loading)
            _PARTITIONS.labels("caught_up").set(len(self._wanted) - loading)
            _USERS.set(self._store.user_count)
            _BYTES.set(self._store.bytes_used)
            _CAPACITY_BYTES.set(self._store.max_bytes)
            removed_at_ms = self._store.removed_at_ms
            unerased_ms = 0 if removed_at_ms is None else self._clock.wall_us() // 1000 - removed_at_ms
            _UNERASED_SECONDS.set(max(0, unerased_ms) / 1000)
            _UNDELIVERED.set(self._undelivered)
        if self._refused and now_us - self._refused_at_us >= REFUSED_INTERVAL_US:
            log.error(
                "history store is full: raise worker.history_max_bytes",
                refused=self._refused,
                max_bytes=self._store.max_bytes,
            )
            self._refused, self._refused_at_us = 0, now_us
        if now_us - self._current_at_us >= CURRENT_INTERVAL_US:
            self._current_at_us = now_us
            self._ask_ends(consumer)
        self._mark_current()

    def _forget_moved(self) -> None:
        while self._to_forget:
            partitions = self._to_forget[0] - self._wanted
            if partitions & self._followed.keys():
                return  # The next turn ends their reading first.
            self._to_forget.popleft()
            known = [partition for partition in sorted(partitions) if self._store.state(partition) is not None]
            if known:
                for partition in known:
                    self._left_at.pop(partition, None)
                users = self._store.forget(*known)
                log.info("histories of moved partitions deleted", partitions=known, users=users)

    def _erase_deleted(self) -> None:
        """Compacts the store a slice at a time, so that requests and new histories need not wait."""
        now_us = self._clock.monotonic_us()
        if self._is_standby or now_us < self._erase_at_us:
            return
        if not self._store.is_compacting:
            removed_at_ms = self._store.removed_at_ms
            # A time in the future means that the clock was set back.
            if removed_at_ms is None or 0 <= self._clock.wall_us() // 1000 - removed_at_ms < self._erase_after_ms:
                return
        try:
            if self._store.compact():
                _COMPACTIONS.labels("done").inc()
                log.info("history store compacted: no byte of deleted users is left in it", path=str(self._store.path))
        except (OSError, RelayError, lmdb.Error) as error:
            self._erase_at_us = now_us + ERASE_RETRY_US
            _COMPACTIONS.labels("failed").inc()
            log.warning(
                "bytes of deleted users are still in the history store: it needs free disk space for its live records",
                path=str(self._store.path),
                cause=str(error),
            )

    def _ask_ends(self, consumer: Consumer) -> None:
        """Asks the broker for the ends of both logs, of partitions that are stored up to their earlier ends."""
        asked_ms = self._clock.wall_us() // 1000
        topics = (self._topic, self._behaviours)
        # A partition keeps its ends until it is stored up to them. With new ends at each interval, a partition that is
        # further behind than an interval would never be marked.
        asked = [partition for partition, followed in self._followed.items() if followed.ends is None]
        wanted = [TopicPartition(topic, partition, OFFSET_END) for partition in asked for topic in topics]
        ends: dict[tuple[str, int], int] = {}
        try:
            # One request for all partitions: each one waits for the fetch before it.
            for found in consumer.offsets_for_times(wanted, timeout=METADATA_S) if wanted else []:
                if found.error is None and found.offset >= 0:
                    ends[found.topic, found.partition] = found.offset
        except KafkaException as error:
            log.info("ends of the history logs not known", cause=error.args[0].str())
        for partition in asked:
            history, behaviours = (ends.get((topic, partition)) for topic in topics)
            if history is not None and behaviours is not None:
                self._followed[partition].ends = _Ends(asked_ms, history, behaviours)
        self._store.expire(asked_ms - DELETED_KEPT_MS, CURRENT_INTERVAL_US / EXPIRY_US)

    def _mark_current(self) -> None:
        """Marks the partitions that are stored up to their ends, as of the time when these were asked for.

        A log with steady records is never stored up to its end of now: the next record comes meanwhile.
        """
        current: dict[int, list[int]] = {}
        for partition, followed in self._followed.items():
            (history, behaviours), ends = followed.stored_to, followed.ends
            if ends is not None and history >= ends.history and behaviours >= ends.behaviours:
                current.setdefault(ends.asked_ms, []).append(partition)
                followed.ends = None
        for asked_ms, partitions in current.items():
            self._store.mark_current(partitions, asked_ms)

    def _write_dead_letter(self, dead: _DeadRecord) -> None:
        def report(delivered: bool) -> None:
            self._reports.append((dead, delivered))

        self._dead_letters.write(dead.message, dead.rejected.reason, dead.rejected.detail, report)

    def _collect_reports(self) -> None:
        self._dead_letters.poll()
        while self._reports:
            dead, delivered = self._reports.popleft()
            if delivered:
                undelivered, offset = self._undelivered_of(dead)
                undelivered.discard(offset)
            else:
                if not self._failed:
                    self._retry_at_us = self._clock.monotonic_us() + int(RETRY_S * 1e6)
                self._failed.append(dead)

    def _retry_dead_letters(self) -> None:
        if not self._failed or self._clock.monotonic_us() < self._retry_at_us:
            return
        failed, self._failed = self._failed, []
        for dead in failed:
            undelivered, offset = self._undelivered_of(dead)
            # A partition that was lost or begun again reads the record again.
            if offset in undelivered:
                self._write_dead_letter(dead)

    def _undelivered_of(self, dead: _DeadRecord) -> tuple[set[int], int]:
        """The undelivered offsets in the log of a dead letter, and the offset of that record."""
        topic, partition, offset = dead.place
        followed = self._followed.get(partition)
        if followed is None:
            return set(), offset
        return (followed.behaviours if topic == self._behaviours else followed.history).undelivered, offset

    @property
    def _undelivered(self) -> int:
        return sum(
            len(each.undelivered)
            for followed in self._followed.values()
            for each in (followed.history, followed.behaviours)
        )


def _drain(consumer: Consumer, timeout_s: float) -> list[Message]:
    """Received messages, at most a batch. Waits only for the first one."""
    first = consumer.poll(timeout_s)
    if first is None:
        return []
    messages = [first]
    size_bytes = len(first.value() or b"")
    # `consume` with a time-out would wait for the whole time-out.
    while len(messages) < BATCH_RECORDS and size_bytes < BATCH_BYTES:
        more = consumer.consume(16, 0)
        if not more:
            break
        messages += more
        size_bytes += sum(len(message.value() or b"") for message in more)
    return messages


def _place(message: Message) -> tuple[str, int, int]:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None and partition is not None and offset is not None
    return topic, partition, offset
