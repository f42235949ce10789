"""The fused norm and output of a layer against the plain ones: interpreted, or on a GPU where there is one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from structlog.testing import capture_logs

from relaygr.worker.model import fused
from relaygr.worker.model.fused import FusedNorm, FusedOutput, OutputShape, fused_output, if_it_runs, input_norm
from relaygr.worker.model.hstu import HstuLayer, LayerOptions, LayerWeights, OutputFunction
from relaygr.worker.model.layer_parts import LayerNorm
from relaygr.worker.model.options import Activated, OutputForm
from tests.worlds.programs import launches
from tests.worlds.triton import DEVICE, INTERPRETED

WIDTH = 12
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def programs_do_not_depend_on_one_another() -> Iterator[None]:
    """In any test here."""
    with launches():
        yield


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE.torch_device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "group", "affine"),
    [case for case in itertools.product(OutputForm, (False, True), (False, True)) if case[1:] != (True, False)],
)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("heads", "dim"), [(3, 6), (4, 1)])
def test_the_fused_output_is_the_plain_one(
    form: OutputForm, group: bool, affine: bool, dtype: torch.dtype, heads: int, dim: int
) -> None:
    columns = heads * dim
    norm_shape = heads if group else columns
    norm = (random(norm_shape, seed=1), random(norm_shape, seed=2)) if affine else None
    weight, bias = random(columns * form.blocks, WIDTH, seed=3), random(WIDTH, seed=4)
    x, a = random(5, WIDTH, seed=5), random(5, columns, seed=6) * 0.1
    z = random(5, 3 * columns, seed=7).to(dtype)[:, :columns]
    made = FusedOutput(OutputShape(form, heads, 1e-6, group, dtype), norm, weight, bias)
    activated = F.silu(z.cpu().float())
    expected = plain(form, group, norm, weight.cpu(), bias.cpu(), heads, dim)(x.cpu(), activated, a.cpu())
    error = (made(x, z, a).cpu() - expected).abs().max() / expected.abs().max()
    assert float(error) <= TOLERANCES[dtype]
    assert made(x[:0], z[:0], a[:0]).shape == (0, WIDTH)


def plain(
    form: OutputForm,
    group: bool,
    norm: tuple[torch.Tensor, torch.Tensor] | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    heads: int,
    dim: int,
) -> OutputFunction:
    """The output of a layer after attention, on the CPU in float32."""
    weights = LayerWeights(
        None,
        None,
        torch.zeros(WIDTH, heads * (2 * dim + 2)),
        None,
        None if norm is None else norm[0].cpu(),
        None if norm is None else norm[1].cpu(),
        weight,
        bias,
    )
    layer = HstuLayer(LayerOptions(heads, 1, dim, 1e-6, Activated.U, form, group), weights)
    return layer._output


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("width", [1, 12, 700])
def test_the_fused_norm_is_the_plain_one_narrowed(width: int, affine: bool) -> None:
    weight, bias = (random(width, seed=1), random(width, seed=2)) if affine else (None, None)
    x = random(5, 2 * width, seed=3)[:, :width] * 7.0 + 100.0
    made = FusedNorm(weight, bias, width, 1e-6, torch.bfloat16)
    expected = LayerNorm(weight, bias, width, 1e-6)(x)
    assert made(x).dtype is torch.bfloat16
    assert float((made(x) - expected).abs().max()) <= 2**-8 * float(expected.abs().max()) + 1e-4
    assert made(x[:0]).shape == (0, width)


@pytest.mark.slow
@pytest.mark.parametrize("activated", Activated)
@pytest.mark.parametrize("form", OutputForm)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_layer_with_fused_parts_is_the_plain_layer(
    monkeypatch: pytest.MonkeyPatch, activated: Activated, form: OutputForm, dtype: torch.dtype
) -> None:
    """SiLU is applied to each column exactly once, by the projection or by the output."""
    options = LayerOptions(2, 3, 4, 1e-6, activated, form, False, dtype)
    shapes = [(WIDTH,), (WIDTH,), (WIDTH, 28), (28,), (8,), (8,), (8 * form.blocks, WIDTH), (WIDTH,)]
    weights = LayerWeights(*(random(*shape, seed=seed) for seed, shape in enumerate(shapes)))
    x = random(6, WIDTH, seed=9)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (v * (q * k).sum(-1, keepdim=True)).flatten(1)

    layers = []
    for chosen in (never, always):
        monkeypatch.setattr(fused, "if_it_runs", chosen)
        layers.append(HstuLayer(options, weights))
    plain_layer, fused_layer = layers
    assert isinstance(fused_layer._output, FusedOutput)
    assert isinstance(fused_layer._input_norm, FusedNorm) is (dtype is not torch.float32)
    expected = plain_layer(x, attend)
    assert float((fused_layer(x, attend) - expected).abs().max() / expected.abs().max()) <= TOLERANCES[dtype]


def never(what: str, device: torch.device, make: Callable[[], object]) -> None:
    """For tests: no device has kernels of its own."""


def always(what: str, device: torch.device, make: Callable[[], object]) -> object:
    """For tests: every device has kernels, since the interpreter runs anywhere."""
    return make()


def test_a_kernel_that_does_not_run_is_not_used_and_one_warning_is_logged() -> None:
    def fails() -> None:
        raise RuntimeError("ptxas fatal: no such architecture")

    with capture_logs() as logs:
        assert if_it_runs("input norm", torch.device("cpu"), fails) is None
        assert logs == []
        for _ in range(3):
            assert if_it_runs("input norm", torch.device("cuda", 0), fails) is None
    assert [(entry["log_level"], entry["kernel"], entry["device"]) for entry in logs] == [
        ("warning", "input norm", "cuda:0")
    ]


def test_the_plain_norm_is_narrowed_too() -> None:
    x, projection = torch.randn(3, WIDTH), torch.zeros(WIDTH, 4)
    expected = LayerNorm(None, None, WIDTH, 1e-6)(x)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(input_norm(None, None, projection, 1e-6, dtype)(x), expected.to(dtype))


def test_other_devices_have_the_plain_output() -> None:
    shape = OutputShape(OutputForm.UNORM, 1, 1e-6, False, torch.float32)
    with capture_logs() as logs:
        assert fused_output(shape, None, torch.zeros(4, 3), None) is None
    assert logs == []


@pytest.mark.skipif(INTERPRETED, reason="no GPU")
def test_cuda_has_the_fused_output() -> None:
    shape = OutputShape(OutputForm.U_A_UNORM, 4, 1e-6, False, torch.bfloat16)
    assert isinstance(fused_output(shape, None, random(3 * 512, 512, seed=0), None), FusedOutput)
