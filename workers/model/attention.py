"""SiLU attention without a soft-max: dense, and blocked over K,V in pages.

    A[i,h] = sum_j mask(i,j) * SiLU(alpha * Q[i,h].K[j,h]) / N * V[j,h]

There is no row sum, so every key adds its own term and partial sums over blocks of keys are exact: K,V that were
kept give what K,V computed again would give. Formula: arXiv 2402.17152, section 3.

`dense_attention` materialises [heads, rows, keys] and takes any mask: the reference. The blocked functions never
hold more than one tile of it, and compute the causal half only:

* `attend_causal`: the rows of a pre-infer chunk against all pages up to themselves, which hold their own K,V too;
* `attend_prefix`, `attend_suffix`, `attend_self`: suffix and candidates against the pages, the suffix, themselves.

All tensors are [heads, rows, dim]. `q` is scaled by alpha and sums by 1/N by the caller, once each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

from workers.kv import KvDtype, KvGeometry

KEY_BLOCK = 512
"""Keys of one tile: K, V and the tile of a head together stay in a core's L2 cache."""
ROW_BLOCK = 256
"""Query rows of one tile of a pre-infer chunk; what of it lies above the diagonal is wasted work."""


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    alpha: float,
    normalizer: float,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The formula above as it stands. mask: bool [rows, keys]; bias [rows, keys] is added before SiLU.

    Returns [heads, rows, hidden_dim].
    """
    scores = torch.matmul(q, k.transpose(-1, -2)) * alpha
    if bias is not None:
        scores = scores + bias
    weights = F.silu(scores) / normalizer * mask.to(scores.dtype)
    return torch.matmul(weights, v)


def torch_dtype(dtype: KvDtype) -> torch.dtype:
    """torch's name of a K,V element type."""
    return torch.float32 if dtype is KvDtype.FLOAT32 else torch.bfloat16


@dataclass(frozen=True, slots=True)
class PageSpan:
    """Where a run of tokens lies in the arena."""

    start: int
    end: int
    pages: torch.Tensor
    """int64, the pages that hold tokens [start, end); `start` is a multiple of page_tokens."""


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """Page and place in it of each of some tokens: int64 tensors of one length."""

    pages: torch.Tensor
    places: torch.Tensor


class PagedKv:
    """An arena of uint8 [num_pages, page_bytes] seen as K [pages, layers, heads, page_tokens, attention_dim] and V."""

    def __init__(self, arena: torch.Tensor, geometry: KvGeometry) -> None:
        """Raises ValueError if the arena is not of that form."""
        if arena.dtype is not torch.uint8 or arena.dim() != 2 or arena.shape[1] != geometry.page_bytes:
            raise ValueError(
                f"arena is {arena.dtype} {list(arena.shape)}, not uint8 [num_pages, {geometry.page_bytes}]"
            )
        g = geometry
        stored = arena.view(torch_dtype(g.dtype))
        layers = stored.view(-1, g.num_layers, g.layer_bytes // g.dtype.size_bytes)
        k_elements = g.num_heads * g.page_tokens * g.attention_dim
        self._geometry = geometry
        self._k = layers[:, :, :k_elements].unflatten(2, (g.num_heads, g.page_tokens, g.attention_dim))
        self._v = layers[:, :, k_elements:].unflatten(2, (g.num_heads, g.page_tokens, g.hidden_dim))

    def spans(self, pages: NDArray[np.int32], tokens: int) -> tuple[PageSpan, ...]:
        """Tokens [0, tokens) in blocks of at most KEY_BLOCK. Raises ValueError if there are too few pages."""
        size = self._geometry.page_tokens
        needed = self._geometry.pages_for(tokens)
        if needed > len(pages):
            raise ValueError(f"{tokens} tokens need {needed} pages of {size}, {len(pages)} were given")
        indices = torch.from_numpy(np.ascontiguousarray(pages[:needed], dtype=np.int64)).to(self._k.device)
        step = max(1, KEY_BLOCK // size)
        return tuple(
            PageSpan(first * size, min((first + step) * size, tokens), indices[first : first + step])
            for first in range(0, needed, step)
        )

    def slots(self, pages: NDArray[np.int32], start: int, end: int) -> TokenSlots:
        """Where tokens [start, end) of a prefix in `pages` lie. Raises ValueError if there are too few pages."""
        size = self._geometry.page_tokens
        if self._geometry.pages_for(end) > len(pages):
            raise ValueError(f"{end} tokens need {self._geometry.pages_for(end)} pages, {len(pages)} were given")
        tokens = np.arange(start, end, dtype=np.int64)
        page_of = np.asarray(pages, dtype=np.int64)[tokens // size]
        device = self._k.device
        return TokenSlots(torch.from_numpy(page_of).to(device), torch.from_numpy(tokens % size).to(device))

    def write(self, layer: int, slots: TokenSlots, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores k, v [heads, tokens, dim] of one layer, rounded to the stored type."""
        self._k[:, layer][slots.pages, :, slots.places] = k.transpose(0, 1).to(self._k.dtype)
        self._v[:, layer][slots.pages, :, slots.places] = v.transpose(0, 1).to(self._v.dtype)

    def read(self, layer: int, span: PageSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V [heads, tokens, dim] of one layer as float32."""
        tokens = span.end - span.start
        return (
            _gather(self._k[:, layer], span.pages)[:, :tokens],
            _gather(self._v[:, layer], span.pages)[:, :tokens],
        )


def _gather(stored: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """[pages, heads, page_tokens, dim] -> float32 [heads, chosen * page_tokens, dim]"""
    chosen = stored.index_select(0, pages)
    out = torch.empty(
        (chosen.shape[1], chosen.shape[0], chosen.shape[2], chosen.shape[3]), dtype=torch.float32, device=stored.device
    )
    out.copy_(chosen.transpose(0, 1))
    return out.flatten(1, 2)


def rounding(dtype: KvDtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """What storing and reading back does to K or V: nothing, or a round trip through bfloat16.

    Rows that are never stored (suffix, candidates) take it too, so that they count as much in ranking as they
    would in a prefix.
    """
    if dtype is KvDtype.FLOAT32:
        return lambda x: x
    return lambda x: x.to(torch.bfloat16).to(x.dtype)


def attend_causal(
    kv: PagedKv, layer: int, spans: tuple[PageSpan, ...], start: int, q: torch.Tensor, out: torch.Tensor
) -> None:
    """Adds to out [heads, rows, dv] what rows at places start, start+1, ... get from keys up to themselves."""
    rows = q.shape[1]
    for span in spans:
        keys, values = kv.read(layer, span)
        for low, high in _row_blocks(max(0, span.start - start), rows):
            # Above the last row of this block nothing is visible.
            visible = min(span.end, start + high) - span.start
            crosses_diagonal = start + low + 1 < span.start + visible
            _accumulate(
                q[:, low:high],
                keys[:, :visible],
                values[:, :visible],
                out[:, low:high],
                start + low - span.start if crosses_diagonal else None,
            )


def attend_prefix(kv: PagedKv, layer: int, spans: tuple[PageSpan, ...], q: torch.Tensor, out: torch.Tensor) -> None:
    """Adds to out [heads, rows, dv] what every row gets from the whole prefix."""
    rows = q.shape[1]
    for span in spans:
        keys, values = kv.read(layer, span)
        for low, high in _row_blocks(0, rows):
            _accumulate(q[:, low:high], keys, values, out[:, low:high], None)


def attend_suffix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Adds what rows get from the suffix, whose k, v are [heads, suffix, dim]: row i from keys up to i.

    The first rows are the suffix itself, and the candidates after them thereby see all of it.
    """
    _accumulate(q, k, v, out, 0)


def attend_self(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Adds what each candidate gets from itself; q, k, v, out hold the candidates' rows only."""
    weight = F.silu((q * k).sum(-1, keepdim=True))
    out.addcmul_(weight, v)


def _row_blocks(first: int, rows: int) -> Iterator[tuple[int, int]]:
    for low in range(first, rows, ROW_BLOCK):
        yield low, min(low + ROW_BLOCK, rows)


def _accumulate(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, diagonal: int | None
) -> None:
    """out += SiLU(q keys^T) values, keeping key j of row i where j - i <= diagonal (None: all)."""
    weights = torch.bmm(q, keys.transpose(1, 2))
    F.silu(weights, inplace=True)
    if diagonal is not None:
        weights.tril_(diagonal)
    out.baddbmm_(weights, values)
