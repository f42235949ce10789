"""The work that a worker holds between the receipt of a message and its end: jobs, requests and prefixes."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relaygr.admission.policy import LATE_PART
from relaygr.consumer.interface import Received
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.fields import Other
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import (
    MAX_BUDGET_MS,
    Behaviours,
    HistoryVersion,
    Path,
    PrefixSource,
    PreInferJob,
    RankingRequest,
    StaleCause,
)
from relaygr.worker.cache import Fill, Handle, PendingPrefix, PrefixKey
from relaygr.worker.executor.device_record import impression_id
from relaygr.worker.executor.schedulable import WorkClass
from relaygr.worker.executor.waits import Timer
from relaygr.worker.model.interface import PrefixInputs, RankInputs

NO_PAGES: NDArray[np.int32] = np.empty(0, np.int32)
WORK_BYTES: Final = 2048
"""Memory of the objects of one piece of work."""
BYTES_PER_TOKEN: Final = 48
"""Memory of a looked-up token (5 numbers of 8 bytes) and of its time."""
LONGEST_TRANSIT_US: Final = MAX_BUDGET_MS * 1000
"""The largest `max_deadline_ms`: a request that took longer to arrive would have expired on its way."""


class JobOutcome(enum.StrEnum):
    """How a pre-infer job ended: a metric label."""

    COMPUTED = "computed"
    JOINED = "joined"
    """A ranking request waited for the prefix from its first chunk on, so it was computed as full inference."""
    ALREADY_CACHED = "already_cached"
    """HBM has the prefix, at most without a tail that its request ranks with the suffix."""
    RELOADED = "reloaded"
    """The same after a copy from DRAM."""
    OVERTAKEN = "overtaken"
    EXPIRED = "expired"
    SHED = "shed"
    NO_ROOM = "no_room"
    NO_HISTORY = "no_history"
    OVER_LOAD = "over_load"
    OVER_FOOTPRINT = "over_footprint"
    MISROUTED = "misrouted"
    UNKNOWN_SCENARIO = "unknown_scenario"
    UNDECODABLE = "undecodable"
    DISABLED = "disabled"
    NOT_USABLE = "not_usable"
    """The request will bring a suffix, and this model takes a suffix only as a part of the prefix."""
    FAILED = "failed"


NO_MEMORY: Final = "unanswered requests and their histories hold as much memory as worker.ranking_queue_bytes allows"
SPENT_PART: Final = 1 / 3
"""A computation may be displaced while its spent device time is at most this part of what is left."""


class Announcement(NamedTuple):
    """When a request may arrive, or go on if it waits. Times are on the worker's monotonic clock."""

    announced_us: int
    expected_us: int
    until_us: int
    """Later it is not expected any more."""
    stated_us: tuple[int, int] | None = None
    """By the gateway's clock, when its retrieval began and when the gateway expected to send it; None for a request
    that arrived and waits."""


@dataclass(slots=True, eq=False)
class Impression:
    """One pass of the cascade at this worker, from its job or its request on, whichever comes first. Either may be
    missing. The device thread writes it.
    """

    user_id: str
    request_id: str
    seen_us: int = 0
    """When its job or its request was received last."""
    announced: Announcement | None = None
    """None: nothing says when its request may arrive (`ExpectedArrivals`)."""
    has_job: bool = False
    is_computed: bool = False
    """Its job has computed the prefix or its tail."""
    is_leased: bool = False
    """Its job has prepared the prefix. The poll thread reads it."""
    is_answered: bool = False
    """Its request was answered, so a job for it is dropped."""
    prefix: ResolvedPrefix | None = None
    """What its job resolved, for its request (`Impressions`)."""

    @property
    def record_id(self) -> bytes:
        """Its id in the record of the device's work (`DeviceRecord`)."""
        return impression_id(self.user_id, self.request_id)


@dataclass(slots=True, eq=False)
class JobWork:
    """A pre-infer job. Its times are on the worker's monotonic clock."""

    job: PreInferJob
    received: Received
    expected_ranking_us: int
    expires_us: int
    impression: Impression = field(init=False)
    """Of a job that was taken."""
    begun_wall_us: int = 0
    """When its prefix was first computed, reloaded or found ready, by the wall clock; 0 before."""
    asked_pool: bool = False
    """Whether the pool was asked for its prefix. It is asked once."""
    is_charged: bool = False
    """Whether it was admitted. It may be queued again after that, for another model or another way to its prefix."""
    held_bytes: int = 0
    held_prefix: ResolvedPrefix | None = None
    prepared: PrefixKey | None = None
    """The prefix that it leaves in HBM; None: none yet."""

    @property
    def due_us(self) -> int:
        """By this time jobs are ordered: see `LATE_PART`."""
        return self.expected_ranking_us + int(LATE_PART * (self.expires_us - self.expected_ranking_us))


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
    deletions: int
    """How many deletions of users were handled when it was resolved."""
    for_one_impression: bool
    """The K,V are of no use to later requests of the user."""
    stale_cause: StaleCause | Other | None = None
    """Why it is `stale`; None too if another worker, which diverted the request, did not say it."""
    unknown_actions: int = 0
    unknown_features: int = 0
    """Of the history, those included that the model hides from a sequence of this length."""
    hides_features: bool = False
    """The model hides some of the user's features from a sequence of this length."""
    held_bytes: int = 0
    """Memory of the history, its digests and its rows in the model's tables. A message's own arrays do not count."""
    holders: int = field(default=0, init=False)
    held_in: HeldMemory | None = field(default=None, init=False)
    """The account that counts `held_bytes` while the prefix has holders."""


class Unranked(Exception):  # noqa: N818 - it is an end, and in most cases no error
    """A ranking request ends without scores. A check of `WorkerHandler` or a step of `Requests.advance` raises it, and
    `ResultWriter.unranked` writes the result; also of scores that are not finite, and of a request that could not be
    passed on, for which nothing is raised.
    """

    def __init__(self, ended: Ended, reason: Reason | None = None, detail: str | None = None) -> None:
        """`ended`: EXPIRED, or FAILED with its reason."""
        super().__init__(detail)
        self.ended = ended
        self.reason = reason
        self.detail = detail
        self.backlog_us: int | None = None
        """The hint of overload in the result of a request that the executor never got."""


class PassedOn(Exception):  # noqa: N818 - it is an end, and no error
    """A ranking request ends here because another worker answers it."""


def transit_us(sent_wall_us: int, received_wall_us: int) -> int | None:
    """Time from the gateway to the worker, by the clocks of both machines. None if it cannot be: the time of sending is
    wrong, such as 0 or a time in another unit.
    """
    # The sender's clock may be ahead by more than the transit takes. Without these requests nothing would be measured.
    took_us = max(0, received_wall_us - sent_wall_us)
    return took_us if took_us <= LONGEST_TRANSIT_US else None


class RequestState(enum.Enum):
    """Where a ranking request is on its way to its one result."""

    TAKEN = enum.auto()
    """It was not looked up yet."""
    WAITS_FOR_HISTORY = enum.auto()
    WAITS_FOR_COPY = enum.auto()
    """A copy or a fill under way brings its prefix, or it waits for room to begin a copy."""
    WAITS_FOR_PREFIX = enum.auto()
    """It is one of the `waiters` of a computation."""
    READY = enum.auto()
    """It has its prefix, and is queued for a ranking pass or in one."""
    ANSWERED = enum.auto()
    """Its scores are written, and not sent yet."""
    ENDED = enum.auto()


@dataclass(slots=True, eq=False)
class CopyWait:
    """The wait of one request for a copy or a fill under way, or for room to begin a copy."""

    pending: PendingPrefix
    started_us: int
    has_lease: bool
    """Whether the request leases the prefix, so that nothing evicts it between its reload's end and the look-up."""
    timer: Timer | None = None
    """Ends the wait. It would keep the request's inputs in memory until its deadline."""


@dataclass(slots=True, eq=False)
class RankingWork:
    """A ranking request, from its receipt to its one result. Its times are on the worker's monotonic clock."""

    work_class: ClassVar[WorkClass] = WorkClass.RANKING

    request: RankingRequest
    reply: RankingHeaders
    received: Received
    received_wall_us: int
    deadline_us: int
    """The time of grace (`worker.grace_ms`) included."""
    answer_by_us: int
    """When the result should be sent: the deadline less the time to reach the gateway."""
    impression: Impression = field(init=False)
    """Of a request that was taken."""
    state: RequestState = RequestState.TAKEN
    wait: CopyWait | None = None
    """The present wait, in the state WAITS_FOR_COPY."""
    held_bytes: int = 0
    held_prefix: ResolvedPrefix | None = None
    scored_tokens: int = 0
    """Tokens of suffix and candidates, as the latency model counts them."""
    predicted_us: float = 0.0
    """Device time of the ranking pass."""
    remaining_us: float = 0.0
    """`predicted_us` plus the worker's own time, less the fixed part that a batch shares."""
    latest_start_us: int = 0
    """`answer_by_us` less `predicted_us` and the worker's own time."""
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
    unknown_actions: int = 0
    started_us: int | None = None
    waits_since_us: int | None = None
    """Since when it is in the state WAITS_FOR_HISTORY."""
    history_wait_us: int = 0
    """How long it was in that state, until `history_waited_us`."""
    history_waited_us: int = 0
    looked_up_us: int | None = None
    ready_us: int | None = None
    pre_infer_us: int = 0
    reload_us: int = 0
    reloaded_us: int = 0
    """When its wait for a reload ended; 0 without one."""
    rank_us: int = 0
    ranked_us: int = 0
    """When its ranking pass ended; 0 before."""
    backlog_us: int | None = None
    """Predicted time of the other admitted work at the answer; for a refused request, its own time included. None: no
    time."""
    answered_us: int = 0
    """When its result was handed over; 0 before, and for a failed request."""
    exemplar: dict[str, str] | None = None
    """Names the trace of its result, if one is recorded."""
    lookups: int = 0
    asked_pool: bool = False
    """Whether the pool was asked for its prefix. It is asked once."""
    was_announced: bool = False
    """Whether a job announced it."""

    @property
    def runs_in_chunks(self) -> bool:
        return False

    @property
    def may_be_displaced(self) -> bool:
        return False

    @property
    def has_ended(self) -> bool:
        return self.state is RequestState.ENDED

    @property
    def resolved(self) -> ResolvedPrefix:
        """`prefix`, of a request that was looked up."""
        assert self.prefix is not None
        return self.prefix

    @property
    def transit_us(self) -> int | None:
        """Time from the gateway to this worker; None if the request has a wrong time of sending."""
        return transit_us(self.request.sent_at_us, self.received_wall_us)

    @property
    def sent_us(self) -> int:
        """When the gateway sent it; when it was received, if the request has a wrong time of sending."""
        return self.received.received_us - (self.transit_us or 0)

    @property
    def queued_since_us(self) -> int:
        """When it was sent, as if it had not waited for its history: that wait says nothing about the worker's load."""
        return self.sent_us + self.history_wait_us


@dataclass(slots=True, eq=False)
class PrefixWork:
    """The computation of one prefix, or of the tail that a cached part lacks, in chunks.

    It serves pre-infer jobs, ranking requests that wait for it, or both. It counts as ranking work as soon as one
    request waits. `fill` is None while no pages are reserved, and for a computation on the scratch pages. Work of an
    idle device (`idle_class`) serves nobody until a job or a request joins the computation, which then counts as
    theirs.
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
    idle_class: WorkClass | None = None
    ran_ahead: bool = False
    """Whether a chunk of it ran while no request waited."""
    pages: NDArray[np.int32] = field(default_factory=lambda: NO_PAGES)
    remaining_us: float = 0.0
    """Predicted device time of the chunks that are left, without the ranking passes of the requests that wait."""
    spent_us: int = 0
    """Device time of the chunks of a prefix that is not complete."""
    held_bytes: int = 0
    held_prefix: ResolvedPrefix | None = None

    @property
    def started(self) -> bool:
        """Whether the computation has its pages."""
        return self.pages.size > 0

    @property
    def record_ids(self) -> list[bytes]:
        """The ids of its impressions in the record of the device's work; without any, that of the user's prefix."""
        ids = [job.impression.record_id for job in self.jobs]
        ids += [waiter.impression.record_id for waiter in self.waiters]
        return ids or [impression_id(self.prefix.key.user_id)]

    @property
    def runs_in_chunks(self) -> bool:
        return True

    @property
    def may_be_displaced(self) -> bool:
        is_whole = self.base is None and not self.on_scratch
        return is_whole and len(self.waiters) == 1 and self.spent_us <= SPENT_PART * self.remaining_us

    @property
    def work_class(self) -> WorkClass:
        if self.waiters:
            return WorkClass.RANKING
        return WorkClass.PREINFER if self.jobs or self.idle_class is None else self.idle_class

    @property
    def latest_start_us(self) -> int:
        if self.waiters:
            return min(waiter.latest_start_us for waiter in self.waiters) - int(self.remaining_us)
        if not self.jobs:
            return 0
        return min(job.due_us for job in self.jobs) - int(self.remaining_us)


HoldsMemory = JobWork | RankingWork | PrefixWork
"""Work with `held_bytes`, the memory that it alone holds, and `held_prefix`, which others may hold too."""


class HeldMemory:
    """The memory that pieces of work keep alive, at most `max_bytes`: messages, histories and looked-up rows. A history
    counts once, even if several pieces of work share it. Work that is alone may exceed the bound.

    One poll thread at a time calls `post`, the device thread all else. Any thread may read `outstanding_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.prefix_bytes = 0
        # Two counters, since each is written by one thread only.
        self._posted_bytes = 0
        self._ended_bytes = 0

    @property
    def outstanding_bytes(self) -> int:
        """The messages of all work that has not ended, those in the mailbox included, and the prefixes."""
        return self.prefix_bytes + self._posted_bytes - self._ended_bytes

    def post(self, work: JobWork | RankingWork, rows: int = 0) -> bool:
        """Counts the work's message, and the rows of its candidates. False, without counting, if there is no room."""
        size_bytes = 2 * len(work.received.value or b"") + WORK_BYTES + BYTES_PER_TOKEN * rows
        outstanding_bytes = self.outstanding_bytes
        if outstanding_bytes > 0 and outstanding_bytes + size_bytes > self.max_bytes:
            return False
        work.held_bytes = size_bytes
        self._posted_bytes += size_bytes
        return True

    def keep(self, work: HoldsMemory, prefix: ResolvedPrefix | None) -> bool:
        """The work holds this prefix from now on, in place of its previous one. False if there is no room for it."""
        before, work.held_prefix = work.held_prefix, None
        if before is not None:
            before.holders -= 1
            if before.holders == 0 and before.held_in is not None:
                before.held_in.prefix_bytes -= before.held_bytes
        if prefix is None:
            return True
        if prefix.holders == 0:
            outstanding_bytes = self.outstanding_bytes
            if outstanding_bytes + prefix.held_bytes > self.max_bytes and outstanding_bytes > work.held_bytes:
                return False
            prefix.held_in = self
            self.prefix_bytes += prefix.held_bytes
        prefix.holders += 1
        work.held_prefix = prefix
        return True

    def end(self, work: HoldsMemory) -> None:
        """The work holds nothing any more."""
        self.keep(work, None)
        self._ended_bytes += work.held_bytes
        work.held_bytes = 0
