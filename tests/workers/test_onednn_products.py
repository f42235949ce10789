"""Products by oneDNN, for rows of any number and contexts of several blocks: what torch or the formula gives."""

from __future__ import annotations

import gc
import math

import pytest
import torch

from relaygr.worker.device import CpuDevice, set_threads
from relaygr.worker.kv import KvDtype
from relaygr.worker.model import layer_parts
from relaygr.worker.model.attention.blocked import ONEDNN_KEY_BLOCK, ONEDNN_WORK, BlockedAttention
from relaygr.worker.model.attention.paged_kv import KEY_BLOCK
from relaygr.worker.model.checkpoint import Checkpoint, random_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.engine import build_engine
from relaygr.worker.model.layer_parts import (
    added_product,
    measure_onednn,
    onednn_is_faster,
    onednn_product,
    product,
    use_onednn,
)
from relaygr.worker.model.options import ComputeDtype
from tests.workers.engine_kinds import HAS_ONEDNN, KINDS
from tests.worlds.attention import LAYER, TOLERANCES, RaggedForward, SegmentRows

pytestmark = pytest.mark.skipif(not HAS_ONEDNN, reason="this build of torch has no oneDNN")

CONTEXT = 2 * ONEDNN_KEY_BLOCK + 100


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", KvDtype)
@pytest.mark.parametrize(
    ("causal", "free"), [(0, 1), (16, 0), (40, 130), (300, 300)], ids=["a row", "an append", "a hit", "several tiles"]
)
def test_rows_get_what_the_formula_gives(causal: int, free: int, kv_dtype: KvDtype) -> None:
    run = SegmentRows(CONTEXT, causal, free)
    forward = RaggedForward([run], dqk=32, dv=32, page_tokens=48, stored=kv_dtype, device=CpuDevice())
    expected = forward.expected()
    # A layer rounds its rows to what pages keep.
    own_k, own_v = forward.rounded(forward.k), forward.rounded(forward.v)
    for products, work in {"torch's": math.inf, "every one": 1, "large ones": ONEDNN_WORK}.items():
        attention = BlockedAttention(forward.spec, work).begin(forward.kv, forward.segments)
        error = forward.error(attention.attend(LAYER, forward.q, own_k, own_v), expected)
        # As a share of the sum, rounding grows with the square root of the number of keys. The tolerance is for one
        # block.
        assert error <= TOLERANCES[torch.float32] * math.sqrt(CONTEXT / KEY_BLOCK), products


@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_products_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(layer_parts._Choice, "uses_onednn", True)
    weight, bias, x, y = torch.randn(24, 40), torch.randn(40), torch.randn(rows, 30)[:, 3:27], torch.randn(rows, 40)
    assert torch.allclose(product(weight, bias)(x), x @ weight + bias, atol=1e-5)
    before = y.clone()
    assert torch.allclose(added_product(weight, torch.float32, bias)(y, x), y + x @ weight + bias, atol=1e-5)
    assert torch.equal(y, before), "the residual stream of the caller stays as it is"


def test_products_of_any_number_of_rows_need_few_sizes() -> None:
    """oneDNN compiled a product for each number of rows, for a millisecond and half a MiB."""
    sizes = {count: layer_parts.padded_rows(count) for count in range(1, 6145)}
    assert all(count <= size <= max(count + 15, count * 9 / 8) for count, size in sizes.items())
    assert len(set(sizes.values())) == 52
    assert all(layer_parts.padded_rows(size) == size for size in sizes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_rows_of_padding_do_not_change_the_others(dtype: torch.dtype) -> None:
    if dtype is torch.int8 and not CpuDevice().has_int8_products:
        pytest.skip("this CPU has no products in int8")
    weight, bias = torch.randn(48, 64), torch.randn(64)
    x, y = torch.randn(320, 48), torch.randn(320, 64)
    narrow = x.to(torch.bfloat16) if dtype is torch.bfloat16 else x
    whole, added = product(weight, bias, dtype), added_product(weight, dtype)
    assert layer_parts.padded_rows(291) == 320
    assert torch.allclose(whole(narrow[:291]), whole(narrow)[:291], atol=1e-5)
    assert torch.allclose(added(y[:291], x[:291]), added(y, x)[:291], atol=1e-5)
    assert added(y[:291], x[:291]).shape == (291, 64)


def test_torch_computes_the_products_if_it_was_built_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setattr(layer_parts, "onednn_product", missing)
    assert measure_onednn() is False


def test_both_are_measured_as_layers_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all threads, with a weight that oneDNN lays out anew in each call, the slower one was chosen."""
    seen: list[tuple[bool, int]] = []

    def watched(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        seen.append((weight.is_mkldnn, torch.get_num_threads()))
        return onednn_product(rows, weight, bias)

    monkeypatch.setattr(layer_parts, "onednn_product", watched)
    before = torch.get_num_threads()
    set_threads(3)
    try:
        measure_onednn()
        assert set(seen) == {(True, 1)}
        assert torch.get_num_threads() == 3
    finally:
        set_threads(before)


def test_a_process_may_take_over_the_choice_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_parts._Choice, "uses_onednn", None)
    monkeypatch.setattr(layer_parts, "measure_onednn", lambda: True)
    assert onednn_is_faster() is True
    use_onednn(False)
    assert onednn_is_faster() is False


def copied(checkpoint: Checkpoint, compute_dtype: ComputeDtype = ComputeDtype.FLOAT32) -> int:
    """Bytes that an engine counts beside the weights of its checkpoint."""
    engine = build_engine(checkpoint, CpuDevice(), KvDtype.FLOAT32, 8, compute_dtype)
    return engine.weights_bytes - checkpoint.weights_bytes


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_packed_weights_are_counted_and_freed_with_their_engine(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig
) -> None:
    """They were missing from the memory plan, although they double the weights of the layers."""
    monkeypatch.setattr(layer_parts._Choice, "uses_onednn", True)
    pack, packed_bytes, weight_bytes = torch.ops.mkldnn._reorder_linear_weight, [], []

    def counting(weight: torch.Tensor, rows: int) -> torch.Tensor:
        packed: torch.Tensor = pack(weight, rows)
        packed_bytes.append(torch.ops.mkldnn._nbytes(packed))
        # The whole units of 64 that the plan counts for this weight.
        weight_bytes.append(4 * -(-weight.shape[0] // 64) * -(-weight.shape[1] // 64) * 64**2)
        return packed

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", counting)
    checkpoint = random_checkpoint(config, 0)
    gc.collect()
    gc.disable()
    try:
        before = packed_tensors()
        engine = build_engine(checkpoint, CpuDevice(), KvDtype.FLOAT32, 8)
        assert packed_tensors() - before == len(packed_bytes) > 0
        assert engine.weights_bytes - checkpoint.weights_bytes == sum(weight_bytes) >= sum(packed_bytes)
        del engine
        assert packed_tensors() == before, "a replaced model keeps its weights until a full garbage collection"
    finally:
        gc.enable()


def packed_tensors() -> int:
    return sum(1 for found in gc.get_objects() if type(found) is torch.Tensor and found.is_mkldnn)


def test_narrow_copies_are_counted_and_without_onednn_there_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = random_checkpoint(KINDS["meta"], 0)
    monkeypatch.setattr(layer_parts._Choice, "uses_onednn", False)
    assert copied(checkpoint) == 0
    matrices = [t for name, t in checkpoint.tensors.items() if name.startswith("layers.") and t.dim() == 2]
    assert copied(checkpoint, ComputeDtype.BFLOAT16) == sum(2 * t.numel() for t in matrices)
