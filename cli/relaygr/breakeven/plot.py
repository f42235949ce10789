"""Draws the work of a visit against the gap since the visit before, a line for each length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from relaygr.breakeven.figures import BreakEven
from relaygr.runtime.errors import RelayError

_POINTS = 400


def save_plot(found: Sequence[BreakEven], gaps_s: Sequence[float], path: Path) -> None:
    """Writes a picture. Raises RelayError if the file cannot be written."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    first, last = min(gaps_s) / 10, max(gaps_s)
    gaps = [first * (last / first) ** (step / (_POINTS - 1)) for step in range(_POINTS)]
    for each in found:
        work = [each.work[each.tier(gap)] for gap in gaps]
        axes.plot(gaps, work, label=f"{each.figures.behaviours:,} behaviours")
    axes.axhline(1.0, color="0.55", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0.0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("gap between two visits of a user, seconds")
    axes.set_ylabel("device work of a visit, full inference = 100 %")
    axes.legend(loc="lower right")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise RelayError(f"--plot {path} cannot be written: {error}.") from error
