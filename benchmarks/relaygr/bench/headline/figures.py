"""The figures of a report, as pure functions of the rows of `runs.csv`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relaygr.bench.headline.decision import LEAST_SEEDS, Decision, Interval, decide, paired_ratio
from relaygr.bench.headline.rows import RunRow
from relaygr.bench.headline.systems import System

LEAST_DEVICE_USE = 0.3
"""Figure B counts in cells where B0 uses at least this share of the device at its highest rate. At a lower share the
deadline, and not the work, limits B0."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The highest value of one figure that one system reached in one cell. `value` is the median over the seeds."""

    cell: str
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
    """The highest value at which the decision rule holds; None: nowhere, or too few seeds."""
    decision: Decision | None
    ratio: Interval | None
    """Paired with B0; None without a value of either."""


def figures_of(rows: Sequence[RunRow], mode: str) -> list[Reached]:
    """All figures of one mode, in the order of the rows."""
    own = [row for row in rows if row.mode == mode and row.figure in ("A", "B") and row.valid]
    groups: dict[tuple[str, str, float], list[RunRow]] = {}
    for row in own:
        groups.setdefault((row.cell, row.figure, row.rate_per_s if row.figure == "A" else 0.0), []).append(row)
    return [each for group, rows_of in groups.items() for each in _group(*group, rows_of)]


def _group(cell: str, figure: str, rate: float, rows: Sequence[RunRow]) -> list[Reached]:
    value_of: Callable[[RunRow], float] = (lambda row: row.history) if figure == "A" else (lambda row: row.rate_per_s)
    systems = list(dict.fromkeys(row.system for row in rows))
    reached = {
        system: {
            seed: highest([row for row in rows if row.system == system and row.seed == seed], value_of)
            for seed in sorted({row.seed for row in rows if row.system == system})
        }
        for system in systems
    }
    found = []
    for system in systems:
        own = [row for row in rows if row.system == system]
        decided, decision = _decided(own, value_of)
        base = reached.get(System.B0, {})
        found.append(
            Reached(
                cell,
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


def highest(rows: Sequence[RunRow], value_of: Callable[[RunRow], float]) -> float:
    """The highest value that passed below the lowest that failed; 0 if none did."""
    failed = min((value_of(row) for row in rows if not row.passed), default=float("inf"))
    return max((value_of(row) for row in rows if row.passed and value_of(row) < failed), default=0.0)


def _decided(rows: Sequence[RunRow], value_of: Callable[[RunRow], float]) -> tuple[float | None, Decision | None]:
    """The highest value at which the rule holds, and else what it said about the highest value with enough seeds."""
    last: Decision | None = None
    for value in sorted({value_of(row) for row in rows}, reverse=True):
        at = {row.seed: row for row in rows if value_of(row) == value}
        if len(at) < LEAST_SEEDS:
            continue
        decision = decide([row.late_share for row in at.values()])
        if decision.passed and all(row.passed for row in at.values()):
            return value, decision
        last = last or decision
    return None, last


def counts_for_b(figures: Sequence[Reached], rows: Sequence[RunRow], cell: str, mode: str) -> bool:
    """Whether the ratio of figure B counts in this cell."""
    base = next((each for each in figures if (each.cell, each.figure, each.system) == (cell, "B", System.B0)), None)
    if base is None or not base.value:
        return False
    at = [row for row in rows if _is(row, mode, cell, "B", System.B0) and row.rate_per_s in base.by_seed.values()]
    return bool(at) and statistics.median(row.device_use for row in at) >= LEAST_DEVICE_USE


def same_load(rows: Sequence[RunRow], mode: str, cell: str) -> list[RunRow]:
    """One row for each system at a rate of figure B that all of them were asked at: of these the one at which most
    passed, the highest if there are several; the first seed.
    """
    own = [row for row in rows if row.mode == mode and row.cell == cell and row.figure == "B" and row.valid]
    if not own:
        return []
    seed = min(row.seed for row in own)
    systems = list(dict.fromkeys(row.system for row in own))
    rates = [{row.rate_per_s for row in own if row.system == system and row.seed == seed} for system in systems]
    shared = set.intersection(*rates)
    if not shared:
        return []
    passed = {rate: sum(row.passed for row in own if row.seed == seed and row.rate_per_s == rate) for rate in shared}
    chosen = max(shared, key=lambda rate: (passed[rate], rate))
    at = {row.system: row for row in own if row.seed == seed and row.rate_per_s == chosen}
    return [at[system] for system in systems]


def _is(row: RunRow, mode: str, cell: str, figure: str, system: str) -> bool:
    return (row.mode, row.cell, row.figure, row.system, row.valid) == (mode, cell, figure, system, True)
