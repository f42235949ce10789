"""`relaygr model bench MODEL`: times of a model on this machine, and for which users the relay saves work.

The command imports torch only when it runs, so that `--help` answers without it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from relaygr.cli.model_options import (
    ComputeDtypeOption,
    DeviceOption,
    DramKvDtypeOption,
    KvDtypeOption,
    RankerModulesOption,
    ThreadsOption,
)
from relaygr.cli.texts import parse_size, prints_to_stderr, show_age, show_size, stdout_console, warn_if_busy
from relaygr.runtime.errors import RelayError
from relaygr.worker.kv import DramKvDtype
from relaygr.worker.model.options import DEFAULT_PAGE_TOKENS
from relaygr.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from relaygr.simulate.visit import BreakEven

GAPS = {"10 s": 10.0, "1 min": 60.0, "10 min": 600.0, "1 h": 3600.0, "1 day": 86_400.0}
"""Seconds between two visits of a user."""
_DEFAULTS = WorkerSettings.model_fields
_SHORTEST = 128


def bench_command(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Behaviours of a history; may be repeated.", show_default="doubling, to the longest"),
    ] = None,
    candidates: Annotated[int, typer.Option(min=1, help="Candidates of a request.")] = 100,
    new_behaviours: Annotated[int, typer.Option(min=1, help="New behaviours since the visit before.")] = 16,
    hbm: Annotated[
        str | None, typer.Option(help="Size of the HBM tier, such as 32GiB.", show_default="worker.hbm_bytes")
    ] = None,
    dram: Annotated[str | None, typer.Option(help="Size of the DRAM tier.", show_default="worker.dram_bytes")] = None,
    visits_per_second: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Visits that this device serves.", show_default="70 % load by full inference"),
    ] = None,
    device: DeviceOption = None,
    kv_dtype: KvDtypeOption = None,
    dram_kv_dtype: DramKvDtypeOption = DramKvDtype.SAME,
    compute_dtype: ComputeDtypeOption = None,
    threads: ThreadsOption = 1,
    ranker_module: RankerModulesOption = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Measurements of each time; the median counts.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Picture to write, such as bench.svg.", show_default=False)] = None,
) -> None:
    """Measure a model's times and K,V, and for which lengths and return gaps the relay saves work."""
    if plot is not None:
        from relaygr.cli.plots import require_plot

        require_plot(plot)
    from relaygr.machine import CoreWatch
    from relaygr.runtime.logs import configure_logging
    from relaygr.runtime.settings import LogLevel, LogSettings
    from relaygr.simulate.visit import break_even, measure
    from relaygr.worker.model.engine import load_engine

    configure_logging(LogSettings(level=LogLevel.WARNING))
    with prints_to_stderr():
        engine = load_engine(
            model, device, kv_dtype, DEFAULT_PAGE_TOKENS, threads, compute_dtype, ranker_modules=ranker_module or ()
        )
    limits = engine.limits
    lengths = sorted(set(length or _doubling(limits.max_prefix_behaviours)))
    if lengths[-1] > limits.max_prefix_behaviours or candidates > limits.max_candidates:
        raise RelayError(
            f"The model takes {limits.max_prefix_behaviours:,} behaviours and {limits.max_candidates:,} candidates: "
            "give a smaller --length or --candidates."
        )
    hbm_bytes, dram_bytes = _bytes("--hbm", hbm, "hbm_bytes"), _bytes("--dram", dram, "dram_bytes")
    with prints_to_stderr(), CoreWatch() as watch:
        figures = measure(engine, lengths, candidates, new_behaviours, dram_kv_dtype, repeats)
    warn_if_busy(watch.cores)
    grows = engine.rules.grows
    found = [break_even(each, hbm_bytes, dram_bytes, visits_per_second, grows=grows) for each in figures]
    if plot is not None:
        from relaygr.cli.plots import plot_break_even

        plot_break_even(plot, found, list(GAPS.values()))
    if as_json:
        typer.echo(json.dumps([_row(each) for each in found], indent=1))
        return
    console = stdout_console()
    console.print(
        f"{engine.device.name} ({engine.device.description}), attention by {engine.backend}, products in "
        f"{engine.compute_dtype}, K,V {engine.geometry.dtype}; {candidates} candidates, "
        f"{new_behaviours} new behaviours"
    )
    _print_times(console, found)
    _print_break_even(console, found, grows)


def _doubling(longest: int) -> list[int]:
    """128, 512, 2048, ... below the longest, and the longest."""
    lengths = [longest]
    while lengths[0] // 4 >= _SHORTEST:
        lengths.insert(0, lengths[0] // 4)
    return lengths


def _bytes(option: str, text: str | None, setting: str) -> int:
    return int(_DEFAULTS[setting].default) if text is None else parse_size(option, text)


def _row(found: BreakEven) -> dict[str, object]:
    own: dict[str, object] = {name: value for name, value in asdict(found).items() if name != "figures"}
    return {**asdict(found.figures), "full_us": found.figures.full_us, **own}


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _print_times(console: Console, found: list[BreakEven]) -> None:
    table = _table("behaviours", "T_full", "T_pre", "T_append", "T_hit", "full / hit", "K,V")
    for each in found:
        own = each.figures
        table.add_row(
            f"{own.behaviours:,}",
            *(f"{time_us / 1e3:,.2f}" for time_us in (own.full_us, own.pre_us, own.append_us, own.hit_us)),
            f"{own.full_us / own.hit_us:.1f}",
            show_size(own.kv_bytes),
        )
    console.print("\nTimes in ms, and the size of a prefix:")
    console.print(table)


def _print_break_even(console: Console, found: list[BreakEven], grows: bool) -> None:
    from relaygr.simulate.visit import Tier

    if not grows:
        console.print(
            "\nPrefixes of this model are valid for one visit. The relay computes them before the ranking request, "
            "which shortens it from T_full to T_hit, and saves no work."
        )
        return
    kept = _table("behaviours", "visits/s", "fit in HBM", "kept there", "fit in DRAM", "kept in either")
    for each in found:
        kept.add_row(
            f"{each.figures.behaviours:,}",
            f"{each.visits_per_second:,.1f}",
            f"{each.prefixes_in_hbm:,}",
            show_age(each.hbm_keeps_s),
            f"{each.prefixes_in_dram:,}",
            show_age(max(each.dram_keeps_s, each.hbm_keeps_s)),
        )
    console.print("\nHow many prefixes fit, and for how long they are kept:")
    console.print(kept)
    work = _table("behaviours", *GAPS)
    names = {tier: "" if tier is Tier.NONE else f" {tier}" for tier in Tier}
    for each in found:
        tiers = [each.tier(gap) for gap in GAPS.values()]
        work.add_row(f"{each.figures.behaviours:,}", *(f"{each.work[tier]:.0%}{names[tier]}" for tier in tiers))
    console.print(
        "\nDevice work of a visit by the time since the user's last one, full inference = 100 %, and the tier that "
        "still has the prefix, if one has:"
    )
    console.print(work)
    console.print(
        "Below 100 % the relay saves work; in each case the ranking request takes T_hit instead of T_full. Each visit "
        "appends its new behaviours; a worker ranks a few of them with the suffix where that is cheaper."
    )
