"""The first tables of a report: the value that each system reached at each share of returning users, and its cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from relaygr.bench.headline.decision import Interval, paired_ratio
from relaygr.bench.headline.document import Block, Bullets, Grid, Text
from relaygr.bench.headline.figures import (
    LEAST_DEVICE_USE,
    Reached,
    decide_rows,
    device_use_of_b0,
    limits_of,
    rows_at_highest,
    same_load,
)
from relaygr.bench.headline.grid import BY_NAME, GRID_NAMES, Cell, family_name_of, plan_name_of
from relaygr.bench.headline.plan import CellPlan
from relaygr.bench.headline.rows import AT_RATE, SLOW_LIMIT, RunRow, paths_at
from relaygr.bench.headline.systems import FLAGS, System
from relaygr.schemas.messages import Path as RankingPath
from relaygr.worker.settings import WorkerSettings

K = TypeVar("K")
BASELINE_LIMIT = 1.1
"""B0's time in the worker, as a multiple of the engine alone, above which it is no honest baseline."""
HIT_FACTOR = 1.2
"""Pre-infer may make the P99 of hits longer by this factor, and by the time of one chunk."""
CHUNK_MS: float = WorkerSettings.model_fields["longest_chunk_ms"].default
_TITLES = {"A": "A: longest history at {:g}/s", "B": "B: requests/s"}


def by_reuse(rows: Sequence[RunRow], figures: Sequence[Reached], mode: str) -> Grid:
    """R and B0 in each figure of a mode; `rows` may have others. Cells that differ in the share of returning users
    alone stand together.

    The costs are those of runs of figure B on the same trace. Without such runs, as where B0 was measured in another
    cell, each system has those at its own highest rate.
    """
    lines = []
    for relay in sorted((each for each in figures if each.system == System.R), key=_place):
        same = [each for each in figures if _question(each) == _question(relay)]
        base = next((each for each in same if each.system == System.B0), None)
        if base is None:
            continue
        measured = statistics.median(
            row.reuse
            for row in rows
            if (row.mode, row.cell, row.system, row.figure) == (mode, relay.cell, System.R, relay.figure) and row.valid
        )
        cell = BY_NAME.get(relay.cell)
        lines.append(
            [
                (cell.plan_name if cell is not None else relay.cell),
                _TITLES[relay.figure].format(relay.rate_per_s),
                f"{cell.reuse:g}" if cell is not None else "-",
                f"{measured:.2f}",
                reached(base),
                amount(relay.value),
                ratio(relay.ratio, len(relay.by_seed)),
                _use_of_b0(figures, rows, relay.cell, mode) if relay.figure == "B" else "",
                *(_costs(base, relay, rows, mode) if relay.figure == "B" else ("", "", "")),
            ]
        )
    header = (
        "cell", "figure", "reuse asked for", "reuse of the traces", "B0", "R", "R / B0, 95 %", "device use of B0",
        "hits of R", "prefixes wasted", "device s per 1,000: B0, R",
    )  # fmt: skip
    return Grid(header, lines)


def measured_once(figures: Sequence[Reached]) -> list[Block]:
    """Where B0 was measured, if that is another cell."""
    others = dict.fromkeys(each.measured_in for each in figures if each.measured_in != each.cell)
    if not others:
        return []
    return [
        Text(
            f"B0 was measured in {', '.join(others)} alone, and scores are compared there. The traces of the cells "
            "with fewer returning users have the same times and lengths, only other users: for B0 they are the same "
            "work."
        )
    ]


def at_rates(rows: Sequence[RunRow]) -> Grid:
    """How each system met the deadline at the rates that were played without a search, by the decision rule. A seed at
    which a system was played at several values chose one of them, so it does not decide.
    """
    systems, lines = list(System), []
    values: dict[tuple[str, str, int], set[tuple[int, float]]] = {}
    asked: dict[tuple[str, int, int, float], set[int]] = {}

    def key_of(row: RunRow) -> tuple[str, int, int, float]:
        return row.cell, row.history, systems.index(System(row.system)), row.rate_per_s

    for row in rows:
        if row.figure.startswith(AT_RATE):
            values.setdefault((row.cell, row.system, row.seed), set()).add((row.history, row.rate_per_s))
            asked.setdefault(key_of(row), set()).add(row.seed)
    played = _played(rows, key_of)
    for key, seeds in sorted(asked.items()):
        (cell, history, system, rate), those = key, played.get(key, [])
        passed = f"{sum(row.passed for row in those)} of {len(those)}"
        late = f"{statistics.mean(row.late_share for row in those):.2%}" if those else "-"
        name = systems[system].value
        fresh = [row for row in those if len(values[cell, row.system, row.seed]) == 1]
        why = decide_rows(fresh).why if fresh else "no fresh seed"
        invalid = len(seeds - {row.seed for row in those})
        use = share(statistics.mean(row.device_use for row in those) if those else math.nan)
        deadlines = "; ".join(f"{deadline} ms" for deadline in sorted({row.deadline_ms for row in those})) or "-"
        asked_for = [cell, deadlines, f"{history:,}", name, f"{rate:g}"]
        lines.append([*asked_for, use, passed, str(invalid), late, str(len(fresh)), why])
    header = (
        "cell", "deadline", "history", "system", "requests/s", "device use, mean", "seeds that passed",
        "seeds without a valid run", "late, mean of all seeds", "fresh seeds", "decision of the fresh seeds",
    )  # fmt: skip
    return Grid(header, lines)


def limits_by_seed(rows: Sequence[RunRow]) -> Grid:
    """What each seed reached where it was played at several values without a search: the highest rate at a length, or
    the longest history at a rate, that passed below the lowest that failed. Ratios are paired by seed, and to systems
    on as many threads.

    A seed counts only if it passed at one value and failed at a higher one: else its limit is not known. Shown only
    where two systems have such seeds.
    """
    by_length = _limits(rows, lambda row: (row.cell, row.history), lambda row: row.rate_per_s)
    by_rate = _limits(rows, lambda row: (row.cell, row.rate_per_s), lambda row: row.history)
    asked = [(cell, f"requests/s at {history:,.0f} behaviours", found) for (cell, history), found in by_length]
    asked += [(cell, f"longest history at {rate:g}/s", found) for (cell, rate), found in by_rate]
    present = {system for _, _, found in asked for system in found}
    others = [system for system in (System.B0, System.B0_THREADS, System.C) if system in present]
    lines = []
    for cell, question, found in sorted(asked, key=lambda each: each[0]):
        for system, limits in found.items():
            over = [
                ratio(paired_ratio(limits.passed, found[other].passed), len(limits.passed))
                if other in found and other is not system and _threads(other) == _threads(system)
                else ""
                for other in others
            ]
            told = "; ".join(
                f"{seed}: {amount(passed)}, not {amount(limits.failed[seed])}"
                for seed, passed in sorted(limits.passed.items())
            )
            median, counted = statistics.median(limits.passed.values()), f"{len(limits.passed)} of {limits.played}"
            lines.append([cell, question, system.value, counted, amount(median), *over, told])
    header = (
        "cell", "asked", "system", "seeds that count", "their median", *(f"over {each}, 95 %" for each in others),
        "each seed: passed, and failed",
    )  # fmt: skip
    return Grid(header, lines)


@dataclass(frozen=True, slots=True)
class _Limits:
    """Between which values the limits of a system lie, by seed."""

    passed: dict[int, float]
    failed: dict[int, float]
    """The lowest value that failed, of the same seeds."""
    played: int
    """How many seeds were played, also at one value alone."""


def _limits(
    rows: Sequence[RunRow], key_of: Callable[[RunRow], tuple[str, float]], value_of: Callable[[RunRow], float]
) -> list[tuple[tuple[str, float], dict[System, _Limits]]]:
    """The limits of each system by key, where two systems have some."""
    found: list[tuple[tuple[str, float], dict[System, _Limits]]] = []
    for key, those in sorted(_played(rows, key_of).items()):
        limits: dict[System, _Limits] = {}
        for system in System:
            outcomes: dict[int, dict[float, bool]] = {}
            for row in those:
                if row.system == system:
                    outcomes.setdefault(row.seed, {})[value_of(row)] = row.passed
            passed, failed = {}, {}
            for seed, own in outcomes.items():
                each = limits_of(own)
                if each.passed is not None and each.failed is not None:
                    passed[seed], failed[seed] = each.passed, each.failed
            if passed:
                limits[system] = _Limits(passed, failed, len(outcomes))
        if len(limits) > 1:
            found.append((key, limits))
    return found


def _threads(system: System) -> object:
    return FLAGS[system].settings.get("worker.threads")


def _played(rows: Sequence[RunRow], key_of: Callable[[RunRow], K]) -> dict[K, list[RunRow]]:
    """The valid runs at rates that were played without a search, by key."""
    played: dict[K, list[RunRow]] = {}
    for row in rows:
        if row.valid and row.figure.startswith(AT_RATE):
            played.setdefault(key_of(row), []).append(row)
    return played


def against_others(figures: Sequence[Reached]) -> Grid:
    """R over the other systems that are no ablation of it, paired by seed."""
    others = (System.B1, System.C, System.O)
    present = [system for system in others if any(each.system == system for each in figures)]
    lines = []
    for relay in sorted((each for each in figures if each.system == System.R), key=_place):
        theirs = {each.system: each for each in figures if _question(each) == _question(relay)}
        if not any(system in theirs for system in present):
            continue
        ratios = [
            ratio(paired_ratio(relay.by_seed, theirs[system].by_seed), len(relay.by_seed)) if system in theirs else ""
            for system in present
        ]
        lines.append([relay.cell, _TITLES[relay.figure].format(relay.rate_per_s), *ratios])
    return Grid(("cell", "figure", *(f"R / {system.value}, 95 %" for system in present)), lines)


@dataclass(frozen=True, slots=True)
class ByCell:
    """A line for each cell, and what they say together."""

    table: Grid
    ratios: Bullets
    """The best, the median and the worst cell of each ratio, and its median at each share of returning users. If cells
    of the committed grid are there, of them alone.
    """


def by_cell(rows: Sequence[RunRow], figures: Sequence[Reached], mode: str) -> ByCell:
    """The figures of each cell, and their ratios."""
    cells = list(dict.fromkeys(each.cell for each in figures))
    most_rates = max((len(_of(figures, cell, "A", System.R)) for cell in cells), default=0)
    committed = set(GRID_NAMES).intersection(cells) or set(cells)
    ratios: dict[str, dict[str, float]] = {}
    lines = []
    for cell in cells:
        base, cache, relay = (_of(figures, cell, "B", each) for each in (System.B0, System.C, System.R))
        over_base, over_cache = _over(relay, base), _over(relay, cache)
        use, longest = device_use_of_b0(figures, rows, cell, mode), _of(figures, cell, "A", System.R)
        lengths = [_pair(_of(figures, cell, "A", System.B0), each) for each in longest]
        lines.append(
            [
                cell,
                *(reached(each[0]) if each else "" for each in (base, cache, relay)),
                _short(over_base),
                _short(over_cache),
                share(use),
                "" if math.isnan(use) or use >= LEAST_DEVICE_USE else "no",
                *lengths,
                *[""] * (most_rates - len(lengths)),
            ]
        )
        found = {
            "R / B0 in B, where it counts": over_base if use >= LEAST_DEVICE_USE else None,
            "R / B0 in B, all cells": over_base,
            "R / C in B": over_cache,
        } | {f"R / B0 in A at rate {number + 1}": each.ratio for number, each in enumerate(longest)}
        cached = _of(figures, cell, "A", System.C)
        for number, each in enumerate(longest):
            of_cache = _at(cached, each.rate_per_s)
            found[f"R / C in A at rate {number + 1}"] = _over([each], [of_cache] if of_cache else [])
        for name, interval in found.items():
            if interval is not None and cell in committed:
                ratios.setdefault(name, {})[cell] = interval.value
    header = (
        "cell", "B: B0", "C", "R", "R / B0", "R / C", "device use of B0", "counts",
        *(f"A at rate {number + 1}: B0, R (R / B0)" for number in range(most_rates)),
    )  # fmt: skip
    told = [f"{name}: {_extremes(values)}" for name, values in ratios.items()]
    return ByCell(Grid(header, lines), Bullets(told))


def by_family(rows: Sequence[RunRow], figures: Sequence[Reached], plans: Mapping[str, CellPlan], mode: str) -> Grid:
    """A line for all cells that differ in the share of returning users alone. Their values stand in the order of these
    shares.
    """
    systems = (System.B0, System.C, System.R)
    families: dict[Cell, dict[float, str]] = {}
    for name in dict.fromkeys(each.cell for each in figures):
        families.setdefault(BY_NAME[name].family, {})[BY_NAME[name].reuse] = name
    over = {each.cell: times(each.over_engine) for each in baselines(rows, plans)}
    most_rates = max((len(_of(figures, each.cell, "A", System.R)) for each in figures), default=0)

    def values_of(name: str) -> list[str]:
        in_b = [_at(_of(figures, name, "B", system)) for system in systems]
        # The rates of cells differ: those of the relay number them.
        rates = [each.rate_per_s for each in _of(figures, name, "A", System.R)]
        in_a = [_at(_of(figures, name, "A", system), rate) for rate in rates for system in systems]
        in_a += [None] * (len(systems) * (most_rates - len(rates)))
        told = [amount(each.value) if each else "-" for each in (*in_b, *in_a)]
        return [*told[: len(in_b)], share(device_use_of_b0(figures, rows, name, mode)), *told[len(in_b) :]]

    lines = []
    for members in families.values():
        cell = BY_NAME[members[max(members)]]
        lines.append(
            [
                family_name_of(cell.plan_name),
                ", ".join(f"{reuse:g}" for reuse in sorted(members)),
                *map("; ".join, zip(*(values_of(members[reuse]) for reuse in sorted(members)), strict=True)),
                over.get(cell.plan_name, "-"),
            ]
        )
    header = (
        "cell", "reuse", *(f"B: {system}" for system in systems), "B: device use of B0",
        *(f"A at rate {rate + 1}: {system}" for rate in range(most_rates) for system in systems),
        "B0 in the worker / engine alone",
    )  # fmt: skip
    return Grid(header, lines)


def _extremes(values: Mapping[str, float]) -> str:
    ordered = sorted(values, key=lambda cell: values[cell])
    places = (("best", ordered[-1]), ("median", ordered[(len(ordered) - 1) // 2]), ("worst", ordered[0]))
    told = ", ".join(f"{name} {values[cell]:.2f} ({cell})" for name, cell in places)
    below, well_above = sum(value < 1 for value in values.values()), sum(value >= 1.5 for value in values.values())
    counts = f"{len(ordered)} cells, below 1 in {below}, at least 1.5 in {well_above}"
    return f"{told}; {counts}{_medians(values)}"


def _medians(values: Mapping[str, float]) -> str:
    """The median at each share of returning users, of the cells that have a value at all of these shares."""
    families: dict[Cell, dict[float, float]] = {}
    for name, value in values.items():
        if name in BY_NAME:
            families.setdefault(BY_NAME[name].family, {})[BY_NAME[name].reuse] = value
    reuses = sorted({reuse for each in families.values() for reuse in each})
    whole = [each for each in families.values() if len(each) == len(reuses)]
    if len(reuses) < 2 or not whole:
        return ""
    medians = (f"{statistics.median_low(each[reuse] for each in whole):.2f} at {reuse:g}" for reuse in reuses)
    return f"; medians by reuse, {len(whole)} cells each: {', '.join(medians)}"


def _of(figures: Sequence[Reached], cell: str, figure: str, system: System) -> list[Reached]:
    """At each rate of the figure, the lowest first."""
    found = [each for each in figures if (each.cell, each.figure, each.system) == (cell, figure, system)]
    return sorted(found, key=lambda each: each.rate_per_s)


def _over(ours: Sequence[Reached], theirs: Sequence[Reached]) -> Interval | None:
    return paired_ratio(ours[0].by_seed, theirs[0].by_seed) if ours and theirs else None


def _at(found: Sequence[Reached], rate_per_s: float | None = None) -> Reached | None:
    """That of this rate; None: the first."""
    return next((each for each in found if rate_per_s is None or each.rate_per_s == rate_per_s), None)


def _pair(bases: Sequence[Reached], relay: Reached) -> str:
    base = _at(bases, relay.rate_per_s)
    return f"{amount(base.value) if base else '-'}, {amount(relay.value)} ({_short(relay.ratio)})"


def _short(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.value:.2f}"


@dataclass(frozen=True, slots=True)
class Baseline:
    """B0 in the worker beside the engine alone, at half load of one cell."""

    cell: str
    rate_per_s: float
    runs: int
    """Those on a machine that was not slow. Without any, nothing is known."""
    over_engine: float
    """Its time without the queue, over that of the engine alone. NaN without runs."""
    slowdown: float
    """Of the machine; NaN if it was not measured."""
    at_quiet: float
    """`over_engine` without the slowdown of the machine, where that was measured; NaN without runs."""
    engine_slowdown: float
    """Of the machine while the engine alone was measured; NaN if it is not known."""

    @property
    def verdict(self) -> str:
        """Whether it is an honest baseline."""
        if not self.runs:
            return "not known: the machine was slow"
        if self.engine_slowdown > SLOW_LIMIT:
            return "not known: the engine alone was measured on a slow machine"
        if self.over_engine <= BASELINE_LIMIT:
            return "honest"
        if not math.isnan(self.slowdown) and self.at_quiet <= BASELINE_LIMIT:
            return "not known: the machine was slower"
        return "too slow for an honest baseline"


def baselines(rows: Sequence[RunRow], plans: Mapping[str, CellPlan]) -> list[Baseline]:
    """B0 at half load, by cell. All cells must be within `BASELINE_LIMIT`. Cells that differ in the share of returning
    users alone are one: B0 computes the same in all of them. A slower machine in a run makes the ratio larger, and
    one while the engine alone was measured makes it smaller; a much slower one says nothing.
    """
    measured: dict[str, list[RunRow]] = {}
    for row in rows:
        plan = plan_of(row.cell, plans)
        if plan is None or (row.system, row.rate_per_s) != (System.B0, plan.half_rate_per_s):
            continue
        at_length = row.figure.startswith(AT_RATE) and row.cell in BY_NAME and row.history == BY_NAME[row.cell].history
        if (row.figure == "B" or at_length) and row.valid and not math.isnan(row.worker_over_engine):
            found = measured.setdefault(plan.cell, [])
            if not row.slowdown > SLOW_LIMIT:
                found.append(row)
    return [
        Baseline(
            name,
            plans[name].half_rate_per_s,
            len(found),
            _median([row.worker_over_engine for row in found]),
            _median([row.slowdown for row in found if not math.isnan(row.slowdown)]),
            _median([row.worker_over_engine / max(1.0, row.slowdown) for row in found]),
            plans[name].slowdown,
        )
        for name, found in measured.items()
    ]


def baseline(rows: Sequence[RunRow], plans: Mapping[str, CellPlan]) -> Grid:
    """A line for each of the `baselines`."""
    lines = [
        [
            each.cell, f"{each.rate_per_s:g}", str(each.runs), times(each.over_engine), times(each.slowdown),
            f"{BASELINE_LIMIT}", each.verdict,
        ]
        for each in baselines(rows, plans)
    ]  # fmt: skip
    header = ("cell", "half load, requests/s", "runs", "worker / engine alone", "slowdown of the machine", "limit", "")
    return Grid(header, lines)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def times(value: float) -> str:
    """A multiple; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.2f}"


def hits_beside_preinfer(rows: Sequence[RunRow], paths: Sequence[Mapping[str, str]]) -> Grid:
    """P99 of hits in HBM of a relay that computed prefixes meanwhile, beside that of O on the same trace, whose device
    computes none.
    """
    lines = []
    oracles = {row.key: row for row in rows if row.system == System.O and row.valid}
    for relay in sorted(rows, key=lambda row: (row.cell, row.history, row.rate_per_s, row.system, row.seed)):
        flags, oracle = FLAGS[System(relay.system)], oracles.get(replace(relay, system=System.O.value).key)
        has_chunks = flags.events and flags.chunks and relay.preinfer_computed > 0
        if not has_chunks or oracle is None or not relay.valid or relay.is_oversaturated:
            continue
        beside_ms, alone_ms = (_hit_p99_ms(paths, row) for row in (relay, oracle))
        allowed_ms = HIT_FACTOR * alone_ms + CHUNK_MS
        if math.isnan(beside_ms) or math.isnan(alone_ms):
            continue
        lines.append(
            [
                relay.cell, f"{relay.history:,}", f"{relay.rate_per_s:g}", relay.system, str(relay.seed),
                share(relay.preinfer_device_s / relay.device_s), f"{beside_ms:.1f} ms", f"{alone_ms:.1f} ms",
                f"{allowed_ms:.1f} ms", "yes" if beside_ms <= allowed_ms else "no",
            ]
        )  # fmt: skip
    header = (
        "cell", "history", "requests/s", "system", "seed", "pre-infer of device time", "P99 of its hits",
        "P99 of O's hits", "limit", "within",
    )  # fmt: skip
    return Grid(header, lines)


def _hit_p99_ms(paths: Sequence[Mapping[str, str]], row: RunRow) -> float:
    return next((float(each["q0.99_ms"]) for each in paths_at(paths, row) if each["path"] == RankingPath.HBM), math.nan)


def plan_of(cell: str, plans: Mapping[str, CellPlan]) -> CellPlan | None:
    """The plan of the cell with this name."""
    return plans.get(plan_name_of(cell))


def ratio(interval: Interval | None, seeds: int) -> str:
    """The ratio with its interval, and the number of seeds that have one: a seed without a value of both has none."""
    if interval is None:
        return "-"
    if math.isnan(interval.low):
        return f"{interval.value:.2f} (one seed{f' of {seeds}' if seeds > 1 else ''})"
    of = f"; {interval.seeds} of {seeds} seeds" if interval.seeds < seeds else ""
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f}{of})"


def reached(each: Reached) -> str:
    """The value, and where it was measured if that is another cell."""
    return amount(each.value) + (f" (of {each.measured_in})" if each.measured_in != each.cell else "")


def amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float) -> str:
    """A share in per cent; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.0%}"


def _costs(base: Reached, relay: Reached, rows: Sequence[RunRow], mode: str) -> list[str]:
    same = same_load(rows, mode, relay.cell, (System.B0, System.R))
    at = same or [row for each in (base, relay) for row in rows_at_highest(each, rows, mode)[:1]]
    if len(at) < 2:
        return ["", "", ""]
    of_base, of_relay = at
    at_base, at_relay = (f" at {row.rate_per_s:g}/s" for row in at)
    hits = share(of_relay.hit_share) + ("" if same else at_relay)
    base_s = f"{of_base.device_s_per_1000:.1f}" + ("" if same else at_base)
    return [hits, share(of_relay.wasted_share), f"{base_s}, {of_relay.device_s_per_1000:.1f}{at_relay}"]


def _use_of_b0(figures: Sequence[Reached], rows: Sequence[RunRow], cell: str, mode: str) -> str:
    use = device_use_of_b0(figures, rows, cell, mode)
    return f"{share(use)}{'' if math.isnan(use) or use >= LEAST_DEVICE_USE else ', does not count'}"


def _question(each: Reached) -> tuple[str, str, float]:
    return each.cell, each.figure, each.rate_per_s


def _place(each: Reached) -> tuple[str, str, float, float]:
    cell = BY_NAME.get(each.cell)
    if cell is None:
        return each.cell, each.figure, each.rate_per_s, 0.0
    return cell.plan_name, each.figure, each.rate_per_s, cell.reuse


def against_simulation(checked: Sequence[Mapping[str, str]]) -> Grid:
    """The live runs beside the same traces in virtual time. `checked`: the rows of `CHECKED`."""

    def pair(row: Mapping[str, str], name: str) -> str:
        return f"{float(row[f'measured_{name}_ms']):.0f}; {float(row[f'simulated_{name}_ms']):.0f}"

    lines = [
        [
            row["cell"], f"{int(row['history']):,}", row["system"], f"{float(row['rate_per_s']):g}", row["repeats"],
            share(float(row["load"])), pair(row, "p50"), pair(row, "p99"),
            f"{float(row['measured_late']):.2%}; {float(row['simulated_late']):.2%}",
            f"{row['mix_worst']} by {float(row['mix_error']):.1%}", row["verdict"],
        ]
        for row in checked
    ]  # fmt: skip
    header = (
        "cell", "history", "system", "requests/s", "runs", "device use", "P50, ms: live; virtual",
        "P99, ms: live; virtual", "late: live; virtual", "path that differs most", "verdict",
    )  # fmt: skip
    return Grid(header, lines)
