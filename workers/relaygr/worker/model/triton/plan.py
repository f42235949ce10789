"""The division of a forward into programs of the Triton kernels. It uses numpy, and neither torch nor Triton.

A *tile* is `block_rows` consecutive rows of one segment. The kernel starts a program for each tile, head and split.
Tiles with the most keys come first, so that the last programs are short. If tiles times heads do not fill the device
(one request of 128 candidates on a long prefix), the keys of each tile are split among several programs, and their
partial sums are added afterwards in a fixed order.

The kernels read one int32 array, which is copied to the device. Its parts begin at multiples of 16 bytes: Triton
compiles a second kernel for pointers with another alignment.
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
"""A limit for the memory of partial sums, and for the time to add them."""
_ALIGN = 4
"""int32 elements in 16 bytes."""


@dataclass(frozen=True, slots=True)
class SegmentArrays:
    """The segments of one forward, int32 [segments] each. The rows of a segment follow those of the one before."""

    context_tokens: Int32Array
    causal_rows: Int32Array
    free_rows: Int32Array
    table_starts: Int32Array
    """The index in `pages` of a segment's first page."""
    pages: Int32Array
    stores: NDArray[np.bool_]

    @property
    def rows(self) -> Int32Array:
        return self.causal_rows + self.free_rows

    @property
    def capacity(self) -> Capacity:
        """The exact sizes of these segments."""
        return Capacity(int(self.rows.sum()), self.rows.size, self.pages.size)

    @property
    def first_rows(self) -> Int32Array:
        return (np.cumsum(self.rows) - self.rows).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes to which arrays are padded: those of one forward, or of all forwards that share a captured graph."""

    rows: int
    segments: int
    pages: int


@dataclass(frozen=True, slots=True)
class PlanShape:
    """The launch parameters, except sizes. Forwards with different shapes cannot share a captured graph."""

    block_rows: int
    splits: int
    stores: bool


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """The input of the kernels for one forward: an int32 array, and the offsets of its parts."""

    packed: Int32Array
    shape: PlanShape
    rows: int
    tiles: int
    segments_at: int
    table_at: int
    slots_at: int


def arrays_of(segments: Sequence[Segment], page_tokens: int) -> SegmentArrays:
    """The segments as arrays, with only those of their pages that are read or written."""
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
    """The most tiles of `rows` rows in `segments` segments."""
    return rows // block_rows + segments


def tile_list(segments: SegmentArrays, block_rows: int) -> Int32Array:
    """int32 [tiles, 2]: segment, and the first row of the tile in it. Tiles with the most keys come first."""
    rows = segments.rows
    counts = -(-rows // block_rows)
    owner = np.repeat(np.arange(rows.size), counts)
    first = (np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)) * block_rows
    keys = segments.context_tokens[owner] + np.minimum(first + block_rows, segments.causal_rows[owner])
    order = np.argsort(-keys, kind="stable")
    return np.stack((owner[order], first[order]), axis=1).astype(np.int32)


def choose_splits(programs: int, longest_keys: int, key_block: int, room: int) -> int:
    """Programs for each tile: a power of two that fills `room` programs, with at least two blocks of keys each."""
    splits = 1
    while splits < MAX_SPLITS and programs * splits * 2 <= room and longest_keys >= 2 * (splits * 2) * key_block:
        splits *= 2
    return splits


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


def pack(segments: SegmentArrays, page_tokens: int, shape: PlanShape, capacity: Capacity) -> PackedPlan:
    """The input of the kernels for these segments, padded. Raises ValueError if the segments exceed the capacity.

    Padding rows belong to no tile, and padding tiles belong to an empty segment, so the kernels skip both.
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
    # Only a forward that stores reads the slots, and computing them takes half of the time.
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
