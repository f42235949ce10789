"""The outputs of a soak: CSV of its samples, plot, tables and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from relaygr.bench.soak.judge import BOUNDS, Account, Growth, Resource, Sample

CounterRow = tuple[float, str, int, str, float]
"""Second, process, pid, name of a counter, and its total over all labels."""
Mark = tuple[float, str]
"""Second and kind of an event."""
TABLE_WIDTH = 110


def save_samples(path: Path, samples: Sequence[Sample], counters: Sequence[CounterRow]) -> None:
    """Writes one line for each sample, in the order of time."""
    rows = [(one.second, one.process, one.pid, one.resource.value, one.value) for one in samples]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("second", "process", "pid", "name", "value"))
        for second, *rest, value in sorted([*rows, *counters]):
            writer.writerow((round(second, 2), *rest, f"{value:.12g}"))


def save_json(
    path: Path, described: Mapping[str, Any], marks: Sequence[Mark], found: Sequence[Growth], sums: Sequence[Account]
) -> None:
    """Writes the verdicts."""
    content = {
        **described,
        "events": [{"second": round(second, 1), "kind": kind} for second, kind in marks],
        "growth": [
            {**asdict(one), "unit": BOUNDS[one.resource].title, "bound_per_minute": BOUNDS[one.resource].per_minute}
            | {"judged": one.is_judged, "flat": one.is_flat}
            for one in found
        ],
        "accounts": [asdict(one) | {"adds_up": one.adds_up} for one in sums],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def print_verdicts(console: Console, found: Sequence[Growth], sums: Sequence[Account], passed: bool) -> None:
    """Of each resource the process that grows most and all that are not flat; of the accounts all that do not add up,
    and the first ones.
    """
    wide = Console(highlight=False, width=max(console.width, TABLE_WIDTH))
    growth = Table(title="Growth a minute after the first 30 %, without the warm-up of each process")
    for name in ("resource", "process", "at the end", "growth", "bound", ""):
        growth.add_column(name, justify="left" if name in ("resource", "process") else "right")
    for resource, bound in BOUNDS.items():
        judged = [one for one in found if one.resource is resource and one.is_judged]
        shown = sorted(judged, key=lambda one: -one.per_minute)
        for one in [one for place, one in enumerate(shown) if place == 0 or not one.is_flat]:
            growth.add_row(
                bound.title,
                one.process,
                f"{one.level:.4g}",
                f"{one.per_minute:+.3f}",
                f"{bound.per_minute:g}",
                "flat" if one.is_flat else "grows",
            )
        if not judged:
            growth.add_row(bound.title, "", "", "", f"{bound.per_minute:g}", "too short")
    wide.print(growth)
    table = Table(title="Counters")
    for name in ("counted", "expected", "found", "may differ by", ""):
        table.add_column(name, justify="left" if name == "counted" else "right")
    for account in sums:
        if account.adds_up and account.name.startswith(("worker ", "exit ")):
            continue
        table.add_row(
            account.name,
            *(f"{number:g}" for number in (account.expected, account.found, account.slack)),
            _sign(account),
        )
    wide.print(table)
    left = sum(one.adds_up for one in sums)
    wide.print(f"{left} of {len(sums)} accounts add up. {'PASSED' if passed else 'FAILED'}")


def _sign(account: Account) -> str:
    return "adds up" if account.adds_up else "DIFFERS"


def save_plot(path: Path, samples: Sequence[Sample], marks: Sequence[Mark], judged_from_s: float) -> None:
    """A panel for each resource, a line for each process, and the events as vertical lines."""
    resources = [resource for resource in Resource if any(one.resource is resource for one in samples)]
    figure = Figure(figsize=(13, 2.3 * len(resources)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(resources), 1, sharex=True, squeeze=False)[:, 0]
    processes = sorted({one.process for one in samples})
    colours = {process: f"C{number}" for number, process in enumerate(processes)}
    kinds = sorted({kind for _, kind in marks})
    styles = dict(zip(kinds, ("dotted", "dashed", "dashdot", "solid"), strict=False))
    for panel, resource in zip(panels, resources, strict=True):
        panel.axvspan(0, judged_from_s / 60, color="0.95", zorder=0)
        for second, kind in marks:
            panel.axvline(second / 60, color="0.4", linewidth=0.8, linestyle=styles[kind], zorder=1)
        lines: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for one in samples:
            if one.resource is resource:
                lines.setdefault((one.process, one.pid), []).append(
                    (one.second / 60, one.value / BOUNDS[resource].unit)
                )
        for (process, _), points in lines.items():
            panel.plot(*zip(*points, strict=True), color=colours[process], linewidth=1.1)
        panel.set_ylabel(BOUNDS[resource].title, fontsize=8)
        panel.set_ylim(bottom=0)
        panel.margins(x=0.01)
    panels[-1].set_xlabel("minutes (grey: warm-up, not judged)")
    for process in processes:
        panels[0].plot([], [], color=colours[process], label=process)
    for kind in kinds:
        panels[0].plot([], [], color="0.4", linestyle=styles[kind], label=kind)
    figure.legend(loc="outside upper center", ncols=6, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
