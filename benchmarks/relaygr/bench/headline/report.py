"""The report of a folder: the table of the systems, the gates, the plot, and the part of the page, from rows alone."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from relaygr.bench.headline.question import (
    HONEST,
    LIVE,
    LOADS,
    Asked,
    Effort,
    RunRow,
    System,
    lengths_around,
    rates_around,
    searched_at,
    snapped,
)
from relaygr.bench.headline.search import HISTORY_STEP, Rows, ScoreRow, tuned_variant
from relaygr.demo.board import print_gates
from relaygr.demo.summary import Gate
from relaygr.runtime.errors import RelayError

BEGIN, END = "<!-- headline: begin -->", "<!-- headline: end -->"
PLOT = "requests.png"
PAGE_PLOT = Path("images/benchmark.png")
"""Beside the page."""
COLOURS = {System.FULL: "#6b7280", System.CACHE: "#2563eb", System.RELAY: "#dc2626", System.ORACLE: "#059669"}
LEAST_HITS = 0.5
"""Of the users who return, the share that must use cached K,V."""
MOST_GAINED = 0.1
"""A warm-up was long enough if the share of hits grows by less between the halves of the run."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The highest value that passed below the lowest that failed, in one search."""

    value: float
    """0: none passed."""
    failed: float | None
    """None: no higher value was tried."""
    row: RunRow | None
    """The run that passed."""
    may_be_more: bool
    """Whether the search has not ended, so that a higher value may pass."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure of several seeds: the median, the lowest and the highest."""

    values: tuple[float, ...]
    may_be_more: bool = False
    """Whether a search did not end, so that the figure may be higher."""
    may_be_less: bool = False
    """The same of the system below the line of a ratio."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def is_known(self) -> bool:
        """Whether it is a figure, or at least a bound of one."""
        return bool(self.values) and not (self.may_be_more and (self.may_be_less or not self.median))

    def said(self, unit: str = "") -> str:
        """The figure in words, with its range if there are several seeds."""
        if not self.values:
            return "not measured"
        if not self.is_known:
            return "not ended"
        bound = "at least " if self.may_be_more else "at most " if self.may_be_less else ""
        middle = f"{bound}{amount(self.median)}{unit}"
        if len(self.values) == 1:
            return middle
        return f"{middle} ({amount(min(self.values))} to {amount(max(self.values))})"


class Figures:
    """The figures of the rows of one effort."""

    def __init__(self, rows: Iterable[RunRow], scores: Iterable[ScoreRow], effort: Effort) -> None:
        self.effort = effort
        self.rows = [row for row in rows if row.effort == effort.name]
        self.scores = [row for row in scores if row.effort == effort.name]
        self.seeds = sorted({row.seed for row in self.rows if row.asked == Asked.REQUESTS})
        self.live = [row for row in self.rows if row.asked in (Asked.TUNING, Asked.REQUESTS)]

    def reached(self, load: float, system: System, seed: int) -> Reached | None:
        """What the search of this seed found; None without a valid run."""
        at = searched_at(system, load)
        own = [row for row in self.live if _of(row, Asked.REQUESTS, at, system) and row.seed == seed]
        if not own:
            return None
        lowest = rates_around(snapped(1000 / own[0].full_ms / 2), self.effort.step)[0]
        return _reached(own, lambda row: row.rate_per_s, lowest, self.effort.is_next)

    def longest(self, load: float, system: System) -> Reached | None:
        """The longest history in virtual time."""
        own = [row for row in self.rows if _of(row, Asked.HISTORY, load, system)]
        if not own:
            return None
        lengths = lengths_around(self.live[0].history, HISTORY_STEP)
        return _reached(
            own,
            lambda row: row.history,
            lengths[0],
            lambda passed, failed: not any(passed < each < failed for each in lengths),
        )

    def requests(self, load: float, system: System) -> Spread:
        """Requests a second of all seeds."""
        found = [each for seed in self.seeds if (each := self.reached(load, system, seed)) is not None]
        return Spread(tuple(each.value for each in found), any(each.may_be_more for each in found))

    def ratio(self, load: float, ours: System, theirs: System) -> Spread:
        """Ours over theirs, seed by seed. A seed at which theirs carried nothing has no ratio."""
        found = ((self.reached(load, ours, seed), self.reached(load, theirs, seed)) for seed in self.seeds)
        pairs = [(one, other) for one, other in found if one is not None and other is not None and other.value]
        return Spread(
            tuple(one.value / other.value for one, other in pairs),
            may_be_more=any(one.may_be_more for one, _ in pairs),
            may_be_less=any(other.may_be_more for _, other in pairs),
        )

    def hits(self, load: float, system: System) -> Spread:
        """The share of requests that used cached K,V, at what was found."""
        found = [self.reached(load, system, seed) for seed in self.seeds]
        return Spread(tuple(each.row.hits for each in found if each is not None and each.row is not None))


def _of(row: RunRow, asked: Asked, load: float, system: System) -> bool:
    return row.valid and (row.asked, row.load, row.system) == (asked, load, system)


def _reached(
    rows: Sequence[RunRow],
    value_of: Callable[[RunRow], float],
    lowest: float,
    is_next: Callable[[float, float], bool],
) -> Reached:
    """A search has ended if the lowest value failed, or one failed that is the next to one that passed."""
    failed = min((value_of(row) for row in rows if not row.passed), default=None)
    passed = [row for row in rows if row.passed and (failed is None or value_of(row) < failed)]
    best = max(passed, key=value_of, default=None)
    value = 0.0 if best is None else value_of(best)
    has_ended = failed is not None and (is_next(value, failed) if value else failed <= lowest)
    return Reached(value, failed, best, not has_ended)


def gates_of(figures: Figures) -> list[Gate]:
    """What must hold for the figures to mean anything."""
    compared, different = (sum(getattr(row, name) for row in figures.scores) for name in ("compared", "different"))
    wanted = [(load, system) for load in LOADS for system in (System.CACHE, System.RELAY)]
    missing = len(set(wanted) - {(row.load, System(row.system)) for row in figures.scores})
    tuned = tuned_variant(figures.live, figures.effort.name)
    half = [
        row.over_engine for row in figures.live if (row.asked, row.variant, row.valid) == (Asked.TUNING, tuned, True)
    ]
    found = [
        (load, system, each.row)
        for load, system in wanted
        for seed in figures.seeds
        if load and (each := figures.reached(load, system, seed)) is not None and each.row is not None
    ]
    # The hits of the relay are also of users who come once, for whom a job came in time.
    used = min((row.hits / load for load, system, row in found if system is System.CACHE), default=0.0)
    gained = [row.hits_gained for _, _, row in found if not math.isnan(row.hits_gained)]
    over_engine = half[0] if half else float("nan")
    gates = [
        Gate(
            "cached scores equal full inference's", different == 0 < compared,
            f"{different} of {compared} sampled requests differ",
        ),
        Gate("each case was compared with full inference", not missing, f"{missing} of {len(wanted)} were not"),
        Gate(
            f"full inference in the worker takes at most {HONEST:g} times the engine alone", over_engine <= HONEST,
            f"{over_engine:.2f} times at half load", depends_on_speed=True,
        ),
        Gate(
            "users who return use cached K,V", used >= LEAST_HITS,
            f"cache only: at least {used:.0%} as many hits as impressions by such users",
        ),
    ]  # fmt: skip
    if gained:
        told = f"hits grew by at most {100 * max(gained):.0f} points between the halves of a run"
        gates.append(Gate("the warm-up was long enough", max(gained) < MOST_GAINED, told))
    return gates


def table_of(figures: Figures) -> list[list[str]]:
    """The header and a line for each load."""
    header = [
        "users who return",
        *(str(system) for system in LIVE),
        "relay / full inference",
        "relay / cache only",
        "hits of the relay",
    ]
    lines = [
        [
            f"{load:.0%}",
            *(figures.requests(load, system).said() for system in LIVE),
            _times(figures, load, System.FULL),
            _times(figures, load, System.CACHE),
            _percent(figures.hits(load, System.RELAY)),
        ]
        for load in LOADS
    ]
    return [header, *lines]


def history_table_of(figures: Figures) -> list[list[str]]:
    """The same for the longest histories in virtual time; the header alone without any."""
    lines = []
    for load in LOADS:
        found = [figures.longest(load, system) for system in System]
        if any(found):
            told = ["not simulated" if each is None else _bounded(each) for each in found]
            lines.append([f"{load:.0%}", *told])
    return [["users who return", *map(str, System)], *lines]


def _bounded(reached: Reached) -> str:
    return Spread((reached.value,), reached.may_be_more).said()


def _times(figures: Figures, load: float, other: System) -> str:
    ratio, carried = figures.ratio(load, System.RELAY, other), figures.requests(load, other)
    if carried.values and not any(carried.values) and not carried.may_be_more:
        return f"{other} carries none"
    return ratio.said() if ratio.values else "-"


def _percent(spread: Spread) -> str:
    return f"{spread.median:.0%}" if spread.values else "-"


def amount(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def conditions(figures: Figures) -> str:
    """What was measured, where and when, in sentences."""
    first, last = figures.live[0], figures.live[-1]
    slow = [row.slowdown for row in figures.live if not math.isnan(row.slowdown)]
    late = sum(not row.valid for row in figures.live)
    tuned = tuned_variant(figures.live, figures.effort.name) or "not measured"
    offered = [row.offered for row in figures.live]
    seconds = [row.offered / row.rate_per_s for row in figures.live]
    codes = " and ".join(dict.fromkeys(row.code for row in figures.live))
    variants = len({row.variant for row in figures.live if row.asked == Asked.TUNING})
    several = f"median of {len(figures.seeds)} seeds (lowest to highest)"
    by_loadgen = any(row.verdict for row in figures.live)
    judged = "99 % (LoadGen: VALID)" if by_loadgen else "at least 99 %"
    told = [
        f"Requests a second with {judged} whole and within {first.deadline_ms} ms, "
        f"{first.deadline_ms / first.full_ms:.2g} times full inference on {first.history:,} behaviours by the engine "
        f"alone; {several if len(figures.seeds) > 1 else 'one seed, so a figure may be off by a step of its search'}.",
        f"{first.machine}; {first.broker}, on the same cores; {_days(first, last)}, code {codes}; "
        f"{len(figures.live)} runs, effort {figures.effort.name}: about {min(seconds):.0f} to {max(seconds):.0f} s and "
        f"{' to '.join(map(str, sorted({min(offered), max(offered)})))} requests each.",
        f"Full inference: {tuned}, {f'the best of {variants} variants' if variants > 1 else 'no other variant tried'}.",
    ]
    told.append(
        "Sent and judged by `relaygr traffic`, before LoadGen did."
        if not by_loadgen
        else "Arrivals, percentiles and verdicts are those of MLCommons' LoadGen, Server scenario (`loadgen` beside "
        "the rows has its summaries); this is no result of MLPerf."
    )
    told.append("A hit is a request whose K,V were there, or were being computed, when it came.")
    if late:
        told.append(f"The queries were sent late in {late} of {len(figures.live)} runs, which do not count.")
    if slow:
        told.append(
            f"Device work took {min(slow):.2f} to {max(slow):.2f} times as long as calibrated, median "
            f"{statistics.median(slow):.2f}."
        )
    return " ".join(told)


def _days(first: RunRow, last: RunRow) -> str:
    days = (first.measured_at[:10], last.measured_at[:10])
    return days[0] if days[0] == days[1] else " to ".join(days)


def sentence(figures: Figures) -> str:
    """The result in a sentence."""
    load = LOADS[-1]
    ratios = [(figures.ratio(load, System.RELAY, other), other) for other in (System.FULL, System.CACHE)]
    told = [f"{each.said(' times')} the requests of {other}" for each, other in ratios if each.is_known]
    if not told:
        return "The searches have not ended: give the same command again."
    seeds = "one seed, indicative" if len(figures.seeds) == 1 else f"{len(figures.seeds)} seeds"
    carries = f"the relay carries {' and '.join(told)} ({seeds})"
    return f"Where {load:.0%} of the impressions are by users who return, {carries}."


def write_report(console: Console, out: Path, rows: Rows, effort: Effort, page: Path | None) -> None:
    """Prints the report of the runs of an effort, draws the plot, and fills the page."""
    figures = Figures(rows.runs, rows.scores, effort)
    if not figures.live:
        console.print(f"No live run of the effort {effort.name} has ended: give the same command again.")
        return
    console.print(_rich("Requests a second", table_of(figures)))
    histories = history_table_of(figures)
    if len(histories) > 1:
        console.print(_rich(f"In virtual time: longest history at {_fixed_rate(figures)} requests a second", histories))
    console.print(conditions(figures), soft_wrap=True)
    print_gates(console, gates_of(figures), [])
    plot(figures, out / PLOT)
    console.print(f"plot       {out / PLOT}", soft_wrap=True)
    if page is not None:
        plot(figures, page.parent / PAGE_PLOT)
        fill_page(page, as_markdown(figures, out))
    console.print(sentence(figures), soft_wrap=True)


def _fixed_rate(figures: Figures) -> str:
    return amount(next(row.rate_per_s for row in figures.rows if row.asked == Asked.HISTORY))


def _rich(title: str, lines: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(lines[0]):
        table.add_column(name, justify="right" if place else "left")
    for line in lines[1:]:
        table.add_row(*line)
    return table


def plot(figures: Figures, path: Path) -> None:
    """Bars of each load and system, with the range of the seeds."""
    drawing = Figure(figsize=(7, 3.6), layout="constrained")
    axes: Axes = drawing.subplots()
    width = 0.8 / len(LIVE)
    for number, system in enumerate(LIVE):
        spreads = [figures.requests(load, system) for load in LOADS]
        known = [(place, each) for place, each in enumerate(spreads) if each.is_known]
        heights = [each.median for _, each in known]
        reach = [
            [height - min(each.values) for height, (_, each) in zip(heights, known, strict=True)],
            [max(each.values) - height for height, (_, each) in zip(heights, known, strict=True)],
        ]
        bars = axes.bar(
            [place + (number - (len(LIVE) - 1) / 2) * width for place, _ in known], heights, 0.92 * width,
            yerr=reach if len(figures.seeds) > 1 else None, capsize=3, label=system, color=COLOURS[system],
        )  # fmt: skip
        labels = [f"{'at least ' if each.may_be_more else ''}{amount(each.median)}" for _, each in known]
        axes.bar_label(bars, labels, fontsize=8, padding=2)
    axes.set_xticks(range(len(LOADS)), [f"{load:.0%}" for load in LOADS])
    axes.set_xlabel("impressions by users who return")
    axes.set_ylabel(f"requests a second, 99 % within {figures.live[0].deadline_ms} ms", fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.margins(y=0.15)
    axes.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)


# -- the page ---------------------------------------------------------------------------------------


def as_markdown(figures: Figures, out: Path) -> str:
    """The part of the page between its marks."""
    parts = [
        _markdown(table_of(figures)),
        f"![Requests a second of the three systems at three loads]({PAGE_PLOT.as_posix()})",
        conditions(figures),
        "\n".join(
            f"* {'Holds' if gate.passed else 'Does not hold'}: {gate.name} ({gate.found})."
            for gate in gates_of(figures)
        ),
    ]
    histories = history_table_of(figures)
    if len(histories) > 1:
        parts += [
            f"In virtual time, where trigger, worker and cache decide as in the product: the longest history with 99 % "
            f"within the same deadline, at {_fixed_rate(figures)} requests a second.",
            _markdown(histories),
        ]
    return "\n\n".join([*parts, f"Rows: `{_relative(out)}`."])


def _relative(path: Path) -> str:
    return Path(os.path.relpath(path)).as_posix()


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def check_page(page: Path) -> str:
    """The text of the page. Raises RelayError for a page without the marks."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise RelayError(f"{page} cannot be read: {error.strerror}") from error
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise RelayError(f"{page} needs the line {BEGIN} and after it the line {END}, between which the figures go")
    return text


def fill_page(page: Path, block: str) -> None:
    """Replaces what is between the marks."""
    text = check_page(page)
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    page.write_text(f"{before}{BEGIN}\n\n{block}\n\n{after}", encoding="utf-8")
