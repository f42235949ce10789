"""The history store: the newest history of each user, in an LMDB file that several processes map.

Contract:

* A store belongs to one worker (`claim`). One of its processes writes (`HistoryFollower` calls `apply_all`), all read.
  LMDB serialises writers, and records below the stored offset are skipped, so a predecessor that is still alive does
  no harm.
* `apply_all` is one transaction: after a crash of the process or the machine, the records and the next offset are both
  stored or both missing. The last batches may be missing; the follower reads them again.
* The store records the cluster and the topic that it is a copy of. `trust` empties the store if the topic, the cluster
  or the layout differs. Before `trust`, `get` returns None.
* A snapshot replaces the user's stored one if its version number is not smaller, or if its timestamp in the log is
  later. So a wrong number, however large, blocks no later snapshot. A tombstone deletes. Both keep the behaviours that
  they do not cover.
* A worker's snapshot or tombstone (`relaygr.worker.history.snapshots`) changes nothing if another record of the user
  came after those that the worker had read. A user whose last record in the log changed nothing is *superseded*:
  Kafka may drop the record before it, so the owner writes the stored state again.
* `get` copies a history out of the map once and returns views of that copy. A lease may keep a history for seconds, and
  a read transaction of that length would prevent LMDB from reusing freed pages.
* A compaction erases the bytes of deleted users from the files (`relaygr.worker.history.files`). `removed_at_ms` is the
  time of the oldest deletion whose bytes may still be there.
* No file grows past `max_bytes`, and nothing is evicted. A record for which there is no space is refused: the
  refusal is counted, and the user's older version is deleted, since it would be mistaken for the newest. Later
  behaviours of that user count as a history with a gap. The follower reads a partition with refused records again, from
  the beginning and without its users, when there is free space.
* Records of the behaviours topic are appended in the same transaction as both offsets. `relaygr.worker.history.records`
  describes the effect of each, and the form of a stored history.
* After a deletion the store keeps a hash of the user's id with the time and the offset of the deletion, for as long as
  old behaviours may come. `expire` deletes them.

Three tables: user id -> partition; partition, user id and number -> head (0) or chunk (from 1); partition and hash of
the user id -> time and offset of the deletion. A user's parts and a partition's users lie side by side, so `forget`
reads no other partition. The digests are stored, so that a request hashes the open block alone.

There is one `HistoryStore` for each path and process. Any thread may call its methods.
"""

from __future__ import annotations

import heapq
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import lmdb
import structlog

from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import check_room, private_folder
from relaygr.schemas.headers import RepeatedTombstone
from relaygr.schemas.messages import BehaviourEvent, Continuation, History
from relaygr.schemas.record import record
from relaygr.worker.history.files import LAYOUT_KEY, ORIGIN, REMOVED_AT, Compaction, Files, claim
from relaygr.worker.history.records import Added, Coverage, Draft, Head, assembled
from relaygr.worker.history.resolve import StoredHistory

log = structlog.get_logger()

LAYOUT: Final = b"relaygr.history-store.4"
LEAST_BYTES: Final = 1024 * 1024
# The part of the file (1/8) that values may not use: a batch writes new pages before LMDB frees the old ones.
_RESERVE_FRACTION: Final = 8
_STATE = struct.Struct("<QQQQ")
_PARTITION_KEY = struct.Struct(">I")
_PARTITION_BYTES: Final = 4
_DELETION = struct.Struct("<QQ")
# User ids have no control characters, so that no other user's key lies between a head and its chunks.
_PART = tuple(b"\0" + bytes((part,)) for part in range(256))
_LAST_PART = b"\0\xff"
_SCAN_RECORDS: Final = 500
_SCAN_PAUSE_S: Final = 0.002
_MOST_FORGOTTEN: Final = 10_000
_HASH_BYTES: Final = 16
_USERS, _RECORDS, _DELETED = range(3)
"""Indices of `Files.tables`."""
_EXPIRED_AT_ONCE: Final = 1000


@record(frozen=True, slots=True)
class StoreOrigin:
    """The topics that a store is a copy of."""

    cluster_id: str
    topic: str
    topic_id: str
    behaviours_id: str = ""
    """The id of the behaviours topic; empty: it has none."""

    def encode(self) -> bytes:
        return "\n".join((self.cluster_id, self.topic, self.topic_id, self.behaviours_id)).encode()


@record(frozen=True, slots=True)
class HistoryRecord:
    """One record of the history topic; `history` None is a tombstone."""

    user_id: str
    offset: int
    history: History | None
    written_at_ms: int = 0
    """The record's timestamp in the log; ms since the epoch; 0: none."""
    repeated: RepeatedTombstone | None = None
    """Set if a worker wrote the tombstone."""


@record(frozen=True, slots=True)
class EventRecord:
    """One record of the behaviours topic."""

    event: BehaviourEvent
    offset: int
    written_at_ms: int = 0
    """The record's timestamp in the log; ms since the epoch; 0: none."""


@record(frozen=True, slots=True)
class HistoryBatch:
    """Records of one partition of both topics in offset order, and the offsets to continue from."""

    partition: int
    records: tuple[HistoryRecord, ...]
    next_offset: int
    events: tuple[EventRecord, ...] = ()
    next_event: int = 0


@record(frozen=True, slots=True)
class PartitionState:
    """How far a partition has been read."""

    next_offset: int
    current_at_ms: int
    """Last time when the store was known to be complete; ms since the epoch, wall clock; 0: never."""
    refused: int
    """Records refused since the partition was last read from the beginning."""
    next_event: int = 0
    """The offset in the behaviours topic to continue from; 0: the beginning."""


@record(frozen=True, slots=True)
class ApplyOutcome:
    """The effect of a transaction. Users are in the order of their records; the numbers count records."""

    changed: tuple[str, ...] = ()
    """A user may occur more than once."""
    deleted: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    older: int = 0
    superseded: int = 0
    """Records of workers that another record had overtaken."""
    repeated: int = 0
    """Records of both topics that had been read."""
    snapshots: int = 0
    added: Mapping[Added, int] = field(default_factory=dict)
    """Records of the behaviours topic."""


@record(frozen=True, slots=True)
class UserHead:
    """A user, and the head of the stored history."""

    partition: int
    user_id: str
    head: Head


class StoreFullError(Exception):
    """No page is free, not even for a deletion: readers hold old pages, or the file is full. The caller may retry.

    `done`: the outcome of the records that were stored before, with their offsets.
    """

    def __init__(self, text: str, done: ApplyOutcome) -> None:
        super().__init__(text)
        self.done = done


class HistoryStore:
    """Implements the module's contract."""

    def __init__(self, files: Files, clock: Clock) -> None:
        self.path = files.folder
        self.max_bytes = files.max_bytes
        self._clock = clock
        self._page_bytes = int(files.env.stat()["psize"])
        reserve_bytes = files.max_bytes // _RESERVE_FRACTION
        self._value_bytes = files.max_bytes - reserve_bytes
        # Each deletion may copy a page. LMDB frees the old pages two transactions later.
        self._forgotten_at_once = min(_MOST_FORGOTTEN, reserve_bytes // self._page_bytes // 4)
        self._trusted = False
        self._origin_id = ""
        self._behaviours_id = ""
        self._expired_to = b""
        self._claim: int | None = None
        self._compaction: Compaction | None = None
        # Held while `_files` is written or replaced. Reads need no lock: LMDB unmaps replaced files when their last
        # transaction has ended and nothing refers to them.
        self._writing = threading.RLock()
        self._files = files

    @classmethod
    def open(cls, path: Path | str, max_bytes: int, clock: Clock | None = None) -> HistoryStore:
        """Opens or creates the store in folder `path`.

        Only this user can read the files. Raises RelayError if the folder cannot be written or belongs to another user,
        or holds something else, or a store larger than `max_bytes`.
        """
        folder = Path(path)
        if max_bytes < LEAST_BYTES:
            raise RelayError(f"worker.history_max_bytes is {max_bytes}: set it to at least {LEAST_BYTES}")
        private_folder(folder, "worker.history_path")
        try:
            check_room(folder)
        except OSError as error:
            raise RelayError(
                f"The history store in {folder} cannot be written ({error.strerror}): free space on its file system, "
                "or set `worker.history_path` to a folder that this user may write."
            ) from error
        return cls(Files.open_newest(folder, max_bytes), clock or SystemClock())

    def claim(self, worker_id: str) -> None:
        """Keeps workers of other ids off the store until `close`. Raises RelayError if one of them uses it."""
        self._claim = claim(self.path, worker_id)

    def close(self) -> None:
        """Unmaps the files. No other call may be running."""
        self._abandon_compaction()
        self._files.close()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def trust(self, origin: StoreOrigin) -> bool:
        """Enables `get`. Empties the store first if it is a copy of another topic.

        Returns whether the content was kept.
        """
        with self._read() as (files, txn):
            layout, stored = (
                None if (found := txn.get(key, db=files.meta)) is None else bytes(found) for key in (LAYOUT_KEY, ORIGIN)
            )
        if layout == LAYOUT and stored == origin.encode():
            self._origin_id, self._behaviours_id = origin.topic_id, origin.behaviours_id
            self._trusted = True
            return True
        if stored is not None:
            log.warning("history store is emptied and read again", path=str(self.path), **_origins(stored, origin))
        self._abandon_compaction()
        with self._write() as txn:
            if stored is not None:
                self._note_removal(txn)
            for db in (*self._files.tables, self._files.partitions):
                txn.drop(db, delete=False)
            txn.put(LAYOUT_KEY, LAYOUT, db=self._files.meta)
            txn.put(ORIGIN, origin.encode(), db=self._files.meta)
        self._origin_id, self._behaviours_id = origin.topic_id, origin.behaviours_id
        self._trusted = True
        return False

    def get(self, user_id: str) -> StoredHistory | None:
        """The newest stored history of a user."""
        if not self._trusted:
            return None
        user = user_id.encode()
        # Without `_read`: a context manager would cost a tenth of a look-up.
        while True:
            files = self._files
            with files.env.begin(buffers=True) as txn:
                if files.newer(txn) is None:
                    return _stored(files, txn, user_id, user)
            self._move_on(files)

    def recent_users(self, partitions: Container[int], count: int, is_wanted: Callable[[], bool]) -> list[str]:
        """At most `count` users of these partitions, those with the newest behaviours first.

        Reads a part of each of these users, with pauses: call it on a thread of its own. Ends early when `is_wanted` is
        false.
        """
        newest: list[tuple[int, str]] = []
        after: bytes | None = b""
        while after is not None and count > 0 and self._trusted and is_wanted():
            after = self._scan(after, partitions, count, newest)
            time.sleep(_SCAN_PAUSE_S)
        return [user_id for _, user_id in sorted(newest, reverse=True)]

    def _scan(
        self, after: bytes, partitions: Container[int], count: int, newest: list[tuple[int, str]]
    ) -> bytes | None:
        """Adds the next users to the heap `newest`. Returns the key to continue after; None at the end."""
        found, after_all = self.heads_after(after, partitions)
        for each in found:
            if each.head.length:
                change = heapq.heappush if len(newest) < count else heapq.heappushpop
                change(newest, (each.head.newest_ms, each.user_id))
        return after_all

    def heads_after(self, after: bytes, partitions: Container[int]) -> tuple[list[UserHead], bytes | None]:
        """The heads of the next users of these partitions; b"": from the first one. And the key to continue after;
        None at the end.

        Looks at a bounded number of users.
        """
        heads: list[UserHead] = []
        with self._read() as (files, txn):
            cursor = txn.cursor(db=files.records)
            for _ in range(_SCAN_RECORDS):
                if not cursor.set_range(after):
                    return heads, None
                key = bytes(cursor.key())
                partition: int = _PARTITION_KEY.unpack_from(key)[0]
                if partition not in partitions:
                    after = _PARTITION_KEY.pack(partition + 1)
                    continue
                user = key[_PARTITION_BYTES : -len(_LAST_PART)]
                after = key[:_PARTITION_BYTES] + user + _LAST_PART
                heads.append(UserHead(partition, user.decode(), Head.read(cursor.value())))
        return heads, after

    def head(self, user_id: str) -> Head | None:
        """The head of a user's stored history."""
        user = user_id.encode()
        with self._read() as (files, txn):
            partition = txn.get(user, db=files.users)
            if partition is None:
                return None
            return Head.read(txn.get(bytes(partition) + user + _PART[0], db=files.records))

    def saved(self, user_id: str, fold_ms: int) -> History | None:
        """The snapshot that a worker writes of a user, and what it covers; None for a user who is not stored.

        Records with a timestamp before `fold_ms` become a part of its base: no snapshot that comes later leaves them
        out.
        """
        user = user_id.encode()
        with self._read() as (files, txn):
            key = txn.get(user, db=files.users)
            draft = _draft(files, txn, user)
            if key is None or draft is None:
                return None
            partition: int = _PARTITION_KEY.unpack(key)[0]
            state = _state(files, txn, partition) or PartitionState(0, 0, 0)
            return draft.saved(user_id, state.next_event, partition, (self._origin_id, self._behaviours_id), fold_ms)

    @property
    def topic_id(self) -> str:
        """The id of the history topic that the store is a copy of; empty before `trust`."""
        return self._origin_id

    def apply_all(self, batches: Sequence[HistoryBatch]) -> ApplyOutcome:
        """Stores the batches and their next offsets in one transaction, all or nothing.

        Skips records below the stored offset, and never lowers the offset (`forget` does that). A batch that
        does not fit is stored one record at a time. Raises StoreFullError if one record does not fit, lmdb.Error
        if the disk fails.
        """
        try:
            return self._apply(batches)
        except lmdb.MapFullError:
            self._files.env.reader_check()
        outcomes: list[ApplyOutcome] = []
        try:
            for batch in batches:
                entries: tuple[HistoryRecord | EventRecord, ...] = (*batch.records, *batch.events)
                for entry in entries:
                    # One by one, so that an error can report the records that were stored.
                    outcomes.append(self._apply_one(batch, entry))  # noqa: PERF401
                outcomes.append(self._apply((replace(batch, records=(), events=()),)))
        except lmdb.MapFullError as error:
            text = f"the history store in {self.path} has no free page: raise worker.history_max_bytes"
            raise StoreFullError(text, _joined(outcomes)) from error
        return _joined(outcomes)

    def forget(self, *partitions: int) -> int:
        """Deletes the users of these partitions and their offsets. Returns the number of users.

        Reads these partitions only. Makes several transactions, since each needs free pages for copies of those that it
        changes. After a crash in between, the partition counts as too old (`current_at_ms` is 0), so its follower
        forgets it again.
        """
        with self._write() as txn:
            for partition in partitions:
                self._put_state(txn, partition, PartitionState(0, 0, 0))
        forgotten = 0
        for partition in partitions:
            is_done = False
            while not is_done:
                users, is_done = self._forget_some(partition)
                forgotten += users
        with self._write() as txn:
            for partition in partitions:
                txn.delete(_PARTITION_KEY.pack(partition), db=self._files.partitions)
        return forgotten

    def _forget_some(self, partition: int) -> tuple[int, bool]:
        """Deletes the next parts of this partition. Returns the number of users, and whether none is left."""
        prefix = _PARTITION_KEY.pack(partition)
        users = 0
        with self._write() as txn:
            keys = [(_RECORDS, key) for key in self._next_keys(txn, _RECORDS, prefix)]
            keys += [(_DELETED, key) for key in self._next_keys(txn, _DELETED, prefix)]
            for table, key in keys:
                self._delete(txn, table, key)
                if table == _RECORDS and key.endswith(_PART[0]):
                    self._delete(txn, _USERS, key[_PARTITION_BYTES : -len(_PART[0])])
                    users += 1
            if users:
                self._note_removal(txn)
        return users, not keys

    def _next_keys(self, txn: Any, table: int, prefix: bytes) -> list[bytes]:
        """Keys that begin with `prefix`, no more than may be deleted at once."""
        keys: list[bytes] = []
        cursor = txn.cursor(db=self._files.tables[table])
        found = cursor.set_range(prefix)
        while found and len(keys) < self._forgotten_at_once:
            key = bytes(cursor.key())
            if not key.startswith(prefix):
                break
            keys.append(key)
            found = cursor.next()
        return keys

    def expire(self, before_ms: int, share: float = 0.0) -> int:
        """Deletes the hashes of users who were deleted before this time.

        Looks at this share of them at each call, and at least at a thousand, so the number of calls for all of them is
        bounded. Each thousand is one transaction of a few milliseconds. Returns the number of those that it deleted.
        """
        with self._read() as (files, txn):
            wanted = int(txn.stat(files.deleted)["entries"] * share)
        expired = self._expire_some(before_ms)
        for _ in range(wanted // _EXPIRED_AT_ONCE):
            expired += self._expire_some(before_ms)
        return expired

    def _expire_some(self, before_ms: int) -> int:
        expired: list[bytes] = []
        with self._write() as txn:
            cursor = txn.cursor(db=self._files.deleted)
            found = cursor.set_range(self._expired_to) if self._expired_to else cursor.first()
            for _ in range(_EXPIRED_AT_ONCE):
                if not found:
                    break
                if _DELETION.unpack(cursor.value())[0] < before_ms:
                    expired.append(bytes(cursor.key()))
                found = cursor.next()
            self._expired_to = bytes(cursor.key()) if found else b""
            for key in expired:
                self._delete(txn, _DELETED, key)
        return len(expired)

    def mark_current(self, partitions: Iterable[int], now_ms: int) -> None:
        """Records that these partitions are complete now, or are read without a gap from now on."""
        with self._write() as txn:
            for partition in partitions:
                state = _state(self._files, txn, partition) or PartitionState(0, 0, 0)
                self._put_state(txn, partition, replace(state, current_at_ms=now_ms))

    def next_offset(self, partition: int) -> int | None:
        """The offset to continue from; None: the beginning."""
        state = self.state(partition)
        return state.next_offset if state is not None and state.next_offset > 0 else None

    def next_event(self, partition: int) -> int | None:
        """The offset in the behaviours topic to continue from; None: the beginning."""
        state = self.state(partition)
        return state.next_event if state is not None and state.next_event > 0 else None

    def state(self, partition: int) -> PartitionState | None:
        """How far a partition has been read; None if it was never read."""
        with self._read() as (files, txn):
            return _state(files, txn, partition)

    @property
    def removed_at_ms(self) -> int | None:
        """When the first user was deleted whose bytes may still be in the files; ms since the epoch. None: none was."""
        with self._read() as (files, txn):
            found = txn.get(REMOVED_AT, db=files.meta)
            return None if found is None else int(bytes(found))

    @property
    def is_compacting(self) -> bool:
        """Whether a compaction has begun and not ended."""
        return self._compaction is not None

    def compact(self) -> bool:
        """Begins a compaction, or does its next slice of a few milliseconds. Returns whether it has ended.

        After its end no deleted byte is in the files, but for those of users that were deleted since it began. Needs as
        much disk space as the live records take. Raises OSError, RelayError or lmdb.Error if the compaction failed or
        another process compacts; then the next call begins again.
        """
        with self._writing:
            if self._compaction is None:
                self.refresh()
                self._compaction = Compaction(self._files)
            try:
                if not self._compaction.advance():
                    return False
            except BaseException:
                self._abandon_compaction()
                raise
            self._compaction.release()
            self._compaction = None
            self.refresh()
        return True

    def refresh(self) -> None:
        """Moves on to newer files of another process, so that the old ones are freed."""
        with self._read():
            pass

    @property
    def bytes_used(self) -> int:
        """Bytes of the pages that hold records, without free pages."""
        with self._read() as (files, txn):
            return _pages(files, txn) * self._page_bytes

    @property
    def has_room(self) -> bool:
        """Whether a quarter of the space is free: enough to read a partition with refused records again."""
        return self.bytes_used < self._value_bytes * 3 // 4

    @property
    def user_count(self) -> int:
        with self._read() as (files, txn):
            return int(txn.stat(files.users)["entries"])

    @contextmanager
    def _read(self) -> Iterator[tuple[Files, Any]]:
        """The newest files, and a read transaction on them."""
        while True:
            files = self._files
            with files.env.begin(buffers=True) as txn:
                if files.newer(txn) is None:
                    yield files, txn
                    return
            self._move_on(files)

    @contextmanager
    def _write(self) -> Iterator[Any]:
        """A write transaction on the newest files, which are `_files` until it ends."""
        with self._writing:
            while True:
                files = self._files
                with files.env.begin(write=True, buffers=True) as txn:
                    is_newest = files.newer(txn) is None
                    if is_newest:
                        yield txn
                        if self._compaction is not None:
                            files.count(txn)
                        txn_id = txn.id()
                if is_newest:
                    break
                self._move_on(files)
            if self._compaction is not None:
                self._compaction.committed(txn_id)

    def _move_on(self, old: Files) -> None:
        with self._writing:
            if self._files is not old:
                return  # Another thread did it.
            self._abandon_compaction()
            self._files = old.open_newer()

    def _abandon_compaction(self) -> None:
        if self._compaction is not None:
            self._compaction.abandon()
            self._compaction = None

    def _note_removal(self, txn: Any) -> None:
        """In the transaction of a deletion: its bytes are in the files from now on."""
        now_ms = self._clock.wall_us() // 1000
        if txn.get(REMOVED_AT, db=self._files.meta) is None:
            txn.put(REMOVED_AT, b"%d" % now_ms, db=self._files.meta)
        if self._compaction is not None:
            self._compaction.removed(now_ms)

    def _put(self, txn: Any, table: int, key: bytes, value: bytes) -> None:
        txn.put(key, value, db=self._files.tables[table])
        if self._compaction is not None:
            self._compaction.changed(table, key)

    def _delete(self, txn: Any, table: int, key: bytes) -> None:
        txn.delete(key, db=self._files.tables[table])
        if self._compaction is not None:
            self._compaction.changed(table, key)

    def _apply(self, batches: Sequence[HistoryBatch]) -> ApplyOutcome:
        tally = _Tally()
        with self._write() as txn:
            for batch in batches:
                self._apply_batch(txn, batch, tally)
        return tally.outcome()

    def _apply_batch(self, txn: Any, batch: HistoryBatch, tally: _Tally) -> None:
        state = _state(self._files, txn, batch.partition) or PartitionState(0, 0, 0)
        refused_before = len(tally.refused)
        for entry in batch.records:
            if entry.offset < state.next_offset:
                tally.repeated += 1
            elif entry.history is None:
                self._remove(txn, batch.partition, entry, tally)
            else:
                # The refused records may have behaviours of a user without a stored history.
                missing = state.next_event if state.refused > 0 or len(tally.refused) > refused_before else 0
                self._replace(txn, batch.partition, entry, entry.history, missing, tally)
        for each in batch.events:
            if each.offset < state.next_event:
                tally.repeated += 1
            else:
                may_miss = state.refused > 0 or len(tally.refused) > refused_before
                self._add(txn, batch.partition, each, may_miss, tally)
        refused = len(tally.refused) - refused_before
        self._advance(txn, batch.partition, state, batch.next_offset, batch.next_event, refused)

    def _apply_one(self, batch: HistoryBatch, entry: HistoryRecord | EventRecord) -> ApplyOutcome:
        """Stores one record in its own transaction, or refuses it. Raises lmdb.MapFullError if neither is possible.

        The offsets do not pass those of its batch, which may be before the record.
        """
        partition = batch.partition
        if isinstance(entry, EventRecord):
            user_id, next_offset, next_event = entry.event.user_id, 0, min(entry.offset + 1, batch.next_event)
            alone = HistoryBatch(partition, (), 0, (entry,), next_event)
        else:
            user_id, next_offset, next_event = entry.user_id, min(entry.offset + 1, batch.next_offset), 0
            alone = HistoryBatch(partition, (entry,), next_offset)
        try:
            return self._apply((alone,))
        except lmdb.MapFullError:
            if isinstance(entry, HistoryRecord) and entry.history is None:
                raise
        with self._write() as txn:
            state = _state(self._files, txn, partition) or PartitionState(0, 0, 0)
            self._erase(txn, user_id.encode())
            self._advance(txn, partition, state, next_offset, next_event, 1)
        return ApplyOutcome(refused=(user_id,))

    def _replace(
        self, txn: Any, partition: int, entry: HistoryRecord, history: History, missing: int, tally: _Tally
    ) -> None:
        """Stores a snapshot, and the behaviours that it does not cover.

        `missing`: if the user has no history, records of behaviours below this offset may have been refused.
        """
        user = entry.user_id.encode()
        before = self._draft(txn, user)
        read_to = self._next_snapshot(txn, partition, user, before)
        if entry.offset < read_to:
            tally.repeated += 1
            return
        tail = self._continuation(history, partition)
        if tail is not None and tail.next_offset < read_to:
            tally.superseded += 1
            self._supersede(txn, partition, user, before, entry.offset + 1)
            return
        if tail is None and before is not None and _is_older(history.number, entry.written_at_ms, before.head):
            tally.older += 1
            self._supersede(txn, partition, user, before, entry.offset + 1)
            return
        if tail is None:
            draft = Draft.of_snapshot(history, entry.written_at_ms, self._coverage(partition, entry, history))
        else:
            draft = Draft.of_saved(history, tail)
        draft.head.next_snapshot = entry.offset + 1
        if before is not None:
            draft.keep_after(before)
        elif missing > draft.head.next_event:
            draft.miss(missing, self._clock.wall_us() // 1000)
        self._erase(txn, user)
        if not self._has_room_for(txn, draft):
            tally.refused.append(entry.user_id)
            return
        self._delete(txn, _DELETED, _deleted_key(partition, user))
        self._store(txn, partition, user, draft)
        tally.snapshots += 1
        tally.changed.append(entry.user_id)

    def _remove(self, txn: Any, partition: int, entry: HistoryRecord, tally: _Tally) -> None:
        """Deletes a user, but for behaviours that were written after the tombstone."""
        user = entry.user_id.encode()
        before = self._draft(txn, user)
        read_to = self._next_snapshot(txn, partition, user, before)
        if entry.offset < read_to:
            tally.repeated += 1
            return
        written_at_ms, repeated = entry.written_at_ms, entry.repeated
        if repeated is not None and repeated.topic_id == self._origin_id:
            if repeated.next_offset < read_to:
                tally.superseded += 1
                self._supersede(txn, partition, user, before, entry.offset + 1)
                return
            written_at_ms = repeated.written_at_ms
        draft = Draft.empty(Coverage(before_ms=written_at_ms + 1), entry.offset + 1)
        if before is not None:
            draft.keep_after(before)
        self._erase(txn, user)
        # An earlier version may be in a free page even if the store has no record of the user.
        self._note_removal(txn)
        self._put(txn, _DELETED, _deleted_key(partition, user), _DELETION.pack(written_at_ms, entry.offset + 1))
        tally.deleted.append(entry.user_id)
        if not draft.head.length:
            return
        if not self._has_room_for(txn, draft):
            tally.refused.append(entry.user_id)
            return
        self._store(txn, partition, user, draft)
        tally.changed.append(entry.user_id)

    def _add(self, txn: Any, partition: int, entry: EventRecord, may_miss: bool, tally: _Tally) -> None:
        """Appends a record's behaviours. `may_miss`: earlier ones of a user without a history may have been refused."""
        user_id = entry.event.user_id
        user = user_id.encode()
        draft = self._draft(txn, user)
        is_new = draft is None
        if draft is None:
            draft = self._empty(txn, partition, user)
            if may_miss:
                draft.miss(entry.offset, entry.written_at_ms + 1)
        added = draft.add(entry.event, entry.offset, entry.written_at_ms)
        tally.added[added] += 1
        if added in (Added.COVERED, Added.DUPLICATE):
            return
        # A head grows to a few KB only, so the space is looked at when a user or a block is new.
        if (is_new or draft.written) and not self._has_room_for(txn, draft):
            self._erase(txn, user)
            tally.refused.append(user_id)
            return
        if is_new:
            self._store(txn, partition, user, draft)
        else:
            self._put_parts(txn, _PARTITION_KEY.pack(partition) + user, draft)
        tally.changed.append(user_id)

    def _next_snapshot(self, txn: Any, partition: int, user: bytes, stored: Draft | None) -> int:
        """The offset after the last record of the history topic that was read of a user; 0: none."""
        return (stored or self._empty(txn, partition, user)).head.next_snapshot

    def _empty(self, txn: Any, partition: int, user: bytes) -> Draft:
        """The history of a user who is not stored, and may have been deleted."""
        found = txn.get(_deleted_key(partition, user), db=self._files.deleted)
        if found is None:
            return Draft.empty(Coverage())
        deleted_at_ms, next_snapshot = _DELETION.unpack(found)
        return Draft.empty(Coverage(before_ms=deleted_at_ms + 1), next_snapshot)

    def _supersede(self, txn: Any, partition: int, user: bytes, stored: Draft | None, next_snapshot: int) -> None:
        """Notes that the last record in the log is not the stored state, or not the user's deletion."""
        draft = stored or self._empty(txn, partition, user)
        draft.supersede(next_snapshot, is_deleted=stored is None)
        if stored is None:
            self._put(txn, _USERS, user, _PARTITION_KEY.pack(partition))
        self._put_parts(txn, _PARTITION_KEY.pack(partition) + user, draft)

    def _continuation(self, history: History, partition: int) -> Continuation | None:
        """How a worker's snapshot continues what was before it; None for a pipeline's, or one of other topics."""
        tail, covers = history.continues, history.covers
        if tail is None or covers is None or covers.partition != partition:
            return None
        if (tail.topic_id or "") != self._origin_id or (covers.topic_id or "") != self._behaviours_id:
            return None
        return tail

    def _coverage(self, partition: int, entry: HistoryRecord, history: History) -> Coverage:
        """What a snapshot covers. An offset in another topic or partition says nothing about ours."""
        named = history.covers
        if named is None or named.partition != partition:
            return Coverage(before_ms=entry.written_at_ms)
        if named.topic_id and self._behaviours_id and named.topic_id != self._behaviours_id:
            return Coverage(before_ms=entry.written_at_ms)
        return Coverage(offset=named.offset)

    def _draft(self, txn: Any, user: bytes) -> Draft | None:
        """The stored history of a user. Its chunks are read until the transaction's next write."""
        return _draft(self._files, txn, user)

    def _store(self, txn: Any, partition: int, user: bytes, draft: Draft) -> None:
        """Stores a history of a user who has none."""
        key = _PARTITION_KEY.pack(partition)
        self._put(txn, _USERS, user, key)
        self._put_parts(txn, key + user, draft)

    def _put_parts(self, txn: Any, key: bytes, draft: Draft) -> None:
        self._put(txn, _RECORDS, key + _PART[0], draft.head_bytes())
        for index, data in draft.written.items():
            self._put(txn, _RECORDS, key + _PART[1 + index], data)

    def _erase(self, txn: Any, user: bytes) -> None:
        """Deletes all parts of a user."""
        partition = txn.get(user, db=self._files.users)
        if partition is None:
            return
        key = bytes(partition) + user
        chunks = Head.read(txn.get(key + _PART[0], db=self._files.records)).chunks
        for part in range(1 + chunks):
            self._delete(txn, _RECORDS, key + _PART[part])
        self._delete(txn, _USERS, user)

    def _has_room_for(self, txn: Any, draft: Draft) -> bool:
        new_bytes = sum(map(len, draft.written.values())) + len(draft.head_bytes())
        return _pages(self._files, txn) * self._page_bytes + new_bytes <= self._value_bytes

    def _advance(
        self, txn: Any, partition: int, state: PartitionState, next_offset: int, next_event: int, refused: int
    ) -> None:
        after = replace(
            state,
            next_offset=max(next_offset, state.next_offset),
            next_event=max(next_event, state.next_event),
            refused=state.refused + refused,
        )
        if after != state:
            self._put_state(txn, partition, after)

    def _put_state(self, txn: Any, partition: int, state: PartitionState) -> None:
        value = _STATE.pack(state.next_offset, state.current_at_ms, state.refused, state.next_event)
        txn.put(_PARTITION_KEY.pack(partition), value, db=self._files.partitions)


@dataclass(slots=True)
class _Tally:
    """The effect of a transaction so far."""

    changed: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    older: int = 0
    superseded: int = 0
    repeated: int = 0
    snapshots: int = 0
    added: Counter[Added] = field(default_factory=Counter)

    def outcome(self) -> ApplyOutcome:
        return ApplyOutcome(
            tuple(self.changed),
            tuple(self.deleted),
            tuple(self.refused),
            self.older,
            self.superseded,
            self.repeated,
            self.snapshots,
            dict(self.added),
        )


def _stored(files: Files, txn: Any, user_id: str, user: bytes) -> StoredHistory | None:
    partition = txn.get(user, db=files.users)
    if partition is None:
        return None
    key = bytes(partition) + user
    # The chunks follow the head, so a cursor steps to them without a search from the root.
    parts = txn.cursor(db=files.records)
    parts.set_key(key + _PART[0])
    data = parts.value()
    head = Head.read(data)
    if head.is_deleted:
        return None
    chunks = [parts.value() for _ in range(head.chunks) if parts.next()]
    if parts.key() != key + _PART[head.chunks]:
        raise lmdb.CorruptedError(f"{files.folder}: parts of a history are missing")
    return assembled(user_id, head, data, chunks)


def _draft(files: Files, txn: Any, user: bytes) -> Draft | None:
    partition = txn.get(user, db=files.users)
    if partition is None:
        return None
    key, table = bytes(partition) + user, files.records
    return Draft.read(txn.get(key + _PART[0], db=table), lambda index: txn.get(key + _PART[1 + index], db=table))


def _state(files: Files, txn: Any, partition: int) -> PartitionState | None:
    found = txn.get(_PARTITION_KEY.pack(partition), db=files.partitions)
    return None if found is None else PartitionState(*_STATE.unpack(found))


def _pages(files: Files, txn: Any) -> int:
    stats = [txn.stat(table) for table in files.tables]
    return sum(int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) for stat in stats)


def _deleted_key(partition: int, user: bytes) -> bytes:
    return _PARTITION_KEY.pack(partition) + blake2b(user, digest_size=_HASH_BYTES).digest()


def _origins(stored: bytes | None, origin: StoreOrigin) -> dict[str, str]:
    before = "nothing" if stored is None else stored.decode(errors="replace").replace("\n", " ")
    return {"was_of": before, "is_of": origin.encode().decode().replace("\n", " ")}


def _joined(outcomes: Iterable[ApplyOutcome]) -> ApplyOutcome:
    parts = tuple(outcomes)
    return ApplyOutcome(
        changed=tuple(user for part in parts for user in part.changed),
        deleted=tuple(user for part in parts for user in part.deleted),
        refused=tuple(user for part in parts for user in part.refused),
        older=sum(part.older for part in parts),
        superseded=sum(part.superseded for part in parts),
        repeated=sum(part.repeated for part in parts),
        snapshots=sum(part.snapshots for part in parts),
        added=dict(sum((Counter(part.added) for part in parts), Counter[Added]())),
    )


def _is_older(number: int, written_at_ms: int, stored: Head) -> bool:
    return number < stored.number and written_at_ms <= stored.written_at_ms
