"""The stored form of a history, and how behaviours are added to it: pure functions over bytes.

A history of n behaviours is one *head* and `n // 64 * 64 / CHUNK` *chunks*, rounded up. A chunk has closed blocks of 64
behaviours with their digests. The head has the open block, fewer than 64 behaviours, so an append rewrites the head (at
most 3 KB) and, once in 64 behaviours, the last chunk. All parts are little-endian:

    head:   the fields of `_HEAD` | features i64 | a row for each behaviour of the open block
    row:    item i64 | time i64 | offset u64 | written_at_ms u64 | position i64 | action u16
    chunk:  block digests, 16 bytes each | items i64 | times i64 | actions u16
            | offsets u64 | written_at_ms u64 | positions i64

The *base* is the part that came with a snapshot of the feature pipeline. Only behaviours after the base, the *tail*,
have an origin: the offset and the timestamp of their record in the behaviours topic, and their position (-1: none). A
later snapshot or tombstone needs it to keep the behaviours that it does not cover.

A worker's snapshot (`saved`) has the tail with its origins, so it changes nothing but where a new worker begins. The
oldest part of a tail, which no later snapshot may still leave out, becomes a part of the base.

A history is a function of its base and of the records after it, in the order of the log, whatever is read first:

* A record is *covered* if its offset is below the one that the snapshot names. If the snapshot names none, it covers
  the records with an older timestamp; a tombstone covers those with its own timestamp too.
* Behaviours with a position below the next one are duplicates and are left out. A position above it is a *gap*: the
  behaviours are appended, and the history counts as stale until a snapshot covers the gap.
* Behaviours without a position are appended in the order of the log.
* Known limit: if a user's positions begin anew after a deletion, behaviours that are read before the tombstone count
  as duplicates. The follower reads the histories first, so this needs both within milliseconds.
* Times are stored as they were sent. A reader raises a time that is below an earlier one to that, since times of a
  history never decrease.

If a snapshot of the pipeline covers less than the base did, or lacks behaviours for which there was no space, the
history counts as stale until a snapshot covers them.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas.digest import BLOCK, DIGEST_BYTES, DigestChain, digest_chain
from relaygr.schemas.messages import (
    MAX_BEHAVIOURS,
    MAX_CONTINUED,
    BehaviourEvent,
    Behaviours,
    BehavioursOffset,
    Continuation,
    History,
)
from relaygr.schemas.record import record
from relaygr.worker.history.resolve import StoredHistory

CHUNK: Final = 56 * BLOCK
"""Behaviours of a full chunk: without origins it fills 16 pages of LMDB."""
NO_POSITION: Final = -1
_NEVER_MS: Final = -(2**63)
_HEAD: Final = struct.Struct("<QQQQQQqqIIHHI16s16sQQQQ")
_ROW: Final = np.dtype(
    [("item", "<i8"), ("time", "<i8"), ("offset", "<u8"), ("written", "<u8"), ("position", "<i8"), ("action", "<u2")]
)
_PACKED_ROW: Final = struct.Struct("<qqQQqH")
_HAS_GAP: Final = 1
_HAS_LATE: Final = 2
_SUPERSEDED: Final = 4
_DELETED: Final = 8


class Added(enum.Enum):
    """What became of a record of the behaviours topic."""

    APPENDED = "appended"
    AFTER_GAP = "after_gap"
    """Appended, though earlier behaviours are missing."""
    COVERED = "covered"
    """The snapshot includes it, or the user was deleted later."""
    DUPLICATE = "duplicate"
    TOO_LONG = "too_long"
    """The history has as many behaviours as a history may have."""


@record(frozen=True, slots=True)
class Coverage:
    """The records that a snapshot or a tombstone makes needless."""

    offset: int = 0
    """Records below this offset."""
    before_ms: int = 0
    """Records whose timestamp in the log is below this; ms since the epoch."""


@dataclass(slots=True)
class Head:
    """The fields of a head before its arrays."""

    number: int = 0
    written_at_ms: int = 0
    """The timestamp of the snapshot in its log; 0: there was none."""
    covered_offset: int = 0
    covered_before_ms: int = 0
    next_event: int = 0
    """Records below this offset were read."""
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

    @classmethod
    def read(cls, data: bytes | memoryview) -> Head:
        """The fields of a stored head."""
        fields = _HEAD.unpack_from(data)
        return cls(fields[0], fields[4], fields[1], fields[2], fields[3], *fields[5:])

    def pack(self) -> bytes:
        """The stored fields."""
        return _HEAD.pack(
            self.number,
            self.covered_offset,
            self.covered_before_ms,
            self.next_event,
            self.written_at_ms,
            self.next_position,
            self.newest_ms,
            self.closed_newest_ms,
            self.length,
            self.base,
            self.feature_count,
            self.flags,
            self.unsaved,
            self.seed,
            self.closed_digest,
            self.next_snapshot,
            self.unsaved_since_ms,
            self.missing_offset,
            self.missing_before_ms,
        )

    @property
    def closed(self) -> int:
        """Behaviours in chunks."""
        return self.length - self.length % BLOCK

    @property
    def chunks(self) -> int:
        return -(-self.closed // CHUNK)

    @property
    def has_gap(self) -> bool:
        return bool(self.flags & _HAS_GAP)

    @property
    def is_superseded(self) -> bool:
        """Whether the last record in the log is an older state, which must not be the one that a new worker finds."""
        return bool(self.flags & _SUPERSEDED)

    @property
    def is_deleted(self) -> bool:
        """Whether the user was deleted, and an older snapshot came after the tombstone."""
        return bool(self.flags & _DELETED)

    def covers(self, offset: int, written_at_ms: int) -> bool:
        """Whether a record of the behaviours topic is covered."""
        return offset < self.covered_offset or written_at_ms < self.covered_before_ms


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


class Draft:
    """A stored history that is being changed. `written` has its new chunks by their index."""

    def __init__(self, head: Head, features: bytes, rows: bytes, chunk: Callable[[int], Any]) -> None:
        """`chunk` reads a stored chunk by its index."""
        self.head = head
        self._features = features
        self._rows = bytearray(rows)
        self._chunk = chunk
        self.written: dict[int, bytes] = {}

    @classmethod
    def read(cls, data: bytes | memoryview, chunk: Callable[[int], Any]) -> Draft:
        """The draft of a stored history."""
        head = Head.read(data)
        rows_at = _HEAD.size + 8 * head.feature_count
        return cls(head, bytes(data[_HEAD.size : rows_at]), bytes(data[rows_at:]), chunk)

    @classmethod
    def empty(cls, covered: Coverage, next_snapshot: int = 0) -> Draft:
        """The history of a user without a snapshot."""
        seed = digest_chain(np.empty(0, "<i8"), Behaviours.empty()).seed
        head = Head(seed=seed, closed_digest=seed, covered_offset=covered.offset, covered_before_ms=covered.before_ms)
        head.next_event = covered.offset
        head.next_snapshot = next_snapshot
        return cls(head, b"", b"", _no_chunk)

    @classmethod
    def of_snapshot(cls, history: History, written_at_ms: int, covered: Coverage) -> Draft:
        """The history of a snapshot, in chunks. It hashes the whole snapshot."""
        chain, behaviours = history.chain(), history.behaviours
        draft = cls.empty(covered)
        head = draft.head
        head.number, head.written_at_ms = history.number, written_at_ms
        head.length = head.base = len(behaviours)
        head.next_position = (history.first_position or 0) + head.length
        head.feature_count, head.seed = history.features.size, chain.seed
        closed = head.closed
        head.closed_digest = chain.after(closed // BLOCK)
        if closed:
            head.closed_newest_ms = int(behaviours.timestamps_ms[closed - 1])
        if head.length:
            head.newest_ms = int(behaviours.timestamps_ms[-1])
        draft._features = history.features.astype("<i8", copy=False).tobytes()
        items = memoryview(behaviours.items.astype("<i8", copy=False).tobytes())
        times = memoryview(behaviours.timestamps_ms.astype("<i8", copy=False).tobytes())
        actions = memoryview(behaviours.actions.astype("<u2", copy=False).tobytes())
        for start in range(0, closed, CHUNK):
            end = min(start + CHUNK, closed)
            draft.written[start // CHUNK] = b"".join(
                (
                    chain.packed[start // BLOCK * DIGEST_BYTES : end // BLOCK * DIGEST_BYTES],
                    items[8 * start : 8 * end],
                    times[8 * start : 8 * end],
                    actions[2 * start : 2 * end],
                )
            )
        rows = np.zeros(head.length - closed, _ROW)
        rows["item"], rows["time"] = behaviours.items[closed:], behaviours.timestamps_ms[closed:]
        rows["action"], rows["position"] = behaviours.actions[closed:], NO_POSITION
        draft._rows = bytearray(rows.tobytes())
        return draft

    @classmethod
    def of_saved(cls, history: History, tail: Continuation) -> Draft:
        """The history of a worker's snapshot, which names its offset in the behaviours topic."""
        base = len(history.behaviours) - tail.offsets.size
        covered = Coverage(tail.covered_offset, tail.covered_before_ms)
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
            draft._append(*row)
        head = draft.head
        assert history.covers is not None
        head.next_event = history.covers.offset
        head.unsaved = head.unsaved_since_ms = 0
        return draft

    def saved(self, user_id: str, next_event: int, partition: int, topic_ids: tuple[str, str], fold_ms: int) -> History:
        """The snapshot that a worker writes of this history, which has no gap.

        `next_event`: the records of the partition below this offset were read. `topic_ids`: of the histories and of the
        behaviours. Records with a timestamp before `fold_ms` become a part of the base.
        """
        head = self.head
        chunks = [self._read_chunk(index) for index in range(head.chunks)]
        shown = assembled(user_id, head, self.head_bytes(), chunks).history
        rows = np.array(list(self._origins()), np.int64).reshape(-1, 6)
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
            ),
        )

    def head_bytes(self) -> bytes:
        """The head to store."""
        return b"".join((self.head.pack(), self._features, self._rows))

    def add(self, event: BehaviourEvent, offset: int, written_at_ms: int) -> Added:
        """Adds a record of the behaviours topic: at `offset`, with this timestamp in the log."""
        head = self.head
        if offset < head.next_event or head.covers(offset, written_at_ms):
            return Added.COVERED
        new = event.behaviours
        position = event.position
        items, times, actions = new.items.tolist(), new.timestamps_ms.tolist(), new.actions.tolist()
        repeated = 0 if position is None else head.next_position - position
        if repeated >= len(items):
            return Added.DUPLICATE
        if repeated > 0:
            items, times, actions = items[repeated:], times[repeated:], actions[repeated:]
        if head.length + len(items) > MAX_BEHAVIOURS:
            self.miss(offset + 1, written_at_ms + 1)
            return Added.TOO_LONG
        for index, (item, time_ms, action) in enumerate(zip(items, times, actions, strict=True)):
            at = NO_POSITION if position is None else position + max(0, repeated) + index
            self._append(item, time_ms, offset, written_at_ms, at, action)
        head.next_event = offset + 1
        if repeated < 0:
            return Added.AFTER_GAP
        return Added.APPENDED

    def keep_after(self, before: Draft) -> None:
        """Adds the previous history's behaviours that this history does not cover."""
        head, old = self.head, before.head
        next_event = head.next_event
        for item, time_ms, offset, written_at_ms, position, action in before._origins():
            is_known = position != NO_POSITION and position < head.next_position
            if offset < next_event or head.covers(offset, written_at_ms) or is_known:
                continue
            if head.length == MAX_BEHAVIOURS:
                self.miss(offset + 1, written_at_ms + 1)
                continue
            self._append(item, time_ms, offset, written_at_ms, position, action)
        head.next_event = max(next_event, old.next_event)
        # What the snapshot covers is below `next_event`; of a worker's snapshot that is more than its base covers.
        if old.missing_offset > next_event:
            self.miss(old.missing_offset, old.missing_before_ms)
        if old.covered_offset > next_event:
            self.miss(old.covered_offset, old.written_at_ms)

    def miss(self, offset: int, before_ms: int) -> None:
        """Notes that records may be missing: some below this offset, with a timestamp before this.

        Without effect if the snapshot covers all of them.
        """
        head = self.head
        if offset <= head.covered_offset or before_ms <= head.covered_before_ms:
            return
        head.missing_offset = max(head.missing_offset, offset)
        head.missing_before_ms = max(head.missing_before_ms, before_ms)
        head.flags |= _HAS_GAP

    def supersede(self, next_snapshot: int, *, is_deleted: bool = False) -> None:
        """Notes that an older snapshot came after this history, or after the user's deletion."""
        self.head.next_snapshot = next_snapshot
        self.head.flags |= _SUPERSEDED | (_DELETED if is_deleted else 0)

    def _append(self, item: int, time_ms: int, offset: int, written_at_ms: int, position: int, action: int) -> None:
        head = self.head
        if position > head.next_position:
            head.flags |= _HAS_GAP
        if not head.unsaved or written_at_ms < head.unsaved_since_ms:
            head.unsaved_since_ms = written_at_ms
        head.unsaved += 1
        head.flags &= ~_DELETED
        head.next_position = 1 + (head.next_position if position == NO_POSITION else position)
        if time_ms < head.newest_ms:
            head.flags |= _HAS_LATE
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
        shown = np.maximum(np.maximum.accumulate(rows["time"]), head.closed_newest_ms)
        head.closed_digest = _digest(head.closed_digest, items, actions, shown.tobytes())
        head.closed_newest_ms = int(shown[-1])
        new = rows[max(0, head.base - start) :]
        self.written[index] = b"".join(
            (
                old.digests, head.closed_digest,
                old.items, items, old.times, rows["time"].tobytes(), old.actions, actions,
                old.offsets, new["offset"].tobytes(),
                old.written, new["written"].tobytes(),
                old.positions, new["position"].tobytes(),
            )
        )  # fmt: skip

    def _read_chunk(self, index: int) -> Any:
        return self.written[index] if index in self.written else self._chunk(index)

    def _origins(self) -> Iterator[tuple[int, int, int, int, int, int]]:
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


def assembled(user_id: str, head: Head, data: bytes | memoryview, chunks: Sequence[Any]) -> StoredHistory:
    """The history of a head, which `data` begins with, and its chunks. Copies each part once; hashes the open block
    alone.
    """
    rows_at = _HEAD.size + 8 * head.feature_count
    kept = bytes(data)
    items: list[Any] = []
    times: list[Any] = []
    actions: list[Any] = []
    blocks: list[Any] = []
    left = head.closed
    for chunk in chunks:
        count = min(CHUNK, left)
        left -= count
        items_at = count // BLOCK * DIGEST_BYTES
        times_at = items_at + 8 * count
        actions_at = times_at + 8 * count
        blocks.append(chunk[:items_at])
        items.append(chunk[items_at:times_at])
        times.append(chunk[times_at:actions_at])
        actions.append(chunk[actions_at : actions_at + 2 * count])
    if head.length > head.closed:
        rows = np.frombuffer(kept, _ROW, -1, rows_at)
        open_items, open_actions = rows["item"].tobytes(), rows["action"].tobytes()
        open_times = rows["time"].tobytes()
        if head.flags & _HAS_LATE:
            shown = np.maximum(np.maximum.accumulate(rows["time"]), head.closed_newest_ms).tobytes()
        else:
            shown = open_times
        blocks.append(_digest(head.closed_digest, open_items, open_actions, shown))
        items.append(open_items)
        times.append(open_times)
        actions.append(open_actions)
    timestamps_ms: NDArray[np.int64] = np.frombuffer(b"".join(times), "<i8")
    if head.flags & _HAS_LATE:
        timestamps_ms = np.maximum.accumulate(timestamps_ms)
        timestamps_ms.flags.writeable = False
    history = History(
        user_id=user_id,
        number=head.number,
        features=np.frombuffer(kept, "<i8", head.feature_count, _HEAD.size),
        behaviours=Behaviours(
            items=np.frombuffer(b"".join(items), "<i8"),
            actions=np.frombuffer(b"".join(actions), "<u2"),
            timestamps_ms=timestamps_ms,
        ),
    )
    return StoredHistory(history, DigestChain(head.seed, b"".join(blocks), head.length), head.has_gap)


def _leading(is_so: NDArray[np.bool_]) -> int:
    """How many of the first values are true."""
    return int(np.argmin(is_so)) if len(is_so) and not is_so.all() else len(is_so)


def _digest(before: bytes, items: bytes, actions: bytes, times: bytes) -> bytes:
    return blake2b(b"".join((before, items, actions, times)), digest_size=DIGEST_BYTES).digest()


def _no_chunk(index: int) -> Any:
    raise AssertionError(f"a new history has no stored chunk {index}")
