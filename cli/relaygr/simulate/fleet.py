"""Which part of a fleet is simulated, how often, and on how many processes.

Workers of a relay share nothing: a part is one worker with its partitions, and can be simulated without the rest. A
fleet of up to `sample` parts is simulated whole, once for each seed. Of a larger fleet each seed
simulates the busiest part, and another random sample of the others: a few users may have a large share of the
impressions, and a random sample would mostly miss the worker that owns them. The differences between the parts give the
sampling error.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np

from relaygr.cluster.topic_check import LEAST_PARTITIONS_PER_WORKER
from relaygr.kafka.settings import MOST_PARTITIONS
from relaygr.runtime.errors import RelayError
from relaygr.runtime.limits import usable_cores
from relaygr.simulate.case import Case
from relaygr.simulate.demand import Demand
from relaygr.simulate.figures import Figures, PartOutcome, Requests, figures_of
from relaygr.simulate.relay import RelaySimulation

Progress = Callable[[float], None]
"""Gets the share of the simulations that have ended."""


@dataclass(frozen=True, slots=True)
class FleetSize:
    """The fleet, and the part of it that is simulated."""

    workers: int
    sample: int = 8
    """Random parts that each seed simulates, beside the busiest one."""
    seeds: int = 4


@dataclass(frozen=True, slots=True)
class _Task:
    case: Case
    partitions: range
    owned: tuple[range, ...] = ()
    """The partitions of each worker, of several in one simulation."""


def simulate(case: Case, size: FleetSize, runner: Runner, on_progress: Progress) -> Figures:
    """The figures of the fleet. Raises RelayError for a fleet that cannot be, or if no request is counted."""
    parts = parts_of(case.demand.partitions, size.workers)
    busiest, share = busiest_part(case.demand, parts)
    tasks = [task for seed in range(size.seeds) for task in _tasks(case, size, parts, busiest, seed)]
    outcomes = _outcomes(tasks, runner, on_progress)
    budget_ms, highest_share = case.demand.traffic.budget_ms, share * size.workers
    if size.sample >= len(parts):
        # The parts of one seed are one sample of the whole fleet.
        count = len(parts)
        outcomes = [merged(outcomes[first : first + count]) for first in range(0, len(outcomes), count)]
        return replace(figures_of(outcomes, budget_ms), highest_share=highest_share)
    count = 1 + size.sample
    others = [outcome for number, outcome in enumerate(outcomes) if number % count]
    figures = figures_of(others, budget_ms, len(parts), outcomes[::count])
    return replace(figures, highest_share=highest_share)


def simulate_as_one(case: Case, owners: int, seeds: int, runner: Runner, on_progress: Progress) -> Figures:
    """The figures of a fleet whose workers share a pool. `owners`: the workers that own partitions.

    Raises as `simulate`.
    """
    demand, owned = case.demand, tuple(parts_of(case.demand.partitions, owners))
    cases = (replace(case, demand=replace(demand, seed=demand.seed + seed)) for seed in range(seeds))
    outcomes = _outcomes([_Task(each, range(demand.partitions), owned) for each in cases], runner, on_progress)
    highest_share = busiest_part(demand, owned)[1] * owners
    return replace(figures_of(outcomes, demand.traffic.budget_ms), highest_share=highest_share)


def _outcomes(tasks: list[_Task], runner: Runner, on_progress: Progress) -> list[PartOutcome]:
    """Raises RelayError if no request is counted."""
    outcomes = runner.run(tasks, on_progress)
    if not any(len(outcome.requests) for outcome in outcomes):
        raise RelayError(
            "No request was counted: simulate longer, or raise traffic.rate_per_s, traffic.users or --sample."
        )
    return outcomes


def busiest_part(demand: Demand, parts: Sequence[range]) -> tuple[int, float]:
    """The part with the most expected impressions, and its share of the fleet's impressions."""
    by_partition = demand.shares()
    shares = [float(by_partition[each.start : each.stop].sum()) for each in parts]
    busiest = max(range(len(parts)), key=lambda place: shares[place])
    return busiest, shares[busiest]


def parts_of(partitions: int, workers: int) -> list[range]:
    """The partitions of each part. The group's assignor gives each worker a range.

    Raises RelayError for more workers than partitions.
    """
    if workers > partitions and workers > MOST_PARTITIONS:
        raise RelayError(
            f"{workers} workers cannot share {MOST_PARTITIONS} partitions, the most of a topic prefix: simulate a part "
            "of the fleet, with its part of the load and of the users (--workers, --qps, --users)."
        )
    if workers > partitions:
        wanted = min(LEAST_PARTITIONS_PER_WORKER * workers, MOST_PARTITIONS)
        raise RelayError(
            f"{workers} workers cannot share {partitions} partitions: set partitions to {wanted} "
            f"(--set partitions={wanted})."
        )
    ends = np.cumsum([len(each) for each in np.array_split(np.arange(partitions), workers)]).tolist()
    begins = [0, *ends[:-1]]
    return [range(begin, end) for begin, end in zip(begins, ends, strict=True)]


def merged(parts: Sequence[PartOutcome]) -> PartOutcome:
    """Several parts as one."""
    found, jobs = Counter[str](), Counter[str]()
    for part in parts:
        found.update(part.found)
        jobs.update(part.jobs)
    return PartOutcome(
        requests=Requests(
            np.concatenate([part.requests.latencies_us for part in parts]),
            np.concatenate([part.requests.endings for part in parts]),
        ),
        found=found,
        jobs=jobs,
        device_s=sum(part.device_s for part in parts),
        thread_s=sum(part.thread_s for part in parts),
        worker_s=sum(part.worker_s for part in parts),
        impressions=sum(part.impressions for part in parts),
        took_s=sum(part.took_s for part in parts),
        asked=sum(part.asked for part in parts),
        ready=sum(part.ready for part in parts),
    )


def _tasks(case: Case, size: FleetSize, parts: Sequence[range], busiest: int, seed: int) -> list[_Task]:
    """All parts, or the busiest one and then a sample of the others."""
    chosen = list(range(len(parts)))
    demand = replace(case.demand, seed=case.demand.seed + seed)
    if size.sample < len(parts):
        others = [place for place in chosen if place != busiest]
        drawn = np.random.default_rng((demand.seed, 6)).choice(others, size.sample, replace=False)
        chosen = [busiest, *sorted(drawn.tolist())]
    return [_Task(replace(case, demand=demand), parts[place]) for place in chosen]


# -- processes -------------------------------------------------------------------------------------


class Runner:
    """Runs simulations on at most `jobs` processes (None: the usable cores). A context manager, which keeps the
    processes for further calls. One job, or one task, runs in the calling process.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self._jobs = jobs or usable_cores()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, tasks: Sequence[_Task], on_progress: Progress) -> list[PartOutcome]:
        """The outcomes in the order of the tasks."""
        if min(self._jobs, len(tasks)) == 1:
            outcomes: list[PartOutcome] = []
            for task in tasks:
                outcomes.append(_run(task))
                on_progress(len(outcomes) / len(tasks))
            return outcomes
        if self._pool is None:
            # Ctrl-C reaches every process; those of the pool end without a message.
            default = (signal.SIGINT, signal.SIG_DFL)
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, context, signal.signal, default)
        futures = [self._pool.submit(_run, task) for task in tasks]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()  # The first error ends all.
                on_progress(done / len(tasks))
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


def _run(task: _Task) -> PartOutcome:
    return RelaySimulation(task.case, task.partitions, task.owned).run()
