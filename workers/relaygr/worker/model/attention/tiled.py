"""HSTU attention with every option, in plain torch, tile by tile: the engine's path for options without a faster one.

It is slower than `blocked.py`, because it makes a mask and a bias for each tile that needs them. Tiles in which no
row sees a key are skipped, so a window saves time. The tiles of a segment (`TiledSegment`) serve `softmax.py` too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.model.attention.bias import RelativeBiases, SegmentBias
from relaygr.worker.model.attention.interface import AttentionPass
from relaygr.worker.model.attention.mask import AttentionMask, Visible
from relaygr.worker.model.attention.paged_kv import KEY_BLOCK, PagedKv, PageSpan
from relaygr.worker.model.attention.segments import Placed, Segment, place
from relaygr.worker.model.attention.spec import AttentionSpec

ROW_BLOCK = 256
"""Rows of one tile."""


@dataclass(frozen=True, slots=True)
class RowTile:
    """Some rows of a segment, all causal or all candidates."""

    rows: slice
    """Indices of the rows in the forward."""
    tokens: range
    """Numbers of the rows' tokens in the segment."""


@dataclass(frozen=True, slots=True)
class TiledSegment:
    """One segment with its mask and bias, split into tiles."""

    placed: Placed
    spans: tuple[PageSpan, ...]
    mask: AttentionMask
    bias: SegmentBias | None

    def row_tiles(self) -> Iterator[RowTile]:
        """Tiles of at most ROW_BLOCK rows that cover all rows."""
        segment, start = self.placed.segment, self.placed.start
        offset = segment.context_tokens - start
        for part in (self.placed.causal, self.placed.free):
            for low in range(part.start, part.stop, ROW_BLOCK):
                high = min(low + ROW_BLOCK, part.stop)
                yield RowTile(slice(low, high), range(low + offset, high + offset))

    def own_keys(self, tile: RowTile) -> Iterator[range]:
        """Blocks of the segment's own keys that the tile may see; among candidates, only those of its groups."""
        segment = self.placed.segment
        for low in range(segment.context_tokens, segment.causal_tokens, KEY_BLOCK):
            yield range(low, min(low + KEY_BLOCK, segment.causal_tokens))
        if tile.tokens.start >= segment.causal_tokens:
            first = self.mask.group_start(tile.tokens.start)
            for low in range(first, tile.tokens.stop, KEY_BLOCK):
                yield range(low, min(low + KEY_BLOCK, tile.tokens.stop))

    def rows_of(self, tokens: range) -> slice:
        """Rows of the forward that hold these tokens of the segment."""
        offset = self.placed.start - self.placed.segment.context_tokens
        return slice(tokens.start + offset, tokens.stop + offset)


def tiled_segments(
    spec: AttentionSpec, biases: RelativeBiases | None, kv: PagedKv, segments: Sequence[Segment]
) -> list[TiledSegment]:
    """Each segment with its mask and bias. Raises ValueError if the pages of one do not hold its tokens."""
    kv.check(segments)
    made = []
    for placed, spans in zip(place(segments), kv.spans(segments), strict=True):
        mask = AttentionMask(spec, placed.segment, kv.device)
        bias = None if biases is None else biases.of(placed.segment, mask)
        made.append(TiledSegment(placed, spans, mask, bias))
    return made


def by_head(x: torch.Tensor) -> torch.Tensor:
    """[rows, heads, dim] -> contiguous [heads, rows, dim], which batched products read fastest."""
    return x.transpose(0, 1).contiguous()


def by_row(sums: torch.Tensor, scale: float) -> torch.Tensor:
    """[heads, rows, dim] -> [rows, heads * dim], multiplied by `scale`, in one pass."""
    heads, rows, dim = sums.shape
    out = sums.new_empty((rows, heads, dim))
    torch.mul(sums.transpose(0, 1), scale, out=out)
    return out.flatten(1)


class TiledAttention:
    """SiLU attention with any mask and bias."""

    name = "tiled torch"

    def __init__(self, spec: AttentionSpec, biases: RelativeBiases | None = None) -> None:
        """Raises ValueError for soft-max, and if `biases` does not agree with the specification."""
        if spec.normalizer is None or spec.has_bias is not (biases is not None):
            raise ValueError("tiled attention computes SiLU, and needs biases exactly if its spec has them")
        self._spec = spec
        self._biases = biases

    def begin(self, kv: PagedKv, segments: Sequence[Segment]) -> AttentionPass:
        return _TiledPass(self._spec, self._biases, kv, segments)

    def scratch_bytes(self, rows: int, max_tokens: int) -> int:  # noqa: ARG002 - at most one block of keys is in memory
        s = self._spec
        element = s.compute_dtype.itemsize
        own = rows * (2 * s.key_width + s.row_width) * element + 2 * rows * s.row_width * 4
        block = 2 * KEY_BLOCK * (s.key_width + s.row_width) * 4
        # Scores and weights of every head; the mask and the bias, with their int64 arguments.
        tile = ROW_BLOCK * KEY_BLOCK * (s.num_heads * (8 + 2 * element) + 64)
        return own + block + tile + s.num_heads * ROW_BLOCK * s.hidden_dim * 4


class _TiledPass:
    def __init__(
        self, spec: AttentionSpec, biases: RelativeBiases | None, kv: PagedKv, segments: Sequence[Segment]
    ) -> None:
        assert spec.normalizer is not None
        self._spec = spec
        self._kv = kv
        self._scale = 1.0 / spec.normalizer
        self._segments = tiled_segments(spec, biases, kv, segments)
        self._slots = kv.slots(segments)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._kv.write(layer, self._slots, k, v)
        q, k, v = by_head(q * self._spec.alpha), by_head(k), by_head(v)
        sums = torch.zeros(v.shape, device=v.device)
        for one in self._segments:
            tiles = list(one.row_tiles())
            for span in one.spans:
                keys, values = self._kv.read(layer, span, q.dtype)
                for tile in tiles:
                    self._add(layer, one, tile, range(span.start, span.end), q, keys, values, sums)
            for tile in tiles:
                for own in one.own_keys(tile):
                    part = one.rows_of(own)
                    self._add(layer, one, tile, own, q, k[:, part], v[:, part], sums)
        return by_row(sums, self._scale)

    def _add(
        self,
        layer: int,
        one: TiledSegment,
        tile: RowTile,
        numbers: range,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sums: torch.Tensor,
    ) -> None:
        visible = one.mask.tile(tile.tokens, numbers)
        if visible is Visible.NONE:
            return
        scores = torch.bmm(q[:, tile.rows], keys.transpose(1, 2))
        if one.bias is not None:
            scores = scores + one.bias.tile(layer, tile.tokens, numbers)
        weights = F.silu(scores)
        if isinstance(visible, torch.Tensor):
            weights.mul_(visible)
        sums[:, tile.rows] += torch.bmm(weights.to(values.dtype), values)
