"""Scores requests with a model in two ways, which must agree.

Full: the whole history is computed in large chunks on new pages, then the candidates are ranked. Cached: the history
was computed in small chunks on other pages, and its newest behaviours come with the request. A model whose prefixes do
not grow has the whole history cached. A model that allows no chunks computes it at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaygr.compare.requests import Request, Scores
from relaygr.runtime.errors import RelayError
from relaygr.worker.device import Device
from relaygr.worker.kv import KvDtype
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.engine import Model, build_engine
from relaygr.worker.model.inference import FullRequest, full_inference
from relaygr.worker.model.interface import TooLongError
from relaygr.worker.model.options import DEFAULT_PAGE_TOKENS

_FULL_CHUNK_TOKENS = 2048
_CACHED_CHUNKS = 5
_CACHED_CHUNK_TOKENS = 512
"""The most tokens of a chunk."""


@dataclass(frozen=True, slots=True)
class Ours:
    """Scores [candidates, tasks] of each request, and the number of ids that are not in the vocabulary."""

    scores: tuple[Scores, ...]
    unknown_items: int


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to compute a history."""

    chunks: int
    """The least number of chunks of a long history."""
    chunk_tokens: int
    suffix_behaviours: int
    pages: NDArray[np.int32]


class Scorer:
    """A model on a device, with pages for the longest of some requests."""

    def __init__(
        self, model: Model, device: Device, requests: Sequence[Request], ranker_modules: Sequence[str] = ()
    ) -> None:
        engine = build_engine(model, device, KvDtype.FLOAT32, DEFAULT_PAGE_TOKENS, ranker_modules=ranker_modules)
        longest = max((len(request.behaviours) for request in requests), default=0)
        tokens = engine.layout.tokens(min(longest, engine.limits.max_prefix_behaviours))
        arena = bind_own_arena(engine, longest_tokens=max(1, tokens))
        self._pages = np.arange(arena.shape[0], dtype=np.int32)
        self._engine = engine

    def full(self, requests: Sequence[Request]) -> Ours:
        """Each history is computed for its request."""
        return self._score_all(requests, _Way(1, _FULL_CHUNK_TOKENS, 0, self._pages))

    def unknown_inputs(self, requests: Sequence[Request]) -> tuple[int, int]:
        """The numbers of action codes and of feature values that the model does not know."""
        engine = self._engine
        return (
            sum(engine.unknown_actions(request.behaviours) for request in requests),
            sum(engine.unknown_features(request.features) for request in requests),
        )

    def cached(self, requests: Sequence[Request]) -> Ours:
        """Each history is computed in parts, and its newest behaviours come with the request."""
        suffix = self._engine.limits.max_suffix_behaviours if self._engine.rules.grows else 0
        # Pages in descending order, so that an error in their use shows.
        return self._score_all(requests, _Way(_CACHED_CHUNKS, _CACHED_CHUNK_TOKENS, suffix, self._pages[::-1].copy()))

    def _score_all(self, requests: Sequence[Request], way: _Way) -> Ours:
        scores: list[Scores] = []
        unknown = 0
        for number, request in enumerate(requests, 1):
            try:
                unknown += self._score(request, way, scores)
            except TooLongError as error:
                raise RelayError(
                    f"Request {number} is too long: {error}. Leave it out, or make the model take more; of a "
                    "conversion, by --max-prefix or --max-candidates."
                ) from error
        return Ours(tuple(scores), unknown)

    def _score(self, request: Request, way: _Way, scores: list[Scores]) -> int:
        """Adds the scores of a request. Returns its number of unknown ids."""
        history = len(request.behaviours)
        split = history - min(way.suffix_behaviours, history // 4)
        prefix, newest = request.behaviours[:split], request.behaviours[split:]
        asked = FullRequest(request.features, prefix, request.candidates, request.query_time_ms, newest)
        inference = full_inference(self._engine, asked, way.pages, way.chunk_tokens, way.chunks)
        scores.append(inference.outputs.scores.astype(np.float64))
        return inference.unknown_items
