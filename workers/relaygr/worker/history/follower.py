"""Keeps the store equal to the history topic, for the partitions that this worker owns.

A thread of its own with a consumer of its own (`assign`, no group). Contract:

* `follow` names the partitions, from any thread; the thread takes it over at its next turn. Each is
  read from the store's offset, or from the beginning where there is none, where that offset is out of
  the log's range, or where the store is so old that deletions may have been compacted away.
* Batches go into the store with their offsets in one transaction. What is not in the store is read
  again, so every failure is answered in one way: begin again from the store's offsets, after a pause.
* `caught_up(p)`: since `p` was taken over, everything up to an end of the log was stored. Compacted logs have
  gaps, so the broker's end-of-partition mark decides, not a count of records.
* What is no history record goes to dead letters. The stored offset does not pass it until its delivery
  is reported; a failed report is tried again, and with too many undelivered ones reading waits.
* The broker may be away: reading goes on by itself when it is back.
* `on_changed`, `on_deleted` and `on_caught_up` are called in this thread after the commit. They must not block.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from prometheus_client import Counter, Gauge, Histogram

from relaygr.kafka.clients import make_assigned_consumer
from relaygr.kafka.settings import KafkaSettings
from relaygr.kafka.topic_identity import identify_topics
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.schemas.codec import DecodeError, DecodeReason, decode
from relaygr.schemas.fields import FieldError, Text
from relaygr.schemas.messages import History
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.worker.history.store import (
    ApplyOutcome,
    HistoryBatch,
    HistoryRecord,
    HistoryStore,
    StoreFullError,
    StoreOrigin,
)

log = structlog.get_logger()

POLL_S: Final = 0.1
# Nothing is followed yet: how late the first partitions are noticed. A standby waits for hours, a worker for moments.
IDLE_POLL_S: Final = 0.01
RETRY_S: Final = 1.0
BATCH_RECORDS: Final = 512
BATCH_BYTES: Final = 4 * 1024 * 1024
MAX_UNDELIVERED: Final = 256
# Brokers keep a tombstone for a day (`delete.retention.ms`); a store that slept longer may miss deletions.
MAX_STORE_AGE_MS: Final = 20 * 3600 * 1000
CURRENT_INTERVAL_US: Final = 300 * 1_000_000
GAUGE_INTERVAL_US: Final = 1_000_000
REFUSED_INTERVAL_US: Final = 10_000_000
METADATA_S: Final = 2.0

_CONSUMER_OPTIONS: Final = {
    # The end of a compacted log can not be told from offsets alone.
    "enable.partition.eof": True,
    # An offset out of range means another log: said to us, not skipped over.
    "auto.offset.reset": "error",
}


KEY_MISMATCH = "key_mismatch"
WRONG_PARTITIONER = "wrong_partitioner"
REASONS = (*DecodeReason, KEY_MISMATCH, WRONG_PARTITIONER)
_USER_ID = Text(256)

_RECORDS = Counter(
    "relaygr_history_records_total",
    "Records read from the history topic: applied, deleted (tombstones), older or repeated (skipped), "
    "refused (the store is full), rejected (to dead letters)",
    ["outcome"],
)
_REJECTED = Counter("relaygr_history_rejected_total", "Records sent to dead letters", ["reason"])
_FAILURES = Counter("relaygr_history_failures_total", "Times the follower began again from the store's offsets")
_RESTARTED_PARTITIONS = Counter(
    "relaygr_history_restarted_partitions_total", "Partitions read again from their beginning", ["reason"]
)
_APPLY_SECONDS = Histogram(
    "relaygr_history_apply_seconds",
    "One transaction of the store",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
_PARTITIONS = Gauge("relaygr_history_partitions", "Followed partitions by state", ["state"])
_USERS = Gauge("relaygr_history_users", "Users in the store")
_BYTES = Gauge("relaygr_history_bytes", "Bytes of the store that hold records")
_CAPACITY_BYTES = Gauge("relaygr_history_capacity_bytes", "Size limit of the store")
_UNDELIVERED = Gauge("relaygr_history_undelivered_dead_letters", "Dead letters without a delivery report yet")


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record for dead letters: a reason of `REASONS`, and a sentence."""

    reason: str
    detail: str


def read_record(
    key: bytes | None, value: bytes | None, partition: int, partition_count: int, offset: int
) -> HistoryRecord | Rejected:
    """The record, or why it is none. A value of None is a tombstone; an empty one is not."""
    if not key:
        return Rejected(DecodeReason.EMPTY, "a history record needs the user id as its key")
    try:
        user_id = _USER_ID.unpack(key.decode())
    except UnicodeDecodeError:
        return Rejected(DecodeReason.MALFORMED, "the key is not UTF-8")
    except FieldError as error:
        return Rejected(DecodeReason.INVALID_FIELD, f"the key is no user id: {error}")
    right = partition_for(key, partition_count)
    if right != partition:
        return Rejected(
            WRONG_PARTITIONER,
            f"murmur2 puts this user in partition {right} of {partition_count}, the record is in {partition}: "
            "set the producer's partitioner to murmur2_random",
        )
    if value is None:
        return HistoryRecord(user_id, offset, None)
    try:
        history = decode(History, value)
    except DecodeError as error:
        return Rejected(error.reason, str(error))
    if history.user_id != user_id:
        return Rejected(KEY_MISMATCH, f"the key is {user_id!r}, the body's user is {history.user_id!r}")
    return HistoryRecord(user_id, offset, history)


class DeadLetters(Protocol):
    """Where records go that are none: a `relaygr.kafka.dead_letters.DeadLetterWriter` of the follower's own."""

    def write(
        self, message: Message, reason: str, detail: str, on_done: Callable[[bool], None] | None = None
    ) -> None: ...

    def poll(self, timeout_s: float = 0.0) -> int: ...

    def flush(self, timeout_s: float) -> int: ...


@dataclass(frozen=True, slots=True)
class _DeadHistoryRecord:
    message: Message
    rejected: Rejected

    @property
    def place(self) -> tuple[int, int]:
        return _place(self.message)


@dataclass(slots=True)
class _Followed:
    """One partition while it is followed."""

    read_to: int
    """The offset after everything that was received."""
    stored_to: int
    records: list[HistoryRecord] = field(default_factory=list)
    end: int | None = None
    """The end of the log as the first answer told it."""
    at_end: bool = False
    caught_up: bool = False
    undelivered: set[int] = field(default_factory=set)

    @property
    def may_store_to(self) -> int:
        """The offset that a restart may begin from."""
        return min(self.undelivered, default=self.read_to)


class HistoryFollower:
    """See the module's contract. `start` it, `follow` partitions, `stop` it."""

    def __init__(
        self,
        kafka: KafkaSettings,
        store: HistoryStore,
        dead_letters: DeadLetters,
        client_id: str,
        on_changed: Callable[[tuple[str, ...]], None] | None = None,
        on_deleted: Callable[[str], None] | None = None,
        on_caught_up: Callable[[int], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._kafka = kafka
        self._store = store
        self._dead_letters = dead_letters
        self._client_id = client_id
        self._on_changed = on_changed
        self._on_deleted = on_deleted
        self._on_caught_up = on_caught_up
        self._clock = clock or SystemClock()
        self._topic = kafka.topic(Topic.HISTORY)
        self._thread = threading.Thread(target=self._run, name="history-follower", daemon=True)
        self._stopping = threading.Event()
        # Replaced as a whole, so that readers need no lock.
        self._wanted: frozenset[int] = frozenset()
        self._caught_up: frozenset[int] = frozenset()
        # All that follows belongs to the thread.
        self._followed: dict[int, _Followed] = {}
        self._reports: deque[tuple[_DeadHistoryRecord, bool]] = deque()
        self._failed_letters: list[_DeadHistoryRecord] = []
        self._retry_letters_at_us = 0
        self._current_at_us = self._clock.monotonic_us()
        self._gauges_at_us = 0
        self._refused = 0
        self._refused_at_us = 0

    def start(self) -> None:
        """Starts the thread. It waits for the broker by itself."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Stores what was received and ends the thread. Answers whether it ended in time."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs. It ends only by `stop`."""
        return self._thread.is_alive()

    def follow(self, partitions: frozenset[int]) -> None:
        """Replaces the followed partitions. Those that stay are read on without a break."""
        self._wanted = frozenset(partitions)

    def caught_up(self, partition: int) -> bool:
        """Whether the partition is followed, and an end of its log was reached since it was taken over."""
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
                # Whatever it was (no broker, no topic, a full disk): nothing is served until it is mended.
                log.warning("history topic can not be read yet", topic=self._topic, cause=str(error))
                self._stopping.wait(RETRY_S)
                continue
            break
        while not self._stopping.is_set():
            consumer = make_assigned_consumer(self._kafka, self._client_id, options=_CONSUMER_OPTIONS)
            try:
                while not self._stopping.is_set():
                    self._turn(consumer)
                self._dead_letters.flush(RETRY_S)
                self._collect_reports()
                self._flush()
            except Exception:
                log.exception("history follower begins again from the stored offsets")
                _FAILURES.inc()
                self._stopping.wait(RETRY_S)
            finally:
                self._followed.clear()
                self._caught_up = frozenset()
                consumer.close()

    def _turn(self, consumer: Consumer) -> None:
        self._take_over(consumer)
        self._collect_reports()
        self._retry_letters()
        if self._undelivered < MAX_UNDELIVERED:
            for message in _drain(consumer, POLL_S if self._followed else IDLE_POLL_S):
                self._receive(consumer, message)
        else:
            self._stopping.wait(POLL_S)
        self._flush()
        self._tend(consumer)

    def _origin(self) -> StoreOrigin:
        found = identify_topics(self._kafka, [self._topic], f"{self._client_id}-origin", METADATA_S)
        return StoreOrigin(found.cluster_id, self._topic, found.topic_ids[self._topic])

    def _take_over(self, consumer: Consumer) -> None:
        wanted = self._wanted
        lost = self._followed.keys() - wanted
        gained = wanted - self._followed.keys()
        if lost:
            self._flush()
            consumer.incremental_unassign([TopicPartition(self._topic, partition) for partition in sorted(lost)])
            for partition in lost:
                del self._followed[partition]
            self._publish_caught_up()
        if gained:
            consumer.incremental_assign([self._begin(partition) for partition in sorted(gained)])
            log.info("history partitions taken over", partitions=sorted(gained))

    def _begin(self, partition: int) -> TopicPartition:
        """Where to begin a partition; it is followed from now on."""
        now_ms = self._clock.wall_us() // 1000
        state = self._store.state(partition)
        if state is not None and state.current_at_ms < now_ms - MAX_STORE_AGE_MS:
            self._restart(partition, "deletions_may_be_missing")
            state = None
        elif state is not None and state.refused and self._store.has_room:
            self._store.rewind(partition)
            _RESTARTED_PARTITIONS.labels("refused_before").inc()
            log.info("history partition read again, there is room now", partition=partition, refused=state.refused)
        if state is None:
            self._store.mark_current((partition,), now_ms)
        offset = self._store.next_offset(partition)
        self._followed[partition] = _Followed(read_to=offset or 0, stored_to=offset or 0)
        return TopicPartition(self._topic, partition, OFFSET_BEGINNING if offset is None else offset)

    def _restart(self, partition: int, reason: str) -> None:
        users = self._store.forget(partition)
        _RESTARTED_PARTITIONS.labels(reason).inc()
        log.warning("history partition read from the beginning", partition=partition, reason=reason, forgotten=users)

    def _receive(self, consumer: Consumer, message: Message) -> None:
        error = message.error()
        partition = message.partition()
        followed = None if partition is None else self._followed.get(partition)
        if error is not None:
            self._receive_error(consumer, message, error, followed)
            return
        if followed is None or partition is None:
            return
        offset = message.offset()
        assert offset is not None
        if followed.end is None:
            tail = consumer.get_watermark_offsets(TopicPartition(self._topic, partition), cached=True)
            followed.end = tail[1] if tail is not None and tail[1] >= 0 else None
        record = read_record(message.key(), message.value(), partition, self._kafka.partitions, offset)
        followed.read_to = offset + 1
        if isinstance(record, Rejected):
            followed.undelivered.add(offset)
            _RECORDS.labels("rejected").inc()
            _REJECTED.labels(record.reason).inc()
            self._write_letter(_DeadHistoryRecord(message, record))
        else:
            followed.records.append(record)

    def _receive_error(
        self, consumer: Consumer, message: Message, error: KafkaError, followed: _Followed | None
    ) -> None:
        partition = message.partition()
        if error.code() == KafkaError._PARTITION_EOF:
            if followed is not None:
                followed.read_to = max(followed.read_to, message.offset() or 0)
                followed.at_end = True
        elif error.code() == KafkaError._AUTO_OFFSET_RESET and followed is not None and partition is not None:
            self._restart(partition, "offset_out_of_range")
            del self._followed[partition]
            self._publish_caught_up()
            consumer.incremental_unassign([TopicPartition(self._topic, partition)])
        elif error.fatal():
            raise KafkaException(error)
        else:
            log.warning("history topic not readable", partition=partition, error=error.name(), cause=error.str())

    def _flush(self) -> None:
        """Stores what was received. What raises here is read again from the stored offsets."""
        batches = [
            HistoryBatch(partition, tuple(followed.records), followed.may_store_to)
            for partition, followed in self._followed.items()
            if followed.records or followed.may_store_to != followed.stored_to
        ]
        if batches:
            try:
                with _APPLY_SECONDS.time():
                    outcome = self._store.apply_all(batches)
            except StoreFullError as error:
                self._tell(error.done)
                raise
            for batch in batches:
                followed = self._followed[batch.partition]
                followed.records.clear()
                followed.stored_to = batch.next_offset
            self._tell(outcome)
        self._note_ends()

    def _tell(self, outcome: ApplyOutcome) -> None:
        for name, count in (
            ("applied", len(outcome.changed)),
            ("deleted", len(outcome.deleted)),
            ("refused", len(outcome.refused)),
            ("older", outcome.older),
            ("repeated", outcome.repeated),
        ):
            _RECORDS.labels(name).inc(count)
        self._refused += len(outcome.refused)
        if self._on_deleted is not None:
            for user_id in outcome.deleted:
                self._on_deleted(user_id)
        if self._on_changed is not None and outcome.changed:
            self._on_changed(outcome.changed)

    def _note_ends(self) -> None:
        reached = []
        for partition, followed in self._followed.items():
            if followed.caught_up:
                continue
            if followed.at_end or (followed.end is not None and followed.read_to >= followed.end):
                followed.caught_up = True
                reached.append(partition)
        if reached:
            self._publish_caught_up()
            log.info("history partitions caught up", partitions=sorted(reached), loading=len(self.loading))
            if self._on_caught_up is not None:
                for partition in reached:
                    self._on_caught_up(partition)

    def _publish_caught_up(self) -> None:
        self._caught_up = frozenset(partition for partition, followed in self._followed.items() if followed.caught_up)

    def _tend(self, consumer: Consumer) -> None:
        """What is due now and then."""
        now_us = self._clock.monotonic_us()
        if now_us - self._gauges_at_us >= GAUGE_INTERVAL_US:
            self._gauges_at_us = now_us
            loading = len(self.loading)
            _PARTITIONS.labels("loading").set(loading)
            _PARTITIONS.labels("caught_up").set(len(self._wanted) - loading)
            _USERS.set(self._store.user_count)
            _BYTES.set(self._store.bytes_used)
            _CAPACITY_BYTES.set(self._store.max_bytes)
            _UNDELIVERED.set(self._undelivered)
        if self._refused and now_us - self._refused_at_us >= REFUSED_INTERVAL_US:
            log.error(
                "history store is full: raise history_max_bytes",
                refused=self._refused,
                max_bytes=self._store.max_bytes,
            )
            self._refused, self._refused_at_us = 0, now_us
        if now_us - self._current_at_us >= CURRENT_INTERVAL_US:
            self._current_at_us = now_us
            self._mark_current(consumer)

    def _mark_current(self, consumer: Consumer) -> None:
        """Asks the broker for the ends: only what is stored up to there is current."""
        now_ms = self._clock.wall_us() // 1000
        current = []
        try:
            for partition, followed in self._followed.items():
                tail = consumer.get_watermark_offsets(TopicPartition(self._topic, partition), timeout=METADATA_S)
                if tail is not None and followed.stored_to >= tail[1]:
                    current.append(partition)
        except KafkaException as error:
            log.info("history ends not known", cause=error.args[0].str())
        if current:
            self._store.mark_current(current, now_ms)

    def _write_letter(self, letter: _DeadHistoryRecord) -> None:
        def report(delivered: bool) -> None:
            self._reports.append((letter, delivered))

        self._dead_letters.write(letter.message, letter.rejected.reason, letter.rejected.detail, report)

    def _collect_reports(self) -> None:
        self._dead_letters.poll()
        while self._reports:
            letter, delivered = self._reports.popleft()
            partition, offset = letter.place
            if delivered:
                followed = self._followed.get(partition)
                if followed is not None:
                    followed.undelivered.discard(offset)
            else:
                if not self._failed_letters:
                    self._retry_letters_at_us = self._clock.monotonic_us() + int(RETRY_S * 1e6)
                self._failed_letters.append(letter)

    def _retry_letters(self) -> None:
        if not self._failed_letters or self._clock.monotonic_us() < self._retry_letters_at_us:
            return
        letters, self._failed_letters = self._failed_letters, []
        for letter in letters:
            partition, offset = letter.place
            followed = self._followed.get(partition)
            # Of a partition that went, or was begun again, the record is read again anyway.
            if followed is not None and offset in followed.undelivered:
                self._write_letter(letter)

    @property
    def _undelivered(self) -> int:
        return sum(len(followed.undelivered) for followed in self._followed.values())


def _drain(consumer: Consumer, timeout_s: float) -> list[Message]:
    """What is there, up to a batch; waits for the first only."""
    first = consumer.poll(timeout_s)
    if first is None:
        return []
    messages = [first]
    size_bytes = len(first.value() or b"")
    # `consume` with a time-out would wait it out.
    while len(messages) < BATCH_RECORDS and size_bytes < BATCH_BYTES:
        more = consumer.consume(16, 0)
        if not more:
            break
        messages += more
        size_bytes += sum(len(message.value() or b"") for message in more)
    return messages


def _place(message: Message) -> tuple[int, int]:
    partition, offset = message.partition(), message.offset()
    assert partition is not None and offset is not None
    return partition, offset
