"""Rows of a forward over pages with random K,V, and what the formula as it stands gives them, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.device import Device
from relaygr.worker.kv import KvDtype, KvGeometry
from relaygr.worker.model.attention.bias import RelativeBiases
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Segment, SegmentTimes, place
from relaygr.worker.model.attention.spec import AttentionSpec, rounding, scaled, widened
from relaygr.worker.model.options import RelativeBias
from relaygr.worker.model.vectors.masks import MaskOptions, attention_mask

LAYERS, LAYER = 2, 1
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of one layer's attention, as a share of the largest value: a few roundings of the compute type."""


@dataclass(frozen=True, slots=True)
class SegmentRows:
    """What a segment is made of."""

    context: int
    causal: int
    free: int
    later: int = 0
    """Tokens of the history after a chunk."""

    @property
    def stores(self) -> bool:
        return self.free == 0


def random_biases(config: RelativeBias, device: Device, seed: int) -> RelativeBiases:
    """Random tables of a bias for all layers, on the device."""
    random = np.random.default_rng(seed)

    def tables(size: int) -> list[torch.Tensor]:
        made = random.standard_normal((LAYERS, size), dtype=np.float32)
        return [torch.from_numpy(table).to(device.torch_device) for table in made]

    times = tables(config.time_buckets + 1) if config.time_buckets else None
    return RelativeBiases(config, tables(2 * config.positions - 1), times)


Part = tuple[torch.Tensor, torch.Tensor | None]


def _parts(kv: PagedKv, layer: int) -> list[Part]:
    """The pages of K and of V of a layer, each with its exponents."""
    return list(zip((kv.k(layer), kv.v(layer)), kv.exponents(layer) or (None, None), strict=True))


class RaggedForward:
    """Random rows of some segments over an arena that holds random K,V; pages lie in any order."""

    def __init__(
        self,
        runs: Sequence[SegmentRows],
        *,
        heads: int = 2,
        dqk: int = 8,
        dv: int = 6,
        page_tokens: int = 8,
        compute: torch.dtype = torch.float32,
        stored: KvDtype = KvDtype.FLOAT32,
        group: int = 1,
        contextual: int = 0,
        window: int = 0,
        full_last: int = 0,
        relative_bias: RelativeBias | None = None,
        device: Device,
        seed: int = 0,
    ) -> None:
        runs = sorted(runs, key=lambda run: not run.stores)
        random = np.random.default_rng(seed)
        geometry = KvGeometry(LAYERS, heads, dqk, dv, page_tokens, stored)
        needs = [geometry.pages_for(run.context + (run.causal if run.stores else 0)) for run in runs]
        free_pages = random.permutation(sum(needs) + 3).astype(np.int32)
        self.segments = [
            # One page more than is needed: an entry may be longer than what is asked of it.
            Segment(
                np.append(free_pages[start : start + need], free_pages[-1]),
                run.context,
                run.causal,
                run.free,
                run.stores,
                run.context + run.causal + run.later,
            )
            for run, need, start in zip(runs, needs, np.cumsum([0, *needs[:-1]]), strict=True)
        ]
        arena = torch.empty((free_pages.size, geometry.page_bytes), dtype=torch.uint8, device=device.torch_device)
        self.kv = PagedKv(arena, geometry, device.sent)
        for layer in range(LAYERS):
            for pages, exponents in _parts(self.kv, layer):
                values = torch.from_numpy(random.standard_normal(pages.shape, dtype=np.float32)).to(arena.device)
                if exponents is None:
                    pages.copy_(values)
                else:
                    numbers, own = scaled(values, stored)
                    pages.view(torch.uint8).copy_(numbers.view(torch.uint8))
                    exponents.copy_(own)
        self.spec = AttentionSpec(
            heads,
            dqk,
            dv,
            dqk**-0.5,
            37.0,
            contextual_tokens=contextual,
            max_attn_len=window,
            min_full_attn_len=full_last,
            target_group_size=group,
            has_bias=relative_bias is not None,
            compute_dtype=compute,
        )
        self.biases = None if relative_bias is None else random_biases(relative_bias, device, seed)
        if relative_bias is not None:
            self.segments = [replace(segment, times=self._times(segment, random)) for segment in self.segments]
        rows = sum(segment.rows for segment in self.segments)
        width = heads * (2 * dqk + dv)
        # As a projection gives it: with U before, so that rows do not follow one another without a gap.
        z = torch.from_numpy(random.standard_normal((rows, width + 3), dtype=np.float32)).to(compute)
        z[:, : 2 * heads * dqk] *= 2.0
        z = z.to(device.torch_device)[:, 3:]
        self.q = z[:, : heads * dqk].unflatten(1, (heads, dqk))
        self.k = z[:, heads * dqk : 2 * heads * dqk].unflatten(1, (heads, dqk))
        self.v = z[:, 2 * heads * dqk :].unflatten(1, (heads, dv))
        if stored.is_scaled:
            self.k, self.v = self.rounded(self.k), self.rounded(self.v)

    def with_guards(self) -> torch.Tensor:
        """Fills the arena with NaN, except the tokens that the segments read. Returns a copy of it."""
        before = PagedKv(self.kv.arena.clone(), self.kv.geometry)
        self.kv.arena.fill_(0xFF)
        tensors = [[kv.k(LAYER), kv.v(LAYER), *(kv.exponents(LAYER) or ())] for kv in (before, self.kv)]
        for segment in self.segments:
            for page, at in (self._place(segment, token) for token in range(segment.context_tokens)):
                for old, new in zip(*tensors, strict=True):
                    new[page, :, at] = old[page, :, at]
        return self.kv.arena.clone()

    def stored(self) -> torch.Tensor:
        """The arena after the forward: the rows of chunks are in their places, rounded, and nothing else is written."""
        after = PagedKv(self.kv.arena.clone(), self.kv.geometry)
        for placed in place(self.segments):
            segment = placed.segment
            for row, token in enumerate(range(segment.context_tokens, segment.stored_tokens), placed.start):
                page, at = self._place(segment, token)
                for (pages, exponents), values in zip(_parts(after, LAYER), (self.k, self.v), strict=True):
                    if exponents is None:
                        pages[page, :, at] = values[row].to(pages.dtype)
                    else:
                        pages[page, :, at], exponents[page, :, at] = scaled(values[row], self.kv.geometry.dtype)
        return after.arena

    def _place(self, segment: Segment, token: int) -> tuple[int, int]:
        """The page of a segment's token, and its place there."""
        return int(segment.pages[token // self.kv.geometry.page_tokens]), token % self.kv.geometry.page_tokens

    def values(self, layer: int) -> list[torch.Tensor]:
        """K and V [pages, heads, page_tokens, dim] of a layer, float32 if they are scaled."""
        return [
            pages if exponents is None else widened(pages, exponents, torch.float32)
            for pages, exponents in _parts(self.kv, layer)
        ]

    def expected(self) -> torch.Tensor:
        """float64 [rows, heads, dv]"""
        own_k, own_v = self.rounded(self.k).double().cpu(), self.rounded(self.v).double().cpu()
        k_pages, v_pages = self.values(LAYER)
        parts = [torch.empty((0, *own_v.shape[1:]), dtype=torch.float64)]
        for placed in place(self.segments):
            segment, rows = placed.segment, placed.rows
            keys = torch.cat((self.context(k_pages, segment), own_k[rows]))
            values = torch.cat((self.context(v_pages, segment), own_v[rows]))
            scores = torch.einsum("ihd,jhd->hij", self.q[rows].double().cpu(), keys) * self.spec.alpha
            scores += self._bias(segment)
            mask = self._mask(segment)
            assert self.spec.normalizer is not None
            parts.append(torch.einsum("hij,jhd->ihd", F.silu(scores) / self.spec.normalizer * mask, values))
        return torch.cat(parts)

    def _tokens(self, segment: Segment) -> torch.Tensor:
        """int64 [keys]: the numbers of a segment's keys in its sequence of the whole history, then candidates."""
        return torch.cat((torch.arange(segment.causal_tokens), segment.total_tokens + torch.arange(segment.free_rows)))

    def _mask(self, segment: Segment) -> torch.Tensor:
        """bool [rows, keys]"""
        spec, tokens = self.spec, self._tokens(segment)
        options = MaskOptions(spec.contextual_tokens, spec.max_attn_len, spec.min_full_attn_len)
        size = segment.total_tokens + segment.free_rows
        mask = attention_mask(size, size, segment.free_rows, options)
        for row in range(segment.free_rows):
            first = segment.total_tokens + row - row % spec.target_group_size
            mask[segment.total_tokens + row, first : segment.total_tokens + row] = True
        return mask[tokens[segment.context_tokens :]][:, tokens]

    def _bias(self, segment: Segment) -> torch.Tensor:
        """float64 [rows, keys]"""
        tokens = self._tokens(segment)
        bias = torch.zeros((segment.rows, tokens.numel()), dtype=torch.float64)
        if self.biases is None:
            return bias
        folded = max(0, self.spec.contextual_tokens - 1)
        places = (tokens - folded).clamp(min=0, max=segment.total_tokens - folded)
        weights = self.biases.positions[LAYER].double().cpu()
        apart = places[None, :] - places[segment.context_tokens :, None]
        bias += weights[(apart + weights.numel() // 2).clamp(0, weights.numel() - 1)]
        if self.biases.times is not None and segment.times is not None:
            weights = self.biases.times[LAYER].double().cpu()
            following, keys = torch.from_numpy(segment.times.following), torch.from_numpy(segment.times.keys)
            seconds = (following[:, None] - keys[None, :]).abs().clamp(min=1)
            bias += weights[(torch.log(seconds.float()) / self.biases.log_base).clamp(max=weights.numel() - 1).long()]
        return bias

    def _times(self, segment: Segment, random: np.random.Generator) -> SegmentTimes:
        """Seconds: 0 for the first tokens, a second to months between others; candidates have the query's time."""
        total, free = segment.total_tokens, segment.free_rows
        history = 1_600_000_000 + np.cumsum(np.exp(random.uniform(0, 17, total)).astype(np.int64))
        history[: max(1, self.spec.contextual_tokens)] = 0
        query = int(history.max(initial=0)) + 1000
        times = np.concatenate((history, np.full(free, query)))
        following = np.append(times[1:], query)
        tokens = self._tokens(segment).numpy()
        return SegmentTimes(times[tokens], following[tokens[segment.context_tokens :]])

    def context(self, pages: torch.Tensor, segment: Segment) -> torch.Tensor:
        """float64 [context tokens, heads, dim]"""
        places = [self._place(segment, token) for token in range(segment.context_tokens)]
        found = [pages[page, :, at] for page, at in places]
        return torch.stack(found).double().cpu() if found else torch.empty((0, *pages.shape[1::2])).double()

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return rounding(self.kv.geometry.dtype)(x)

    def error(self, ours: torch.Tensor, expected: torch.Tensor | None = None) -> float:
        """The largest error as a share of the largest value. `expected`: if it was computed before."""
        expected = self.expected() if expected is None else expected
        if expected.numel() == 0:
            return 0.0
        return float((ours.double().cpu().reshape(expected.shape) - expected).abs().max() / expected.abs().max())


MIXED = [
    SegmentRows(0, 20, 0),
    SegmentRows(13, 5, 0),
    SegmentRows(20, 3, 7),
    SegmentRows(0, 0, 4),
    SegmentRows(9, 0, 3),
    SegmentRows(16, 4, 1),
    SegmentRows(0, 3, 2),
]
SHAPES: dict[str, list[SegmentRows]] = {
    "a chunk that begins a prefix": [SegmentRows(0, 40, 0)],
    "a chunk over several tiles": [SegmentRows(21, 70, 0)],
    "candidates alone": [SegmentRows(0, 0, 5)],
    "candidates on a prefix": [SegmentRows(50, 0, 19)],
    "a suffix over several tiles": [SegmentRows(5, 40, 37)],
    "one row": [SegmentRows(33, 1, 0)],
    "all kinds together": MIXED,
    "many short requests": [SegmentRows(index, index % 3, 1 + index % 4) for index in range(20)],
}
