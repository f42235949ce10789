"""The work that a worker holds between the receipt of a message and its end: jobs, requests and prefixes."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from relaygr.consumer import Received
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import Behaviours, HistoryVersion, Path, PrefixSource, PreInferJob, RankingRequest
from relaygr.worker.cache import Fill, Handle, PrefixKey
from relaygr.worker.executor.order import WorkClass
from relaygr.worker.model.interface import PrefixInputs, RankInputs

NO_PAGES: NDArray[np.int32] = np.empty(0, np.int32)


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
    """The request will bring a suffix, and this model takes a suffix only as a part of the prefix."""
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class JobWork:
    """A pre-infer job. Its times are on the worker's monotonic clock."""

    job: PreInferJob
    received: Received
    expected_ranking_us: int
    expires_us: int
    begun: bool = False
    """Whether the job was counted as begun: its prefix is computed, reloaded, or was found ready."""


@dataclass(slots=True, eq=False)
class ResolvedPrefix:
    """A prefix with its identity, and the behaviours that follow it. It is resolved for one model."""

    key: PrefixKey
    features: NDArray[np.int64]
    behaviours: Behaviours
    suffix: Behaviours
    """The request's short-term behaviours, ranked after the prefix; empty where they are a part of the prefix."""
    query_time_ms: int
    tokens: int
    scored_tokens: int
    """Tokens of suffix and candidates, as the latency model counts them."""
    version: HistoryVersion | None
    stale: bool
    loading: bool
    revision: str
    """The revision of the model."""
    for_one_impression: bool
    """The K,V are of no use to later requests of the user."""


@dataclass(slots=True, eq=False)
class RankingWork:
    """A ranking request, from its receipt to its one result. Its times are on the worker's monotonic clock."""

    work_class: ClassVar[WorkClass] = WorkClass.RANKING

    request: RankingRequest
    reply: RankingHeaders
    received: Received
    received_wall_us: int
    deadline_us: int
    answer_by_us: int
    """When the result should be sent: the deadline less the time to reach the gateway."""
    held_bytes: int = 0
    """The approximate memory of the request until it is answered."""
    scored_tokens: int = 0
    """Tokens of suffix and candidates, as the latency model counts them."""
    predicted_us: float = 0.0
    """Device time of the ranking pass."""
    latest_start_us: int = 0
    """`answer_by_us` less `predicted_us`."""
    prefix: ResolvedPrefix | None = None
    ranked_prefix_tokens: int = 0
    """Tokens of the prefix that are in `pages` when it is ranked; the rest of the prefix is then a part of `suffix`.
    Both are set from the first look-up on."""
    suffix: Behaviours = field(init=False)
    path: Path = Path.FULL
    prefix_source: PrefixSource = PrefixSource.COMPUTED
    tokens_cached: int = 0
    handle: Handle | None = None
    pages: NDArray[np.int32] = field(init=False)
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


@dataclass(slots=True, eq=False)
class PrefixWork:
    """The computation of one prefix, or of the tail that a cached part lacks, in chunks.

    It serves pre-infer jobs, ranking requests that wait for it, or both. It counts as ranking work as soon as one
    request waits. `fill` is None while no pages are reserved, and for a computation on the scratch pages.
    """

    prefix: ResolvedPrefix
    inputs: PrefixInputs
    total_tokens: int
    done_tokens: int = 0
    jobs: list[JobWork] = field(default_factory=list)
    waiters: list[RankingWork] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)
    """Calls to post once this computation has ended, with or without success."""
    base: Handle | None = None
    """The part of the prefix that is cached, pinned until the computation ends."""
    fill: Fill | None = None
    on_scratch: bool = False
    pages: NDArray[np.int32] = field(default_factory=lambda: NO_PAGES)
    remaining_us: float = 0.0
    """Predicted device time of the chunks that are left."""

    @property
    def started(self) -> bool:
        """Whether the computation has its pages."""
        return self.pages.size > 0

    @property
    def work_class(self) -> WorkClass:
        return WorkClass.RANKING if self.waiters else WorkClass.PREINFER

    @property
    def latest_start_us(self) -> int:
        if self.waiters:
            return min(waiter.latest_start_us for waiter in self.waiters) - int(self.remaining_us)
        return min(job.expected_ranking_us for job in self.jobs) - int(self.remaining_us)
