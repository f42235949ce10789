"""A model that computes nothing, to measure the pipeline around models. It needs no weights.

Prefixes take as many pages as those of a real model, but nothing is written to them. The score of a candidate is a
fixed function of its item id, in [0, 1), so that a test notices when two answers are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.ranker import CandidateInputs, PagedRanker, PrefixChunk, PrefixInputs, RankInputs, Shape
from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.description import shape_of
from relaygr.worker.model.interface import Int32Array, Int64Array


def null_scores(items: Int64Array, num_tasks: int) -> NDArray[np.float32]:
    """float32 [items, num_tasks]: 24 bits of Fibonacci hashing of id + task."""
    mixed = (items[:, None] + np.arange(num_tasks)).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(40)) / np.float32(2**24)).astype(np.float32)


class NullRanker(PagedRanker):
    """See the module docstring."""

    backend = "none"
    passes_to_warm = 0

    def __init__(self, config: ModelConfig) -> None:
        self._layout = config.layout()
        self._shape = shape_of(config)

    def shape(self) -> Shape:
        return self._shape

    def scratch_bytes(self, chunk_rows: int, ranked_rows: int) -> int:  # noqa: ARG002 - it holds no rows
        return 0

    def prefix_inputs(self, features: Int64Array, behaviours: Behaviours, query_time_ms: int) -> PrefixInputs:  # noqa: ARG002
        return PrefixInputs(tokens=self._layout.tokens(len(behaviours)), unknown_items=0)

    def rank_inputs(
        self,
        prefix_tokens: int,
        pages: Int32Array,
        suffix: Behaviours,
        candidates: Int64Array,
        query_time_ms: int,
        prefix_timestamps_ms: Int64Array | None,  # noqa: ARG002
    ) -> RankInputs:
        return CandidateInputs(
            prefix_tokens=prefix_tokens,
            pages=pages,
            num_candidates=int(candidates.size),
            unknown_items=0,
            suffix=suffix,
            candidates=candidates,
            query_time_ms=query_time_ms,
        )

    def forward(
        self, kv: PagedKv, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]
    ) -> torch.Tensor | None:
        for chunk in chunks:
            kv.require(chunk.pages, chunk.end)
        asked = cast("Sequence[CandidateInputs]", requests)
        if not asked:
            return None
        items = np.concatenate([request.candidates for request in asked])
        return torch.from_numpy(null_scores(items, len(self._shape.tasks)))
