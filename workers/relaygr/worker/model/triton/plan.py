"""How one forward is cut into programs of the Triton kernels: plain numbers, no torch and no Triton.

A *tile* is `block_rows` consecutive rows of one segment. The kernel starts a program for each tile, head and split.
Tiles with the most keys come first, so that the last programs to run are short ones. Where tiles and heads are fewer
than the device has room for (one request of 128 candidates on a long prefix), each tile's keys are split among
several programs, whose partial sums are added afterwards in a fixed order.

All that the kernels read goes to the device as one int32 array, whose parts begin at multiples of 16 bytes: Triton
compiles a second kernel for pointers that do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaygr.worker.model.attention.segments import Segment

Int32Array = NDArray[np.int32]

SEGMENT_FIELDS = 5
MAX_SPLITS = 16
"""Bounds the memory of partial sums, and the time of adding them."""
_ALIGN = 4
"""int32 elements of 16 bytes."""


@dataclass(frozen=True, slots=True)
class SegmentArrays:
    """The segments of one forward, int32 [segments] each; their rows follow one another."""

    context_tokens: Int32Array
    causal_rows: Int32Array
    free_rows: Int32Array
    table_starts: Int32Array
    """Where a segment's pages begin in `pages`."""
    pages: Int32Array
    stores: NDArray[np.bool_]

    @property
    def rows(self) -> Int32Array:
        return self.causal_rows + self.free_rows

    @property
    def capacity(self) -> Capacity:
        """Just what these segments need."""
        return Capacity(int(self.rows.sum()), self.rows.size, self.pages.size)

    @property
    def first_rows(self) -> Int32Array:
        return (np.cumsum(self.rows) - self.rows).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes that the arrays are padded to: those of one forward, or of all that share a captured graph."""

    rows: int
    segments: int
    pages: int


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What the kernels are started with, apart from sizes: forwards that differ in it cannot share a captured graph."""

    block_rows: int
    splits: int
    stores: bool


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """One forward for the kernels: an int32 array, and where its parts lie in it."""

    packed: Int32Array
    shape: PlanShape
    rows: int
    tiles: int
    segments_at: int
    table_at: int
    slots_at: int


def arrays_of(segments: Sequence[Segment], page_tokens: int) -> SegmentArrays:
    """The segments' numbers, and of their pages those that are read or written."""
    used = [segment.pages[: -(-segment.stored_tokens // page_tokens)] for segment in segments]
    counts = np.array([pages.size for pages in used], dtype=np.int32)
    return SegmentArrays(
        context_tokens=np.array([segment.context_tokens for segment in segments], dtype=np.int32),
        causal_rows=np.array([segment.causal_rows for segment in segments], dtype=np.int32),
        free_rows=np.array([segment.free_rows for segment in segments], dtype=np.int32),
        table_starts=(np.cumsum(counts) - counts).astype(np.int32),
        pages=np.concatenate(used).astype(np.int32) if used else np.empty(0, dtype=np.int32),
        stores=np.array([segment.stores for segment in segments], dtype=np.bool_),
    )


def tiles_bound(rows: int, segments: int, block_rows: int) -> int:
    """The most tiles that so many rows in so many segments can make."""
    return rows // block_rows + segments


def tile_list(segments: SegmentArrays, block_rows: int) -> Int32Array:
    """int32 [tiles, 2]: segment and its row that the tile begins with; the longest first."""
    rows = segments.rows
    counts = -(-rows // block_rows)
    owner = np.repeat(np.arange(rows.size), counts)
    first = (np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)) * block_rows
    keys = segments.context_tokens[owner] + np.minimum(first + block_rows, segments.causal_rows[owner])
    order = np.argsort(-keys, kind="stable")
    return np.stack((owner[order], first[order]), axis=1).astype(np.int32)


def choose_splits(programs: int, longest_keys: int, key_block: int, room: int) -> int:
    """Programs that share a tile: a power of two that fills `room` programs, with at least two blocks of keys each."""
    splits = 1
    while splits < MAX_SPLITS and programs * splits * 2 <= room and longest_keys >= 2 * (splits * 2) * key_block:
        splits *= 2
    return splits


def row_slots(segments: SegmentArrays, page_tokens: int) -> Int32Array:
    """Where each row's K,V go: page * page_tokens + place, and -1 for rows that are not stored."""
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


def pack(segments: SegmentArrays, page_tokens: int, shape: PlanShape, capacity: Capacity) -> PackedPlan:
    """Raises ValueError if the segments exceed the capacity.

    Rows beyond the forward's own belong to no tile, and tiles beyond its own to an empty segment: the kernels leave
    both alone.
    """
    rows, count = int(segments.rows.sum()), segments.rows.size
    if rows > capacity.rows or count > capacity.segments or segments.pages.size > capacity.pages:
        raise ValueError(f"{rows} rows, {count} segments and {segments.pages.size} pages exceed {capacity}")
    own_tiles = tile_list(segments, shape.block_rows)
    tiles = np.zeros((tiles_bound(capacity.rows, capacity.segments, shape.block_rows), 2), dtype=np.int32)
    tiles[:, 0] = capacity.segments
    tiles[: len(own_tiles)] = own_tiles
    described = np.zeros((capacity.segments + 1, SEGMENT_FIELDS), dtype=np.int32)
    described[:count] = np.stack(
        (segments.first_rows, segments.causal_rows, segments.rows, segments.context_tokens, segments.table_starts),
        axis=1,
    )
    slots = np.full(capacity.rows, -1, dtype=np.int32)
    # Nobody reads them otherwise, and they take half of the time.
    if shape.stores:
        slots[:rows] = row_slots(segments, page_tokens)
    table = np.zeros(capacity.pages, dtype=np.int32)
    table[: segments.pages.size] = segments.pages

    parts = [tiles.reshape(-1), described.reshape(-1), table, slots]
    starts = np.cumsum([0] + [-(-part.size // _ALIGN) * _ALIGN for part in parts])
    packed = np.zeros(int(starts[-1]), dtype=np.int32)
    for start, part in zip(starts[:-1], parts, strict=True):
        packed[start : start + part.size] = part
    return PackedPlan(
        packed=packed,
        shape=shape,
        rows=capacity.rows,
        tiles=len(tiles),
        segments_at=int(starts[1]),
        table_at=int(starts[2]),
        slots_at=int(starts[3]),
    )
