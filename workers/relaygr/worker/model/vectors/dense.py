"""Layers over one sequence at a time with any mask, materialised: what the engine's tiles are compared with.

It uses the engine's own layers (`hstu.py`) and the plain attention formula, and holds [heads, rows, keys] at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.model.stack import Layer


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    alpha: float,
    normalizer: float,
) -> torch.Tensor:
    """A = mask * SiLU(alpha * q k^T) / N * v, as it stands.

    q, k [heads, rows or keys, attention_dim]; v [heads, keys, hidden_dim]; mask bool [rows, keys].
    Returns [heads, rows, hidden_dim].
    """
    scores = torch.matmul(q, k.transpose(-1, -2)) * alpha
    weights = F.silu(scores) / normalizer * mask.to(scores.dtype)
    return torch.matmul(weights, v)


@dataclass(frozen=True, slots=True)
class DenseRun:
    """What became of one sequence: rows after each layer, and K, V [heads, keys, dim] of each layer."""

    rows: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class DenseStack:
    """All layers with one alpha and one N."""

    layers: Sequence[Layer]
    alpha: float
    normalizer: float

    def run(self, x: torch.Tensor, mask: torch.Tensor, before: DenseRun | None = None) -> DenseRun:
        """x [rows, D]; mask bool [rows, keys]. `before`: K, V of earlier tokens, which come first among the keys."""
        rows: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            index = len(keys)
            k, v = k.transpose(0, 1), v.transpose(0, 1)
            if before is not None:
                k, v = torch.cat((before.keys[index], k), 1), torch.cat((before.values[index], v), 1)
            keys.append(k)
            values.append(v)
            a = dense_attention(q.transpose(0, 1), k, v, mask, self.alpha, self.normalizer)
            return a.transpose(0, 1).flatten(1)

        for layer in self.layers:
            x = layer(x, attend)
            rows.append(x)
        return DenseRun(tuple(rows), tuple(keys), tuple(values))
