"""Attention on cached K,V in machine code equals the formula, for any rows, lengths, pages and threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from relaygr.worker.device import CpuDevice, set_threads
from relaygr.worker.kv import KvDtype, KvGeometry
from relaygr.worker.model.attention.blocked import BlockedAttention
from relaygr.worker.model.attention.choose import choose_attention
from relaygr.worker.model.attention.spec import spec_of
from relaygr.worker.model.compiled.attention import CompiledAttention
from relaygr.worker.model.compiled.form import NARROW_BLOCKS, WIDE_BLOCKS, Block
from relaygr.worker.model.options import ComputeDtype
from tests.worlds.attention import LAYER, MIXED, SHAPES, RaggedForward, SegmentRows
from tests.worlds.model import small_config

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


@dataclass(frozen=True, slots=True)
class Form:
    """One form of the machine code, and the largest error that it may have."""

    blocks: tuple[Block, ...]
    bfloat16: bool = False
    tolerance: float = 2e-6

    def attended(self, forward: RaggedForward) -> torch.Tensor:
        compiled = CompiledAttention(forward.kv.geometry, self.blocks, self.bfloat16)
        attention = BlockedAttention(forward.spec, compiled=compiled)
        return attention.begin(forward.kv, forward.segments).attend(LAYER, forward.q, forward.k, forward.v)


IN_BFLOAT16 = Form(WIDE_BLOCKS, True, 2**-7)
HAS_BFLOAT16 = CompiledAttention.in_bfloat16(KvGeometry(1, 1, 16, 16, 16, KvDtype.FLOAT32))
needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="a CPU without products in bfloat16")


@pytest.fixture(
    params=[
        pytest.param(Form(WIDE_BLOCKS), id="for AVX-512"),
        pytest.param(Form(NARROW_BLOCKS), id="for AVX2"),
        pytest.param(IN_BFLOAT16, id="in bfloat16", marks=needs_bfloat16),
    ]
)
def form(request: pytest.FixtureRequest) -> Form:
    """Both forms of float32 run on either processor."""
    found: Form = request.param
    return found


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("runs", SHAPES.values(), ids=SHAPES.keys())
def test_rows_get_what_the_formula_gives(runs: list[SegmentRows], threads: int, form: Form) -> None:
    set_threads(threads)
    forward = RaggedForward(runs, dqk=24 if not form.bfloat16 else 32, dv=32, page_tokens=16, device=DEVICE)
    assert forward.error(form.attended(forward)) <= form.tolerance


@pytest.mark.parametrize("page_tokens", [16, 48, 64, 128])
@pytest.mark.parametrize(("heads", "dqk", "dv"), [(1, 1, 16), (3, 100, 48), (2, 16, 16), (4, 64, 64)])
def test_any_pages_and_dimensions(page_tokens: int, heads: int, dqk: int, dv: int, form: Form) -> None:
    if form.bfloat16 and dqk % 16:
        pytest.skip("bfloat16 needs whole vectors of K")
    chunks = [SegmentRows(513, 16, 0), SegmentRows(0, 64, 0), SegmentRows(100, 600, 0)]
    runs = [*MIXED, *chunks, SegmentRows(200, 0, 300), SegmentRows(64, 1, 1)]
    forward = RaggedForward(runs, heads=heads, dqk=dqk, dv=dv, page_tokens=page_tokens, device=DEVICE)
    assert forward.error(form.attended(forward)) <= form.tolerance


def test_what_lies_behind_the_context_in_its_last_page_does_not_matter(form: Form) -> None:
    forward = RaggedForward([SegmentRows(70, 0, 5)], dqk=16, dv=16, page_tokens=64, device=DEVICE)
    expected = form.attended(forward)
    page = int(forward.segments[0].pages[1])
    forward.kv.k(LAYER)[page, :, 6:] = float("nan")
    forward.kv.v(LAYER)[page, :, 6:] = float("nan")
    assert torch.equal(form.attended(forward), expected)


@pytest.mark.parametrize("shift", [-30.0, -8.0, 8.0, 200.0])
def test_scores_far_from_zero(shift: float, form: Form) -> None:
    forward = RaggedForward([SegmentRows(70, 0, 20)], dqk=16, dv=16, page_tokens=16, device=DEVICE)
    for keys in (forward.k, forward.kv.k(LAYER)):
        keys[..., 0] = shift / 4
    forward.q[..., 0] = 16.0
    forward.q[..., 1:] *= 0.01
    assert forward.error(form.attended(forward)) <= form.tolerance + 2e-7 * abs(shift)


def test_a_row_that_is_not_finite_stays_so(form: Form) -> None:
    forward = RaggedForward([SegmentRows(70, 0, 20)], dqk=16, dv=16, page_tokens=16, device=DEVICE)
    forward.q[3, 0, 2] = float("nan")
    found = form.attended(forward).view(20, 2, 16)
    assert not found[3, 0].isfinite().any()
    assert found[3, 1].isfinite().all() and found[4:].isfinite().all()


def test_it_is_chosen_for_float32_pages_of_whole_blocks() -> None:
    forward = RaggedForward([SegmentRows(20, 1, 0)], dqk=16, dv=16, page_tokens=64, device=DEVICE)
    chosen = choose_attention(forward.spec, None, forward.kv.geometry, DEVICE)
    assert chosen.name.endswith("context compiled")
    for geometry in (KvGeometry(1, 2, 16, 16, 24, KvDtype.FLOAT32), KvGeometry(1, 2, 16, 16, 64, KvDtype.BFLOAT16)):
        assert not choose_attention(forward.spec, None, geometry, DEVICE).name.endswith("compiled")


def test_the_same_rows_get_the_same_bits_on_each_call(form: Form) -> None:
    set_threads(3)
    forward = RaggedForward([SegmentRows(700, 0, 40)], heads=2, dqk=16, dv=16, page_tokens=64, device=DEVICE)
    first = form.attended(forward)
    assert all(np.array_equal(form.attended(forward), first) for _ in range(20))


def in_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


@needs_bfloat16
@pytest.mark.parametrize("runs", SHAPES.values(), ids=SHAPES.keys())
def test_of_numbers_that_bfloat16_holds_only_the_weights_are_rounded(runs: list[SegmentRows]) -> None:
    """Their errors are independent, so they are a small part of a sum of many keys."""
    forward = RaggedForward(runs, dqk=64, dv=32, page_tokens=16, device=DEVICE)
    for numbers in (forward.q, forward.k, forward.v, forward.kv.k(LAYER), forward.kv.v(LAYER)):
        numbers.copy_(in_bfloat16(numbers))
    assert forward.error(IN_BFLOAT16.attended(forward)) <= 2**-8


@needs_bfloat16
def test_if_bfloat16_does_not_compile_float32_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = CompiledAttention.__init__

    def init(self: CompiledAttention, geometry: KvGeometry, bfloat16: bool) -> None:
        if bfloat16:
            raise RuntimeError("no such instruction")
        compiled(self, geometry)

    monkeypatch.setattr(CompiledAttention, "__init__", init)
    forward = RaggedForward([SegmentRows(20, 1, 0)], dqk=16, dv=16, page_tokens=64, device=DEVICE)
    chosen = choose_attention(replace(forward.spec, may_round=True), None, forward.kv.geometry, DEVICE)
    assert chosen.name.endswith("context compiled")


@needs_bfloat16
def test_bfloat16_is_chosen_for_products_in_int8_only() -> None:
    forward = RaggedForward([SegmentRows(20, 1, 0)], dqk=16, dv=16, page_tokens=64, device=DEVICE)
    geometry, may_round = forward.kv.geometry, replace(forward.spec, may_round=True)
    assert choose_attention(may_round, None, geometry, DEVICE).name.endswith("context compiled in bfloat16")
    assert choose_attention(forward.spec, None, geometry, DEVICE).name.endswith("context compiled")
    odd = replace(geometry, attention_dim=24)
    assert choose_attention(may_round, None, odd, DEVICE).name.endswith("context compiled")
    assert spec_of(small_config(), ComputeDtype.INT8).may_round
    assert not spec_of(small_config(), ComputeDtype.FLOAT32).may_round
