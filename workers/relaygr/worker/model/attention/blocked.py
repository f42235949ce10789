"""The plain HSTU mask in plain torch, in tiles of 512 keys and 256 rows: fast on the CPU, correct on any device.

Only the causal half is computed, and at most one tile of [heads, rows, keys] is in memory. The context is read from
pages; the keys of a segment's own rows are used directly.

torch computes a tile of all heads in one call. Where oneDNN's float32 products are faster, each head has a product of
its own, and reads blocks of 2048 keys: a call of oneDNN costs about 15 us, which a small product does not repay. Where
`compiled/attention.py` can be used, it computes the context, in place, and the own keys of chunks, which are in their
pages too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.model.attention.interface import AttentionPass
from relaygr.worker.model.attention.paged_kv import KEY_BLOCK, PagedKv, PageSpan
from relaygr.worker.model.attention.segments import Placed, Segment, place
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.attention.tiled import ROW_BLOCK, by_head, by_row
from relaygr.worker.model.compiled.attention import CompiledAttention
from relaygr.worker.model.layer_parts import onednn_product

ONEDNN_KEY_BLOCK = 2048
"""Keys of one tile of one head, if oneDNN computes the products."""
ONEDNN_WORK = 1_000_000
"""Multiplications of a product from which on oneDNN is faster than torch, if it is faster at all."""


class BlockedAttention:
    """SiLU attention with the plain mask."""

    def __init__(
        self, spec: AttentionSpec, onednn_work: float = math.inf, compiled: CompiledAttention | None = None
    ) -> None:
        """`onednn_work`: oneDNN computes products of at least so many multiplications (float32, on the CPU).

        `compiled` computes what rows see of keys in pages: the context, and in pre-infer their own.

        Raises ValueError for a mask that is not the plain one.
        """
        if not spec.is_plain:
            raise ValueError("blocked attention computes the plain mask only")
        self._spec = spec
        if spec.compute_dtype is not torch.float32:
            # Not every CPU that has oneDNN has its products in narrow types.
            onednn_work = math.inf
        self._onednn_work = onednn_work
        self._compiled = compiled
        self.name = "blocked torch" if onednn_work == math.inf else "blocked oneDNN"
        if compiled is not None:
            self.name += f", context {compiled.name}"

    def begin(self, kv: PagedKv, segments: Sequence[Segment]) -> AttentionPass:
        return _BlockedPass(self._spec, kv, segments, self._onednn_work, self._compiled)

    def scratch_bytes(self, rows: int, max_tokens: int) -> int:  # noqa: ARG002 - at most one block of keys is in memory
        s = self._spec
        element = s.compute_dtype.itemsize
        own = rows * (2 * s.key_width + s.row_width) * element + 2 * rows * s.row_width * 4
        block = KEY_BLOCK * (s.key_width + s.row_width)
        tile = s.num_heads * ROW_BLOCK * KEY_BLOCK
        head = 0
        if self._onednn_work != math.inf:
            # Scores of one head, its K,V, and a copy of them in the layout of oneDNN's products.
            head = ONEDNN_KEY_BLOCK * (ROW_BLOCK + 2 * (s.attention_dim + s.hidden_dim)) * 4
        return own + 2 * block * 4 + head + tile * element + s.num_heads * ROW_BLOCK * s.hidden_dim * element


class _BlockedPass:
    def __init__(
        self,
        spec: AttentionSpec,
        kv: PagedKv,
        segments: Sequence[Segment],
        onednn_work: float,
        compiled: CompiledAttention | None,
    ) -> None:
        assert spec.normalizer is not None
        kv.check(segments)
        self._spec = spec
        self._kv = kv
        self._scale = 1.0 / spec.normalizer
        self._slots = kv.slots(segments)
        self._onednn_work = onednn_work
        block = KEY_BLOCK if onednn_work == math.inf else ONEDNN_KEY_BLOCK
        self._compiled = compiled
        self._tables = [segment.pages.astype(np.int64) for segment in segments] if compiled is not None else []
        spans = kv.spans(segments, block) if compiled is None else [()] * len(segments)
        self._placed = list(zip(place(segments), spans, strict=True))
        self._add = add_in_place if spec.compute_dtype is torch.float32 else add_widened

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._kv.write(layer, self._slots, k, v)
        if self._compiled is not None:
            return self._attend_compiled(self._compiled, layer, q, k, v)
        q, k, v = by_head(q * self._spec.alpha), by_head(k), by_head(v)
        sums = torch.zeros(v.shape, device=v.device)
        for placed, spans in self._placed:
            self._from_context(layer, spans, q[:, placed.rows], sums[:, placed.rows])
            self._from_own(placed, q, k, v, sums)
        return by_row(sums, self._scale)

    def _attend_compiled(
        self, compiled: CompiledAttention, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        out, alpha, scale = v.new_empty(v.shape), self._spec.alpha, self._scale
        for (placed, _), table in zip(self._placed, self._tables, strict=True):
            rows, segment = placed.rows, placed.segment
            # The own keys of a segment with `stores` are in its pages by now.
            compiled.attend(
                self._kv.arena, layer, table, segment.context_tokens, q[rows], out[rows], alpha, scale, segment.stores
            )
            if not segment.stores:
                own_q, own_k, own_v = by_head(q[rows] * alpha), by_head(k[rows]), by_head(v[rows])
                sums = torch.zeros_like(own_v)
                self._from_own(Placed(segment, 0), own_q, own_k, own_v, sums)
                out[rows].add_(sums.transpose(0, 1), alpha=scale)
        return out.flatten(1)

    def _from_context(self, layer: int, spans: Sequence[PageSpan], q: torch.Tensor, sums: torch.Tensor) -> None:
        for span in spans:
            for heads in self._heads_of(span, q.shape[1]):
                keys, values = self._kv.read(layer, span, q.dtype, heads)
                for low in range(0, q.shape[1], ROW_BLOCK):
                    rows = slice(low, low + ROW_BLOCK)
                    self._tile(q[heads, rows], keys, values, sums[heads, rows], None)

    def _heads_of(self, span: PageSpan, rows: int) -> Iterator[slice]:
        """The heads that are read together: all of a small block, each by itself of a large one."""
        tokens = span.end - span.start
        if tokens <= KEY_BLOCK and not self._is_large(rows, tokens):
            yield slice(None)
        else:
            yield from (slice(head, head + 1) for head in range(self._spec.num_heads))

    def _is_large(self, rows: int, keys: int) -> bool:
        """Whether oneDNN computes the products of one head of a tile."""
        return min(rows, ROW_BLOCK) * keys * self._spec.attention_dim >= self._onednn_work

    def _from_own(self, placed: Placed, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sums: torch.Tensor) -> None:
        causal, rows = placed.causal, placed.rows
        for first in range(causal.start, causal.stop, KEY_BLOCK):
            last = min(first + KEY_BLOCK, causal.stop)
            for low in range(first, rows.stop, ROW_BLOCK):
                high = min(low + ROW_BLOCK, rows.stop)
                # Keys after the last row of this tile are invisible; keys before its first row are all visible.
                visible = slice(first, min(last, high))
                diagonal = low - first if low + 1 < visible.stop else None
                self._tile(q[:, low:high], k[:, visible], v[:, visible], sums[:, low:high], diagonal)
        free = placed.free
        if placed.segment.free_rows:
            weights = F.silu((q[:, free] * k[:, free]).sum(-1, keepdim=True))
            sums[:, free] += weights * v[:, free]

    def _tile(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sums: torch.Tensor, diagonal: int | None
    ) -> None:
        """Adds one tile of some heads. Row i uses the keys j with j - i <= diagonal (None: all keys)."""
        if self._is_large(q.shape[1], keys.shape[1]):
            for one_q, one_keys, one_values, one_sums in zip(q, keys, values, sums, strict=True):
                weights = onednn_product(one_q, one_keys)
                F.silu(weights, inplace=True)
                if diagonal is not None:
                    weights.tril_(diagonal)
                one_sums.add_(onednn_product(weights, one_values.t()))
            return
        weights = torch.bmm(q, keys.transpose(1, 2))
        F.silu(weights, inplace=True)
        if diagonal is not None:
            weights.tril_(diagonal)
        self._add(sums, weights, values)


def add_in_place(sums: torch.Tensor, weights: torch.Tensor, values: torch.Tensor) -> None:
    """sums [heads, rows, dv] += weights [heads, rows, keys] @ values [heads, keys, dv], all of one type."""
    sums.baddbmm_(weights, values)


def add_widened(sums: torch.Tensor, weights: torch.Tensor, values: torch.Tensor) -> None:
    """The same for narrower weights and values. The sum over blocks stays in the type of `sums`."""
    sums.add_(torch.bmm(weights, values))
