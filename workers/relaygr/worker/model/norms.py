"""Norms of rows. They compute in float32, whatever the type of the matrix products around them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

RowFunction = Callable[[torch.Tensor], torch.Tensor]


class LayerNorm:
    """LayerNorm over the last dimension, with or without weight and bias."""

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, width: int, eps: float) -> None:
        self._weight, self._bias, self._shape, self._eps = weight, bias, (width,), eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class HeadNorm:
    """Each head normalised on its own, with one weight and one bias a head."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, num_heads: int, eps: float) -> None:
        self._weight, self._bias, self._num_heads, self._eps = weight[:, None], bias[:, None], num_heads, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        heads = x.view(rows, self._num_heads, columns // self._num_heads)
        normal = F.layer_norm(heads, heads.shape[-1:], None, None, self._eps)
        return torch.addcmul(self._bias, normal, self._weight).flatten(-2)
