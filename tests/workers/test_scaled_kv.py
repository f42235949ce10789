"""K,V in 8 bits: a scale for each token and head, which no other row changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.worker.kv import DramGeometry, DramKvDtype, KvDtype, KvGeometry
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.attention.spec import rounding, scaled

SCALED = [dtype for dtype in KvDtype if dtype.is_scaled]
each_type = pytest.mark.parametrize("dtype", SCALED)
STEP = {KvDtype.INT8: 1 / 127, KvDtype.FLOAT8: 1 / 16}
"""The largest error: int8 of the largest number of the row, float8 of the number itself, above the smallest numbers."""
TINY = 2.0**-9
"""The smallest float8, whose largest number is 448."""


def rows(seed: int, count: int = 40, dim: int = 24) -> torch.Tensor:
    """Rows that differ much in size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-20, 20, count)[torch.randperm(count, generator=generator), None]
    return torch.randn(count, dim, generator=generator) * sizes


@each_type
@given(seed=st.integers(0, 2**31))
def test_a_rounded_row_is_near_and_is_rounded_to_itself(dtype: KvDtype, seed: int) -> None:
    """Else a behaviour would have other K,V after it was stored than in the suffix of a request."""
    x, rounded = rows(seed), rounding(dtype)
    found = rounded(x)
    largest = x.abs().amax(-1, keepdim=True)
    of = largest if dtype is KvDtype.INT8 else x.abs() + largest * TINY / 448 * 16
    assert ((found - x).abs() <= STEP[dtype] * of * 1.0001).all()
    assert torch.equal(rounded(found), found)
    assert torch.equal(found.bfloat16().float(), found), "a product in bfloat16 would round it again"


@each_type
def test_the_largest_numbers_of_the_type_are_used_and_zeros_stay(dtype: KvDtype) -> None:
    largest = 127.0 if dtype is KvDtype.INT8 else 448.0
    numbers, exponents = scaled(torch.tensor([[largest, -1.0], [largest * 1.01, 1.0], [0.0, 0.0]]), dtype)
    assert numbers.float()[0].tolist() == [largest, -1.0]
    assert exponents.tolist() == [127, 128, 1]
    assert not rounding(dtype)(torch.zeros(2, 3)).any()


@each_type
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_changes_no_other(dtype: KvDtype, bad: float) -> None:
    x = rows(1)
    expected = rounding(dtype)(x)
    x[3, 2] = bad
    found = rounding(dtype)(x)
    assert not found[3].isfinite().any()
    others = torch.arange(40) != 3
    assert torch.equal(found[others], expected[others])


@each_type
@pytest.mark.parametrize("page_tokens", [1, 7, 64, 600, 1024])
@settings(max_examples=10, deadline=None)
@given(first=st.integers(1, 700), then=st.integers(1, 700), dims=st.sampled_from([(4, 4), (6, 1), (16, 24)]))
def test_an_append_leaves_the_rows_that_are_there(
    dtype: KvDtype, page_tokens: int, first: int, then: int, dims: tuple[int, int]
) -> None:
    heads, layers, total = 3, 2, first + then
    geometry = KvGeometry(layers, heads, *dims, page_tokens, dtype)
    pages = np.random.default_rng(0).permutation(geometry.pages_for(total) + 2).astype(np.int32)
    kv = PagedKv(torch.full((pages.size, geometry.page_bytes), 255, dtype=torch.uint8), geometry)
    generator = torch.Generator().manual_seed(first)
    # The later rows are much larger.
    sizes = torch.where(torch.arange(total) < first, 1.0, 1000.0)[:, None, None]
    k, v = (torch.randn(total, heads, dim, generator=generator) * sizes for dim in dims)
    for start, end in ((0, first), (first, total)):
        part = Segment(pages, start, end - start, 0, stores=True, total_tokens=total)
        kv.write(1, kv.slots([part]), k[start:end], v[start:end])
        (spans,) = kv.spans([Segment(pages, end, 0, 1, stores=False, total_tokens=end)])
        read = [kv.read(1, span, torch.float32) for span in spans]
        for x, found in zip((k, v), zip(*read, strict=True), strict=True):
            assert torch.equal(torch.cat(found, 1).transpose(0, 1), rounding(dtype)(x[:end]))


@each_type
def test_a_page_has_a_byte_for_each_number_and_each_scale(dtype: KvDtype) -> None:
    geometry = KvGeometry(5, 4, 128, 64, 16, dtype)
    assert geometry.bytes_per_token == 5 * 4 * (128 + 64 + 2)
    assert geometry.page_bytes == 5 * geometry.layer_bytes == 16 * geometry.bytes_per_token
    for dram in DramKvDtype:
        assert DramGeometry(geometry, dram).page_bytes == geometry.page_bytes
