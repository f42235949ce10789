"""Where the relay pays, calculated from the times of the engine alone. Pure; nothing of it is measured under load.

For a history length, a return gap and a load, three questions:

* Does full inference meet the deadline at this load? Then nothing needs the relay.
* Is a returning user's prefix still cached? Then only the tail is computed (a worker may rank a short one uncomputed).
* Does the device have the time for pre-infer and ranking, and is the lead time long enough?

The P99 of the queue is that of a device with constant times and exponential gaps (M/D/1).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from relaygr.admission.latency import LatencyModel

HIGHEST_LOAD = 0.8
"""The load above which nothing is promised: queues grow faster than any deadline."""


class Verdict(enum.StrEnum):
    """What a team would run."""

    FULL = "full"
    """Full inference meets the deadline: the relay would cost work and bring nothing."""
    RELAY = "relay"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Demand:
    """A load on one device. Token counts; `scored` are suffix and candidates."""

    tokens: int
    scored: int
    rate_per_s: float
    reuse: float
    return_gap_s: float
    growth: int
    deadline_us: float
    lead_us: float
    cache_bytes: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """The verdict, and device seconds for a thousand rankings with the relay and without."""

    verdict: Verdict
    relay_s: float
    full_s: float


def outlook(latency: LatencyModel, demand: Demand) -> Outlook:
    """The outlook of a demand."""
    hit_us = latency.hit_us(demand.tokens, demand.scored)
    users_bytes = demand.rate_per_s * demand.reuse * demand.return_gap_s * demand.tokens * demand.token_bytes
    kept = min(1.0, demand.cache_bytes / users_bytes) if users_bytes else 1.0
    warm = demand.reuse * kept
    growth = min(demand.growth, demand.tokens)
    append_us = latency.append_us(demand.tokens - growth, growth) if growth else 0.0
    pre_us = latency.pre_us(demand.tokens)
    relay_us = hit_us + warm * append_us + (1 - warm) * pre_us
    # Not T_full, which is fitted to prefixes in chunks: the baseline has none.
    full_us = pre_us + hit_us
    meets_full = _p99_us(full_us, demand.rate_per_s) <= demand.deadline_us
    # Ranking goes before pre-infer, so its queue is that of the hits; the device's time must suffice for both.
    meets_relay = (
        demand.rate_per_s * relay_us / 1e6 <= HIGHEST_LOAD
        and _p99_us(hit_us, demand.rate_per_s) <= demand.deadline_us
        and (warm == 1 or pre_us <= demand.lead_us)
    )
    verdict = Verdict.FULL if meets_full else Verdict.RELAY if meets_relay else Verdict.NEITHER
    return Outlook(verdict, relay_us / 1000, full_us / 1000)


def _p99_us(service_us: float, rate_per_s: float) -> float:
    """The P99 of queue and service; infinite from `HIGHEST_LOAD` on."""
    load = rate_per_s * service_us / 1e6
    if load >= HIGHEST_LOAD:
        return math.inf
    low, high = 0.0, 50.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if _waits_at_most(load, middle) < 0.99 else (low, middle)
    return service_us * (1 + high)


def _waits_at_most(load: float, services: float) -> float:
    """The share of requests that wait for at most so many service times (M/D/1, Erlang's formula)."""
    return (1 - load) * sum(
        math.exp(load * (services - k)) * (-load * (services - k)) ** k / math.factorial(k)
        for k in range(int(services) + 1)
    )
