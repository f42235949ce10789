"""Products of layers in machine code equal the formula, for any rows, weights and threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from relaygr.worker.device import set_threads
from relaygr.worker.model import layer_parts, machine_code
from relaygr.worker.model.layer_parts import added_product, copy_bytes, product
from relaygr.worker.model.machine_code import CompiledProduct

WEIGHTS = [(2, 16), (30, 32), (64, 48), (100, 80), (512, 2048), (1536, 512)]
ROWS = [0, 1, 7, 8, 9, 16, 23, 259, 300, 600]
pytestmark = pytest.mark.skipif(not CompiledProduct.fits((512, 512)), reason="no llvmlite, or a CPU without AVX-512")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    set_threads(before)


def error(found: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, added: torch.Tensor) -> float:
    """The largest error, in parts of what one rounding of all the numbers that were added would be."""
    exact = rows.double() @ weight.double() + added.double()
    sizes = rows.double().abs() @ weight.double().abs() + added.double().abs()
    return float(((found.double() - exact).abs() / sizes).max()) if found.numel() else 0.0


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
def test_rows_get_what_the_formula_gives(shape: tuple[int, int], threads: int) -> None:
    set_threads(threads)
    weight, bias = torch.randn(shape), torch.randn(shape[1])
    compiled = CompiledProduct(weight)
    for count in ROWS:
        rows, residual = torch.randn(count, shape[0]), torch.randn(count, shape[1])
        for added in (bias, residual):
            found = compiled(rows, added)
            assert found.shape == (count, shape[1])
            assert error(found, rows, weight, added) <= 5e-7


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    """So K,V of a token do not depend on the chunk in which they were computed."""
    compiled, bias, rows = CompiledProduct(torch.randn(96, 112)), torch.randn(112), torch.randn(40, 96)
    together = compiled(rows, bias)
    set_threads(3)
    for first, last in ((0, 1), (3, 12), (8, 24), (39, 40)):
        assert torch.equal(compiled(rows[first:last], bias), together[first:last])


def test_arguments_may_be_parts_of_others() -> None:
    wide, weight, bias = torch.randn(20, 90), torch.randn(64, 32), torch.randn(64)[::2]
    rows, residual = wide[:, 5:69], torch.randn(32, 20).t()
    compiled = CompiledProduct(weight.t().contiguous().t())
    for added in (bias, residual):
        before = added.clone()
        assert error(compiled(rows, added), rows, weight, added) <= 5e-7
        assert torch.equal(added, before), "the residual stream of the caller stays as it is"


def test_layers_use_it_and_its_copy_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = torch.randn(64, 32), torch.randn(9, 64)
    made: list[CompiledProduct] = []
    init = CompiledProduct.__init__

    def counted(self: CompiledProduct, weight: torch.Tensor) -> None:
        made.append(self)
        init(self, weight)

    monkeypatch.setattr(CompiledProduct, "__init__", counted)
    bias, residual = torch.randn(32), torch.randn(9, 32)
    assert error(product(weight, bias)(rows), rows, weight, bias) <= 5e-7
    assert error(added_product(weight, torch.float32)(residual, rows), rows, weight, residual) <= 5e-7
    assert len(made) == 2
    assert copy_bytes((64, 32), torch.float32, "cpu") == weight.nbytes
    assert copy_bytes((64, 32), torch.float32, "cuda") == 0


@pytest.mark.parametrize("shape", [(63, 64), (64, 40), (64,), (2, 16, 16)], ids=str)
def test_other_weights_are_left_to_torch(shape: tuple[int, ...]) -> None:
    assert not CompiledProduct.fits(shape)


def test_torch_computes_the_products_if_llvm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise RuntimeError("LLVM IR parsing error")

    monkeypatch.setattr(machine_code, "_compiled_product", failing)
    machine_code._is_able.cache_clear()
    monkeypatch.setattr(layer_parts._Choice, "uses_onednn", False)
    try:
        assert not CompiledProduct.fits((64, 32))
        assert copy_bytes((64, 32), torch.float32, "cpu") == 0
    finally:
        machine_code._is_able.cache_clear()
