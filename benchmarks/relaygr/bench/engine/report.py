"""The tables and the plots of an engine run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib import figure as matplotlib_figure
from rich.console import Console
from rich.table import Table

from relaygr.bench.engine.run import EngineStage, Figure


def print_tables(console: Console, figures: Sequence[Figure]) -> None:
    """Prints the comparison of full inference and hit, shares of the peak, appends, batches and variants."""
    for variant in _variants(figures):
        own = [figure for figure in figures if figure.variant == variant]
        console.print(f"\n[bold]{own[0].shape}[/], {variant}, {own[0].backend}", highlight=False)
        console.print(_lengths(own))
        console.print(_others(own))
    if len(_variants(figures)) > 1:
        console.print(_ratios(figures))


def _lengths(figures: Sequence[Figure]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("prefix", "pre-infer", "of peak", "candidates", "hit", "hit after a pause", "full", "full / hit"):
        table.add_column(name, justify="right")
    pre = {figure.prefix_tokens: figure for figure in _stage(figures, EngineStage.PRE_INFER)}
    hits = {(f.prefix_tokens, f.candidates): f for f in _stage(figures, EngineStage.HIT) if f.requests == 1}
    rested = {(f.prefix_tokens, f.candidates): f for f in _stage(figures, EngineStage.RESTED_HIT)}
    for full in _stage(figures, EngineStage.FULL):
        computed, hit = pre[full.prefix_tokens], hits[full.prefix_tokens, full.candidates]
        table.add_row(
            f"{full.prefix_tokens:,}",
            _ms(computed.median_us),
            f"{computed.share_of_peak:.0%}",
            f"{full.candidates:,}",
            _ms(hit.median_us),
            _ms(rested[full.prefix_tokens, full.candidates].median_us),
            _ms(full.median_us),
            f"{full.median_us / hit.median_us:.1f}",
        )
    return table


def _others(figures: Sequence[Figure]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("on a prefix of", "what", "time", "of peak", "a request alone / in the batch"):
        table.add_column(name, justify="right")
    alone = {(f.prefix_tokens, f.candidates): f.median_us for f in _stage(figures, EngineStage.HIT) if f.requests == 1}
    for figure in _stage(figures, EngineStage.APPEND):
        what = f"append {figure.new_tokens:,}"
        table.add_row(f"{figure.prefix_tokens:,}", what, _ms(figure.median_us), f"{figure.share_of_peak:.0%}", "")
    for figure in _stage(figures, EngineStage.HIT):
        if figure.requests > 1:
            ratio = alone[figure.prefix_tokens, figure.candidates] * figure.requests / figure.median_us
            table.add_row(
                f"{figure.prefix_tokens:,}",
                f"{figure.requests} requests of {figure.candidates:,}",
                _ms(figure.median_us),
                f"{figure.share_of_peak:.0%}",
                f"{ratio:.2f}",
            )
    return table


def _ratios(figures: Sequence[Figure]) -> Table:
    """The speed of each variant as a multiple of the first variant's, point by point."""
    first, *others = _variants(figures)
    table = Table(title=f"times as fast as {first}", box=None, padding=(0, 2, 0, 0))
    for name in ("stage", "requests", "prefix", "new", "candidates", *others):
        table.add_column(name, justify="right")
    by_point = {(_size(figure), figure.variant): figure.median_us for figure in figures}
    for size in dict.fromkeys(_size(figure) for figure in figures):
        base_us = by_point[size, first]
        ratios = (f"{base_us / by_point[size, other]:.2f}" for other in others)
        table.add_row(*(f"{value:,}" if isinstance(value, int) else value for value in size), *ratios)
    return table


def plot(figures: Sequence[Figure], path: Path) -> None:
    """Plots time over prefix length for pre-infer, hit and full inference, one line for each variant."""
    candidates = sorted({figure.candidates for figure in _stage(figures, EngineStage.FULL)})
    chosen = candidates[len(candidates) // 2]
    figure = matplotlib_figure.Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, variant in enumerate(_variants(figures)):
        own = [each for each in figures if each.variant == variant and each.requests == 1]
        for stage, style in ((EngineStage.FULL, "-"), (EngineStage.PRE_INFER, ":"), (EngineStage.HIT, "--")):
            line = [each for each in _stage(own, stage) if each.candidates in (0, chosen)]
            lengths = [each.prefix_tokens for each in line]
            left.plot(
                lengths, [each.median_us / 1e3 for each in line], style, color=f"C{number}", marker="o", markersize=3
            )
        pre = list(_stage(own, EngineStage.PRE_INFER))
        right.plot([e.prefix_tokens for e in pre], [100 * e.share_of_peak for e in pre], marker="o", label=variant)
    for style, name in (("-", f"full, {chosen} candidates"), (":", "pre-infer"), ("--", f"hit, {chosen} candidates")):
        left.plot([], [], style, color="grey", label=name)
    left.set(xscale="log", yscale="log", xlabel="prefix tokens", ylabel="ms", title=f"{figures[0].shape}: time")
    right.set(xscale="log", xlabel="prefix tokens", ylabel="%", title="pre-infer: share of the matrix peak")
    right.set_ylim(bottom=0)  # int8 is above the peak of float32.
    for axes in (left, right):
        axes.set_xticks(sorted({each.prefix_tokens for each in figures}))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_formatter("")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _stage(figures: Iterable[Figure], stage: EngineStage) -> list[Figure]:
    return [figure for figure in figures if figure.stage == stage]


def _variants(figures: Iterable[Figure]) -> list[str]:
    return list(dict.fromkeys(figure.variant for figure in figures))


def _size(figure: Figure) -> tuple[str, int, int, int, int]:
    return figure.stage, figure.requests, figure.prefix_tokens, figure.new_tokens, figure.candidates


def _ms(duration_us: float) -> str:
    return f"{duration_us / 1e3:,.2f} ms"
