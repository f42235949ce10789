"""How a ranking request is to be served in the time that it has: pure decisions over predictions.

In order of preference: on its whole prefix, what is not cached of it computed first; on the newest part
of the history that fits; not at all. Never a silent late answer. (Whether a reload from DRAM pays is the
cache's question: `workers.cache.transfer`.)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from streams.latency import LatencyModel


class Route(enum.StrEnum):
    """What to do with a ranking request."""

    WHOLE = "whole"
    TRUNCATE = "truncate"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """The route, its predicted time in µs, and how many prefix tokens it keeps."""

    route: Route
    predicted_us: int
    prefix_tokens: int


def plan_ranking(
    prefix_tokens: int,
    suffix_and_candidates: int,
    cached_tokens: int,
    remaining_us: int,
    latency: LatencyModel,
    page_tokens: int,
) -> RoutePlan:
    """The best route that ends within `remaining_us`, with the first `cached_tokens` of the prefix in HBM."""
    tail_tokens = prefix_tokens - cached_tokens
    predicted_us = latency.hit_us(prefix_tokens, suffix_and_candidates)
    predicted_us += latency.append_us(cached_tokens, tail_tokens) if tail_tokens else 0.0
    if predicted_us <= remaining_us:
        return RoutePlan(Route.WHOLE, int(predicted_us), prefix_tokens)
    return plan_truncation(prefix_tokens, suffix_and_candidates, remaining_us, latency, page_tokens)


def plan_truncation(
    prefix_tokens: int, suffix_and_candidates: int, remaining_us: int, latency: LatencyModel, page_tokens: int
) -> RoutePlan:
    """The longest prefix in whole pages, shorter than `prefix_tokens`, whose full inference fits; else REJECT."""
    pages, most = 0, max(0, (prefix_tokens - 1) // page_tokens)
    low_us = _computed_us(0, suffix_and_candidates, latency)
    if low_us > remaining_us:
        return RoutePlan(Route.REJECT, int(low_us), 0)
    while pages < most:
        middle = (pages + most + 1) // 2
        if _computed_us(middle * page_tokens, suffix_and_candidates, latency) <= remaining_us:
            pages = middle
        else:
            most = middle - 1
    kept = pages * page_tokens
    return RoutePlan(Route.TRUNCATE, int(_computed_us(kept, suffix_and_candidates, latency)), kept)


def chunk_end(
    done_tokens: int, total_tokens: int, chunk_us: float, max_tokens: int, latency: LatencyModel, page_tokens: int
) -> int:
    """Where the next chunk ends: the last page boundary predicted to be reached within `chunk_us` and `max_tokens`.

    At least one page is taken, so that there is progress whatever the prediction.
    """
    most = min(max_tokens, total_tokens - done_tokens)
    fitting = latency.longest_append(done_tokens, chunk_us, most) or 0
    next_boundary = (done_tokens // page_tokens + 1) * page_tokens
    end = max(next_boundary, (done_tokens + fitting) // page_tokens * page_tokens)
    if done_tokens + fitting == total_tokens:
        return total_tokens
    return min(end, total_tokens)


def _computed_us(prefix_tokens: int, suffix_and_candidates: int, latency: LatencyModel) -> float:
    prefix_us = latency.pre_us(prefix_tokens) if prefix_tokens else 0.0
    return prefix_us + latency.hit_us(prefix_tokens, suffix_and_candidates)
