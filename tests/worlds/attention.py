"""Rows of a forward over pages with random K,V, and what the formula as it stands gives them, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.device import Device
from relaygr.worker.kv import KvDtype, KvGeometry
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Segment, place
from relaygr.worker.model.attention.spec import AttentionSpec, torch_dtype

LAYERS, LAYER = 2, 1
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of one layer's attention, as a share of the largest value: a few roundings of the compute type."""


@dataclass(frozen=True, slots=True)
class SegmentRows:
    """What a segment is made of."""

    context: int
    causal: int
    free: int

    @property
    def stores(self) -> bool:
        return self.free == 0


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
                run.context + run.causal,
            )
            for run, need, start in zip(runs, needs, np.cumsum([0, *needs[:-1]]), strict=True)
        ]
        elements = free_pages.size * geometry.page_bytes // geometry.dtype.size_bytes
        values = torch.from_numpy(random.standard_normal(elements, dtype=np.float32)).to(torch_dtype(stored))
        arena = values.view(torch.uint8).view(free_pages.size, geometry.page_bytes)
        self.kv = PagedKv(arena.to(device.torch_device), geometry, device.sent)
        self.spec = AttentionSpec(heads, dqk, dv, dqk**-0.5, 37.0, target_group_size=group, compute_dtype=compute)
        rows = sum(segment.rows for segment in self.segments)
        width = heads * (2 * dqk + dv)
        # As a projection gives it: with U before, so that rows do not follow one another without a gap.
        z = torch.from_numpy(random.standard_normal((rows, width + 3), dtype=np.float32)).to(compute)
        z[:, : 2 * heads * dqk] *= 2.0
        z = z.to(device.torch_device)[:, 3:]
        self.q = z[:, : heads * dqk].unflatten(1, (heads, dqk))
        self.k = z[:, heads * dqk : 2 * heads * dqk].unflatten(1, (heads, dqk))
        self.v = z[:, 2 * heads * dqk :].unflatten(1, (heads, dv))

    def expected(self) -> torch.Tensor:
        """float64 [rows, heads, dv]"""
        own_k, own_v = self.rounded(self.k).double().cpu(), self.rounded(self.v).double().cpu()
        parts = [torch.empty((0, *own_v.shape[1:]), dtype=torch.float64)]
        for placed in place(self.segments):
            segment, rows = placed.segment, placed.rows
            keys = torch.cat((self.context(self.kv.k(LAYER), segment), own_k[rows]))
            values = torch.cat((self.context(self.kv.v(LAYER), segment), own_v[rows]))
            row, column = torch.arange(segment.rows)[:, None], torch.arange(segment.rows)[None, :]
            groups = [(order - segment.causal_rows) // self.spec.target_group_size for order in (row, column)]
            own = (column <= row) & ((column < segment.causal_rows) | (groups[0] == groups[1]))
            mask = torch.cat((torch.ones(segment.rows, segment.context_tokens, dtype=torch.bool), own), 1)
            scores = torch.einsum("ihd,jhd->hij", self.q[rows].double().cpu(), keys) * self.spec.alpha
            assert self.spec.normalizer is not None
            parts.append(torch.einsum("hij,jhd->ihd", F.silu(scores) / self.spec.normalizer * mask, values))
        return torch.cat(parts)

    def context(self, pages: torch.Tensor, segment: Segment) -> torch.Tensor:
        """float64 [context tokens, heads, dim]"""
        tokens = range(segment.context_tokens)
        size = self.kv.geometry.page_tokens
        found = [pages[int(segment.pages[token // size]), :, token % size] for token in tokens]
        return torch.stack(found).double().cpu() if found else torch.empty((0, *pages.shape[1::2])).double()

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.kv.dtype).to(x.dtype)

    def error(self, ours: torch.Tensor) -> float:
        expected = self.expected()
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
