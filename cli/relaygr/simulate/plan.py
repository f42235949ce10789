"""How many workers a load and a time limit need, with the relay and without: bisected over simulated fleets.

A number of workers is enough if at most `LATE_SHARE` of the requests have no answer over their whole history within the
time limit. The search begins with `IDLE` times the number whose devices the calibrated times fill. If even these are
not enough, no number is. It looks first above the number that the calibrated times fill, and below it if the lowest
number tried is enough. It ends when it knows the number to about `STEP`, or to one worker. Every number is simulated
with the same seeds.

Each simulation is short and begins with empty caches: it sees no user who returns after its end, and may evict less
than a fleet that runs for longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from relaygr.simulate.demand import Demand
from relaygr.simulate.figures import Figures
from relaygr.simulate.fleet import FleetSize, Runner, busiest_part, expected_impressions, parts_of, simulate
from relaygr.simulate.relay import Case
from relaygr.worker.kv import DramGeometry
from relaygr.worker.settings import WorkerSettings

LATE_SHARE: Final = 0.01
STEP: Final = 0.03
IDLE: Final = 20
PARTITIONS_PER_WORKER: Final = 8
LEAST_PARTITIONS: Final = 48
IMPRESSIONS: Final = 4_000
"""Impressions of a probe: 1 % of them are 40 requests."""
_IDLE_IMPRESSIONS: Final = 400
"""Enough to see whether idle workers are fast enough."""
_LEAST_S: Final = 4.0
_MOST_BUSIEST: Final = 4
"""The busiest part is simulated in each probe. It may have so many times the impressions of the sample, and no more."""

OnProbe = Callable[[int, float], None]
"""Gets the number of workers that is simulated now, and the share of its impressions that are done."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A number of workers, and what it did."""

    workers: int
    figures: Figures
    seconds: float
    """Simulated time, its cold beginning included."""

    @property
    def is_enough(self) -> bool:
        return self.figures.late_share.value <= LATE_SHARE


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The smallest number of workers found to be enough. `probes`: all numbers that were simulated, in order."""

    best: Probe | None
    """None if no number was enough: the time limit is shorter than an idle worker needs."""
    probes: tuple[Probe, ...]

    @property
    def workers(self) -> int:
        return self.best.workers if self.best is not None else 0


def partitions_for(workers: int) -> int:
    """Partitions of the topics for this fleet: a multiple of the default."""
    return LEAST_PARTITIONS * math.ceil(max(1, PARTITIONS_PER_WORKER * workers) / LEAST_PARTITIONS)


def plan_capacity(
    case: Case[Demand], sample: int, seeds: int, runner: Runner, on_probe: OnProbe, impressions: int = IMPRESSIONS
) -> CapacityPlan:
    """Bisects the number of workers. `impressions`: simulated for each number."""
    probes: dict[int, Probe] = {}

    def probe(workers: int, wanted: int = impressions) -> Probe:
        if workers not in probes:
            traffic, size = case.demand.traffic, FleetSize(workers, sample, seeds)
            demand = replace(case.demand, partitions=partitions_for(workers))
            seconds = wanted / (traffic.rate_per_s * min(1.0, sample / workers) * seeds)
            if sample < workers:
                _, highest = busiest_part(demand, parts_of(demand.partitions, workers, 1))
                seconds = min(seconds, _MOST_BUSIEST * wanted / (traffic.rate_per_s * highest * seeds))
            seconds = max(_LEAST_S, seconds)
            probed = replace(case, demand=replace(demand, traffic=traffic.model_copy(update={"duration_s": seconds})))
            total = expected_impressions(probed, size)
            on_probe(workers, 0.0)
            figures = simulate(probed, size, runner, lambda done: on_probe(workers, min(1.0, done / total)))
            probes[workers] = Probe(workers, figures, seconds)
        return probes[workers]

    # `few` is a guess until it was simulated.
    few = least_workers(case) - 1
    enough = IDLE * (few + 1)
    if impressions > _IDLE_IMPRESSIONS and not probe(enough, _IDLE_IMPRESSIONS).is_enough:
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


def least_workers(case: Case[Demand]) -> int:
    """Workers whose devices are filled by ranking on cached prefixes, or by full inference without the relay.

    A guess, not a bound: requests of a batch share its fixed cost, and histories may be shorter than the median.
    """
    model, traffic = case.spec.model, case.demand.traffic
    tokens = model.layout.tokens(min(traffic.history_median, model.limits.max_prefix_behaviours))
    scored = traffic.suffix * model.layout.tokens_per_behaviour + traffic.candidates
    prefix_us = 0.0 if case.relay else model.latency.pre_us(tokens)
    return max(1, math.floor(traffic.rate_per_s * (prefix_us + model.latency.hit_us(tokens, scored)) / 1e6))


def memory_of(worker: WorkerSettings, geometry: DramGeometry, workers: int) -> tuple[int, int]:
    """HBM and DRAM of all workers together, in bytes: whole pages."""
    hbm_page, dram_page = geometry.kv.page_bytes, geometry.page_bytes
    hbm, dram = int(worker.hbm_bytes) // hbm_page * hbm_page, int(worker.dram_bytes) // dram_page * dram_page
    return workers * hbm, workers * dram
