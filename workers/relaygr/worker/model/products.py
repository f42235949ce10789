"""Matrix products of rows with weights, in the compute type, added to a residual stream in float32.

A narrow type costs precision once for each product's arguments, and never in the sums: neither torch's products nor
the residual stream accumulate in it.
"""

from __future__ import annotations

from typing import Protocol

import torch


class AddedProduct(Protocol):
    """rows @ weight [+ bias], added to float32 rows."""

    def __call__(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """y + rows @ weight [+ bias], as a new tensor."""

    def add_to(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The same in place of y."""


class FullProduct:
    """In float32: one fused call."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.addmm(y, rows, self._weight)

    def add_to(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return y.addmm_(rows, self._weight)


class NarrowProduct:
    """In a narrower type, widened when it is added."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self._weight, self._dtype = weight.to(dtype), dtype

    def __call__(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return y + torch.mm(rows.to(self._dtype), self._weight)

    def add_to(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return y.add_(torch.mm(rows.to(self._dtype), self._weight))


class BiasedProduct:
    """Another product, and a bias in float32."""

    def __init__(self, product: AddedProduct, bias: torch.Tensor) -> None:
        self._product, self._bias = product, bias

    def __call__(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._product(y, rows).add_(self._bias)

    def add_to(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._product.add_to(y, rows).add_(self._bias)


def added_product(weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> AddedProduct:
    """The product for a compute type."""
    product: AddedProduct = FullProduct(weight) if dtype is torch.float32 else NarrowProduct(weight, dtype)
    return product if bias is None else BiasedProduct(product, bias)
