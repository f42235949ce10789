"""Layers one after the other, over K,V in pages. Embedded rows in, rows out; it knows no items and no tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from relaygr.worker.kv import KvDtype
from relaygr.worker.model.attention.dtypes import rounding
from relaygr.worker.model.attention.interface import AttentionPass

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q, k [rows, heads, attention_dim], v [rows, heads, hidden_dim] -> A [rows, heads * hidden_dim]"""


class Layer(Protocol):
    """One layer. It brings its weights, the caller brings the attention."""

    def __call__(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [rows, D] float32 -> [rows, D] float32, by one call of `attend`."""


class Stack:
    """All layers of a model."""

    def __init__(self, layers: Sequence[Layer], kv_dtype: KvDtype) -> None:
        self._layers = tuple(layers)
        self._rounded = rounding(kv_dtype)

    def __call__(
        self, x: torch.Tensor, attention: AttentionPass, before: Sequence[Callable[[int], None]] = ()
    ) -> torch.Tensor:
        """Rows x [rows of all segments, D] after the last layer. Segments share the matrix products, nothing else.

        `before`: called with each layer's number before that layer reads pages.
        """
        for index, layer in enumerate(self._layers):
            for call in before:
                call(index)
            x = layer(x, partial(self._attend, attention, index))
        return x

    def _attend(
        self, attention: AttentionPass, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        return attention.attend(layer, q, self._rounded(k), self._rounded(v))
