"""The arena as tensors: K,V of every layer in pages. They are read in blocks of keys.

They are written token by token, or on the CPU page by page, in half the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.worker.kv import KvGeometry
from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.attention.spec import scaled, torch_dtype, widened

Send = Callable[[torch.Tensor], torch.Tensor]
KEY_BLOCK = 512
"""Keys of one tile: K, V and the tile of one head fit together into a core's L2 cache."""

_FEWEST_IN_RUNS = 16
"""Tokens of a page from which on the CPU writes page by page."""
_ALL = slice(None)
_ALIGN = 4
"""int64 elements in 32 bytes, the unit of copies on an NPU."""


@dataclass(frozen=True, slots=True)
class PageSpan:
    """The location of consecutive tokens in the arena."""

    start: int
    end: int
    k_pieces: torch.Tensor
    """int64 [heads, pieces]: the arena's pieces (`_Pieces`) that hold K of layer 0."""
    v_pieces: torch.Tensor


@dataclass(frozen=True, slots=True)
class PageRun:
    """Tokens that follow one another in one page."""

    page: int
    places: slice
    rows: slice
    """The tokens' rows of a forward."""


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """The page of each token, and its place in the page: int64 tensors of one length."""

    pages: torch.Tensor
    places: torch.Tensor
    runs: tuple[PageRun, ...] = ()
    """The same by page; empty if tokens are written one by one."""


class PagedKv:
    """An arena of uint8 [num_pages, page_bytes] seen as K [pages, layers, heads, page_tokens, attention_dim] and V."""

    def __init__(self, arena: torch.Tensor, geometry: KvGeometry, send: Send | None = None) -> None:
        """`send`: copies page numbers from the host to the arena's device; None: a blocking copy.

        Raises ValueError if the arena does not have this form.
        """
        if arena.dtype is not torch.uint8 or arena.dim() != 2 or arena.shape[1] != geometry.page_bytes:
            raise ValueError(
                f"arena is {arena.dtype} {list(arena.shape)}, not uint8 [num_pages, {geometry.page_bytes}]"
            )
        g = geometry
        stored = arena.view(torch_dtype(g.dtype)).view(arena.shape[0], g.num_layers, -1)
        k_elements, v_elements = (g.num_heads * g.page_tokens * dim for dim in (g.attention_dim, g.hidden_dim))
        self.geometry = geometry
        self.arena = arena
        self._send: Send = send if send is not None else lambda numbers: numbers.to(arena.device)
        self._pieces = _Pieces(g)
        self._cut = arena.view(arena.dtype if g.dtype.is_scaled else stored.dtype).view(-1, self._pieces.elements)
        # Read blocks: memory that stays allocated, and in the processor's cache if a block is small.
        self._rooms = (self._cut.new_empty(0), self._cut.new_empty(0))
        self._k = stored[..., :k_elements].view(-1, g.num_layers, g.num_heads, g.page_tokens, g.attention_dim)
        self._v = stored[..., k_elements : k_elements + v_elements].view(
            -1, g.num_layers, g.num_heads, g.page_tokens, g.hidden_dim
        )
        self._exponents: torch.Tensor | None = None
        if g.dtype.is_scaled:
            rest = arena.view(*stored.shape)[..., k_elements + v_elements :]
            self._exponents = rest.view(-1, g.num_layers, 2, g.num_heads, g.page_tokens)

    @property
    def device(self) -> torch.device:
        return self._k.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of stored K,V."""
        return self._k.dtype

    def k(self, layer: int) -> torch.Tensor:
        """K of one layer: a view [pages, heads, page_tokens, attention_dim] of the arena."""
        return self._k[:, layer]

    def v(self, layer: int) -> torch.Tensor:
        """V of one layer: a view [pages, heads, page_tokens, hidden_dim] of the arena."""
        return self._v[:, layer]

    def exponents(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Those of K and of V in one layer, views uint8 [pages, heads, page_tokens]; None without scales."""
        if self._exponents is None:
            return None
        k, v = self._exponents[:, layer].unbind(1)
        return k, v

    def sent(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        """A copy of host numbers on the arena's device."""
        return self._send(torch.from_numpy(numbers))

    def sent_together(self, arrays: Sequence[NDArray[np.int64]]) -> list[torch.Tensor]:
        """A copy of each array on the arena's device, made by one transfer. Each array begins at an aligned address."""
        starts = np.cumsum([0] + [-(-array.size // _ALIGN) * _ALIGN for array in arrays]).tolist()
        packed = np.zeros(starts[-1], dtype=np.int64)
        for start, array in zip(starts[:-1], arrays, strict=True):
            packed[start : start + array.size] = array
        sent = self.sent(packed)
        return [sent[start : start + array.size] for start, array in zip(starts[:-1], arrays, strict=True)]

    def check(self, segments: Sequence[Segment]) -> None:
        """Raises ValueError if a segment has too few pages, or pages outside the arena."""
        for segment in segments:
            self.require(segment.pages, segment.stored_tokens)

    def require(self, pages: NDArray[np.int32], tokens: int) -> None:
        """Raises ValueError if these pages do not hold so many tokens, or lie outside the arena."""
        needed = self.geometry.pages_for(tokens)
        if needed > len(pages):
            raise ValueError(
                f"{tokens} tokens need {needed} pages of {self.geometry.page_tokens}, {len(pages)} were given"
            )
        used = pages[:needed]
        if needed and (int(used.min()) < 0 or int(used.max()) >= self._k.shape[0]):
            raise ValueError(f"pages {used.min()} to {used.max()} are not in an arena of {self._k.shape[0]}")

    def spans(self, segments: Sequence[Segment], block: int = KEY_BLOCK) -> list[tuple[PageSpan, ...]]:
        """The context of each segment in blocks of at most `block` tokens, a multiple of KEY_BLOCK.

        One transfer copies all page numbers.
        """
        bounds = [list(self._bounds(segment.context_tokens, block)) for segment in segments]
        numbers = [
            numbers
            for segment, own in zip(segments, bounds, strict=True)
            for start, end in own
            for numbers in self._pieces.of_span(segment.pages, start, end)
        ]
        sent = (pieces.view(self.geometry.num_heads, -1) for pieces in self.sent_together(numbers))
        return [tuple(PageSpan(start, end, next(sent), next(sent)) for start, end in own) for own in bounds]

    def _bounds(self, tokens: int, block: int) -> Iterator[tuple[int, int]]:
        """Bounds of the blocks: whole pages if a block holds at least one; else several blocks for each page."""
        size = self.geometry.page_tokens
        step = max(1, block // size) * size
        for first in range(0, tokens, step):
            for start in range(first, min(first + step, tokens), block):
                yield start, min(start + block, first + step, tokens)

    def slots(self, segments: Sequence[Segment]) -> TokenSlots:
        """The slots of the causal rows of all segments with `stores`, in order."""
        size = self.geometry.page_tokens
        parts = [np.empty((2, 0), np.int64)]
        for segment in segments:
            if segment.stores:
                tokens = np.arange(segment.context_tokens, segment.causal_tokens, dtype=np.int64)
                parts.append(np.stack((segment.pages[tokens // size], tokens % size)))
        runs = self._runs(segments) if self.device.type == "cpu" and size >= _FEWEST_IN_RUNS else ()
        pages, places = self.sent(np.concatenate(parts, axis=1)).unbind()
        return TokenSlots(pages, places, tuple(runs))

    def _runs(self, segments: Sequence[Segment]) -> Iterator[PageRun]:
        size, row = self.geometry.page_tokens, 0
        for segment in segments:
            token = segment.context_tokens
            while segment.stores and token < segment.causal_tokens:
                page, place = divmod(token, size)
                count = min(size - place, segment.causal_tokens - token)
                yield PageRun(int(segment.pages[page]), slice(place, place + count), slice(row, row + count))
                token, row = token + count, row + count

    def write(self, layer: int, slots: TokenSlots, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores the first rows of k, v [rows, heads, dim] in one layer, one row in each slot, in the stored type."""
        stored = slots.pages.shape[0]
        if not stored:
            return
        exponents = self.exponents(layer)
        if exponents is None:
            for rows, pages in ((k, self.k(layer)), (v, self.v(layer))):
                _store(slots, pages, rows[:stored].to(pages.dtype))
            return
        for rows, pages, scales in zip((k, v), (self.k(layer), self.v(layer)), exponents, strict=True):
            numbers, own = scaled(rows[:stored], self.geometry.dtype)
            # Not every device of torch copies 8-bit floats by index.
            _store(slots, pages.view(torch.uint8), numbers.view(torch.uint8))
            _store(slots, scales, own)

    def read(
        self, layer: int, span: PageSpan, dtype: torch.dtype, heads: slice = _ALL
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V [heads, tokens, dim] of one layer, converted to `dtype`. They are valid until the next call."""
        g = self.geometry
        layer_start = self._cut[layer * self._pieces.per_layer :]

        def gathered(pieces: torch.Tensor, dim: int, room: torch.Tensor) -> torch.Tensor:
            # torch warns if it has to change the size of a room that is not empty. The memory stays.
            torch.index_select(layer_start, 0, pieces.flatten(), out=room.resize_(0))
            return room.view(pieces.shape[0], -1, dim)[:, : span.end - span.start]

        k_room, v_room = self._rooms
        keys = gathered(span.k_pieces[heads], g.attention_dim, k_room)
        values = gathered(span.v_pieces[heads], g.hidden_dim, v_room)
        if self._exponents is None:
            return keys.to(dtype), values.to(dtype)
        k_exponents, v_exponents = self._exponents_of(layer, span)[:, heads]
        stored = self.dtype
        return widened(keys.view(stored), k_exponents, dtype), widened(values.view(stored), v_exponents, dtype)

    def _exponents_of(self, layer: int, span: PageSpan) -> torch.Tensor:
        """uint8 [2, heads, tokens]: of K and of V."""
        assert self._exponents is not None
        g = self.geometry
        count = g.pages_for(span.end) - span.start // g.page_tokens
        first_pieces = span.k_pieces[0].view(count, -1)[:, 0]
        pages = first_pieces.div(g.num_layers * self._pieces.per_layer, rounding_mode="floor")
        found = self._exponents[pages, layer].permute(1, 2, 0, 3).flatten(2)
        offset = span.start % g.page_tokens
        return found[..., offset : offset + span.end - span.start]


def _store(slots: TokenSlots, pages: torch.Tensor, rows: torch.Tensor) -> None:
    """Copies rows [tokens, heads, ...] to pages [pages, heads, page_tokens, ...]."""
    for run in slots.runs:
        pages[run.page, :, run.places] = rows[run.rows].transpose(0, 1)
    if not slots.runs:
        pages[slots.pages, :, slots.places] = rows


class _Pieces:
    """The arena as pieces of equal size. K and V of a head in any page and block are whole numbers of pieces.

    One copy in the order of heads reads scattered pages as [heads, tokens, dim]. torch distributes this copy and the
    following product to threads in the same order, so each thread finds its part in its cache.
    """

    def __init__(self, geometry: KvGeometry) -> None:
        g = self._geometry = geometry
        self._tokens = g.page_tokens if g.page_tokens <= KEY_BLOCK else math.gcd(g.page_tokens, KEY_BLOCK)
        elements = self._tokens * math.gcd(g.attention_dim, g.hidden_dim)
        # The exponents of a layer are whole pieces, too.
        per_layer = g.layer_bytes // g.dtype.size_bytes
        self.elements = math.gcd(elements, per_layer)
        self.per_layer = per_layer // self.elements

    def of_span(self, pages: NDArray[np.integer], start: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Piece numbers of K and of V of tokens [start, end) in layer 0: [heads, pages, pieces], flat."""
        g = self._geometry
        size = g.page_tokens
        used = pages[start // size : -(-end // size)].astype(np.int64)[:, None] * (g.num_layers * self.per_layer)
        offset = start % size
        read = min(size, -(-(end - start) // self._tokens) * self._tokens)

        def numbers(elements_before: int, dim: int) -> NDArray[np.int64]:
            heads = (elements_before + (np.arange(g.num_heads)[:, None, None] * size + offset) * dim) // self.elements
            return (heads + used + np.arange(read * dim // self.elements)).ravel()

        return numbers(0, g.attention_dim), numbers(g.num_heads * size * g.attention_dim, g.hidden_dim)
