"""Plays live runs of a folder again in virtual time, and compares them.

Only runs at given rates are compared. The times to simulate them with are learnt from runs at other rates or histories,
never from their own, so nothing of what is compared was known.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from relaygr.bench.generator.samples import Sample, read_samples
from relaygr.bench.generator.trace import WARM_UP, read_trace
from relaygr.bench.headline.grid import BY_NAME, Cell
from relaygr.bench.headline.plan import alone_path, plan_in
from relaygr.bench.headline.points import RATES_MODE, Point, samples_path, trace_path
from relaygr.bench.headline.rows import AT_RATE, CHECKED, OF_LOG, RunFile, RunRow
from relaygr.bench.headline.run import progress_of
from relaygr.bench.headline.simulated import SimulatedRun, ignore_interrupts, play_simulated
from relaygr.bench.headline.systems import FLAGS, NOT_SIMULATED, System
from relaygr.bench.rows import append_rows
from relaygr.bench.simulated.agreement import Outcome, Row, outcome_of, row_of
from relaygr.cli.texts import plain_console
from relaygr.runtime.errors import RelayError
from relaygr.simulate.figures import requests_of
from relaygr.simulate.times import learn
from relaygr.worker.calibration import load_calibration

LEARNT_UP_TO = 0.6
"""Times are learnt from runs that used at most this part of the device. At a higher load requests are ranked in
batches, and each has the time of its whole batch."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A valid live run."""

    row: RunRow
    point: Point
    trace: Path
    samples: Sequence[Sample]
    """Without those of the warm-up."""


@dataclass(frozen=True, slots=True)
class LiveRuns:
    """The runs of one system at one rate and history, with different seeds."""

    cell: Cell
    system: System
    runs: list[LiveRun]

    @property
    def name(self) -> str:
        first = self.runs[0].row
        return f"{self.cell.name} {self.system} at {first.rate_per_s:g}/s, {first.history:,} behaviours"

    @property
    def device_use(self) -> float:
        return statistics.mean(run.row.device_use for run in self.runs)

    def teach(self, other: LiveRuns) -> bool:
        """Whether the times of the other runs are learnt from these."""
        ours, theirs = self.runs[0].row, other.runs[0].row
        is_alike = (
            FLAGS[self.system].reuse == FLAGS[other.system].reuse
            and self.cell.plan_name == other.cell.plan_name
            and ours.mode == theirs.mode
        )
        # C and R at one rate and history play the same requests.
        is_apart = (ours.history, ours.rate_per_s) != (theirs.history, theirs.rate_per_s)
        return is_alike and is_apart and self.device_use <= LEARNT_UP_TO


def compare_in_virtual_time(out: Path, processes: int) -> None:
    """Simulates the live runs of a folder on their own traces, and writes `CHECKED`.

    Raises RelayError if samples are gone, or if no runs have others to learn from.
    """
    console = plain_console()
    every = live_runs(out)
    asked: list[tuple[LiveRuns, list[SimulatedRun]]] = []
    for runs in every:
        try:
            asked.append((runs, _simulated(out, runs, [other for other in every if other.teach(runs)])))
        except RelayError as error:
            console.print(f"{runs.name}: not compared: {error}", soft_wrap=True)
    if not asked:
        raise RelayError(
            f"{out} has no live runs of one kind of system at two rates or histories, one of them at up to "
            f"{LEARNT_UP_TO:.0%} of its device: --rates plays more. Times are learnt at one and compared at the other"
        )
    rows: list[Row] = []
    written: list[dict[str, object]] = []
    for (runs, _), own in zip(asked, _played_again(console, asked, processes), strict=True):
        try:
            row = _compared(runs, [future.result() for future in own])
        except RelayError as error:
            console.print(f"{runs.name}: not compared: {error}", soft_wrap=True)
            continue
        first = runs.runs[0].row
        about = {"measured_at": first.measured_at, "code": first.code, "cell": first.cell, "history": first.history}
        rows.append(row)
        written.append(about | asdict(row) | {"verdict": row.verdict})
    (out / CHECKED).unlink(missing_ok=True)
    if written:
        append_rows(out / CHECKED, written)
    in_range = [row for row in rows if row.in_range]
    console.print(
        f"{sum(row.agrees for row in in_range)} of {len(in_range)} agree, {len(rows) - len(in_range)} are out of "
        f"range, {len(every) - len(rows)} were not compared: {out / CHECKED}",
        soft_wrap=True,
    )


def live_runs(out: Path) -> list[LiveRuns]:
    """What can be simulated of a folder, in the order of its first runs. Raises RelayError if samples are gone."""
    found: dict[tuple[object, ...], LiveRuns] = {}
    for row in RunFile(out).rows:
        is_asked = row.figure.startswith(AT_RATE) and OF_LOG not in row.mode and row.cell in BY_NAME
        if not is_asked or not row.valid or row.is_simulated or System(row.system) in NOT_SIMULATED:
            continue
        cell, system = BY_NAME[row.cell], System(row.system)
        point = Point(row.figure, row.history, row.rate_per_s, row.seed)
        trace = trace_path(out, cell, row.mode, point)
        path = samples_path(out, cell, row.mode, system, row.variant, point, row.attempt)
        for needed in (trace, path):
            if not needed.exists():
                raise RelayError(f"{needed} is gone, so its run cannot be compared: play the runs in a new folder")
        samples = [sample for sample in read_samples(path) if sample.part != WARM_UP]
        key = (row.mode, row.cell, row.system, row.variant, row.history, row.rate_per_s)
        found.setdefault(key, LiveRuns(cell, system, [])).runs.append(LiveRun(row, point, trace, samples))
    return list(found.values())


def _simulated(out: Path, runs: LiveRuns, others: Sequence[LiveRuns]) -> list[SimulatedRun]:
    """The same runs in virtual time, with times learnt from the others. Raises RelayError if these have too few
    requests.
    """
    cell = runs.cell
    plan, path = plan_in(out, cell)
    calibration, alone = load_calibration(path), load_calibration(alone_path(path))
    samples = itertools.chain.from_iterable(run.samples for other in others for run in other.runs)
    try:
        times = learn(samples, alone.model, cell.suffix + cell.candidates, f"other live runs of {out.name}")
    except RelayError as error:
        raise RelayError(f"{len(others)} others at a low load have too few requests to learn from") from error
    return [
        SimulatedRun(cell, plan, RATES_MODE, runs.system, run.row.variant, run.point, calibration, alone, times)
        for run in runs.runs
    ]


def _played_again(
    console: Console, asked: Sequence[tuple[LiveRuns, Sequence[SimulatedRun]]], processes: int
) -> list[list[Future[Outcome]]]:
    """The ended simulations of each, in the order of its runs."""
    context = multiprocessing.get_context("spawn")
    with progress_of(console) as progress, ProcessPoolExecutor(processes, context, ignore_interrupts) as pool:
        futures = [
            [pool.submit(_outcome, again, run.trace) for again, run in zip(simulated, runs.runs, strict=True)]
            for runs, simulated in asked
        ]
        every = list(itertools.chain.from_iterable(futures))
        for _ in progress.track(as_completed(every), len(every), description="simulating live runs"):
            pass
    return futures


def _outcome(run: SimulatedRun, trace: Path) -> Outcome:
    """The outcome of a simulated run on this trace."""
    samples = play_simulated(run, read_trace(trace))[0]
    return _outcome_of([sample for sample in samples if sample.part != WARM_UP], run.plan.deadline_ms)


def _compared(runs: LiveRuns, simulated: Sequence[Outcome]) -> Row:
    """`simulated`: of each run, in their order. Raises RelayError if a live run has no answers."""
    rows = [run.row for run in runs.runs]
    return row_of(
        runs.device_use,
        runs.system,
        rows[0].rate_per_s,
        [_outcome_of(run.samples, run.row.deadline_ms) for run in runs.runs],
        simulated,
        statistics.median(row.foreign_cpu for row in rows),
        max(row.slowdown for row in rows),
    )


def _outcome_of(samples: Sequence[Sample], deadline_ms: int) -> Outcome:
    return outcome_of(requests_of(samples), deadline_ms * 1000)
