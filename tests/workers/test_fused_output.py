"""The fused output of a layer against the plain one: interpreted, or on a GPU where there is one."""

from __future__ import annotations

import itertools

import pytest
import torch
from structlog.testing import capture_logs

from tests.workers.triton_world import DEVICE, INTERPRETED
from workers.model.fused_output import FusedOutput, OutputShape, fused_output
from workers.model.hstu import HstuLayer, LayerOptions, LayerWeights, OutputFunction
from workers.model.options import Activated, OutputForm

WIDTH = 12
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE.torch_device)


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
    u = random(5, 3 * columns, seed=7).to(dtype)[:, :columns]
    fused = FusedOutput(OutputShape(form, heads, 1e-6, group, dtype), norm, weight, bias)
    expected = plain(form, group, norm, weight.cpu(), bias.cpu(), heads, dim)(x.cpu(), u.cpu().float(), a.cpu())
    error = (fused(x, u, a).cpu() - expected).abs().max() / expected.abs().max()
    assert float(error) <= TOLERANCES[dtype]
    assert fused(x[:0], u[:0], a[:0]).shape == (0, WIDTH)


def plain(
    form: OutputForm,
    group: bool,
    norm: tuple[torch.Tensor, torch.Tensor] | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    heads: int,
    dim: int,
) -> OutputFunction:
    """What a layer on the CPU does after attention, in float32."""
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


def test_other_devices_have_the_plain_output() -> None:
    shape = OutputShape(OutputForm.UNORM, 1, 1e-6, False, torch.float32)
    with capture_logs() as logs:
        assert fused_output(shape, None, torch.zeros(4, 3), None) is None
    assert logs == []


@pytest.mark.skipif(INTERPRETED, reason="no GPU")
def test_cuda_has_the_fused_output() -> None:
    shape = OutputShape(OutputForm.U_A_UNORM, 4, 1e-6, False, torch.bfloat16)
    assert isinstance(fused_output(shape, None, random(3 * 512, 512, seed=0), None), FusedOutput)
