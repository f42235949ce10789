"""Draws results of replays: hit ratio against the size of a tier, or by policy if there is one size."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from relaygr.replay.bound import HitBound
from relaygr.replay.run import ReplayEnvironment, ReplayResult
from relaygr.replay.tables import bounds_of, name_of
from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import check_room
from relaygr.settings import size_text

_BOUND = "0.55"
_LEAST_MARGIN = 0.0005


@dataclass(frozen=True, slots=True)
class _Tier:
    """The hits that one row of the picture shows."""

    name: str
    counts_dram: bool

    def share(self, one: ReplayResult) -> float:
        """The share of visits that found all they could reuse."""
        return (one.hbm_hits + (one.dram_hits if self.counts_dram else 0)) / max(1, one.visits)

    def bound(self, pair: tuple[float, float]) -> float:
        return pair[1] if self.counts_dram else pair[0]


_IN_HBM = _Tier("in HBM", False)
_IN_EITHER = _Tier("in HBM or DRAM", True)


def require_plot(path: Path) -> None:
    """Raises RelayError if `save_plot` could not write this file: before a replay that may take minutes."""
    known = FigureCanvasAgg(Figure()).get_supported_filetypes()
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in known:
        raise RelayError(f"--plot {path} cannot be written: its suffix must be one of {', '.join(sorted(known))}.")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        check_room(path.parent)
    except OSError as error:
        raise RelayError(f"--plot {path} cannot be written: {error.strerror}.") from error


def save_plot(
    path: Path, title: str, results: Sequence[ReplayResult], bound: HitBound, environment: ReplayEnvironment
) -> None:
    """Writes the picture in the format that the suffix of `path` names. Raises RelayError.

    One row shows the hits in HBM, a second row the hits in either tier. Each row shows the range of its policies only,
    because their differences would not be seen on an axis from 0 to 100 %.
    """
    panels = _panels(results)
    has_dram = any(each.candidate.dram_bytes for each in results)
    tiers = [_IN_HBM, _IN_EITHER] if has_dram else [_IN_HBM]
    figure = Figure(figsize=(5 + 4 * len(panels), 1 + 4 * len(tiers)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    rows: list[list[Axes]] = figure.subplots(len(tiers), len(panels), sharey="row", squeeze=False).tolist()
    is_by_size = any(len(_sizes(panel)) > 1 for panel in panels)
    for tier, row in zip(tiers, rows, strict=True):
        for axes, panel in zip(row, panels, strict=True):
            (_against_size if is_by_size else _by_policy)(axes, tier, panel, bound, environment)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
        row[0].set_ylim(*shown_range([tier.share(each) for each in results]))
        row[0].set_ylabel(f"hits {tier.name}")
    if is_by_size:
        lines, names = rows[0][0].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside right upper", fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise RelayError(f"--plot {path} cannot be written: {error}.") from error


def shown_range(shares: Sequence[float]) -> tuple[float, float]:
    """The part of the axis that shows these shares, with a margin."""
    lowest, highest = min(shares), max(shares)
    margin = max(0.1 * (highest - lowest), _LEAST_MARGIN)
    return lowest - margin, highest + margin


def _sizes(results: Sequence[ReplayResult]) -> list[tuple[int, int]]:
    """The sizes of HBM and DRAM that were replayed."""
    return sorted({(each.candidate.hbm_bytes, each.candidate.dram_bytes) for each in results})


def _panels(results: Sequence[ReplayResult]) -> list[list[ReplayResult]]:
    """Results by panel, so that one tier's size varies in each.

    If HBM has one size, there is one panel in which DRAM varies. Otherwise there is a panel for each size of DRAM.
    """
    if len({each.candidate.hbm_bytes for each in results}) == 1:
        return [list(results)]
    dram_sizes = sorted({each.candidate.dram_bytes for each in results})
    return [[each for each in results if each.candidate.dram_bytes == size] for size in dram_sizes]


def _against_size(
    axes: Axes, tier: _Tier, results: Sequence[ReplayResult], bound: HitBound, environment: ReplayEnvironment
) -> None:
    """A line for each policy. The bound is also given in words: it may lie outside the axis."""
    sizes = _sizes(results)
    (hbm_bytes, dram_bytes), varies_hbm = sizes[0], sizes[0][0] != sizes[-1][0]

    def size_of(one: ReplayResult) -> int:
        return one.candidate.hbm_bytes if varies_hbm else one.candidate.dram_bytes

    ordered = sorted(results, key=size_of)
    for name in dict.fromkeys(name_of(each.candidate.policies) for each in results):
        line = [each for each in ordered if name_of(each.candidate.policies) == name]
        along = [size_of(each) for each in line]
        axes.plot(along, [tier.share(each) for each in line], marker="o", markersize=4, label=name)
    bounds = {size_of(each): tier.bound(bounds_of(bound, environment, each.candidate)) for each in ordered}
    axes.plot(list(bounds), list(bounds.values()), color=_BOUND)
    lowest, highest = min(bounds.values()), max(bounds.values())
    axes.set_title(f"bound (grey, if on the axis): {lowest:.1%} to {highest:.1%}", fontsize="small")
    # Size 0 is drawn beside the smallest size.
    axes.set_xscale("symlog", base=2, linthresh=min(size for size in bounds if size))
    axes.set_xticks(sorted(bounds))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(round(size)) if size else "none"))
    axes.minorticks_off()
    axes.set_xlabel(f"HBM, with {_amount(dram_bytes)} DRAM" if varies_hbm else f"DRAM, with {_amount(hbm_bytes)} HBM")


def _amount(size_bytes: int) -> str:
    return size_text(size_bytes) if size_bytes else "no"


def _by_policy(
    axes: Axes, tier: _Tier, results: Sequence[ReplayResult], bound: HitBound, environment: ReplayEnvironment
) -> None:
    """A dot for each policy, with its value, and the bound in words: it may lie outside the axis."""
    names = [name_of(each.candidate.policies) for each in results]
    shares = [tier.share(each) for each in results]
    axes.plot(names, shares, linestyle="", marker="o")
    for name, share in zip(names, shares, strict=True):
        axes.annotate(f"{share:.2%}", (name, share), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8)
    candidate = results[0].candidate
    axes.set_title(f"bound: {tier.bound(bounds_of(bound, environment, candidate)):.1%}", fontsize="small")
    axes.set_xlabel(f"policy, with {_amount(candidate.hbm_bytes)} HBM and {_amount(candidate.dram_bytes)} DRAM")
