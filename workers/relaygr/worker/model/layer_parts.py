"""The parts of layers of every family: the layer interface, norms, and products added to a residual stream.

Norms compute in float32, whatever the type of the matrix products around them. A narrow type rounds the arguments of
each product, and never a sum: neither torch's products nor the residual stream accumulate in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q, k [rows, heads, attention_dim], v [rows, heads, hidden_dim] -> A [rows, heads * hidden_dim]"""


class Layer(Protocol):
    """One layer. It holds its weights; the caller passes the attention."""

    def __call__(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [rows, D] float32 -> [rows, D] float32, with one call of `attend`."""


RowFunction = Callable[[torch.Tensor], torch.Tensor]


class LayerNorm:
    """LayerNorm over the last dimension, with or without weight and bias."""

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, width: int, eps: float) -> None:
        self._weight, self._bias, self._shape, self._eps = weight, bias, (width,), eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class HeadNorm:
    """Normalises each head by itself, with one weight and one bias for each head."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, num_heads: int, eps: float) -> None:
        self._weight, self._bias, self._num_heads, self._eps = weight[:, None], bias[:, None], num_heads, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        heads = x.view(rows, self._num_heads, columns // self._num_heads)
        normal = F.layer_norm(heads, heads.shape[-1:], None, None, self._eps)
        return torch.addcmul(self._bias, normal, self._weight).flatten(-2)


class AddedProduct(Protocol):
    """rows @ weight [+ bias], added to float32 rows."""

    def __call__(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns y + rows @ weight [+ bias] as a new tensor."""

    def add_to(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Adds rows @ weight [+ bias] to y in place, and returns y."""


class FullProduct:
    """The product in float32: one fused call."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.addmm(y, rows, self._weight)

    def add_to(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return y.addmm_(rows, self._weight)


class NarrowProduct:
    """The product in a narrower type. The result is widened when it is added."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self._weight, self._dtype = weight.to(dtype), dtype

    def __call__(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return y + torch.mm(rows.to(self._dtype), self._weight)

    def add_to(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return y.add_(torch.mm(rows.to(self._dtype), self._weight))


class BiasedProduct:
    """Another product, then a bias in float32."""

    def __init__(self, product: AddedProduct, bias: torch.Tensor) -> None:
        self._product, self._bias = product, bias

    def __call__(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._product(y, rows).add_(self._bias)

    def add_to(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._product.add_to(y, rows).add_(self._bias)


def added_product(weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> AddedProduct:
    """The product for a compute type, with a bias if one is given."""
    product: AddedProduct = FullProduct(weight) if dtype is torch.float32 else NarrowProduct(weight, dtype)
    return product if bias is None else BiasedProduct(product, bias)
