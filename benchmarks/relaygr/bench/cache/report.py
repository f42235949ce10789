"""Figures as tables and pictures."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from relaygr.bench.cache.operations import OperationFigures
from relaygr.bench.cache.reloads import ReloadFigures


def operations_table(figures: Sequence[OperationFigures]) -> Table:
    """A row for each operation and a column for each policy: µs a call."""
    table = Table(title=f"CPU µs a call, {figures[0].users:,} users", box=None, padding=(0, 2, 0, 0))
    policies = list(dict.fromkeys(one.policy for one in figures))
    table.add_column("operation")
    for policy in policies:
        table.add_column(policy, justify="right")
    by_name = {(one.operation, one.policy): one for one in figures}
    for operation in dict.fromkeys(one.operation for one in figures):
        table.add_row(operation, *(f"{by_name[operation, policy].us:.1f}" for policy in policies))
    return table


def reloads_table(figures: Sequence[ReloadFigures]) -> Table:
    table = Table(title="Reloads from DRAM", box=None, padding=(0, 2, 0, 0))
    for name in ("size", "at once", "first", "last", "together", "plain copy"):
        table.add_column(name, justify="right")
    for one in figures:
        table.add_row(
            f"{one.size_mib:.0f} MiB",
            str(one.at_once),
            f"{one.first_ms:.1f} ms",
            f"{one.last_ms:.1f} ms",
            f"{one.gib_per_s:.1f} GiB/s",
            f"{one.plain_gib_per_s:.1f} GiB/s",
        )
    return table


def plot_operations(path: Path, figures: Sequence[OperationFigures]) -> None:
    """Groups of bars, with a colour for each policy."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    operations = list(dict.fromkeys(one.operation for one in figures))
    policies = list(dict.fromkeys(one.policy for one in figures))
    width = 0.8 / len(policies)
    by_name = {(one.operation, one.policy): one.us for one in figures}
    for place, policy in enumerate(policies):
        heights = [by_name[operation, policy] for operation in operations]
        axes.bar(
            [index + (place + 0.5) * width - 0.4 for index in range(len(operations))], heights, width, label=policy
        )
    axes.set_xticks(range(len(operations)), [textwrap.fill(operation, 12) for operation in operations])
    axes.set_ylabel(f"CPU µs a call, {figures[0].users:,} users")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend()
    figure.savefig(path, dpi=120)


def plot_reloads(path: Path, figures: Sequence[ReloadFigures]) -> None:
    """Latency of the first and the last of the reloads requested at once, with a colour for each size."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for size in dict.fromkeys(one.size_mib for one in figures):
        line = [one for one in figures if one.size_mib == size]
        at_once = [one.at_once for one in line]
        (drawn,) = axes.plot(at_once, [one.last_ms for one in line], marker="o", label=f"{size:.0f} MiB")
        axes.plot(at_once, [one.first_ms for one in line], marker="o", linestyle="--", color=drawn.get_color())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({one.at_once for one in figures})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("reloads requested at once")
    axes.set_ylabel("latency, ms")
    axes.grid(alpha=0.3, which="both")
    axes.legend(title="solid: the last to end\ndashed: the most urgent")
    figure.savefig(path, dpi=120)
