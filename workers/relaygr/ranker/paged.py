"""The paged form of a ranker, for a model with kernels of its own, or one that takes many requests together.

A `Ranker` is given contiguous copies of K,V, for one request at a time. A `PagedRanker` reads and writes the worker's
pages itself, and takes all chunks and requests of a forward together. Our own layers have this form, too.

Look-ups may be made by any thread at any time, before a forward. Forwards come one at a time, under
`torch.inference_mode`, but not always from the same thread.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from relaygr.ranker.interface import RankerBase
from relaygr.schemas.messages import Behaviours
from relaygr.schemas.record import record
from relaygr.worker.model.inputs.known import Vocabulary
from relaygr.worker.model.interface import Int32Array, Int64Array, PrefixChunk, PrefixInputs, RankInputs

if TYPE_CHECKING:
    import torch

    from relaygr.worker.model.attention.paged_kv import PagedKv


@record(frozen=True, slots=True, kw_only=True)
class HistoryInputs(PrefixInputs):
    """A prefix as `PagedRanker.prefix_inputs` makes it: the user's features int64 [features], of which those that are
    missing are -1, and the behaviours.
    """

    features: Int64Array
    behaviours: Behaviours
    query_time_ms: int


@record(frozen=True, slots=True, kw_only=True)
class CandidateInputs(RankInputs):
    """A request as `PagedRanker.rank_inputs` makes it: the behaviours after the prefix, and ids int64 [candidates]."""

    suffix: Behaviours
    candidates: Int64Array
    query_time_ms: int


class PagedRanker(RankerBase):
    """A model that reads and writes the worker's pages. The worker makes one with `YourRanker(folder)`."""

    passes_to_warm: int = 1
    """Forwards of one size to run before that size is timed: they compile kernels."""

    @property
    def backend(self) -> str:
        """The name for logs and calibrations. One that computes otherwise needs another name."""
        return f"{type(self).__module__}:{type(self).__name__}"

    @abstractmethod
    def scratch_bytes(self, chunk_rows: int, ranked_rows: int) -> int:
        """The most memory that one forward needs beside weights and K,V, for the rows of all its chunks together, and
        for those of all its requests, suffixes and candidates.
        """

    @abstractmethod
    def forward(
        self, kv: PagedKv, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]
    ) -> torch.Tensor | None:
        """Writes K,V of the chunks to their pages. Returns the scores of all candidates of all requests, in order,
        [candidates, tasks]; None without requests.

        All chunks and requests belong to different prefixes; none may change the numbers of another. What they have as
        inputs is what this ranker's own look-ups returned. A request calls `layer_ready`, if it has one, before each
        layer that reads its pages.
        """

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """Raises ValueError if the known items are not `num_items` ascending numbers."""
        ids = self.known_items()
        return Vocabulary(self.shape().num_items, None if ids is None else np.asarray(ids, np.int64))

    @functools.cached_property
    def _sizes(self) -> tuple[int, int, int]:
        shape = self.shape()
        return shape.user_rows, shape.rows_per_behaviour, len(shape.feature_cardinalities)

    def prefix_inputs(self, features: Int64Array, behaviours: Behaviours, query_time_ms: int) -> PrefixInputs:
        """Looks up a whole prefix, once for all its chunks. `query_time_ms`: 0 unless the prefix depends on it."""
        user_rows, rows_per_behaviour, count = self._sizes
        if features.size != count:
            features = np.append(features, np.full(count, -1))[:count]
        return HistoryInputs(
            tokens=user_rows + rows_per_behaviour * len(behaviours),
            unknown_items=self.vocabulary.rows(behaviours.items).unknown,
            features=features,
            behaviours=behaviours,
            query_time_ms=query_time_ms,
        )

    def rank_inputs(
        self,
        prefix_tokens: int,
        pages: Int32Array,
        suffix: Behaviours,
        candidates: Int64Array,
        query_time_ms: int,
        prefix_timestamps_ms: Int64Array | None,  # noqa: ARG002 - a look-up of one's own may read it
    ) -> RankInputs:
        """Looks up a request. `prefix_timestamps_ms`: the times of the prefix's behaviours."""
        return CandidateInputs(
            prefix_tokens=prefix_tokens,
            pages=pages,
            num_candidates=int(candidates.size),
            unknown_items=self.vocabulary.rows(np.concatenate((suffix.items, candidates))).unknown,
            suffix=suffix,
            candidates=candidates,
            query_time_ms=query_time_ms,
        )

    def shown_features(self, features: Int64Array, behaviours: int, candidates: int) -> Int64Array:  # noqa: ARG002
        """The user's features, with those replaced that the model hides from sequences of this length. The key of a
        prefix is made from what this returns.
        """
        return features
