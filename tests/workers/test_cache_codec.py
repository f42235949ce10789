"""DRAM pages in fewer bytes: the decoded numbers, their error, and how many more prefixes fit."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relaygr.worker.cache import CacheConfig, Fill, Hit, PendingOutcome, PendingPrefix, SpillOutcome
from relaygr.worker.cache.build import build_cache
from relaygr.worker.cache.codec import PageCodec, make_codec
from relaygr.worker.device import CpuDevice
from relaygr.worker.kv import DramGeometry, DramKvDtype, KvDtype, KvGeometry
from tests.worlds.cache import LAYOUT, make_key

LOSSY = [
    (KvDtype.FLOAT32, DramKvDtype.BFLOAT16),
    (KvDtype.FLOAT32, DramKvDtype.INT8),
    (KvDtype.BFLOAT16, DramKvDtype.INT8),
]


def geometry(dtype: KvDtype, attention_dim: int = 8, hidden_dim: int = 12, page_tokens: int = 16) -> KvGeometry:
    return KvGeometry(
        num_layers=3, num_heads=2, attention_dim=attention_dim, hidden_dim=hidden_dim, page_tokens=page_tokens,
        dtype=dtype,
    )  # fmt: skip


def codec_of(kv: KvGeometry, dtype: DramKvDtype) -> PageCodec:
    codec = make_codec(DramGeometry(kv, dtype))
    assert codec is not None
    return codec


def random_pages(kv: KvGeometry, seed: int, pages: int = 4) -> torch.Tensor:
    """Pages whose rows differ much in size: uint8 [pages, layers, layer_bytes]."""
    random = np.random.default_rng(seed)
    elements = kv.layer_bytes // kv.dtype.size_bytes
    values = random.normal(size=(pages, kv.num_layers, elements)) * 10.0 ** random.integers(-3, 3, elements)
    dtype = torch.float32 if kv.dtype is KvDtype.FLOAT32 else torch.bfloat16
    return torch.from_numpy(values).to(dtype).view(torch.uint8)


def round_trip(kv: KvGeometry, dtype: DramKvDtype, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored pages, and the decoded ones."""
    dram = DramGeometry(kv, dtype)
    stored = torch.zeros((pages.shape[0], kv.num_layers, dram.layer_bytes), dtype=torch.uint8)
    back = torch.zeros_like(pages)
    codec = codec_of(kv, dtype)
    codec.encode(pages, stored)
    codec.decode(stored, back)
    return stored, back


def rows(kv: KvGeometry, pages: torch.Tensor) -> list[torch.Tensor]:
    """K and V as float64 [pages, layers, heads, tokens, dim]."""
    values = pages.view(torch.float32 if kv.dtype is KvDtype.FLOAT32 else torch.bfloat16).double()
    split = kv.num_heads * kv.page_tokens * kv.attention_dim
    shape = (pages.shape[0], kv.num_layers, kv.num_heads, kv.page_tokens, -1)
    return [values[..., :split].reshape(shape), values[..., split:].reshape(shape)]


@pytest.mark.slow
@given(st.integers(0, 2**31), st.sampled_from([KvDtype.FLOAT32, KvDtype.BFLOAT16]))
def test_int8_is_off_by_half_a_scale_at_most(seed: int, dtype: KvDtype) -> None:
    kv = geometry(dtype)
    pages = random_pages(kv, seed)
    _, back = round_trip(kv, DramKvDtype.INT8, pages)
    # The rows of a bfloat16 page are rounded again when they are decoded.
    rounding = 2.0**-8 if dtype is KvDtype.BFLOAT16 else 1e-6
    for exact, decoded in zip(rows(kv, pages), rows(kv, back), strict=True):
        largest = exact.abs().amax(-1, keepdim=True)
        assert bool(((decoded - exact).abs() <= largest / 254 + exact.abs() * rounding + largest * 1e-6).all())


@given(st.integers(0, 2**31))
def test_bfloat16_is_off_by_its_rounding_at_most(seed: int) -> None:
    kv = geometry(KvDtype.FLOAT32)
    pages = random_pages(kv, seed)
    _, back = round_trip(kv, DramKvDtype.BFLOAT16, pages)
    for exact, decoded in zip(rows(kv, pages), rows(kv, back), strict=True):
        assert bool(((decoded - exact).abs() <= exact.abs() * 2.0**-8).all())


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "dram"), LOSSY)
@given(seed=st.integers(0, 2**31))
def test_spilling_again_what_was_reloaded_does_not_drift(dtype: KvDtype, dram: DramKvDtype, seed: int) -> None:
    kv = geometry(dtype)
    _, first = round_trip(kv, dram, random_pages(kv, seed))
    latest = first
    for _ in range(5):
        _, latest = round_trip(kv, dram, latest)
    for once, often in zip(rows(kv, first), rows(kv, latest), strict=True):
        assert torch.allclose(once, often, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "dram"), LOSSY)
def test_zeros_stay_zeros(dtype: KvDtype, dram: DramKvDtype) -> None:
    kv = geometry(dtype)
    _, back = round_trip(kv, dram, torch.zeros((2, kv.num_layers, kv.layer_bytes), dtype=torch.uint8))
    assert int(back.sum()) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_stays_so_and_affects_only_its_own_row(value: float) -> None:
    """A NaN that became a number would turn a broken prefix into plausible scores."""
    kv = geometry(KvDtype.FLOAT32)
    clean = random_pages(kv, 1)
    spoilt = clean.clone()
    keys = rows_in_place(kv, spoilt)
    keys[1, 2, 0, 5, 3] = value
    _, back = round_trip(kv, DramKvDtype.INT8, spoilt)
    _, expected = round_trip(kv, DramKvDtype.INT8, clean)
    decoded, others = rows_in_place(kv, back), rows_in_place(kv, expected)
    assert not bool(torch.isfinite(decoded[1, 2, 0, 5]).all())
    decoded[1, 2, 0, 5] = others[1, 2, 0, 5]
    assert torch.equal(back, expected)


def rows_in_place(kv: KvGeometry, pages: torch.Tensor) -> torch.Tensor:
    """K [pages, layers, heads, tokens, dim], as a view of the pages."""
    split = kv.num_heads * kv.page_tokens * kv.attention_dim
    keys = pages.view(torch.float32)[..., :split]
    return keys.view(pages.shape[0], kv.num_layers, kv.num_heads, kv.page_tokens, kv.attention_dim)


@pytest.mark.parametrize(("dtype", "dram"), LOSSY)
def test_a_page_layer_by_layer_is_the_page(dtype: KvDtype, dram: DramKvDtype) -> None:
    kv = geometry(dtype)
    pages = random_pages(kv, 2)
    stored, back = round_trip(kv, dram, pages)
    codec = codec_of(kv, dram)
    by_layer_stored, by_layer_back = torch.zeros_like(stored), torch.zeros_like(back)
    for layer in range(kv.num_layers):
        codec.encode(pages[:, layer : layer + 1], by_layer_stored[:, layer : layer + 1])
        codec.decode(by_layer_stored[:, layer : layer + 1], by_layer_back[:, layer : layer + 1])
    assert torch.equal(by_layer_stored, stored)
    assert torch.equal(by_layer_back, back)


class TestSizes:
    @pytest.mark.parametrize("dtype", list(KvDtype))
    def test_an_exact_tier_needs_no_codec(self, dtype: KvDtype) -> None:
        kv = geometry(dtype)
        same = DramGeometry(kv, DramKvDtype.SAME)
        assert (same.is_exact, same.page_bytes, make_codec(same)) == (True, kv.page_bytes, None)

    def test_bfloat16_of_bfloat16_is_the_same(self) -> None:
        kv = geometry(KvDtype.BFLOAT16)
        dram = DramGeometry(kv, DramKvDtype.BFLOAT16)
        assert (dram.is_exact, dram.page_bytes) == (True, kv.page_bytes)

    def test_bfloat16_is_half_of_float32(self) -> None:
        kv = geometry(KvDtype.FLOAT32)
        assert 2 * DramGeometry(kv, DramKvDtype.BFLOAT16).page_bytes == kv.page_bytes

    @pytest.mark.parametrize(("dtype", "times"), [(KvDtype.FLOAT32, 3.7), (KvDtype.BFLOAT16, 1.88)])
    def test_int8_holds_more_prefixes_with_heads_of_64(self, dtype: KvDtype, times: float) -> None:
        kv = geometry(dtype, attention_dim=64, hidden_dim=64)
        dram = DramGeometry(kv, DramKvDtype.INT8)
        # A byte a number, and 4 bytes for each 64 of them.
        assert dram.page_bytes == 3 * 2 * 16 * (64 + 64 + 2 * 4)
        assert kv.page_bytes / dram.page_bytes > times

    @given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
    def test_scales_are_aligned_whatever_the_dimensions(self, attention: int, hidden: int, tokens: int) -> None:
        kv = geometry(KvDtype.FLOAT32, attention, hidden, tokens)
        assert DramGeometry(kv, DramKvDtype.INT8).layer_bytes % 4 == 0
        pages = random_pages(kv, 3)
        _, back = round_trip(kv, DramKvDtype.INT8, pages)
        assert bool(torch.isfinite(back.view(torch.float32)).all())


@pytest.mark.parametrize(("dtype", "dram"), LOSSY)
def test_a_prefix_reloaded_from_smaller_pages_has_the_values_of_the_codec(dtype: KvDtype, dram: DramKvDtype) -> None:
    kv = geometry(dtype)
    built = build_cache(CpuDevice(), CacheConfig(DramGeometry(kv, dram), LAYOUT, 8, 16))
    cache, key = built.cache, make_key(length=100)
    try:
        assert built.dram_arena is not None
        assert built.dram_arena.nbytes == 16 * DramGeometry(kv, dram).page_bytes < 16 * kv.page_bytes
        fill = cache.reserve(key, 0)
        assert isinstance(fill, Fill)
        pages = random_pages(kv, 4, fill.pages.size)
        built.hbm_arena[fill.pages.tolist()] = pages.flatten(1)
        fill.progress(fill.tokens)
        handle = fill.publish(1)
        assert handle is not None
        assert cache.transfers.spill(handle) is SpillOutcome.STARTED
        cache.release(handle)
        _wait(lambda: cache.peek(key).dram_behaviours == 100)
        other = cache.reserve(make_key("bob", 110), 2)
        assert isinstance(other, Fill)
        built.hbm_arena[other.pages.tolist()] = 255
        other.abort()
        pending = cache.transfers.start_reload(key, 100, 3)
        assert isinstance(pending, PendingPrefix)
        _wait(lambda: pending.done)
        assert pending.outcome is PendingOutcome.PUBLISHED
        found = cache.acquire(key, 4)
        assert isinstance(found, Hit)
        back = built.hbm_arena[found.handle.pages.tolist()].view(pages.shape)
        assert torch.equal(back, round_trip(kv, dram, pages)[1])
        cache.release(found.handle)
    finally:
        cache.close()


def _wait(condition: Callable[[], bool]) -> None:
    """Waits for the copy threads."""
    step = threading.Event()
    for _ in range(2000):
        if condition():
            return
        step.wait(0.005)
    raise AssertionError("did not settle")
