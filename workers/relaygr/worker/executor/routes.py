"""How a ranking request is served in its time. Pure decisions over predictions; docs/scheduling.md has the rules."""

from __future__ import annotations

import bisect
import enum
from dataclasses import field
from functools import partial

from relaygr.admission.latency import LatencyModel
from relaygr.schemas.record import record
from relaygr.worker.executor.chunks import Chunking


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
