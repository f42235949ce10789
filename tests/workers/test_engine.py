"""The engine apart from its scores (`test_engine_contract.py`): pages, limits, misuse, memory."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from structlog.testing import capture_logs

from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker import device as device_module
from relaygr.worker.device import CpuDevice, MemoryInfo
from relaygr.worker.kv import KvDtype
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model import engine as engine_module
from relaygr.worker.model.attention.blocked import ONEDNN_WORK, BlockedAttention
from relaygr.worker.model.attention.choose import attention_for
from relaygr.worker.model.attention.spec import spec_of
from relaygr.worker.model.checkpoint import random_checkpoint, resident_bytes, save_checkpoint
from relaygr.worker.model.engine import NoMemoryForWeightsError, build_engine, load_engine
from relaygr.worker.model.inputs.tables import DEVICE_TABLE_BYTES
from relaygr.worker.model.interface import PrefixChunk, TooLongError
from relaygr.worker.model.null import null_scores
from relaygr.worker.model.options import ComputeDtype, Family
from tests.workers.engine_kinds import HAS_ONEDNN, KINDS
from tests.worlds.attention import LAYER, RaggedForward, SegmentRows
from tests.worlds.dense import full_inference
from tests.worlds.model import (
    ARENA_PAGES,
    MAX_PREFIX,
    VOCABULARY,
    make_world,
    random_behaviours,
    small_config,
)

TOLERANCE = 2e-5
NO_FEATURES: NDArray[np.int64] = np.empty(0, np.int64)


def worst(ours: NDArray[np.float32], expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest value."""
    return float(np.abs(ours - expected.numpy()).max() / np.abs(expected.numpy()).max())


class HasBfloat16(CpuDevice):
    """A device with products in bfloat16."""

    @property
    def prefers_bfloat16(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("device", "kv", "compute", "expected"),
    [
        (CpuDevice, None, None, ("float32", "float32")),
        (HasBfloat16, None, None, ("bfloat16", "bfloat16")),
        (HasBfloat16, KvDtype.FLOAT32, None, ("float32", "bfloat16")),
        (HasBfloat16, KvDtype.FLOAT32, ComputeDtype.FLOAT32, ("float32", "float32")),
        (CpuDevice, KvDtype.BFLOAT16, None, ("bfloat16", "float32")),
    ],
)
def test_without_settings_the_device_determines_the_element_types(
    device: type[CpuDevice],
    kv: KvDtype | None,
    compute: ComputeDtype | None,
    expected: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small_config()
    save_checkpoint(tmp_path, config, random_checkpoint(config, 0).tensors)
    monkeypatch.setattr(engine_module, "open_device", lambda setting: device())
    with capture_logs() as logs:
        engine = load_engine(tmp_path, kv_dtype=kv, compute_dtype=compute)
    assert (engine.geometry.dtype, engine.compute_dtype) == expected
    (said,) = [entry for entry in logs if entry["event"] == "element types"]
    assert (said["kv"], said["products"]) == expected
    assert (said["kv_from"], said["products_from"]) == tuple(
        "the device" if setting is None else "the settings" for setting in (kv, compute)
    )


def test_weights_that_are_larger_than_the_free_memory_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would kill the process while it loads, without a line."""
    config = small_config()
    save_checkpoint(tmp_path, config, random_checkpoint(config, 0).tensors)
    needed = resident_bytes(tmp_path, DEVICE_TABLE_BYTES, torch.float32, "cpu")
    monkeypatch.setattr(CpuDevice, "memory", lambda _: MemoryInfo(needed, needed))
    load_engine(tmp_path, "cpu")
    monkeypatch.setattr(CpuDevice, "memory", lambda _: MemoryInfo(needed - 1, needed))
    monkeypatch.setattr(engine_module, "load_checkpoint", lambda _: pytest.fail("read"))
    with pytest.raises(NoMemoryForWeightsError, match="container"):
        load_engine(tmp_path, "cpu")


def test_an_arena_that_is_larger_than_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_world(small_config(), 0).engine
    monkeypatch.setattr(CpuDevice, "memory", lambda _: MemoryInfo(1000, 1000))
    with pytest.raises(RelayError, match="container"):
        bind_own_arena(engine)


def test_threads_stay_within_the_cpu_quota_and_more_by_a_setting_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config()
    save_checkpoint(tmp_path, config, random_checkpoint(config, 0).tensors)
    monkeypatch.setattr(engine_module.torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(engine_module, "usable_cores", lambda: 2)
    chosen: list[int] = []
    monkeypatch.setattr(device_module.torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(device_module, "cpu_quota", lambda: 2.5)
    with capture_logs() as logs:
        load_engine(tmp_path, "cpu")
        load_engine(tmp_path, "cpu", threads=3)
    assert chosen == [2, 3]
    (said,) = [entry for entry in logs if "quota" in entry["event"]]
    assert (said["threads"], said["quota_cores"]) == (3, 2.5)


def test_a_processor_does_not_take_its_time_for_numbers_next_to_zero(tmp_path: Path) -> None:
    """A product takes hundreds of times as long with them. Weight decay leaves such weights."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    torch.set_flush_denormal(False)
    smallest = torch.ones(4096, dtype=torch.int32).view(torch.float32)
    nonzero: list[int] = []

    def compute() -> None:
        nonzero.append(int((smallest * 1.5).count_nonzero()))

    compute()
    config = small_config()
    save_checkpoint(tmp_path, config, random_checkpoint(config, 0).tensors)
    load_engine(tmp_path, "cpu")
    for thread in (threading.Thread(target=compute), threading.Thread(target=compute)):
        thread.start()
        thread.join()
    compute()
    assert nonzero == [4096, 0, 0, 0]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(1, 9)), min_size=2, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_a_request_scores_the_same_alone_and_in_any_batch(lengths: list[tuple[int, int, int]], seed: int) -> None:
    world = make_world(small_config(), seed)
    random = np.random.default_rng(seed)
    requests = []
    free = random.permutation(ARENA_PAGES).astype(np.int32)
    for behaviours, suffix, candidates in lengths:
        count = world.engine.geometry.pages_for(behaviours)
        pages, free = free[:count], free[count:]
        tokens = world.pre_infer(NO_FEATURES, random_behaviours(random, behaviours), pages, [])
        items = random.integers(0, VOCABULARY, candidates)
        requests.append(world.engine.rank_inputs(tokens, pages, random_behaviours(random, suffix), items))
    together = world.engine.rank(requests)
    for request, outputs in zip(requests, together, strict=True):
        assert worst(outputs.scores, torch.from_numpy(world.scores(request))) <= TOLERANCE


def test_ranking_changes_nothing_in_the_arena() -> None:
    world, random = make_world(small_config()), np.random.default_rng(2)
    pages = world.pages(random, 20)
    tokens = world.pre_infer(NO_FEATURES, random_behaviours(random, 20), pages, [])
    before = world.arena.clone()
    world.scores(world.engine.rank_inputs(tokens, pages, random_behaviours(random, 3), np.arange(5)))
    assert torch.equal(world.arena, before)


def test_pages_hold_the_prefix_as_the_geometry_says_and_nothing_else_is_written() -> None:
    config = small_config()
    world, random = make_world(config), np.random.default_rng(3)
    geometry = world.engine.geometry
    prefix = random_behaviours(random, 19)
    pages = world.pages(random, 19)
    world.arena.fill_(7)
    world.pre_infer(NO_FEATURES, prefix, pages, [5])

    expected = full_inference(world.checkpoint, NO_FEATURES, prefix, np.arange(1))
    stored = world.arena.view(torch.float32)
    k_elements = geometry.num_heads * geometry.page_tokens * geometry.attention_dim
    for token in (0, 4, 5, 7, 8, 18):
        page = stored[int(pages[token // geometry.page_tokens])].view(config.num_layers, -1)
        for layer in range(config.num_layers):
            keys = page[layer, :k_elements].view(geometry.num_heads, geometry.page_tokens, -1)
            values = page[layer, k_elements:].view(geometry.num_heads, geometry.page_tokens, -1)
            place = token % geometry.page_tokens
            assert torch.allclose(keys[:, place].flatten().double(), expected.keys[layer][token], atol=1e-5)
            assert torch.allclose(values[:, place].flatten().double(), expected.values[layer][token], atol=1e-5)
    others = np.setdiff1d(np.arange(ARENA_PAGES), pages)
    assert bool((world.arena[torch.from_numpy(others)] == 7).all())


@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_kv_costs_at_most_twice_what_the_rounding_itself_costs(seed: int) -> None:
    world = make_world(small_config(num_layers=3), seed, KvDtype.BFLOAT16)
    random = np.random.default_rng(seed)
    history, items = random_behaviours(random, 90), np.arange(20)
    pages = world.pages(random, 80)
    tokens = world.pre_infer(NO_FEATURES, history[:80], pages, [13, 50])
    scores = world.scores(world.engine.rank_inputs(tokens, pages, history[80:], items))

    exact = full_inference(world.checkpoint, NO_FEATURES, history, items).scores
    rounded = full_inference(
        world.checkpoint, NO_FEATURES, history, items, round_kv=lambda x: x.to(torch.bfloat16).to(x.dtype)
    ).scores
    of_the_rounding = float((rounded - exact).abs().max())
    assert 0 < float(np.abs(scores - exact.numpy()).max()) <= 2 * of_the_rounding


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_are_never_stored_are_rounded_like_stored_rows(seed: int) -> None:
    """Otherwise a behaviour would have slightly different K,V in the suffix than later in the prefix."""
    world = make_world(small_config(num_layers=3, normalizer=4.0), seed, KvDtype.BFLOAT16)
    random = np.random.default_rng(seed)
    history, items = random_behaviours(random, 20), np.arange(20)
    pages = world.pages(random, 4)
    tokens = world.pre_infer(NO_FEATURES, history[:4], pages, [])
    scores = world.scores(world.engine.rank_inputs(tokens, pages, history[4:], items))

    exact = full_inference(world.checkpoint, NO_FEATURES, history, items).scores
    rounded = full_inference(
        world.checkpoint, NO_FEATURES, history, items, round_kv=lambda x: x.to(torch.bfloat16).to(x.dtype)
    ).scores
    of_the_rounding = float((rounded - exact).abs().max())
    assert float(np.abs(scores - rounded.numpy()).max()) <= 0.3 * of_the_rounding


def test_items_that_the_model_does_not_know_share_one_row_and_are_counted() -> None:
    world, random = make_world(small_config()), np.random.default_rng(5)
    prefix = Behaviours(np.array([1, -7, VOCABULARY, 3]), np.zeros(4, np.uint16), np.arange(4))
    assert world.engine.prefix_inputs(NO_FEATURES, prefix).unknown_items == 2
    pages = world.pages(random, 4)
    tokens = world.pre_infer(NO_FEATURES, prefix, pages, [])
    request = world.engine.rank_inputs(tokens, pages, Behaviours.empty(), np.array([5, 10**15, -1]))
    assert request.unknown_items == 2
    known, first, second = world.scores(request)
    assert np.allclose(first, second)
    assert not np.allclose(known, first)


def test_places_beyond_the_position_table_take_its_last_row() -> None:
    short, long = (small_config(num_positions=rows) for rows in (10, 300))
    world = make_world(short)
    tensors = dict(world.checkpoint.tensors)
    table = tensors["positions.weight"]
    tensors["positions.weight"] = torch.cat((table, table[-1:].expand(290, -1)))
    random = np.random.default_rng(6)
    history, items = random_behaviours(random, 30), np.arange(4)
    pages = world.pages(random, 30)
    tokens = world.pre_infer(NO_FEATURES, history, pages, [])
    scores = world.scores(world.engine.rank_inputs(tokens, pages, Behaviours.empty(), items))
    stretched = type(world.checkpoint)(long, tensors, "")
    assert worst(scores, full_inference(stretched, NO_FEATURES, history, items).scores) <= TOLERANCE


def test_the_normaliser_is_the_models_and_not_the_batchs() -> None:
    world, random = make_world(small_config()), np.random.default_rng(7)
    pages, other = world.pages(random, 10), np.arange(100, 125, dtype=np.int32)
    tokens = world.pre_infer(NO_FEATURES, random_behaviours(random, 10), pages[:2], [])
    longer = world.pre_infer(NO_FEATURES, random_behaviours(random, MAX_PREFIX), other, [])
    short = world.engine.rank_inputs(tokens, pages, Behaviours.empty(), np.arange(4))
    long = world.engine.rank_inputs(longer, other, Behaviours.empty(), np.arange(4))
    assert worst(world.engine.rank([short, long])[0].scores, torch.from_numpy(world.scores(short))) <= TOLERANCE


def test_more_than_the_limits_is_refused_with_both_numbers() -> None:
    world, random = make_world(small_config()), np.random.default_rng(8)
    with pytest.raises(TooLongError, match="201 prefix behaviours, the model takes 200"):
        world.engine.prefix_inputs(NO_FEATURES, random_behaviours(random, MAX_PREFIX + 1))
    pages = world.pages(random, 0)
    with pytest.raises(TooLongError, match="17 suffix behaviours, the model takes 16"):
        world.engine.rank_inputs(0, pages, random_behaviours(random, 17), np.arange(1))
    with pytest.raises(TooLongError, match="33 candidates, the model takes 32"):
        world.engine.rank_inputs(0, pages, Behaviours.empty(), np.arange(33))


def test_misuse_is_refused_before_anything_is_written() -> None:
    world, random = make_world(small_config()), np.random.default_rng(9)
    inputs = world.engine.prefix_inputs(NO_FEATURES, random_behaviours(random, 20))
    pages = world.pages(random, 20)
    with pytest.raises(ValueError, match="need 3 pages"):
        world.engine.pre_infer(PrefixChunk(inputs, 0, 20, pages[:2]))
    with pytest.raises(ValueError, match=r"chunk \[10, 21\)"):
        world.engine.pre_infer(PrefixChunk(inputs, 10, 21, pages))
    with pytest.raises(ValueError, match="arena is"):
        world.engine.bind(torch.zeros((4, 3), dtype=torch.uint8))
    assert not bool(world.arena.any())
    unbound = build_engine(world.checkpoint, CpuDevice(), KvDtype.FLOAT32, 8)
    with pytest.raises(ValueError, match="bind"):
        unbound.pre_infer(PrefixChunk(inputs, 0, 20, pages))


def test_an_empty_batch_has_no_outputs() -> None:
    assert make_world(small_config()).engine.rank([]) == []


def test_the_namespace_differs_with_everything_that_kv_depend_on() -> None:
    config = small_config()
    checkpoint = random_checkpoint(config, 0)
    engines = [
        build_engine(checkpoint, CpuDevice(), KvDtype.FLOAT32, 8),
        build_engine(checkpoint, CpuDevice(), KvDtype.BFLOAT16, 8),
        build_engine(checkpoint, CpuDevice(), KvDtype.FLOAT32, 16),
        build_engine(checkpoint, CpuDevice(), KvDtype.FLOAT32, 8, ComputeDtype.BFLOAT16),
        build_engine(random_checkpoint(config, 1), CpuDevice(), KvDtype.FLOAT32, 8),
        build_engine(random_checkpoint(small_config(normalizer=51.0), 0), CpuDevice(), KvDtype.FLOAT32, 8),
    ]
    assert len({engine.namespace for engine in engines}) == len(engines)
    assert build_engine(checkpoint, CpuDevice(), KvDtype.FLOAT32, 8).namespace == engines[0].namespace


def test_a_loaded_engine_is_the_one_that_was_saved(tmp_path: Path) -> None:
    config = small_config()
    checkpoint = random_checkpoint(config, 3)
    save_checkpoint(tmp_path, config, checkpoint.tensors)
    loaded = load_engine(tmp_path, "cpu", KvDtype.FLOAT32, 8, threads=1)
    assert loaded.revision == checkpoint.revision
    built = build_engine(checkpoint, CpuDevice(), KvDtype.FLOAT32, 8)
    assert loaded.weights_bytes == built.weights_bytes >= checkpoint.weights_bytes
    assert (loaded.num_tasks, loaded.limits.max_candidates) == (2, 32)


@pytest.mark.usefixtures("exact_int8")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "compute_dtype"),
    [
        ("meta", ComputeDtype.FLOAT32),
        ("meta", ComputeDtype.BFLOAT16),
        ("meta", ComputeDtype.INT8),
        ("research", ComputeDtype.FLOAT32),
        ("soft-max with every mask option", ComputeDtype.FLOAT32),
        ("dlrm-v3", ComputeDtype.FLOAT32),
    ],
)
def test_scratch_memory_stays_within_the_engines_bound(kind: str, compute_dtype: ComputeDtype, tmp_path: Path) -> None:
    config = KINDS[kind].model_copy(
        update={"max_prefix_behaviours": 1024, "max_candidates": 512, "embedding_dim": 32, "hidden_dim": 16}
    )
    checkpoint = random_checkpoint(config, 0)
    engine = build_engine(checkpoint, CpuDevice(), KvDtype.BFLOAT16, 64, compute_dtype)
    engine.bind(torch.zeros((70, engine.geometry.page_bytes), dtype=torch.uint8))
    random = np.random.default_rng(0)
    history = random_behaviours(random, 1024)
    inputs = engine.prefix_inputs(NO_FEATURES, history)
    pages = np.arange(engine.geometry.pages_for(inputs.tokens), dtype=np.int32)
    request = engine.rank_inputs(
        inputs.tokens, pages, Behaviours.empty(), np.arange(512), prefix_timestamps_ms=history.timestamps_ms
    )
    chunk = PrefixChunk(inputs, inputs.tokens // 2 if engine.rules.chunks else 0, inputs.tokens, pages)

    tokens = chunk.end - chunk.start
    chunk_bytes = peak_bytes(lambda: engine.pre_infer(chunk), tmp_path / "chunk.json")
    rank_bytes = peak_bytes(lambda: engine.rank([request, request]), tmp_path / "rank.json")
    both_bytes = peak_bytes(lambda: engine.forward([chunk], [request, request]), tmp_path / "both.json")
    assert 0 < chunk_bytes <= engine.scratch_bytes(tokens, 0)
    assert 0 < rank_bytes <= engine.scratch_bytes(0, 1024)
    assert 0 < both_bytes <= engine.scratch_bytes(tokens, 1024)


@pytest.mark.parametrize("work", [math.inf, 1], ids=["torch's products", "oneDNN's"])
@pytest.mark.parametrize(("heads", "stored"), [(1, KvDtype.FLOAT32), (4, KvDtype.BFLOAT16), (4, KvDtype.INT8)])
def test_blocked_attention_stays_within_its_bound(work: float, heads: int, stored: KvDtype, tmp_path: Path) -> None:
    if work == 1 and not HAS_ONEDNN:
        pytest.skip("this build of torch has no oneDNN")
    runs = [SegmentRows(3000, 200, 300)]
    forward = RaggedForward(runs, heads=heads, dqk=32, dv=32, page_tokens=64, stored=stored, device=CpuDevice())
    attention = BlockedAttention(forward.spec, work)
    begun = attention.begin(forward.kv, forward.segments)
    q, k, v = forward.q, forward.rounded(forward.k), forward.rounded(forward.v)
    held_bytes = peak_bytes(lambda: begun.attend(LAYER, q, k, v), tmp_path / "attention.json")
    assert 0 < held_bytes <= attention.scratch_bytes(500, 3200)


def test_no_memory_is_planned_for_products_of_onednn_that_are_not_used() -> None:
    """Every worker planned for a tile of oneDNN, of some MiB."""
    spec = spec_of(KINDS["meta"], ComputeDtype.FLOAT32)
    by_torch, by_onednn = BlockedAttention(spec), BlockedAttention(spec, ONEDNN_WORK)
    assert by_torch.scratch_bytes(64, 1024) < by_onednn.scratch_bytes(64, 1024)


def peak_bytes(work: object, trace: Path) -> int:
    """Most memory that torch's CPU allocator held during a call, beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()  # type: ignore[operator]
    profiler.export_chrome_trace(str(trace))
    held = peak = 0
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    for event in sorted(events, key=lambda event: float(event["ts"])):
        held += int(event["args"]["Bytes"])
        peak = max(peak, held)
    return peak


BLOCKED = attention_for(spec_of(KINDS["meta"], ComputeDtype.FLOAT32), None)
"""For the plain mask, the faster of torch's own products and those of oneDNN. Each process of a run measures it, so it
must not be a part of a test's name.
"""


@pytest.mark.parametrize(
    ("kind", "backend", "reason"),
    [
        pytest.param("meta", BLOCKED.attention.name, BLOCKED.reason, id="meta"),
        ("nvidia", "tiled torch", "the reference path, for target groups"),
        ("research", "tiled torch", "the reference path, for relative bias"),
        ("contextual mask and window", "tiled torch", "the reference path, for the contextual mask, max_attn_len"),
        ("soft-max", "scaled-dot-product torch", "the family is softmax"),
    ],
)
def test_the_log_says_which_back_end_was_chosen_and_why(kind: str, backend: str, reason: str) -> None:
    with capture_logs() as logs:
        engine = build_engine(random_checkpoint(KINDS[kind], 0), CpuDevice(), KvDtype.FLOAT32, 8)
    assert engine.backend == backend
    said = [entry for entry in logs if entry["event"] == "attention back end"]
    assert [(entry["name"], entry["device"], entry["reason"]) for entry in said] == [(backend, "cpu", reason)]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"min_full_attn_len": 3}, "min_full_attn_len needs max_attn_len"),
        ({"contextual_mask": True}, "contextual_mask needs contextual_features"),
        ({"mlp_dim": 8}, "mlp_dim is required in the family softmax"),
        ({"family": Family.SOFTMAX}, "mlp_dim is required in the family softmax, and allowed there only"),
        ({"family": Family.SOFTMAX, "mlp_dim": 8, "group_norm": True}, "allowed in the family hstu only"),
        ({"family": Family.SOFTMAX, "mlp_dim": 8, "normalizer": 50.0}, "normalizer is allowed in the family hstu only"),
        ({"normalizer": None}, "normalizer is required in the family hstu"),
        ({"relative_bias": {"positions": 4, "buckets": 3}}, "buckets"),
        ({"target_group_size": 0}, "target_group_size"),
    ],
)
def test_options_that_contradict_each_other_are_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        small_config(**changes)


def test_the_null_engine_keeps_the_contract_and_scores_by_item_alone() -> None:
    world, random = make_world(small_config(family=Family.NULL)), np.random.default_rng(0)
    pages = world.pages(random, 20)
    tokens = world.pre_infer(NO_FEATURES, random_behaviours(random, 20), pages, [7])
    assert tokens == 20
    items = np.array([3, 10**12, -4, 3])
    first = world.engine.rank_inputs(tokens, pages, random_behaviours(random, 2), items)
    second = world.engine.rank_inputs(0, pages[:0], Behaviours.empty(), items[:2])
    scores = world.engine.rank([first, second])
    assert np.array_equal(scores[0].scores, null_scores(items, 2))
    assert np.array_equal(scores[1].scores, scores[0].scores[:2])
    assert len(np.unique(scores[0].scores[:3])) == 6
    assert float(scores[0].scores.min()) >= 0 and float(scores[0].scores.max()) < 1
    with pytest.raises(TooLongError):
        world.engine.rank_inputs(0, pages, Behaviours.empty(), np.arange(33))
    with pytest.raises(ValueError, match="need 3 pages"):
        inputs = world.engine.prefix_inputs(NO_FEATURES, random_behaviours(random, 20))
        world.engine.pre_infer(PrefixChunk(inputs, 0, 20, pages[:1]))
