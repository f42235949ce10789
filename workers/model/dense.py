"""Layers over one sequence at a time with any mask and bias: the reference path for what the paged one leaves out.

It uses the engine's own layers (`hstu.py`) and the plain attention formula, and materialises [heads, rows, keys].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.model.attention import dense_attention
from workers.model.hstu import HstuLayer


@dataclass(frozen=True, slots=True)
class DenseRun:
    """What became of one sequence: rows after each layer, and K, V [heads, keys, dim] of each layer."""

    rows: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class DenseStack:
    """All layers with one alpha and one N."""

    layers: Sequence[HstuLayer]
    alpha: float
    normalizer: float

    def run(
        self,
        x: torch.Tensor,
        mask: torch.Tensor,
        biases: Sequence[torch.Tensor | None] | None = None,
        before: DenseRun | None = None,
    ) -> DenseRun:
        """x [rows, D]; mask bool [rows, keys]; biases: of each layer, [rows, keys].

        `before`: K, V of earlier tokens, which come first among the keys.
        """
        rows, keys, values = [], [], []
        for index, layer in enumerate(self.layers):
            p = layer.project(x)
            k, v = p.k, p.v
            if before is not None:
                k, v = torch.cat((before.keys[index], k), 1), torch.cat((before.values[index], v), 1)
            bias = None if biases is None else biases[index]
            a = dense_attention(p.q, k, v, mask, self.alpha, self.normalizer, bias)
            x = layer.combine(x, p.u, a.transpose(0, 1).flatten(1))
            rows.append(x)
            keys.append(k)
            values.append(v)
        return DenseRun(tuple(rows), tuple(keys), tuple(values))
