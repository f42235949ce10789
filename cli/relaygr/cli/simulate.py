"""`relaygr simulate`: predicts a fleet's latencies, plans its capacity, and learns times from a run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relaygr.cli.fleet_options import (
    SECONDS,
    CalibrationOption,
    ImpressionsOption,
    JobsOption,
    LengthsOption,
    LinkOption,
    ModelOption,
    QpsOption,
    SloOption,
    TimesOption,
    TokenBytesOption,
    UsersOption,
    error_caveat,
    fleet_of,
    plan_caveats,
    plan_systems,
    us_per_byte,
    users_caveat,
)
from relaygr.cli.options import ConfigOption, SetOption, require_writable
from relaygr.cli.texts import stdout_console
from relaygr.progress import progress_bars
from relaygr.runtime.errors import RelayError

if TYPE_CHECKING:
    from relaygr.simulate.case import System

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Simulate a fleet with the product's own decisions and calibrated times; plan its capacity.",
)

_FAR_NOISE = 2.0
"""Device times beyond this many times the calibrated ones, or below that part of them, are those of other work."""

SampleOption = Annotated[
    int, typer.Option(min=1, help="Parts of the fleet that each seed simulates beside the busiest one.")
]
SeedsOption = Annotated[int, typer.Option(min=1, help="Seeds.")]
SystemOption = Annotated[
    str, typer.Option(metavar="both|relay|cache|off", help="Systems to simulate; both: relay and off.")
]
RunSystemOption = Annotated[
    str,
    typer.Option(
        metavar="both|relay|cache|off|pool",
        help="Systems to simulate; both: relay and off; pool: the relay alone, with a store, and with a pool of "
        "pre-infer workers (docs/pool.md), all workers in one simulation.",
    ),
]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures.")]


@app.command()
def run(
    calibration: CalibrationOption,
    model: ModelOption = None,
    token_bytes: TokenBytesOption = "32KiB",
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 1,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="Simulated time.", show_default=f"that of --day or the settings, else {SECONDS:g}"),
    ] = None,
    qps: QpsOption = None,
    slo_ms: SloOption = None,
    lengths: LengthsOption = None,
    users: UsersOption = None,
    times: TimesOption = None,
    system: RunSystemOption = "both",
    link_gbit_s: LinkOption = 10.0,
    day: Annotated[
        float | None, typer.Option(min=1, help="The load follows a day's curve of so many seconds; --qps is its peak.")
    ] = None,
    refresh: Annotated[
        float | None,
        typer.Option(
            min=1, help="Seconds between two changes of the weights, which empty the caches.", show_default="never"
        ),
    ] = None,
    sample: SampleOption = 8,
    seeds: SeedsOption = 4,
    jobs: JobsOption = None,
    json_out: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the figures.", show_default=False)] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Simulate a fleet under a load: latencies, late requests, paths, cache hits and device time.

    Traffic, tiers, policies and admission are those of the settings (--set traffic.*, worker.*, admission.*).
    """
    from relaygr.cli.fleet_output import NAMES, run_sentence, table_of, to_json, write_json
    from relaygr.simulate.case import System
    from relaygr.simulate.compare import compare
    from relaygr.simulate.fleet import FleetSize, Runner, simulate

    if json_out is not None:
        require_writable("--json", json_out)
    if plot is not None:
        from relaygr.cli.plots import require_plot

        require_plot(plot)
    fleet = fleet_of(
        calibration, model, token_bytes, times, config=config, overrides=overrides, qps=qps, slo_ms=slo_ms,
        lengths=lengths, users=users, seconds=day if seconds is None else seconds,
    )  # fmt: skip
    size, console, results = FleetSize(workers, sample, seeds), stdout_console(), {}
    with Runner(jobs) as runner, progress_bars() as bars:
        bars.began("simulating", 1)

        def show(name: str, share: float) -> None:
            bars.share(share, f"simulating: {name}")

        if system == "pool":
            case = replace(fleet.case(System.RELAY, day), refresh_s=refresh)
            results = compare(case, workers, us_per_byte(link_gbit_s), seeds, runner, show)
        else:
            for each in _systems(system, "pool"):
                case = replace(fleet.case(each, day), refresh_s=refresh)
                results[each] = simulate(case, size, runner, partial(show, each))
    traffic = fleet.settings.traffic
    title = f"{workers:,} workers, {traffic.rate_per_s:g} impressions a second, {traffic.budget_ms} ms"
    console.print(table_of(results, title))
    console.print(fleet.caveat())
    for note in (error_caveat(results.values()), users_caveat(traffic.users, workers)):
        if note is not None:
            console.print(note, style="yellow")
    console.print(run_sentence(results))
    described = fleet.described(sample, seeds) | {
        "workers": workers,
        "seconds": traffic.duration_s,
        "day_s": day,
        "refresh_s": refresh,
        "link_gbit_s": link_gbit_s,
    }
    if json_out is not None:
        write_json(json_out, to_json(results, described))
    if plot is not None:
        from relaygr.cli.plots import plot_figures

        plot_figures(plot, {NAMES.get(each, each): found for each, found in results.items()}, title)


@app.command()
def plan(
    calibration: CalibrationOption,
    qps: Annotated[float, typer.Option(min=0.001, help="Impressions a second of the whole fleet.")],
    model: ModelOption = None,
    token_bytes: TokenBytesOption = "32KiB",
    slo_ms: SloOption = None,
    lengths: LengthsOption = None,
    users: UsersOption = None,
    price_per_worker_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of a worker, in any currency.", show_default="no costs")
    ] = None,
    times: TimesOption = None,
    system: SystemOption = "both",
    impressions: ImpressionsOption = 4_000,
    sample: SampleOption = 2,
    seeds: SeedsOption = 4,
    jobs: JobsOption = None,
    json_out: JsonOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Find how many workers a load needs so that 99 % of the requests are answered in time, with and without the relay.

    HBM and DRAM of a worker are those of the settings (--set worker.hbm_bytes=SIZE).
    """
    from relaygr.cli.fleet_output import plan_json, plan_sentence, plan_table, write_json

    if json_out is not None:
        require_writable("--json", json_out)
    fleet = fleet_of(
        calibration, model, token_bytes, times, config=config, overrides=overrides, qps=qps, slo_ms=slo_ms,
        lengths=lengths, users=users,
    )  # fmt: skip
    rows = plan_systems(
        fleet, _systems(system), jobs, impressions=impressions, sample=sample, seeds=seeds,
        price_per_worker_hour=price_per_worker_hour,
    )  # fmt: skip
    traffic, console = fleet.settings.traffic, stdout_console()
    title = f"{qps:g} impressions a second, 99 % within {traffic.budget_ms} ms"
    console.print(plan_table(rows, title))
    console.print(fleet.caveat())
    for note in plan_caveats(rows, traffic.users):
        console.print(note, style="yellow")
    console.print(plan_sentence(rows, title))
    if json_out is not None:
        write_json(json_out, plan_json(rows, fleet.described(sample, seeds)))


@app.command("learn")
def learn_command(
    records: Annotated[Path, typer.Argument(metavar="RECORDS", help="Records of `relaygr traffic`, relay on.")],
    calibration: CalibrationOption,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")],
    scored_tokens: Annotated[int, typer.Option(min=1, help="Suffix tokens and candidates of a request.")] = 144,
) -> None:
    """Learn the times of Kafka hops and of the worker, and the noise of device times, from a measured run."""
    from relaygr.simulate.times import learn, save_times
    from relaygr.traffic.records import read_records
    from relaygr.worker.calibration import load_calibration

    if not records.is_file():
        raise RelayError(f"{records} cannot be read: `relaygr traffic --out FILE` writes it.")
    require_writable("--out", out)
    times = learn(read_records(records), load_calibration(calibration).model, scored_tokens, records.name)
    save_times(out, times)
    middle = len(times.hop_us) // 2
    hit, pre = times.hit_noise[middle], times.pre_noise[middle]
    console = stdout_console()
    console.print(
        f"{times.requests:,} requests: a hop {times.hop_us[middle] / 1000:.1f} ms (median), a look-up "
        f"{times.look_up_us:.0f} µs, an answer {times.answer_us:.0f} µs, measured / calibrated "
        f"{hit:.2f} (ranking) and {pre:.2f} (pre-infer); written to {out}"
    )
    if not all(1 / _FAR_NOISE <= each <= _FAR_NOISE for each in (hit, pre)):
        console.print(
            f"Measured device times are far from the calibrated ones. Did each request score {scored_tokens} tokens "
            "(--scored-tokens)? Is the calibration that of the same model and machine?",
            style="yellow",
        )


def _systems(text: str, *other: str) -> list[System]:
    """The systems of `--system`. `other`: what else the command takes."""
    from relaygr.simulate.case import System

    if text == "both":
        return [System.RELAY, System.OFF]
    if text not in set(System):
        names = ["both", *System, *other]
        raise RelayError(f"--system {text}: write {', '.join(names[:-1])} or {names[-1]}.")
    return [System(text)]
