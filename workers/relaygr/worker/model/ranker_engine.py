"""The engine of a team's own ranker: one chunk or request at a time, on contiguous copies of its K,V.

The states of rows lie in one more layer of the pages, as if they were K,V. So they are appended, spilled, reloaded and
moved with their rows, and a row that is there is never changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import torch

from relaygr.ranker import Computed, History, ModelFolder, Past, Ranker
from relaygr.ranker.interface import Kv, version_of
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.schemas.record import record
from relaygr.worker.device import Device
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.attention.paged_kv import KEY_BLOCK, PagedKv
from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.attention.spec import torch_dtype, widened
from relaygr.worker.model.base_engine import BaseEngine
from relaygr.worker.model.config import RuleError
from relaygr.worker.model.inputs.known import KnownInputs, Vocabulary
from relaygr.worker.model.interface import Int32Array, Int64Array, PrefixChunk, PrefixInputs, RankInputs, RankOutputs
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.model.rankers import RankerConfig, RankerFolder, ranker_class, require_sizes

_FEATURELESS = np.empty(0, np.int64)


class RankerError(RelayError):
    """A ranker raised, or returned what its shape does not allow. The text names its class and method."""


@record(frozen=True, slots=True, kw_only=True)
class HistoryInputs(PrefixInputs):
    """A prefix as the ranker reads it."""

    features: Int64Array
    behaviours: Behaviours
    query_time_ms: int


@record(frozen=True, slots=True, kw_only=True)
class CandidateInputs(RankInputs):
    """A request as the ranker reads it."""

    suffix: Behaviours
    candidates: Int64Array
    query_time_ms: int


def open_ranker(
    path: Path, config: RankerConfig, device: Device, dtype: ComputeDtype, allowed: Sequence[str]
) -> Ranker:
    """The ranker of a folder. Raises RelayError if its code may not run, or fails."""
    kind = ranker_class(config.ranker, allowed)
    if dtype is ComputeDtype.INT8:
        raise RelayError("compute_dtype int8 is of our own layers: a ranker of your own takes float32 or bfloat16.")
    try:
        ranker = kind(ModelFolder(path, config.options, device.torch_device, torch_dtype(dtype)))
        require_sizes(config.ranker, ranker.shape())
    except RelayError:
        raise
    # Whatever a team's code raises, the operator is told which code it was.
    except Exception as error:
        raise RelayError(
            f"The ranker {config.ranker} cannot be made from {path}: {type(error).__name__}: {error}."
        ) from error
    return ranker


class RankerEngine(BaseEngine):
    """A ranker behind the interface of engines."""

    passes_to_warm = 1

    def __init__(
        self,
        model: RankerFolder,
        device: Device,
        kv_dtype: KvDtype,
        page_tokens: int,
        compute_dtype: ComputeDtype,
        allowed: Sequence[str],
    ) -> None:
        """Raises RelayError as `open_ranker` does, and if code or sizes are not those that were checked."""
        self._ranker = open_ranker(model.path, model.config, device, compute_dtype, allowed)
        shape = self._shape = self._ranker.shape()
        if (version_of(type(self._ranker)), shape) != (model.record.version, model.record.shape):
            raise RelayError(
                f"The ranker {model.config.ranker} has changed since {model.path} was checked: run `relaygr model "
                f"check {model.path}` again, and restart processes that loaded the code before."
            )
        ids = self._ranker.known_items()
        try:
            vocabulary = Vocabulary(shape.num_items, None if ids is None else np.asarray(ids, np.int64))
        except ValueError as error:
            raise RelayError(f"The ranker {model.config.ranker} has known_items that do not fit: {error}.") from error
        super().__init__(
            model.record.description(), model.revision, vocabulary, device, kv_dtype, page_tokens, compute_dtype
        )
        self.record = model.record
        self._known = KnownInputs(self.description.features, shape.num_actions)
        self.backend = model.config.ranker
        self.weights_bytes = model.files_bytes
        self._dtype = torch_dtype(compute_dtype)
        self._kv: PagedKv | None = None

    def scratch_bytes(self, max_chunk_tokens: int, max_batch_rows: int) -> int:
        return self._ranker.scratch_bytes(max(max_chunk_tokens, max_batch_rows))

    def bind(self, arena: torch.Tensor) -> None:
        self._kv = PagedKv(arena, self.geometry, self.device.sent)

    def shown_features(self, features: Int64Array, behaviours: int, candidates: int) -> Int64Array:  # noqa: ARG002
        return features

    def unknown_actions(self, behaviours: Behaviours) -> int:
        return int(np.count_nonzero(self._known.unknown_actions(behaviours.actions)))

    def unknown_features(self, features: Int64Array) -> int:
        return self._known.unknown_features(features)

    def prefix_inputs(self, features: Int64Array, behaviours: Behaviours, query_time_ms: int = 0) -> PrefixInputs:
        self._check_prefix(behaviours)
        return HistoryInputs(
            tokens=self.layout.tokens(len(behaviours)),
            unknown_items=self._vocabulary.rows(behaviours.items).unknown,
            features=features,
            behaviours=behaviours,
            query_time_ms=query_time_ms if self.rules.uses_query_time else 0,
        )

    def rank_inputs(
        self,
        prefix_tokens: int,
        pages: Int32Array,
        suffix: Behaviours,
        candidates: Int64Array,
        query_time_ms: int = 0,
        prefix_timestamps_ms: Int64Array | None = None,  # noqa: ARG002
    ) -> RankInputs:
        self._check_request(suffix, candidates)
        return CandidateInputs(
            prefix_tokens=prefix_tokens,
            pages=pages,
            num_candidates=int(candidates.size),
            unknown_items=self._vocabulary.rows(np.concatenate((suffix.items, candidates))).unknown,
            suffix=suffix,
            candidates=candidates,
            query_time_ms=query_time_ms,
        )

    @torch.inference_mode()
    def forward(self, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]) -> list[RankOutputs]:
        if self._kv is None:
            raise ValueError("the engine has no arena yet: call bind first")
        for chunk in chunks:
            if not self.rules.chunks and (chunk.start, chunk.end) != (0, chunk.inputs.tokens):
                raise RuleError(f"chunk [{chunk.start}, {chunk.end}): this model's prefixes are computed in one chunk")
        segments = [
            Segment(chunk.pages, chunk.start, chunk.end - chunk.start, 0, stores=True, total_tokens=chunk.inputs.tokens)
            for chunk in chunks
        ]
        read = [
            Segment(request.pages, request.prefix_tokens, 0, 0, stores=False, total_tokens=request.prefix_tokens)
            for request in requests
        ]
        self._kv.check(segments + read)
        for chunk, segment in zip(chunks, segments, strict=True):
            self._compute(self._kv, chunk, segment)
        asked = cast("Sequence[CandidateInputs]", requests)
        return [self._rank(self._kv, request, segment) for request, segment in zip(asked, read, strict=True)]

    def _compute(self, kv: PagedKv, chunk: PrefixChunk, segment: Segment) -> None:
        # An engine is given what its own look-ups returned.
        inputs, rows = cast("HistoryInputs", chunk.inputs), segment.causal_rows
        history = self._history(inputs.behaviours, inputs.features, inputs.query_time_ms)
        with self._named("prefix"):
            computed = self._ranker.prefix(history, chunk.start, chunk.end, self._past(kv, segment))
        slots = kv.slots([segment])
        for layer, (k, v) in enumerate(self._checked(computed, rows)):
            kv.write(layer, slots, k.transpose(0, 1), v.transpose(0, 1))

    def _checked(self, computed: Computed, rows: int) -> list[Kv]:
        """K,V of all layers, and the states as those of one more. Raises RankerError for another form."""
        shape = self._shape
        layers = list(computed.layers)
        if len(layers) != shape.layers:
            raise RankerError(f"{self.backend}.prefix returned K,V of {len(layers)} layers, not of {shape.layers}")
        for k, v in layers:
            self._require("prefix", "K", k, (shape.heads, rows, shape.key_dim))
            self._require("prefix", "V", v, (shape.heads, rows, shape.value_dim))
        if shape.state_dim:
            if computed.states is None:
                raise RankerError(f"{self.backend}.prefix returned no states, its shape has {shape.state_dim} a row")
            self._require("prefix", "states", computed.states, (rows, shape.state_dim))
            layers.append(self._state_kv(computed.states))
        return layers

    def _state_kv(self, states: torch.Tensor) -> Kv:
        shape, rows = self._shape, states.shape[0]
        width = shape.heads * (shape.key_dim + shape.value_dim)
        padded = torch.nn.functional.pad(states, (0, width - shape.state_dim))
        keys = shape.heads * shape.key_dim
        k, v = (part.reshape(rows, shape.heads, -1).transpose(0, 1) for part in (padded[:, :keys], padded[:, keys:]))
        return k, v

    def _rank(self, kv: PagedKv, request: CandidateInputs, segment: Segment) -> RankOutputs:
        if request.layer_ready is not None:
            # A reload brings the layers in order, and the states last.
            request.layer_ready(self.geometry.num_layers - 1)
        suffix = self._history(request.suffix, _FEATURELESS, request.query_time_ms)
        state = self._last_state(kv, segment)
        with self._named("rank"):
            scores = self._ranker.rank(suffix, self._sent(request.candidates), self._past(kv, segment), state)
        self._require("rank", "scores", scores, (request.num_candidates, self.num_tasks))
        return RankOutputs(scores.float().cpu().numpy())

    def _last_state(self, kv: PagedKv, segment: Segment) -> torch.Tensor | None:
        shape, tokens = self._shape, segment.context_tokens
        if not (shape.state_dim and tokens):
            return None
        page, place = segment.pages[(tokens - 1) // self.geometry.page_tokens], (tokens - 1) % self.geometry.page_tokens
        row = [pages[int(page), :, place] for pages in (kv.k(shape.layers), kv.v(shape.layers))]
        exponents = kv.exponents(shape.layers)
        if exponents is not None:
            row = [
                widened(numbers, scales[int(page), :, place], self._dtype)
                for numbers, scales in zip(row, exponents, strict=True)
            ]
        return torch.cat([part.to(self._dtype).flatten() for part in row])[: shape.state_dim]

    def _past(self, kv: PagedKv, segment: Segment) -> Past:
        shape, rows = self._shape, segment.context_tokens
        if not rows:
            empty = torch.empty((shape.heads, 0, 1), dtype=self._dtype, device=self.device.torch_device)
            none = empty.expand(-1, -1, shape.key_dim), empty.expand(-1, -1, shape.value_dim)
            return Past(0, shape.layers, lambda _: none)
        ((span,),) = kv.spans([segment], -(-rows // KEY_BLOCK) * KEY_BLOCK + self.geometry.page_tokens)

        def read(layer: int) -> Kv:
            k, v = kv.read(layer, span, self._dtype)
            # What was read is valid until the next layer is.
            return k.clone(memory_format=torch.contiguous_format), v.clone(memory_format=torch.contiguous_format)

        return Past(rows, shape.layers, read)

    def _history(self, behaviours: Behaviours, features: Int64Array, query_time_ms: int) -> History:
        return History(
            self._sent(behaviours.items),
            self._sent(behaviours.actions.astype(np.int64)),
            self._sent(behaviours.timestamps_ms),
            self._sent(features),
            query_time_ms,
        )

    def _sent(self, numbers: Int64Array) -> torch.Tensor:
        """A copy on the device, for the ranker to keep."""
        return torch.from_numpy(numbers.astype(np.int64)).to(self.device.torch_device)

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        """Whatever a team's code raises, the log says which code it was."""
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise RankerError(f"{self.backend}.{method} raised {type(error).__name__}: {error}") from error

    def _require(self, method: str, what: str, found: torch.Tensor, shape: tuple[int, ...]) -> None:
        if not isinstance(found, torch.Tensor):
            raise RankerError(f"{self.backend}.{method} returned a {type(found).__name__} in place of {what}")
        if tuple(found.shape) != shape:
            raise RankerError(f"{self.backend}.{method} returned {what} {list(found.shape)}, not {list(shape)}")
        if not found.is_floating_point():
            raise RankerError(f"{self.backend}.{method} returned {what} of {found.dtype}, not of a floating-point type")
