"""The pieces of work that a worker holds between receiving a message and being done with it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from relaygr.consumer import Received
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import Behaviours, HistoryVersion, Path, PrefixSource, PreInferJob, RankingRequest
from relaygr.worker.cache import Fill, Handle, PrefixKey
from relaygr.worker.executor.order import WorkClass
from relaygr.worker.model.interface import PrefixInputs, RankInputs

HELD_BYTES_PER_BEHAVIOUR = 64
"""A behaviour of a resolved history: its copy (18 bytes), and its rows in the model's tables."""


class JobOutcome(enum.StrEnum):
    """How a pre-infer job ended: a metric label."""

    COMPUTED = "computed"
    ALREADY_CACHED = "already_cached"
    RELOADED = "reloaded"
    OVERTAKEN = "overtaken"
    EXPIRED = "expired"
    SHED = "shed"
    NO_ROOM = "no_room"
    NO_HISTORY = "no_history"
    OVER_LOAD = "over_load"
    OVER_FOOTPRINT = "over_footprint"
    MISROUTED = "misrouted"
    UNDECODABLE = "undecodable"
    DISABLED = "disabled"
    NOT_USABLE = "not_usable"
    """The request will bring a suffix, which this model takes only as a part of the prefix."""
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class JobWork:
    """A pre-infer job, with its times on the worker's monotonic clock."""

    job: PreInferJob
    received: Received
    expected_ranking_us: int
    expires_us: int
    begun: bool = False


@dataclass(slots=True, eq=False)
class ResolvedPrefix:
    """What of a user's history is the prefix: resolved, windowed, and its identity; and what follows it."""

    key: PrefixKey
    features: NDArray[np.int64]
    behaviours: Behaviours
    suffix: Behaviours
    """What is ranked after the prefix: a request's short-term behaviours, where they are not a part of the prefix."""
    query_time_ms: int
    tokens: int
    version: HistoryVersion | None
    stale: bool
    loading: bool
    revision: str
    """The model that all this is cut for."""
    for_one_impression: bool
    """Its K,V are of no use to the user's next requests."""


@dataclass(slots=True, eq=False)
class RankingWork:
    """A ranking request from receipt to its one answer. Times on the worker's monotonic clock."""

    request: RankingRequest
    reply: RankingHeaders
    received: Received
    received_wall_us: int
    deadline_us: int
    reply_margin_us: int = 0
    """What the answer's way back takes: it should leave so long before the deadline."""
    scored_tokens: int = 0
    """Tokens of suffix and candidates, as the latency model counts them."""
    predicted_us: float = 0.0
    span: ResolvedPrefix | None = None
    ranked_prefix_tokens: int = 0
    """Tokens of the prefix that are in `pages` when it is ranked; the rest of it is then part of `suffix`."""
    suffix: Behaviours = field(default_factory=Behaviours.empty)
    path: Path = Path.FULL
    prefix_source: PrefixSource = PrefixSource.COMPUTED
    tokens_cached: int = 0
    handle: Handle | None = None
    pages: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    inputs: RankInputs | None = None
    unknown_items: int = 0
    started_us: int | None = None
    looked_up_us: int | None = None
    ready_us: int | None = None
    pre_infer_us: int = 0
    reload_us: int = 0
    rank_us: int = 0
    lookups: int = 0
    done: bool = False

    @property
    def work_class(self) -> WorkClass:
        return WorkClass.RANKING

    @property
    def latest_start_us(self) -> int:
        return self.answer_by_us - int(self.predicted_us)

    @property
    def held_bytes(self) -> int:
        """About what the request holds until it is answered: its message, decoded, and its history, looked up."""
        version = self.request.history_version
        behaviours = version.length if version is not None else 0
        return 2 * len(self.received.value or b"") + HELD_BYTES_PER_BEHAVIOUR * behaviours

    @property
    def answer_by_us(self) -> int:
        """When the answer should leave."""
        return self.deadline_us - self.reply_margin_us


@dataclass(slots=True, eq=False)
class PrefixWork:
    """The computation of one prefix, or of the tail that a cached one lacks, in chunks.

    It serves pre-infer jobs, ranking requests that wait for it, or both; it counts as ranking work as
    soon as one request waits. `fill` is None while nothing is reserved, and for work on scratch pages.
    """

    span: ResolvedPrefix
    inputs: PrefixInputs
    done_tokens: int = 0
    jobs: list[JobWork] = field(default_factory=list)
    waiters: list[RankingWork] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)
    """Called, once, when this work is over, however it ended."""
    base: Handle | None = None
    """What is cached of it, pinned until the computation ends."""
    fill: Fill | None = None
    on_scratch: bool = False
    pages: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    remaining_us: float = 0.0

    @property
    def started(self) -> bool:
        return self.fill is not None or self.pages.size > 0

    @property
    def total_tokens(self) -> int:
        return self.span.tokens

    @property
    def work_class(self) -> WorkClass:
        return WorkClass.RANKING if self.waiters else WorkClass.PREINFER

    @property
    def latest_start_us(self) -> int:
        if self.waiters:
            return min(waiter.latest_start_us for waiter in self.waiters) - int(self.remaining_us)
        return min(job.expected_ranking_us for job in self.jobs) - int(self.remaining_us)
