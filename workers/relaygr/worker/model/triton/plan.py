"""The division of a forward into programs of the Triton kernels. It uses numpy, and neither torch nor Triton.

A *tile* is `block_rows` consecutive rows of one segment. An *item* is a tile, or a part of the keys of a tile. The
kernel starts a program for each item and head. Items of the tiles with the most keys come first, so that the last
programs are short.

The keys of a tile are split if one program would walk more than its share: twice the keys that each program walks if
all the device's programs walked the same number (`split_counts`). One request on a long prefix is split among the whole
device, the same request beside a chunk is split as far as the chunk leaves programs idle, and a full device splits
nothing. The partial sums of a split tile are rows after those of the result; a second kernel adds them in a fixed
order.

The kernels read one int32 array, which is copied to the device. Its parts begin at multiples of 16 bytes: Triton
compiles a second kernel for pointers with another alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from relaygr.worker.model.attention.segments import Segment

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

SEGMENT_FIELDS = 7
"""First row, causal rows, all rows, context tokens, first entry of the table, all tokens, first of the key times."""
ITEM_FIELDS = 5
"""Segment, first row of the tile in it, number of this part of its keys, number of parts, row of the result."""
JOIN_FIELDS = 4
"""First row of partial sums, number of parts, first row of the result, rows of the tile."""
MAX_SPLITS = 64
"""The most programs for a tile and a head, which bounds the time to add their sums."""
LEAST_KEYS = 128
"""The fewest keys of a part: two blocks of 64, so that the loads of one run during the products of the other."""
_ALIGN = 4
"""int32 elements in 16 bytes."""
_NO_TIMES = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """The options of the mask, as in `AttentionSpec`; 0 (groups: 1) switches an option off."""

    contextual_tokens: int = 0
    max_attn_len: int = 0
    min_full_attn_len: int = 0
    group_size: int = 1

    @property
    def folded(self) -> int:
        """Tokens that have place 0 beside the first one."""
        return max(0, self.contextual_tokens - 1)


PLAIN_MASK = MaskOptions()


@dataclass(frozen=True, slots=True)
class SegmentArrays:
    """The segments of one forward, int32 [segments] each. The rows of a segment follow those of the one before."""

    context_tokens: Int32Array
    causal_rows: Int32Array
    free_rows: Int32Array
    total_tokens: Int32Array
    table_starts: Int32Array
    """The index in `pages` of a segment's first page."""
    pages: Int32Array
    stores: NDArray[np.bool_]
    key_times: Int64Array = field(default_factory=lambda: _NO_TIMES)
    """Seconds: the keys of one segment after the other. Empty if the model needs no times."""
    following: Int64Array = field(default_factory=lambda: _NO_TIMES)
    """Seconds: the time of the token after each row."""

    @property
    def rows(self) -> Int32Array:
        return self.causal_rows + self.free_rows

    @property
    def capacity(self) -> Capacity:
        """The exact sizes of these segments."""
        return Capacity(int(self.rows.sum()), self.rows.size, self.pages.size, self.key_times.size)

    @property
    def first_rows(self) -> Int32Array:
        return (np.cumsum(self.rows) - self.rows).astype(np.int32)

    @property
    def time_starts(self) -> Int32Array:
        """The index in `key_times` of a segment's first key; 0 if the model needs no times."""
        if not self.key_times.size:
            return np.zeros(self.rows.size, dtype=np.int32)
        keys: Int32Array = self.context_tokens + self.rows
        return (np.cumsum(keys) - keys).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes to which arrays are padded: those of one forward, or of all forwards that share a captured graph."""

    rows: int
    segments: int
    pages: int
    key_times: int = 0


@dataclass(frozen=True, slots=True)
class PlanShape:
    """The launch parameters, except sizes. Forwards with different shapes cannot share a captured graph."""

    block_rows: int
    extra_items: int
    """The most items beyond one for each tile; 0: no tile is split, and no sums are added."""
    stores: bool


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """The input of the kernels for one forward: an int32 array, the offsets of its parts, and the sizes of launches."""

    packed: Int32Array
    shape: PlanShape
    rows: int
    items: int
    joins: int
    result_rows: int
    """Rows of the result, and of partial sums after them."""
    segments_at: int
    joins_at: int
    table_at: int
    slots_at: int
    key_times_at: int
    """The key times and the following times are int64, each in two elements."""
    following_at: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a forward, [tiles] each, those with the most keys first."""

    segments: Int64Array
    first_rows: Int64Array
    """The first row of each tile in its segment."""
    keys: Int64Array
    """Keys that a program walks, own candidates not counted."""


def padded_rows(rows: int) -> int:
    """Rows of a result: a multiple of 16, so that its stride is one, too.

    For another stride Triton would compile a second kernel while a request waits.
    """
    return -(-rows // 16) * 16


def arrays_of(segments: Sequence[Segment], page_tokens: int, needs_times: bool = False) -> SegmentArrays:
    """The segments as arrays, with only those of their pages that are read or written.

    Raises ValueError if `needs_times` is set and a segment has no times.
    """
    used = [segment.pages[: -(-segment.stored_tokens // page_tokens)] for segment in segments]
    counts = np.array([pages.size for pages in used], dtype=np.int32)
    key_times, following = _times_of(segments) if needs_times else (_NO_TIMES, _NO_TIMES)
    return SegmentArrays(
        context_tokens=np.array([segment.context_tokens for segment in segments], dtype=np.int32),
        causal_rows=np.array([segment.causal_rows for segment in segments], dtype=np.int32),
        free_rows=np.array([segment.free_rows for segment in segments], dtype=np.int32),
        total_tokens=np.array([segment.total_tokens for segment in segments], dtype=np.int32),
        table_starts=(np.cumsum(counts) - counts).astype(np.int32),
        pages=np.concatenate(used).astype(np.int32) if used else np.empty(0, dtype=np.int32),
        stores=np.array([segment.stores for segment in segments], dtype=np.bool_),
        key_times=key_times,
        following=following,
    )


def _times_of(segments: Sequence[Segment]) -> tuple[Int64Array, Int64Array]:
    times = [segment.times for segment in segments if segment.times is not None]
    if len(times) != len(segments):
        raise ValueError("a bias by time needs the times of a segment's tokens")
    if not times:
        return _NO_TIMES, _NO_TIMES
    return np.concatenate([of.keys for of in times]), np.concatenate([of.following for of in times])


def tiles_bound(rows: int, segments: int, block_rows: int) -> int:
    """The most tiles of `rows` rows in `segments` segments."""
    return rows // block_rows + segments


def tiles_of(segments: SegmentArrays, block_rows: int, mask: MaskOptions) -> Tiles:
    """The tiles of these segments."""
    rows = segments.rows
    counts = -(-rows // block_rows)
    owner = np.repeat(np.arange(rows.size), counts)
    first = (np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)) * block_rows
    keys = _keys_seen(segments, owner, first, block_rows, mask)
    order = np.argsort(-keys, kind="stable")
    return Tiles(owner[order], first[order], keys[order])


def _keys_seen(
    segments: SegmentArrays, owner: Int64Array, first: Int64Array, block_rows: int, mask: MaskOptions
) -> Int64Array:
    """The tokens from the first that any row of a tile sees to the last one, as `attend_kernel` bounds them."""
    context, causal = segments.context_tokens[owner].astype(np.int64), segments.causal_rows[owner]
    stop = context + np.minimum(first + block_rows, causal)
    if mask.contextual_tokens:
        stop = np.where(context + first < mask.contextual_tokens, context + causal, stop)
    if not mask.max_attn_len:
        return stop
    end = segments.total_tokens[owner] - mask.folded
    last = np.minimum(first + block_rows, segments.rows[owner]) - 1
    places = [np.where(row >= causal, end, np.maximum(context + row - mask.folded, 0)) for row in (first, last)]
    start = places[0] - mask.max_attn_len + mask.folded
    sees_all = start <= mask.folded
    if mask.min_full_attn_len:
        sees_all |= places[1] >= end - mask.min_full_attn_len
    return np.maximum(stop - np.where(sees_all, 0, start), 0)


def split_counts(keys: Int64Array, extra_items: int, least_keys: int = LEAST_KEYS) -> Int64Array:
    """The parts into which the keys of each tile are split, at most `extra_items` more than there are tiles.

    `extra_items` is also the number of programs that the device has room for in one head. Each part has fewer than
    twice the keys that a program walks on average if all of these run (and MAX_SPLITS allows it).
    """
    if not extra_items or not keys.size:
        return np.ones_like(keys)
    share = max(least_keys, -(-int(keys.sum()) // extra_items))
    return np.clip(keys // share, 1, MAX_SPLITS)


def row_slots(segments: SegmentArrays, page_tokens: int) -> Int32Array:
    """The slot of each row's K,V: page * page_tokens + place, or -1 for rows that are not stored."""
    rows = segments.rows
    owner = np.repeat(np.arange(rows.size), rows)
    within = np.arange(owner.size) - segments.first_rows[owner]
    token = segments.context_tokens[owner].astype(np.int64) + within
    stored = segments.stores[owner] & (within < segments.causal_rows[owner])
    slots = np.full(owner.size, -1, dtype=np.int64)
    entries = segments.table_starts[owner][stored] + token[stored] // page_tokens
    slots[stored] = segments.pages[entries].astype(np.int64) * page_tokens + token[stored] % page_tokens
    if slots.size and slots.max() > np.iinfo(np.int32).max:
        raise ValueError(f"an arena of more than {2**31} tokens cannot be addressed")
    return slots.astype(np.int32)


def pack(
    segments: SegmentArrays,
    page_tokens: int,
    shape: PlanShape,
    capacity: Capacity,
    mask: MaskOptions = PLAIN_MASK,
    least_keys: int = LEAST_KEYS,
) -> PackedPlan:
    """The input of the kernels for these segments, padded. Raises ValueError if the segments exceed the capacity.

    Padding rows belong to no tile, and padding items belong to an empty segment, so the kernels skip both.
    """
    own = segments.capacity
    if (
        own.rows > capacity.rows
        or own.segments > capacity.segments
        or own.pages > capacity.pages
        or own.key_times > capacity.key_times
    ):
        raise ValueError(f"{own} exceeds {capacity}")
    tiles = tiles_of(segments, shape.block_rows, mask)
    parts = split_counts(tiles.keys, shape.extra_items, least_keys)
    partial_at = padded_rows(capacity.rows)
    items, joins = _items_and_joins(segments, tiles, parts, shape.block_rows, partial_at)
    bound = tiles_bound(capacity.rows, capacity.segments, shape.block_rows) + shape.extra_items
    all_items = np.zeros((bound, ITEM_FIELDS), dtype=np.int32)
    all_items[:] = (capacity.segments, 0, 0, 1, 0)
    all_items[: len(items)] = items
    # Each split tile has at least one extra item.
    all_joins = np.zeros((shape.extra_items, JOIN_FIELDS), dtype=np.int32)
    all_joins[: len(joins)] = joins
    described = np.zeros((capacity.segments + 1, SEGMENT_FIELDS), dtype=np.int32)
    described[: own.segments] = np.stack(
        (
            segments.first_rows,
            segments.causal_rows,
            segments.rows,
            segments.context_tokens,
            segments.table_starts,
            segments.total_tokens,
            segments.time_starts,
        ),
        axis=1,
    )
    slots = np.full(capacity.rows, -1, dtype=np.int32)
    # Only a forward that stores reads the slots, and computing them takes half of the time.
    if shape.stores:
        slots[: own.rows] = row_slots(segments, page_tokens)
    table = np.zeros(capacity.pages, dtype=np.int32)
    table[: own.pages] = segments.pages
    key_times, following = np.zeros(capacity.key_times, np.int64), np.zeros(capacity.rows, np.int64)
    key_times[: own.key_times], following[: segments.following.size] = segments.key_times, segments.following

    arrays = [
        all_items.reshape(-1),
        described.reshape(-1),
        all_joins.reshape(-1),
        table,
        slots,
        key_times.view(np.int32),
        following.view(np.int32) if capacity.key_times else slots[:0],
    ]
    starts = np.cumsum([0] + [-(-part.size // _ALIGN) * _ALIGN for part in arrays])
    packed = np.zeros(int(starts[-1]), dtype=np.int32)
    for start, part in zip(starts[:-1], arrays, strict=True):
        packed[start : start + part.size] = part
    at = [int(start) for start in starts[1:-1]]
    return PackedPlan(
        packed=packed,
        shape=shape,
        rows=capacity.rows,
        items=len(all_items),
        joins=len(all_joins),
        # A split tile has one part more than extra items, so at most twice as many parts.
        result_rows=partial_at + 2 * shape.extra_items * shape.block_rows,
        segments_at=at[0],
        joins_at=at[1],
        table_at=at[2],
        slots_at=at[3],
        key_times_at=at[4],
        following_at=at[5],
    )


def _items_and_joins(
    segments: SegmentArrays, tiles: Tiles, parts: Int64Array, block_rows: int, partial_at: int
) -> tuple[Int64Array, Int64Array]:
    """Items [items, ITEM_FIELDS] and joins [joins, JOIN_FIELDS]. The partial sums begin at row `partial_at`."""
    of = np.repeat(np.arange(parts.size), parts)
    number = np.arange(of.size) - np.repeat(np.cumsum(parts) - parts, parts)
    is_split = parts > 1
    first_of_result = segments.first_rows[tiles.segments] + tiles.first_rows
    split_parts = np.where(is_split, parts, 0)
    first_of_partial = partial_at + (np.cumsum(split_parts) - split_parts) * block_rows
    target = np.where(is_split, first_of_partial, first_of_result)[of] + number * block_rows
    items = np.stack((tiles.segments[of], tiles.first_rows[of], number, parts[of], target), axis=1)
    rows = np.minimum(segments.rows[tiles.segments] - tiles.first_rows, block_rows)
    joins = np.stack((first_of_partial, parts, first_of_result, rows), axis=1)[is_split]
    return items, joins
