"""Decides from repeated runs, and compares systems seed by seed. Pure.

A system exactly at its limit passes about every second run, so one run decides nothing. At least `LEAST_SEEDS` runs
with different seeds must all pass, and the upper end of a one-sided t interval of their late shares must be within the
limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LATE_LIMIT = 0.01
"""Late requests as a share of all offered ones: the deadline holds at P99."""
LEAST_SEEDS = 5
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a system meets the deadline at a point, and why."""

    passed: bool
    why: str
    upper_late_share: float
    """NaN with fewer than two seeds."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % interval. The ends are NaN with fewer than two seeds."""

    value: float
    low: float
    high: float
    seeds: int


def decide(late_shares: Sequence[float], limit: float = LATE_LIMIT, least_seeds: int = LEAST_SEEDS) -> Decision:
    """The decision rule on one late share for each seed."""
    upper = upper_bound(late_shares)
    if any(share > limit for share in late_shares):
        return Decision(False, f"a seed had {max(late_shares):.2%} late", upper)
    if len(late_shares) < least_seeds:
        return Decision(False, f"{len(late_shares)} of {least_seeds} seeds", upper)
    if upper > limit:
        return Decision(False, f"not {CONFIDENCE:.0%} sure: their mean may be {upper:.2%} late", upper)
    return Decision(
        True, f"every seed passed; {CONFIDENCE:.0%} sure that their mean is at most {upper:.2%} late", upper
    )


def upper_bound(values: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """The upper end of a one-sided t interval of the mean."""
    if len(values) < 2:
        return math.nan
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)) + float(stats.t.ppf(confidence, len(values) - 1)) * error


def paired_ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """The geometric mean of ours / theirs over the seeds that both have, with a two-sided t interval; None without any.
    A seed at which one of them reached nothing (0) has no ratio: `seeds` says how many have.

    Both values of a pair come from traces of one seed, so what the seed makes hard for both mostly cancels out. Only at
    the same rate and length are these the same trace.
    """
    seeds = sorted(seed for seed in ours.keys() & theirs.keys() if ours[seed] > 0 and theirs[seed] > 0)
    if not seeds:
        return None
    logs = np.array([math.log(ours[seed] / theirs[seed]) for seed in seeds])
    value = math.exp(float(np.mean(logs)))
    if len(logs) < 2:
        return Interval(value, math.nan, math.nan, len(logs))
    error = float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1)) * error
    return Interval(value, value * math.exp(-reach), value * math.exp(reach), len(logs))


def queue_growth(begins_us: Sequence[int], ends_us: Sequence[int]) -> float:
    """How many more requests are in flight at the end of a run than after its first fifth, by a straight line through
    the numbers between. Above capacity they grow without end.
    """
    first, last = min(begins_us, default=0), max(begins_us, default=0)
    if last <= first:
        return 0.0
    at = np.linspace(first + 0.2 * (last - first), last, 50)
    begun = np.searchsorted(np.sort(np.asarray(begins_us)), at, side="right")
    ended = np.searchsorted(np.sort(np.asarray(ends_us)), at, side="right")
    slope = float(np.polyfit(np.linspace(0, 1, len(at)), (begun - ended).astype(np.float64), 1)[0])
    return slope
