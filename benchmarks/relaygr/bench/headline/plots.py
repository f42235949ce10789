"""The plots of one cell, from rows alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from relaygr.bench.headline.decision import LATE_LIMIT
from relaygr.bench.headline.document import Picture
from relaygr.bench.headline.figures import Reached
from relaygr.bench.headline.grid import BY_NAME, plan_name_of
from relaygr.bench.headline.rows import QUANTILES, RunRow, paths_at
from relaygr.bench.headline.summary import amount
from relaygr.bench.headline.systems import System

COLOURS = {
    System.B0: "#6b7280", System.B0_LATE: "#9ca3af", System.B0_THREADS: "#374151", System.B1: "#a16207",
    System.C: "#2563eb", System.R_HBM: "#9333ea", System.R: "#dc2626", System.R_ADMIT: "#f59e0b",
    System.R_ALWAYS: "#db2777", System.R_SHARE: "#0891b2", System.R_UNCUT: "#65a30d", System.R_APPEND: "#78350f",
    System.R_INT8: "#be185d", System.R_TAIL: "#c2410c", System.R_THREADS: "#7f1d1d", System.O: "#059669",
}  # fmt: skip
PATHS = {"hbm": "#059669", "dram": "#2563eb", "pending": "#f59e0b", "full": "#6b7280", "not whole": "#dc2626"}
STAGES = {
    "to_worker": "to the worker", "queue": "queue", "wait": "wait for the prefix", "reload": "reload",
    "pre_infer": "computing the prefix", "rank": "ranking", "to_gateway": "to the gateway",
}  # fmt: skip


def plot_cell(
    folder: Path,
    cell: str,
    rows: Sequence[RunRow],
    paths: Sequence[Mapping[str, str]],
    figures: Sequence[Reached],
    same: Sequence[RunRow],
    transport: str = "",
) -> list[Picture]:
    """Writes the plots for which there are rows. `rows`, `paths` and `figures`: those of the cell and mode. `transport`
    stands in each title.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Picture] = []

    def save(name: str, title: str, draw: Callable[[Axes], bool]) -> None:
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        if draw(axes):
            axes.set_title(f"{title} ({cell}{transport})", fontsize=11)
            axes.grid(alpha=0.3)
            path = folder / f"{cell}-{name}.png"
            figure.savefig(path, dpi=110)
            made.append(Picture(f"{title} ({cell}{transport})", path))

    save("goodput", "Goodput against the offered rate", lambda axes: _goodput(axes, rows))
    for rate in sorted({row.rate_per_s for row in rows if row.figure == "A"}):
        title = f"P99 of all offered against the history's length, {rate:g}/s"
        save(f"length-{rate:g}", title, partial(_p99, [row for row in rows if row.rate_per_s == rate]))
    save("longest", "Longest history against the rate", lambda axes: _longest(axes, figures))
    save("mix", "Path mix of R against the offered rate", lambda axes: _mix(axes, rows))
    save("ccdf", "Latency by path, at the same load", lambda axes: _ccdf(axes, paths, same))
    save("stages", "Mean time of each stage, at the same load", lambda axes: _stages(axes, paths, same))
    return made


def plot_overview(path: Path, rows: Sequence[RunRow], figures: Sequence[Reached], transport: str = "") -> Picture:
    """Draws both figures of a mode: late requests by the rate in its first cell, then what each system reached in that
    cell and at the other shares of returning users.
    """
    cell = rows[0].cell
    names = [each for each in dict.fromkeys(each.cell for each in figures) if plan_name_of(each) == plan_name_of(cell)]
    own = [each for each in figures if each.cell in names]
    panels: list[tuple[str, Callable[[Axes], None]]] = [
        ("Late requests by the offered rate", partial(_late, [row for row in rows if row.cell == cell]))
    ]
    for figure, title in (
        ("B", "Most requests a second with 99 % in time (O left out)"),
        ("A", "Longest history with 99 % in time, at {:g}/s"),
    ):
        for rate in sorted({each.rate_per_s for each in own if each.figure == figure}):
            reached = [each for each in own if (each.figure, each.rate_per_s) == (figure, rate)]
            panels.append((title.format(rate), partial(_reached, reached, names)))
    drawing = Figure(figsize=(4.6 * len(panels), 3.8), layout="constrained")
    FigureCanvasAgg(drawing)
    for axes, (title, draw) in zip(drawing.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes)
        axes.set_title(f"{title}{transport}", fontsize=10)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=110)
    return Picture(f"Late requests by rate, and what each system reached ({cell}{transport})", path)


def _late(rows: Sequence[RunRow], axes: Axes) -> None:
    own = [row for row in rows if row.figure == "B" and row.valid]
    if _lines(axes, own, lambda row: row.rate_per_s, lambda row: 100 * row.late_share):
        axes.axhline(100 * LATE_LIMIT, color="#111827", linestyle="--", linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=100 * LATE_LIMIT)
        axes.set_ylim(bottom=-0.05)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.set_xlabel("offered requests a second")
        axes.set_ylabel("late, %; dashed line: the limit")


def _reached(figures: Sequence[Reached], cells: Sequence[str], axes: Axes) -> None:
    """Bars of each system but O, whose would dwarf the others, grouped by the share of returning users. Those that were
    measured in another cell are hatched.
    """
    reuses = {cell: BY_NAME[cell].reuse if cell in BY_NAME else math.nan for cell in cells}
    ordered = sorted(cells, key=lambda cell: reuses[cell])
    width, known = 0.8 / max(Counter(each.cell for each in figures).values()), set[str]()
    for place, cell in enumerate(ordered):
        bars = [each for each in figures if each.cell == cell and each.system != System.O]
        bars.sort(key=lambda each: list(System).index(System(each.system)))
        for number, each in enumerate(bars):
            drawn = axes.bar(
                place + (number - (len(bars) - 1) / 2) * width, each.value, 0.9 * width,
                label=None if each.system in known else each.system, color=COLOURS[System(each.system)],
                hatch="//" if each.measured_in != each.cell else None, edgecolor="white", linewidth=0,
            )  # fmt: skip
            known.add(each.system)
            axes.bar_label(drawn, [f"{'≥ ' if each.is_at_least else ''}{amount(each.value)}"], fontsize=7, padding=1)
    axes.set_xticks(range(len(ordered)), [f"{reuses[cell]:g}" for cell in ordered])
    axes.set_xlabel("share of returning users")
    axes.margins(y=0.12)
    axes.legend(fontsize=8, loc="upper left")


def _lines(axes: Axes, rows: Sequence[RunRow], x: Callable[[RunRow], float], y: Callable[[RunRow], float]) -> bool:
    for system in dict.fromkeys(row.system for row in rows):
        own = [row for row in rows if row.system == system]
        places = sorted({x(row) for row in own})
        means = [[y(row) for row in own if x(row) == place] for place in places]
        axes.plot(places, [sum(each) / len(each) for each in means], "o-", label=system, color=COLOURS[System(system)])
    if rows:
        axes.legend()
    return bool(rows)


def _goodput(axes: Axes, rows: Sequence[RunRow]) -> bool:
    own = [row for row in rows if row.figure == "B"]
    drawn = _lines(axes, own, lambda row: row.rate_per_s, lambda row: row.rate_per_s * (1 - row.late_share))
    if drawn:
        highest = max(row.rate_per_s for row in own)
        axes.plot([0, highest], [0, highest], ":", color="#9ca3af")
        axes.set_xlabel("offered requests a second")
        axes.set_ylabel("whole answers within the deadline, a second")
    return drawn


def _p99(rows: Sequence[RunRow], axes: Axes) -> bool:
    """`rows`: those of one rate."""
    own = [row for row in rows if row.figure == "A"]
    deadline_ms = own[0].deadline_ms
    # An infinite P99 (over 1 % without a whole answer) is drawn at the upper edge.
    _lines(axes, own, lambda row: row.history, lambda row: min(row.offered_p99_ms, 3 * deadline_ms))
    axes.axhline(deadline_ms, color="#111827", linestyle="--", linewidth=1)
    axes.annotate(f"deadline {deadline_ms} ms", (0.01, deadline_ms), xycoords=("axes fraction", "data"), va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("median history, behaviours")
    axes.set_ylabel("P99 of all offered, ms; upper edge: infinite")
    return True


def _longest(axes: Axes, figures: Sequence[Reached]) -> bool:
    own = [each for each in figures if each.figure == "A"]
    if len({each.rate_per_s for each in own}) < 2:
        return False
    for system in dict.fromkeys(each.system for each in own):
        points = sorted((each.rate_per_s, each.value) for each in own if each.system == system)
        axes.plot(
            [rate for rate, _ in points], [value for _, value in points], "o-", label=system,
            color=COLOURS[System(system)],
        )  # fmt: skip
    axes.legend()
    axes.set_xlabel("offered requests a second")
    axes.set_ylabel("longest median history within the deadline")
    return True


def _mix(axes: Axes, rows: Sequence[RunRow]) -> bool:
    own = sorted((row for row in rows if row.figure == "B" and row.system == System.R), key=lambda row: row.rate_per_s)
    if not own:
        return False
    bottom = [0.0] * len(own)
    for path, colour in PATHS.items():
        if path == "not whole":
            shares = [1 - each for each in bottom]
        else:
            shares = [getattr(row, f"{path}_share") for row in own]
        axes.bar(
            [f"{row.rate_per_s:g}\nseed {row.seed}" for row in own], shares, bottom=bottom, label=path, color=colour
        )
        bottom = [below + share for below, share in zip(bottom, shares, strict=True)]
    axes.set_xlabel("offered requests a second")
    axes.set_ylabel("share of the requests")
    axes.legend(loc="lower left")
    return True


def _ccdf(axes: Axes, paths: Sequence[Mapping[str, str]], same: Sequence[RunRow]) -> bool:
    drawn = False
    for row in same:
        for each in paths_at(paths, row):
            if int(each["requests"]) < 10:
                continue
            beyond = [max(1 - quantile, 1 / int(each["requests"]) / 2) for quantile in QUANTILES]
            latencies = [float(each[f"q{quantile:g}_ms"]) for quantile in QUANTILES]
            style = {"hbm": "-", "dram": "--", "pending": "-.", "full": ":"}.get(each["path"], "-")
            axes.plot(latencies, beyond, style, label=f"{row.system} {each['path']}", color=COLOURS[System(row.system)])
            drawn = True
    if drawn:
        axes.set_yscale("log")
        axes.axvline(same[0].deadline_ms, color="#111827", linestyle="--", linewidth=1)
        axes.set_xlabel("latency from the scheduled time, ms; dashed line: deadline")
        axes.set_ylabel("share of the path's requests beyond")
        axes.legend(fontsize=8)
    return drawn


def _stages(axes: Axes, paths: Sequence[Mapping[str, str]], same: Sequence[RunRow]) -> bool:
    labels, values = [], []
    for row in same:
        own = paths_at(paths, row)
        count = sum(int(each["requests"]) for each in own)
        if not count:
            continue
        labels.append(row.system)
        values.append(
            [sum(float(each[f"{stage}_mean_ms"]) * int(each["requests"]) for each in own) / count for stage in STAGES]
        )
    if not labels:
        return False
    left = [0.0] * len(labels)
    for place, title in enumerate(STAGES.values()):
        widths = [each[place] for each in values]
        axes.barh(labels, widths, left=left, label=title)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("mean of the answered requests, ms")
    axes.legend(fontsize=8)
    return True
