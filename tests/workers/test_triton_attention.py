"""The Triton kernels against the formula as it stands, in float64: interpreted, or on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.triton_world import BLOCKS, DEVICE, INTERPRETED
from workers.kv import KvDtype, KvGeometry
from workers.model.attention.dtypes import torch_dtype
from workers.model.attention.paged_kv import PagedKv
from workers.model.attention.segments import Segment, place
from workers.model.attention.spec import AttentionSpec
from workers.model.attention.triton_attention import TritonAttention, TritonPass
from workers.model.attention.triton_launch import Blocks, DevicePlan, LayerPages, attend
from workers.model.attention.triton_plan import Capacity, PlanShape, arrays_of, pack

LAYERS, LAYER = 2, 1
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True)
class Run:
    """What a segment is made of."""

    context: int
    causal: int
    free: int

    @property
    def stores(self) -> bool:
        return self.free == 0


class Forward:
    """Random rows of some segments over an arena that holds random K,V; pages lie in any order."""

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        heads: int = 2,
        dqk: int = 8,
        dv: int = 6,
        page_tokens: int = 8,
        compute: torch.dtype = torch.float32,
        stored: KvDtype = KvDtype.FLOAT32,
        seed: int = 0,
    ) -> None:
        runs = sorted(runs, key=lambda run: not run.stores)
        random = np.random.default_rng(seed)
        geometry = KvGeometry(LAYERS, heads, dqk, dv, page_tokens, stored)
        needs = [geometry.pages_for(run.context + (run.causal if run.stores else 0)) for run in runs]
        free_pages = random.permutation(sum(needs) + 3).astype(np.int32)
        self.segments = [
            # One page more than is needed: an entry may be longer than what is asked of it.
            Segment(
                np.append(free_pages[start : start + need], free_pages[-1]),
                run.context,
                run.causal,
                run.free,
                run.stores,
                run.context + run.causal,
            )
            for run, need, start in zip(runs, needs, np.cumsum([0, *needs[:-1]]), strict=True)
        ]
        elements = free_pages.size * geometry.page_bytes // geometry.dtype.size_bytes
        values = torch.from_numpy(random.standard_normal(elements, dtype=np.float32)).to(torch_dtype(stored))
        arena = values.view(torch.uint8).view(free_pages.size, geometry.page_bytes)
        self.kv = PagedKv(arena.to(DEVICE.torch_device), geometry)
        self.spec = AttentionSpec(heads, dqk, dv, dqk**-0.5, 37.0, compute_dtype=compute)
        rows = sum(segment.rows for segment in self.segments)
        width = heads * (2 * dqk + dv)
        # As a projection gives it: with U before, so that rows do not follow one another without a gap.
        z = torch.from_numpy(random.standard_normal((rows, width + 3), dtype=np.float32)).to(compute)
        z[:, : 2 * heads * dqk] *= 2.0
        z = z.to(DEVICE.torch_device)[:, 3:]
        self.q = z[:, : heads * dqk].unflatten(1, (heads, dqk))
        self.k = z[:, heads * dqk : 2 * heads * dqk].unflatten(1, (heads, dqk))
        self.v = z[:, 2 * heads * dqk :].unflatten(1, (heads, dv))

    def expected(self) -> torch.Tensor:
        """float64 [rows, heads, dv]"""
        own_k, own_v = self.rounded(self.k).double().cpu(), self.rounded(self.v).double().cpu()
        parts = [torch.empty((0, *own_v.shape[1:]), dtype=torch.float64)]
        for placed in place(self.segments):
            segment, rows = placed.segment, placed.rows
            keys = torch.cat((self.context(self.kv.k(LAYER), segment), own_k[rows]))
            values = torch.cat((self.context(self.kv.v(LAYER), segment), own_v[rows]))
            row, column = torch.arange(segment.rows)[:, None], torch.arange(segment.rows)[None, :]
            own = (row == column) | ((column < row) & (column < segment.causal_rows))
            mask = torch.cat((torch.ones(segment.rows, segment.context_tokens, dtype=torch.bool), own), 1)
            scores = torch.einsum("ihd,jhd->hij", self.q[rows].double().cpu(), keys) * self.spec.alpha
            assert self.spec.normalizer is not None
            parts.append(torch.einsum("hij,jhd->ihd", F.silu(scores) / self.spec.normalizer * mask, values))
        return torch.cat(parts)

    def context(self, pages: torch.Tensor, segment: Segment) -> torch.Tensor:
        """float64 [context tokens, heads, dim]"""
        tokens = range(segment.context_tokens)
        size = self.kv.geometry.page_tokens
        found = [pages[int(segment.pages[token // size]), :, token % size] for token in tokens]
        return torch.stack(found).double().cpu() if found else torch.empty((0, *pages.shape[1::2])).double()

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.kv.dtype).to(x.dtype)

    def error(self, ours: torch.Tensor) -> float:
        expected = self.expected()
        if expected.numel() == 0:
            return 0.0
        return float((ours.double().cpu().reshape(expected.shape) - expected).abs().max() / expected.abs().max())

    def attend(self) -> torch.Tensor:
        return (
            TritonAttention(self.spec, DEVICE, BLOCKS)
            .begin(self.kv, self.segments)
            .attend(LAYER, self.q, self.k, self.v)
        )


MIXED = [Run(0, 20, 0), Run(13, 5, 0), Run(20, 3, 7), Run(0, 0, 4), Run(9, 0, 3), Run(16, 4, 1), Run(0, 3, 2)]
SHAPES: dict[str, list[Run]] = {
    "a chunk that begins a prefix": [Run(0, 40, 0)],
    "a chunk over several tiles": [Run(21, 70, 0)],
    "candidates alone": [Run(0, 0, 5)],
    "candidates on a prefix": [Run(50, 0, 19)],
    "a suffix over several tiles": [Run(5, 40, 37)],
    "one row": [Run(33, 1, 0)],
    "all kinds together": MIXED,
    "many short requests": [Run(index, index % 3, 1 + index % 4) for index in range(20)],
}


@pytest.mark.parametrize("runs", SHAPES.values(), ids=SHAPES.keys())
def test_rows_get_what_the_formula_gives(runs: list[Run]) -> None:
    forward = Forward(runs)
    assert forward.error(forward.attend()) <= 2e-6


@pytest.mark.parametrize("page_tokens", [1, 3, 5, 16, 24, 64])
def test_any_page_size(page_tokens: int) -> None:
    forward = Forward(MIXED, page_tokens=page_tokens)
    assert forward.error(forward.attend()) <= 2e-6


@pytest.mark.parametrize(("heads", "dqk", "dv"), [(1, 1, 2), (3, 5, 18), (2, 16, 16), (2, 24, 40)])
def test_any_dimensions(heads: int, dqk: int, dv: int) -> None:
    forward = Forward(MIXED, heads=heads, dqk=dqk, dv=dv)
    assert forward.error(forward.attend()) <= 2e-6


@pytest.mark.parametrize("stored", KvDtype)
@pytest.mark.parametrize("compute", TOLERANCES)
def test_any_pair_of_types(compute: torch.dtype, stored: KvDtype) -> None:
    """K,V of the forward's own rows count as rounded to the stored type, whether they are stored or not."""
    forward = Forward(MIXED, compute=compute, stored=stored)
    assert forward.error(forward.attend()) <= TOLERANCES[compute]


@pytest.mark.parametrize("stored", KvDtype)
def test_chunks_are_stored_rounded_and_nothing_else_is_written(stored: KvDtype) -> None:
    forward = Forward(MIXED, stored=stored, page_tokens=5)
    expected_k, expected_v = forward.kv.k(LAYER).clone(), forward.kv.v(LAYER).clone()
    others = [forward.kv.k(0).clone(), forward.kv.v(0).clone()]
    for placed in place(forward.segments):
        segment = placed.segment
        for row, token in enumerate(range(segment.context_tokens, segment.stored_tokens), placed.start):
            page, at = int(segment.pages[token // 5]), token % 5
            expected_k[page, :, at] = forward.k[row].to(forward.kv.dtype)
            expected_v[page, :, at] = forward.v[row].to(forward.kv.dtype)
    forward.attend()
    assert torch.equal(forward.kv.k(LAYER), expected_k)
    assert torch.equal(forward.kv.v(LAYER), expected_v)
    assert torch.equal(forward.kv.k(0), others[0])
    assert torch.equal(forward.kv.v(0), others[1])


@pytest.mark.parametrize("splits", [2, 4, 16])
def test_keys_split_among_programs_give_the_same_sums(splits: int) -> None:
    forward = Forward(MIXED)
    assert forward.error(packed_attend(forward, PlanShape(32, splits, True))) <= 2e-6


@pytest.mark.parametrize("block_rows", [16, 64, 128])
def test_any_rows_in_a_tile(block_rows: int) -> None:
    forward = Forward([*MIXED, Run(3, 150, 0)], compute=torch.float16)
    assert forward.error(packed_attend(forward, PlanShape(block_rows, 1, True))) <= TOLERANCES[torch.float16]


@pytest.mark.parametrize("keys", [16, 32, 64])
def test_any_keys_in_a_block(keys: int) -> None:
    forward = Forward(MIXED, page_tokens=32)
    assert forward.error(packed_attend(forward, PlanShape(16, 1, True), Blocks(keys))) <= 2e-6


def test_a_plan_with_room_to_spare_gives_the_same_rows() -> None:
    """As a captured graph has it: rows, segments and pages beyond the forward's own."""
    forward = Forward(MIXED)
    own = packed_attend(forward, PlanShape(16, 1, True))
    rows = forward.q.shape[0]
    more = [torch.cat((x, torch.full_like(x[:9], torch.nan))) for x in (forward.q, forward.k, forward.v)]
    arrays = arrays_of(forward.segments, forward.kv.geometry.page_tokens)
    plan = pack(arrays, 8, PlanShape(16, 1, True), Capacity(rows + 9, 12, arrays.pages.size + 5))
    padded = DevicePlan(plan, torch.from_numpy(plan.packed).to(DEVICE.torch_device))
    pages = LayerPages(forward.kv.k(LAYER), forward.kv.v(LAYER))
    assert torch.equal(attend(*more, pages, padded, forward.spec.alpha, 37.0, BLOCKS)[:rows], own)


def test_a_neighbour_changes_nothing() -> None:
    together, alone = Forward(MIXED), Forward(MIXED)
    for placed in place(together.segments):
        alone.segments = [placed.segment]
        out = packed_attend(alone, PlanShape(16, 1, placed.segment.stores), rows=placed.rows)
        assert torch.equal(out, packed_attend(together, PlanShape(16, 1, True))[placed.rows])


@settings(max_examples=15, deadline=None)
@given(
    runs=st.lists(
        st.builds(Run, st.integers(0, 70), st.integers(0, 40), st.integers(0, 20)).filter(
            lambda run: run.causal + run.free > 0
        ),
        min_size=1,
        max_size=6,
    ),
    page_tokens=st.integers(1, 40),
    dqk=st.integers(1, 20),
    dv=st.integers(1, 20),
    splits=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 2**16),
)
def test_any_forward(runs: list[Run], page_tokens: int, dqk: int, dv: int, splits: int, seed: int) -> None:
    forward = Forward(runs, page_tokens=page_tokens, dqk=dqk, dv=dv, seed=seed)
    stores = any(run.stores for run in runs)
    assert forward.error(packed_attend(forward, PlanShape(32, splits, stores))) <= 2e-6


def test_pages_that_do_not_hold_the_tokens_are_refused() -> None:
    forward = Forward([Run(50, 0, 3)])
    short = [Segment(forward.segments[0].pages[:2], 50, 0, 3, False, 50)]
    with pytest.raises(ValueError, match="50 tokens need 7 pages of 8, 2 were given"):
        TritonAttention(forward.spec, DEVICE, BLOCKS).begin(forward.kv, short)


def test_rows_that_are_not_the_plans_are_refused() -> None:
    forward = Forward([Run(5, 0, 3)])
    started = TritonAttention(forward.spec, DEVICE, BLOCKS).begin(forward.kv, forward.segments)
    with pytest.raises(ValueError, match="2 rows were given, the plan has 3"):
        started.attend(LAYER, forward.q[:2], forward.k[:2], forward.v[:2])
    with pytest.raises(ValueError, match="contiguous in their last dimension"):
        started.attend(LAYER, forward.q.transpose(1, 2).contiguous().transpose(1, 2), forward.k, forward.v)


def packed_attend(
    forward: Forward, shape: PlanShape, blocks: Blocks | None = BLOCKS, rows: slice = slice(None)
) -> torch.Tensor:
    """The forward with programs of that shape, which a back end chooses by device and sizes."""
    arrays = arrays_of(forward.segments, forward.kv.geometry.page_tokens)
    plan = pack(arrays, forward.kv.geometry.page_tokens, shape, arrays.capacity)
    started: TritonPass = TritonAttention(forward.spec, DEVICE, blocks).started(forward.kv, plan)
    out = started.attend(LAYER, forward.q[rows], forward.k[rows], forward.v[rows])
    return out.unflatten(1, (forward.spec.num_heads, forward.spec.hidden_dim))


@pytest.mark.skipif(INTERPRETED, reason="no GPU: there is nothing to tune")
@pytest.mark.parametrize("compute", TOLERANCES)
def test_tuned_kernels_on_shapes_of_their_real_size(compute: torch.dtype) -> None:
    runs = [Run(0, 1000, 0), Run(2048, 512, 0), Run(4096, 64, 512), Run(1000, 0, 128)]
    forward = Forward(runs, heads=4, dqk=128, dv=128, page_tokens=64, compute=compute, stored=KvDtype.BFLOAT16)
    assert forward.error(forward.attend()) <= TOLERANCES[compute]
