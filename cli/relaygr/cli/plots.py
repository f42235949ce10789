"""The pictures of `--plot FILE`. Importing matplotlib takes a second: a command imports this module only with the
option.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from relaygr.cli.options import require_writable
from relaygr.runtime.errors import RelayError

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter
except OSError as error:
    # It refuses a file system without a place for its cache.
    raise RelayError(f"No plot can be drawn: {error}. Set MPLCONFIGDIR to a folder that can be written.") from error
from relaygr.simulate.figures import ENDINGS, Estimate, Figures
from relaygr.simulate.visit import BreakEven

_POINTS = 400


def require_plot(path: Path) -> None:
    """Raises RelayError if no picture can be written to this file: before work that may take minutes."""
    known = Figure().canvas.get_supported_filetypes()
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in known:
        raise RelayError(f"--plot {path} cannot be written: its suffix must be one of {', '.join(sorted(known))}.")
    require_writable("--plot", path)


def plot_figures(path: Path, columns: Mapping[str, Figures], title: str) -> None:
    """Draws latencies, late requests and the ends of requests, of each named column. Raises RelayError."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"Simulated: {title}")
    left, middle, right = figure.subplots(1, 3)
    _bars(left, list(columns), [each.p50_ms for each in columns.values()], -0.2, label="P50")
    _bars(left, list(columns), [each.p99_ms for each in columns.values()], 0.2, label="P99")
    left.set_ylabel("latency, ms")
    left.legend()
    _bars(middle, list(columns), [each.late_share for each in columns.values()], factor=100)
    middle.set_ylabel("late, truncated or refused, %")
    bottoms = [0.0] * len(columns)
    for ending in ENDINGS:
        shares = [100 * each.mix[ending].value for each in columns.values()]
        if any(shares):
            right.bar(list(columns), shares, bottom=bottoms, label=ending)
            bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    right.set_ylabel("requests by their end, %")
    right.legend(fontsize="small", loc="lower left")
    _save(figure, path)


def plot_break_even(path: Path, found: Sequence[BreakEven], gaps_s: Sequence[float]) -> None:
    """Draws the work of a visit against the gap since the visit before, a line for each length. Raises RelayError."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
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
    _save(figure, path)


def _bars(
    axes: Axes,
    names: Sequence[str],
    estimates: Sequence[Estimate],
    offset: float = 0.0,
    *,
    factor: float = 1.0,
    label: str = "",
) -> None:
    """A bar for each name with its error; without a bar of the error if that is not known."""
    places = [place + offset for place in range(len(names))]
    errors = [math.nan if each.error is None else factor * each.error for each in estimates]
    heights = [factor * each.value for each in estimates]
    axes.bar(places, heights, 0.4 if offset else 0.8, yerr=errors, capsize=4, label=label)
    axes.set_xticks(range(len(names)), list(names))


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise RelayError(f"--plot {path} cannot be written: {error}.") from error
