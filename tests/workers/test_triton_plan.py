"""The division of a forward into programs: every row once, the longest first, and the device filled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.triton.plan import (
    SEGMENT_FIELDS,
    Capacity,
    PlanShape,
    SegmentArrays,
    arrays_of,
    choose_splits,
    pack,
    tile_list,
    tiles_bound,
)

PAGE_TOKENS = 8
segments = st.lists(
    st.builds(
        lambda context, causal, free: Segment(
            np.arange(-(-(context + causal) // PAGE_TOKENS), dtype=np.int32),
            context,
            causal,
            free,
            stores=free == 0,
            total_tokens=context + causal,
        ),
        st.integers(0, 300),
        st.integers(0, 200),
        st.integers(0, 90),
    ),
    max_size=8,
)


@given(segments, st.sampled_from([16, 32, 64, 128]))
def test_tiles_hold_every_row_once_and_the_longest_come_first(made: list[Segment], block_rows: int) -> None:
    arrays = arrays_of(made, PAGE_TOKENS)
    tiles = tile_list(arrays, block_rows)
    found = [
        (segment, row) for segment, first in tiles for row in range(first, min(first + block_rows, made[segment].rows))
    ]
    assert sorted(found) == [(number, row) for number, segment in enumerate(made) for row in range(segment.rows)]
    keys = [
        made[segment].context_tokens + min(first + block_rows, made[segment].causal_rows) for segment, first in tiles
    ]
    assert keys == sorted(keys, reverse=True)
    assert len(tiles) <= tiles_bound(arrays.capacity.rows, len(made), block_rows)


@given(segments, st.integers(0, 50), st.integers(0, 5), st.integers(0, 9))
def test_a_packed_plan_begins_its_parts_at_16_bytes_and_pads_with_nothing(
    made: list[Segment], rows: int, more: int, pages: int
) -> None:
    arrays = arrays_of(made, PAGE_TOKENS)
    own = arrays.capacity
    plan = pack(
        arrays, PAGE_TOKENS, PlanShape(32, 1, True), Capacity(own.rows + rows, own.segments + more, own.pages + pages)
    )
    assert all(start % 4 == 0 for start in (plan.segments_at, plan.table_at, plan.slots_at, plan.packed.size))
    tiles = plan.packed[: 2 * plan.tiles].reshape(-1, 2)
    described = plan.packed[plan.segments_at :][: (own.segments + more + 1) * SEGMENT_FIELDS].reshape(
        -1, SEGMENT_FIELDS
    )
    padding = tiles[len(tile_list(arrays, 32)) :]
    assert bool((described[padding[:, 0], 2] == 0).all()), "a padding tile belongs to a segment with rows"
    slots = plan.packed[plan.slots_at :][: plan.rows]
    assert bool((slots[own.rows :] == -1).all())
    assert int((slots >= 0).sum()) == sum(segment.causal_rows for segment in made if segment.stores)


@pytest.mark.parametrize(
    ("programs", "keys", "room", "expected"),
    [
        (8, 4096, 264, 16),
        (64, 4096, 264, 4),
        (132, 4096, 264, 2),
        (133, 4096, 264, 1),
        (1000, 4096, 264, 1),
        (8, 300, 264, 2),
        (8, 100, 264, 1),
        (8, 4096, 2, 1),
    ],
    ids=str,
)
def test_keys_are_split_while_there_is_room_and_two_blocks_for_each(
    programs: int, keys: int, room: int, expected: int
) -> None:
    assert choose_splits(programs, keys, 64, room) == expected


def test_only_pages_that_are_used_go_to_the_device() -> None:
    pages = np.arange(100, dtype=np.int32)
    request = Segment(pages, 9, 5, 3, stores=False, total_tokens=14)
    chunk = replace(request, free_rows=0, stores=True)
    arrays = arrays_of([chunk, request], PAGE_TOKENS)
    assert arrays.pages.tolist() == [0, 1, 0, 1]
    assert arrays.table_starts.tolist() == [0, 2]


def test_more_than_the_capacity_is_refused() -> None:
    arrays = arrays_of([Segment(np.arange(2, dtype=np.int32), 9, 0, 3, False, 9)], PAGE_TOKENS)
    for capacity in (Capacity(2, 1, 2), Capacity(3, 0, 2), Capacity(3, 1, 1)):
        with pytest.raises(ValueError, match="exceed"):
            pack(arrays, PAGE_TOKENS, PlanShape(16, 1, False), capacity)


def test_an_arena_that_cannot_be_addressed_is_refused() -> None:
    one = np.array([1], dtype=np.int32)
    arrays = SegmentArrays(one * 0, one, one * 0, one * 0, np.array([2**30], dtype=np.int32), np.array([True]))
    with pytest.raises(ValueError, match="cannot be addressed"):
        pack(arrays, PAGE_TOKENS, PlanShape(16, 1, True), arrays.capacity)
