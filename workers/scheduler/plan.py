"""How a ranking request is to be served in the time that it has: pure decisions over predictions.

In order of preference: against the cached prefix (its missing tail appended), after a reload from
DRAM, by joining the pre-infer that is running, by full inference, by full inference over the newest
part of the history that fits, and not at all. Never a silent late answer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from streams.latency import LatencyModel


class Route(enum.StrEnum):
    """What to do with a ranking request."""

    CACHED = "cached"
    RELOAD = "reload"
    FULL = "full"
    TRUNCATE = "truncate"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of one ranking request when it is looked up. Lengths in tokens, times in µs.

    `hbm_tokens` and `dram_tokens` are the leading prefix tokens that each tier holds;
    `reload_wait_us` is how long a reload started now would wait for those before it;
    `remaining_us` is the time to the deadline less the device time promised to more urgent work.
    """

    prefix_tokens: int
    suffix_and_candidates: int
    hbm_tokens: int
    dram_tokens: int
    dram_bytes: int
    reload_wait_us: int
    remaining_us: int


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """The route, its predicted time in µs, and for TRUNCATE how many prefix tokens fit."""

    route: Route
    predicted_us: int
    prefix_tokens: int


def reload_is_worth_it(situation: Situation, latency: LatencyModel) -> bool:
    """The break-even rule: waiting and copying must cost less than they save.

    Without DRAM the request would compute the prefix from what HBM holds; with it, from the longer of both.
    """
    n = situation.prefix_tokens
    if situation.dram_tokens <= situation.hbm_tokens:
        return False
    without_us = latency.append_us(situation.hbm_tokens, n - situation.hbm_tokens)
    tail_us = latency.append_us(situation.dram_tokens, n - situation.dram_tokens) if situation.dram_tokens < n else 0.0
    return situation.reload_wait_us + latency.reload_us(situation.dram_bytes) + tail_us < without_us


def plan_ranking(situation: Situation, latency: LatencyModel, page_tokens: int) -> RoutePlan:
    """The best route that ends in time; REJECT if none does."""
    n, m = situation.prefix_tokens, situation.suffix_and_candidates
    hit_us = latency.hit_us(n, m)
    if reload_is_worth_it(situation, latency):
        tail = n - situation.dram_tokens
        predicted_us = situation.reload_wait_us + latency.reload_us(situation.dram_bytes) + hit_us
        predicted_us += latency.append_us(situation.dram_tokens, tail) if tail > 0 else 0.0
        if predicted_us <= situation.remaining_us:
            return RoutePlan(Route.RELOAD, int(predicted_us), n)
    tail = n - situation.hbm_tokens
    predicted_us = hit_us + (latency.append_us(situation.hbm_tokens, tail) if tail > 0 else 0.0)
    if predicted_us <= situation.remaining_us:
        route = Route.CACHED if situation.hbm_tokens > 0 or n == 0 else Route.FULL
        return RoutePlan(route, int(predicted_us), n)
    return plan_truncation(n, m, situation.remaining_us, latency, page_tokens)


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


def chunk_end(done_tokens: int, total_tokens: int, chunk_us: float, latency: LatencyModel, page_tokens: int) -> int:
    """Where the next chunk ends: the last page boundary predicted to be reached within `chunk_us`.

    At least one page is taken, so that there is progress whatever the prediction.
    """
    fitting = latency.longest_append(done_tokens, chunk_us, total_tokens - done_tokens) or 0
    next_boundary = (done_tokens // page_tokens + 1) * page_tokens
    end = max(next_boundary, (done_tokens + fitting) // page_tokens * page_tokens)
    if done_tokens + fitting == total_tokens:
        return total_tokens
    return min(end, total_tokens)


def _computed_us(prefix_tokens: int, suffix_and_candidates: int, latency: LatencyModel) -> float:
    prefix_us = latency.pre_us(prefix_tokens) if prefix_tokens else 0.0
    return prefix_us + latency.hit_us(prefix_tokens, suffix_and_candidates)
