"""Forwards from captured graphs: the same rows as without graphs, for any earlier contents of their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from relaygr.schemas.messages import Behaviours
from relaygr.worker.device import CapturedWork, CpuDevice, Device, Recorder
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.checkpoint import random_checkpoint
from relaygr.worker.model.engine import build_engine, own_engine
from relaygr.worker.model.graphs import LEAST, STEPS, DirectRunner, GraphRunner, bucket
from relaygr.worker.model.interface import PrefixChunk, RankInputs
from relaygr.worker.model.layers import LayerStack, build_layers
from relaygr.worker.model.ranker_engine import RankerEngine
from relaygr.worker.model.triton.attention import TritonAttention
from relaygr.worker.model.triton.plan import PlanShape
from tests.worlds.attention import RaggedForward, SegmentRows
from tests.worlds.model import ARENA_PAGES, random_behaviours, small_config
from tests.worlds.triton import BLOCKS, DEVICE, choose_triton

pytestmark = pytest.mark.slow

CONFIG = small_config()
NO_FEATURES = np.empty(0, np.int64)


def mean_padding(low: int, high: int) -> float:
    """The mean share of padding if every size in [low, high] occurs equally often."""
    sizes = range(low, high + 1)
    return sum(bucket(size) for size in sizes) / sum(sizes) - 1.0


@given(st.integers(0, 2**20))
def test_a_bucket_holds_its_sizes_with_little_to_spare(size: int) -> None:
    assert bucket(size) >= max(size, LEAST)
    assert bucket(bucket(size)) == bucket(size)
    assert bucket(size) <= bucket(size + 1)
    if size > LEAST:
        assert (bucket(size) - size) / size < 1 / STEPS


def test_what_buckets_cost() -> None:
    """The figure of docs/cuda.md."""
    assert [bucket(size) for size in (0, 16, 17, 21, 33, 100, 129, 2048)] == [16, 16, 20, 24, 40, 112, 160, 2048]
    assert mean_padding(17, 4096) == pytest.approx(0.083, abs=0.0005)
    with pytest.raises(ValueError, match="a size of -1"):
        bucket(-1)


class Layers:
    """The layers of a small model, with and without graphs."""

    def __init__(self, device: Device = DEVICE, limit: int = 32, pause: int = 0) -> None:
        tensors = {
            name: tensor.to(DEVICE.torch_device) for name, tensor in random_checkpoint(CONFIG, 0).tensors.items()
        }
        self.stack = LayerStack(build_layers(CONFIG, tensors, torch.float32), KvDtype.FLOAT32)
        # Of the same kind as the layers; the model's alpha and N do not matter here.
        self.attention = TritonAttention(forward([SegmentRows(1, 0, 1)]).spec, DEVICE, blocks=BLOCKS)
        self.direct = DirectRunner(self.stack, self.attention)
        self.graphs = GraphRunner(self.stack, self.attention, device, limit, pause)

    def rows(
        self, made: RaggedForward, *, direct: bool = False, before: Sequence[Callable[[int], None]] = ()
    ) -> torch.Tensor:
        runner = self.direct if direct else self.graphs
        x = torch.from_numpy(np.random.default_rng(made.q.shape[0]).standard_normal((made.q.shape[0], 16), "f4"))
        return runner(made.kv, made.segments, x.to(DEVICE.torch_device), before).clone()


def forward(runs: list[SegmentRows], seed: int = 0) -> RaggedForward:
    return RaggedForward(runs, device=DEVICE, seed=seed)


def same_arena(made: RaggedForward, runs: list[SegmentRows]) -> RaggedForward:
    """Other segments over the arena of `made`; their context is in page 0."""
    other = forward(runs)
    other.kv = made.kv
    other.segments = [replace(segment, pages=segment.pages % made.kv.k(0).shape[0]) for segment in other.segments]
    return other


def close(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within a tolerance, since products of other sizes round differently."""
    return float((ours - expected).abs().max() / expected.abs().max()) < 1e-5


def test_a_size_seen_twice_runs_from_its_graph_and_gives_the_same_rows() -> None:
    layers = Layers()
    first = forward([SegmentRows(9, 12, 0), SegmentRows(20, 3, 6)])
    second = same_arena(first, [SegmentRows(11, 10, 0), SegmentRows(17, 4, 6)])
    assert torch.equal(layers.rows(first), layers.rows(first, direct=True))
    assert layers.graphs.graphs == 0
    from_graph = layers.rows(first)
    assert layers.graphs.graphs == 1
    assert close(from_graph, layers.rows(first, direct=True))
    assert close(layers.rows(second), layers.rows(second, direct=True))
    assert layers.graphs.graphs == 1
    assert torch.equal(layers.rows(first), from_graph), "the forward between left something behind"


def test_a_chunk_from_a_graph_is_stored_in_its_own_pages() -> None:
    layers = Layers()
    made = forward([SegmentRows(3, 12, 0)])
    views = [view(layer) for view in (made.kv.k, made.kv.v) for layer in (0, 1)]
    own = made.segments[0].pages[:2]
    others = np.setdiff1d(np.arange(views[0].shape[0]), own)
    layers.rows(made, direct=True)
    expected = [view.clone() for view in views]
    for view in views:
        view[own[0], :, 3:] = view[own[1], :, :7] = 7.0
    elsewhere = same_arena(made, [SegmentRows(0, 14, 0)])
    elsewhere.segments = [replace(elsewhere.segments[0], pages=others)]
    for _ in range(2):
        layers.rows(elsewhere)
    assert layers.graphs.graphs == 1
    unwritten = others[2:]
    layers.rows(made)
    assert layers.graphs.graphs == 1, "it was of another size"
    for view, wanted in zip(views, expected, strict=True):
        assert close(view[own], wanted[own])
        assert torch.equal(view[unwritten], wanted[unwritten])


def test_the_least_recently_used_graph_goes_first() -> None:
    layers = Layers(limit=2)
    made = forward([SegmentRows(9, 0, 26)])
    sizes = [same_arena(made, [SegmentRows(9, 0, rows)]) for rows in (6, 18, 26)]
    for size in sizes[:2]:
        layers.rows(size)
        layers.rows(size)
    layers.rows(sizes[0])
    for _ in range(2):
        layers.rows(sizes[2])
    assert layers.graphs.graphs == 2
    for size in sizes:
        assert close(layers.rows(size), layers.rows(size, direct=True))


class Counting(CpuDevice, Recorder):
    """A device, and its recorder, which counts."""

    captured = 0

    def recorder(self) -> Recorder:
        return self

    def capture(self, work: Callable[[], None]) -> CapturedWork:
        self.captured += 1
        return super().capture(work)


def test_alternating_buckets_do_not_replace_each_other_at_every_forward() -> None:
    """Capturing takes as long as many forwards."""
    counting = Counting()
    layers = Layers(counting, limit=2, pause=5)
    made = forward([SegmentRows(9, 0, 26)])
    sizes = [same_arena(made, [SegmentRows(9, 0, rows)]) for rows in (6, 18, 26)]
    captured = []
    expected = [layers.rows(size, direct=True) for size in sizes]
    for _ in range(6):
        for size, rows in zip(sizes, expected, strict=True):
            assert close(layers.rows(size), rows)
            captured.append(counting.captured)
    assert captured[:6] == [0, 0, 0, 1, 2, 2], "there was room for two"
    assert captured[-1] == 3, "of 13 more forwards, one in six may capture, if its graph is missing"


def test_another_arena_drops_all_graphs() -> None:
    layers = Layers()
    for seed in (0, 1):
        made = forward([SegmentRows(9, 0, 5)], seed)
        expected = layers.rows(made, direct=True)
        for _ in range(3):
            assert close(layers.rows(made), expected)
        assert layers.graphs.graphs == 1


def test_a_forward_that_waits_for_its_pages_runs_without_a_graph() -> None:
    layers, asked = Layers(), []
    made = forward([SegmentRows(9, 0, 5)])
    for _ in range(3):
        layers.rows(made, before=[asked.append])
    assert layers.graphs.graphs == 0
    assert asked == [0, 1] * 3


class Wide(CpuDevice):
    """A device with as many processors as an H100."""

    @property
    def compute_units(self) -> int:
        return 132


def test_padding_tiles_do_not_count_when_keys_are_split() -> None:
    """One request on a long prefix: 3 tiles of 2 heads fill few of 132 processors, with any padding."""
    spec = AttentionSpec(2, 16, 16, 0.25, 37.0, compute_dtype=torch.bfloat16)
    attention = TritonAttention(spec, Wide(), blocks=BLOCKS)
    made = forward([SegmentRows(4000, 16, 128)])
    assert attention.shape(made.kv, attention.arrays(made.kv, made.segments)) == PlanShape(64, 132, stores=False)


class NoRecorder(Recorder):
    def capture(self, work: Callable[[], None]) -> CapturedWork:
        raise RuntimeError("operation not permitted when stream is capturing")


class NoCapture(CpuDevice):
    """A device on which nothing can be recorded."""

    def recorder(self) -> Recorder:
        return NoRecorder()


def test_a_device_that_cannot_capture_logs_one_warning_and_runs_directly() -> None:
    layers = Layers(NoCapture())
    made = forward([SegmentRows(9, 0, 5)])
    with capture_logs() as logs:
        for _ in range(4):
            assert torch.equal(layers.rows(made), layers.rows(made, direct=True))
    assert [entry["event"] for entry in logs] == ["forwards are not captured"]
    assert (layers.graphs.name, layers.graphs.passes_to_warm) == ("triton", 0), "and is measured as it runs"


def test_pages_that_do_not_hold_the_tokens_are_refused() -> None:
    layers = Layers()
    made = forward([SegmentRows(50, 0, 3)])
    made.segments = [replace(made.segments[0], pages=made.segments[0].pages[:2])]
    with pytest.raises(ValueError, match="50 tokens need 7 pages"):
        layers.rows(made)


def test_an_engine_scores_the_same_with_graphs() -> None:
    checkpoint = random_checkpoint(CONFIG, 0)
    engines = [
        own_engine(checkpoint, DEVICE, KvDtype.FLOAT32, 8, choose=choose_triton, graphs=graphs)
        for graphs in (False, True)
    ]
    for engine in engines:
        engine.bind(DEVICE.empty_bytes(ARENA_PAGES, engine.geometry.page_bytes).zero_())
    random = np.random.default_rng(0)
    for length in (20, 23, 19):
        history, items = random_behaviours(random, length), random.integers(0, 40, 6)
        pages = random.permutation(ARENA_PAGES)[:4].astype(np.int32)
        scores = [ranked(engine, history, items, pages) for engine in engines]
        assert np.abs(scores[0] - scores[1]).max() <= 2e-5 * np.abs(scores[0]).max()
    assert engines[1].scratch_bytes(64, 64) > engines[0].scratch_bytes(64, 64)
    assert [engine.backend for engine in engines] == ["triton", "triton from graphs"], "a calibration tells them apart"


def ranked(engine: RankerEngine, history: Behaviours, items: np.ndarray, pages: np.ndarray) -> np.ndarray:
    inputs = engine.prefix_inputs(NO_FEATURES, history)
    engine.pre_infer(PrefixChunk(inputs, 0, inputs.tokens, pages))
    request: RankInputs = engine.rank_inputs(inputs.tokens, pages, Behaviours.empty(), items)
    return engine.rank([request])[0].scores


def test_a_back_end_that_cannot_be_captured_is_logged() -> None:
    with capture_logs() as logs:
        engine = build_engine(random_checkpoint(CONFIG, 0), CpuDevice(), KvDtype.FLOAT32, 8, graphs=True)
    assert {"event": "this back end cannot be captured", "name": engine.backend}.items() <= logs[-1].items()
