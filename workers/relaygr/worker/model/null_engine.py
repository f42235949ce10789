"""An engine that computes nothing, to measure the pipeline around the model. Contract: `interface.py`.

Prefixes take as many pages as those of a real model, but nothing is written to them. The score of a candidate is a
fixed function of its item id, in [0, 1), so that a test notices when two answers are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.base_engine import BaseEngine
from relaygr.worker.model.inputs.tokens import Column, no_tokens
from relaygr.worker.model.interface import Int32Array, Int64Array, PrefixChunk, PrefixInputs, RankInputs, RankOutputs


def null_scores(items: Int64Array, num_tasks: int) -> NDArray[np.float32]:
    """float32 [items, num_tasks]: 24 bits of Fibonacci hashing of id + task."""
    mixed = (items[:, None] + np.arange(num_tasks)).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(40)) / np.float32(2**24)).astype(np.float32)


class NullEngine(BaseEngine):
    """Accepts the configuration of any checkpoint, and needs no weights."""

    backend = "none"
    passes_to_warm = 0

    def scratch_bytes(self, max_chunk_tokens: int, max_batch_rows: int) -> int:  # noqa: ARG002 - it holds no rows
        return 0

    def bind(self, arena: torch.Tensor) -> None:
        if arena.shape[1:] != (self.geometry.page_bytes,):
            raise ValueError(f"arena is {list(arena.shape)}, not [num_pages, {self.geometry.page_bytes}]")

    def shown_features(self, features: Int64Array, behaviours: int, candidates: int) -> Int64Array:  # noqa: ARG002
        return features

    def prefix_inputs(
        self,
        features: Int64Array,  # noqa: ARG002
        behaviours: Behaviours,
        query_time_ms: int = 0,  # noqa: ARG002
    ) -> PrefixInputs:
        self._check_prefix(behaviours)
        return PrefixInputs(no_tokens(self.layout.tokens(len(behaviours))), 0)

    def rank_inputs(
        self,
        prefix_tokens: int,
        pages: Int32Array,
        suffix: Behaviours,
        candidates: Int64Array,
        query_time_ms: int = 0,  # noqa: ARG002
        prefix_timestamps_ms: Int64Array | None = None,  # noqa: ARG002
    ) -> RankInputs:
        self._check_request(suffix, candidates)
        rows = no_tokens(candidates.size)
        rows[:, Column.CONTENT] = candidates
        return RankInputs(prefix_tokens, pages, rows, 0, int(candidates.size), 0)

    def forward(self, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]) -> list[RankOutputs]:
        for chunk in chunks:
            if self.geometry.pages_for(chunk.end) > len(chunk.pages):
                raise ValueError(f"{chunk.end} tokens do not fit into {len(chunk.pages)} pages")
        return [RankOutputs(null_scores(request.rows[:, Column.CONTENT], self.num_tasks)) for request in requests]
