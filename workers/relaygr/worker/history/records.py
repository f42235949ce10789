"""The stored form of a history, and how behaviours are added to it: pure functions over bytes.

A history of n behaviours is one *head* and `n // 64 * 64 / CHUNK` *chunks*, rounded up. A chunk has closed blocks of 64
behaviours with their digests. The head has the open block, fewer than 64 behaviours, so an append rewrites the head (at
most 3 KB) and, once in 64 behaviours, the last chunk. All parts are little-endian:

    head:   the fields of `_HEAD` | features i64 | a row for each behaviour of the open block
    row:    item i64 | time i64 | offset u64 | written_at_ms u64 | position i64 | action u16
    chunk:  block digests, 16 bytes each | items i64 | times i64 | actions u16
            | offsets u64 | written_at_ms u64 | positions i64

The *base* is the part that came with a snapshot. Only behaviours after the base have an origin: the offset and the
timestamp of their record in the behaviours topic, and their position (-1: none). A later snapshot or tombstone needs it
to keep the behaviours that it does not cover.

A history is a function of its base and of the records after it, in the order of the log, whatever is read first:

* A record is *covered* if its offset is below the one that the snapshot names. If the snapshot names none, it covers
  the records with an older timestamp; a tombstone covers those with its own timestamp too.
* Behaviours with a position below the next one are duplicates and are left out. A position above it is a *gap*: the
  behaviours are appended, and the history counts as stale until a snapshot covers the gap.
* Behaviours without a position are appended in the order of the log.
* Times are stored as they were sent. A reader raises a time that is below an earlier one to that, since times of a
  history never decrease.

All this holds if each snapshot covers at least what the one before it did.
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
from relaygr.schemas.messages import MAX_BEHAVIOURS, BehaviourEvent, Behaviours, History
from relaygr.schemas.record import record
from relaygr.worker.history.resolve import StoredHistory

CHUNK: Final = 56 * BLOCK
"""Behaviours of a full chunk: without origins it fills 16 pages of LMDB."""
NO_POSITION: Final = -1
_NEVER_MS: Final = -(2**63)
_HEAD: Final = struct.Struct("<QQQQQQqqIIHHI16s16s")
_ROW: Final = np.dtype(
    [("item", "<i8"), ("time", "<i8"), ("offset", "<u8"), ("written", "<u8"), ("position", "<i8"), ("action", "<u2")]
)
_PACKED_ROW: Final = struct.Struct("<qqQQqH")
_NEWEST_AT: Final = 48
_HAS_GAP: Final = 1
_HAS_LATE: Final = 2
_DIGESTS: Final = tuple(struct.Struct(f"{DIGEST_BYTES}s" * count) for count in range(CHUNK // BLOCK + 1))


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
    """Those below this offset."""
    before_ms: int = 0
    """Those whose timestamp in the log is below this; ms since the epoch."""


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
    spare: int = 0
    seed: bytes = bytes(DIGEST_BYTES)
    closed_digest: bytes = bytes(DIGEST_BYTES)
    """The digest before the open block."""

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
            self.spare,
            self.seed,
            self.closed_digest,
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

    def covers(self, offset: int, written_at_ms: int) -> bool:
        """Whether a record of the behaviours topic is covered."""
        return offset < self.covered_offset or written_at_ms < self.covered_before_ms


def newest_ms_of(head: bytes | memoryview) -> int | None:
    """The time of the newest behaviour; ms since the epoch; None without behaviours."""
    newest_ms: int = struct.unpack_from("<q", head, _NEWEST_AT)[0]
    return None if newest_ms == _NEVER_MS else newest_ms


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
    def empty(cls, covered: Coverage, *, has_gap: bool = False) -> Draft:
        """The history of a user without a snapshot. `has_gap`: earlier behaviours may be missing."""
        seed = digest_chain(np.empty(0, "<i8"), Behaviours.empty()).seed
        head = Head(seed=seed, closed_digest=seed, covered_offset=covered.offset, covered_before_ms=covered.before_ms)
        head.next_event = covered.offset
        head.flags = _HAS_GAP if has_gap else 0
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
        head.closed_digest = chain.blocks[closed // BLOCK - 1] if closed else chain.seed
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
                    *chain.blocks[start // BLOCK : end // BLOCK],
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
            head.flags |= _HAS_GAP
            return Added.TOO_LONG
        for index, (item, time_ms, action) in enumerate(zip(items, times, actions, strict=True)):
            at = NO_POSITION if position is None else position + max(0, repeated) + index
            self._append(item, time_ms, offset, written_at_ms, at, action)
        head.next_event = offset + 1
        if repeated < 0:
            return Added.AFTER_GAP
        return Added.APPENDED

    def keep_after(self, before: Draft) -> None:
        """Adds the behaviours of the history before this one that this one does not cover."""
        head = self.head
        for item, time_ms, offset, written_at_ms, position, action in before._origins():
            is_known = position != NO_POSITION and position < head.next_position
            if head.covers(offset, written_at_ms) or is_known:
                continue
            if head.length == MAX_BEHAVIOURS:
                head.flags |= _HAS_GAP
                break
            self._append(item, time_ms, offset, written_at_ms, position, action)
        head.next_event = max(head.next_event, before.head.next_event)

    def _append(self, item: int, time_ms: int, offset: int, written_at_ms: int, position: int, action: int) -> None:
        head = self.head
        if position > head.next_position:
            head.flags |= _HAS_GAP
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


def assembled(user_id: str, data: bytes | memoryview, chunks: Sequence[Any]) -> StoredHistory:
    """The history of a head and its chunks. Copies each part once; hashes the open block alone."""
    head = Head.read(data)
    rows_at = _HEAD.size + 8 * head.feature_count
    kept = bytes(data)
    items: list[Any] = []
    times: list[Any] = []
    actions: list[Any] = []
    blocks: list[bytes] = []
    left = head.closed
    for chunk in chunks:
        count = min(CHUNK, left)
        left -= count
        items_at = count // BLOCK * DIGEST_BYTES
        times_at = items_at + 8 * count
        actions_at = times_at + 8 * count
        blocks += _DIGESTS[count // BLOCK].unpack_from(chunk)
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
    return StoredHistory(history, DigestChain(head.seed, tuple(blocks), head.length), head.has_gap)


def _digest(before: bytes, items: bytes, actions: bytes, times: bytes) -> bytes:
    return blake2b(b"".join((before, items, actions, times)), digest_size=DIGEST_BYTES).digest()


def _no_chunk(index: int) -> Any:
    raise AssertionError(f"a new history has no stored chunk {index}")
