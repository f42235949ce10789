"""An HSTU layer's output on CUDA: SiLU of U, norm, gate and concatenation in one pass, then one matrix product.

Plain torch (`hstu.py`) reads and writes the rows for SiLU, for the norm and for the gate, narrows them, and adds three
products to the residual stream one after the other. Here one Triton kernel reads A and U once and writes what the
product takes, in its type: [U, A, U * norm(A)] or the other forms. docs/cuda.md counts the bytes that this saves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from relaygr.worker.model.fused import if_it_runs, warps_of
from relaygr.worker.model.options import OutputForm
from relaygr.worker.model.products import added_product

_KEEPS = {OutputForm.UNORM: 0, OutputForm.U_A_UNORM: 1, OutputForm.U_NA_UNORM: 2}


@dataclass(frozen=True, slots=True)
class OutputShape:
    """What a layer's output is made of, apart from its weights."""

    form: OutputForm
    num_heads: int
    norm_eps: float
    group_norm: bool
    compute_dtype: torch.dtype


class FusedOutput:
    """y = x + read Wo [+ bo], read as the form says."""

    def __init__(
        self,
        shape: OutputShape,
        norm: tuple[torch.Tensor, torch.Tensor] | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        """`norm`: weight and bias, [H dv], or [H] where it is per head; None: a norm without them.

        Raises ImportError where Triton is missing.
        """
        import triton

        from relaygr.worker.model.triton_norm_kernel import gated_norm_kernel

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
        """x [rows, D] float32; z, of which U is the SiLU, and a [rows, H dv], contiguous in columns -> y [rows, D]."""
        return self._product(x, self.read(z, a))

    def read(self, z: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """What the product reads: [rows, H dv or 3 H dv] of the compute type."""
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
    """For weights on a CUDA device; None on others, and, with a warning, where Triton is missing or does not work."""

    def tried() -> FusedOutput:
        output = FusedOutput(shape, norm, weight, bias)
        row = torch.zeros((1, weight.shape[0] // shape.form.blocks), device=weight.device)
        output.read(row.to(shape.compute_dtype), row)
        return output

    return if_it_runs("output", weight.device, tried)
