"""K,V in scattered pages are read in blocks as they were written, for any sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relaygr.worker.kv import KvDtype, KvGeometry
from relaygr.worker.model.attention.paged_kv import KEY_BLOCK, PagedKv
from relaygr.worker.model.attention.segments import Segment

LAYERS, HEADS = 2, 3
dims = st.sampled_from([1, 4, 6])


def rows(tokens: int, dim: int, layer: int) -> torch.Tensor:
    """K or V of some tokens of which no two numbers are the same."""
    numbers = torch.arange(tokens * HEADS * dim, dtype=torch.float32) + layer * 1e6 + dim * 1e5
    return numbers.view(tokens, HEADS, dim)


def segments_of(lengths: list[int], page_tokens: int) -> tuple[list[Segment], int]:
    """For each length a segment that stores all its tokens on shuffled pages of its own; and the number of pages."""
    counts = [-(-length // page_tokens) for length in lengths]
    scattered = np.random.default_rng(0).permutation(sum(counts) + 3).astype(np.int32)
    parts = np.split(scattered, np.cumsum(counts))
    segments = [
        Segment(pages, context_tokens=0, causal_rows=length, free_rows=0, stores=True, total_tokens=length)
        for length, pages in zip(lengths, parts, strict=False)
    ]
    return segments, scattered.size


def as_context(written: Segment) -> Segment:
    """A segment with one candidate after the tokens that another segment stored."""
    length = written.causal_rows
    return Segment(written.pages, length, causal_rows=0, free_rows=1, stores=False, total_tokens=length)


@pytest.mark.slow
@pytest.mark.parametrize("page_tokens", [1, 7, 64, 512, 600, 1000, 1024])
@given(lengths=st.lists(st.integers(1, 1_300), min_size=1, max_size=3), k_dim=dims, v_dim=dims)
def test_tokens_that_were_written_one_by_one_are_read_in_blocks(
    page_tokens: int, lengths: list[int], k_dim: int, v_dim: int
) -> None:
    geometry = KvGeometry(LAYERS, HEADS, k_dim, v_dim, page_tokens, KvDtype.FLOAT32)
    written, num_pages = segments_of(lengths, page_tokens)
    kv = PagedKv(torch.full((num_pages, geometry.page_bytes), 255, dtype=torch.uint8), geometry)
    slots = kv.slots(written)
    tokens = sum(lengths)
    for layer in range(LAYERS):
        kv.write(layer, slots, rows(tokens, k_dim, layer), rows(tokens, v_dim, layer))

    first = 0
    for length, spans in zip(lengths, kv.spans([as_context(segment) for segment in written]), strict=True):
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == length
        for span in spans:
            assert span.end - span.start <= KEY_BLOCK
            own = slice(first + span.start, first + span.end)
            for layer in range(LAYERS):
                keys, values = kv.read(layer, span, torch.float32)
                assert torch.equal(keys, rows(tokens, k_dim, layer)[own].transpose(0, 1))
                assert torch.equal(values, rows(tokens, v_dim, layer)[own].transpose(0, 1))
        first += length


def test_blocks_are_widened_as_they_are_read() -> None:
    geometry = KvGeometry(1, HEADS, 4, 4, 8, KvDtype.BFLOAT16)
    (segment,), num_pages = segments_of([20], 8)
    kv = PagedKv(torch.zeros((num_pages, geometry.page_bytes), dtype=torch.uint8), geometry)
    kv.write(0, kv.slots([segment]), rows(20, 4, 0), rows(20, 4, 0))
    ((span,),) = kv.spans([as_context(segment)])
    keys, _ = kv.read(0, span, torch.float32)
    assert keys.dtype is torch.float32
    assert torch.equal(keys, rows(20, 4, 0).bfloat16().float().transpose(0, 1))


def test_a_segment_without_context_has_no_blocks() -> None:
    geometry = KvGeometry(1, HEADS, 4, 4, 8, KvDtype.FLOAT32)
    kv = PagedKv(torch.zeros((1, geometry.page_bytes), dtype=torch.uint8), geometry)
    assert kv.spans([Segment(np.empty(0, np.int32), 0, 5, 0, stores=False, total_tokens=5)]) == [()]
    assert kv.spans([]) == []
