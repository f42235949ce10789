"""Products of layers in machine code equal the formula, for any rows, weights and threads."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator

import pytest
import torch
from structlog.testing import capture_logs

from relaygr.worker.device import set_threads
from relaygr.worker.model import layer_parts, machine_code
from relaygr.worker.model.layer_parts import added_product, copy_bytes, product
from relaygr.worker.model.machine_code import CompiledProduct, compiles_products

WEIGHTS = [(2, 16), (30, 32), (64, 48), (100, 80), (512, 2048), (1536, 512)]
ROWS = [0, 1, 7, 8, 9, 16, 23, 259, 300, 512, 513, 515, 519, 600, 1030]
pytestmark = pytest.mark.skipif(not compiles_products(), reason="no llvmlite, or a CPU without AVX-512")


@pytest.fixture(autouse=True)
def same_numbers_and_threads_as_before() -> Iterator[None]:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    yield
    set_threads(before)


def error(found: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, added: torch.Tensor) -> float:
    """The largest error, in parts of what one rounding of all the numbers that were added would be."""
    exact = rows.double() @ weight.double() + added.double()
    sizes = rows.double().abs() @ weight.double().abs() + added.double().abs()
    return float(((found.double() - exact).abs() / sizes).max()) if found.numel() else 0.0


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
def test_rows_get_what_the_formula_gives(shape: tuple[int, int], threads: int) -> None:
    set_threads(threads)
    weight, bias = torch.randn(shape), torch.randn(shape[1])
    compiled = CompiledProduct(weight)
    rows, residual = torch.randn(max(ROWS), shape[0]), torch.randn(max(ROWS), shape[1])
    exact = rows.double() @ weight.double()
    sizes = rows.double().abs() @ weight.double().abs()
    for count in ROWS:
        for added in (bias, residual[:count]):
            found = compiled(rows[:count], added)
            assert found.shape == (count, shape[1])
            errors = (found.double() - exact[:count] - added).abs() / (sizes[:count] + added.abs())
            # Rounding errors grow with the square root of the numbers that are added.
            assert not count or float(errors.max()) <= 5e-7 * max(1, shape[0] / 512) ** 0.5


def test_a_last_call_of_less_than_a_tile_overlaps_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "_ROWS", 8)
    weight, bias = torch.randn(64, 48), torch.randn(48)
    for count in range(8, 26):
        rows = torch.randn(count, 64)
        assert error(CompiledProduct(weight)(rows, bias), rows, weight, bias) <= 5e-7


def test_shapes_and_types_that_do_not_fit_are_refused() -> None:
    """Their memory would be read past its end."""
    compiled, rows, bias = CompiledProduct(torch.randn(64, 32)), torch.randn(20, 64), torch.randn(32)
    for wrong in (bias[None], bias[:16], torch.randn(20, 16), torch.randn(19, 32), bias.double(), bias.bfloat16()):
        with pytest.raises(ValueError, match="do not fit a weight"):
            compiled(rows, wrong)
    for wrong in (rows[:, :62], rows[0], rows[None], rows.double(), torch.randn(3, 62)):
        with pytest.raises(ValueError, match="do not fit a weight"):
            compiled(wrong, bias)


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
    assert 2 * copy_bytes((64, 32), torch.float32, "cpu") == sum(each._panels.nbytes for each in made)
    assert copy_bytes((64, 32), torch.float32, "cuda") == 0


@pytest.mark.parametrize("shape", [(63, 64), (64, 40), (64,), (2, 16, 16)], ids=str)
def test_other_weights_are_left_to_torch(shape: tuple[int, ...]) -> None:
    assert not CompiledProduct.fits(shape)


def test_torch_computes_the_products_if_llvm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise RuntimeError("LLVM IR parsing error")

    monkeypatch.setattr(machine_code, "_compiled_product", failing)
    monkeypatch.setattr(layer_parts._Choice, "uses_onednn", False)
    weight, bias, rows, residual = torch.randn(64, 32), torch.randn(32), torch.randn(9, 64), torch.randn(9, 32)
    compiles_products.cache_clear()
    try:
        with capture_logs() as logs:
            assert error(product(weight, bias)(rows), rows, weight, bias) <= 5e-7
            assert error(added_product(weight, torch.float32)(residual, rows), rows, weight, residual) <= 5e-7
        (entry,) = logs
        assert entry["event"] == "products are not compiled, those of torch instead"
        assert "LLVM IR parsing error" in entry["error"]
        assert copy_bytes((64, 32), torch.float32, "cpu") == 0
    finally:
        compiles_products.cache_clear()


def test_weights_are_kept_on_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_arguments: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    weight, bias, rows = torch.randn(1024, 512), torch.randn(512), torch.randn(9, 1024)
    assert error(CompiledProduct(weight)(rows, bias), rows, weight, bias) <= 5e-7
