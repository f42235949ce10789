"""The arena as tensors: K,V of every layer in pages, read in blocks of keys and written token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from workers.kv import KvGeometry
from workers.model.attention.dtypes import torch_dtype
from workers.model.attention.segments import Segment

Send = Callable[[torch.Tensor], torch.Tensor]
KEY_BLOCK = 512
"""Keys of one tile: K, V and the tile of a head together stay in a core's L2 cache."""


@dataclass(frozen=True, slots=True)
class PageSpan:
    """Where a run of tokens lies in the arena."""

    start: int
    end: int
    pages: torch.Tensor
    """int64, the pages that hold tokens [start, end)."""
    offset: int
    """Where in its page the first of them lies: 0 but for the parts of a page of more than KEY_BLOCK tokens."""


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """Page and place in it of each of some tokens: int64 tensors of one length."""

    pages: torch.Tensor
    places: torch.Tensor


class PagedKv:
    """An arena of uint8 [num_pages, page_bytes] seen as K [pages, layers, heads, page_tokens, attention_dim] and V."""

    def __init__(self, arena: torch.Tensor, geometry: KvGeometry, send: Send | None = None) -> None:
        """`send`: how page numbers get from the host to the arena's device; None: by a copy that is waited for.

        Raises ValueError if the arena is not of that form.
        """
        if arena.dtype is not torch.uint8 or arena.dim() != 2 or arena.shape[1] != geometry.page_bytes:
            raise ValueError(
                f"arena is {arena.dtype} {list(arena.shape)}, not uint8 [num_pages, {geometry.page_bytes}]"
            )
        g = geometry
        stored = arena.view(torch_dtype(g.dtype)).view(arena.shape[0], g.num_layers, -1)
        k_elements = g.num_heads * g.page_tokens * g.attention_dim
        self.geometry = geometry
        self._send: Send = send if send is not None else lambda numbers: numbers.to(arena.device)
        self._k = stored[..., :k_elements].view(-1, g.num_layers, g.num_heads, g.page_tokens, g.attention_dim)
        self._v = stored[..., k_elements:].view(-1, g.num_layers, g.num_heads, g.page_tokens, g.hidden_dim)

    @property
    def device(self) -> torch.device:
        return self._k.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored K,V."""
        return self._k.dtype

    def k(self, layer: int) -> torch.Tensor:
        """K of one layer: a view [pages, heads, page_tokens, attention_dim] of the arena."""
        return self._k[:, layer]

    def v(self, layer: int) -> torch.Tensor:
        """V of one layer: a view [pages, heads, page_tokens, hidden_dim] of the arena."""
        return self._v[:, layer]

    def sent(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        """Numbers of the host, on the arena's device."""
        return self._send(torch.from_numpy(numbers))

    def check(self, segments: Sequence[Segment]) -> None:
        """Raises ValueError for a segment that has too few pages, or pages that the arena does not have."""
        for segment in segments:
            needed = self.geometry.pages_for(segment.stored_tokens)
            if needed > len(segment.pages):
                raise ValueError(
                    f"{segment.stored_tokens} tokens need {needed} pages of {self.geometry.page_tokens}, "
                    f"{len(segment.pages)} were given"
                )
            used = segment.pages[:needed]
            if needed and (int(used.min()) < 0 or int(used.max()) >= self._k.shape[0]):
                raise ValueError(f"pages {used.min()} to {used.max()} are not in an arena of {self._k.shape[0]}")

    def spans(self, segments: Sequence[Segment]) -> list[tuple[PageSpan, ...]]:
        """The context of each segment, in blocks of at most KEY_BLOCK tokens. Page numbers cross over all at once."""
        used = [segment.pages[: self.geometry.pages_for(segment.context_tokens)] for segment in segments]
        indices = torch.split(self.sent(np.concatenate(used, dtype=np.int64)), [pages.size for pages in used])
        return [self._spans(own, segment.context_tokens) for own, segment in zip(indices, segments, strict=True)]

    def _spans(self, indices: torch.Tensor, tokens: int) -> tuple[PageSpan, ...]:
        size = self.geometry.page_tokens
        step = max(1, KEY_BLOCK // size)
        return tuple(
            PageSpan(
                low,
                min(low + KEY_BLOCK, (first + step) * size, tokens),
                indices[first : first + step],
                low - first * size,
            )
            for first in range(0, indices.numel(), step)
            for low in range(first * size, min((first + step) * size, tokens), KEY_BLOCK)
        )

    def slots(self, segments: Sequence[Segment]) -> TokenSlots:
        """Where the causal rows of the segments that store go, in their order."""
        size = self.geometry.page_tokens
        parts = [np.empty((2, 0), np.int64)]
        for segment in segments:
            if segment.stores:
                tokens = np.arange(segment.context_tokens, segment.causal_tokens, dtype=np.int64)
                parts.append(np.stack((segment.pages[tokens // size], tokens % size)))
        return TokenSlots(*self.sent(np.concatenate(parts, axis=1)).unbind())

    def write(self, layer: int, slots: TokenSlots, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores one layer of the first rows of k, v [rows, heads, dim], one a slot, rounded to the stored type."""
        stored = slots.pages.shape[0]
        if stored:
            self._k[:, layer][slots.pages, :, slots.places] = k[:stored].to(self._k.dtype)
            self._v[:, layer][slots.pages, :, slots.places] = v[:stored].to(self._v.dtype)

    def read(self, layer: int, span: PageSpan, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V [heads, tokens, dim] of one layer, as `dtype`."""
        return _gather(self._k[:, layer], span, dtype), _gather(self._v[:, layer], span, dtype)


def _gather(stored: torch.Tensor, span: PageSpan, dtype: torch.dtype) -> torch.Tensor:
    """[pages, heads, page_tokens, dim] -> [heads, tokens, dim]"""
    tokens = span.end - span.start
    chosen = stored[:, :, span.offset : span.offset + tokens].index_select(0, span.pages)
    out = torch.empty(
        (chosen.shape[1], chosen.shape[0], chosen.shape[2], chosen.shape[3]), dtype=dtype, device=stored.device
    )
    out.copy_(chosen.transpose(0, 1))
    return out.flatten(1, 2)[:, :tokens]
