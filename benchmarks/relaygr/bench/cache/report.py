"""Figures as tables and pictures."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from relaygr.bench.cache.bursts import BurstFigures
from relaygr.bench.cache.operations import OperationFigures
from relaygr.bench.cache.policies import PolicyFigures
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


def bursts_table(figures: Sequence[BurstFigures]) -> Table:
    title = f"{figures[0].requests:,} requests in {figures[0].seconds:.0f} s, in bursts"
    table = Table(title=title, box=None, padding=(0, 2, 0, 0))
    for name in ("single flight", "break-even rule", "mean", "P50", "P99", "copied", "computed"):
        table.add_column(name, justify="right")
    for one in figures:
        table.add_row(
            "yes" if one.single_flight else "no",
            "yes" if one.break_even else "no",
            f"{one.mean_ms:.1f} ms",
            f"{one.p50_ms:.1f} ms",
            f"{one.p99_ms:.1f} ms",
            f"{one.copied_gib:,.0f} GiB",
            f"{one.computed:,}",
        )
    return table


def policies_table(traffic: str, figures: Sequence[PolicyFigures]) -> Table:
    """A row for each size, and for each policy the visits that hit and the device time saved."""
    mine = [one for one in figures if one.traffic == traffic]
    names = list(dict.fromkeys(one.policy for one in mine))
    table = Table(title=f"{traffic}: visits that hit / device time saved", box=None, padding=(0, 2, 0, 0))
    for name in ("HBM", "DRAM", *names, "bound"):
        table.add_column(name, justify="right")
    for size in dict.fromkeys(_size(one) for one in mine):
        row = {one.policy: one for one in mine if _size(one) == size}
        cells = [f"{row[name].in_either:.1%} / {row[name].time_saved:.1%}" for name in names]
        table.add_row(*(f"{share:.0%}" for share in size), *cells, f"{row[names[0]].bound:.1%}")
    return table


def policies_summary(figures: Sequence[PolicyFigures]) -> Table:
    """For each policy, its device time saved beyond that of LRU, in points: the mean by traffic, and the extremes."""
    names = list(dict.fromkeys(one.policy for one in figures))
    table = Table(title="Device time saved beyond that of lru, points", box=None, padding=(0, 2, 0, 0))
    table.add_column("traffic")
    for name in names:
        table.add_column(name, justify="right")
    gains = _gains(figures)
    for traffic in dict.fromkeys(one.traffic for one in figures):
        means = {name: _mean(list(gains[traffic, name].values())) for name in names}
        table.add_row(traffic, *(f"{means[name]:+.1f}" for name in names))
    for label, of in (("mean", _mean), ("worst", min), ("best", max)):
        every = {
            name: [gain for key, by_size in gains.items() if key[1] == name for gain in by_size.values()]
            for name in names
        }
        table.add_row(label, *(f"{of(every[name]):+.1f}" for name in names), style="bold")
    return table


def _size(one: PolicyFigures) -> tuple[float, float]:
    return one.hbm_share, one.dram_share


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _gains(figures: Sequence[PolicyFigures]) -> dict[tuple[str, str], dict[tuple[float, float], float]]:
    """By traffic and policy, and then by size: device time saved beyond that of LRU, in points."""
    lru = {(one.traffic, _size(one)): one.time_saved for one in figures if one.policy == "lru"}
    gains: dict[tuple[str, str], dict[tuple[float, float], float]] = defaultdict(dict)
    for one in figures:
        gains[one.traffic, one.policy][_size(one)] = 100 * (one.time_saved - lru[one.traffic, _size(one)])
    return gains


def plot_policies(path: Path, figures: Sequence[PolicyFigures]) -> None:
    """A panel for each traffic: the gain of each policy over LRU, by size."""
    traffics = list(dict.fromkeys(one.traffic for one in figures))
    columns = 4
    figure = Figure(figsize=(4 * columns, 3.4 * -(-len(traffics) // columns)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Device time saved beyond that of lru, points")
    panels = figure.subplots(-(-len(traffics) // columns), columns, sharex=True, squeeze=False).flatten().tolist()
    gains = _gains(figures)
    for axes, traffic in zip(panels, traffics, strict=False):
        for policy in dict.fromkeys(one.policy for one in figures):
            by_size = gains[traffic, policy]
            names = [f"{hbm:.0%}" + (f"\n+{dram:.0%}" if dram else "") for hbm, dram in by_size]
            axes.plot(names, list(by_size.values()), marker="o", markersize=3, label=policy)
        axes.set_title(traffic)
        axes.grid(axis="y", alpha=0.3)
    for axes in panels[len(traffics) :]:
        axes.set_visible(False)
    figure.supxlabel("HBM (+ DRAM), share of the footprint")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def plot_operations(path: Path, figures: Sequence[OperationFigures]) -> None:
    """Groups of bars, with a colour for each policy."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
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
    FigureCanvasAgg(figure)
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


def plot_bursts(path: Path, figures: Sequence[BurstFigures], delays_ms: Sequence[Sequence[float]]) -> None:
    """Share of requests that waited longer than a given time."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for one, delays in zip(figures, delays_ms, strict=True):
        ordered = sorted(delays)
        shares = [1 - place / len(ordered) for place in range(len(ordered))]
        label = f"single flight {'on' if one.single_flight else 'off'}, rule {'on' if one.break_even else 'off'}"
        axes.plot([max(delay, 0.1) for delay in ordered], shares, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(1e-3, 1)
    axes.set_xlabel("delay until a request can be ranked, ms")
    axes.set_ylabel("share of requests that wait longer")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120)
