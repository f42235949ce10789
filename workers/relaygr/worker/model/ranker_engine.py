"""The engine of every model: a ranker in the paged form behind the interface of engines (`interface.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b

import numpy as np
import torch

from relaygr.ranker import PagedRanker
from relaygr.schemas.messages import Behaviours
from relaygr.worker.device import Device
from relaygr.worker.kv import KvGeometry
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.config import RuleError
from relaygr.worker.model.description import Description
from relaygr.worker.model.inputs.known import KnownInputs
from relaygr.worker.model.interface import (
    Int32Array,
    Int64Array,
    PrefixChunk,
    PrefixInputs,
    RankInputs,
    RankOutputs,
    TooLongError,
)
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.model.rankers import RankerError, RankerRecord, ranker_code


class RankerEngine:
    """A model on a device."""

    def __init__(
        self,
        ranker: PagedRanker,
        description: Description,
        revision: str,
        known: KnownInputs,
        weights_bytes: int,
        device: Device,
        geometry: KvGeometry,
        compute_dtype: ComputeDtype,
        record: RankerRecord | None = None,
    ) -> None:
        """`record`: of a team's own ranker, whose code is not ours. Raises ValueError if its known items do not fit."""
        self.device = device
        self.description = description
        self.geometry = geometry
        self.layout = description.layout
        self.limits = description.limits
        self.rules = description.rules
        self.num_tasks = description.num_tasks
        self.revision = revision
        self.namespace = kv_namespace(revision, geometry, compute_dtype)
        self.compute_dtype = compute_dtype
        self.weights_bytes = weights_bytes
        self.record = record
        self._ranker = ranker
        self.vocabulary = ranker.vocabulary
        self._known = known
        self._kv: PagedKv | None = None

    @property
    def backend(self) -> str:
        return self._ranker.backend

    @property
    def passes_to_warm(self) -> int:
        return self._ranker.passes_to_warm

    def scratch_bytes(self, max_chunk_tokens: int, max_batch_rows: int) -> int:
        with self._code("scratch_bytes"):
            return self._ranker.scratch_bytes(max_chunk_tokens, max_batch_rows)

    def bind(self, arena: torch.Tensor) -> None:
        self._kv = PagedKv(arena, self.geometry, self.device.sent)

    def shown_features(self, features: Int64Array, behaviours: int, candidates: int) -> Int64Array:
        with self._code("shown_features"):
            return self._ranker.shown_features(features, behaviours, candidates)

    def known_items(self, count: int, random: np.random.Generator) -> Int64Array:
        return self.vocabulary.sample(count, random)

    def unknown_actions(self, behaviours: Behaviours) -> int:
        return int(np.count_nonzero(self._known.unknown_actions(behaviours.actions)))

    def unknown_features(self, features: Int64Array) -> int:
        return self._known.unknown_features(features)

    def prefix_inputs(self, features: Int64Array, behaviours: Behaviours, query_time_ms: int = 0) -> PrefixInputs:
        _check_limit(len(behaviours), self.limits.max_prefix_behaviours, "prefix behaviours")
        with self._code("prefix_inputs"):
            return self._ranker.prefix_inputs(features, behaviours, query_time_ms if self.rules.uses_query_time else 0)

    def rank_inputs(
        self,
        prefix_tokens: int,
        pages: Int32Array,
        suffix: Behaviours,
        candidates: Int64Array,
        query_time_ms: int = 0,
        prefix_timestamps_ms: Int64Array | None = None,
    ) -> RankInputs:
        _check_limit(len(suffix), self.limits.max_suffix_behaviours, "suffix behaviours")
        _check_limit(candidates.size, self.limits.max_candidates, "candidates")
        if len(suffix) and not self.rules.grows:
            raise RuleError("this model's prefixes cannot be followed by a suffix: send all behaviours in the history")
        with self._code("rank_inputs"):
            return self._ranker.rank_inputs(
                prefix_tokens, pages, suffix, candidates, query_time_ms, prefix_timestamps_ms
            )

    @torch.inference_mode()
    def forward(self, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]) -> list[RankOutputs]:
        if self._kv is None:
            raise ValueError("the engine has no arena yet: call bind first")
        for chunk in chunks:
            self._require_allowed(chunk)
        if not chunks and not requests:
            return []
        if self.record is not None:
            # Our own layers check the pages themselves.
            for chunk in chunks:
                self._kv.require(chunk.pages, chunk.end)
            for request in requests:
                self._kv.require(request.pages, request.prefix_tokens)
        with self._code("forward"):
            scores = self._ranker.forward(self._kv, chunks, requests)
        return self._split(scores, [request.num_candidates for request in requests]) if requests else []

    def _code(self, method: str) -> AbstractContextManager[None]:
        """Around code of the ranker."""
        return _OURS if self.record is None else ranker_code(f"{self.backend}.{method}")

    def pre_infer(self, chunk: PrefixChunk) -> None:
        self.forward([chunk], [])

    def rank(self, batch: Sequence[RankInputs]) -> list[RankOutputs]:
        return self.forward([], batch)

    def _require_allowed(self, chunk: PrefixChunk) -> None:
        tokens = chunk.inputs.tokens
        if not 0 <= chunk.start < chunk.end <= tokens:
            raise ValueError(f"chunk [{chunk.start}, {chunk.end}) is not in a prefix of {tokens} tokens")
        if not self.rules.chunks and (chunk.start, chunk.end) != (0, tokens):
            raise RuleError(
                f"chunk [{chunk.start}, {chunk.end}) of {tokens} tokens: this model's prefixes are computed in one "
                "chunk"
            )

    def _split(self, scores: torch.Tensor | None, candidates: Sequence[int]) -> list[RankOutputs]:
        """The scores of each request."""
        wanted = (sum(candidates), self.num_tasks)
        if not isinstance(scores, torch.Tensor):
            raise RankerError(f"{self.backend}.forward returned a {type(scores).__name__} in place of scores")
        if tuple(scores.shape) != wanted:
            raise RankerError(f"{self.backend}.forward returned scores {list(scores.shape)}, not {list(wanted)}")
        ends = np.cumsum(candidates)[:-1]
        return [RankOutputs(part) for part in np.split(scores.float().cpu().numpy(), ends)]


_OURS = nullcontext()


def _check_limit(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise TooLongError(f"{count} {what}, the model takes {limit}")


def kv_namespace(revision: str, geometry: KvGeometry, compute_dtype: ComputeDtype) -> bytes:
    """16 bytes that identify everything K,V depend on, except the user. The revision covers the configuration, too."""
    g = geometry
    parts = (
        "relaygr.kv.3",
        revision,
        f"{g.num_layers}x{g.num_heads}x{g.attention_dim}+{g.hidden_dim}",
        str(g.page_tokens),
        str(g.dtype),
        str(compute_dtype),
    )
    return blake2b("\0".join(parts).encode(), digest_size=16).digest()
