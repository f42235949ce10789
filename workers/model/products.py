"""Matrix products of rows with weights, in the compute type, added to a residual stream in float32.

A narrow type costs precision once for each product's arguments, and never in the sums: neither torch's products nor
the residual stream accumulate in it.
"""

from __future__ import annotations

from typing import Protocol

import torch


class AddedProduct(Protocol):
    """rows @ weight, added to float32 rows."""

    def __call__(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """y + rows @ weight, as a new tensor."""

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


def added_product(weight: torch.Tensor, dtype: torch.dtype) -> AddedProduct:
    """The product for a compute type."""
    return FullProduct(weight) if dtype is torch.float32 else NarrowProduct(weight, dtype)
