"""How a ranking request is served in its time, how a prefix is cut into chunks, and which requests are ranked together.
Pure decisions over predictions; docs/scheduling.md has the rules.

A chunk is uninterrupted: between two chunks any more urgent work may run. It ends at a page boundary, or with the
prefix. Each further chunk costs the fixed part of `relaygr.admission.latency` again and reads the K,V before it, so a
prediction for a prefix counts its chunks.
"""

from __future__ import annotations

import bisect
import enum
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial

from relaygr.admission.latency import LatencyModel
from relaygr.schemas.record import record


@record(frozen=True, slots=True)
class Chunking:
    """The bounds of one chunk: predicted time, tokens, whole pages. `in_one_chunk`: the model allows no cut."""

    chunk_us: float
    max_tokens: int
    page_tokens: int
    in_one_chunk: bool = False

    def within(self, chunk_us: float) -> Chunking:
        """The same with another bound of the time."""
        return Chunking(chunk_us, self.max_tokens, self.page_tokens, self.in_one_chunk)

    def end(self, done_tokens: int, total_tokens: int, latency: LatencyModel) -> int:
        """The end of the next chunk: the last page boundary that is predicted to be reached within the bounds.

        A chunk has at least one page, so that every chunk makes progress.
        """
        if self.in_one_chunk:
            return total_tokens
        most = min(self.max_tokens, total_tokens - done_tokens)
        fitting = latency.longest_append(done_tokens, self.chunk_us, most) or 0
        if done_tokens + fitting == total_tokens:
            return total_tokens
        # A fitting chunk that ends in its first page ends with that page all the same.
        page = max(done_tokens // self.page_tokens + 1, (done_tokens + fitting) // self.page_tokens)
        return min(page * self.page_tokens, total_tokens)

    def duration_us(self, done_tokens: int, total_tokens: int, latency: LatencyModel) -> float:
        """Predicted time of all chunks that are left of a prefix; 0 if none is left."""
        spent_us = 0.0
        while done_tokens < total_tokens:
            end = self.end(done_tokens, total_tokens, latency)
            spent_us += latency.append_us(done_tokens, end - done_tokens)
            done_tokens = end
        return spent_us

    def for_whole_prefixes(self, latency: LatencyModel, longest_tokens: int) -> LatencyModel:
        """A latency model for predictions without chunks: its T_pre is the time of all chunks of a prefix.

        It is exact for a prefix of `longest_tokens`, and approximate for shorter ones.
        """
        c = latency.coefficients
        in_one_us = latency.pre_us(longest_tokens) - c.b0
        if in_one_us <= 0:
            return latency
        factor = (self.duration_us(0, longest_tokens, latency) - c.b0) / in_one_us
        return LatencyModel(replace(c, b1=c.b1 * factor, b2=c.b2 * factor))


def chunk_bound_us(
    shortest_us: float,
    longest_us: float,
    cut_us: float,
    slack_us: float,
    arrival_us: float,
    others_us: float,
    prefixes: int = 1,
) -> float:
    """The longest time of the next chunk, between `shortest_us` and `longest_us`.

    `cut_us`: what a cut costs. A chunk has at least a few times that, unless a waiting request would lose time by it.
    `prefixes`: this one, and those that wait for pre-infer. The more there are, the longer is a chunk: under load the
    cost of cuts makes more requests late than waiting for a chunk does.
    `slack_us`: time until the most urgent waiting request has to start. `arrival_us`: time until an announced request
    may arrive. `others_us`: mean time between requests that nobody announces. Each is infinite if there is none.
    """
    waiting_us = slack_us / PREDICTION_MARGIN
    leaves_us = min(waiting_us, arrival_us, others_us * DELAYED_SHARE)
    worthwhile_us = min(LEAST_CHUNK_CUTS * min(prefixes, MOST_COUNTED) * cut_us, waiting_us)
    return min(max(leaves_us, worthwhile_us, shortest_us), max(longest_us, shortest_us))


LEAST_CHUNK_CUTS = 5
"""A chunk takes at least this many times what its cut costs, if no waiting request needs the time."""
MOST_COUNTED = 4
"""Waiting prefixes beyond this number lengthen chunks no more."""


PREDICTION_MARGIN = 1.25
"""A chunk may take this many times its predicted time without delaying a request that waits."""
DELAYED_SHARE = 0.1
"""A chunk longer than the shortest meets an unannounced request with at most this probability."""
_EARLY_SHARE = 0.02
"""Share of announced requests that arrive before the time from which they count as possible."""
_EARLY_STEP = 0.01
_RATE_WINDOW_US = 2_000_000
_MOST_ANNOUNCED = 4096
Impression = tuple[str, str]
"""User id and request id: a job and its request have the same."""
Announcement = tuple[int, int, int, tuple[int, int] | None]
"""When the request was announced, when it is expected, and until when; and by the gateway's clock, when its retrieval
began and when the gateway expected to send it. None for a request that arrived and waits."""


class ExpectedArrivals:
    """Predicts the arrival of requests that a cut would help. Jobs announce some of them; unannounced requests that
    find their prefix ready arrive at a measured rate. A request for full inference gains nothing from a cut, since it
    would not overtake. Belongs to the device thread.

    Gateways know their lead time only roughly. So an announced request may arrive after a part of its announced lead
    time; the part is a low quantile of the measured ones.
    """

    def __init__(self) -> None:
        self.announced: dict[Impression, Announcement] = {}
        self.seen: deque[tuple[Announcement | None, int]] = deque(maxlen=1024)
        """Requests that arrived: their announcement, and the time. Those that nobody announced: only if a cut helps."""
        self._part = 0.5
        self._others = 0.0
        self._others_at_us = 0

    def announce(
        self,
        impression: Impression,
        now_us: int,
        expected_us: int,
        until_us: int,
        stated: tuple[int, int] | None = None,
    ) -> None:
        """A job expects this request at `expected_us`, and no longer than `until_us`. `stated`: see `Announcement`."""
        if len(self.announced) >= _MOST_ANNOUNCED:
            del self.announced[next(iter(self.announced))]
        self.announced[impression] = now_us, max(now_us, expected_us), until_us, stated

    def wait(self, impression: Impression, now_us: int, until_us: int) -> None:
        """A request that arrived waits for its history or for a copy, and may go on at any time."""
        self.announced[impression] = now_us, now_us, until_us, None

    def next_us(self, now_us: int, without: Collection[Impression] = ()) -> tuple[float, float]:
        """Time until the next announced request may arrive, and mean time between others. Infinite if there is none.

        `without`: requests that a cut of the chunk cannot help, since they need the prefix that is computed.
        """
        while self.seen:
            self._learn(*self.seen.popleft())
        earliest_us, overdue = math.inf, []
        for impression, (announced_us, expected_us, until_us, _) in self.announced.items():
            if until_us < now_us:
                overdue.append(impression)
            elif impression not in without:
                earliest_us = min(earliest_us, announced_us + self._part * (expected_us - announced_us))
        for impression in overdue:
            del self.announced[impression]
        self._decay(now_us)
        others_us = _RATE_WINDOW_US / self._others if self._others > _EARLY_STEP else math.inf
        return max(0.0, earliest_us - now_us), others_us

    def _learn(self, announcement: Announcement | None, at_us: int) -> None:
        if announcement is None:
            self._decay(at_us)
            self._others += 1.0
            return
        announced_us, expected_us, _, _ = announcement
        if expected_us > announced_us:
            part = (at_us - announced_us) / (expected_us - announced_us)
            moved = self._part + _EARLY_STEP * (_EARLY_SHARE - 1 if part < self._part else _EARLY_SHARE)
            self._part = min(max(moved, 0.0), 1.0)

    def _decay(self, now_us: int) -> None:
        if now_us > self._others_at_us:
            self._others *= math.exp((self._others_at_us - now_us) / _RATE_WINDOW_US)
            self._others_at_us = now_us


class Route(enum.StrEnum):
    """How a ranking request is served, in order of preference."""

    WHOLE = "whole"
    """On the whole prefix, after computing the tokens that are not cached; the cache keeps them."""
    TAIL_AS_SUFFIX = "tail_as_suffix"
    """On the cached part, with the rest of the prefix in the suffix: exact, too, but the cache keeps nothing new. This
    comes first where the rest is short: a few behaviours lengthen a pass by far less than a pass of their own takes."""
    TRUNCATE = "truncate"
    """On the newest part of the history that fits into the time."""
    REJECT = "reject"
    """No request is served that cannot be answered in time."""


@record(frozen=True, slots=True)
class RoutePlan:
    """The route, its predicted time in µs, and how many prefix tokens it ranks on."""

    route: Route
    predicted_us: int
    prefix_tokens: int
    compute_us: float = field(default=0.0, compare=False)
    """WHOLE: the part of the predicted time that computes the tokens that are not cached."""


def plan_ranking(
    prefix_tokens: int,
    scored_tokens: int,
    cached_tokens: int,
    remaining_us: int,
    latency: LatencyModel,
    chunking: Chunking,
    *,
    tail_may_be_suffix: bool = False,
    tail_stays_in_suffix: bool = False,
    pass_remaining_us: float = 0.0,
) -> RoutePlan:
    """The best route that ends within `remaining_us`, with the first `cached_tokens` of the prefix in HBM.

    `scored_tokens`: suffix tokens + candidates. `tail_may_be_suffix`: the model allows the tokens that are not
    cached to be ranked in the suffix, and there are not too many of them. `tail_stays_in_suffix`: this is also cheaper
    than to compute them. `pass_remaining_us`: time for a ranking pass without any computation, if it is longer.
    """
    tail_tokens = prefix_tokens - cached_tokens
    tail_as_suffix = None
    if tail_may_be_suffix and 0 < tail_tokens < prefix_tokens:
        predicted_us = latency.hit_us(cached_tokens, scored_tokens + tail_tokens)
        if predicted_us <= max(remaining_us, pass_remaining_us):
            tail_as_suffix = RoutePlan(Route.TAIL_AS_SUFFIX, int(predicted_us), cached_tokens)
            if tail_stays_in_suffix:
                return tail_as_suffix
    compute_us = chunking.duration_us(cached_tokens, prefix_tokens, latency)
    whole_us = latency.hit_us(prefix_tokens, scored_tokens) + compute_us
    if tail_as_suffix is not None and whole_us > remaining_us:
        return tail_as_suffix
    if whole_us <= remaining_us:
        return RoutePlan(Route.WHOLE, int(whole_us), prefix_tokens, compute_us)
    return plan_truncation(prefix_tokens, scored_tokens, remaining_us, latency, chunking)


def plan_truncation(
    prefix_tokens: int, scored_tokens: int, remaining_us: int, latency: LatencyModel, chunking: Chunking
) -> RoutePlan:
    """The longest prefix in whole pages, shorter than `prefix_tokens`, whose full inference fits; else REJECT."""
    page_tokens = chunking.page_tokens
    total = max(0, (prefix_tokens - 1) // page_tokens) * page_tokens
    predicted_us = latency.hit_us(0, scored_tokens)
    if predicted_us > remaining_us:
        return RoutePlan(Route.REJECT, int(predicted_us), 0)
    kept, spent_us = 0, 0.0
    while kept < total:
        # `spent_us` is the same for every prefix that ends within this chunk, or later.
        end = chunking.end(kept, total, latency)
        ends = range(kept + page_tokens, end + 1, page_tokens)
        ends_us = partial(_ends_us, kept, spent_us, scored_tokens, latency)
        fitting = bisect.bisect_right(ends, float(remaining_us), key=ends_us)
        if fitting:
            last = ends[fitting - 1]
            predicted_us = ends_us(last)
            spent_us += latency.append_us(kept, last - kept)
            kept = last
        if kept < end:
            break
    return RoutePlan(Route.TRUNCATE, int(predicted_us), kept)


def _ends_us(done_tokens: int, spent_us: float, scored_tokens: int, latency: LatencyModel, end_tokens: int) -> float:
    """The end of ranking on a prefix of `end_tokens` whose first `done_tokens` are computed after `spent_us`."""
    computed_us = spent_us + latency.append_us(done_tokens, end_tokens - done_tokens)
    return computed_us + latency.hit_us(end_tokens, scored_tokens)


@record(frozen=True, slots=True)
class BatchRequest:
    """A ready request. Predicted times in µs, the writing of its result included."""

    alone_us: float
    further_us: float
    """What it adds to a batch that has another request."""
    rows: int
    answer_by_us: int


@dataclass(slots=True)
class BatchPlan:
    """The requests of one ranking pass: one at first, others are taken. Times are on the worker's monotonic clock."""

    ends_us: float
    must_end_us: float
    """When the first of the batch, or other work that follows it, would be late."""
    rows: int
    max_rows: int
    requests: int = 1

    def end_before(self, time_us: float) -> None:
        """Other work must start by then."""
        self.must_end_us = min(self.must_end_us, time_us)

    def take(self, request: BatchRequest, behind: int, *, must_pay: bool) -> bool:
        """Takes one more request, or returns false and changes nothing.

        `behind`: waiting work after the request. `must_pay` false: each request that ends in time is taken.
        """
        ends_us = self.ends_us + request.further_us
        must_end_us = min(self.must_end_us, request.answer_by_us)
        rows = self.rows + request.rows
        if ends_us > must_end_us or rows > self.max_rows or (must_pay and not self._pays(request, behind)):
            return False
        self.requests += 1
        self.ends_us, self.must_end_us, self.rows = ends_us, must_end_us, rows
        return True

    def _pays(self, request: BatchRequest, behind: int) -> bool:
        """Whether the mean time of all requests falls: those of the batch end `further_us` later, the request and those
        behind it end earlier by what a pass of its own takes more.
        """
        saved_us = request.alone_us - request.further_us
        return saved_us * (1 + behind) > self.requests * request.further_us
