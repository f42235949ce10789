"""The history follower: copies histories and behaviours into the store, for the partitions that this worker owns.

docs/histories.md describes how it reads. It has a thread and a consumer of its own.

* `follow` sets the partitions, `forget` deletes those that another worker owns for good, and `read_anew` says that
  topics have other ids. Any thread may call them; the follower's thread acts at its next turn.
* `unopened`: partitions that it has just got and not begun to follow: nobody has compared the store with their logs
  yet, so requests wait. `is_settling(p)`: it has just got `p`, and has not caught up.
* `caught_up(p)`: since it began to follow `p`, it has reached an end of both logs and stored all before it.
* `fault` names why the store cannot be written. Then no partition counts as caught up.
* `mend(damage)`: a partition with a damaged history is read again from the beginning, once in the life of the process.
  Until then it counts as one that has just come.
* `on_changed` and `on_deleted` are called after the commit and must not block. `on_deleting` is called before it: if
  the process dies between the two, its successor reads the tombstone again. `on_missed` gets partitions whose
  deletions the follower may not have seen: they are read from the beginning, or another process has moved their
  stored offsets meanwhile. `on_read` gets partitions that were opened, or have caught up.
* A standby's follower does not compact the store, because nobody has called its `follow` yet.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Final

import lmdb
import structlog
from confluent_kafka import Message

from relaygr.cluster.topic_identity import identify_topics
from relaygr.kafka.clients import READ_COMMITTED, asking_fetch_wait_ms
from relaygr.kafka.log_reader import MOST_BYTES, REPORT_LOST, Log, LogReader, Loss, LostPosition
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.session import KafkaSession
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import check_room
from relaygr.schemas.topics import Topic
from relaygr.worker.history import metrics
from relaygr.worker.history.apply import UNREAD
from relaygr.worker.history.batches import ApplyOutcome, EventRecord, HistoryRecord, StoreFullError
from relaygr.worker.history.current import MAX_STORE_AGE_MS, METADATA_S, CurrentMarks
from relaygr.worker.history.decode import read_event, read_record
from relaygr.worker.history.erasure import Erasure
from relaygr.worker.history.files import DamagedError
from relaygr.worker.history.letters import RETRY_S, DeadLetters, UndeliveredLetters
from relaygr.worker.history.partitions import FollowedPartition, Restart, Stage
from relaygr.worker.history.snapshots import SnapshotLimits, SnapshotWriter
from relaygr.worker.history.store import HistoryStore, StoreOrigin
from relaygr.worker.history.tombstones import TombstoneReader

log = structlog.get_logger()

POLL_S: Final = 0.1
# Poll interval between the slices of a compaction, and while no partition is followed: a new worker must notice its
# first partitions quickly.
IDLE_POLL_S: Final = 0.01
MAX_UNDELIVERED: Final = 256
SETTLING_US: Final = 10_000_000
"""So long after a partition came, requests wait for its store and its log. Most logs are read within a second; a store
that can not be opened by then needs an operator."""
GAUGE_INTERVAL_US: Final = 1_000_000
REFUSED_INTERVAL_US: Final = 10_000_000


class HistoryFollower:
    """Implements the module's contract."""

    def __init__(
        self,
        session: KafkaSession,
        store: HistoryStore,
        dead_letters: DeadLetters,
        client_id: str,
        on_changed: Callable[[tuple[str, ...]], None],
        on_deleted: Callable[[str], None],
        clock: Clock | None = None,
        on_deleting: Callable[[str], object] = lambda _: None,
        on_missed: Callable[[frozenset[int]], object] = lambda _: None,
        on_read: Callable[[frozenset[int]], object] = lambda _: None,
        erase_within_s: float = 900.0,
        snapshots: SnapshotLimits | None = None,
        is_idle: Callable[[], bool] = lambda: True,
        max_age_ms: int | None = None,
    ) -> None:
        """`snapshots`: when histories are saved; None: never. `is_idle`: see `SnapshotWriter`. `max_age_ms`: a
        partition that was current so long ago is read from the beginning; by default `MAX_STORE_AGE_MS`.
        """
        self._max_age_ms = MAX_STORE_AGE_MS if max_age_ms is None else max_age_ms
        self._kafka = kafka = session.kafka
        self._store = store
        self._client_id = client_id
        self._on_changed = on_changed
        self._on_deleted = on_deleted
        self._on_deleting = on_deleting
        self._on_missed = on_missed
        self._on_read = on_read
        self._clock = clock or SystemClock()
        self._erasure = Erasure(store, erase_within_s, self._clock)
        self._snapshots = (
            SnapshotWriter(session, store, client_id, snapshots, self._clock, is_idle)
            if snapshots is not None
            else None
        )
        self._topic = kafka.topic(Topic.HISTORY)
        self._behaviours = kafka.topic(Topic.BEHAVIOURS)
        # A transaction that is aborted must not delete a user.
        options = {**REPORT_LOST, **READ_COMMITTED, "fetch.wait.max.ms": asking_fetch_wait_ms(kafka)}
        self._reader = LogReader(session, client_id, (self._topic, self._behaviours), options)
        self._thread = threading.Thread(target=self._run, name="history-follower", daemon=True)
        self._stopping = threading.Event()
        # Each is replaced as a whole, so readers need no lock.
        self._wanted: frozenset[int] = frozenset()
        self._unopened: frozenset[int] = frozenset()
        self._damaged: frozenset[int] = frozenset()
        """Partitions that will be read again since a history was damaged."""
        self._mended: frozenset[int] = frozenset()
        """Those that were. Other damage in them needs an operator: the disk changes what it keeps."""
        self._unopened_lock = threading.Lock()
        """Held while `_unopened`, `_wanted_since_us`, `_damaged` or `_mended` are replaced."""
        self._caught_up: frozenset[int] = frozenset()
        self._wanted_since_us: dict[int, int] = {}
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
        self._tombstones = TombstoneReader(session, store, client_id, self._take_tombstone)
        self._missed: set[int] = set()
        """Partitions that `on_missed` has to get."""
        self._current = CurrentMarks(store, self._clock)
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
        now_us = self._clock.monotonic_us()
        # First: a partition must not count as open before the thread knows of it.
        with self._unopened_lock:
            known = self._wanted_since_us
            self._wanted_since_us = {partition: known.get(partition, now_us) for partition in partitions}
            self._unopened = frozenset(partitions - self._wanted | (self._unopened & partitions))
        self._wanted = frozenset(partitions)
        self._is_standby = False

    def forget(self, partitions: frozenset[int]) -> None:
        """Deletes the stored histories of these partitions, unless they are followed again."""
        self._to_forget.append(partitions)

    def read_anew(self, topics: Collection[str]) -> None:
        """Reads both topics from the beginning if one of these, which were deleted and created again, is among them."""
        if {self._topic, self._behaviours} & set(topics):
            self._is_identified = False

    def mend(self, damage: DamagedError) -> bool:
        """Reads the partition of a damaged history again. False if that cannot help."""
        partition = damage.partition
        with self._unopened_lock:
            # One that is not wanted is the wrong one: another record is damaged, too.
            if partition is None or partition in self._mended or partition not in self._wanted:
                return False
            self._wanted_since_us = {**self._wanted_since_us, partition: self._clock.monotonic_us()}
            self._unopened |= {partition}
            self._damaged |= {partition}
        return True

    def caught_up(self, partition: int) -> bool:
        """Whether the partition is followed and the follower has reached an end of its log."""
        return partition in self._caught_up and partition in self._wanted and partition not in self._damaged

    def is_settling(self, partition: int) -> bool:
        """Whether the partition came a moment ago, and the follower has not caught up. False while the store cannot be
        written.
        """
        since_us = self._wanted_since_us.get(partition)
        if since_us is None or self._fault or self.caught_up(partition):
            return False
        return self._clock.monotonic_us() - since_us < SETTLING_US

    @property
    def unopened(self) -> frozenset[int]:
        """Partitions that settle and that the follower has not begun to follow."""
        return frozenset(filter(self.is_settling, self._unopened)) if self._unopened else self._unopened

    @property
    def loading(self) -> frozenset[int]:
        """Followed partitions that have not caught up, or that will be read again."""
        return self._wanted - (self._caught_up - self._damaged)

    @property
    def fault(self) -> str:
        """Why the store cannot be written, and the remedy; empty: it can."""
        return self._fault

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._is_identified and not self._identify():
                self._stopping.wait(RETRY_S)
                continue
            try:
                with self._reader:
                    while self._is_identified and not self._stopping.is_set():
                        self._turn()
                    if not self._is_identified:
                        continue  # What was received is of the old logs.
                    self._letters.flush()
                    self._flush()
                    if self._snapshots is not None:
                        self._snapshots.close(RETRY_S)
            except (lmdb.Error, StoreFullError) as error:
                metrics.count_failure()
                if not isinstance(error, DamagedError) or not self.mend(error):
                    self._note_fault(error)
            except RelayError as error:
                log.error("history follower failed: it reads again from the stored offsets", cause=str(error))
                metrics.count_failure()
                self._stopping.wait(RETRY_S)
            except Exception:
                log.exception("history follower failed: it reads again from the stored offsets")
                metrics.count_failure()
                self._stopping.wait(RETRY_S)
            finally:
                for followed in self._followed.values():
                    followed.leave()
                self._followed.clear()
                self._caught_up = frozenset()
            if self._fault:
                self._forget_deleted()

    def _note_fault(self, error: Exception) -> None:
        is_full = isinstance(error, StoreFullError | lmdb.MapFullError)
        remedy = "raise worker.history_max_bytes" if is_full else "free space on its file system, or repair it"
        fault = f"the history store in {self._store.path} cannot be written ({error}): {remedy}"
        if isinstance(error, DamagedError):
            fault = str(error)
        if fault != self._fault:
            self._fault = fault
            log.error(fault)

    def _end_fault(self) -> None:
        if self._fault:
            self._fault = ""
            log.info("the history store can be written again", path=str(self._store.path))

    def _forget_deleted(self) -> None:
        """Reads tombstones, stores nothing, until the disk has room for a batch. Then the caller tries again."""
        until_us = self._clock.monotonic_us() + int(RETRY_S * 1e6)
        try:
            with self._tombstones.reading():
                while self._is_identified and not self._stopping.is_set():
                    self._tombstones.turn(self._wanted, POLL_S)
                    self._update_gauges()
                    is_late = self._clock.monotonic_us() >= until_us
                    if is_late and self._tombstones.caught_up and self._has_disk_space():
                        return
        except RelayError as error:
            log.error("tombstones cannot be read while the history store cannot be written", cause=str(error))
            self._stopping.wait(RETRY_S)
        except Exception:
            log.exception("tombstones cannot be read while the history store cannot be written")
            self._stopping.wait(RETRY_S)

    def _take_tombstone(self, partition: int, tombstone: HistoryRecord) -> None:
        """The tombstone was read while the store cannot be written."""
        self._hide(partition, tombstone)
        self._on_deleted(tombstone.user_id)

    def _hide(self, partition: int, tombstone: HistoryRecord) -> None:
        """Look-ups and caches forget the user, before or without the transaction that deletes the history."""
        at_ms = (tombstone.repeated or tombstone).written_at_ms
        self._store.conceal(tombstone.user_id, partition, tombstone.offset, at_ms)
        self._on_deleting(tombstone.user_id)

    def _has_disk_space(self) -> bool:
        try:
            check_room(self._store.path, MOST_BYTES)
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

    def _turn(self) -> None:
        self._apply_wanted()
        self._letters.turn()
        if sum(each.undelivered for each in self._followed.values()) < MAX_UNDELIVERED:
            may_wait = self._followed and not self._store.is_compacting
            self._read(POLL_S if may_wait else IDLE_POLL_S)
        else:
            self._stopping.wait(POLL_S)
        self._flush()
        self._do_periodic_work()
        self._forget_moved()
        if not self._is_standby:
            self._erasure.turn()
        if self._snapshots is not None:
            self._snapshots.turn(self._caught_up & self._wanted)

    def _origin(self) -> StoreOrigin:
        topics = [self._topic, self._behaviours]
        found = identify_topics(self._kafka, topics, f"{self._client_id}-origin", METADATA_S)
        return StoreOrigin(found.cluster_id, self._topic, *(found.topic_ids[topic] for topic in topics))

    def _apply_wanted(self) -> None:
        wanted = self._wanted
        lost = self._followed.keys() - (wanted - self._damaged)
        gained = wanted - self._followed.keys()
        if lost:
            self._flush()
            for partition in sorted(lost):
                followed = self._followed.pop(partition)
                self._leave(followed)
                self._left_at[partition] = followed.stored_to
            self._publish_caught_up()
        if gained:
            self._has_read = True
            self._reader.read(*(self._begin(partition) for partition in sorted(gained)))
        if self._unopened:
            # Also those that were lost and came back within one turn: this thread has followed them all the time.
            with self._unopened_lock:
                self._unopened = self._unopened.difference(self._followed)
        if gained:
            self._on_read(gained)
            log.info("history partitions taken over", partitions=sorted(gained))
        if self._missed:
            self._on_missed(frozenset(self._missed))
            self._missed.clear()

    def _begin(self, partition: int) -> Log:
        """Begins to follow a partition. Returns the log that is read first."""
        now_ms = self._clock.wall_us() // 1000
        state = self._store.state(partition)
        if partition in self._damaged:
            self._restart(partition, Restart.DAMAGED, advice="look after the disk of worker.history_path")
            state = None
            with self._unopened_lock:
                self._damaged -= {partition}
                self._mended |= {partition}
        # A time as far in the future is one of a clock that was wrong, and says as little.
        elif state is not None and abs(now_ms - state.current_at_ms) > self._max_age_ms:
            self._restart(partition, Restart.DELETIONS_MAY_BE_MISSING)
            state = None
        elif state is not None and state.refused and self._store.has_room:
            # Users of refused records have the behaviours after those only, so they are read anew, too.
            self._restart(partition, Restart.REFUSED_BEFORE)
            state = None
        if state is None:
            self._missed.add(partition)
            self._store.mark_current((partition,), now_ms)
        state = self._store.state(partition) or UNREAD
        followed = FollowedPartition.at(partition, state, self._topic, self._behaviours)
        if self._left_at.pop(partition, followed.stored_to) != followed.stored_to:
            self._missed.add(partition)
        self._followed[partition] = followed
        return followed.history.log

    def _leave(self, followed: FollowedPartition) -> None:
        self._reader.leave(*followed.logs)
        followed.leave()

    def _restart(self, partition: int, reason: Restart | Loss, **why: object) -> None:
        self._missed.add(partition)
        self._tombstones.reset(partition)
        users = self._store.forget(partition)
        metrics.count_restart(reason)
        log.warning(
            "history partition is read from the beginning",
            partition=partition,
            reason=reason.value,
            **why,
            forgotten=users,
        )

    def _read(self, timeout_s: float) -> None:
        """Takes what has arrived. Waits for it this long at most."""
        batch = self._reader.batch(timeout_s)
        # First: what was received of such a log may be of another one.
        for lost in batch.lost:
            self._begin_again(lost)
        for failure in batch.failures:
            if failure.topic is not None:
                log.warning(
                    "history topic not readable",
                    topic=failure.topic,
                    partition=failure.partition,
                    error=failure.error.name(),
                    cause=failure.error.str(),
                )
        for message in batch.records:
            self._receive(message)

    def _begin_again(self, lost: LostPosition) -> None:
        """The partition is taken over again at the next turn, and read from the beginning if its log is known."""
        topic, partition = lost.log.topic, lost.log.partition
        followed = self._followed.pop(partition, None)
        if followed is None:
            return  # Its other log was lost, too.
        # A request must not find the emptied store while the partition counts as caught up.
        self._publish_caught_up()
        self._leave(followed)
        if lost.loss is Loss.RANGE_UNKNOWN:
            log.warning("history log has an unknown range", topic=topic, partition=partition, cause=lost.cause)
        else:
            self._restart(partition, lost.loss, topic=topic, cause=lost.cause)

    def _receive(self, message: Message) -> None:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert partition is not None and offset is not None
        followed = self._followed.get(partition)
        if followed is None:
            return
        is_event = topic == self._behaviours
        read = followed.behaviours if is_event else followed.history
        read.last = message
        content = message.key(), message.value(), partition, self._kafka.partitions
        written_at_ms = max(0, message.timestamp()[1])
        entry = (
            read_event(*content, offset, written_at_ms)
            if is_event
            else read_record(*content, offset, written_at_ms, headers_of(message))
        )
        if isinstance(entry, EventRecord):
            followed.events.append(entry)
        elif isinstance(entry, HistoryRecord):
            followed.records.append(entry)
            if entry.history is not None:
                followed.note_named(entry.history)
        else:
            metrics.count_rejected(Topic.BEHAVIOURS if is_event else Topic.HISTORY)
            self._letters.write(read, message, offset, entry)

    def _flush(self) -> None:
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
        self._note_ends()

    def _report(self, outcome: ApplyOutcome) -> None:
        metrics.count_applied(outcome)
        self._refused += len(outcome.refused)
        for user_id in outcome.deleted:
            self._on_deleted(user_id)
        if outcome.changed:
            self._on_changed(tuple(dict.fromkeys(outcome.changed)))

    def _note_ends(self) -> None:
        reached = []
        for partition, followed in self._followed.items():
            if followed.stage is Stage.HISTORIES and followed.history.log.caught_up:
                # Its snapshots are read.
                followed.stage = Stage.BOTH
                self._reader.read(followed.behaviours.log)
            elif followed.stage is Stage.BOTH and all(each.caught_up for each in followed.logs):
                followed.stage = Stage.CAUGHT_UP
                reached.append(partition)
                self._uncover(followed)
        if reached:
            self._end_fault()
            self._publish_caught_up()
            self._on_read(frozenset(reached))
            log.info(
                "history partitions caught up",
                partitions=sorted(reached),
                loading=len(self.loading),
                # Their last records are compacted.
                known_by_leader_epoch_alone=[
                    each for each in sorted(reached) if self._followed[each].history.log.told_by_epoch
                ],
            )

    def _uncover(self, followed: FollowedPartition) -> None:
        """If histories name behaviours that their log does not have, it has lost its end: what comes there now is
        something else.
        """
        read = followed.behaviours.log
        # The high watermark: a record of an open transaction may be named, and is not read yet.
        end = read.read_to + self._reader.behind(read)
        named = followed.named_event
        # Without behaviours there is nothing to look for, and all histories are read for it.
        may_name_more = end > 0 if named is None else named > end
        histories = self._store.uncover(followed.number, end) if may_name_more else 0
        if histories:
            metrics.count_uncovered(histories)
            log.error(
                "histories cover behaviours that the log has lost: they take what comes from its present end on",
                partition=followed.number,
                histories=histories,
                covered_to=named if named is not None else "unknown",
                end=end,
                advice="publish these users' histories again: what came since the loss is not in them",
            )

    def _publish_caught_up(self) -> None:
        self._caught_up = frozenset(
            partition for partition, followed in self._followed.items() if followed.stage is Stage.CAUGHT_UP
        )

    def _update_gauges(self) -> None:
        now_us = self._clock.monotonic_us()
        if now_us - self._gauges_at_us < GAUGE_INTERVAL_US:
            return
        self._gauges_at_us = now_us
        loading = len(self.loading)
        metrics.show_store(self._store, self._clock)
        followed = self._followed.values()
        behind = sum(self._reader.behind(each.history.log) for each in followed)
        behaviours_behind = sum(self._reader.behind(each.behaviours.log) for each in followed if each.reads_behaviours)
        metrics.show_reading(loading, len(self._wanted) - loading, behind, behaviours_behind)

    def _do_periodic_work(self) -> None:
        """Work at intervals: gauges, the warning of refused records, the ends of the logs. Marks current partitions."""
        self._update_gauges()
        now_us = self._clock.monotonic_us()
        if self._refused and now_us - self._refused_at_us >= REFUSED_INTERVAL_US:
            log.error(
                "history store is full: raise worker.history_max_bytes",
                refused=self._refused,
                max_bytes=self._store.max_bytes,
            )
            self._refused, self._refused_at_us = 0, now_us
        self._current.turn(self._reader, self._followed)

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
