"""Eviction policies on traffic of different kinds: which one leaves the least to compute?

Each kind of traffic is a list of visits (time, user), drawn from a seed. A visit is a pre-infer look-up and a ranking
look-up 150 ms later. The user's history grows by some behaviours from visit to visit. Tiers have a share of the
*footprint*, which is what all prefixes of the traffic take together. `relaygr.replay` plays the look-ups against the
worker's own policies. Computing takes no time there, so these are shares of work and not latencies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relaygr.admission.latency import LatencyModel
from relaygr.interactions import read_interactions
from relaygr.replay.bound import HitBound
from relaygr.replay.demand import Demands, demands_of
from relaygr.replay.link import LinkSpeed
from relaygr.replay.parallel import replay_all
from relaygr.replay.run import Candidate, ReplayEnvironment
from relaygr.replay.synthetic import Sketches, records_of_interactions, records_of_schedule, window_start
from relaygr.replay.tables import name_of
from relaygr.traffic.population import SyntheticPopulation
from relaygr.traffic.settings import TrafficSettings
from relaygr.worker.cache.events import EventKind
from relaygr.worker.cache.policies import PolicyName, TierPolicies
from relaygr.worker.cache.trace import TraceRow
from relaygr.worker.kv import DramGeometry, KvDtype, KvGeometry, PrefixLayout

# 32 KiB a token, pages of 16 tokens.
GEOMETRY = DramGeometry(KvGeometry(1, 1, 8192, 8192, 16, KvDtype.BFLOAT16))
LAYOUT = PrefixLayout(contextual_tokens=1, tokens_per_behaviour=1)
SPEED = LinkSpeed(delay_us=30.0, bytes_per_us=20 * 2**30 / 1e6)
SHARES = ((0.01, 0.0), (0.05, 0.0), (0.2, 0.0), (0.5, 0.0), (0.02, 0.05), (0.02, 0.2), (0.05, 0.5))
"""HBM and DRAM as shares of the footprint."""
VISITS_PER_S = 10.0
"""Few, since the traffic is small too: the prefixes in use at one moment are a small part of the footprint."""
LEAD_US = 150_000
MAX_BEHAVIOURS = 4096
ANCHOR_BEHAVIOURS = 512
_SEED = 1

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Visits:
    """The visits of a kind of traffic, in any order. `lengths`: behaviours at each user's first visit, by user."""

    at_s: Floats
    users: Ints
    lengths: Ints


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """Figures of one policy on one traffic with one size. Shares are shares of all visits, or of all tokens or time."""

    measured_at: str
    traffic: str
    hbm_share: float
    dram_share: float
    policy: str
    visits: int
    in_hbm: float
    in_either: float
    bound: float
    tokens_saved: float
    time_saved: float


def _lengths(random: np.random.Generator, users: int) -> Ints:
    """Most histories have some hundred to two thousand behaviours."""
    lengths: Ints = np.clip(700 * np.exp(random.normal(0.0, 0.8, users)), 16, 3500).astype(np.int64)
    return lengths


def _zipf(random: np.random.Generator, count: int, users: int, exponent: float = 0.9) -> Ints:
    """`count` users; the lowest numbers come most often."""
    weights = np.cumsum((1.0 + np.arange(users)) ** -exponent)
    return np.searchsorted(weights / weights[-1], random.random(count)).astype(np.int64)


def _arrivals(random: np.random.Generator, count: int) -> Floats:
    return np.cumsum(random.exponential(1 / VISITS_PER_S, count))


def steady(random: np.random.Generator, visits: int) -> Visits:
    """Zipf users who come independently of each other and of the time."""
    users = visits // 6
    return Visits(_arrivals(random, visits), _zipf(random, visits, users), _lengths(random, users))


def sessions(random: np.random.Generator, visits: int) -> Visits:
    """Users come for five visits on average, some tens of seconds apart, and then stay away."""
    users, begun = visits // 10, visits // 5
    counts = random.geometric(0.2, begun)
    gaps_s = 30 * np.exp(random.normal(0.0, 1.0, int(counts.sum())))
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    since_s = np.cumsum(gaps_s)
    since_s -= np.repeat(since_s[starts], counts)
    at_s = np.repeat(np.sort(random.random(begun)) * visits / VISITS_PER_S, counts) + since_s
    return Visits(at_s, np.repeat(_zipf(random, begun, users), counts), _lengths(random, users))


def day_and_night(random: np.random.Generator, visits: int) -> Visits:
    """Three days; the users of two halves of the world are awake in turn."""
    users = visits // 6
    at = random.random(visits)
    is_day = random.random(visits) < 0.5 + 0.45 * np.sin(2 * np.pi * 3 * at)
    drawn = _zipf(random, visits, users // 2)
    return Visits(at * visits / VISITS_PER_S, 2 * drawn + is_day, _lengths(random, users + 2))


def drifting(random: np.random.Generator, visits: int) -> Visits:
    """The users who come most often change: the hot set has moved on completely after a tenth of the time."""
    users = visits // 6
    shift = np.arange(visits) * users // visits
    return Visits(_arrivals(random, visits), (_zipf(random, visits, users) + shift) % users, _lengths(random, users))


def newcomers(random: np.random.Generator, visits: int) -> Visits:
    """Half of the visits are those of users who never return."""
    users = visits // 6
    drawn = _zipf(random, visits, users)
    once = random.random(visits) < 0.5
    drawn[once] = users + np.arange(int(once.sum()))
    return Visits(_arrivals(random, visits), drawn, _lengths(random, users + visits))


def scans(random: np.random.Generator, visits: int) -> Visits:
    """Zipf users, and now and then a campaign that brings every user once, one after the other."""
    users, passes = visits // 12, 4
    drawn = _zipf(random, visits - passes * users, users)
    at_s = random.random(drawn.size) * visits / VISITS_PER_S
    for number in range(passes):
        begins_s = (number + 0.5) / passes * visits / VISITS_PER_S
        at_s = np.concatenate((at_s, begins_s + np.arange(users) / (2 * VISITS_PER_S)))
        drawn = np.concatenate((drawn, random.permutation(users)))
    return Visits(at_s, drawn, _lengths(random, users))


def fading(random: np.random.Generator, visits: int) -> Visits:
    """As in logs of ratings: users arrive all the time, are eager at first, and come more and more rarely."""
    users = visits // 12
    counts = np.maximum(1, (7 * np.exp(random.normal(0.0, 1.1, users))).astype(np.int64))
    total = int(counts.sum())
    span_s = total / VISITS_PER_S
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    number = np.arange(total) - np.repeat(starts, counts)
    gaps_s = 5 * np.exp(random.normal(0.0, 1.0, total)) * (1 + number) ** 1.2
    since_s = np.cumsum(gaps_s)
    since_s -= np.repeat(since_s[starts], counts)
    at_s = np.repeat(random.random(users) * span_s, counts) + since_s
    return Visits(at_s, np.repeat(np.arange(users), counts), _lengths(random, users) // 4 + 1)


TRAFFIC: dict[str, Callable[[np.random.Generator, int], Visits]] = {
    each.__name__.replace("_", " "): each
    for each in (drifting, fading, scans, newcomers, sessions, day_and_night, steady)
}


def rows_of(visits: Visits, random: np.random.Generator) -> Iterator[TraceRow]:
    """The look-ups of the visits. Half of the visits find a history that has grown, by eight behaviours on average."""
    grows = np.where(random.random(visits.users.size) < 0.5, random.geometric(1 / 8, visits.users.size), 0)
    lengths, sketches = visits.lengths.copy(), Sketches()
    numbers: dict[int, int] = {}
    looked_up: list[tuple[int, int, TraceRow]] = []
    for place, index in enumerate(np.argsort(visits.at_s, kind="stable").tolist()):
        user = int(visits.users[index])
        name, at_us = str(user), int(visits.at_s[index] * 1e6)
        start = window_start(int(lengths[user]), MAX_BEHAVIOURS, ANCHOR_BEHAVIOURS)
        sketch = sketches.of(name, start, int(lengths[user]) - start)
        number = numbers.setdefault(user, len(numbers))
        for kind, late_us in ((EventKind.PREPARE, 0), (EventKind.ACQUIRE, LEAD_US)):
            row = (kind.value, at_us + late_us, number, b"made", sketch.behaviours, sketch.marks, "made")
            looked_up.append((at_us + late_us, place, row))
        lengths[user] += grows[index]
    looked_up.sort()
    return (row for _, _, row in looked_up)


def demands_by_traffic(visits: int, logs: Sequence[Path]) -> Iterator[tuple[str, Demands]]:
    """Every kind of traffic, the schedule of `relaygr traffic`, and each log of interactions."""
    for name, make in TRAFFIC.items():
        random = np.random.default_rng(_SEED)
        yield name, demands_of(rows_of(make(random, visits), random))
    settings = TrafficSettings(
        users=visits // 12, rate_per_s=VISITS_PER_S, duration_s=visits / VISITS_PER_S, history_sigma=0.8
    )
    yield "gateway", demands_of(record.row for record in records_of_schedule(settings, SyntheticPopulation(settings)))
    for path in logs:
        records = records_of_interactions(read_interactions(path), LEAD_US, MAX_BEHAVIOURS, ANCHOR_BEHAVIOURS)
        yield path.name, demands_of((record.row for record in records), 2 * visits)


def footprint_bytes(demands: Demands) -> int:
    """The size of the longest prefix of every user."""
    longest = np.zeros(demands.users.size, np.int64)
    np.maximum.at(longest, demands.owners, demands.lengths)
    return int((-(-(1 + longest) // GEOMETRY.kv.page_tokens)).sum()) * GEOMETRY.page_bytes


def measure(
    name: str, demands: Demands, latency: LatencyModel, measured_at: str, jobs: int, policies: Sequence[TierPolicies]
) -> Iterator[PolicyFigures]:
    """Plays one traffic against every policy with every size."""
    environment = ReplayEnvironment(GEOMETRY, LAYOUT, latency, SPEED)
    whole, page = footprint_bytes(demands), GEOMETRY.page_bytes
    bound = HitBound(demands, LAYOUT, GEOMETRY.kv.page_tokens)
    cases = list(itertools.product(SHARES, policies))
    candidates = [Candidate(each, max(page, int(hbm * whole)), int(dram * whole)) for (hbm, dram), each in cases]
    results = replay_all(demands, environment, candidates, jobs, lambda _: None)
    for ((hbm, dram), each), one in zip(cases, results, strict=True):
        pages = one.candidate.hbm_bytes // page + one.candidate.dram_bytes // page
        yield PolicyFigures(
            measured_at, name, hbm, dram, name_of(each), one.visits,
            one.hbm_hits / one.visits, (one.hbm_hits + one.dram_hits) / one.visits, bound.hits(pages) / one.visits,
            1 - one.recomputed_tokens / one.asked_tokens, 1 - one.recomputed_us / one.asked_us,
        )  # fmt: skip


COMPARED = tuple(TierPolicies(each, each) for each in PolicyName if each is not PolicyName.TTL)
"""One policy for both tiers. `ttl` evicts in the order of `lru`."""
