"""The stored form of a history: pure functions over bytes. `relaygr.worker.history.rules` says what is added to it.

A history of n behaviours is one *head* and `n // 64 * 64 / CHUNK` *chunks*, rounded up. A chunk has closed blocks of 64
behaviours with their digests. The head has the open block, so an append rewrites the head (at most 3 KB) and, once in
64 behaviours, the last chunk. Only behaviours after the base have an origin. All parts are little-endian:

    head:   the fields of `_HEAD` | features i64 | a row for each behaviour of the open block
    row:    item i64 | time i64 | offset u64 | written_at_ms u64 | position i64 | action u16
    chunk:  block digests, 16 bytes each | items i64 | times i64 | actions u16
            | offsets u64 | written_at_ms u64 | positions i64
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas.digest import BLOCK, DIGEST_BYTES, DigestChain, digest_chain
from relaygr.schemas.messages import MAX_CONTINUED, Behaviours, BehavioursOffset, Continuation, History
from relaygr.schemas.record import record
from relaygr.worker.history.resolve import StoredHistory

CHUNK: Final = 56 * BLOCK
"""Behaviours of a full chunk: without origins it fills 16 pages of LMDB."""
NO_POSITION: Final = -1
NO_TIME: Final = -(2**63)
_NEVER_MS: Final = NO_TIME
NO_CUT: Final = 2**63 - 1
_HEAD: Final = struct.Struct("<QQQQQQqqIIHHI16s16sQQQQqqqQQ")
_ROW: Final = np.dtype(
    [("item", "<i8"), ("time", "<i8"), ("offset", "<u8"), ("written", "<u8"), ("position", "<i8"), ("action", "<u2")]
)
_PACKED_ROW: Final = struct.Struct("<qqQQqH")
HAS_GAP: Final = 1
_IS_UNSORTED: Final = 2
"""The open block or a chunk has a time below an earlier one, or one that is not used."""
SUPERSEDED: Final = 4
DELETED: Final = 8


@record(frozen=True, slots=True)
class Coverage:
    """The records that a snapshot or a tombstone makes needless."""

    offset: int = 0
    """Records below this offset."""
    before_ms: int = 0
    """Records whose timestamp in the log is below this; ms since the epoch."""
    cut_ms: int | None = None
    """Of the records below `before_ms`, only behaviours up to this time; None: all."""


@dataclass(slots=True)
class Head:
    """The fields of a head before its arrays, in the order of `_HEAD`."""

    number: int = 0
    covered_offset: int = 0
    covered_before_ms: int = 0
    next_event: int = 0
    """Records below this offset were read."""
    written_at_ms: int = 0
    """The timestamp of the snapshot in its log; 0: there was none."""
    next_position: int = 0
    newest_ms: int = _NEVER_MS
    closed_newest_ms: int = _NEVER_MS
    """The largest time before the open block."""
    length: int = 0
    base: int = 0
    """Behaviours that came with the snapshot."""
    feature_count: int = 0
    flags: int = 0
    unsaved: int = 0
    """Behaviours that the last snapshot in the log does not have."""
    seed: bytes = bytes(DIGEST_BYTES)
    closed_digest: bytes = bytes(DIGEST_BYTES)
    """The digest before the open block."""
    next_snapshot: int = 0
    """Records of the history topic below this offset were read."""
    unsaved_since_ms: int = 0
    """The oldest timestamp of the records of the unsaved behaviours."""
    missing_offset: int = 0
    """Some records below this offset were not stored, and no snapshot has covered them yet; 0: none."""
    missing_before_ms: int = 0
    """No record with this timestamp or a later one is among them."""
    missing_ms: int = _NEVER_MS
    """The latest time of those behaviours, as far as it is known."""
    cut_ms: int = NO_CUT
    """The snapshot includes no behaviour after this time, unless it names an offset."""
    known_ms: int = _NEVER_MS
    """The latest time of a behaviour in any snapshot so far."""
    sent_position: int = 0
    """The position that the publisher's next record has. Another than `next_position` if its count began again."""
    deleted_before_ms: int = 0
    """The user was deleted: whatever a later snapshot covers, records with a timestamp before this are not used."""

    @classmethod
    def read(cls, data: bytes | memoryview) -> Head:
        """The fields of a stored head."""
        return cls(*_HEAD.unpack_from(data))

    def pack(self) -> bytes:
        """The stored fields."""
        return _HEAD.pack(*_fields_of(self))

    @property
    def closed(self) -> int:
        """Behaviours in chunks."""
        return self.length - self.length % BLOCK

    @property
    def chunks(self) -> int:
        return -(-self.closed // CHUNK)

    @property
    def has_gap(self) -> bool:
        return bool(self.flags & HAS_GAP)

    @property
    def is_superseded(self) -> bool:
        """Whether the last record in the log is an older state, which must not be the one that a new worker finds."""
        return bool(self.flags & SUPERSEDED)

    @property
    def is_deleted(self) -> bool:
        """Whether the user was deleted, and an older snapshot came after the tombstone."""
        return bool(self.flags & DELETED)

    def covers(self, offset: int, written_at_ms: int, time_ms: int) -> bool:
        """Whether a behaviour of a record of the behaviours topic is covered."""
        if offset < self.covered_offset or written_at_ms < self.deleted_before_ms:
            return True
        is_cut_off = (written_at_ms if time_ms == NO_TIME else time_ms) > self.cut_ms
        return written_at_ms < self.covered_before_ms and not is_cut_off


_fields_of: Final = attrgetter(*(each.name for each in fields(Head)))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The parts of a stored chunk, which begins at a behaviour of the history."""

    digests: Any
    items: Any
    times: Any
    actions: Any
    offsets: Any = b""
    written: Any = b""
    positions: Any = b""

    @classmethod
    def read(cls, data: Any, start: int, head: Head) -> _Chunk:
        """The parts of chunk bytes, as slices."""
        count = min(CHUNK, head.closed - start)
        origins = count - max(0, min(count, head.base - start))
        parts = []
        at = 0
        for size in (count // BLOCK * DIGEST_BYTES, 8 * count, 8 * count, 2 * count, *(8 * origins,) * 3):
            parts.append(data[at : at + size])
            at += size
        return cls(*parts)

    def pack(self) -> bytes:
        """The stored form."""
        return b"".join(
            (self.digests, self.items, self.times, self.actions, self.offsets, self.written, self.positions)
        )


class HistoryBytes:
    """A stored history that is being changed. `written` has its new chunks by their index."""

    def __init__(self, head: Head, features: bytes, rows: bytes, chunk: Callable[[int], Any]) -> None:
        """`chunk` reads a stored chunk by its index."""
        self.head = head
        self._features = features
        self._rows = bytearray(rows)
        self._chunk = chunk
        self.written: dict[int, bytes] = {}

    @classmethod
    def read(cls, data: bytes | memoryview, chunk: Callable[[int], Any]) -> Self:
        """The draft of a stored history."""
        head = Head.read(data)
        rows_at = _HEAD.size + 8 * head.feature_count
        return cls(head, bytes(data[_HEAD.size : rows_at]), bytes(data[rows_at:]), chunk)

    @classmethod
    def empty(cls, covered: Coverage, next_snapshot: int = 0) -> Self:
        """The history of a user without a snapshot."""
        seed = digest_chain(np.empty(0, "<i8"), Behaviours.empty()).seed
        head = Head(seed=seed, closed_digest=seed, covered_offset=covered.offset, covered_before_ms=covered.before_ms)
        head.next_event = covered.offset
        head.next_snapshot = next_snapshot
        if covered.cut_ms is not None:
            head.cut_ms = covered.cut_ms
        return cls(head, b"", b"", _no_chunk)

    @classmethod
    def of_snapshot(cls, history: History, written_at_ms: int, covered: Coverage) -> Self:
        """The history of a snapshot, in chunks. It hashes the whole snapshot."""
        chain, behaviours = history.chain(), history.behaviours
        draft = cls.empty(covered)
        head = draft.head
        head.number, head.written_at_ms = history.number, written_at_ms
        head.length = head.base = len(behaviours)
        head.next_position = head.sent_position = (history.first_position or 0) + head.length
        head.feature_count, head.seed = history.features.size, chain.seed
        closed = head.closed
        head.closed_digest = chain.after(closed // BLOCK)
        if closed:
            head.closed_newest_ms = int(behaviours.timestamps_ms[closed - 1])
        if head.length:
            head.newest_ms = int(behaviours.timestamps_ms[-1])
            # A time after the snapshot's own cut is wrong.
            head.known_ms = min(head.newest_ms, head.cut_ms)
        draft._features = history.features.astype("<i8", copy=False).tobytes()
        items = memoryview(behaviours.items.astype("<i8", copy=False).tobytes())
        times = memoryview(behaviours.timestamps_ms.astype("<i8", copy=False).tobytes())
        actions = memoryview(behaviours.actions.astype("<u2", copy=False).tobytes())
        for start in range(0, closed, CHUNK):
            end = min(start + CHUNK, closed)
            digests = chain.packed[start // BLOCK * DIGEST_BYTES : end // BLOCK * DIGEST_BYTES]
            wide, narrow = slice(8 * start, 8 * end), slice(2 * start, 2 * end)
            draft.written[start // CHUNK] = _Chunk(digests, items[wide], times[wide], actions[narrow]).pack()
        rows = np.zeros(head.length - closed, _ROW)
        rows["item"], rows["time"] = behaviours.items[closed:], behaviours.timestamps_ms[closed:]
        rows["action"], rows["position"] = behaviours.actions[closed:], NO_POSITION
        draft._rows = bytearray(rows.tobytes())
        return draft

    @classmethod
    def of_saved(cls, history: History, tail: Continuation) -> Self:
        """The history of a worker's snapshot, which names its offset in the behaviours topic."""
        base = len(history.behaviours) - tail.offsets.size
        covered = Coverage(tail.covered_offset, tail.covered_before_ms, history.cut_ms)
        draft = cls.of_snapshot(
            History(
                history.user_id, history.number, history.features, history.behaviours[:base], history.first_position
            ),
            tail.written_at_ms,
            covered,
        )
        for row in zip(
            history.behaviours.items[base:].tolist(),
            tail.sent_times_ms.tolist(),
            tail.offsets.tolist(),
            tail.recorded_at_ms.tolist(),
            tail.positions.tolist(),
            history.behaviours.actions[base:].tolist(),
            strict=True,
        ):
            draft.append(*row)
        head = draft.head
        assert history.covers is not None
        head.next_event = history.covers.offset
        head.unsaved = head.unsaved_since_ms = 0
        if tail.next_position is not None:
            head.sent_position = tail.next_position
        return draft

    def saved(self, user_id: str, next_event: int, partition: int, topic_ids: tuple[str, str], fold_ms: int) -> History:
        """The snapshot that a worker writes of this history, which has no gap.

        `next_event`: the records of the partition below this offset were read. `topic_ids`: of the histories and of the
        behaviours. Records with a timestamp before `fold_ms` become a part of the base.
        """
        head = self.head
        chunks = [self._read_chunk(index) for index in range(head.chunks)]
        shown = assembled(user_id, head, self.head_bytes(), chunks).history
        rows = np.array(list(self.origins()), np.int64).reshape(-1, 6)
        covered_offset = head.covered_offset
        folded = max(_leading(rows[:, 3] < fold_ms), len(rows) - MAX_CONTINUED)
        if folded > 0:
            covered_offset = max(covered_offset, int(rows[folded - 1, 2]) + 1)
            rows = rows[_leading(rows[:, 2] < covered_offset) :]
        history_id, behaviours_id = topic_ids
        return History(
            user_id,
            head.number,
            shown.features,
            shown.behaviours,
            head.next_position - head.length,
            BehavioursOffset(partition, max(next_event, head.next_event), behaviours_id or None),
            Continuation(
                next_offset=head.next_snapshot,
                written_at_ms=head.written_at_ms,
                covered_offset=covered_offset,
                covered_before_ms=head.covered_before_ms,
                offsets=rows[:, 2],
                recorded_at_ms=rows[:, 3],
                positions=rows[:, 4],
                sent_times_ms=rows[:, 1],
                topic_id=history_id or None,
                next_position=None if head.sent_position == head.next_position else head.sent_position,
            ),
            None if head.cut_ms == NO_CUT else head.cut_ms,
        )

    def head_bytes(self) -> bytes:
        """The head to store."""
        return b"".join((self.head.pack(), self._features, self._rows))

    def at(self, index: int) -> tuple[int, int]:
        """Item and time of a stored behaviour, as they were sent."""
        head = self.head
        if index >= head.closed:
            row = _PACKED_ROW.unpack_from(self._rows, (index - head.closed) * _PACKED_ROW.size)
            return row[0], row[1]
        chunk = _Chunk.read(self._read_chunk(index // CHUNK), index // CHUNK * CHUNK, head)
        at = slice(8 * (index % CHUNK), 8 * (index % CHUNK) + 8)
        item, time_ms = (int.from_bytes(part[at], "little", signed=True) for part in (chunk.items, chunk.times))
        return item, time_ms

    def has(self, item: int, time_ms: int) -> bool:
        """Whether a behaviour with this item and time is stored."""
        head = self.head
        rows = np.frombuffer(bytes(self._rows), _ROW)
        stored = [(rows["item"], rows["time"])]
        for index in range(head.chunks):
            chunk = _Chunk.read(self._read_chunk(index), index * CHUNK, head)
            stored.append((np.frombuffer(chunk.items, "<i8"), np.frombuffer(chunk.times, "<i8")))
        return any(bool(((items == item) & (times == time_ms)).any()) for items, times in stored)

    def append(self, item: int, time_ms: int, offset: int, written_at_ms: int, position: int, action: int) -> None:
        head = self.head
        if not head.unsaved or written_at_ms < head.unsaved_since_ms:
            head.unsaved_since_ms = written_at_ms
        head.unsaved += 1
        head.flags &= ~DELETED
        following = 1 + (head.next_position if position == NO_POSITION else position)
        head.sent_position += following - head.next_position
        head.next_position = following
        if time_ms == NO_TIME or time_ms < head.newest_ms:
            head.flags |= _IS_UNSORTED
        else:
            head.newest_ms = time_ms
        self._rows += _PACKED_ROW.pack(item, time_ms, offset, written_at_ms, position, action)
        head.length += 1
        if head.length % BLOCK == 0:
            self._close_block()

    def _close_block(self) -> None:
        """Moves the open block, which is full, into the last chunk."""
        head = self.head
        rows = np.frombuffer(bytes(self._rows), _ROW)
        self._rows.clear()
        start = head.length - BLOCK
        index = start // CHUNK
        before = Head(length=start, base=head.base)
        old = _Chunk.read(self._read_chunk(index), index * CHUNK, before) if start % CHUNK else _Chunk(*(b"",) * 4)
        items, actions = rows["item"].tobytes(), rows["action"].tobytes()
        shown = _shown(rows, head.closed_newest_ms, is_closed=True)
        times = np.where(rows["time"] == NO_TIME, shown, rows["time"])
        head.closed_digest = _digest(head.closed_digest, items, actions, shown.tobytes())
        head.closed_newest_ms = int(shown[-1])
        new = rows[max(0, head.base - start) :]
        self.written[index] = b"".join(
            (
                old.digests, head.closed_digest,
                old.items, items, old.times, times.tobytes(), old.actions, actions,
                old.offsets, new["offset"].tobytes(),
                old.written, new["written"].tobytes(),
                old.positions, new["position"].tobytes(),
            )
        )  # fmt: skip

    def _read_chunk(self, index: int) -> Any:
        return self.written[index] if index in self.written else self._chunk(index)

    def origins(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """The behaviours after the base, as the values of a row."""
        head = self.head
        for start in range(head.base // CHUNK * CHUNK, head.closed, CHUNK):
            chunk = _Chunk.read(self._read_chunk(start // CHUNK), start, head)
            skipped = max(0, head.base - start)
            yield from zip(
                np.frombuffer(chunk.items, "<i8")[skipped:].tolist(),
                np.frombuffer(chunk.times, "<i8")[skipped:].tolist(),
                np.frombuffer(chunk.offsets, "<u8").tolist(),
                np.frombuffer(chunk.written, "<u8").tolist(),
                np.frombuffer(chunk.positions, "<i8").tolist(),
                np.frombuffer(chunk.actions, "<u2")[skipped:].tolist(),
                strict=True,
            )
        yield from _PACKED_ROW.iter_unpack(bytes(self._rows)[max(0, head.base - head.closed) * _ROW.itemsize :])


def without_future(history: History, written_at_ms: int, latest_ms: int) -> History:
    """The history with times after `latest_ms` lowered to the time of the behaviour before them, or to the timestamp
    of the history's record if there is none."""
    behaviours = history.behaviours
    times = behaviours.timestamps_ms
    used = int(np.searchsorted(times, latest_ms, side="right"))
    if used == len(times):
        return history
    lowered = times.copy()
    lowered[used:] = times[used - 1] if used else written_at_ms
    tail = history.continues
    if tail is not None:
        tail = replace(tail, sent_times_ms=np.where(tail.sent_times_ms > latest_ms, NO_TIME, tail.sent_times_ms))
    return replace(history, behaviours=Behaviours(behaviours.items, behaviours.actions, lowered), continues=tail)


def assembled(user_id: str, head: Head, data: bytes | memoryview, chunks: Sequence[Any]) -> StoredHistory:
    """The history of a head, which `data` begins with, and its chunks. Copies each part once; hashes the open block
    alone.
    """
    kept = bytes(data)
    parts = [_Chunk.read(chunk, CHUNK * index, head) for index, chunk in enumerate(chunks)]
    if head.length > head.closed:
        rows = np.frombuffer(kept, _ROW, -1, _HEAD.size + 8 * head.feature_count)
        shown = _shown(rows, head.closed_newest_ms) if head.flags & _IS_UNSORTED else rows["time"]
        items, times, actions = rows["item"].tobytes(), shown.tobytes(), rows["action"].tobytes()
        parts.append(_Chunk(_digest(head.closed_digest, items, actions, times), items, times, actions))
    timestamps_ms: NDArray[np.int64] = np.frombuffer(b"".join(part.times for part in parts), "<i8")
    if head.flags & _IS_UNSORTED:
        timestamps_ms = np.maximum.accumulate(timestamps_ms)
        timestamps_ms.flags.writeable = False
    history = History(
        user_id=user_id,
        number=head.number,
        features=np.frombuffer(kept, "<i8", head.feature_count, _HEAD.size),
        behaviours=Behaviours(
            items=np.frombuffer(b"".join(part.items for part in parts), "<i8"),
            actions=np.frombuffer(b"".join(part.actions for part in parts), "<u2"),
            timestamps_ms=timestamps_ms,
        ),
    )
    chain = DigestChain(head.seed, b"".join(part.digests for part in parts), head.length)
    return StoredHistory(history, chain, head.has_gap)


def _shown(rows: NDArray[Any], before_ms: int, *, is_closed: bool = False) -> NDArray[np.int64]:
    """The times of rows as a reader shows them, after behaviours up to `before_ms`.

    `is_closed`: later rows can not change these times any more, which therefore may not raise theirs.
    """
    times = np.maximum(np.maximum.accumulate(rows["time"]), before_ms)
    unknown = rows["time"] == NO_TIME
    if unknown.any():
        last_ms = times[-1] if is_closed and times[-1] != NO_TIME else NO_CUT
        later = np.minimum.accumulate(np.where(unknown, last_ms, times)[::-1])[::-1]
        recorded = np.minimum(rows["written"].astype("<i8"), later)
        times = np.maximum.accumulate(np.where(unknown, np.maximum(times, recorded), times))
    return times


def _leading(is_so: NDArray[np.bool_]) -> int:
    """How many of the first values are true."""
    return int(np.argmin(is_so)) if len(is_so) and not is_so.all() else len(is_so)


def _digest(before: bytes, items: bytes, actions: bytes, times: bytes) -> bytes:
    return blake2b(b"".join((before, items, actions, times)), digest_size=DIGEST_BYTES).digest()


def _no_chunk(index: int) -> Any:
    raise AssertionError(f"a new history has no stored chunk {index}")
