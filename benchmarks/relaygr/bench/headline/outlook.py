"""Where the relay pays, calculated from times of the device. Pure.

For a history length, a return gap and a load, two questions:

* Does full inference meet the deadline at this load? Then nothing needs the relay.
* Does the relay meet it: is a returning user's prefix still cached, does the device have the time for pre-infer and
  ranking, and is the lead time long enough?

Requests with exponential gaps and log-normal lengths answer them. They pass one device, which works in the order of
arrival. Their random numbers are always the same, so the answer is, too.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from relaygr.admission.latency import LatencyModel
from relaygr.bench.headline.decision import LATE_LIMIT
from relaygr.bench.headline.grid import PAGE_TOKENS
from relaygr.worker.executor.plan import Chunking
from relaygr.worker.settings import WorkerSettings

Array = NDArray[np.float64]

MOST_LATE = 0.4 * LATE_LIMIT
"""A verdict needs a margin: a system at its limit passes about every second run, and a worker gives up requests that it
predicts to be late. At 2,048 behaviours B0 passed 10 of 11 real runs that have at most 0.3 % late by this calculation,
and failed 11 of 12 that have 0.4 % or more."""
REQUESTS = 50_000
RELAYED = 20_000
"""Those of the relay are fewer, because they are sorted."""
LEAD_SIGMA = 0.2
"""The spread of the lead times: that of `Workload`."""
CHUNK_US = 10_000.0
"""Between the worker's shortest and longest chunk. With it cuts cost about what they cost in real runs: without
returning users the relay took 1.04 to 1.15 times the device time of B0."""
_CHUNKS = Chunking(CHUNK_US, WorkerSettings.model_fields["max_chunk_tokens"].default, PAGE_TOKENS)
_SIZES = 33
"""Lengths whose times are calculated; those between are interpolated."""


class Verdict(enum.StrEnum):
    """What a team would run."""

    FULL = "full"
    """Full inference meets the deadline: the relay would cost work and bring nothing."""
    RELAY = "relay"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Work:
    """The device times of many requests of one load in µs, each an array with one value for each request."""

    full: Array
    """Full inference, without cuts."""
    hit: Array
    """Ranking on a cached prefix."""
    compute: Array
    """Pre-infer of a whole prefix, in chunks."""
    append: Array
    """Pre-infer of what a history gained since the last visit."""

    def full_s(self) -> float:
        """Device seconds for a thousand rankings without the relay."""
        return float(np.mean(self.full)) / 1000

    def relay_s(self, reuse: float) -> float:
        """The same with the relay, if this share of the requests find an older prefix of their user."""
        pre_us = reuse * np.mean(self.append) + (1 - reuse) * np.mean(self.compute)
        return float(np.mean(self.hit) + pre_us) / 1000


@dataclass(frozen=True, slots=True)
class Demand:
    """A load on one device, and what the cache has for it."""

    rate_per_s: float
    reuse: float
    """The share of requests whose user came before."""
    return_gap_s: float
    deadline_us: float
    outside_us: float
    """The part of the deadline that requests need outside the worker."""
    lead_us: float
    """The median lead time."""
    cache_bytes: int
    prefix_bytes: int
    """K,V of the median history."""

    @property
    def cached_share(self) -> float:
        """The share of requests that find an older prefix of their user."""
        users_bytes = self.rate_per_s * self.reuse * self.return_gap_s * self.prefix_bytes
        return self.reuse * min(1.0, self.cache_bytes / users_bytes) if users_bytes else self.reuse


def work_of(latency: LatencyModel, tokens: int, sigma: float, scored: int, growth: int) -> Work:
    """The work of requests with these lengths: log-normal about the median `tokens`, and cut at twice the median, as in
    the traces. `scored`: suffix and candidates; `growth`: new tokens at each visit.
    """
    sizes = np.unique(np.linspace(1, 2 * tokens, _SIZES).astype(int)).tolist()
    lengths = np.minimum(tokens * np.exp(sigma * _chances().lengths), 2 * tokens)

    def of_each(times_us: list[float]) -> Array:
        found: Array = np.interp(lengths, sizes, times_us)
        return found

    hit = of_each([latency.hit_us(size, scored) for size in sizes])
    grown = [min(growth, size) for size in sizes]
    return Work(
        # Not T_full, which is fitted to prefixes in chunks: the baseline has none.
        full=of_each([latency.pre_us(size) for size in sizes]) + hit,
        hit=hit,
        compute=of_each([_CHUNKS.duration_us(0, size, latency) for size in sizes]),
        append=of_each(
            [latency.append_us(size - new, new) if new else 0.0 for size, new in zip(sizes, grown, strict=True)]
        ),
    )


def verdict_of(work: Work, demand: Demand) -> Verdict:
    """The verdict on a load of this work."""
    left_us = demand.deadline_us - demand.outside_us
    if late_share_of_full(work, demand.rate_per_s, left_us) <= MOST_LATE:
        return Verdict.FULL
    return Verdict.RELAY if late_share_of_relay(work, demand, left_us) <= MOST_LATE else Verdict.NEITHER


def late_share_of_full(work: Work, rate_per_s: float, deadline_us: float) -> float:
    """The share of late requests without the relay. `deadline_us`: what the worker has of it."""
    arrivals = _chances().arrivals * 1e6 / rate_per_s
    return _late_share(_ends(arrivals, work.full) - arrivals, deadline_us)


def late_share_of_relay(work: Work, demand: Demand, deadline_us: float) -> float:
    """The same with the relay: a request's prefix is in the queue a lead time before the request is."""
    chances = _chances()
    is_cached = chances.users < demand.cached_share
    retrievals = chances.arrivals[:RELAYED] * 1e6 / demand.rate_per_s
    rankings = retrievals + demand.lead_us * np.exp(LEAD_SIGMA * chances.leads)
    arrivals = np.concatenate([retrievals, rankings])
    times = np.concatenate([np.where(is_cached, work.append[:RELAYED], work.compute[:RELAYED]), work.hit[:RELAYED]])
    # Stable: without a lead time, a prefix stays before its own request.
    order = np.argsort(arrivals, kind="stable")
    ends = np.empty_like(arrivals)
    ends[order] = _ends(arrivals[order], times[order])
    return _late_share(ends[RELAYED:] - rankings, deadline_us)


@dataclass(frozen=True, slots=True)
class _Chances:
    """The random numbers of the requests."""

    arrivals: Array
    """Times, at one request a second."""
    lengths: Array
    """Standard normal, as `leads`."""
    users: Array
    """From 0 to 1: those below the cached share find a prefix."""
    leads: Array


@cache
def _chances() -> _Chances:
    """Drawn once, since drawing takes as long as the queue does."""
    arrivals, lengths, others = (np.random.default_rng(seed) for seed in range(3))
    return _Chances(
        np.cumsum(arrivals.exponential(size=REQUESTS)),
        lengths.standard_normal(REQUESTS),
        others.random(RELAYED),
        others.standard_normal(RELAYED),
    )


def _ends(arrivals: Array, times: Array) -> Array:
    """When a device ends each work. It begins a work at its arrival, or at the end of the one before."""
    before = np.cumsum(times) - times
    return np.maximum.accumulate(arrivals - before) + before + times


def _late_share(taken: Array, deadline_us: float) -> float:
    return float(np.mean(taken > deadline_us))
