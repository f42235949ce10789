"""Which runs are played, in which order. Every run is a row of `runs.csv`; one that is there is not played again.

tuning     full inference at half load: the best variant, and whether it is as fast as the engine alone
guess      the rates of each load and system with a cache in virtual time
requests   the same on the broker, seed after seed, each search from the guess, or full inference, or the seed before
scores     cached scores of a sample against full inference, once for each load and system
history    the longest histories in virtual time
"""

from __future__ import annotations

import csv
import math
import time
import typing
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from relaygr.bench.headline.question import (
    HALF,
    LIVE,
    LOADS,
    TUNED,
    Asked,
    Effort,
    RunRow,
    System,
    highest_passing,
    lengths_around,
    rates_around,
    searched_at,
    snapped,
)
from relaygr.bench.headline.run import VIRTUAL, LiveBench, Machine, Point, play_virtually, tuning_points
from relaygr.bench.rows import append_rows
from relaygr.runtime.errors import RelayError

RUNS_A_SEARCH = 3
"""About."""
HISTORY_STEP = 1.1
SHORT = 1 / 4
"""The fixed rate of the histories is half of what the engine alone could do at this part of the median."""


RowT = TypeVar("RowT")


class TimeIsUpError(Exception):
    """The next run would end after the time that the user gave."""


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """The scores of a run compared with full inference's."""

    effort: str
    load: float
    system: str
    compared: int
    different: int
    worst_error: float


class Rows:
    """The rows of a folder, and those that are added."""

    def __init__(self, folder: Path) -> None:
        """Raises RelayError for files of another version."""
        self._folder = folder
        self.runs = read_rows(folder / "runs.csv", RunRow)
        self.scores = read_rows(folder / "scores.csv", ScoreRow)

    def refuse_others(self, machine: str, broker: str) -> None:
        """Raises RelayError if the folder has runs of another machine, or on another broker."""
        for here, there in (
            (machine, {row.machine for row in self.runs}),
            (broker, {row.broker for row in self.runs} - {VIRTUAL}),
        ):
            if there - {here}:
                raise RelayError(
                    f"the runs in {self._folder} are of {', '.join(sorted(there))}, this is {here}: give another "
                    "folder with --out"
                )

    def add_run(self, row: RunRow) -> None:
        self.runs.append(row)
        append_rows(self._folder / "runs.csv", [_plain(row)])

    def add_scores(self, row: ScoreRow) -> None:
        self.scores.append(row)
        append_rows(self._folder / "scores.csv", [_plain(row)])


class Search:
    """All searches of one folder."""

    def __init__(self, rows: Rows, on: Machine, effort: Effort, progress: Progress, ends_s: float = math.inf) -> None:
        """`ends_s`: nothing begins that would end after this time (monotonic), but TimeIsUpError is raised."""
        self._rows, self._on, self._effort, self._progress, self._ends_s = rows, on, effort, progress, ends_s
        searches = len(_searched()) * len(effort.seeds)
        self._bar = progress.add_task("", total=len(effort.variants) + RUNS_A_SEARCH * searches)
        self._rates = rates_around(snapped(on.plan.full_rate_per_s / 2), effort.step)

    def live(self, bench: LiveBench) -> None:
        """Plays what is missing. Raises TimeIsUpError."""
        variant = self._tuned(bench)
        full = (LOADS[0], System.FULL)
        # Half load was measured, and what was learnt from it may make a guess too low.
        starts = {full: tuning_points(self._on.plan, self._effort)[0].rate_per_s}
        starts |= {key: self._guess(*key, variant) for key in _searched() if key != full}
        for seed in self._effort.seeds:
            for key in _searched():
                # Those that keep K,V carry at least what full inference does.
                starts[key] = max(starts[key], starts[full])
                starts[key] = self._search(bench, *key, variant, seed, starts[key]) or starts[key]

    def histories(self) -> None:
        """The longest history of each load and system at a fixed rate, in virtual time. Raises TimeIsUpError."""
        variant = tuned_variant(self._rows.runs, self._effort.name) or ""
        values = lengths_around(self._on.plan.history, HISTORY_STEP)
        plan = self._on.plan
        rate = snapped(HALF * 1e6 / plan.engine_us(self._on.alone.model, round(plan.history * SHORT)))
        for load in LOADS:
            for system in System:

                def passes(history: float, load: float = load, system: System = system) -> bool:
                    point = Point(Asked.HISTORY, load, system, _variant_of(system, variant), rate, 1, int(history))
                    return self._virtual(point).passed

                highest_passing(passes, values, plan.history * SHORT)

    def _tuned(self, bench: LiveBench) -> str:
        """The best variant of full inference. The first call also learns times for the simulation."""
        points = tuning_points(self._on.plan, self._effort)
        for point in points:
            self._asked(bench, point)
        variant = tuned_variant(self._rows.runs, self._effort.name)
        if variant is None:
            raise RelayError(
                "full inference had no valid run at half load, since the queries were sent late: other programs use "
                "this machine too much. Give the same command when they do not"
            )
        if not self._on.times_path(self._effort).exists():
            bench.learn_times(next(point for point in points if point.variant == variant))
        return variant

    def _guess(self, load: float, system: System, variant: str) -> float:
        """The highest rate in virtual time, where the live search starts."""
        own = _variant_of(system, variant)

        def passes(rate: float) -> bool:
            return self._virtual(Point(Asked.GUESS, load, system, own, rate, 1, self._on.plan.history)).passed

        return highest_passing(passes, self._rates, self._on.plan.full_rate_per_s / 2) or self._rates[0]

    def _search(self, bench: LiveBench, load: float, system: System, variant: str, seed: int, start: float) -> float:
        """The highest rate of a seed that passed. A run without a valid attempt ends the search."""
        variant = _variant_of(system, variant)
        passed: list[float] = []

        def point(rate: float) -> Point:
            return Point(Asked.REQUESTS, load, system, variant, rate, seed, self._on.plan.history)

        def passes(rate: float) -> bool:
            row = self._asked(bench, point(rate))
            if not row.valid:
                raise _InvalidRunError
            if row.passed:
                passed.append(rate)
            return row.passed

        with suppress(_InvalidRunError):
            highest_passing(passes, self._rates, start)
        if passed and system is not System.FULL:
            self._compare_scores(bench, point(max(passed)))
        bench.forget_records()
        return max(passed, default=0.0)

    def _compare_scores(self, bench: LiveBench, point: Point) -> None:
        known = {(row.effort, row.load, row.system) for row in self._rows.scores}
        key = (self._effort.name, point.load, point.system.value)
        if key in known or not bench.records_of(point).exists():
            return
        self._require_time(bench.expected_s(point))
        self._tell(f"{_named(point)}: comparing scores")
        found = bench.compare_scores(point)
        self._rows.add_scores(ScoreRow(*key, found.compared, found.different, found.worst_error))

    def _asked(self, bench: LiveBench, point: Point) -> RunRow:
        """The valid row of this run, or its last attempt. It is played if it is not there."""
        rows = self._there(point)
        for _ in range(self._effort.attempts):
            if any(row.valid for row in rows):
                break
            self._require_time(bench.expected_s(point))
            self._tell(_named(point))
            row = bench.play(point)
            self._rows.add_run(row)
            rows.append(row)
            self._progress.console.print(f"  {_named(point)}: {said(row)}", soft_wrap=True)
        bar = self._progress.tasks[self._bar]
        self._progress.update(self._bar, advance=1, total=max(bar.total or 0, bar.completed + 1))
        return next((row for row in rows if row.valid), rows[-1])

    def _virtual(self, point: Point) -> RunRow:
        rows = self._there(point)
        if not rows:
            self._require_time(0.0)
            self._tell(f"{_named(point)}: simulating")
            rows = [play_virtually(self._on, self._effort, point)]
            self._rows.add_run(rows[0])
        return rows[0]

    def _require_time(self, needed_s: float) -> None:
        if time.monotonic() + needed_s > self._ends_s:
            raise TimeIsUpError

    def _there(self, point: Point) -> list[RunRow]:
        key = (
            self._effort.name, point.asked.value, point.load, point.system.value, point.variant, point.history,
            self._on.plan.deadline_ms, point.rate_per_s, point.seed,
        )  # fmt: skip
        return [row for row in self._rows.runs if row.key == key]

    def _tell(self, text: str) -> None:
        self._progress.update(self._bar, description=text)


class _InvalidRunError(Exception):
    """All attempts of a run were invalid."""


def tuned_variant(rows: Iterable[RunRow], effort: str) -> str | None:
    """The variant of full inference with the fewest late requests at half load, then the lowest P99. None without a
    valid run.
    """
    own = [row for row in rows if (row.asked, row.effort) == (Asked.TUNING, effort) and row.valid]
    own.sort(key=lambda row: (row.late_share, row.p99_ms, list(TUNED).index(row.variant)))
    return own[0].variant if own else None


def said(row: RunRow) -> str:
    """The outcome of a run in words."""
    verdict = row.verdict if row.valid else f"does not count: sent {row.lag_p99_ms:.1f} ms late (P99)"
    # A query that is late is completed at one time, whenever its answer came.
    p99 = f"{row.p99_ms:.0f} ms" if row.p99_ms <= row.deadline_ms else "beyond the deadline"
    return f"{row.late} of {row.offered} late, P99 {p99}, {row.hits:.0%} hits: {verdict}"


def progress_bar(console: Console) -> Progress:
    """A bar that counts live runs."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        TextColumn("{task.completed:.0f} of about {task.total:.0f} runs,"),
        TimeElapsedColumn(),
        console=console,
    )


def _searched() -> list[tuple[float, System]]:
    """The loads and systems of the searches."""
    return [(load, system) for load in LOADS for system in LIVE if searched_at(system, load) == load]


def _variant_of(system: System, variant: str) -> str:
    return variant if system is System.FULL else ""


def _named(point: Point) -> str:
    return (
        f"{point.load:.0%} return, {point.system}, {point.rate_per_s:g}/s, {point.history:,} behaviours, "
        f"seed {point.seed}"
    )


def read_rows(path: Path, kind: type[RowT]) -> list[RowT]:
    """The rows of a file; none if it is absent. Raises RelayError for one of another version."""
    if not path.exists():
        return []
    types = typing.get_type_hints(kind)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [kind(**{name: read(line[name]) for name, read in types.items()}) for line in csv.DictReader(file)]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise RelayError(f"{path} does not have the rows of this version ({error!r}): move it away") from error


def _plain(row: Any) -> dict[str, Any]:
    return {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in asdict(row).items()}
