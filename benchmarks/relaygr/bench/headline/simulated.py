"""The cells in virtual time: traces, searches and rows as on a broker, with `relaygr.simulate` in place of processes.

Measured on this machine are the engine alone (`plan.py`), and in runs on a broker what no calibration has: Kafka
hops, the worker's own times, and the noise of device times. The folder `learnt` keeps these times.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from rich.console import Console

from relaygr.bench.generator.samples import LOST, Sample
from relaygr.bench.generator.trace import WARM_UP, Trace
from relaygr.bench.generator.workload import make_trace, reuse_of
from relaygr.bench.headline.figures import figures_of
from relaygr.bench.headline.grid import QUICK, REUSES, Cell, at_reuse
from relaygr.bench.headline.plan import CellPlan, alone_path, plan_in
from relaygr.bench.headline.points import (
    LEARNING_MODE,
    PARTITIONS,
    Asked,
    CellSearch,
    Mode,
    Point,
    estimated_runs,
    key_of,
    row_of,
    trace_name,
    workload_of,
)
from relaygr.bench.headline.rows import SIMULATED, SLOW_LIMIT, RunFile, RunRow, Used
from relaygr.bench.headline.run import ENGINE_WAIT_S, Bench, progress_of
from relaygr.bench.headline.search import snapped
from relaygr.bench.headline.summary import amount
from relaygr.bench.headline.systems import FLAGS, UNCUT, System, settings_of
from relaygr.bench.rows import machine, now
from relaygr.bench.speed import MachineSpeed
from relaygr.devbroker import local_broker
from relaygr.schemas.partitioner import partition_for
from relaygr.settings import Settings
from relaygr.simulate.case import case_of_load, is_cpu, shape_of_config
from relaygr.simulate.demand import Part
from relaygr.simulate.relay import RelaySimulation
from relaygr.simulate.times import MeasuredTimes, learn, load_times, save_times
from relaygr.traffic.records import ImpressionRecord
from relaygr.traffic.schedule import Impression
from relaygr.traffic.settings import TrafficSettings
from relaygr.worker.calibration import Calibration, load_calibration
from relaygr.worker.executor.work import JobOutcome

LEARNING_LOAD = 0.5
"""The load of the runs that times are learnt from, as a part of B0's half load."""
LEARNT_FROM = tuple(
    (system, at_reuse(QUICK, reuse)) for reuse in (*REUSES, QUICK.reuse) for system in (System.B0, System.R)
)
"""Systems and cells, in turns: within minutes the speed of a machine changes as much as the systems differ."""

Learnt = Mapping[System, MeasuredTimes]
"""By the system that they were learnt from. A prefix takes less time in B0, which computes one for each request."""


def times_of(learnt: Learnt, system: System) -> MeasuredTimes:
    """Those for a run of this system."""
    return learnt[System.R if FLAGS[system].reuse else System.B0]


def learnt_in(out: Path, console: Console, broker: str) -> Learnt:
    """The times in this folder. Without them they are learnt now, from runs on the broker."""
    paths = {system: out / "learnt" / f"{system}.json" for system in dict.fromkeys(each for each, _ in LEARNT_FROM)}
    if not all(path.exists() for path in paths.values()):
        for system, times in _learn(out, console, broker).items():
            paths[system].parent.mkdir(parents=True, exist_ok=True)
            save_times(paths[system], times)
    learnt = {system: load_times(path) for system, path in paths.items()}
    for system, times in learnt.items():
        console.print(described(system, times), soft_wrap=True)
    return learnt


def _learn(out: Path, console: Console, broker: str) -> Learnt:
    samples: dict[System, list[Sample]] = {}
    slowdowns: list[float] = []
    with local_broker(broker, os.environ.get("RELAYGR_BOOTSTRAP")) as started:
        console.print(f"learning times from {len(LEARNT_FROM)} runs on {started.what}", soft_wrap=True)
        with Bench(console, out, started, LEARNING_MODE, None) as bench:
            for system, cell in LEARNT_FROM:
                plan = bench.plan(cell)
                rate = snapped(LEARNING_LOAD * plan.half_rate_per_s)
                point = Point("learn", cell.history, rate, LEARNING_MODE.seeds[0])
                played = bench.play(cell, plan, system, UNCUT if system is System.B0 else "", point)
                samples.setdefault(system, []).extend(each for each in played.samples if each.part != WARM_UP)
                slowdowns.append(played.used.slowdown)
    device = load_calibration(alone_path(plan_in(out, QUICK)[1])).model
    slowest = max(slowdowns)
    if slowest > SLOW_LIMIT:
        console.print(
            f"warning: the machine took up to {slowest:.2f} times as long as when it is quiet, and so do the learnt "
            f"times. Remove {out / 'learnt'} to learn them again",
            soft_wrap=True,
        )
    where = (
        f"cell {QUICK.name} at {rate:g}/s on {started.what.split(' at ')[0]}, {machine()}, slowdown up to "
        f"{slowest:.2f}, {now()}"
    )
    scored = QUICK.suffix + QUICK.candidates
    return {system: learn(own, device, scored, f"{system} in {where}") for system, own in samples.items()}


def described(system: System, times: MeasuredTimes) -> str:
    """The learnt times in a sentence."""

    def quantiles(values: Sequence[float], unit: float = 1.0) -> str:
        middle, high = values[len(values) // 2], values[round(0.99 * (len(values) - 1))]
        return f"{middle / unit:.2f} ({high / unit:.2f})"

    return (
        f"{system}: learnt from {times.requests:,} requests ({times.origin}), median (P99): a hop "
        f"{quantiles(times.hop_us, 1000)} ms; measured / engine alone {quantiles(times.hit_noise)} for ranking, "
        f"{quantiles(times.pre_noise)} for prefixes; a look-up takes {times.look_up_us:.0f} µs, an answer "
        f"{times.answer_us:.0f} µs"
    )


# -- one run ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """A trace as the load of a simulation. Its rows say which of them are measured, so no time of it is cold."""

    trace: Trace
    traffic: TrafficSettings
    seed: int
    partitions: int = PARTITIONS
    cold_s: float = 0.0

    def part(self, partitions: frozenset[int]) -> Part:
        trace = self.trace
        index: dict[str, int] = {}
        first_lengths: list[int] = []
        for user, length in zip(trace.user_id, trace.history_length.tolist(), strict=True):
            if user not in index:
                index[user] = len(index)
                first_lengths.append(length)
        names = list(index)
        places = {user: partition_for(name.encode(), self.partitions) for user, name in enumerate(names)}
        owned = {user: place for user, place in places.items() if place in partitions}
        rows = [index[user] for user in trace.user_id]

        def impressions() -> Iterator[Impression]:
            times = zip(trace.retrieval_us.tolist(), trace.ranking_us.tolist(), strict=True)
            lengths = trace.history_length.tolist()
            for row, (user, (retrieval_us, ranking_us), length) in enumerate(zip(rows, times, lengths, strict=True)):
                if user in owned:
                    yield Impression(row, user, retrieval_us, ranking_us, length)

        share = sum(user in owned for user in rows) / len(rows)
        users = np.fromiter(owned, np.int64, len(owned))
        return Part(impressions(), names.__getitem__, users, owned, share, first_lengths.__getitem__)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One system at one point, and the times to simulate it with."""

    cell: Cell
    plan: CellPlan
    mode: Mode
    system: System
    variant: str
    point: Point
    calibration: Calibration
    """By which the worker decides."""
    alone: Calibration
    """What forwards take, before the noise."""
    times: MeasuredTimes

    @property
    def key(self) -> tuple[object, ...]:
        return key_of(self.cell, self.mode, self.system, self.variant, self.point)


def simulate(run: SimulatedRun) -> tuple[RunRow, list[Sample]]:
    """The row of a run on the trace of its point, and its samples."""
    cell, plan, point = run.cell, run.plan, run.point
    trace = make_trace(workload_of(cell, plan, point, run.mode), f"{trace_name(cell, point, run.mode.name)}-")
    samples, used = play_simulated(run, trace)
    row = row_of(
        cell, plan, run.mode, run.system, run.variant, point, trace, samples, used,
        broker=f"{SIMULATED}: {run.times.origin}", reuse=reuse_of(trace),
    )  # fmt: skip
    return row, samples


def play_simulated(run: SimulatedRun, trace: Trace) -> tuple[list[Sample], Used]:
    """The samples of a run on this trace, and what it used."""
    cell, plan = run.cell, run.plan
    settings = Settings.model_validate(
        {"partitions": PARTITIONS} | settings_of(cell, plan, run.system, run.variant or UNCUT)
    )
    traffic = TrafficSettings(
        # The last request counts, too.
        duration_s=trace.seconds + 0.001,
        history_max=cell.longest_history,
        suffix=cell.suffix,
        candidates=cell.candidates,
        lead_median_ms=plan.lead_ms,
        budget_ms=plan.deadline_ms,
    )
    case = case_of_load(
        TraceLoad(trace, traffic, run.point.seed),
        settings,
        shape_of_config(cell.model(), settings, run.calibration),
        run.calibration.model,
        run.times,
        on_cpu=is_cpu(run.calibration),
        relay=FLAGS[run.system].events,
        device=run.alone.model,
    )
    records: list[ImpressionRecord] = []
    done = RelaySimulation(case, range(PARTITIONS), 1, lambda _: None, records.append).run()
    used = Used(
        done.device_s,
        done.preinfer_device_s,
        sum(done.jobs.values()),
        done.jobs.get(JobOutcome.COMPUTED.value, 0),
        done.wasted,
    )
    return samples_of(trace, records), used


def samples_of(trace: Trace, records: Sequence[ImpressionRecord]) -> list[Sample]:
    """A sample of each row of the trace. Records have the numbers of the rows; a row without one was lost."""
    answers = {record.number: record for record in records}
    samples = []
    for row, (user, length) in enumerate(zip(trace.user_id, trace.history_length.tolist(), strict=True)):
        answer, place = answers.get(row), (int(trace.part[row]), user, length, int(trace.ranking_us[row]))
        if answer is None or answer.timings is None:
            status, latency_us = (LOST, None) if answer is None else (answer.status, answer.latency_us)
            reason = None if answer is None else answer.reason
            samples.append(Sample(row, *place, 0, latency_us, status, reason))
            continue
        timings = answer.timings
        hop_us = ((answer.latency_us or 0) - timings.total_us) // 2
        samples.append(
            Sample(
                row, *place, 0, answer.latency_us, answer.status, answer.reason, answer.path, answer.prefix_source,
                answer.prefix_tokens, answer.tokens_cached, False, hop_us, timings.total_us, hop_us, timings.queue_us,
                timings.wait_us, timings.pre_infer_us, timings.reload_us, timings.rank_us,
            )
        )  # fmt: skip
    return samples


# -- all runs ---------------------------------------------------------------------------------------


class SimulatedBench:
    """One folder of results. Searches wait in threads for the runs that they ask for, which processes simulate."""

    def __init__(self, console: Console, out: Path, mode: Mode, learnt: Learnt, processes: int) -> None:
        self._console, self._out, self._mode, self._learnt = console, out, mode, learnt
        self._processes = processes
        self.file = RunFile(out)
        self._lock = threading.Lock()

    def run_cells(self, asked: Asked) -> None:
        """Runs all figures of all cells. An interrupted call leaves the rows of the runs that have ended."""
        # No simulation runs while an engine is measured.
        plans = {cell.name: self._planned(cell) for cell, _ in asked}
        with progress_of(self._console) as progress:
            self._progress = progress
            units = [(cell, system) for cell, systems in asked for system in systems]
            self._bar = progress.add_task("", total=sum(estimated_runs((each,), self._mode) for _, each in units))
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._processes, context, ignore_interrupts)
            threads = ThreadPoolExecutor(self._processes)
            try:
                searches = [threads.submit(self._search, cell, *plans[cell.name], system) for cell, system in units]
                for search in wait(searches, return_when=FIRST_EXCEPTION).done:
                    search.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                self._pool.shutdown(cancel_futures=True)

    @cached_property
    def _speed(self) -> MachineSpeed:
        """Made when the first engine is measured. One for all, because it remembers waits in vain."""
        return MachineSpeed(self._out)

    def _planned(self, cell: Cell) -> tuple[CellPlan, Calibration, Calibration]:
        def at_measuring() -> MachineSpeed:
            self._console.print(f"{cell.shape}: measuring the engine alone, after a wait for a quiet machine")
            self._speed.wait_until_quiet(ENGINE_WAIT_S)
            return self._speed

        plan, path = plan_in(self._out, cell, at_measuring)
        return plan, load_calibration(path), load_calibration(alone_path(path))

    def _search(self, cell: Cell, plan: CellPlan, calibration: Calibration, alone: Calibration, system: System) -> None:
        """Asks for the points of one system in one cell."""
        runs = 0

        def ask(system: System, variant: str, point: Point) -> RunRow:
            nonlocal runs
            runs += 1
            variant = variant if system is System.B0 else ""
            times = (calibration, alone, times_of(self._learnt, system))
            return self._row(SimulatedRun(cell, plan, self._mode, system, variant, point, *times))

        search = CellSearch(cell, plan, self._mode, ask)
        search.figures(system, UNCUT, search.short_capacity(UNCUT))
        with self._lock:
            self._expect(runs - estimated_runs((system,), self._mode))
            own = [row for row in self.file.rows if (row.cell, row.system) == (cell.name, system)]
        reached = [f"{each.figure} {amount(each.value)}" for each in figures_of(own, self._mode.name)]
        self._progress.console.print(f"{cell.name} {system}: {', '.join(reached)}", soft_wrap=True)

    def _row(self, run: SimulatedRun) -> RunRow:
        """The row of this run: from the file, or of a simulation."""
        known = self.file.attempts(run.key)
        if known:
            with self._lock:
                self._expect(-1)
            return known[0]
        self._progress.update(self._bar, description=f"simulating {run.cell.name} {run.system}")
        row, samples = self._pool.submit(simulate, run).result()
        with self._lock:
            self.file.add(row, samples)
            self._progress.update(self._bar, advance=1)
        return row

    def _expect(self, more: int) -> None:
        """So many more runs are expected. The caller has the lock."""
        self._progress.update(self._bar, total=(self._progress.tasks[self._bar].total or 0) + more)


def ignore_interrupts() -> None:
    """Ctrl-C reaches every process. The first one ends the others when their runs have ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
