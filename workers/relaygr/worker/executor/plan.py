"""How a ranking request is served in its time, and how a prefix is cut into chunks. Pure decisions over predictions.

The routes, in order of preference:

1. rank on the whole prefix, after computing the tokens that are not cached; the cache keeps them;
2. rank on the cached part, with the rest of the prefix in the suffix: exact, too, but the cache keeps nothing new;
3. rank on the newest part of the history that fits into the time;
4. reject: no request is served that cannot be answered in time.

The cache decides whether a reload from DRAM is worth its time (`relaygr.worker.cache.transfers`).

A chunk is uninterrupted: between two chunks any more urgent work may run. It ends at a page boundary, or with the
prefix. Each further chunk costs the fixed part b0 of `relaygr.admission.latency` again, so a prediction for a prefix
counts its chunks.
"""

from __future__ import annotations

import bisect
import enum
from dataclasses import field, replace
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
        next_boundary = (done_tokens // self.page_tokens + 1) * self.page_tokens
        last_boundary = (done_tokens + fitting) // self.page_tokens * self.page_tokens
        return min(max(next_boundary, last_boundary), total_tokens)

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


class Route(enum.StrEnum):
    """How a ranking request is served."""

    WHOLE = "whole"
    TAIL_AS_SUFFIX = "tail_as_suffix"
    TRUNCATE = "truncate"
    REJECT = "reject"


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
    tail_may_be_suffix: bool = False,
) -> RoutePlan:
    """The best route that ends within `remaining_us`, with the first `cached_tokens` of the prefix in HBM.

    `scored_tokens`: suffix tokens + candidates. `tail_may_be_suffix`: the model allows the tokens that are not
    cached to be ranked in the suffix, and there are not too many of them.
    """
    compute_us = chunking.duration_us(cached_tokens, prefix_tokens, latency)
    predicted_us = latency.hit_us(prefix_tokens, scored_tokens) + compute_us
    if predicted_us <= remaining_us:
        return RoutePlan(Route.WHOLE, int(predicted_us), prefix_tokens, compute_us)
    tail_tokens = prefix_tokens - cached_tokens
    if tail_may_be_suffix and 0 < tail_tokens < prefix_tokens:
        predicted_us = latency.hit_us(cached_tokens, scored_tokens + tail_tokens)
        if predicted_us <= remaining_us:
            return RoutePlan(Route.TAIL_AS_SUFFIX, int(predicted_us), cached_tokens)
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
