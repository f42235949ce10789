"""The interface between the worker and an engine. Threads and order of the calls:

* `prefix_inputs`, `rank_inputs`: any thread, any time. They look up rows and check limits, in numpy.
* `bind(arena)`: the device thread, once, before any work.
* `forward(chunks, requests)`, and its special cases `pre_infer(chunk)` and `rank(batch)`: the device thread only.

Full inference is `pre_infer` over the chunks of a prefix, then `rank`; there is no third code path. A prefix is
computed in order, in any chunks that its rules allow (`rules`): [0, a), [a, b), ... Chunk [start, end) reads K,V of
[0, start) from its pages and writes those of [start, end). An append is the same call on a cached prefix. Requests
write nothing to the arena. All chunks and requests of one `forward` belong to different prefixes, and none reads
the K,V of another.

The engine enqueues device work on the calling thread's current stream. Returned scores are complete. Without requests,
`forward` may return before the device has finished; an event recorded after the call completes when the work does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.schemas.record import record
from relaygr.worker.kv import KvGeometry, PrefixLayout
from relaygr.worker.model.config import PrefixRules
from relaygr.worker.model.options import ComputeDtype

if TYPE_CHECKING:
    # The simulation runs the executor without torch.
    import torch

    from relaygr.worker.device import Device
    from relaygr.worker.model.description import Description

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


class TooLongError(ValueError):
    """A request has more behaviours or candidates than the model's limits allow."""


@record(frozen=True, slots=True)
class EngineLimits:
    """The limits of one request, from the checkpoint."""

    max_prefix_behaviours: int
    max_suffix_behaviours: int
    max_candidates: int


@record(frozen=True, slots=True, kw_only=True)
class PrefixInputs:
    """A whole prefix after look-up. Each engine adds what its forward reads."""

    tokens: int
    unknown_items: int


@record(frozen=True, slots=True)
class PrefixChunk:
    """Tokens [start, end) of a prefix, to be computed. `pages` hold at least tokens [0, end)."""

    inputs: PrefixInputs
    start: int
    end: int
    pages: Int32Array


@record(frozen=True, slots=True, kw_only=True)
class RankInputs:
    """One request after look-up. Its suffix and its candidates read the first `prefix_tokens` tokens in `pages`. Each
    engine adds what its forward reads.
    """

    prefix_tokens: int
    pages: Int32Array
    num_candidates: int
    unknown_items: int
    layer_ready: Callable[[int], None] | None = None
    """Called with the number of each layer before that layer reads the pages: a reload may still be writing them.
    The function may make the current stream wait. If it raises, `forward` raises."""


@record(frozen=True, slots=True)
class RankOutputs:
    """Scores of one request: float32 [candidates, tasks], in the order of its candidates."""

    scores: NDArray[np.float32]


class Engine(Protocol):
    """A loaded model on one device."""

    @property
    def device(self) -> Device: ...

    @property
    def description(self) -> Description:
        """What the model's folder says of it."""

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
        """Identifies all but the user that K,V depend on: revision, layout, types, N. A part of each cache key."""

    @property
    def rules(self) -> PrefixRules:
        """Whether a prefix may grow, may be computed in chunks, and depends on the query time."""

    @property
    def num_tasks(self) -> int: ...

    @property
    def compute_dtype(self) -> ComputeDtype:
        """The element type of the matrix products."""

    @property
    def backend(self) -> str:
        """The name of the attention back end and of captured graphs, for logs and reports."""

    @property
    def passes_to_warm(self) -> int:
        """Forwards of one size to run before timing that size: they compile kernels or capture graphs."""

    @property
    def weights_bytes(self) -> int:
        """The most memory for the weights, with the copies that products keep in another type or layout."""

    def scratch_bytes(self, max_chunk_tokens: int, max_batch_rows: int) -> int:
        """The most device memory that one `forward` within these sizes needs beside weights and arena.

        Chunk tokens: of all chunks together. Batch rows: suffix tokens + candidates of all requests together.
        """

    def bind(self, arena: torch.Tensor) -> None:
        """Uses this arena from now on: uint8 [num_pages, geometry.page_bytes] on the device.

        Raises ValueError for an arena of another form.
        """

    def shown_features(self, features: Int64Array, behaviours: int, candidates: int) -> Int64Array:
        """The user's features, with values replaced that the model hides from sequences of this length.

        Returns the same array if nothing is hidden. The key of a prefix is computed from the shown features.
        """

    def known_items(self, count: int, random: np.random.Generator) -> Int64Array:
        """Random item ids of the model's vocabulary; some may be equal."""

    def unknown_actions(self, behaviours: Behaviours) -> int:
        """The number of behaviours with an action code that the model does not know; 0 if it uses no actions."""

    def unknown_features(self, features: Int64Array) -> int:
        """The number of feature values that are missing, outside the model's tables, or more than the model has."""

    def prefix_inputs(self, features: Int64Array, behaviours: Behaviours, query_time_ms: int = 0) -> PrefixInputs:
        """Looks up the rows of a prefix. Missing and unknown features take their unknown row. Raises TooLongError.

        `query_time_ms` is fixed at the retrieval event; a model reads it only if its rules have `uses_query_time`.
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
        """Looks up the rows of a request. Raises TooLongError, and RuleError for a suffix against the model's rules.

        `prefix_timestamps_ms`: times of the prefix's behaviours; only models with a bias by time read them.
        """

    def forward(self, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]) -> list[RankOutputs]:
        """Writes K,V of the chunks to their pages and returns the scores of each request, in order, in one pass.

        No chunk or request changes the numbers of another. Before anything is written, raises ValueError for too few
        or unknown pages, and RuleError for a chunk that the model's rules forbid.
        """

    def pre_infer(self, chunk: PrefixChunk) -> None:
        """`forward` of one chunk."""

    def rank(self, batch: Sequence[RankInputs]) -> list[RankOutputs]:
        """`forward` of requests."""
