"""The figures of a report, as pure functions of the rows of `runs.csv`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from relaygr.bench.headline.decision import LEAST_SEEDS, Decision, Interval, decide, paired_ratio
from relaygr.bench.headline.grid import plan_name_of
from relaygr.bench.headline.rows import RunRow, measures_b0_once
from relaygr.bench.headline.search import Found
from relaygr.bench.headline.systems import System

SEARCHED = ("A", "B")
CONFIRMED = {figure: f"{figure} confirmed" for figure in SEARCHED}
"""The names of the runs with fresh seeds that confirm what a search found."""
LEAST_DEVICE_USE = 0.3
"""Figure B counts in cells where B0 uses at least this share of the device at its highest rate. At a lower share the
deadline, and not the work, limits B0."""
NO_LENGTHS = "No figure A: the users of a log have histories of their own lengths, so no search can choose the length."


@dataclass(frozen=True, slots=True)
class Reached:
    """The highest value of one figure that one system reached in one cell. `value` is the median over the seeds."""

    cell: str
    measured_in: str
    """The cell whose runs these are: for B0 perhaps the one of the plan (`measures_b0_once`)."""
    system: str
    figure: str
    rate_per_s: float
    """Figure A: the fixed rate. Figure B: 0."""
    by_seed: dict[int, float]
    value: float
    """0 if no run passed."""
    is_at_least: bool
    """Whether no run failed, so that the value is that of the search's upper end."""
    decided: float | None
    """The highest value at which the decision rule holds with fresh seeds; None: nowhere, or too few seeds."""
    decision: Decision | None
    """The decision at `decided`, or else at the highest value that had runs with enough fresh seeds."""
    ratio: Interval | None
    """Paired with B0; None without a value of either."""


@dataclass(frozen=True, slots=True)
class Search:
    """One search: of a figure, with a seed."""

    cell: str
    system: str
    figure: str
    rate_per_s: float
    """As in `Reached`."""
    seed: int


def broken_in(rows: Sequence[RunRow], mode: str) -> list[Search]:
    """The searches of a mode that ended at a run without a valid attempt, and the choices before them (tune, short)."""
    own = [row for row in rows if row.mode == mode and row.figure in (*SEARCHED, "tune", "short")]
    valid = {row.key for row in own if row.valid}
    return list(dict.fromkeys(search_of(row) for row in own if row.key not in valid))


def search_of(row: RunRow) -> Search:
    return Search(row.cell, row.system, row.figure, row.rate_per_s if row.figure == "A" else 0.0, row.seed)


def figures_of(rows: Sequence[RunRow], mode: str, unfinished: Iterable[Search] = ()) -> list[Reached]:
    """All figures of one mode, in the order of the rows, of the searches that are neither broken nor `unfinished`.

    In a mode that measures B0 once, cells without runs of B0 have those of the cell of their plan.
    """
    without = {*broken_in(rows, mode), *unfinished}
    own = [row for row in rows if row.mode == mode and row.valid and search_of(row) not in without]
    with_b0 = {row.cell for row in rows if row.mode == mode and row.system == System.B0}

    def grouped(names: Mapping[str, str]) -> dict[tuple[str, str, float], list[RunRow]]:
        groups: dict[tuple[str, str, float], list[RunRow]] = {}
        for row in own:
            if row.figure in names:
                figure = names[row.figure]
                groups.setdefault((row.cell, figure, row.rate_per_s if figure == "A" else 0.0), []).append(row)
        for (cell, figure, rate), found in groups.items():
            if measures_b0_once(mode) and cell not in with_b0:
                lender = groups.get((plan_name_of(cell), figure, rate), [])
                found[:0] = [row for row in lender if row.system == System.B0]
        return groups

    confirming = grouped({confirmed: figure for figure, confirmed in CONFIRMED.items()})
    searched = grouped({figure: figure for figure in SEARCHED})
    return [each for key, found in searched.items() for each in _group(*key, found, confirming.get(key, []))]


def _group(cell: str, figure: str, rate: float, rows: Sequence[RunRow], confirming: Sequence[RunRow]) -> list[Reached]:
    value_of: Callable[[RunRow], float] = (lambda row: row.history) if figure == "A" else (lambda row: row.rate_per_s)
    systems = list(dict.fromkeys(row.system for row in rows))
    reached = {
        system: {
            seed: highest({value_of(row): row.passed for row in rows if (row.system, row.seed) == (system, seed)})
            for seed in sorted({row.seed for row in rows if row.system == system})
        }
        for system in systems
    }
    found = []
    for system in systems:
        own = [row for row in rows if row.system == system]
        decided, decision = _decided([row for row in confirming if row.system == system], value_of)
        base = reached.get(System.B0, {})
        found.append(
            Reached(
                cell,
                own[0].cell,
                system,
                figure,
                rate,
                reached[system],
                statistics.median(reached[system].values()),
                all(row.passed for row in own),
                decided,
                decision,
                paired_ratio(reached[system], base) if system != System.B0 else None,
            )
        )
    return found


def highest(passed: Mapping[float, bool]) -> float:
    """The highest value that passed below the lowest that failed; 0 if none did. The rule for one run at each value,
    and for a decision at each.
    """
    return limits_of(passed).passed or 0.0


def limits_of(passed: Mapping[float, bool]) -> Found:
    """The highest value that passed below the lowest that failed, and that one."""
    failed = min((value for value, has in passed.items() if not has), default=None)
    below = (value for value, has in passed.items() if has and (failed is None or value < failed))
    return Found(max(below, default=None), failed)


def _decided(rows: Sequence[RunRow], value_of: Callable[[RunRow], float]) -> tuple[float | None, Decision | None]:
    decisions: dict[float, Decision] = {}
    for value in sorted({value_of(row) for row in rows}):
        at = [row for row in rows if value_of(row) == value]
        if len(at) >= LEAST_SEEDS:
            decisions[value] = decide_rows(at)
    if not decisions:
        return None, None
    best = highest({value: decision.passed for value, decision in decisions.items()})
    return (best, decisions[best]) if best else (None, decisions[max(decisions)])


def decide_rows(rows: Sequence[RunRow]) -> Decision:
    """The decision rule on one row for each seed: a run may also fail for another reason than late requests."""
    decision = decide([row.late_share for row in rows])
    failed = next((row for row in rows if not row.passed), None)
    if decision.passed and failed is not None:
        return replace(decision, passed=False, why=f"seed {failed.seed} did not pass")
    return decision


def longest_truncation(figures: Sequence[Reached], cell: str, decides: bool) -> int:
    """The longest history of B1: the longest at which B0 meets the deadline in figure A, as decided, or in a mode that
    decides nothing the median of the seeds. 0: there is none.
    """
    base = [each for each in figures if (each.cell, each.figure, each.system) == (cell, "A", System.B0)]
    return int(max((each.decided or 0 if decides else each.value for each in base), default=0))


def counts_for_b(figures: Sequence[Reached], rows: Sequence[RunRow], cell: str, mode: str) -> bool:
    """Whether the ratio of figure B counts in this cell."""
    return device_use_of_b0(figures, rows, cell, mode) >= LEAST_DEVICE_USE


def device_use_of_b0(figures: Sequence[Reached], rows: Sequence[RunRow], cell: str, mode: str) -> float:
    """The share of the device that B0 uses at its highest rate; NaN if it has none."""
    base = next((each for each in figures if (each.cell, each.figure, each.system) == (cell, "B", System.B0)), None)
    if base is None or not base.value:
        return math.nan
    return statistics.median(row.device_use for row in rows_at_highest(base, rows, mode))


def rows_at_highest(reached: Reached, rows: Sequence[RunRow], mode: str) -> list[RunRow]:
    """The runs of figure B at the highest rate of each seed that passed."""
    own = (row for row in rows if _is(row, mode, reached.measured_in, "B") and row.system == reached.system)
    return [row for row in own if row.rate_per_s == reached.by_seed.get(row.seed)]


def same_load(rows: Sequence[RunRow], mode: str, cell: str, systems: Sequence[str] = ()) -> list[RunRow]:
    """One row for each system (without `systems`: for all that there are) at a rate of figure B that all of them were
    asked at: of these the one at which most passed, the highest if there are several; the first seed.
    """
    own = [row for row in rows if _is(row, mode, cell, "B") and (not systems or row.system in systems)]
    if not own:
        return []
    seed = min(row.seed for row in own)
    names = list(systems or dict.fromkeys(row.system for row in own))
    rates = [{row.rate_per_s for row in own if row.system == system and row.seed == seed} for system in names]
    shared = set.intersection(*rates)
    if not shared:
        return []
    passed = {rate: sum(row.passed for row in own if row.seed == seed and row.rate_per_s == rate) for rate in shared}
    chosen = max(shared, key=lambda rate: (passed[rate], rate))
    at = {row.system: row for row in own if row.seed == seed and row.rate_per_s == chosen}
    return [at[system] for system in names]


def _is(row: RunRow, mode: str, cell: str, figure: str) -> bool:
    return (row.mode, row.cell, row.figure, row.valid) == (mode, cell, figure, True)
