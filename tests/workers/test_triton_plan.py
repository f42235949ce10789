"""The division of a forward into programs: every row once, the longest first, and the device filled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from relaygr.worker.model.attention.mask import AttentionMask, Visible
from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.triton.plan import (
    ITEM_FIELDS,
    JOIN_FIELDS,
    PLAIN_MASK,
    SEGMENT_FIELDS,
    Capacity,
    MaskOptions,
    PlanShape,
    SegmentArrays,
    arrays_of,
    pack,
    split_counts,
    tiles_bound,
    tiles_of,
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


masks = st.builds(MaskOptions, st.integers(0, 4), st.sampled_from([0, 5, 60]), st.sampled_from([0, 7]))


@given(segments, st.sampled_from([16, 32, 64, 128]))
def test_tiles_hold_every_row_once_and_the_longest_come_first(made: list[Segment], block_rows: int) -> None:
    arrays = arrays_of(made, PAGE_TOKENS)
    tiles = tiles_of(arrays, block_rows, PLAIN_MASK)
    pairs = list(zip(tiles.segments.tolist(), tiles.first_rows.tolist(), strict=True))
    found = [
        (segment, row) for segment, first in pairs for row in range(first, min(first + block_rows, made[segment].rows))
    ]
    assert sorted(found) == [(number, row) for number, segment in enumerate(made) for row in range(segment.rows)]
    keys = [
        made[segment].context_tokens + min(first + block_rows, made[segment].causal_rows) for segment, first in pairs
    ]
    assert keys == sorted(keys, reverse=True) == tiles.keys.tolist()
    assert len(pairs) <= tiles_bound(arrays.capacity.rows, len(made), block_rows)


@pytest.mark.slow
@settings(max_examples=30)
@given(segments, masks)
def test_the_keys_of_a_tile_are_those_from_the_first_to_the_last_that_the_mask_shows(
    made: list[Segment], mask: MaskOptions
) -> None:
    spec = AttentionSpec(
        1, 1, 1, 1.0, 1.0, mask.contextual_tokens, mask.max_attn_len, mask.min_full_attn_len, mask.group_size
    )
    tiles = tiles_of(arrays_of(made, PAGE_TOKENS), 16, mask)
    for owner, first, keys in zip(tiles.segments, tiles.first_rows, tiles.keys, strict=True):
        segment = made[owner]
        rows = range(segment.context_tokens + first, segment.context_tokens + min(first + 16, segment.rows))
        seen = visible_history(AttentionMask(spec, segment, torch.device("cpu")), rows, segment.causal_tokens)
        count = int(seen[-1] - seen[0]) + 1 if len(seen) else 0
        # Rows of a window may begin before a candidate's: the kernel walks all keys between.
        assert count <= keys <= segment.causal_tokens, (segment, first)


def visible_history(mask: AttentionMask, rows: range, tokens: int) -> NDArray[np.int64]:
    """The tokens of the history that any of the rows sees."""
    seen = np.zeros(tokens, dtype=np.bool_)
    for row in rows if tokens else ():
        tile = mask.tile(range(row, row + 1), range(tokens))
        seen |= tile.numpy()[0] if isinstance(tile, torch.Tensor) else tile is Visible.ALL
    return np.flatnonzero(seen)


@given(segments, st.integers(0, 50), st.integers(0, 5), st.integers(0, 9), st.sampled_from([0, 3, 66]))
def test_a_packed_plan_begins_its_parts_at_16_bytes_and_pads_with_nothing(
    made: list[Segment], rows: int, more: int, pages: int, extra: int
) -> None:
    arrays = arrays_of(made, PAGE_TOKENS)
    own = arrays.capacity
    plan = pack(
        arrays,
        PAGE_TOKENS,
        PlanShape(32, extra, True),
        Capacity(own.rows + rows, own.segments + more, own.pages + pages),
        least_keys=16,
    )
    starts = (plan.segments_at, plan.joins_at, plan.table_at, plan.slots_at, plan.key_times_at, plan.following_at)
    assert all(start % 4 == 0 for start in (*starts, plan.packed.size))
    items = plan.packed[: ITEM_FIELDS * plan.items].reshape(-1, ITEM_FIELDS)
    described = plan.packed[plan.segments_at :][: (own.segments + more + 1) * SEGMENT_FIELDS].reshape(
        -1, SEGMENT_FIELDS
    )
    tiles = tiles_of(arrays, 32, PLAIN_MASK)
    used = int(split_counts(tiles.keys, extra, 16).sum())
    assert bool((described[items[used:, 0], 2] == 0).all()), "a padding item belongs to a segment with rows"
    slots = plan.packed[plan.slots_at :][: plan.rows]
    assert bool((slots[own.rows :] == -1).all())
    assert int((slots >= 0).sum()) == sum(segment.causal_rows for segment in made if segment.stores)


@given(segments, st.sampled_from([1, 3, 20, 66]))
def test_each_row_of_the_result_is_written_once_by_an_item_or_by_a_join(made: list[Segment], extra: int) -> None:
    arrays = arrays_of(made, PAGE_TOKENS)
    plan = pack(arrays, PAGE_TOKENS, PlanShape(16, extra, True), arrays.capacity, least_keys=16)
    items = plan.packed[: ITEM_FIELDS * plan.items].reshape(-1, ITEM_FIELDS)
    joins = plan.packed[plan.joins_at :][: JOIN_FIELDS * plan.joins].reshape(-1, JOIN_FIELDS)
    written = np.zeros(plan.result_rows, dtype=np.int64)
    for segment, first, part, parts, target in items:
        rows = min(16, int(arrays.rows[segment]) - first) if segment < len(made) else 0
        assert 0 <= part < parts
        written[target : target + rows] += 1
    for partial, parts, target, rows in joins:
        for part in range(parts):
            assert bool((written[partial + part * 16 :][:rows] == 1).all()), "a join adds rows that no item wrote"
        written[target : target + rows] += 1
    rows = int(arrays.rows.sum())
    assert bool((written[:rows] == 1).all())


SHARES = {
    "one request alone fills the device": ([16_384] * 2, 66, [32, 32]),
    "a request on a long prefix beside a chunk": ([16_384, *[2_048] * 8], 66, [32, *[4] * 8]),
    "a long request among many tiles": ([16_384, *[512] * 500], 66, [3, *[1] * 500]),
    "equal tiles that nearly fill it": ([4_096] * 60, 66, [1] * 60),
    "equal tiles that fill half of it": ([4_096] * 33, 66, [2] * 33),
    "too few keys to share": ([200], 66, [1]),
    "never more than the limit": ([100_000], 1_000, [64]),
    "a device without room": ([16_384], 0, [1]),
    "no tile": ([], 66, []),
}


@pytest.mark.parametrize(("keys", "room", "parts"), SHARES.values(), ids=SHARES.keys())
def test_the_keys_of_each_tile_are_split_by_its_own_length(keys: list[int], room: int, parts: list[int]) -> None:
    assert split_counts(np.array(keys, dtype=np.int64), room).tolist() == parts


@given(st.lists(st.integers(0, 20_000), max_size=30), st.integers(0, 300))
def test_splitting_adds_no_more_items_than_there_is_room(keys: list[int], room: int) -> None:
    assert split_counts(np.array(keys, dtype=np.int64), room).sum() - len(keys) <= room


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
            pack(arrays, PAGE_TOKENS, PlanShape(16, 0, False), capacity)


def test_an_arena_that_cannot_be_addressed_is_refused() -> None:
    one = np.array([1], dtype=np.int32)
    arrays = SegmentArrays(one * 0, one, one * 0, one, one * 0, np.array([2**30], dtype=np.int32), np.array([True]))
    with pytest.raises(ValueError, match="cannot be addressed"):
        pack(arrays, PAGE_TOKENS, PlanShape(16, 0, True), arrays.capacity)
