"""Formulas that several parts of the reference write out."""

from __future__ import annotations

import torch

from relaygr.worker.model import layer_parts


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Over the last dimension."""
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return normal if weight is None or bias is None else normal * weight + bias


def int8_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of rows and weight after both are rounded to whole steps: of each row, and of each column."""

    def rounded(x: torch.Tensor, dim: int, largest: float) -> torch.Tensor:
        step = x.abs().amax(dim, keepdim=True) / largest
        return torch.where(step > 0, (x / step).round() * step, 0.0)

    return rounded(rows, 1, layer_parts.LARGEST) @ rounded(weight, 0, layer_parts.LARGEST_WEIGHT)


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)
