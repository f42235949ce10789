"""Soft-max attention over K,V in pages, by torch's scaled-dot-product attention.

The keys of a segment are gathered once in each layer. Rows are processed in tiles of 256, so that no mask of
[rows, keys] is ever in memory. A tile includes only those candidates' keys that its rows may see.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.model.attention.bias import RelativeBiases
from relaygr.worker.model.attention.interface import AttentionPass
from relaygr.worker.model.attention.mask import Visible
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.attention.tiled import ROW_BLOCK, RowTile, TiledSegment, by_head, tiled_segments


class SoftmaxAttention:
    """Soft-max attention with any mask and bias."""

    name = "scaled-dot-product torch"

    def __init__(self, spec: AttentionSpec, biases: RelativeBiases | None = None) -> None:
        """Raises ValueError for SiLU, and if `biases` does not agree with the specification."""
        if spec.normalizer is not None or spec.has_bias is not (biases is not None):
            raise ValueError("soft-max attention takes no normaliser, and needs biases exactly if its spec has them")
        self._spec = spec
        self._biases = biases

    def begin(self, kv: PagedKv, segments: Sequence[Segment]) -> AttentionPass:
        return _SoftmaxPass(self._spec, self._biases, kv, segments)

    def scratch_bytes(self, rows: int, max_tokens: int) -> int:
        s = self._spec
        keys = max_tokens + ROW_BLOCK + s.target_group_size
        own = rows * (2 * s.key_width + 2 * s.row_width) * 4
        gathered = 3 * keys * (s.key_width + s.row_width) * 4
        # Scores of every head, if torch has no fused form; the mask as bool and as float, with its arguments.
        tile = ROW_BLOCK * keys * (2 * s.num_heads * 4 + 48)
        return own + gathered + tile


class _SoftmaxPass:
    def __init__(
        self, spec: AttentionSpec, biases: RelativeBiases | None, kv: PagedKv, segments: Sequence[Segment]
    ) -> None:
        self._spec = spec
        self._kv = kv
        self._segments = tiled_segments(spec, biases, kv, segments)
        self._slots = kv.slots(segments)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._kv.write(layer, self._slots, k, v)
        out = torch.empty((q.shape[0], self._spec.num_heads, self._spec.hidden_dim), dtype=q.dtype, device=q.device)
        q, k, v = by_head(q), by_head(k), by_head(v)
        for one in self._segments:
            self._attend_segment(layer, one, q, k, v, out)
        return out.flatten(1)

    def _attend_segment(
        self, layer: int, one: TiledSegment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        segment, causal = one.placed.segment, one.placed.causal
        # The history is gathered once, with room after it for the candidates of one tile.
        room = segment.causal_tokens + min(segment.free_rows, ROW_BLOCK + self._spec.target_group_size - 1)
        keys = k.new_empty((k.shape[0], room, k.shape[2]))
        values = v.new_empty((v.shape[0], room, v.shape[2]))
        for span in one.spans:
            keys[:, span.start : span.end], values[:, span.start : span.end] = self._kv.read(layer, span, k.dtype)
        keys[:, segment.context_tokens : segment.causal_tokens] = k[:, causal]
        values[:, segment.context_tokens : segment.causal_tokens] = v[:, causal]
        for tile in one.row_tiles():
            history = range(segment.causal_tokens)
            near = range(0)
            if tile.tokens.start >= segment.causal_tokens:
                near = range(one.mask.group_start(tile.tokens.start), tile.tokens.stop)
                part, to = one.rows_of(near), slice(history.stop, history.stop + len(near))
                keys[:, to], values[:, to] = k[:, part], v[:, part]
            elif not self._spec.contextual_tokens:
                # No row of the tile sees a key after the tile's last row.
                history = range(tile.tokens.stop)
            count = len(history) + len(near)
            attended = F.scaled_dot_product_attention(
                q[None, :, tile.rows],
                keys[None, :, :count],
                values[None, :, :count],
                attn_mask=self._mask(layer, one, tile, (history, near), q.dtype),
                scale=self._spec.alpha,
            )
            out[tile.rows] = attended[0].transpose(0, 1)

    @staticmethod
    def _mask(
        layer: int, one: TiledSegment, tile: RowTile, keys: Sequence[range], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """[rows, keys]: the values to add to the scores, or a bool mask; None if every key is visible."""
        keys = [part for part in keys if part]
        tiles = [one.mask.tile(tile.tokens, part) for part in keys]
        if one.bias is None and all(visible is Visible.ALL for visible in tiles):
            return None
        device = one.mask.places(tile.tokens).device
        shape = len(tile.tokens)
        mask = torch.cat(
            [
                visible
                if isinstance(visible, torch.Tensor)
                else torch.full((shape, len(part)), visible is Visible.ALL, device=device)
                for visible, part in zip(tiles, keys, strict=True)
            ],
            dim=1,
        )
        if one.bias is None:
            return mask
        bias = torch.cat([one.bias.tile(layer, tile.tokens, part) for part in keys], dim=1)
        return bias.masked_fill_(~mask, float("-inf")).to(dtype)
