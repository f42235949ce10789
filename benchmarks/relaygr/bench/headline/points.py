"""The points that the figures of a cell ask for, whoever plays them: processes on a broker, or a simulation.

`CellSearch` asks for one point after the other, and `Ask` gives the row of each: from the file, or of a new run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from relaygr.bench.generator.samples import Sample
from relaygr.bench.generator.trace import WARM_UP, Trace
from relaygr.bench.generator.workload import Workload
from relaygr.bench.headline.decision import LEAST_SEEDS
from relaygr.bench.headline.figures import CONFIRMED, SEARCHED, Search, broken_in, decide_rows, search_of
from relaygr.bench.headline.grid import BY_NAME, LENGTH_FACTORS, PAGE_TOKENS, SHORT, Cell, plan_name_of
from relaygr.bench.headline.plan import CellPlan
from relaygr.bench.headline.rows import (
    AT_RATE,
    QUICK_NAME,
    SLOW_LIMIT,
    RunRow,
    Used,
    columns_of,
    measures_b0_once,
    score_columns,
)
from relaygr.bench.headline.search import Found, has_ended, highest_passing, snapped, values_around
from relaygr.bench.headline.systems import FLAGS, TUNED, UNCUT, System
from relaygr.bench.rows import code, machine, now

PARTITIONS = 8
A_LOADS = (0.3, 0.6, 0.8)
"""Figure A: parts of B0's capacity at the short history."""
FRESH_SEEDS = 1_000
"""Runs that confirm a value have the seeds of the search plus a multiple of this."""
CONFIRMATIONS = 6
RATE_FACTOR = 16
"""Rates are searched from the half load divided by this to the half load times this."""
EXPECTED_USE = 0.5
"""About the part of the device's time that a system uses at its limit: the first search starts there."""
ALIKE = 0.5
"""Systems whose shares of computed prefixes differ by less use about the same part of the device at their limits."""
START_ERROR = 1.5
"""The start of the first search of a system may be off by about this factor."""
WAIT_S = 120.0
"""A run that decides waits for so long, at most, until the machine is quiet."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How much is run."""

    name: str
    seeds: tuple[int, ...]
    seconds: float
    least_requests: int
    """A run at a low rate lasts longer, so that its P99 means something."""
    warm_up_s: float
    """Long enough for a flat share of hits and a flat P50: at first all users are cold, and the overload of that start
    would be measured. `warm_up_of` makes it longer where they are many."""
    resolution: float
    """Factor between the highest value that passed and the lowest that failed."""
    a_loads: tuple[float, ...]
    variants: tuple[str, ...]
    attempts: int
    """An invalid run says nothing, and is repeated up to so many times in all."""
    measures_short_capacity: bool
    """Whether figure A takes the capacity of B0 at the short history from a search; else the engine alone gives it."""
    wait_s: float = WAIT_S
    """A run waits for so long, at most, until the machine is quiet."""
    slow_limit: float = SLOW_LIMIT
    """A run with a higher slowdown is invalid."""
    longest: float = 5.0
    """A run lasts at most so many times as long."""
    a_systems: tuple[System, ...] = tuple(each for each in System if each is not System.B1)
    """Systems of which figure A is searched. The length of B1 is fixed."""

    def with_seeds(self, seeds: tuple[int, ...]) -> Mode:
        """With other seeds. If these are enough to decide, slow runs are invalid."""
        mode = replace(self, seeds=seeds)
        return replace(mode, wait_s=WAIT_S, slow_limit=SLOW_LIMIT) if mode.decides else mode

    def at_any_speed(self) -> Mode:
        """For a machine that is never quiet: no run waits for a quiet machine, and slow runs count."""
        return replace(self, name=f"{self.name}-any-speed", wait_s=0.0, slow_limit=math.inf)

    @property
    def decides(self) -> bool:
        return len(self.seeds) >= LEAST_SEEDS

    def lends_b0(self, cell: Cell) -> bool:
        """Whether runs of B0 in the cell of the plan stand for those in this one."""
        base = BY_NAME.get(cell.plan_name)
        return measures_b0_once(self.name) and base is not None and cell.reuse < base.reuse

    def seconds_at(self, rate_per_s: float) -> float:
        """The measured part of a run at this rate."""
        return min(max(self.seconds, self.least_requests / rate_per_s), self.longest * self.seconds)


QUICK_MODE = Mode(
    QUICK_NAME, (1,), 6.0, 100, 7.0, 1.4, (0.3,), (UNCUT,), 2, False, wait_s=0.0, slow_limit=math.inf,
    a_systems=(System.B0, System.R),
)  # fmt: skip
"""With one seed it decides nothing, so a noisy machine shows in its report, and ends no search."""
FULL_MODE = Mode("full", tuple(range(1, 8)), 120.0, 1_000, 60.0, 1.05, A_LOADS, tuple(TUNED), 3, True)
LEARNING_MODE = Mode("learning", (0,), 30.0, 0, 5.0, 2.0, (), (UNCUT,), 1, False)
TRACE_MODE = replace(QUICK_MODE, name="trace")
"""A trace says itself how long a run is; the number of seeds is that of repeated runs."""
RATES_MODE = Mode("rates", (1,), 30.0, 1_000, 60.0, 2.0, (), (UNCUT,), 3, False)
SIMULATED_MODE = Mode("simulated", (1,), 20.0, 1_000, 60.0, 1.1, (0.3, 0.6), (UNCUT,), 1, False, longest=math.inf)
_SEARCHING = (QUICK_MODE, FULL_MODE, SIMULATED_MODE)


@dataclass(frozen=True, slots=True)
class Point:
    """One question to the systems."""

    figure: str
    history: int
    rate_per_s: float
    seed: int


def points_at(cell: Cell, rates_per_s: Sequence[float], histories: Sequence[int], seeds: Sequence[int]) -> list[Point]:
    """These rates without a search, at these histories; without any, at the cell's."""
    return [
        Point(f"{AT_RATE}{rate:g}", history, rate, seed)
        for history in histories or (cell.history,)
        for rate in map(snapped, rates_per_s)
        for seed in seeds
    ]


Asked = Sequence[tuple[Cell, Sequence[System]]]
"""Cells, and the systems of each."""
Ask = Callable[[System, str, Point], RunRow]
"""The row of a system, in a variant, at a point."""
AskAt = Callable[[str, int, float], RunRow]
"""The row of a figure, with a seed, at a value."""


def warm_up_of(cell: Cell, plan: CellPlan, point: Point, mode: Mode) -> float:
    """The seconds before the measured part of a run: those of the mode, up to twice as many where that is too short for
    the returning users to come and for the device to compute the prefix of each, beside its other work.
    """
    users = point.rate_per_s * cell.reuse * cell.return_gap_s
    needed_s = 3 * cell.return_gap_s + 2 * users * plan.latency.pre_us(point.history) / 1e6
    return min(max(mode.warm_up_s, needed_s if cell.reuse else 0.0), 2 * mode.warm_up_s)


def workload_of(cell: Cell, plan: CellPlan, point: Point, mode: Mode) -> Workload:
    """The load of a point: the same for all systems."""
    return Workload(
        seed=point.seed,
        rate_per_s=point.rate_per_s,
        seconds=mode.seconds_at(point.rate_per_s),
        warm_up_s=warm_up_of(cell, plan, point, mode),
        reuse=cell.reuse,
        return_gap_s=cell.return_gap_s,
        history_median=point.history,
        history_max=min(2 * point.history, cell.longest_history),
        lead_median_ms=plan.lead_ms,
        suffix=cell.suffix,
        candidates=cell.candidates,
        zipf=cell.zipf,
        history_sigma=cell.history_sigma,
        growth=cell.growth,
        burst_factor=cell.burst_factor,
        hot_user_share=cell.hot_user_share,
        partitions=PARTITIONS,
    )


def trace_name(cell: Cell, point: Point, mode: str) -> str:
    """The name of the trace of a point, with which the ids of its users begin."""
    return f"{cell.name}-n{point.history}-q{point.rate_per_s:g}-s{point.seed}-{mode}"


def trace_path(out: Path, cell: Cell, mode: str, point: Point) -> Path:
    """The file of the trace of a point in a folder."""
    return out / "traces" / f"{trace_name(cell, point, mode)}.parquet"


def samples_path(out: Path, cell: Cell, mode: str, system: System, variant: str, point: Point, attempt: int) -> Path:
    """The file of the samples of a run in a folder."""
    # Traces of two modes differ, and scores are compared on one trace.
    about = f"{point.figure}-n{point.history}-q{point.rate_per_s:g}-s{point.seed}-{mode}"
    about += f"-attempt{attempt}" if attempt > 1 else ""
    name = f"{cell.name}-{system}-{variant}-{about}".replace(" ", "_").replace(",", "").replace("/", "_")
    return out / "samples" / f"{name}.parquet"


def key_of(cell: Cell, mode: Mode, system: System, variant: str, point: Point) -> tuple[object, ...]:
    """As `RunRow.key`."""
    asked = (point.figure, system.value, variant, point.history, point.rate_per_s, point.seed)
    return (mode.name, cell.name, *asked)


def row_of(
    cell: Cell,
    plan: CellPlan,
    mode: Mode,
    system: System,
    variant: str,
    point: Point,
    trace: Trace,
    samples: Sequence[Sample],
    used: Used,
    *,
    broker: str,
    reuse: float,
    attempt: int = 1,
    reference: Sequence[Sample] = (),
) -> RunRow:
    """The row of a run. `reference`: samples of the same trace whose scores are full inference's."""
    scored = cell.suffix + cell.candidates
    engine_us = {each.row: plan.full_us(each.history_length, scored, cell.history) for each in samples}
    measured = trace.retrieval_us[trace.part != WARM_UP]
    seconds = max(1e-3, float(measured.max() - measured.min()) / 1e6)
    return RunRow(
        measured_at=now(),
        machine=machine(),
        code=code(),
        broker=broker,
        mode=mode.name,
        cell=cell.name,
        figure=point.figure,
        system=system.value,
        variant=variant,
        history=point.history,
        rate_per_s=point.rate_per_s,
        seed=point.seed,
        attempt=attempt,
        **columns_of(samples, plan.deadline_ms, seconds, reuse, used, engine_us, mode.slow_limit),
        **score_columns(samples, reference, FLAGS[system].score_tolerance),
    )


def estimated_runs(systems: Sequence[System], mode: Mode) -> int:
    """About how many runs one cell takes."""
    further = math.floor(math.log2(max(1.0, math.log(START_ERROR) / math.log(mode.resolution))))
    first, again = 3 + 2 * further, 3
    search = first + again * (len(mode.seeds) - 1)
    tuning = len(mode.variants) if System.B0 in systems and len(mode.variants) > 1 else 0
    # A run at half load, which tells the search of B0 more than those of the others.
    rates = len(systems) * search - (System.B0 in systems)
    lengths = len(set(systems).intersection(mode.a_systems)) * len(mode.a_loads)
    short = first if mode.measures_short_capacity else 0
    decided = (len(systems) + lengths) * len(mode.seeds) if mode.decides else 0
    return tuning + rates + lengths * search + short + decided


class NotMeasuredError(Exception):
    """All attempts of a run were invalid, so nothing is known about its system. The report says so."""


class FoundUses:
    """The parts of the device's time that systems used at the limits that searches found. The cells of one plan share
    them, so that a search starts near its answer.
    """

    def __init__(self) -> None:
        self._found: dict[str, dict[float, float]] = {}
        """Uses by the share of computed prefixes, by figure."""

    def add(self, figure: str, computed: float, use: float) -> None:
        """`computed`: the share of requests whose prefix the system has to compute."""
        self._found.setdefault(figure, {})[computed] = use

    def near(self, figure: str, computed: float) -> float | None:
        """The use of the most alike search; None if none was alike."""
        found = self._found.get(figure, {})
        nearest = min(found, key=lambda each: abs(each - computed), default=math.inf)
        return found[nearest] if abs(nearest - computed) < ALIKE else None


class CellSearch:
    """The searches of one cell. One that meets a run without a valid attempt ends there, without a value."""

    def __init__(
        self,
        cell: Cell,
        plan: CellPlan,
        mode: Mode,
        ask: Ask,
        uses: FoundUses | None = None,
        compares: bool = True,
    ) -> None:
        """`compares`: whether each system is first asked at half load. There the report compares what the systems cost,
        and sees whether B0 is honest.
        """
        self._cell, self._plan, self._mode, self._ask = cell, plan, mode, ask
        self._uses, self._compares = uses or FoundUses(), compares

    def tuned(self) -> str:
        """The variant of B0 with the lowest latency at half load."""
        if len(self._mode.variants) == 1:
            return self._mode.variants[0]
        point = Point("tune", self._cell.history, self._plan.half_rate_per_s, self._mode.seeds[0])
        rows = {name: self._ask(System.B0, name, point) for name in self._mode.variants}
        valid = [name for name, row in rows.items() if row.valid]
        return min(valid, key=lambda name: (rows[name].late_share, rows[name].p99_ms), default=self._mode.variants[0])

    def short_capacity(self, variant: str) -> float:
        """The capacity of B0 at the short history."""
        if not self._mode.measures_short_capacity:
            return self._plan.short_rate_per_s(1.0)
        history, seed = round(self._cell.history * SHORT), self._mode.seeds[0]
        start = self._plan.short_rate_per_s(EXPECTED_USE)
        with suppress(NotMeasuredError):
            found = highest_passing(
                lambda rate: self._measured(System.B0, variant, Point("short", history, rate, seed)).passed,
                self._rates_around(start),
                start,
            )
            return found.passed or start
        return start

    def _measured(self, system: System, variant: str, point: Point) -> RunRow:
        row = self._ask(system, variant, point)
        if not row.valid:
            raise NotMeasuredError
        return row

    def figures(self, system: System, variant: str, short_rate: float) -> None:
        """Asks for the points of both figures. `short_rate`: the capacity of B0 at the short history."""
        cell, mode, half = self._cell, self._mode, self._plan.half_rate_per_s
        computed = self._computed(system)
        # The oracle's prefixes cost nothing: its limits say nothing about those of others, nor theirs about its own.
        uses = FoundUses() if system is System.O else self._uses

        def at_rate(figure: str, seed: int, rate: float) -> RunRow:
            return self._measured(system, variant, Point(figure, cell.history, rate, seed))

        def at_history(rate: float, figure: str, seed: int, history: float) -> RunRow:
            return self._measured(system, variant, Point(figure, int(history), rate, seed))

        use_in_b = EXPECTED_USE
        with suppress(NotMeasuredError):
            per_request_s = self._device_us(system, cell.history) / 1e6
            start = (uses.near("B", computed) or EXPECTED_USE) / per_request_s
            if self._compares:
                start = (max if at_rate("B", mode.seeds[0], half).passed else min)(start, half)
            reached = self._search("B", self._rates_around(half), start, at_rate)
            if reached:
                use_in_b = reached * per_request_s
                if system is not System.B1:  # It computes less than `computed` says.
                    uses.add("B", computed, use_in_b)
        if system not in mode.a_systems:
            return
        # A cache loses prefixes, which `_device_us` leaves out. How many, the rates tell.
        most = min(EXPECTED_USE, use_in_b) if FLAGS[system].reuse else EXPECTED_USE
        lengths = _lengths_of(cell, mode.resolution)
        for load in mode.a_loads:
            rate = snapped(load * short_rate)
            use = uses.near("A", computed) or most
            fitting = [each for each in lengths if rate * self._device_us(system, int(each)) <= use * 1e6]
            found = self._search("A", lengths, max(fitting, default=lengths[0]), partial(at_history, rate))
            if found:
                uses.add("A", computed, rate * self._device_us(system, int(found)) / 1e6)

    def highest_rate_per_s(self, system: System) -> float:
        """About the highest rate that the search of B asks for: it may double a rate that filled the device."""
        return min(2e6 / self._device_us(system, self._cell.history), RATE_FACTOR * self._plan.half_rate_per_s)

    def _rates_around(self, rate_per_s: float) -> list[float]:
        return _rates_around(rate_per_s, self._mode.resolution)

    def _device_us(self, system: System, history: int) -> float:
        """Device time for each request if the cache holds every prefix until its user comes again."""
        latency, scored = self._plan.latency, self._cell.suffix + self._cell.candidates
        return latency.hit_us(history, scored) + self._computed(system) * latency.pre_us(history)

    def _computed(self, system: System) -> float:
        """The share of requests whose prefix the system computes, if the cache holds all others."""
        if system is System.O:
            return 0.0
        return 1.0 - self._cell.reuse if FLAGS[system].reuse else 1.0

    def _search(self, figure: str, values: Sequence[float], start: float, ask: AskAt) -> float | None:
        """Searches with each seed, and decides about what was found. Returns the last value that was found."""
        found: list[Found] = []
        for seed in self._mode.seeds:

            def passes(value: float, seed: int = seed) -> bool:
                return ask(figure, seed, value).passed

            with suppress(NotMeasuredError):
                found.append(highest_passing(passes, values, start))
            if not found:
                continue
            # The next seed's answer is near.
            start = found[-1].passed or values[0]
        reached = [each.passed for each in found if each.passed is not None]
        if self._mode.decides and len(reached) == len(self._mode.seeds):
            with suppress(NotMeasuredError):
                self._confirm(CONFIRMED[figure], [each for each in values if each <= min(reached)], ask)
        return found[-1].passed if found else None

    def _confirm(self, figure: str, values: Sequence[float], ask: AskAt) -> None:
        """Decides about the highest of the values, and goes lower until the decision rule holds.

        The search chose a value because its runs passed, so those runs overrate it. Each decision therefore has seeds
        that no other run had.
        """
        for step, value in enumerate(reversed(values[-CONFIRMATIONS:]), start=1):
            rows = [ask(figure, seed + step * FRESH_SEEDS, value) for seed in self._mode.seeds]
            if decide_rows(rows).passed:
                return


def unfinished_in(rows: Sequence[RunRow], mode: str, plans: Mapping[str, CellPlan]) -> list[Search]:
    """The searches of the mode of this name that would ask for a further run. Nothing is known without the plan of a
    cell, so its searches count as finished.
    """
    found: dict[Search, dict[float, bool]] = {}
    for row in rows:
        if row.mode == mode and row.figure in SEARCHED and row.valid:
            value = row.history if row.figure == "A" else row.rate_per_s
            found.setdefault(search_of(row), {})[value] = row.passed
    resolution = next((each.resolution for each in _SEARCHING if f"{mode}-".startswith(f"{each.name}-")), None)
    broken, unfinished = broken_in(rows, mode), []
    for search, passed in found.items():
        cell, plan = BY_NAME.get(search.cell), plans.get(plan_name_of(search.cell))
        if cell is None or plan is None or resolution is None or search in broken:
            continue
        is_of_lengths = search.figure == "A"
        values = _lengths_of(cell, resolution) if is_of_lengths else _rates_around(plan.half_rate_per_s, resolution)
        if not has_ended(passed, values):
            unfinished.append(search)
    return unfinished


def _lengths_of(cell: Cell, resolution: float) -> list[float]:
    shortest, longest = (cell.history * factor for factor in LENGTH_FACTORS)
    return values_around(cell.history * SHORT, resolution, shortest, longest, _whole_pages)


def _rates_around(rate_per_s: float, resolution: float) -> list[float]:
    return values_around(rate_per_s, resolution, rate_per_s / RATE_FACTOR, rate_per_s * RATE_FACTOR, snapped)


def _whole_pages(history: float) -> int:
    return max(1, round(history / PAGE_TOKENS)) * PAGE_TOKENS
