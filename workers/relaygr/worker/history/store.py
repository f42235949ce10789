"""The history store: the newest history of each user, in an LMDB file that several processes map.

Contract:

* A store belongs to one worker (`claim`). One of its processes writes (`HistoryFollower` calls `apply_all`), all read.
  LMDB serialises writers, and records below the stored offset are skipped, so a predecessor that is still alive does
  no harm.
* `apply_all` is one transaction: after a crash of the process or the machine, the records and the next offset are both
  stored or both missing. The last batches may be missing; the follower reads them again.
* The store records the cluster and the topic that it is a copy of. `trust` empties the store if the topic, the cluster
  or the layout differs. Before `trust`, `get` returns None.
* A record replaces the user's stored one if its version number is not smaller, or if its timestamp in the log is later.
  So a wrong number, however large, blocks no later snapshot. A tombstone deletes.
* `get` copies a record out of the map once and returns views of that copy. A lease may keep a history for seconds, and
  a read transaction of that length would prevent LMDB from reusing freed pages.
* A compaction erases the bytes of deleted users from the files (`relaygr.worker.history.files`). `removed_at_ms` is the
  time of the oldest deletion whose bytes may still be there.
* No file grows past `max_bytes`, and nothing is evicted. A record for which there is no space is refused: the
  refusal is counted, and the user's older version is deleted, since it would be mistaken for the newest. A partition
  with refused records can be read again from the beginning when there is free space.

The layout of a record, all little-endian, each part at a multiple of its element size:

    number u64 | partition u32 | feature count u32 | length u32 | block count u32 | written_at_ms u64
    seed 16 bytes | block digests 16 bytes each
    features i64 | items i64 | timestamps_ms i64 | actions u16

The digest chain is stored, so that a request does not hash the history again.

There is one `HistoryStore` for each path and process. Any thread may call its methods.
"""

from __future__ import annotations

import heapq
import os
import struct
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import lmdb
import numpy as np
import structlog

from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import check_room, private_folder
from relaygr.schemas.digest import DIGEST_BYTES, DigestChain
from relaygr.schemas.messages import Behaviours, History
from relaygr.schemas.record import record
from relaygr.worker.history.files import LAYOUT_KEY, ORIGIN, REMOVED_AT, Compaction, Files, claim, records_after
from relaygr.worker.history.resolve import StoredHistory

log = structlog.get_logger()

LAYOUT: Final = b"relaygr.history-store.2"
LEAST_BYTES: Final = 1024 * 1024
# The part of the file (1/8) that values may not use: a batch writes new pages before LMDB frees the old ones.
_RESERVE_FRACTION: Final = 8
_STATE = struct.Struct("<QQQ")
_PARTITION_KEY = struct.Struct(">I")
_TIME = struct.Struct("<q")
_SCAN_RECORDS: Final = 500
_SCAN_PAUSE_S: Final = 0.002
_MOST_FORGOTTEN: Final = 10_000
_HEAD = struct.Struct("<QIIIIQ")


@record(frozen=True, slots=True)
class StoreOrigin:
    """The topic that a store is a copy of."""

    cluster_id: str
    topic: str
    topic_id: str

    def encode(self) -> bytes:
        return "\n".join((self.cluster_id, self.topic, self.topic_id)).encode()


@record(frozen=True, slots=True)
class HistoryRecord:
    """One record of the history topic; `history` None is a tombstone."""

    user_id: str
    offset: int
    history: History | None
    written_at_ms: int = 0
    """The record's timestamp in the log; ms since the epoch; 0: none."""


@record(frozen=True, slots=True)
class HistoryBatch:
    """Records of one partition in offset order, and the offset to continue from."""

    partition: int
    records: tuple[HistoryRecord, ...]
    next_offset: int


@record(frozen=True, slots=True)
class PartitionState:
    """How far a partition has been read."""

    next_offset: int
    current_at_ms: int
    """Last time when the store was known to be complete; ms since the epoch, wall clock; 0: never."""
    refused: int
    """Records refused since the partition was last read from the beginning."""


@record(frozen=True, slots=True)
class ApplyOutcome:
    """The effect of a transaction. Users are in the order of their records; `older` and `repeated` count records."""

    changed: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    older: int = 0
    repeated: int = 0


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
            self._trusted = True
            return True
        if stored is not None:
            log.warning("history store is emptied and read again", path=str(self.path), **_origins(stored, origin))
        self._abandon_compaction()
        with self._write() as txn:
            if stored is not None:
                self._note_removal(txn)
            for db in (self._files.users, self._files.partitions):
                txn.drop(db, delete=False)
            txn.put(LAYOUT_KEY, LAYOUT, db=self._files.meta)
            txn.put(ORIGIN, origin.encode(), db=self._files.meta)
        self._trusted = True
        return False

    def get(self, user_id: str) -> StoredHistory | None:
        """The newest stored history of a user."""
        if not self._trusted:
            return None
        with self._read() as (files, txn):
            found = txn.get(_user_key(user_id), db=files.users)
            data = None if found is None else bytes(found)
        return None if data is None else unpack(user_id, data)

    def recent_users(self, partitions: Container[int], count: int, is_wanted: Callable[[], bool]) -> list[str]:
        """At most `count` users of these partitions, those with the newest behaviours first.

        Reads a part of each record of the store, with pauses: call it on a thread of its own. Ends early when
        `is_wanted` is false.
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
        with self._read() as (files, txn):
            records = records_after(txn.cursor(db=files.users), after)
            for scanned, (key, value) in enumerate(records):
                if scanned == _SCAN_RECORDS:
                    return after
                after = bytes(key)
                head = read_head(value)
                if head.length and head.partition in partitions:
                    entry = (_newest_ms(value, head), after.decode())
                    (heapq.heappush if len(newest) < count else heapq.heappushpop)(newest, entry)
        return None

    def apply_all(self, batches: Sequence[HistoryBatch]) -> ApplyOutcome:
        """Stores the batches and their next offsets in one transaction, all or nothing.

        Skips records below the stored offset, and never lowers the offset (`forget` and `rewind` do that). A batch
        that does not fit is stored one record at a time. Raises StoreFullError if one record does not fit, lmdb.Error
        if the disk fails.
        """
        try:
            return self._apply(batches)
        except lmdb.MapFullError:
            self._files.env.reader_check()
        outcomes: list[ApplyOutcome] = []
        try:
            for batch in batches:
                for entry in batch.records:
                    # One by one, so that an error can report the records that were stored.
                    outcomes.append(self._apply_one(batch.partition, entry))  # noqa: PERF401
                outcomes.append(self._apply((replace(batch, records=()),)))
        except lmdb.MapFullError as error:
            text = f"the history store in {self.path} has no free page: raise worker.history_max_bytes"
            raise StoreFullError(text, _joined(outcomes)) from error
        return _joined(outcomes)

    def forget(self, *partitions: int) -> int:
        """Deletes the users of these partitions and their offsets. Returns the number of users.

        Makes several transactions, since each needs free pages for copies of those that it changes. After a crash in
        between, the partition counts as too old (`current_at_ms` is 0), so its follower forgets it again.
        """
        with self._write() as txn:
            for partition in partitions:
                self._put_state(txn, partition, PartitionState(0, 0, 0))
        forgotten = 0
        after: bytes | None = b""
        while after is not None:
            users, after = self._forget_some(partitions, after)
            forgotten += users
        with self._write() as txn:
            for partition in partitions:
                txn.delete(_PARTITION_KEY.pack(partition), db=self._files.partitions)
        return forgotten

    def _forget_some(self, partitions: Container[int], after: bytes) -> tuple[int, bytes | None]:
        """Deletes the next users of these partitions. Returns their number, and the key to continue after; None at the
        end.
        """
        keys: list[bytes] = []
        last: bytes | None = after
        with self._write() as txn:
            for key, value in records_after(txn.cursor(db=self._files.users), after):
                if len(keys) == self._forgotten_at_once:
                    break
                last = bytes(key)
                if read_head(value).partition in partitions:
                    keys.append(last)
            else:
                last = None
            for key in keys:
                self._delete(txn, key)
            if keys:
                self._note_removal(txn)
        return len(keys), last

    def rewind(self, partition: int) -> None:
        """Resets a partition's offset to the beginning and keeps its users."""
        with self._write() as txn:
            state = _state(self._files, txn, partition)
            if state is not None:
                self._put_state(txn, partition, replace(state, next_offset=0, refused=0))

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

    def _put(self, txn: Any, key: bytes, value: bytes) -> None:
        txn.put(key, value, db=self._files.users)
        if self._compaction is not None:
            self._compaction.changed(key)

    def _delete(self, txn: Any, key: bytes) -> None:
        txn.delete(key, db=self._files.users)
        if self._compaction is not None:
            self._compaction.changed(key)

    def _apply(self, batches: Sequence[HistoryBatch]) -> ApplyOutcome:
        with self._write() as txn:
            return _joined([self._apply_batch(txn, batch) for batch in batches])

    def _apply_batch(self, txn: Any, batch: HistoryBatch) -> ApplyOutcome:
        changed: list[str] = []
        deleted: list[str] = []
        refused: list[str] = []
        older = repeated = 0
        state = _state(self._files, txn, batch.partition) or PartitionState(0, 0, 0)
        for entry in batch.records:
            key = _user_key(entry.user_id)
            if entry.offset < state.next_offset:
                repeated += 1
                continue
            if entry.history is None:
                self._delete(txn, key)
                deleted.append(entry.user_id)
                continue
            found = txn.get(key, db=self._files.users)
            if found is not None and _is_older(entry.history.number, entry.written_at_ms, read_head(found)):
                older += 1
                continue
            value = pack(entry.history, batch.partition, entry.written_at_ms)
            freed_bytes = 0 if found is None else len(found)
            if _pages(self._files, txn) * self._page_bytes + len(value) - freed_bytes > self._value_bytes:
                self._delete(txn, key)
                refused.append(entry.user_id)
                continue
            self._put(txn, key, value)
            changed.append(entry.user_id)
        if deleted:
            # An earlier version may be in a free page even if the store has no record of the user.
            self._note_removal(txn)
        self._advance(txn, batch.partition, state, batch.next_offset, len(refused))
        return ApplyOutcome(tuple(changed), tuple(deleted), tuple(refused), older, repeated)

    def _apply_one(self, partition: int, entry: HistoryRecord) -> ApplyOutcome:
        """Stores one record in its own transaction, or refuses it. Raises lmdb.MapFullError if neither is possible."""
        try:
            return self._apply((HistoryBatch(partition, (entry,), entry.offset + 1),))
        except lmdb.MapFullError:
            if entry.history is None:
                raise
        with self._write() as txn:
            state = _state(self._files, txn, partition) or PartitionState(0, 0, 0)
            self._delete(txn, _user_key(entry.user_id))
            self._advance(txn, partition, state, entry.offset + 1, 1)
        return ApplyOutcome(refused=(entry.user_id,))

    def _advance(self, txn: Any, partition: int, state: PartitionState, next_offset: int, refused: int) -> None:
        offset = max(next_offset, state.next_offset)
        if (offset, refused) != (state.next_offset, 0):
            refused += state.refused
            self._put_state(txn, partition, replace(state, next_offset=offset, refused=refused))

    def _put_state(self, txn: Any, partition: int, state: PartitionState) -> None:
        value = _STATE.pack(state.next_offset, state.current_at_ms, state.refused)
        txn.put(_PARTITION_KEY.pack(partition), value, db=self._files.partitions)


def _state(files: Files, txn: Any, partition: int) -> PartitionState | None:
    found = txn.get(_PARTITION_KEY.pack(partition), db=files.partitions)
    return None if found is None else PartitionState(*_STATE.unpack(found))


def _pages(files: Files, txn: Any) -> int:
    stat = txn.stat(files.users)
    return int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])


def _user_key(user_id: str) -> bytes:
    return user_id.encode()


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
        repeated=sum(part.repeated for part in parts),
    )


@record(frozen=True, slots=True)
class RecordHead:
    """The fields of a stored record before its arrays."""

    number: int
    partition: int
    feature_count: int
    length: int
    block_count: int
    written_at_ms: int

    @property
    def arrays_offset(self) -> int:
        return _HEAD.size + DIGEST_BYTES * (1 + self.block_count)


def _is_older(number: int, written_at_ms: int, stored: RecordHead) -> bool:
    return number < stored.number and written_at_ms <= stored.written_at_ms


def pack(history: History, partition: int, written_at_ms: int = 0) -> bytes:
    """The bytes of a record."""
    chain = history.chain()
    behaviours = history.behaviours
    return b"".join(
        (
            _HEAD.pack(
                history.number, partition, history.features.size, len(behaviours), len(chain.blocks), written_at_ms
            ),
            chain.seed,
            *chain.blocks,
            history.features.astype("<i8", copy=False).tobytes(),
            behaviours.items.astype("<i8", copy=False).tobytes(),
            behaviours.timestamps_ms.astype("<i8", copy=False).tobytes(),
            behaviours.actions.astype("<u2", copy=False).tobytes(),
        )
    )


def read_head(record: bytes | memoryview) -> RecordHead:
    """Reads the first fields only."""
    return RecordHead(*_HEAD.unpack_from(record))


def _newest_ms(record: bytes | memoryview, head: RecordHead) -> int:
    """The time of the newest behaviour of a record that has one."""
    timestamps_at = head.arrays_offset + 8 * head.feature_count + 8 * head.length
    return int(_TIME.unpack_from(record, timestamps_at + 8 * (head.length - 1))[0])


def unpack(user_id: str, record: bytes) -> StoredHistory:
    """The history in `record`. Its arrays are read-only views, which keep `record` alive."""
    head = read_head(record)
    view = memoryview(record)
    digests = [
        bytes(view[start : start + DIGEST_BYTES]) for start in range(_HEAD.size, head.arrays_offset, DIGEST_BYTES)
    ]
    features_at = head.arrays_offset
    items_at = features_at + 8 * head.feature_count
    timestamps_at = items_at + 8 * head.length
    actions_at = timestamps_at + 8 * head.length
    history = History(
        user_id=user_id,
        number=head.number,
        features=np.frombuffer(record, "<i8", head.feature_count, features_at),
        behaviours=Behaviours(
            items=np.frombuffer(record, "<i8", head.length, items_at),
            actions=np.frombuffer(record, "<u2", head.length, actions_at),
            timestamps_ms=np.frombuffer(record, "<i8", head.length, timestamps_at),
        ),
    )
    return StoredHistory(history, DigestChain(digests[0], tuple(digests[1:]), head.length))
