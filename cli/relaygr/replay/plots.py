"""Draws results of replays: hit ratio against the size of a tier, or by policy if there is one size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from relaygr.replay.bound import HitBound
from relaygr.replay.run import ReplayEnvironment, ReplayResult
from relaygr.replay.tables import bounds_of, name_of
from relaygr.runtime.errors import RelayError
from relaygr.settings import size_text

_BOUND = "0.55"


def save_plot(path: Path, results: Sequence[ReplayResult], bound: HitBound, environment: ReplayEnvironment) -> None:
    """Writes the picture in the format that the suffix of `path` names. Raises RelayError."""
    panels = _panels(results)
    figure = Figure(figsize=(5 + 4 * len(panels), 5), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes: list[Axes] = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0].tolist()
    is_by_size = any(len(_sizes(panel)) > 1 for panel in panels)
    for axes, panel in zip(all_axes, panels, strict=True):
        (_against_size if is_by_size else _by_policy)(axes, panel, bound, environment)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(0, 1)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    all_axes[0].set_ylabel("visits that found all they could reuse")
    dashed = is_by_size and any(each.candidate.dram_bytes for each in results)
    title = "solid: in HBM\ndashed: in HBM or DRAM" if dashed else None
    lines, names = all_axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside right upper", title=title, title_fontsize="small", fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise RelayError(f"--plot {path} cannot be written: {error}.") from error


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


def _against_size(axes: Axes, results: Sequence[ReplayResult], bound: HitBound, environment: ReplayEnvironment) -> None:
    """A solid line for HBM and a dashed line for both tiers, with one colour for each policy."""
    sizes = _sizes(results)
    (hbm_bytes, dram_bytes), varies_hbm = sizes[0], sizes[0][0] != sizes[-1][0]

    def size_of(one: ReplayResult) -> int:
        return one.candidate.hbm_bytes if varies_hbm else one.candidate.dram_bytes

    ordered = sorted(results, key=size_of)
    has_dram = any(each.candidate.dram_bytes for each in results)
    for name in dict.fromkeys(name_of(each.candidate.policies) for each in results):
        line = [each for each in ordered if name_of(each.candidate.policies) == name]
        along = [size_of(each) for each in line]
        visits = max(1, line[0].visits)
        (drawn,) = axes.plot(along, [each.hbm_hits / visits for each in line], marker="o", markersize=4, label=name)
        if has_dram:
            both = [(each.hbm_hits + each.dram_hits) / visits for each in line]
            axes.plot(along, both, linestyle="--", marker="o", markersize=4, color=drawn.get_color())
    bounds = {size_of(each): bounds_of(bound, environment, each.candidate) for each in ordered}
    axes.plot(list(bounds), [pair[0] for pair in bounds.values()], color=_BOUND, label="bound")
    if has_dram:
        axes.plot(list(bounds), [pair[1] for pair in bounds.values()], color=_BOUND, linestyle="--")
    # Size 0 is drawn beside the smallest size.
    axes.set_xscale("symlog", base=2, linthresh=min(size for size in bounds if size))
    axes.set_xticks(sorted(bounds))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(round(size)) if size else "none"))
    axes.minorticks_off()
    axes.set_xlabel(f"HBM, with {_amount(dram_bytes)} DRAM" if varies_hbm else f"DRAM, with {_amount(hbm_bytes)} HBM")


def _amount(size_bytes: int) -> str:
    return size_text(size_bytes) if size_bytes else "no"


def _by_policy(axes: Axes, results: Sequence[ReplayResult], bound: HitBound, environment: ReplayEnvironment) -> None:
    """Stacked bars, and the bounds as horizontal lines."""
    names = [name_of(each.candidate.policies) for each in results]
    visits = max(1, results[0].visits)
    in_hbm = [each.hbm_hits / visits for each in results]
    axes.bar(names, in_hbm, label="in HBM", color="C0")
    candidate = results[0].candidate
    if candidate.dram_bytes:
        axes.bar(names, [each.dram_hits / visits for each in results], bottom=in_hbm, label="in DRAM", color="C1")
    hbm_bound, both_bound = bounds_of(bound, environment, candidate)
    axes.axhline(hbm_bound, color="C0", linestyle=":", label="bound, HBM")
    if candidate.dram_bytes:
        axes.axhline(both_bound, color="C1", linestyle=":", label="bound, either")
    axes.set_xlabel(f"policy, with {_amount(candidate.hbm_bytes)} HBM and {_amount(candidate.dram_bytes)} DRAM")
