"""The norm before a projection: rows in the type of the product. Fused on CUDA, where that type is a narrow one.

torch's norm writes float32, which another kernel narrows; one Triton kernel reads a row once and writes it once. The
product itself is cuBLAS's: docs/cuda.md says why.
"""

from __future__ import annotations

import torch

from relaygr.worker.model.fused import if_it_runs, warps_of
from relaygr.worker.model.norms import LayerNorm, RowFunction


class FusedNorm:
    """LayerNorm of float32 rows, narrowed."""

    def __init__(
        self, weight: torch.Tensor | None, bias: torch.Tensor | None, width: int, eps: float, dtype: torch.dtype
    ) -> None:
        """Raises ImportError where Triton is missing."""
        import triton

        from relaygr.worker.model.triton_norm_kernel import norm_kernel

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
    """The norm before the product with `projection` [D, ...], which takes rows of `dtype`."""
    width = projection.shape[0]

    def tried() -> FusedNorm:
        norm = FusedNorm(weight, bias, width, eps, dtype)
        norm(torch.zeros((1, width), device=projection.device))
        return norm

    plain = LayerNorm(weight, bias, width, eps)
    if dtype is torch.float32:
        return plain
    return if_it_runs("input norm", projection.device, tried) or (lambda x: plain(x).to(dtype))
