"""Chunks and requests as segments of a forward, with the times of their tokens where a bias by time needs them."""

from __future__ import annotations

import numpy as np

from relaygr.worker.model.attention.segments import Segment, SegmentTimes
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.inputs.times import seconds
from relaygr.worker.model.inputs.tokens import Column
from relaygr.worker.model.interface import Int64Array, PrefixChunk, RankInputs
from relaygr.worker.model.rules import RuleError, rules_of


class Segmenting:
    """For one model."""

    def __init__(self, config: ModelConfig) -> None:
        self._layout = config.layout()
        self._rules = rules_of(config)
        self._has_times = config.relative_bias is not None and config.relative_bias.time_buckets > 0

    def prefix_times(self, prefix_tokens: int, timestamps_ms: Int64Array | None) -> Int64Array | None:
        """Seconds of each token of a prefix, from those of its behaviours; None where the model has no use for them.

        Contextual tokens have time 0. Raises RuleError where they are needed and not given, or not so many.
        """
        if not self._has_times:
            return None
        if timestamps_ms is None or self._layout.tokens(timestamps_ms.size) != prefix_tokens:
            raise RuleError(
                f"this model's bias by time needs the timestamps of all behaviours in a prefix ({prefix_tokens} tokens)"
            )
        return np.concatenate(
            (
                np.zeros(self._layout.contextual_tokens, dtype=np.int64),
                np.repeat(seconds(timestamps_ms), self._layout.tokens_per_behaviour),
            )
        )

    def of_chunk(self, chunk: PrefixChunk) -> Segment:
        """Raises ValueError for tokens that the prefix has not, RuleError for a part where only the whole goes."""
        tokens = chunk.inputs.tokens
        if not 0 <= chunk.start < chunk.end <= tokens:
            raise ValueError(f"chunk [{chunk.start}, {chunk.end}) is not in a prefix of {tokens} tokens")
        if not self._rules.chunks and (chunk.start, chunk.end) != (0, tokens):
            raise RuleError(
                f"chunk [{chunk.start}, {chunk.end}) of {tokens} tokens: with a contextual mask a prefix is computed "
                "in one piece"
            )
        times = None
        if self._has_times:
            own = chunk.inputs.rows[: chunk.end + 1, Column.TIME]
            following = own[chunk.start + 1 :]
            if chunk.end == tokens:
                following = np.append(following, chunk.inputs.query_time)
            times = SegmentTimes(own[: chunk.end].copy(), following.copy())
        return Segment(
            pages=chunk.pages,
            context_tokens=chunk.start,
            causal_rows=chunk.end - chunk.start,
            free_rows=0,
            stores=True,
            total_tokens=tokens,
            times=times,
        )

    def of_request(self, request: RankInputs) -> Segment:
        """A request's suffix and candidates."""
        times = None
        if request.prefix_times is not None:
            # Such a model has no suffix: these are the candidates, which have the query's time.
            own = request.rows[:, Column.TIME].copy()
            times = SegmentTimes(np.concatenate((request.prefix_times, own)), own)
        return Segment(
            pages=request.pages,
            context_tokens=request.prefix_tokens,
            causal_rows=request.suffix_tokens,
            free_rows=request.num_candidates,
            stores=False,
            total_tokens=request.prefix_tokens + request.suffix_tokens,
            times=times,
        )
