"""The history follower: copies histories and behaviours into the store, for the partitions that this worker owns.

docs/histories.md describes how it reads. It has a thread and a consumer of its own.

* `follow` sets the partitions, `forget` deletes those that another worker owns for good, and `read_anew` says that
  topics have other ids. Any thread may call them; the follower's thread acts at its next turn.
* `caught_up(p)`: since it began to follow `p`, it has reached an end of both logs and stored all before it.
* `fault` names why the store cannot be written. Then no partition counts as caught up.
* `on_changed` and `on_deleted` are called after the commit and must not block. `on_deleting` is called before it: if
  the process dies between the two, its successor reads the tombstone again. `on_missed` gets partitions whose
  deletions the follower may not have seen: they are read from the beginning, or another process has moved their
  stored offsets meanwhile.
* A standby's follower does not compact the store, because nobody has called its `follow` yet.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Final

import lmdb
import structlog
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from relaygr.kafka.client_errors import NoteError, no_note
from relaygr.kafka.clients import READ_COMMITTED, asking_fetch_wait_ms, learn_leaders, make_assigned_consumer
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.settings import KafkaSettings
from relaygr.kafka.topic_identity import identify_topics
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import check_room
from relaygr.schemas.topics import Topic
from relaygr.worker.history import metrics
from relaygr.worker.history.batches import ApplyOutcome, EventRecord, HistoryRecord, StoreFullError
from relaygr.worker.history.current import MAX_STORE_AGE_MS, METADATA_S, CurrentMarks
from relaygr.worker.history.decode import read_event, read_record
from relaygr.worker.history.erasure import Erasure
from relaygr.worker.history.letters import RETRY_S, DeadLetters, UndeliveredLetters
from relaygr.worker.history.partitions import FollowedPartition, Stage
from relaygr.worker.history.snapshots import SnapshotLimits, SnapshotWriter
from relaygr.worker.history.store import HistoryStore, StoreOrigin
from relaygr.worker.history.tombstones import TombstoneReader

log = structlog.get_logger()

POLL_S: Final = 0.1
# Poll interval between the slices of a compaction, and while no partition is followed: a new worker must notice its
# first partitions quickly.
IDLE_POLL_S: Final = 0.01
BATCH_RECORDS: Final = 2048
BATCH_BYTES: Final = 4 * 1024 * 1024
MAX_UNDELIVERED: Final = 256
GAUGE_INTERVAL_US: Final = 1_000_000
REFUSED_INTERVAL_US: Final = 10_000_000

_CONSUMER_OPTIONS: Final = {
    # Offsets alone do not show the end of a compacted log.
    "enable.partition.eof": True,
    # An offset out of range means another log: the consumer must report it, not skip records.
    "auto.offset.reset": "error",
    # A transaction that is aborted must not delete a user.
    **READ_COMMITTED,
}
# A reader of tombstones alone may read those of a new log from the beginning.
_TOMBSTONE_OPTIONS: Final = {**_CONSUMER_OPTIONS, "auto.offset.reset": "earliest"}


class HistoryFollower:
    """Implements the module's contract."""

    def __init__(
        self,
        kafka: KafkaSettings,
        store: HistoryStore,
        dead_letters: DeadLetters,
        client_id: str,
        on_changed: Callable[[tuple[str, ...]], None],
        on_deleted: Callable[[str], None],
        clock: Clock | None = None,
        on_deleting: Callable[[str], object] = lambda _: None,
        on_missed: Callable[[frozenset[int]], object] = lambda _: None,
        erase_within_s: float = 900.0,
        snapshots: SnapshotLimits | None = None,
        is_idle: Callable[[], bool] = lambda: True,
        note_error: NoteError = no_note,
        max_age_ms: int | None = None,
    ) -> None:
        """`snapshots`: when histories are saved; None: never. `is_idle`: see `SnapshotWriter`. `max_age_ms`: a
        partition that was current so long ago is read from the beginning; by default `MAX_STORE_AGE_MS`.
        """
        self._max_age_ms = MAX_STORE_AGE_MS if max_age_ms is None else max_age_ms
        self._kafka = kafka
        self._store = store
        self._note_error = note_error
        self._client_id = client_id
        self._on_changed = on_changed
        self._on_deleted = on_deleted
        self._on_deleting = on_deleting
        self._on_missed = on_missed
        self._clock = clock or SystemClock()
        self._erasure = Erasure(store, erase_within_s, self._clock)
        self._snapshots = (
            SnapshotWriter(kafka, store, client_id, snapshots, self._clock, is_idle, note_error)
            if snapshots is not None
            else None
        )
        self._topic = kafka.topic(Topic.HISTORY)
        self._behaviours = kafka.topic(Topic.BEHAVIOURS)
        self._thread = threading.Thread(target=self._run, name="history-follower", daemon=True)
        self._stopping = threading.Event()
        # Both sets are replaced as a whole, so readers need no lock.
        self._wanted: frozenset[int] = frozenset()
        self._caught_up: frozenset[int] = frozenset()
        self._fault = ""
        self._is_standby = True
        self._is_identified = False
        self._to_forget: deque[frozenset[int]] = deque()
        # Only the thread uses the attributes below.
        self._followed: dict[int, FollowedPartition] = {}
        self._letters = UndeliveredLetters(dead_letters, self._clock)
        self._has_read = False
        """Whether it has followed a partition since it identified the logs."""
        self._left_at: dict[int, tuple[int, int]] = {}
        """The stored offsets of each partition that is not followed any more."""
        self._tombstones = TombstoneReader(kafka, store, self._take_tombstone)
        self._missed: set[int] = set()
        """Partitions that `on_missed` has to get."""
        self._current = CurrentMarks(store, self._topic, self._behaviours, self._clock)
        self._gauges_at_us = 0
        self._refused = 0
        self._refused_at_us = 0

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

    def read_anew(self, topics: Collection[str]) -> None:
        """Reads both topics from the beginning if one of these, which were deleted and created again, is among them."""
        if {self._topic, self._behaviours} & set(topics):
            self._is_identified = False

    def caught_up(self, partition: int) -> bool:
        """Whether the partition is followed and the follower has reached an end of its log."""
        return partition in self._caught_up and partition in self._wanted

    @property
    def loading(self) -> frozenset[int]:
        """Followed partitions that have not caught up."""
        return self._wanted - self._caught_up

    @property
    def fault(self) -> str:
        """Why the store cannot be written, and the remedy; empty: it can."""
        return self._fault

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._is_identified and not self._identify():
                self._stopping.wait(RETRY_S)
                continue
            options = {**_CONSUMER_OPTIONS, "fetch.wait.max.ms": asking_fetch_wait_ms(self._kafka)}
            try:
                consumer = make_assigned_consumer(self._kafka, self._client_id, self._on_client_error, options)
            except RelayError as error:
                log.error("history topics cannot be read yet", cause=str(error))
                self._stopping.wait(RETRY_S)
                continue
            try:
                learn_leaders(consumer, (self._topic, self._behaviours))
                while self._is_identified and not self._stopping.is_set():
                    self._turn(consumer)
                if not self._is_identified:
                    continue  # What was received is of the old logs.
                self._letters.flush()
                self._flush(consumer)
                if self._snapshots is not None:
                    self._snapshots.close(RETRY_S)
            except (lmdb.Error, StoreFullError) as error:
                metrics.count_failure()
                self._note_fault(error)
            except Exception:
                log.exception("history follower failed: it reads again from the stored offsets")
                metrics.count_failure()
                self._stopping.wait(RETRY_S)
            finally:
                for followed in self._followed.values():
                    followed.leave()
                self._followed.clear()
                self._caught_up = frozenset()
                consumer.close()
            if self._fault:
                self._forget_deleted()

    def _note_fault(self, error: Exception) -> None:
        is_full = isinstance(error, StoreFullError | lmdb.MapFullError)
        remedy = "raise worker.history_max_bytes" if is_full else "free space on its file system, or repair it"
        fault = f"the history store in {self._store.path} cannot be written ({error}): {remedy}"
        if fault != self._fault:
            self._fault = fault
            log.error(fault)

    def _end_fault(self) -> None:
        if self._fault:
            self._fault = ""
            log.info("the history store can be written again", path=str(self._store.path))

    def _forget_deleted(self) -> None:
        """Reads tombstones, stores nothing, until the disk has room for a batch. Then the caller tries again."""
        try:
            consumer = make_assigned_consumer(self._kafka, self._client_id, self._on_client_error, _TOMBSTONE_OPTIONS)
            try:
                self._read_tombstones(consumer)
            finally:
                consumer.close()
        except RelayError as error:
            log.error("tombstones cannot be read while the history store cannot be written", cause=str(error))
            self._stopping.wait(RETRY_S)
        except Exception:
            log.exception("tombstones cannot be read while the history store cannot be written")
            self._stopping.wait(RETRY_S)

    def _read_tombstones(self, consumer: Consumer) -> None:
        until_us = self._clock.monotonic_us() + int(RETRY_S * 1e6)
        self._tombstones.begin()
        while self._is_identified and not self._stopping.is_set():
            self._tombstones.assign(consumer, self._wanted)
            for message in _drain(consumer, POLL_S):
                self._tombstones.receive(message)
            self._update_gauges(consumer)
            if self._tombstones.is_at_end and self._clock.monotonic_us() >= until_us and self._has_disk_space():
                return

    def _take_tombstone(self, partition: int, tombstone: HistoryRecord) -> None:
        """The tombstone was read while the store cannot be written."""
        self._hide(partition, tombstone)
        self._on_deleted(tombstone.user_id)

    def _hide(self, partition: int, tombstone: HistoryRecord) -> None:
        """Look-ups and caches forget the user, before or without the transaction that deletes the history."""
        self._store.conceal(tombstone.user_id, partition, tombstone.offset)
        self._on_deleting(tombstone.user_id)

    def _has_disk_space(self) -> bool:
        try:
            check_room(self._store.path, BATCH_BYTES)
        except OSError:
            return False
        return True

    def _identify(self) -> bool:
        """Empties the store if it is of other logs. The cause of a failure may be a missing broker or topic, or a full
        disk: the follower retries until it is gone.
        """
        self._is_identified = True
        try:
            # Records of old logs may have been stored since another process emptied the store.
            self._store.trust(self._origin(), anew=self._has_read)
            self._has_read = False
            self._tombstones.reset()
        except Exception as error:
            self._is_identified = False
            if isinstance(error, lmdb.Error):
                self._note_fault(error)
            log.warning("history topics cannot be read yet", topics=[self._topic, self._behaviours], cause=str(error))
        return self._is_identified

    def _on_client_error(self, error: KafkaError) -> None:
        """A consumer whose metadata lack the right to describe a topic says so here, and not in `poll`."""
        self._note_error(self._topic, error)

    def _turn(self, consumer: Consumer) -> None:
        self._apply_wanted(consumer)
        self._letters.turn()
        if self._undelivered < MAX_UNDELIVERED:
            may_wait = self._followed and not self._store.is_compacting
            for message in _drain(consumer, POLL_S if may_wait else IDLE_POLL_S):
                self._receive(consumer, message)
        else:
            self._stopping.wait(POLL_S)
        self._flush(consumer)
        self._do_periodic_work(consumer)
        self._forget_moved()
        if not self._is_standby:
            self._erasure.turn()
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
                followed = self._followed.pop(partition)
                self._unassign(consumer, followed)
                self._left_at[partition] = followed.stored_to
            self._publish_caught_up()
        if gained:
            self._has_read = True
            consumer.incremental_assign([self._begin(partition) for partition in sorted(gained)])
            log.info("history partitions taken over", partitions=sorted(gained))
        if self._missed:
            self._on_missed(frozenset(self._missed))
            self._missed.clear()

    def _begin(self, partition: int) -> TopicPartition:
        """Begins to follow a partition. Returns the position to read from."""
        now_ms = self._clock.wall_us() // 1000
        state = self._store.state(partition)
        if state is not None and state.current_at_ms < now_ms - self._max_age_ms:
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
        self._followed[partition] = FollowedPartition.at(partition, *stored_to)
        return TopicPartition(self._topic, partition, OFFSET_BEGINNING if offset is None else offset)

    def _read_behaviours(self, consumer: Consumer, followed: FollowedPartition) -> None:
        """Begins to read the behaviours of a partition whose snapshots are read."""
        followed.stage = Stage.BOTH
        start = followed.behaviours.stored_to or OFFSET_BEGINNING
        consumer.incremental_assign([TopicPartition(self._behaviours, followed.number, start)])

    def _unassign(self, consumer: Consumer, followed: FollowedPartition) -> None:
        topics = [self._topic, self._behaviours] if followed.reads_behaviours else [self._topic]
        consumer.incremental_unassign([TopicPartition(topic, followed.number) for topic in topics])
        followed.leave()

    def _restart(self, partition: int, reason: str) -> None:
        self._missed.add(partition)
        self._tombstones.reset(partition)
        users = self._store.forget(partition)
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
            metrics.count_rejected(Topic.BEHAVIOURS if is_event else Topic.HISTORY)
            self._letters.write(read, message, offset, entry)

    def _receive_error(
        self, consumer: Consumer, message: Message, error: KafkaError, followed: FollowedPartition | None
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
            self._unassign(consumer, followed)
        elif error.fatal():
            raise KafkaException(error)
        else:
            self._note_error(message.topic() or self._topic, error)
            log.warning(
                "history topic not readable",
                topic=message.topic(),
                partition=partition,
                error=error.name(),
                cause=error.str(),
            )

    def _flush(self, consumer: Consumer) -> None:
        """Stores the received records. After an exception they are read again from the stored offsets."""
        batches = [batch for followed in self._followed.values() if (batch := followed.batch()) is not None]
        for batch in batches:
            for record in batch.records:
                if record.history is None:
                    self._hide(batch.partition, record)
        if batches:
            try:
                outcome = self._store.apply_all(batches)
            except StoreFullError as error:
                self._report(error.done)
                raise
            for batch in batches:
                self._followed[batch.partition].note_stored(batch)
            self._report(outcome)
            self._end_fault()
        self._note_ends(consumer)

    def _report(self, outcome: ApplyOutcome) -> None:
        metrics.count_applied(outcome)
        self._refused += len(outcome.refused)
        for user_id in outcome.deleted:
            self._on_deleted(user_id)
        if outcome.changed:
            self._on_changed(tuple(dict.fromkeys(outcome.changed)))

    def _note_ends(self, consumer: Consumer) -> None:
        reached = []
        for partition, followed in self._followed.items():
            if followed.stage is Stage.HISTORIES and followed.history.reached_end:
                self._read_behaviours(consumer, followed)
            elif followed.stage is Stage.BOTH and followed.history.reached_end and followed.behaviours.reached_end:
                followed.stage = Stage.CAUGHT_UP
                reached.append(partition)
        if reached:
            self._end_fault()
            self._publish_caught_up()
            log.info("history partitions caught up", partitions=sorted(reached), loading=len(self.loading))

    def _publish_caught_up(self) -> None:
        self._caught_up = frozenset(
            partition for partition, followed in self._followed.items() if followed.stage is Stage.CAUGHT_UP
        )

    def _update_gauges(self, consumer: Consumer) -> None:
        now_us = self._clock.monotonic_us()
        if now_us - self._gauges_at_us < GAUGE_INTERVAL_US:
            return
        self._gauges_at_us = now_us
        loading = len(self.loading)
        metrics.show_store(self._store, self._clock)
        behind = (self._behind(consumer, topic) for topic in (self._topic, self._behaviours))
        metrics.show_reading(loading, len(self._wanted) - loading, *behind)

    def _do_periodic_work(self, consumer: Consumer) -> None:
        """Work at intervals: gauges, the warning of refused records, the ends of the logs. Marks current partitions."""
        self._update_gauges(consumer)
        now_us = self._clock.monotonic_us()
        if self._refused and now_us - self._refused_at_us >= REFUSED_INTERVAL_US:
            log.error(
                "history store is full: raise worker.history_max_bytes",
                refused=self._refused,
                max_bytes=self._store.max_bytes,
            )
            self._refused, self._refused_at_us = 0, now_us
        self._current.turn(consumer, self._followed)

    def _behind(self, consumer: Consumer, topic: str) -> int:
        """The offsets of followed logs that are not read yet, by the last fetches."""
        is_history, behind = topic == self._topic, 0
        for partition, followed in self._followed.items():
            if is_history or followed.reads_behaviours:
                known = consumer.get_watermark_offsets(TopicPartition(topic, partition), cached=True)
                read_to = (followed.history if is_history else followed.behaviours).read_to
                behind += max(0, known[1] - read_to) if known is not None else 0
        return behind

    def _forget_moved(self) -> None:
        while self._to_forget:
            partitions = self._to_forget[0] - self._wanted
            if partitions & self._followed.keys():
                return  # The next turn ends their reading first.
            known = [partition for partition in sorted(partitions) if self._store.state(partition) is not None]
            if known:
                for partition in known:
                    self._left_at.pop(partition, None)
                users = self._store.forget(*known)
                log.info("histories of moved partitions deleted", partitions=known, users=users)
            # Not before: on a full disk it is tried again.
            self._to_forget.popleft()

    @property
    def _undelivered(self) -> int:
        return sum(len(each.undelivered) for followed in self._followed.values() for each in followed.logs)


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
