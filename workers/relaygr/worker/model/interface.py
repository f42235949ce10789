"""What the worker asks of an engine. Who calls what, and when:

* any thread, any time: `prefix_inputs`, `rank_inputs` (numpy; they look up rows and check limits);
* once, before any work: `bind(arena)` on the device's thread;
* the device's thread only: `forward(chunks, requests)`, and its two halves `pre_infer(chunk)` and `rank(batch)`.

Full inference is `pre_infer` over the chunks of a prefix, then `rank`; there is no third code path. A prefix is
computed in any chunks that its rules allow (`rules`), in order: [0, a), [a, b), ... Chunk [start, end) finds K,V of
[0, start) in its pages and writes [start, end); an append is the same call on a prefix that was there. Requests
write nothing to the arena. Chunks and requests of one `forward` are of different prefixes: none sees another's.

Device work is given to the calling thread's current stream; the scores that come back are complete. Without
requests, `forward` may return before the device is done: an event recorded after it completes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.worker.device import Device
from relaygr.worker.kv import KvGeometry, PrefixLayout
from relaygr.worker.model.inputs.tokens import Tokens
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.model.rules import PrefixRules

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


class TooLongError(ValueError):
    """More behaviours or candidates than the model's limits allow."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Most of each in one request; from the checkpoint."""

    max_prefix_behaviours: int
    max_suffix_behaviours: int
    max_candidates: int


@dataclass(frozen=True, slots=True)
class PrefixInputs:
    """A whole prefix, looked up: `rows` of its contextual tokens, then of its behaviours (`inputs/tokens.py`)."""

    rows: Tokens
    unknown_items: int
    query_time: int = 0
    """Seconds; 0 where the model does not use it."""

    @property
    def tokens(self) -> int:
        return int(self.rows.shape[0])


@dataclass(frozen=True, slots=True)
class PrefixChunk:
    """Tokens [start, end) of a prefix, to be computed. `pages`: those that hold tokens [0, end), or more."""

    inputs: PrefixInputs
    start: int
    end: int
    pages: Int32Array


@dataclass(frozen=True, slots=True)
class RankInputs:
    """One request: rows of its suffix, then of its candidates, against the first `prefix_tokens` in `pages`."""

    prefix_tokens: int
    pages: Int32Array
    rows: Tokens
    suffix_tokens: int
    num_candidates: int
    unknown_items: int
    prefix_times: Int64Array | None = None
    """Seconds of each prefix token, where the model has a bias by time."""
    layer_ready: Callable[[int], None] | None = None
    """Called with each layer's number before that layer reads the pages: they may still be on their way. It may make
    the current stream wait, and may raise, as `forward` then does."""


@dataclass(frozen=True, slots=True)
class RankOutputs:
    """Scores of one request: float32 [candidates, tasks], in the order of its candidates."""

    scores: NDArray[np.float32]


class Engine(Protocol):
    """A loaded model on one device."""

    @property
    def device(self) -> Device: ...

    @property
    def geometry(self) -> KvGeometry: ...

    @property
    def layout(self) -> PrefixLayout: ...

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def revision(self) -> str:
        """Hash of weights and configuration."""

    @property
    def namespace(self) -> bytes:
        """All that K,V depend on but the user's own part: revision, layout, types, N. A part of each cache key."""

    @property
    def rules(self) -> PrefixRules:
        """What may be done with a prefix: whether it grows, is computed in chunks, and has a query time."""

    @property
    def num_tasks(self) -> int: ...

    @property
    def compute_dtype(self) -> ComputeDtype:
        """The element type of the matrix products."""

    @property
    def backend(self) -> str:
        """What computes attention, and whether forwards run from captured graphs, as logs and reports name it."""

    @property
    def passes_to_warm(self) -> int:
        """Forwards of a size after which the next of that size takes the time that they all take from then on."""

    @property
    def weights_bytes(self) -> int: ...

    def scratch_bytes(self, max_chunk_tokens: int, max_batch_rows: int) -> int:
        """Most device memory beyond weights and arena that one `forward` needs, for calls within these sizes.

        Chunk tokens: of all its chunks. Batch rows: suffix tokens + candidates of all its requests.
        """

    def bind(self, arena: torch.Tensor) -> None:
        """Uses this arena from now on: uint8 [num_pages, geometry.page_bytes] on the device. Raises ValueError."""

    def shown_features(self, features: Int64Array, behaviours: int, candidates: int) -> Int64Array:
        """The user's features as a sequence of so many behaviours and candidates shows them: some may be hidden.

        The same array where nothing is. A prefix is named, and looked up, by what it shows.
        """

    def prefix_inputs(self, features: Int64Array, behaviours: Behaviours, query_time_ms: int = 0) -> PrefixInputs:
        """Looks a prefix up. Missing and unknown features take their unknown row. Raises TooLongError.

        `query_time_ms`: fixed at the retrieval event; models whose rules do not name it do not read it.
        """

    def rank_inputs(
        self,
        prefix_tokens: int,
        pages: Int32Array,
        suffix: Behaviours,
        candidates: Int64Array,
        query_time_ms: int = 0,
        prefix_timestamps_ms: Int64Array | None = None,
    ) -> RankInputs:
        """Looks a request up. Raises TooLongError, and RuleError for a suffix that the model's rules forbid.

        `prefix_timestamps_ms`: of the prefix's behaviours, for models with a bias by time; others do not read them.
        """

    def forward(self, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]) -> list[RankOutputs]:
        """Computes K,V of the chunks into their pages, and scores each request, in its order, in one pass.

        Neither chunks nor requests change another's numbers. Raises, before anything is written, ValueError for
        pages that do not hold what they should, and RuleError for a chunk that the model's rules forbid.
        """

    def pre_infer(self, chunk: PrefixChunk) -> None:
        """`forward` of one chunk."""

    def rank(self, batch: Sequence[RankInputs]) -> list[RankOutputs]:
        """`forward` of requests."""
