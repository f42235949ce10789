"""The history store: the newest history of each user, in an LMDB file that several processes map.

* A store belongs to one worker (`claim`). One of its processes writes (`HistoryFollower` calls `apply_all`), all read.
  LMDB serialises writers, and records below the stored offset are skipped, so a predecessor that is still alive does
  no harm.
* `apply_all` is one transaction: after a crash of the process or the machine, the records and the next offsets are both
  stored or both missing. `relaygr.worker.history.apply` describes the effect of each record.
* `trust` empties the store if it is a copy of other topics. Before `trust`, `get` returns None.
* `get` copies a history out of the map. A lease may keep a history for seconds, and a read transaction of that length
  would prevent LMDB from reusing freed pages.
* No file grows past `max_bytes`, and nothing is evicted: a record for which there is no space is refused.
* `conceal` hides a user whose tombstone was read, whatever the disk does, until the tombstone is stored.

There is one `HistoryStore` for each path and process. Any thread may call its methods.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import lmdb
import structlog

from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import check_room, private_folder
from relaygr.schemas.messages import History
from relaygr.schemas.record import record
from relaygr.worker.history.apply import UNREAD, Application, Bounds
from relaygr.worker.history.batches import ApplyOutcome, EventRecord, HistoryBatch, HistoryRecord, StoreFullError
from relaygr.worker.history.files import Compaction, DamagedError, Files, claim
from relaygr.worker.history.records import Head
from relaygr.worker.history.resolve import StoredHistory
from relaygr.worker.history.tables import LAYOUT, READABLE, PartitionState, Table, Tables, UserHead

log = structlog.get_logger()

LEAST_BYTES: Final = 1024 * 1024
# The part of the file (1/8) that values may not use: a batch writes new pages before LMDB frees the old ones.
_RESERVE_FRACTION: Final = 8
_ALL_PARTITIONS: Final = 2**32
_SCAN_RECORDS: Final = 500
_SCAN_PAUSE_S: Final = 0.002
_MOST_FORGOTTEN: Final = 10_000
_EXPIRED_AT_ONCE: Final = 1000
MAX_AHEAD_MS: Final = 24 * 3600 * 1000


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


_UNKNOWN: Final = StoreOrigin("", "", "")


class HistoryStore:
    """Implements the module's contract."""

    def __init__(self, files: Files, clock: Clock, max_ahead_ms: int) -> None:
        self.path = files.folder
        self.max_bytes = files.max_bytes
        self._max_ahead_ms = max_ahead_ms
        self._clock = clock
        self._page_bytes = int(files.env.stat()["psize"])
        reserve_bytes = files.max_bytes // _RESERVE_FRACTION
        self._value_bytes = files.max_bytes - reserve_bytes
        # Each deletion may copy a page. LMDB frees the old pages two transactions later.
        self._forgotten_at_once = min(_MOST_FORGOTTEN, reserve_bytes // self._page_bytes // 4)
        self._origin: StoreOrigin | None = None
        """The topics of the content; None: it is not trusted yet."""
        self._expired_to = b""
        self._concealed: dict[str, tuple[int, int, int]] = {}
        """User id -> partition, offset and timestamp of a tombstone that may not be stored yet."""
        self._claim: int | None = None
        self._compaction: Compaction | None = None
        # Held while `_files` is written or replaced. Reads need no lock: LMDB unmaps replaced files when their last
        # transaction has ended and nothing refers to them.
        self._writing = threading.RLock()
        self._files = files

    @classmethod
    def open(
        cls, path: Path | str, max_bytes: int, clock: Clock | None = None, max_ahead_ms: int = MAX_AHEAD_MS
    ) -> HistoryStore:
        """Opens or creates the store in folder `path`.

        `max_ahead_ms`: a behaviour whose time is further ahead of its record's is stored with its record's time.

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
        return cls(Files.open_newest(folder, max_bytes), clock or SystemClock(), max_ahead_ms)

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

    def trust(self, origin: StoreOrigin, anew: bool = False) -> bool:
        """Enables `get`. Empties the store first if it is a copy of another topic, or if `anew`.

        Returns whether the content was kept.
        """
        with self._read() as tables:
            layout, stored = tables.layout, tables.origin
        if layout in READABLE and stored == origin.encode() and not anew:
            if layout != LAYOUT:
                # An older version would misread the states of partitions that this one writes.
                with self._write() as tables:
                    tables.put_layout()
            self._origin = origin
            return True
        if stored is not None:
            told = _origins(stored, origin) if layout in READABLE else _layouts(layout)
            log.warning("history store is emptied and read again", path=str(self.path), **told)
        self._abandon_compaction()
        # A full disk may keep the old content for a while.
        self._origin = None
        with self._write() as tables:
            if stored is not None:
                tables.note_removal(self._now_ms)
            tables.empty(origin.encode())
        self._concealed.clear()
        self._origin = origin
        return False

    @property
    def topic_id(self) -> str:
        """The id of the history topic that the store is a copy of; empty before `trust`."""
        return (self._origin or _UNKNOWN).topic_id

    # Histories.

    def get(self, user_id: str) -> StoredHistory | None:
        """The newest stored history of a user."""
        if self._origin is None or user_id in self._concealed:
            return None
        with self._read() as tables:
            return tables.history(user_id)

    def deleted_at_ms(self, user_id: str, partition: int) -> int:
        """The timestamp of the user's last tombstone that is known; ms since the epoch; 0: none is."""
        _, _, concealed_ms = self._concealed.get(user_id, (0, 0, 0))
        if self._origin is None:
            # The content may have a layout that this version does not read.
            return concealed_ms
        with self._read() as tables:
            head, deletion = tables.head(user_id), tables.deletion(partition, user_id)
        return max(
            concealed_ms,
            0 if deletion is None else deletion.at_ms,
            0 if head is None else head.deleted_before_ms - 1,
        )

    def head(self, user_id: str) -> Head | None:
        """The head of a user's stored history."""
        with self._read() as tables:
            return tables.head(user_id)

    def saved(self, user_id: str, fold_ms: int) -> History | None:
        """The snapshot that a worker writes of a user, and what it covers; None for a user who is not stored.

        Records with a timestamp before `fold_ms` become a part of its base: no snapshot that comes later leaves them
        out.
        """
        origin = self._origin or _UNKNOWN
        with self._read() as tables:
            partition, draft = tables.partition_of(user_id), tables.draft(user_id)
            if partition is None or draft is None:
                return None
            next_event = (tables.state(partition) or UNREAD).next_event
            return draft.saved(user_id, next_event, partition, (origin.topic_id, origin.behaviours_id), fold_ms)

    def some_histories(self, count: int) -> list[History]:
        """At most `count` histories, the longest of a bounded number of users.

        Needs no `trust`, since it does not matter which topic they are of. Empty if one of them is damaged: whoever
        follows the partition reads it again.
        """
        try:
            with self._read() as tables:
                if tables.layout not in READABLE:
                    return []
                heads, _ = tables.heads_after(b"", range(_ALL_PARTITIONS), _SCAN_RECORDS)
                shown = (each for each in heads if each.user_id not in self._concealed)
                users = [each.user_id for each in heapq.nlargest(count, shown, key=lambda each: each.head.length)]
                found = [tables.history(user_id) for user_id in users]
        except DamagedError as damage:
            if damage.partition is None:
                raise
            return []
        return [stored.history for stored in found if stored is not None]

    def recent_users(self, partitions: Container[int], count: int, is_wanted: Callable[[], bool]) -> list[str]:
        """At most `count` users of these partitions, those with the newest behaviours first.

        Reads a part of each of these users, with pauses: call it on a thread of its own. Ends early when `is_wanted` is
        false.
        """
        newest: list[tuple[int, str]] = []
        after: bytes | None = b""
        while after is not None and count > 0 and self._origin is not None and is_wanted():
            heads, after = self.heads_after(after, partitions)
            for each in heads:
                if each.head.length and each.user_id not in self._concealed:
                    change = heapq.heappush if len(newest) < count else heapq.heappushpop
                    change(newest, (each.head.newest_ms, each.user_id))
            time.sleep(_SCAN_PAUSE_S)
        return [user_id for _, user_id in sorted(newest, reverse=True)]

    def heads_after(self, after: bytes, partitions: Container[int]) -> tuple[list[UserHead], bytes | None]:
        """The heads of the next users of these partitions; b"": from the first one. And the key to continue after;
        None at the end.

        Looks at a bounded number of users.
        """
        with self._read() as tables:
            return tables.heads_after(after, partitions, _SCAN_RECORDS)

    def conceal(self, user_id: str, partition: int, offset: int, at_ms: int = 0) -> None:
        """Hides a user from `get`, `recent_users` and `some_histories` until the tombstone at this offset is stored.
        `at_ms`: its timestamp; 0: none.
        """
        self._concealed[user_id] = partition, offset, min(at_ms or self._now_ms, self._now_ms)

    # Records of the topics.

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
        done = ApplyOutcome()
        try:
            for batch in batches:
                entries: tuple[HistoryRecord | EventRecord, ...] = (*batch.records, *batch.events)
                for entry in entries:
                    done.extend(self._apply_one(_alone(batch, entry), entry))
                done.extend(self._apply((replace(batch, records=(), events=()),)))
        except lmdb.MapFullError as error:
            text = f"the history store in {self.path} has no free page: raise worker.history_max_bytes"
            raise StoreFullError(text, done) from error
        return done

    def _apply(self, batches: Sequence[HistoryBatch]) -> ApplyOutcome:
        with self._write() as tables:
            application = Application(tables, self._bounds)
            for batch in batches:
                application.apply(batch)
        if self._concealed:
            # An undelivered dead letter may keep the stored offset below that of a stored record.
            self._reveal(
                {
                    each.partition: max(each.next_offset, *(entry.offset + 1 for entry in each.records), 0)
                    for each in batches
                }
            )
        return application.outcome

    def _apply_one(self, alone: HistoryBatch, entry: HistoryRecord | EventRecord) -> ApplyOutcome:
        """Stores one record in its own transaction, or refuses it. Raises lmdb.MapFullError if neither is possible."""
        try:
            return self._apply((alone,))
        except lmdb.MapFullError:
            if isinstance(entry, HistoryRecord) and entry.history is None:
                raise
        with self._write() as tables:
            application = Application(tables, self._bounds)
            application.refuse(alone, entry.user_id)
        return application.outcome

    @property
    def _bounds(self) -> Bounds:
        origin = self._origin or _UNKNOWN
        return Bounds(
            history_id=origin.topic_id,
            behaviours_id=origin.behaviours_id,
            now_ms=self._now_ms,
            max_ahead_ms=self._max_ahead_ms,
            value_bytes=self._value_bytes,
            page_bytes=self._page_bytes,
        )

    def _reveal(self, stored_to: Mapping[int, int | None]) -> None:
        """Ends `conceal` for tombstones below these offsets of their partitions; None: for all of a partition."""
        self._concealed = {
            user_id: (partition, offset, at_ms)
            for user_id, (partition, offset, at_ms) in self._concealed.items()
            if partition not in stored_to or ((end := stored_to[partition]) is not None and offset >= end)
        }

    # Partitions.

    def state(self, partition: int) -> PartitionState | None:
        """How far a partition has been read; None if it was never read."""
        with self._read() as tables:
            return tables.state(partition)

    def next_offset(self, partition: int) -> int | None:
        """The offset to continue from; None: the beginning."""
        return (self.state(partition) or UNREAD).next_offset or None

    def next_event(self, partition: int) -> int | None:
        """The offset in the behaviours topic to continue from; None: the beginning."""
        return (self.state(partition) or UNREAD).next_event or None

    def mark_current(self, partitions: Iterable[int], now_ms: int) -> None:
        """Records that these partitions are complete now, or are read without a gap from now on."""
        with self._write() as tables:
            for partition in partitions:
                tables.put_state(partition, replace(tables.state(partition) or UNREAD, current_at_ms=now_ms))

    def forget(self, *partitions: int) -> int:
        """Deletes the users of these partitions and their offsets. Returns the number of users.

        Reads these partitions only. Makes several transactions, since each needs free pages for copies of those that it
        changes. After a crash in between, the partition counts as too old (`current_at_ms` is 0), so its follower
        forgets it again.
        """
        with self._write() as tables:
            for partition in partitions:
                tables.put_state(partition, UNREAD)
        forgotten = 0
        for partition in partitions:
            is_done = False
            while not is_done:
                users, is_done = self._forget_some(partition)
                forgotten += users
        with self._write() as tables:
            for partition in partitions:
                tables.delete_state(partition)
        self._reveal(dict.fromkeys(partitions))
        return forgotten

    def _forget_some(self, partition: int) -> tuple[int, bool]:
        """Deletes the next parts of this partition. Returns the number of users, and whether nothing was left."""
        with self._write() as tables:
            users, is_done = tables.erase_partition(partition, self._forgotten_at_once)
            if users:
                tables.note_removal(self._now_ms)
        return users, is_done

    def uncover(self, partition: int, end: int) -> int:
        """Lets no history cover offsets from `end` on, where the partition's log of behaviours ends. Returns the number
        of histories that did.
        """
        uncovered, after = 0, b""
        is_done = False
        while not is_done:
            heads, following = self.heads_after(after, (partition,))
            users = [each.user_id for each in heads if each.head.next_event > end]
            if users:
                with self._write() as tables:
                    for user_id in users:
                        draft = tables.draft(user_id)
                        if draft is not None:
                            draft.uncover(end)
                            tables.put_parts(partition, user_id, draft)
            uncovered += len(users)
            after, is_done = following or b"", following is None
        return uncovered

    def expire(self, before_ms: int, share: float = 0.0) -> int:
        """Deletes the hashes of users who were deleted before this time.

        Looks at this share of them at each call, and at least at a thousand, so the number of calls for all of them is
        bounded. Each thousand is one transaction of a few milliseconds. Returns the number of those that it deleted.
        """
        with self._read() as tables:
            wanted = int(tables.count(Table.DELETED) * share)
        expired = 0
        for _ in range(1 + wanted // _EXPIRED_AT_ONCE):
            with self._write() as tables:
                count, self._expired_to = tables.expire_deletions(self._expired_to, before_ms, _EXPIRED_AT_ONCE)
            expired += count
        return expired

    # Files.

    @property
    def removed_at_ms(self) -> int | None:
        """When the first user was deleted whose bytes may still be in the files; ms since the epoch. None: none was."""
        with self._read() as tables:
            return tables.removed_at_ms

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
        with self._read() as tables:
            return tables.pages * self._page_bytes

    @property
    def has_room(self) -> bool:
        """Whether a quarter of the space is free: enough to read a partition with refused records again."""
        return self.bytes_used < self._value_bytes * 3 // 4

    @property
    def user_count(self) -> int:
        with self._read() as tables:
            return tables.count(Table.USERS)

    @property
    def _now_ms(self) -> int:
        return self._clock.wall_us() // 1000

    @contextmanager
    def _read(self) -> Iterator[Tables]:
        """A read transaction on the newest files. Raises DamagedError."""
        try:
            while True:
                files = self._files
                with files.env.begin(buffers=True) as txn:
                    if files.newer(txn) is None:
                        yield Tables(files, txn)
                        return
                self._move_on(files)
        except lmdb.CorruptedError as error:
            raise DamagedError(self.path, error) from error

    @contextmanager
    def _write(self) -> Iterator[Tables]:
        """A write transaction on the newest files, which are `_files` until it ends. Raises DamagedError."""
        with self._writing:
            try:
                while True:
                    files = self._files
                    with files.env.begin(write=True, buffers=True) as txn:
                        is_newest = files.newer(txn) is None
                        if is_newest:
                            yield Tables(files, txn, self._compaction)
                            if self._compaction is not None:
                                files.count(txn)
                            txn_id = txn.id()
                    if is_newest:
                        break
                    self._move_on(files)
            except lmdb.CorruptedError as error:
                raise DamagedError(self.path, error) from error
            files.lengthen()
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


def _alone(batch: HistoryBatch, entry: HistoryRecord | EventRecord) -> HistoryBatch:
    """The batch of one record. Its offsets do not pass those of the whole batch, which may be before the record."""
    if isinstance(entry, EventRecord):
        return HistoryBatch(batch.partition, (), 0, (entry,), min(entry.offset + 1, batch.next_event))
    return HistoryBatch(batch.partition, (entry,), min(entry.offset + 1, batch.next_offset))


def _origins(stored: bytes, origin: StoreOrigin) -> dict[str, str]:
    return {"was_of": _text(stored), "is_of": _text(origin.encode())}


def _layouts(stored: bytes | None) -> dict[str, str]:
    return {"layout": _text(stored or b"none"), "this_version_reads": ", ".join(map(_text, READABLE))}


def _text(data: bytes) -> str:
    return data.decode(errors="replace").replace("\n", " ")
