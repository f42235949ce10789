"""How many workers a load and a time limit need, with the relay and without: bisected over simulated fleets.

A number of workers is enough if at most `LATE_SHARE` of the requests have no answer over their whole history within the
time limit, with certainty: the upper end of the 95 % confidence interval counts. Where the interval has the limit
within, the number is simulated once more, with `MORE_SEEDS` times the seeds. If that does not decide, the number is not
enough: a plan may have a few workers too many, and seldom too few.

The search begins with `IDLE` times the number whose devices the calibrated times fill. If even these are not enough, no
number is. It looks first above the number that the calibrated times fill, and below it if the lowest number tried is
enough. It ends when it knows the number to about `STEP`, or to one worker. Every number is simulated with the same
seeds.

The settings limit the partitions of a topic prefix, and so its workers. A larger fleet has several prefixes, and each
serves a part of the users. To the simulation they are one fleet with the partitions of all: workers share nothing.

Each simulation is short and begins with empty caches: it sees no user who returns after its end, and may evict less
than a fleet that runs for longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from relaygr.cluster.topic_check import LEAST_PARTITIONS_PER_WORKER
from relaygr.kafka.settings import MOST_PARTITIONS
from relaygr.runtime.errors import RelayError
from relaygr.simulate.case import Case
from relaygr.simulate.figures import Figures
from relaygr.simulate.fleet import FleetSize, Runner, busiest_part, parts_of, simulate

LATE_SHARE: Final = 0.01
STEP: Final = 0.03
IDLE: Final = 20
LEAST_PARTITIONS: Final = 48
MOST_WORKERS: Final = MOST_PARTITIONS // LEAST_PARTITIONS_PER_WORKER
"""Workers of one topic prefix."""
IMPRESSIONS: Final = 4_000
"""Impressions of a probe: 1 % of them are 40 requests."""
LEAST_IMPRESSIONS: Final = 600
"""Enough to see whether idle workers are fast enough: if none of their last three quarters is late."""
MORE_SEEDS: Final = 4
_LEAST_S: Final = 4.0
_MOST_S: Final = 1_500.0
"""A simulated second takes about 1 ms for each worker, also if nothing happens in it."""
_NORMAL_QUANTILE: Final = 1.96
_MOST_BUSIEST: Final = 4
"""The busiest part is simulated in each probe. It may have so many times the impressions of the sample, and no more."""

OnProbe = Callable[[int, float], None]
"""Gets the number of workers that is simulated now, and the share of its simulations that have ended."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A number of workers, and what it did."""

    workers: int
    figures: Figures
    seconds: float
    """Simulated time, its cold beginning included."""

    @property
    def late_up_to(self) -> float:
        """The upper end of the confidence interval of the late share; 1 if the sampling error is not known."""
        late = self.figures.late_share
        if late.error is None:
            return 1.0
        return max(late.value + late.error, highest_share(late.value, self.figures.requests))

    @property
    def is_enough(self) -> bool:
        return self.late_up_to <= LATE_SHARE

    @property
    def is_unclear(self) -> bool:
        """Whether it is enough by the share that was seen, and not with certainty."""
        return self.figures.late_share.value <= LATE_SHARE < self.late_up_to


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The smallest number of workers found to be enough. `probes`: all numbers that were simulated, in order."""

    best: Probe | None
    """None if no number was enough: the time limit is shorter than an idle worker needs, or too close to it."""
    probes: tuple[Probe, ...]

    @property
    def workers(self) -> int:
        return self.best.workers if self.best is not None else 0

    @property
    def is_unclear(self) -> bool:
        """Whether there is no best number, and the last one might have been enough."""
        return self.best is None and self.probes[-1].is_unclear


def partitions_for(workers: int) -> int:
    """Partitions of each topic prefix of this fleet: a multiple of the default, as far as the settings allow it."""
    share = math.ceil(workers / prefixes_for(workers))
    wanted = LEAST_PARTITIONS * math.ceil(max(1, LEAST_PARTITIONS_PER_WORKER * share) / LEAST_PARTITIONS)
    return min(wanted, MOST_PARTITIONS)


def prefixes_for(workers: int) -> int:
    """Topic prefixes of this fleet. Each has at most `MOST_WORKERS` of its workers, and its part of the users."""
    return max(1, math.ceil(workers / MOST_WORKERS))


def plan_capacity(
    case: Case, sample: int, seeds: int, runner: Runner, on_probe: OnProbe, impressions: int = IMPRESSIONS
) -> CapacityPlan:
    """Bisects the number of workers. `impressions`: simulated for each number. Raises RelayError for a load that is too
    low for it.
    """
    _check_rate(case, seeds)
    probes: dict[int, Probe] = {}

    def probe(workers: int, wanted: int = impressions) -> Probe:
        if workers not in probes:
            size = FleetSize(workers, sample, seeds)
            probed = _probed(case, size, wanted)
            probes[workers] = _probe(probed, size, runner, on_probe)
            if probes[workers].is_unclear:
                probes[workers] = _probe(probed, replace(size, seeds=MORE_SEEDS * seeds), runner, on_probe)
        return probes[workers]

    # `few` is a guess until it was simulated.
    few = least_workers(case) - 1
    enough = idle_workers(case)
    if impressions > LEAST_IMPRESSIONS and not probe(enough, LEAST_IMPRESSIONS).is_enough:
        # So few impressions may be late by chance.
        del probes[enough]
    if not probe(enough).is_enough:
        return CapacityPlan(None, tuple(probes.values()))
    while True:
        while enough - few > max(1, STEP * enough):
            # A part of the interval that grows with the number, since the number is wanted to a part of itself.
            middle = min(max(round(math.sqrt(max(1, few) * enough)), few + 1), enough - 1)
            if probe(middle).is_enough:
                enough = middle
            else:
                few = middle
        if few == 0 or not probe(few).is_enough:
            return CapacityPlan(probe(enough), tuple(probes.values()))
        enough, few = few, few // 2


def _probed(case: Case, size: FleetSize, wanted: int) -> Case:
    """The case with the partitions of this fleet, for so long that about `wanted` impressions are simulated."""
    traffic, workers = case.demand.traffic, size.workers
    demand = replace(case.demand, partitions=prefixes_for(workers) * partitions_for(workers))
    seconds = wanted / (traffic.rate_per_s * min(1.0, size.sample / workers) * size.seeds)
    if size.sample < workers:
        _, highest = busiest_part(demand, parts_of(demand.partitions, workers))
        seconds = min(seconds, _MOST_BUSIEST * wanted / (traffic.rate_per_s * highest * size.seeds))
    seconds = min(max(_LEAST_S, seconds), _MOST_S)
    return replace(case, demand=replace(demand, traffic=traffic.model_copy(update={"duration_s": seconds})))


def _probe(case: Case, size: FleetSize, runner: Runner, on_probe: OnProbe) -> Probe:
    on_probe(size.workers, 0.0)
    figures = simulate(case, size, runner, lambda done: on_probe(size.workers, done))
    return Probe(size.workers, figures, case.demand.traffic.duration_s)


def least_workers(case: Case) -> int:
    """Workers whose devices are filled by ranking on cached prefixes, or by full inference without the relay.

    A guess, not a bound: requests of a batch share its fixed cost, and histories may be shorter than the median.
    """
    return max(1, math.floor(_filled_workers(case, has_prefixes=case.relay)))


def idle_workers(case: Case) -> int:
    """Workers that have little to do: `IDLE` times those that are filled, and fewer if full inference of all requests
    leaves these idle.
    """
    return min(IDLE * least_workers(case), max(1, math.ceil(IDLE * _filled_workers(case, has_prefixes=False))))


def highest_share(share: float, requests: int) -> float:
    """The upper end of the 95 % confidence interval of a share of independent requests, by Wilson. It is above 0 for a
    share of 0: few requests without a late one do not show that none is late.
    """
    square = _NORMAL_QUANTILE**2 / requests
    return (share + square / 2 + math.sqrt(square * share * (1 - share) + square**2 / 4)) / (1 + square)


def _filled_workers(case: Case, *, has_prefixes: bool) -> float:
    visit = case.visit()
    return case.demand.traffic.rate_per_s * (visit.hit_us if has_prefixes else visit.full_us) / 1e6


def _check_rate(case: Case, seeds: int) -> None:
    """Raises RelayError if the longest simulation has too few impressions to show that some workers are enough."""
    rate_per_s = case.demand.traffic.rate_per_s
    least_per_s = LEAST_IMPRESSIONS / (MORE_SEEDS * seeds * _MOST_S)
    if rate_per_s < least_per_s:
        wanted = math.ceil(1000 * least_per_s) / 1000
        raise RelayError(
            f"--qps {rate_per_s:g} is too low to plan for: too few requests come in the time that is simulated. Give "
            f"--qps {wanted:g}: the workers that are enough for it are enough for less."
        )
