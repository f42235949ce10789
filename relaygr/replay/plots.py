"""Outcomes of replays as a picture: hit ratio against size, or by policy where one size was replayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from relaygr.replay.bound import HitBound
from relaygr.replay.run import Arena, Outcome
from relaygr.replay.tables import bounds_of, name_of
from relaygr.settings import size_text
from streams.errors import RelayError

_BOUND = "0.55"


def save_plot(path: Path, outcomes: Sequence[Outcome], bound: HitBound, arena: Arena) -> None:
    """Writes the picture; the ending of `path` says its kind. Raises RelayError."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    sizes = {(each.candidate.hbm_bytes, each.candidate.dram_bytes) for each in outcomes}
    if len(sizes) > 1:
        _against_size(axes, outcomes, bound, arena)
    else:
        _by_policy(axes, outcomes, bound, arena)
    axes.set_ylabel("visits that found all they could reuse")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, 1)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    dashed = len(sizes) > 1 and any(each.candidate.dram_bytes for each in outcomes)
    title = "solid: in HBM\ndashed: in HBM or DRAM" if dashed else None
    figure.legend(loc="outside right upper", title=title, title_fontsize="small", fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise RelayError(f"--plot {path} can not be written: {error}.") from error


def _against_size(axes: Axes, outcomes: Sequence[Outcome], bound: HitBound, arena: Arena) -> None:
    """A solid line for HBM and a dashed one for both tiers, a colour a policy."""
    by_hbm = len({each.candidate.hbm_bytes for each in outcomes}) > 1
    by_dram = len({each.candidate.dram_bytes for each in outcomes}) > 1

    def size_of(one: Outcome) -> int:
        return (one.candidate.hbm_bytes if by_hbm else 0) + (one.candidate.dram_bytes if by_dram else 0)

    ordered = sorted(outcomes, key=size_of)
    tiers = any(each.candidate.dram_bytes for each in outcomes)
    for name in dict.fromkeys(name_of(each.candidate.policies) for each in outcomes):
        line = [each for each in ordered if name_of(each.candidate.policies) == name]
        sizes = [size_of(each) for each in line]
        visits = max(1, line[0].visits)
        (drawn,) = axes.plot(sizes, [each.hbm_hits / visits for each in line], marker="o", markersize=4, label=name)
        if tiers:
            both = [(each.hbm_hits + each.dram_hits) / visits for each in line]
            axes.plot(sizes, both, linestyle="--", marker="o", markersize=4, color=drawn.get_color())
    bounds = {size_of(each): bounds_of(bound, arena, each.candidate) for each in ordered}
    axes.plot(list(bounds), [pair[0] for pair in bounds.values()], color=_BOUND, label="bound")
    if tiers:
        axes.plot(list(bounds), [pair[1] for pair in bounds.values()], color=_BOUND, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(bounds))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(round(size))))
    axes.minorticks_off()
    axes.set_xlabel(" + ".join(["HBM"] * by_hbm + ["DRAM"] * by_dram))


def _by_policy(axes: Axes, outcomes: Sequence[Outcome], bound: HitBound, arena: Arena) -> None:
    """Stacked bars, and the bounds as lines across."""
    names = [name_of(each.candidate.policies) for each in outcomes]
    visits = max(1, outcomes[0].visits)
    in_hbm = [each.hbm_hits / visits for each in outcomes]
    axes.bar(names, in_hbm, label="in HBM", color="C0")
    candidate = outcomes[0].candidate
    if candidate.dram_bytes:
        axes.bar(names, [each.dram_hits / visits for each in outcomes], bottom=in_hbm, label="in DRAM", color="C1")
    hbm_bound, both_bound = bounds_of(bound, arena, candidate)
    axes.axhline(hbm_bound, color="C0", linestyle=":", label="bound, HBM")
    if candidate.dram_bytes:
        axes.axhline(both_bound, color="C1", linestyle=":", label="bound, either")
    axes.set_xlabel(f"policy, with {size_text(candidate.hbm_bytes)} HBM and {size_text(candidate.dram_bytes)} DRAM")
