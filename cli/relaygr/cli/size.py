"""`relaygr size`: how large a fleet must be for a load, and what the relay saves there."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from relaygr.cli.fleet_options import (
    CalibrationOption,
    ImpressionsOption,
    JobsOption,
    LinkOption,
    ModelOption,
    TimesOption,
    TokenBytesOption,
    fleet_of,
    plan_caveats,
    plan_systems,
    us_per_byte,
)
from relaygr.cli.options import ConfigOption, SetOption
from relaygr.cli.texts import figures_table, show_age, show_size, stdout_console

if TYPE_CHECKING:
    from relaygr.simulate.ratio import Ratio
    from relaygr.simulate.size import Sizing

_SAMPLE, _SEEDS = 2, 4
"""As `relaygr simulate plan` by default."""


def size(
    calibration: CalibrationOption,
    users: Annotated[int, typer.Option(min=1, help="Users.")],
    qps: Annotated[float, typer.Option(min=0.001, help="Impressions a second of the whole fleet.")],
    length: Annotated[str, typer.Option(metavar="MEDIAN[:LONGEST]", help="Lengths of histories, behaviours.")],
    model: ModelOption = None,
    token_bytes: TokenBytesOption = "32KiB",
    slo_ms: Annotated[
        int | None, typer.Option(min=1, help="Time limit of ranking, ms.", show_default="traffic.budget_ms")
    ] = None,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="Candidates of a request.", show_default="traffic.candidates")
    ] = None,
    suffix: Annotated[
        int | None, typer.Option(min=0, help="Short-term behaviours of a request.", show_default="traffic.suffix")
    ] = None,
    hbm: Annotated[
        str | None, typer.Option(metavar="SIZE", help="K,V of one worker in HBM.", show_default="worker.hbm_bytes")
    ] = None,
    dram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="DRAM tier of one worker.", show_default="worker.dram_bytes")
    ] = None,
    keep_s: Annotated[
        float,
        typer.Option(min=1, max=31_536_000, help="DRAM keeps prefixes for users who return within this many seconds."),
    ] = 600.0,
    reuse: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Share of impressions whose user returns so soon.", show_default="calculated"),
    ] = None,
    link_gbit_s: LinkOption = 10.0,
    times: TimesOption = None,
    impressions: ImpressionsOption = 4_000,
    jobs: JobsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Say how many workers, how much memory and network a load needs, and what the relay saves.

    The number of workers is that of `relaygr simulate plan`. Memory, network and savings are calculated from the shape
    of the model's K,V and from the calibration. Other details of the load are settings (--set traffic.*).
    """
    from relaygr.cli.fleet_output import plan_json, plan_sentence, plan_table
    from relaygr.simulate.case import System
    from relaygr.simulate.plan import least_workers
    from relaygr.simulate.ratio import ratio_of
    from relaygr.simulate.size import size_of

    options = {
        "traffic.candidates": candidates,
        "traffic.suffix": suffix,
        "worker.hbm_bytes": hbm,
        "worker.dram_bytes": dram,
    }
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    fleet = fleet_of(
        calibration, model, token_bytes, times, config=config, overrides=[*(overrides or []), *given], qps=qps,
        slo_ms=slo_ms, lengths=length, users=users, lengths_option="--length",
    )  # fmt: skip
    rows = plan_systems(fleet, [System.RELAY, System.OFF], jobs, impressions=impressions, sample=_SAMPLE, seeds=_SEEDS)
    case = fleet.case(System.RELAY)
    sizing = size_of(case, rows[0].plan.workers or least_workers(case), keep_s, reuse)
    ratio = ratio_of(case, sizing, us_per_byte(link_gbit_s))
    together = rows[0].plan.workers
    in_pool = ratio.workers(together) if together else None
    if as_json:
        content = plan_json(rows, fleet.described(_SAMPLE, _SEEDS))
        pool = asdict(ratio) | {"pre_per_rank": ratio.pre_per_rank, "workers": in_pool}
        typer.echo(json.dumps({**content, "calculated": as_plain(sizing), "pool": pool}, indent=2))
        return
    console, title = stdout_console(), f"{qps:g} impressions a second, 99 % within {case.demand.traffic.budget_ms} ms"
    console.print(plan_table(rows, title))
    console.print()
    console.print(_table(sizing))
    console.print()
    console.print(_savings(sizing))
    console.print()
    console.print(_pool(ratio, in_pool, together))
    console.print()
    console.print(fleet.caveat())
    for note in plan_caveats(rows, users):
        console.print(note, style="yellow")
    if not sizing.hbm_is_enough:
        console.print("The HBM of the settings does not hold the prefixes that wait: raise --hbm.", style="yellow")
    console.print(plan_sentence(rows, title))


def _pool(ratio: Ratio, workers: tuple[int, int] | None, together: int) -> Table:
    """The ratio of a pool (docs/pool.md), its workers beside those together, and the lengths at which it loses."""
    table = figures_table("Calculated, with pre-infer in a pool", "")
    table.add_row("pre-infer workers for each that ranks", f"{ratio.pre_per_rank:.2g}")
    if workers is not None:
        table.add_row(f"pre-infer + ranking workers for the work of {together:,}", f"{workers[0]:,} + {workers[1]:,}")
    lengths = f"below {ratio.pays_from:,} behaviours" if ratio.pays_from else "every length"
    table.add_row("loses, as a fetch takes longer than computing", lengths)
    return table


def as_plain(sizing: Sizing) -> dict[str, object]:
    """The figures as JSON takes them."""
    return {
        **asdict(sizing),
        "hbm_is_enough": sizing.hbm_is_enough,
        "message_bytes": {kind.value: count for kind, count in sizing.message_bytes.items()},
        "work": {**asdict(sizing.work), "work": {tier.value: share for tier, share in sizing.work.work.items()}},
    }


def _table(sizing: Sizing) -> Table:
    table = figures_table("Calculated, with the relay", "all workers", "a worker")

    def add(name: str, size_bytes: float) -> None:
        table.add_row(name, show_size(round(size_bytes)), show_size(round(size_bytes / sizing.workers)))

    add(f"HBM for {sizing.waiting:,.1f} prefixes that wait, at least", sizing.hbm_bytes)
    add("HBM as set", sizing.hbm_set_bytes)
    add(f"DRAM for {sizing.users_kept:,.0f} users in {show_age(sizing.keep_s)}", sizing.dram_bytes)
    add("DRAM as set", sizing.dram_set_bytes)
    table.add_row("a prefix of the mean history, in HBM", show_size(sizing.prefix_bytes), "", style="dim")
    table.add_row("the same in DRAM", show_size(sizing.dram_prefix_bytes), "", style="dim")
    table.add_row("written to Kafka a second", show_size(round(sizing.network_bytes_per_s)), "")
    for kind, count in sizing.message_bytes.items():
        table.add_row(f"  a {kind}", show_size(count), "", style="dim")
    return table


def _savings(sizing: Sizing) -> Table:
    from relaygr.simulate.visit import Tier

    work, figures = sizing.work, sizing.work.figures
    title = f"Device work of a visit, {figures.behaviours:,} behaviours; full inference = 100 %"
    table = figures_table(title, "work", "of it before the request")
    full_us = figures.full_us
    table.add_row("prefix not kept", f"{work.work[Tier.NONE]:.0%}", f"{figures.pre_us / full_us:.0%}")
    if work.hbm_keeps_s:
        table.add_row(
            f"back within {show_age(work.hbm_keeps_s)}, in HBM",
            f"{work.work[Tier.HBM]:.0%}",
            f"{figures.append_us / full_us:.0%}",
        )
    if work.dram_keeps_s:
        table.add_row(
            f"back within {show_age(work.dram_keeps_s)}, in DRAM",
            f"{work.work[Tier.DRAM]:.0%}",
            f"{(figures.append_us + figures.reload_us) / full_us:.0%}",
        )
    name = f"all visits, {sizing.reuse:.0%} of them back within {show_age(sizing.keep_s)}"
    table.add_row(name, f"{sizing.device_share:.0%}", "", style="bold")
    hit, full = figures.hit_us / 1000, full_us / 1000
    table.caption = f"The ranking request itself takes {hit:,.1f} ms on the device, and {full:,.1f} ms in full."
    table.caption_justify = "left"
    return table
