"""Formulas that several parts of the reference write out."""

from __future__ import annotations

import torch


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Over the last dimension."""
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return normal if weight is None or bias is None else normal * weight + bias


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)
