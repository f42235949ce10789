"""Attention on cached K,V in machine code equals the formula, for any rows, lengths, pages and threads."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from relaygr.worker.device import CpuDevice, set_threads
from relaygr.worker.kv import KvDtype, KvGeometry
from relaygr.worker.model.attention.blocked import BlockedAttention
from relaygr.worker.model.attention.choose import choose_attention
from relaygr.worker.model.attention.compiled import NARROW_BLOCKS, WIDE_BLOCKS, Block, CompiledAttention
from tests.worlds.attention import LAYER, MIXED, SHAPES, RaggedForward, SegmentRows

pytestmark = pytest.mark.skipif(
    find_spec("llvmlite") is None or not CompiledAttention.fits(KvGeometry(1, 1, 16, 16, 16, KvDtype.FLOAT32)),
    reason="no llvmlite, or a CPU without AVX2",
)
DEVICE = CpuDevice()


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    set_threads(before)


@pytest.fixture(params=[WIDE_BLOCKS, NARROW_BLOCKS], ids=["for AVX-512", "for AVX2"])
def blocks(request: pytest.FixtureRequest) -> tuple[Block, ...]:
    """Both forms run on either processor."""
    found: tuple[Block, ...] = request.param
    return found


def attended(forward: RaggedForward, blocks: tuple[Block, ...]) -> torch.Tensor:
    attention = BlockedAttention(forward.spec, compiled=CompiledAttention(forward.kv.geometry, blocks))
    return attention.begin(forward.kv, forward.segments).attend(LAYER, forward.q, forward.k, forward.v)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("runs", SHAPES.values(), ids=SHAPES.keys())
def test_rows_get_what_the_formula_gives(runs: list[SegmentRows], threads: int, blocks: tuple[Block, ...]) -> None:
    set_threads(threads)
    forward = RaggedForward(runs, dqk=24, dv=32, page_tokens=16, device=DEVICE)
    assert forward.error(attended(forward, blocks)) <= 2e-6


@pytest.mark.parametrize("page_tokens", [16, 48, 64, 128])
@pytest.mark.parametrize(("heads", "dqk", "dv"), [(1, 1, 16), (3, 100, 48), (4, 64, 64)])
def test_any_pages_and_dimensions(page_tokens: int, heads: int, dqk: int, dv: int, blocks: tuple[Block, ...]) -> None:
    chunks = [SegmentRows(513, 16, 0), SegmentRows(0, 64, 0), SegmentRows(100, 600, 0)]
    runs = [*MIXED, *chunks, SegmentRows(200, 0, 300), SegmentRows(64, 1, 1)]
    forward = RaggedForward(runs, heads=heads, dqk=dqk, dv=dv, page_tokens=page_tokens, device=DEVICE)
    assert forward.error(attended(forward, blocks)) <= 2e-6


def test_what_lies_behind_the_context_in_its_last_page_does_not_matter(blocks: tuple[Block, ...]) -> None:
    forward = RaggedForward([SegmentRows(70, 0, 5)], dqk=16, dv=16, page_tokens=64, device=DEVICE)
    expected = attended(forward, blocks)
    page = int(forward.segments[0].pages[1])
    forward.kv.k(LAYER)[page, :, 6:] = float("nan")
    forward.kv.v(LAYER)[page, :, 6:] = float("nan")
    assert torch.equal(attended(forward, blocks), expected)


@pytest.mark.parametrize("shift", [-30.0, -8.0, 8.0, 200.0])
def test_scores_far_from_zero(shift: float, blocks: tuple[Block, ...]) -> None:
    forward = RaggedForward([SegmentRows(70, 0, 20)], dqk=16, dv=16, page_tokens=16, device=DEVICE)
    for keys in (forward.k, forward.kv.k(LAYER)):
        keys[..., 0] = shift / 4
    forward.q[..., 0] = 16.0
    forward.q[..., 1:] *= 0.01
    assert forward.error(attended(forward, blocks)) <= 2e-6 + 2e-7 * abs(shift)


def test_a_row_that_is_not_finite_stays_so(blocks: tuple[Block, ...]) -> None:
    forward = RaggedForward([SegmentRows(70, 0, 20)], dqk=16, dv=16, page_tokens=16, device=DEVICE)
    forward.q[3, 0, 2] = float("nan")
    found = attended(forward, blocks).view(20, 2, 16)
    assert not found[3, 0].isfinite().any()
    assert found[3, 1].isfinite().all() and found[4:].isfinite().all()


def test_it_is_chosen_for_float32_pages_of_whole_blocks() -> None:
    forward = RaggedForward([SegmentRows(20, 1, 0)], dqk=16, dv=16, page_tokens=64, device=DEVICE)
    chosen = choose_attention(forward.spec, None, forward.kv.geometry, DEVICE)
    assert chosen.name.endswith("context compiled")
    for geometry in (KvGeometry(1, 2, 16, 16, 24, KvDtype.FLOAT32), KvGeometry(1, 2, 16, 16, 64, KvDtype.BFLOAT16)):
        assert not choose_attention(forward.spec, None, geometry, DEVICE).name.endswith("compiled")


def test_the_same_rows_get_the_same_bits_on_each_call(blocks: tuple[Block, ...]) -> None:
    set_threads(3)
    forward = RaggedForward([SegmentRows(700, 0, 40)], heads=2, dqk=16, dv=16, page_tokens=64, device=DEVICE)
    first = attended(forward, blocks)
    assert all(np.array_equal(attended(forward, blocks), first) for _ in range(20))
