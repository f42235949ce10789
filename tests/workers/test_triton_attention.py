"""The Triton kernels against the formula as it stands, in float64: interpreted, or on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from relaygr.worker.kv import KvDtype
from relaygr.worker.model.attention.bias import bucket_edges
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Segment, SegmentTimes, place
from relaygr.worker.model.attention.spec import rounding, torch_dtype
from relaygr.worker.model.options import RelativeBias
from relaygr.worker.model.triton import attention as triton_backend
from relaygr.worker.model.triton import launch
from relaygr.worker.model.triton.attention import TritonAttention
from relaygr.worker.model.triton.launch import (
    Blocks,
    DevicePlan,
    Formula,
    LayerPages,
    fitting_configs,
    tuned,
    tuned_attend,
)
from relaygr.worker.model.triton.plan import Capacity, PlanShape, arrays_of, pack
from tests.worlds.attention import LAYER, LAYERS, MIXED, SHAPES, TOLERANCES, SegmentRows
from tests.worlds.programs import launches
from tests.worlds.triton import BLOCKS, DEVICE, INTERPRETED, Forward, nan_memory

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def programs_do_not_depend_on_one_another() -> Iterator[None]:
    """In any test here, and a row that no program writes is NaN."""
    with nan_memory(), launches():
        yield


@pytest.mark.parametrize("runs", SHAPES.values(), ids=SHAPES.keys())
def test_rows_get_what_the_formula_gives(runs: list[SegmentRows]) -> None:
    forward = Forward(runs)
    assert forward.error(forward.attend()) <= 2e-6


@pytest.mark.parametrize("page_tokens", [1, 5, 16, 24, 1000])
def test_any_page_size(page_tokens: int) -> None:
    forward = Forward(MIXED, page_tokens=page_tokens)
    assert forward.error(forward.attend()) <= 2e-6


@pytest.mark.parametrize(("heads", "dqk", "dv"), [(1, 1, 2), (3, 5, 18), (2, 16, 16), (1, 100, 130)])
def test_any_dimensions(heads: int, dqk: int, dv: int) -> None:
    forward = Forward(MIXED, heads=heads, dqk=dqk, dv=dv)
    assert forward.error(forward.attend()) <= 2e-6


@pytest.mark.parametrize("splits", [0, 16])
def test_very_unequal_lengths(splits: int) -> None:
    """Programs without a key of their own beside some with hundreds; a request without any row, too."""
    forward = Forward(
        [
            SegmentRows(0, 1, 0),
            SegmentRows(600, 0, 1),
            SegmentRows(0, 0, 1),
            SegmentRows(1, 0, 300),
            SegmentRows(31, 0, 0),
            SegmentRows(16, 16, 16),
        ]
    )
    assert forward.error(forward.attend_by(PlanShape(32, splits, True))) <= 2e-6


@pytest.mark.parametrize(("size", "splits"), [(2, 4), (3, 0), (50, 4), (400, 0)])
def test_candidates_in_groups_see_earlier_ones_of_their_own(size: int, splits: int) -> None:
    forward = Forward([*MIXED, SegmentRows(40, 21, 70), SegmentRows(0, 16, 33)], group=size)
    assert forward.error(forward.attend_by(PlanShape(16, splits, True), Blocks(32))) <= 2e-6


@pytest.mark.parametrize("shift", [-30.0, 200.0])
def test_scores_far_from_zero(shift: float) -> None:
    """SiLU near 0 has the same relative error as elsewhere, since a norm may follow."""
    forward = Forward([SegmentRows(70, 9, 0), SegmentRows(30, 2, 20), SegmentRows(0, 1, 0)], dqk=16)
    for keys in (forward.k, forward.kv.k(LAYER)):
        keys[..., 0] = shift / 4
    forward.q[..., 0] = 16.0
    forward.q[..., 1:] *= 0.01
    assert forward.error(forward.attend()) <= 2e-6 + 2e-7 * abs(shift)


@pytest.mark.parametrize(
    ("compute", "stored"),
    [
        *((torch.float32, stored) for stored in KvDtype),
        *((torch.bfloat16, stored) for stored in (KvDtype.BFLOAT16, KvDtype.INT8)),
        *((torch.float16, stored) for stored in (KvDtype.FLOAT32, KvDtype.FLOAT8)),
    ],
)
def test_types_of_the_compute_and_of_the_pages(compute: torch.dtype, stored: KvDtype) -> None:
    """K,V of the forward's own rows count as rounded to the stored type, whether they are stored or not."""
    forward = Forward(MIXED, compute=compute, stored=stored)
    assert forward.error(forward.attend()) <= TOLERANCES[compute]


@pytest.mark.parametrize("stored", KvDtype)
def test_chunks_are_stored_rounded_and_nothing_else_is_written(stored: KvDtype) -> None:
    forward = Forward(MIXED, stored=stored, page_tokens=5)
    expected = forward.stored()
    forward.attend()
    assert torch.equal(forward.kv.arena, expected)


@pytest.mark.parametrize("stored", [dtype for dtype in KvDtype if dtype.is_scaled])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_to_a_scaled_type_as_plain_torch_does(compute: torch.dtype, stored: KvDtype) -> None:
    sizes = torch.logspace(-30, 30, 70)[:, None, None]
    x = (torch.randn(70, 2, 24, generator=torch.Generator().manual_seed(0)) * sizes).to(compute)
    x[3], x[4, 1, 5] = 0.0, float("inf")
    x[5, 0] = torch.tensor(127.0 * 2.0**-4)
    x[6, 0] = torch.tensor(448.0 * 2.0**3)
    x = x.to(DEVICE.torch_device)[:, :, 3:20]
    found, expected = launch.round_rows(x, torch_dtype(stored)), rounding(stored)(x)
    finite = expected.isfinite()
    assert torch.equal(finite, found.isfinite()) and int((~finite).sum()) == 17
    assert torch.equal(found[finite], expected[finite])


@pytest.mark.parametrize("splits", [2, 4, 16])
def test_keys_split_among_programs_give_the_same_sums(splits: int) -> None:
    forward = Forward(MIXED)
    assert forward.error(forward.attend_by(PlanShape(32, splits, True))) <= 2e-6


@pytest.mark.parametrize("block_rows", [16, 64, 128])
def test_any_rows_in_a_tile(block_rows: int) -> None:
    forward = Forward([*MIXED, SegmentRows(3, 150, 0)], compute=torch.float16)
    assert forward.error(forward.attend_by(PlanShape(block_rows, 0, True))) <= TOLERANCES[torch.float16]


@pytest.mark.parametrize("keys", [16, 32, 64])
def test_any_keys_in_a_block(keys: int) -> None:
    forward = Forward(MIXED, page_tokens=32)
    assert forward.error(forward.attend_by(PlanShape(16, 0, True), Blocks(keys))) <= 2e-6


MASKS: dict[str, dict[str, int]] = {
    "contextual": {"contextual": 5},
    "window": {"window": 9},
    "window, the newest rows see all": {"window": 9, "full_last": 6},
    "contextual, window and groups": {"contextual": 3, "window": 12, "full_last": 4, "group": 3},
}
EACH_PASS = [
    # Full inference, an append, a chunk with more history after it, hits with and without a suffix.
    SegmentRows(0, 30, 0),
    SegmentRows(21, 9, 0),
    SegmentRows(19, 6, 0, later=8),
    SegmentRows(35, 0, 5),
    SegmentRows(17, 5, 9),
    SegmentRows(7, 0, 2),
]
BIASES = {
    "bias by position": RelativeBias(positions=24),
    "bias by position and time": RelativeBias(positions=64, time_buckets=128),
    "one bucket for all times": RelativeBias(positions=9, time_buckets=4, log_base=100.0),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_every_mask_of_a_full_pass_an_append_and_a_hit(mask: dict[str, int]) -> None:
    forward = Forward(EACH_PASS, **mask)
    assert forward.error(forward.attend_by(PlanShape(16, 24, True))) <= 2e-6


def test_a_window_that_begins_at_place_0_shows_all_contextual_tokens() -> None:
    """They share that place, and fill a block of keys."""
    forward = Forward([SegmentRows(35, 5, 0), SegmentRows(35, 0, 3)], contextual=20, window=16)
    assert forward.error(forward.attend_by(PlanShape(16, 0, True))) <= 2e-6


def test_sums_are_not_rounded_to_the_type_of_the_rows() -> None:
    """321 keys add 8 each: bfloat16 has no number between 2560 and 2576."""
    forward = Forward([SegmentRows(321, 1, 0)], dqk=16, compute=torch.bfloat16, stored=KvDtype.BFLOAT16)
    forward.q.fill_(2.0)
    for keys, values in ((forward.k, forward.v), (forward.kv.k(LAYER), forward.kv.v(LAYER))):
        keys.fill_(1.0)
        values.fill_(1.0)
    assert forward.error(forward.attend()) <= 1e-3


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES.keys())
def test_every_bias_of_a_full_pass_an_append_and_a_hit(bias: RelativeBias) -> None:
    forward = Forward(EACH_PASS, relative_bias=bias)
    assert forward.error(forward.attend_by(PlanShape(16, 0, True))) <= 2e-6


def test_every_option_of_mask_and_bias_together() -> None:
    options = MASKS["contextual, window and groups"]
    forward = Forward(EACH_PASS, relative_bias=BIASES["bias by position and time"], **options)
    assert forward.error(forward.attend_by(PlanShape(32, 24, True), Blocks(32))) <= 2e-6


@pytest.mark.parametrize("log_base", [0.301, 1e-3, 3.7e-4])
def test_a_time_at_the_edge_of_a_bucket_falls_into_the_bucket_of_the_formula(log_base: float) -> None:
    """One row sees keys whose times are at the edges of the buckets, one second before and one after."""
    config = RelativeBias(positions=1, time_buckets=65_536, log_base=log_base)
    edges = bucket_edges(config).numpy()
    chosen = edges[np.linspace(0, edges.size - 1, 120).astype(int)]
    apart = np.sort(np.concatenate((chosen - 1, chosen, chosen + 1)))[::-1]
    forward = Forward([SegmentRows(apart.size, 0, 1)], relative_bias=config)
    keys = np.append(-apart, 0)
    forward.segments = [replace(forward.segments[0], times=SegmentTimes(keys, np.zeros(1, np.int64)))]
    assert forward.error(forward.attend_by(PlanShape(16, 0, False), Blocks(64))) <= 2e-6


def test_a_bias_by_time_needs_times() -> None:
    forward = Forward([SegmentRows(9, 0, 2)], relative_bias=BIASES["bias by position and time"])
    forward.segments = [replace(forward.segments[0], times=None)]
    with pytest.raises(ValueError, match="needs the times"):
        forward.attend()


def test_a_plan_with_room_to_spare_gives_the_same_rows() -> None:
    """As in a captured graph: more rows, segments, pages and times than the forward has."""
    forward = Forward(MIXED, relative_bias=BIASES["bias by position and time"])
    attention = TritonAttention(forward.spec, DEVICE, forward.biases, BLOCKS)
    own = attention.begin(forward.kv, forward.segments).attend(LAYER, forward.q, forward.k, forward.v)
    arrays = attention.arrays(forward.kv, forward.segments)
    size = arrays.capacity
    capacity = Capacity(size.rows + 9, 12, size.pages + 5, size.key_times + 7)
    plan = attention.packed(forward.kv, arrays, attention.shape(forward.kv, arrays), capacity)
    more = [torch.cat((x, torch.full_like(x[:9], torch.nan))) for x in (forward.q, forward.k, forward.v)]
    assert torch.equal(attention.started(forward.kv, plan).attend(LAYER, *more)[: size.rows], own)


def test_a_neighbour_changes_nothing() -> None:
    forward = Forward(MIXED)
    together, segments = forward.attend_by(PlanShape(16, 0, True)), forward.segments
    for placed in place(segments):
        forward.segments = [placed.segment]
        alone = forward.attend_by(PlanShape(16, 0, placed.segment.stores), rows=placed.rows)
        assert torch.equal(alone, together[placed.rows])


@pytest.mark.parametrize("page_tokens", [8, 32], ids=["a block over pages", "a block within a page"])
def test_pages_far_into_a_large_arena(tmp_path: Path, page_tokens: int) -> None:
    """Beyond 2^31 elements, where offsets of 32 bits would wrap."""
    forward = Forward(MIXED, stored=KvDtype.BFLOAT16, page_tokens=page_tokens)
    small, page_bytes = forward.kv, forward.kv.geometry.page_bytes
    far = 2**31 * 2 // page_bytes + 5
    arena = large_arena(far + small.k(0).shape[0], page_bytes, tmp_path / "arena")
    forward.kv = PagedKv(arena, small.geometry)
    forward.segments = [replace(segment, pages=segment.pages + np.int32(far)) for segment in forward.segments]
    for layer in range(LAYERS):
        forward.kv.k(layer)[far:], forward.kv.v(layer)[far:] = small.k(layer), small.v(layer)
    assert forward.error(forward.attend()) <= 2e-6
    chunk = next(placed for placed in place(forward.segments) if placed.segment.causal_rows)
    token = chunk.segment.context_tokens
    stored = forward.kv.k(LAYER)[int(chunk.segment.pages[token // page_tokens]), :, token % page_tokens]
    assert torch.equal(stored, forward.k[chunk.start].to(torch.bfloat16))


def large_arena(pages: int, page_bytes: int, sparse: Path) -> torch.Tensor:
    """Of which only the pages that are touched take memory, if it is the host's."""
    if not INTERPRETED:
        return DEVICE.empty_bytes(pages, page_bytes)
    with sparse.open("wb") as file:
        file.truncate(pages * page_bytes)
    return torch.from_file(str(sparse), shared=True, size=pages * page_bytes, dtype=torch.uint8).view(pages, page_bytes)


def test_pages_that_do_not_hold_the_tokens_are_refused() -> None:
    forward = Forward([SegmentRows(50, 0, 3)])
    short = [Segment(forward.segments[0].pages[:2], 50, 0, 3, False, 50)]
    with pytest.raises(ValueError, match="50 tokens need 7 pages of 8, 2 were given"):
        TritonAttention(forward.spec, DEVICE, blocks=BLOCKS).begin(forward.kv, short)


def test_rows_that_are_not_the_plans_are_refused() -> None:
    forward = Forward([SegmentRows(5, 0, 3)])
    started = TritonAttention(forward.spec, DEVICE, blocks=BLOCKS).begin(forward.kv, forward.segments)
    with pytest.raises(ValueError, match="2 rows were given, the plan has 3"):
        started.attend(LAYER, forward.q[:2], forward.k[:2], forward.v[:2])
    with pytest.raises(ValueError, match="contiguous in their last dimension"):
        started.attend(LAYER, forward.q.transpose(1, 2).contiguous().transpose(1, 2), forward.k, forward.v)


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("pad", [16, 64, 128, 256, 1024])
@pytest.mark.parametrize("block_rows", [16, 32, 64, 128])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_there_is_always_a_configuration_to_try_and_never_many(
    precision: str, block_rows: int, pad: int, is_scaled: bool
) -> None:
    named: dict[str, object] = {"k_exponents_ptr": torch.empty(0) if is_scaled else None}
    fixed = {"PRECISION": precision, "BLOCK_M": block_rows, "PAD_QK": 16, "PAD_V": pad, "TIMES": False}
    for positions in (0, 9):
        found = fitting_configs(tuned_attend.configs, named, **fixed | {"POSITIONS": positions})
        assert 1 <= len(found) <= 18


def test_a_kind_of_kernel_is_tuned_once_and_launched_without_the_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner keeps state: a model that loads while another serves must not share it."""
    forward, asked = Forward(MIXED), []

    def tune(*arguments: object) -> Blocks:
        asked.append(arguments)
        return Blocks(keys=32)

    monkeypatch.setattr(triton_backend, "tuned", tune)
    attention = TritonAttention(forward.spec, DEVICE)
    for layer in (0, LAYER):
        out = attention.begin(forward.kv, forward.segments).attend(layer, forward.q, forward.k, forward.v)
    assert len(asked) == 1
    assert forward.error(out.unflatten(1, (forward.spec.num_heads, -1))) <= 2e-6


class Tuner:
    """Like Triton's tuner, keeps its last choice as its state."""

    best_config = SimpleNamespace(kwargs={"BLOCK_N": 64}, num_warps=8, num_stages=3)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *arguments, **fixed: None


def test_the_tuners_choice_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "tuned_attend", Tuner())
    forward = Forward(MIXED)
    arrays = arrays_of(forward.segments, forward.kv.geometry.page_tokens)
    plan = pack(arrays, forward.kv.geometry.page_tokens, PlanShape(32, 0, True), arrays.capacity)
    on_device = DevicePlan(plan, torch.from_numpy(plan.packed).to(DEVICE.torch_device))
    pages = LayerPages(forward.kv.k(LAYER), forward.kv.v(LAYER))
    formula = Formula(forward.spec.alpha, 37.0)
    assert tuned(forward.q, forward.k, forward.v, pages, on_device, formula) == Blocks(64, 8, 3)


@pytest.mark.skipif(INTERPRETED, reason="no GPU: there is nothing to tune")
@pytest.mark.parametrize("compute", TOLERANCES)
def test_tuned_kernels_on_shapes_of_their_real_size(compute: torch.dtype) -> None:
    runs = [SegmentRows(0, 1000, 0), SegmentRows(2048, 512, 0), SegmentRows(4096, 64, 512), SegmentRows(1000, 0, 128)]
    forward = Forward(runs, heads=4, dqk=128, dv=128, page_tokens=64, compute=compute, stored=KvDtype.BFLOAT16)
    started = TritonAttention(forward.spec, DEVICE).begin(forward.kv, forward.segments)
    out = started.attend(LAYER, forward.q, forward.k, forward.v)
    assert forward.error(out.unflatten(1, (4, 128))) <= TOLERANCES[compute]
