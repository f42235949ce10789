"""What the back ends that know every option share: a segment with its mask and bias, and where its keys come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from relaygr.worker.model.attention.bias import RelativeBiases, TileBias
from relaygr.worker.model.attention.paged_kv import KEY_BLOCK, PagedKv, PageSpan
from relaygr.worker.model.attention.segments import Placed, Segment, place
from relaygr.worker.model.attention.sight import Sight
from relaygr.worker.model.attention.spec import AttentionSpec

ROW_BLOCK = 256
"""Rows of one tile."""


@dataclass(frozen=True, slots=True)
class RowTile:
    """Some rows of a segment, all causal or all candidates."""

    rows: slice
    """Among those of the forward."""
    tokens: range
    """Their numbers in the segment."""


@dataclass(frozen=True, slots=True)
class TiledSegment:
    """One segment, ready for attention in tiles."""

    placed: Placed
    spans: tuple[PageSpan, ...]
    sight: Sight
    bias: TileBias | None

    def row_tiles(self) -> Iterator[RowTile]:
        """All rows, in tiles of at most ROW_BLOCK."""
        segment, start = self.placed.segment, self.placed.start
        offset = segment.context_tokens - start
        for part in (self.placed.causal, self.placed.free):
            for low in range(part.start, part.stop, ROW_BLOCK):
                high = min(low + ROW_BLOCK, part.stop)
                yield RowTile(slice(low, high), range(low + offset, high + offset))

    def own_keys(self, tile: RowTile) -> Iterator[range]:
        """Numbers of the segment's own keys that the tile may see, in blocks; of the candidates those near it only."""
        segment = self.placed.segment
        for low in range(segment.context_tokens, segment.causal_tokens, KEY_BLOCK):
            yield range(low, min(low + KEY_BLOCK, segment.causal_tokens))
        if tile.tokens.start >= segment.causal_tokens:
            first = self.sight.group_start(tile.tokens.start)
            for low in range(first, tile.tokens.stop, KEY_BLOCK):
                yield range(low, min(low + KEY_BLOCK, tile.tokens.stop))

    def rows_of(self, tokens: range) -> slice:
        """Where own tokens are among the rows of the forward."""
        offset = self.placed.start - self.placed.segment.context_tokens
        return slice(tokens.start + offset, tokens.stop + offset)


def tiled_segments(
    spec: AttentionSpec, biases: RelativeBiases | None, kv: PagedKv, segments: Sequence[Segment]
) -> list[TiledSegment]:
    """Each segment, ready. Raises ValueError for one whose pages do not hold its tokens."""
    kv.check(segments)
    made = []
    for placed, spans in zip(place(segments), kv.spans(segments), strict=True):
        sight = Sight(spec, placed.segment, kv.device)
        bias = None if biases is None else biases.of(placed.segment, sight)
        made.append(TiledSegment(placed, spans, sight, bias))
    return made


def by_head(x: torch.Tensor) -> torch.Tensor:
    """[rows, heads, dim] -> contiguous [heads, rows, dim], which batched products read fastest."""
    return x.transpose(0, 1).contiguous()


def by_row(sums: torch.Tensor, scale: float) -> torch.Tensor:
    """[heads, rows, dim] -> scaled, [rows, heads * dim], in one pass over them."""
    heads, rows, dim = sums.shape
    out = sums.new_empty((rows, heads, dim))
    torch.mul(sums.transpose(0, 1), scale, out=out)
    return out.flatten(1)
