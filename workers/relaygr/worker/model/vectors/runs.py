"""Runs the rows of a case through layers: dense with any mask, and over pages as the engine does.

A case holds embedded rows, so these are the engine's own layers (`hstu.py`) without its inputs. The dense run uses the
plain attention formula and holds [heads, rows, keys] at once. The paged run uses the engine's attention and pages: the
prefix goes into pages in chunks, and the rest is computed against the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

from relaygr.worker.kv import KvDtype, KvGeometry
from relaygr.worker.model.attention.bias import RelativeBiases
from relaygr.worker.model.attention.choose import attention_for
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Segment, SegmentTimes
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.layer_parts import Layer
from relaygr.worker.model.layers import LayerStack


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    alpha: float,
    normalizer: float,
) -> torch.Tensor:
    """A = mask * SiLU(alpha * q k^T) / N * v.

    q, k [heads, rows or keys, attention_dim]; v [heads, keys, hidden_dim]; mask bool [rows, keys].
    Returns [heads, rows, hidden_dim].
    """
    scores = torch.matmul(q, k.transpose(-1, -2)) * alpha
    weights = F.silu(scores) / normalizer * mask.to(scores.dtype)
    return torch.matmul(weights, v)


@dataclass(frozen=True, slots=True)
class DenseRun:
    """The result for one sequence: the rows after each layer, and K, V [heads, keys, dim] of each layer."""

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


PAGINGS = ((4, 3), (64, 512))
"""(page_tokens, chunk tokens) of the runs of each case: one with many small pieces, one with few large ones."""


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """Times of each token, and of the token after it: whole seconds, int64 [tokens]."""

    own: NDArray[np.int64]
    following: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PagedRun:
    """rows [tokens, D] after the last layer; keys, values [layers, prefix tokens, H * dim] from the pages."""

    rows: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class PagedLayers:
    """Layers with one attention. Each sequence gets its own arena."""

    def __init__(self, layers: Sequence[Layer], spec: AttentionSpec, biases: RelativeBiases | None = None) -> None:
        self._layers = layers
        self._spec = spec
        self._biases = biases
        self._stack = LayerStack(layers, KvDtype.FLOAT32)

    def run(
        self,
        x: torch.Tensor,
        prefix: int,
        targets: int,
        page_tokens: int,
        chunk_tokens: int,
        times: SequenceTimes | None = None,
    ) -> PagedRun:
        """One sequence x [tokens, D]: `prefix` tokens in chunks, then the other history rows and the targets."""
        s = self._spec
        geometry = KvGeometry(
            len(self._layers), s.num_heads, s.attention_dim, s.hidden_dim, page_tokens, KvDtype.FLOAT32
        )
        count = geometry.pages_for(prefix)
        kv = PagedKv(torch.zeros((count + 1, geometry.page_bytes), dtype=torch.uint8), geometry)
        # In descending order, so that an error in the use of the page table shows.
        pages = np.arange(count, 0, -1, dtype=np.int32)
        attention = attention_for(s, self._biases).attention
        rows = [x[:0]]
        for segment in self._segments(pages, prefix, x.shape[0], targets, chunk_tokens, times):
            first = segment.context_tokens
            rows.append(self._stack(x[first : first + segment.rows], attention.begin(kv, [segment])))
        keys, values = (
            torch.stack([_in_order(view(layer), pages, prefix) for layer in range(len(self._layers))])
            for view in (kv.k, kv.v)
        )
        return PagedRun(torch.cat(rows), keys, values)

    def _segments(
        self,
        pages: NDArray[np.int32],
        prefix: int,
        tokens: int,
        targets: int,
        chunk_tokens: int,
        times: SequenceTimes | None,
    ) -> list[Segment]:
        history = tokens - targets
        step = max(1, prefix) if self._spec.contextual_tokens else chunk_tokens
        segments = []
        for start in range(0, prefix, step):
            end = min(start + step, prefix)
            segments.append(Segment(pages, start, end - start, 0, True, history, _times_of(times, start, end)))
        if tokens > prefix:
            last = _times_of(times, prefix, tokens)
            segments.append(Segment(pages, prefix, history - prefix, targets, False, history, last))
        return segments


def _times_of(times: SequenceTimes | None, start: int, end: int) -> SegmentTimes | None:
    return None if times is None else SegmentTimes(times.own[:end].copy(), times.following[start:end].copy())


def _in_order(stored: torch.Tensor, pages: NDArray[np.int32], tokens: int) -> torch.Tensor:
    """[pages, heads, page_tokens, dim] -> [tokens, heads * dim]"""
    chosen = stored[torch.from_numpy(pages.astype(np.int64))].transpose(1, 2)
    return chosen.flatten(2).flatten(0, 1)[:tokens]
