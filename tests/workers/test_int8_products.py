"""Products in int8: exact sums of rounded numbers, each row by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.runtime.errors import RelayError
from relaygr.worker.device import CpuDevice, cpu
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.engine import build_engine, load_engine
from relaygr.worker.model.interface import Engine
from relaygr.worker.model.layer_parts import added_product, product, quantised
from relaygr.worker.model.options import ComputeDtype
from tests.workers.engine_kinds import HAS_ONEDNN
from tests.worlds.dense.small import int8_product
from tests.worlds.model import small_config

pytestmark = [
    pytest.mark.skipif(not HAS_ONEDNN, reason="this build of torch has no oneDNN"),
    pytest.mark.usefixtures("exact_int8"),
]


OF_THIS_CPU = CpuDevice.has_int8_products


def made(rows: int, seed: int = 0, inner: int = 72, columns: int = 40) -> tuple[torch.Tensor, ...]:
    """Rows [rows, inner], weight, bias and a residual stream. Rows and columns differ much in size."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    sizes = torch.logspace(-3, 3, max(rows, 1))[torch.randperm(max(rows, 1), generator=generator)][:rows, None]
    weight = normal(inner, columns) * torch.logspace(-2, 2, columns)
    return normal(rows, inner) * sizes, weight, normal(columns), normal(rows, columns)


@pytest.mark.parametrize("rows", [0, 1, 7, 300])
@pytest.mark.parametrize(("inner", "columns"), [(72, 40), (27, 33), (512, 64)])
def test_a_product_is_that_of_the_rounded_numbers(rows: int, inner: int, columns: int) -> None:
    x, weight, bias, y = made(rows, 0, inner, columns)
    expected = int8_product(x.double(), weight.double())
    for found, added in (
        (product(weight, bias, torch.int8)(x), bias),
        (added_product(weight, torch.int8)(y, x), y),
        (added_product(weight, torch.int8, bias)(y, x), y + bias),
    ):
        assert found.dtype is torch.float32 and found.shape == expected.shape
        # A quotient that lies between two numbers may round to either in float32.
        close = (found.double() - added.double() - expected).abs() <= 1e-4 * expected.abs().amax(1, keepdim=True)
        assert int((~close).sum()) <= 0.01 * close.numel()


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 300), seed=st.integers(0, 99), low=st.integers(0, 299), count=st.integers(1, 40))
def test_the_result_of_a_row_is_the_same_beside_any_other_rows(rows: int, seed: int, low: int, count: int) -> None:
    """To the last bit, hence cached and full inference agree in the products."""
    x, weight, bias, y = made(rows, seed)
    some = slice(min(low, rows - 1), min(low, rows - 1) + count)
    project, add = product(weight, bias, torch.int8), added_product(weight, torch.int8, bias)
    assert torch.equal(project(x)[some], project(x[some]))
    assert torch.equal(add(y, x)[some], add(y[some], x[some]))


def test_the_largest_number_of_each_row_is_kept_and_others_are_off_by_half_a_step_at_most() -> None:
    x, *_ = made(50)
    numbers, scales = quantised(x, 1)
    assert numbers.dtype is torch.int8 and scales.shape == (50, 1)
    assert (numbers.abs().amax(1) == 127).all()
    assert ((numbers * scales - x).abs() <= scales * 0.501).all()
    zeros, scale = quantised(torch.zeros(2, 5), 1)
    assert not zeros.any() and (scale > 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_changes_no_other(bad: float) -> None:
    x, weight, bias, _ = made(5)
    expected = product(weight, bias, torch.int8)(x)
    x[2, 3] = bad
    found = product(weight, bias, torch.int8)(x)
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = small_config()
    save_checkpoint(tmp_path, config, random_checkpoint(config, 0).tensors)
    return tmp_path


def engine_of(model: Path, dtype: ComputeDtype = ComputeDtype.INT8) -> Engine:
    return load_engine(model, "cpu", KvDtype.FLOAT32, 16, compute_dtype=dtype)


def test_a_cpu_without_the_instructions_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "has_int8_products", OF_THIS_CPU)
    monkeypatch.setattr(cpu, "instruction_sets", lambda: {"avx2", "avx512f"})
    with pytest.raises(RelayError, match=r"int8 needs a CPU with VNNI.*set worker.compute_dtype to float32"):
        engine_of(model)
    with pytest.raises(RelayError, match="int8 needs a CPU with VNNI"):
        build_engine(random_checkpoint(small_config(), 0), CpuDevice(), KvDtype.FLOAT32, 16, ComputeDtype.INT8)
    for name in ("avx512_vnni", "avx_vnni", "amx_int8"):
        monkeypatch.setattr(cpu, "instruction_sets", lambda name=name: {name})
        assert engine_of(model).compute_dtype is ComputeDtype.INT8


def test_the_copies_of_the_weights_are_counted() -> None:
    config = small_config()
    checkpoint = random_checkpoint(config, 0)
    engines = {
        dtype: build_engine(checkpoint, CpuDevice(), KvDtype.FLOAT32, 16, dtype).weights_bytes
        for dtype in (ComputeDtype.FLOAT32, ComputeDtype.INT8)
    }
    matrices = [t for name, t in checkpoint.tensors.items() if name.startswith("layers.") and t.dim() == 2]
    assert engines[ComputeDtype.INT8] >= checkpoint.weights_bytes + sum(t.numel() for t in matrices)
