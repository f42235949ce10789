"""HSTU attention with every option, in plain torch, tile by tile: the reference path of the engine.

Slower than `blocked.py`, since it makes a mask and a bias for each tile that needs them; the tiles that nobody sees
are left out, so that a window saves what it should.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.model.attention.bias import RelativeBiases
from relaygr.worker.model.attention.interface import AttentionPass
from relaygr.worker.model.attention.paged_kv import KEY_BLOCK, PagedKv
from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.attention.sight import Visible
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.attention.tiles import ROW_BLOCK, RowTile, TiledSegment, by_head, by_row, tiled_segments


class TiledAttention:
    """SiLU attention with any mask and bias."""

    name = "tiled torch"

    def __init__(self, spec: AttentionSpec, biases: RelativeBiases | None = None) -> None:
        """Raises ValueError for soft-max, and for a bias that is asked for and not given."""
        if spec.normalizer is None or spec.has_bias is not (biases is not None):
            raise ValueError("tiled attention is SiLU attention, and its bias is that of its specification")
        self._spec = spec
        self._biases = biases

    def begin(self, kv: PagedKv, segments: Sequence[Segment]) -> AttentionPass:
        return _TiledPass(self._spec, self._biases, kv, segments)

    def scratch_bytes(self, rows: int, max_tokens: int) -> int:  # noqa: ARG002 - never more keys than a block
        s = self._spec
        element = s.compute_dtype.itemsize
        own = rows * (2 * s.key_width + s.row_width) * element + 2 * rows * s.row_width * 4
        block = 2 * KEY_BLOCK * (s.key_width + s.row_width) * 4
        # Scores and weights of every head, then the mask and the bias, with the int64 that they are made from.
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
        visible = one.sight.tile(tile.tokens, numbers)
        if visible is Visible.NONE:
            return
        scores = torch.bmm(q[:, tile.rows], keys.transpose(1, 2))
        if one.bias is not None:
            scores = scores + one.bias.tile(layer, tile.tokens, numbers)
        weights = F.silu(scores)
        if isinstance(visible, torch.Tensor):
            weights.mul_(visible)
        sums[:, tile.rows] += torch.bmm(weights.to(values.dtype), values)
