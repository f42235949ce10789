"""The question: loads and systems, what a run plays, and whether it has passed. Pure.

Each load is a share of impressions by users who return, and each system a set of settings. Weights, types, kernels,
topics and the schedule of a run are the same for all systems. The memory is, too: what holds the K,V of earlier
requests in the relay is room for batches in full inference.

Times are multiples of what the engine alone takes on this machine, so that the question is the same on a CPU and on an
accelerator. Whatever has no whole answer within the deadline is late: answers over a part of the history, refused,
expired, failed and lost requests.
"""

from __future__ import annotations

import bisect
import enum
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from relaygr.admission.latency import LatencyModel
from relaygr.schemas.messages import Path as RankingPath
from relaygr.traffic.records import LOST, UNDELIVERED, ImpressionRecord
from relaygr.worker.model.config import ModelConfig

LOADS = (0.0, 0.6, 0.9)
"""Shares of the impressions by users who return."""
USERS = 100
"""Users who return."""
LEAD_FACTOR = 3.0
"""The median time from a retrieval event to its ranking request, as a multiple of computing the median prefix."""
LEAST_DEADLINE_MS = 40
"""Broker, trigger and gateway have a tail of their own, which the deadline must leave room for."""
SUFFIX, CANDIDATES, GROWTH, ITEMS = 16, 128, 8, 10_000
PAGE_TOKENS, PARTITIONS = 64, 8
HBM_PREFIXES, DRAM_PREFIXES = 48, 256
"""The tiers in prefixes of median length: all users who return fit into DRAM, beside others."""
LATE_LIMIT = 0.01
JUDGED_PERCENTILE = 1 - LATE_LIMIT
LAG_LIMIT = 0.02
"""A run is valid if the P99 of the sender's lag, which counts as latency, is at most this part of the deadline."""
VALID = "VALID"
"""LoadGen's word for a run in which 99 % of the queries were within the target latency, at its confidence."""
HONEST = 1.1
"""Full inference in the worker may take at most so many times as long as by the engine alone."""
HALF = 0.5
_LONGEST = 4
"""The model takes histories of up to so many times the median."""
_TAIL_ROOM = 64


class System(enum.StrEnum):
    """A compared system."""

    FULL = "full inference"
    """Everything is computed at ranking."""
    CACHE = "cache only"
    """K,V are kept across requests. Nothing is computed before the ranking request."""
    RELAY = "relay"
    ORACLE = "oracle"
    """Every prefix is ready and cost nothing. In virtual time alone."""


LIVE = (System.FULL, System.CACHE, System.RELAY)


def searched_at(system: System, load: float) -> float:
    """The load at which a system is searched: users who return change nothing for full inference."""
    return LOADS[0] if system is System.FULL else load


TUNED: Mapping[str, Mapping[str, Any]] = {
    "one chunk a request, batches of up to 32": {},
    "one chunk a request, one request at a time": {"max_batch_requests": 1},
    "chunks of 2,048 tokens, batches of up to 32": {"max_chunk_tokens": 2_048},
}
"""The variants of full inference. The best one at half load stands for it."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is run."""

    name: str
    seeds: tuple[int, ...]
    seconds: float
    """The measured part of a run. At a low rate it is longer, for `least_queries`."""
    least_queries: int
    """LoadGen needs so many to say with its confidence that 99 % are in time: 459 with none late, 662 with one."""
    warm_up_s: float
    """The least warm-up. Where users return slowly it is up to three times as long."""
    step: float
    """Between the highest rate that passed and the lowest that failed, at most."""
    virtual_requests: int = 1_500
    """Measured requests of a run in virtual time."""
    variants: tuple[str, ...] = tuple(TUNED)
    attempts: int = 3
    """An invalid run says nothing, and is played again, up to so many times in all."""

    def warm_up_at(self, load: float, rate_per_s: float) -> float:
        """Long enough for most of the users to have come once."""
        needed_s = 2 * USERS / (rate_per_s * load) if load else 0.0
        return round(min(max(self.warm_up_s, needed_s), 3 * self.warm_up_s), 1)

    def queries_at(self, rate_per_s: float) -> int:
        """Of the measured part of a run at this rate."""
        return max(math.ceil(self.seconds * rate_per_s), self.least_queries)

    def is_next(self, passed: float, failed: float) -> bool:
        """Whether no rate is left to be tried between these. Rates are rounded."""
        return failed <= 1.02 * self.step * passed


FULL = Effort("full", (1, 2), 30.0, 662, 15.0, 1.1)
QUICK = Effort("quick", (1,), 10.0, 662, 6.0, 1.5, 400, tuple(TUNED)[:1], 2)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked on this machine. Times are of the engine alone: one process, pass after pass."""

    machine: str
    engine: str
    made_at: str
    history: int
    """Median length, in behaviours. Each is one token."""
    deadline_factor: float
    """The deadline as a multiple of full inference on the median history."""
    pre_ms: float
    """Computing the median prefix, in one chunk."""
    hit_ms: float
    """Ranking on it."""
    prefix_bytes: int
    """K,V of the median history."""

    @property
    def full_ms(self) -> float:
        return self.pre_ms + self.hit_ms

    @property
    def deadline_ms(self) -> int:
        return max(LEAST_DEADLINE_MS, round(self.deadline_factor * self.full_ms))

    @property
    def full_rate_per_s(self) -> float:
        """The rate at which full inference fills the device."""
        return 1000 / self.full_ms

    def engine_us(self, latency: LatencyModel, tokens: int) -> float:
        """Full inference in one chunk by the engine alone: as measured at the median history, and with the shape of the
        latency model elsewhere.
        """
        scored = SUFFIX + CANDIDATES

        def modelled_us(n: int) -> float:
            return latency.pre_us(n) + latency.hit_us(n, scored)

        return self.full_ms * 1000 * modelled_us(tokens) / modelled_us(self.history)


def model_of(history: int) -> ModelConfig:
    """The model, the same for all systems."""
    longest, suffix, width = _LONGEST * history, SUFFIX + _TAIL_ROOM, 128
    return ModelConfig(
        embedding_dim=width,
        num_heads=2,
        attention_dim=width // 2,
        hidden_dim=width // 2,
        num_layers=2,
        normalizer=float(longest),
        vocabulary_size=ITEMS,
        num_actions=8,
        num_positions=longest + suffix + 1,
        max_prefix_behaviours=longest,
        max_suffix_behaviours=suffix,
        max_candidates=CANDIDATES,
    )


def settings_of(plan: Plan, system: System, variant: str = "") -> dict[str, Any]:
    """The settings in which the systems differ, and the sizes that they share. `variant`: that of full inference."""
    hbm, dram = (count * plan.prefix_bytes for count in (HBM_PREFIXES, DRAM_PREFIXES))
    worker: dict[str, Any] = {"page_tokens": PAGE_TOKENS, "history_max_bytes": ByteSize(4 << 30)}
    if system in (System.FULL, System.ORACLE):
        worker |= {"reuse_prefixes": False, "hbm_bytes": ByteSize(hbm + dram), "dram_bytes": ByteSize(0)}
        worker |= {"max_chunk_tokens": _LONGEST * plan.history, **TUNED.get(variant, {})}
    else:
        worker |= {"hbm_bytes": ByteSize(hbm), "dram_bytes": ByteSize(dram)}
    return {"partitions": PARTITIONS, "worker": worker}


def traffic_of(
    plan: Plan, load: float, rate_per_s: float, seed: int, duration_s: float, history: int = 0, lead_sigma: float = 0.0
) -> dict[str, Any]:
    """The settings of the schedule. `history`: another median than the plan's. `lead_sigma`: LoadGen has one target
    latency, so on a broker the lead time is constant.
    """
    history = history or plan.history
    return {
        "seed": seed, "rate_per_s": rate_per_s, "duration_s": duration_s, "new_share": round(1 - load, 6),
        "users": USERS, "zipf_exponent": 0.5, "items": ITEMS, "history_median": history, "history_sigma": 0.2,
        "history_max": 2 * history, "growth": GROWTH, "lead_median_ms": round(LEAD_FACTOR * plan.pre_ms, 1),
        "lead_sigma": lead_sigma, "suffix": SUFFIX, "candidates": CANDIDATES, "budget_ms": plan.deadline_ms,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Judged:
    """What LoadGen found. Latencies are of ranking: its own, less the lead time."""

    verdict: str
    """VALID or INVALID."""
    first: int
    """The number of the first impression after the warm-up."""
    queries: int
    over: int
    """Queries beyond the target latency."""
    p50_ms: float
    p99_ms: float
    lag_p99_ms: float
    """How late ranking requests were sent and queries completed, against LoadGen's schedule."""


def read_judged(records: Path) -> Judged:
    """What LoadGen found in the run with these records."""
    return Judged(**json.loads(judged_path(records).read_text(encoding="utf-8")))


def judged_path(records: Path) -> Path:
    """Where the sender writes what LoadGen found."""
    return records.with_suffix(".judged.json")


def summary_path(records: Path) -> Path:
    """LoadGen's summary of the run with these records."""
    return records.with_suffix(".txt")


class Asked(enum.StrEnum):
    """What a run is for."""

    TUNING = "tuning"
    """Which variant of full inference is the best at half load, and whether it is honest."""
    REQUESTS = "requests"
    """The highest rate, live."""
    GUESS = "guess"
    """The same in virtual time, where the search on a broker starts."""
    HISTORY = "history"
    """The longest history at a fixed rate, in virtual time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run. Shares are of the measured requests; latencies count from the scheduled time."""

    measured_at: str
    machine: str
    code: str
    broker: str
    effort: str
    asked: str
    load: float
    system: str
    variant: str
    history: int
    deadline_ms: int
    full_ms: float
    """Full inference on this machine by the engine alone."""
    rate_per_s: float
    seed: int
    offered: int
    late: int
    """Live by LoadGen: beyond its target latency."""
    verdict: str = ""
    """LoadGen's: VALID or INVALID. Empty in virtual time."""
    truncated: int = 0
    lost: int = 0
    p50_ms: float = math.nan
    p99_ms: float = math.nan
    """Live by LoadGen, less the lead time."""
    hits: float = math.nan
    """The share of requests that used cached K,V."""
    hits_gained: float = math.nan
    """By how much that share was higher in the second half of the run than in the first."""
    over_engine: float = math.nan
    """Full inference in the worker, without the queue, over that of the engine alone; median."""
    slowdown: float = math.nan
    """Device times as a multiple of the calibrated ones."""
    lag_p99_ms: float = math.nan
    """How late queries were sent and completed, against LoadGen's schedule."""

    @property
    def key(self) -> tuple[object, ...]:
        """The question that this row answers."""
        return (
            self.effort, self.asked, self.load, self.system, self.variant, self.history, self.deadline_ms,
            self.rate_per_s, self.seed,
        )  # fmt: skip

    @property
    def late_share(self) -> float:
        return self.late / self.offered

    @property
    def valid(self) -> bool:
        """Whether the queries were sent on time. Nothing is sent in virtual time."""
        return math.isnan(self.lag_p99_ms) or self.lag_p99_ms <= LAG_LIMIT * self.deadline_ms

    @property
    def passed(self) -> bool:
        if self.verdict:
            return self.valid and self.verdict == VALID
        return self.late_share <= LATE_LIMIT


def figures_of(records: Iterable[ImpressionRecord], first: int, engine_us: Callable[[int], float]) -> dict[str, Any]:
    """What the records of a run tell beside LoadGen's verdict. `first`: the number of the first impression after the
    warm-up; `engine_us`: full inference by the engine alone, by the tokens of a prefix.
    """
    measured = sorted((each for each in records if each.number >= first), key=lambda each: each.number)
    halves = [_hit_share(half) for half in (measured[: len(measured) // 2], measured[len(measured) // 2 :])]
    ratios = [
        (each.timings.total_us - each.timings.queue_us - (each.timings.history_wait_us or 0))
        / engine_us(each.prefix_tokens)
        for each in measured
        if each.path == RankingPath.FULL and each.timings is not None
    ]
    return {
        "truncated": sum(each.path == RankingPath.TRUNCATED for each in measured),
        "lost": sum(each.status in (LOST, UNDELIVERED) for each in measured),
        "hits": _hit_share(measured),
        "hits_gained": halves[1] - halves[0],
        "over_engine": statistics.median(ratios) if ratios else math.nan,
    }


def _hit_share(records: Sequence[ImpressionRecord]) -> float:
    hits = sum(each.path in (RankingPath.HBM, RankingPath.DRAM, RankingPath.PENDING) for each in records)
    return hits / len(records) if records else math.nan


# -- the search -------------------------------------------------------------------------------------


def rates_around(rate_per_s: float, step: float, factor: float = 16.0) -> list[float]:
    """`rate_per_s` times the powers of `step`, rising. The searches of all seeds and systems choose from them."""
    powers = math.floor(math.log(factor) / math.log(step))
    return [snapped(rate_per_s * step**power) for power in range(-powers, powers + 1)]


def snapped(rate: float) -> float:
    """Three digits, so that a rate is the same in a file as in the search."""
    return float(f"{rate:.3g}")


def lengths_around(history: int, step: float) -> list[float]:
    """Lengths up to twice this one, in whole pages, rising."""
    powers = range(-math.ceil(math.log(16) / math.log(step)), math.floor(math.log(2) / math.log(step)) + 1)
    return sorted({float(max(1, round(history * step**power / PAGE_TOKENS)) * PAGE_TOKENS) for power in powers})


def highest_passing(passes: Callable[[float], bool], values: Sequence[float], start: float) -> float:
    """The highest of the rising `values` that passes; 0 if none does.

    The search begins with the last value that is not above `start`, goes on by one, one, two, three, five and more
    places until one passed and a higher one failed, and bisects what lies between. Most starts are a place or two away
    from the answer, where shorter strides than doubled ones need fewer runs.
    """
    place, stride, next_stride = max(0, bisect.bisect_right(values, start) - 1), 1, 1
    passed, failed = -1, len(values)
    while (passed < 0 or failed == len(values)) and passed < place < failed:
        if passes(values[place]):
            passed, place = place, min(place + stride, len(values) - 1)
        else:
            failed, place = place, max(place - stride, 0)
        stride, next_stride = next_stride, stride + next_stride
    while failed - passed > 1 and passed >= 0:
        middle = (passed + failed) // 2
        if passes(values[middle]):
            passed = middle
        else:
            failed = middle
    return values[passed] if passed >= 0 else 0.0
