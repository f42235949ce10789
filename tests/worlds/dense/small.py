"""Formulas that several parts of the dense model write out."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.model import layer_parts


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def int8_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of rows and weight after both are rounded to whole steps: of each row, and of each column."""

    def rounded(x: torch.Tensor, dim: int, largest: float) -> torch.Tensor:
        step = x.abs().amax(dim, keepdim=True) / largest
        return torch.where(step > 0, (x / step).round() * step, 0.0)

    return rounded(rows, -1, layer_parts.LARGEST) @ rounded(weight, 0, layer_parts.LARGEST_WEIGHT)
