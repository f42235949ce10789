"""Fused kernels around an HSTU layer's products, and for rounding K,V: on CUDA, if Triton is installed and the kernels
compile and run.

The *input norm* is the norm before a projection. torch's norm writes float32, and a second kernel narrows it; one
Triton kernel reads a row once and writes it once. In float32 there is nothing to narrow, and torch's norm is used.

The *output* of a layer is SiLU of U, norm, gate and concatenation, then one matrix product. Plain torch (`hstu.py`)
reads and writes the rows for each of these steps, and adds three products to the residual stream one after the other.
One Triton kernel reads A and U once and writes the product's rows in its type: [U, A, U * norm(A)] or another form.

cuBLAS computes the products. A Triton product that normalises its rows at their load would save more bytes, but must be
as fast as cuBLAS for all sizes. docs/cuda.md has the bytes that fusing saves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog
import torch

from relaygr.worker.kv import KvDtype
from relaygr.worker.model.attention.spec import rounding, torch_dtype
from relaygr.worker.model.layer_parts import LayerNorm, RowFunction, added_product
from relaygr.worker.model.options import OutputForm

WARP_COLUMNS = 512
"""Columns of a row for one warp: 16 for each thread."""

T = TypeVar("T")
log = structlog.get_logger(__name__)


def if_it_runs(what: str, device: torch.device, make: Callable[[], T]) -> T | None:
    """The result of `make`, which also runs it once. None on devices other than CUDA, and if `make` raises.

    A failure is logged once for all layers.
    """
    if device.type != "cuda":
        return None
    try:
        return make()
    # A compiler may raise any error, and plain torch always works.
    except Exception as error:
        _warn(what, str(device), repr(error))
        return None


@functools.cache
def _warn(kernel: str, device: str, error: str) -> None:
    log.warning("no fused kernel, plain torch instead", kernel=kernel, device=device, error=error)


def warps_of(columns: int) -> int:
    """Warps for a row with this number of columns."""
    return min(8, max(1, columns // WARP_COLUMNS))


class FusedNorm:
    """LayerNorm of float32 rows, written in a narrow type."""

    def __init__(
        self, weight: torch.Tensor | None, bias: torch.Tensor | None, width: int, eps: float, dtype: torch.dtype
    ) -> None:
        """Raises ImportError if Triton is missing."""
        import triton

        from relaygr.worker.model.triton.norm_kernels import norm_kernel

        self._kernel = norm_kernel
        self._weight, self._bias, self._eps, self._dtype = weight, bias, eps, dtype
        padded = triton.next_power_of_2(width)
        self._fixed = {"D": width, "PAD_D": padded, "AFFINE": weight is not None, "num_warps": warps_of(padded)}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, D], contiguous along its columns -> [rows, D] of the narrow type."""
        out = torch.empty(x.shape, dtype=self._dtype, device=x.device)
        if x.shape[0]:
            self._kernel[(x.shape[0],)](
                x, self._weight, self._bias, out, self._eps, x.stride(0), out.stride(0), **self._fixed
            )
        return out


def input_norm(
    weight: torch.Tensor | None, bias: torch.Tensor | None, projection: torch.Tensor, eps: float, dtype: torch.dtype
) -> RowFunction:
    """The norm before the product with `projection` [D, ...]. It returns rows of `dtype`, float32 for int8."""
    width = projection.shape[0]

    def tried() -> FusedNorm:
        norm = FusedNorm(weight, bias, width, eps, dtype)
        norm(torch.zeros((1, width), device=projection.device))
        return norm

    plain = LayerNorm(weight, bias, width, eps)
    if dtype in (torch.float32, torch.int8):
        return plain
    return if_it_runs("input norm", projection.device, tried) or (lambda x: plain(x).to(dtype))


def kv_rounding(dtype: KvDtype, device: torch.device) -> RowFunction:
    """`rounding` of K or V [rows, heads, dim]. In plain torch, scaled types take ten launches."""
    plain = rounding(dtype)

    def tried() -> RowFunction:
        from relaygr.worker.model.triton.launch import check_stored_type, round_rows

        check_stored_type(dtype, device)
        round_rows(torch.ones((1, 1, 16), device=device), torch_dtype(dtype))
        return lambda x: round_rows(x, torch_dtype(dtype))

    return (if_it_runs("rounding of K,V", device, tried) if dtype.is_scaled else None) or plain


_KEEPS = {OutputForm.UNORM: 0, OutputForm.U_A_UNORM: 1, OutputForm.U_NA_UNORM: 2}


@dataclass(frozen=True, slots=True)
class OutputShape:
    """The options of a layer's output."""

    form: OutputForm
    num_heads: int
    norm_eps: float
    group_norm: bool
    compute_dtype: torch.dtype


class FusedOutput:
    """y = x + read Wo [+ bo]; the form defines `read`."""

    def __init__(
        self,
        shape: OutputShape,
        norm: tuple[torch.Tensor, torch.Tensor] | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        """`norm`: weight and bias, [H dv], or [H] for a norm per head; None: a norm without weight and bias.

        Raises ImportError if Triton is missing.
        """
        import triton

        from relaygr.worker.model.triton.norm_kernels import gated_norm_kernel

        self._kernel = gated_norm_kernel
        self._shape = shape
        self._columns = weight.shape[0] // shape.form.blocks
        self._norm = norm
        self._product = added_product(weight, shape.compute_dtype, bias)
        head_dim = self._columns // shape.num_heads
        pad_heads, pad_dim = triton.next_power_of_2(shape.num_heads), triton.next_power_of_2(head_dim)
        self._fixed = {
            "HEADS": shape.num_heads,
            "D": head_dim,
            "PAD_HEADS": pad_heads,
            "PAD_D": pad_dim,
            "GROUP": shape.group_norm,
            "AFFINE": norm is not None,
            "KEEPS": _KEEPS[shape.form],
            "num_warps": warps_of(pad_heads * pad_dim),
        }

    def __call__(self, x: torch.Tensor, z: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """x [rows, D] float32; z, with U = SiLU(z), and a [rows, H dv], contiguous in columns -> y [rows, D]."""
        return self._product(x, self.read(z, a))

    def read(self, z: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """The rows of the product: [rows, H dv or 3 H dv] of the compute type."""
        shape = self._shape
        out = torch.empty((z.shape[0], self._columns * shape.form.blocks), dtype=shape.compute_dtype, device=z.device)
        weight, bias = self._norm if self._norm is not None else (None, None)
        if z.shape[0]:
            self._kernel[(z.shape[0],)](
                a, z, weight, bias, out, shape.norm_eps, a.stride(0), z.stride(0), out.stride(0), **self._fixed
            )
        return out


def fused_output(
    shape: OutputShape,
    norm: tuple[torch.Tensor, torch.Tensor] | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> FusedOutput | None:
    """The fused output on a CUDA device. None on other devices, and, with a warning, if Triton is missing or fails."""

    def tried() -> FusedOutput:
        output = FusedOutput(shape, norm, weight, bias)
        row = torch.zeros((1, weight.shape[0] // shape.form.blocks), device=weight.device)
        output.read(row.to(shape.compute_dtype), row)
        return output

    return if_it_runs("output", weight.device, tried)
