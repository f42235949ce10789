"""`relaygr simulate`: predicts a fleet's latencies, plans its capacity, and learns times from a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from relaygr.cli.options import ConfigOption, SetOption, command_settings
from relaygr.cli.texts import parse_size
from relaygr.runtime.errors import RelayError

if TYPE_CHECKING:
    from relaygr.settings import Settings
    from relaygr.simulate.case import Shape, System
    from relaygr.simulate.times import MeasuredTimes
    from relaygr.worker.calibration import Calibration

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Simulate a fleet with the product's own decisions and calibrated times; plan its capacity.",
)

CalibrationOption = Annotated[Path, typer.Option(metavar="FILE", help="File of `relaygr calibrate`.")]
ModelOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Checkpoint: the shape of K,V.", show_default=False)
]
TokenBytesOption = Annotated[str, typer.Option(metavar="SIZE", help="Without --model: K,V of one token.")]
TimesOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File of `relaygr simulate learn`.", show_default="assumed times")
]
QpsOption = Annotated[float | None, typer.Option(min=0.001, help="Impressions a second.", show_default="setting")]
SloOption = Annotated[int | None, typer.Option(min=1, help="Time limit of ranking, ms.", show_default="setting")]
LengthsOption = Annotated[
    str | None,
    typer.Option(metavar="MEDIAN[:LONGEST]", help="Lengths of histories, behaviours.", show_default="settings"),
]
UsersOption = Annotated[int | None, typer.Option(min=1, help="Users.", show_default="setting")]
SampleOption = Annotated[int, typer.Option(min=1, help="Parts of the fleet that each seed simulates.")]
SeedsOption = Annotated[int, typer.Option(min=1, help="Seeds.")]
JobsOption = Annotated[int | None, typer.Option(min=1, help="Processes.", show_default="cores")]
SystemOption = Annotated[str, typer.Option(metavar="both|relay|off", help="Systems to simulate.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures.")]


@app.command()
def run(
    calibration: CalibrationOption,
    model: ModelOption = None,
    token_bytes: TokenBytesOption = "32KiB",
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="Simulated time.")] = 60.0,
    qps: QpsOption = None,
    slo_ms: SloOption = None,
    lengths: LengthsOption = None,
    users: UsersOption = None,
    times: TimesOption = None,
    system: SystemOption = "both",
    day: Annotated[
        float | None, typer.Option(min=1, help="The load follows a day's curve of so many seconds; --qps is its peak.")
    ] = None,
    autoscale: Annotated[
        str | None, typer.Option(metavar="LEAST:MOST", help="The number of workers follows the load.")
    ] = None,
    target_load: Annotated[float, typer.Option(min=0.01, max=1, help="Device load that autoscaling aims at.")] = 0.5,
    start_s: Annotated[float, typer.Option(min=0, help="Time that a new worker takes to start.")] = 20.0,
    kill_at: Annotated[list[float] | None, typer.Option(min=0, help="A worker dies at this second.")] = None,
    standby: Annotated[bool, typer.Option("--standby", help="A standby takes over from each dead worker.")] = False,
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
    from relaygr.simulate.case import case_of
    from relaygr.simulate.fleet import FleetSize, Runner, expected_impressions, simulate
    from relaygr.simulate.output import save_plot, table_of, to_json, write_json
    from relaygr.simulate.relay import Autoscale, Changes

    if plot is not None:
        from relaygr.replay.plots import require_plot

        require_plot(plot)
    settings = _settings(config, overrides, qps, slo_ms, lengths, users, seconds)
    measured = _calibration(calibration)
    shape = _shape(model, token_bytes, settings, measured)
    learnt = _times(times)
    rule = None
    if autoscale is not None:
        least, most = _pair("--autoscale", autoscale)
        rule = Autoscale(least, most, target_load)
        workers = min(max(workers, least), most)
    changes = Changes(tuple(kill_at or ()), standby, settings.session_timeout_ms / 1000, start_s, rule)
    size, console, results = FleetSize(workers, sample, seeds), Console(highlight=False), {}
    with Runner(jobs) as runner, _progress() as (progress, task):
        for each in _systems(system):
            case = case_of(
                settings, shape, measured.model, learnt, on_cpu=_on_cpu(measured), system=each, changes=changes,
                day_s=day,
            )  # fmt: skip
            total = expected_impressions(case, size)
            progress.reset(task, total=total, description=f"simulating: {each}")
            results[each] = simulate(case, size, runner, lambda done: progress.update(task, completed=done))
    traffic = settings.traffic
    title = f"{workers:,} workers, {traffic.rate_per_s:g} impressions a second, {traffic.budget_ms} ms"
    console.print(table_of(results, title))
    console.print(_caveat(learnt, measured), soft_wrap=True)
    described = _described(settings, measured, learnt) | {"workers": workers, "seconds": seconds, "day_s": day}
    if json_out is not None:
        write_json(json_out, to_json(results, described))
    if plot is not None:
        save_plot(plot, results, title)


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
    impressions: Annotated[int, typer.Option(min=100, help="Simulated for each number of workers.")] = 4_000,
    sample: SampleOption = 2,
    seeds: SeedsOption = 2,
    jobs: JobsOption = None,
    json_out: JsonOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Find how many workers a load needs so that 99 % of the requests are answered in time, with and without the relay.

    HBM and DRAM of a worker are those of the settings (--set worker.hbm_bytes=SIZE).
    """
    from relaygr.simulate.case import System, case_of
    from relaygr.simulate.fleet import Runner
    from relaygr.simulate.output import TABLE_WIDTH, PlanRow, plan_json, plan_table, write_json
    from relaygr.simulate.plan import memory_of, plan_capacity

    settings = _settings(config, overrides, qps, slo_ms, lengths, users, 1.0)
    measured = _calibration(calibration)
    shape = _shape(model, token_bytes, settings, measured)
    learnt = _times(times)
    rows = []
    with Runner(jobs) as runner, _progress() as (progress, task):
        for each in _systems(system):
            case = case_of(settings, shape, measured.model, learnt, on_cpu=_on_cpu(measured), system=each)

            def show(workers: int, share: float, name: str = each.value) -> None:
                progress.update(task, total=1.0, completed=share, description=f"{name}: {workers:,} workers")

            found = plan_capacity(case, sample, seeds, runner, show, impressions)
            hbm_bytes, dram_bytes = memory_of(settings, shape, found.workers)
            cost = None if price_per_worker_hour is None else price_per_worker_hour * found.workers
            per_million = None if cost is None else cost / (qps * 3600) * 1e6
            rows.append(PlanRow(each, found, hbm_bytes, dram_bytes if each is System.RELAY else 0, cost, per_million))
    traffic = settings.traffic
    console = Console(highlight=False, width=max(Console().width, TABLE_WIDTH))
    console.print(plan_table(rows, f"{qps:g} impressions a second, 99 % within {traffic.budget_ms} ms"))
    console.print(_caveat(learnt, measured), soft_wrap=True)
    if json_out is not None:
        write_json(json_out, plan_json(rows, _described(settings, measured, learnt)))


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

    if not records.is_file():
        raise RelayError(f"{records} cannot be read: `relaygr traffic --out FILE` writes it.")
    times = learn(read_records(records), _calibration(calibration).model, scored_tokens, records.name)
    save_times(out, times)
    middle = len(times.hop_us) // 2
    Console(highlight=False).print(
        f"{times.requests:,} requests: a hop {times.hop_us[middle] / 1000:.1f} ms (median), a look-up "
        f"{times.look_up_us:.0f} µs, an answer {times.answer_us:.0f} µs, measured / calibrated "
        f"{times.hit_noise[middle]:.2f} (ranking) and {times.pre_noise[middle]:.2f} (pre-infer); written to {out}",
        soft_wrap=True,
    )


# -- inputs ----------------------------------------------------------------------------------------


def _settings(
    config: Path | None,
    overrides: list[str] | None,
    qps: float | None,
    slo_ms: int | None,
    lengths: str | None,
    users: int | None,
    seconds: float,
) -> Settings:
    wanted = [f"traffic.duration_s={seconds}", *(overrides or [])]
    if qps is not None:
        wanted.append(f"traffic.rate_per_s={qps}")
    if slo_ms is not None:
        wanted.append(f"traffic.budget_ms={slo_ms}")
    if users is not None:
        wanted.append(f"traffic.users={users}")
    if lengths is not None:
        median, longest = _pair("--lengths", lengths if ":" in lengths else f"{lengths}:{_double(lengths)}")
        wanted += [f"traffic.history_median={median}", f"traffic.history_max={longest}"]
    return command_settings(config, overrides=wanted)


def _double(text: str) -> str:
    return str(2 * int(text)) if text.isdecimal() else text


def _pair(option: str, text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    if not (first.isdecimal() and second.isdecimal() and 0 < int(first) <= int(second)):
        raise RelayError(f"{option} {text}: write two whole numbers, such as 2:8, the smaller one first.")
    return int(first), int(second)


def _calibration(path: Path) -> Calibration:
    from relaygr.worker.calibration import load_calibration

    return load_calibration(path)


def _on_cpu(calibration: Calibration) -> bool:
    from relaygr.simulate.case import is_cpu

    return is_cpu(calibration)


def _shape(model: Path | None, token_bytes: str, settings: Settings, calibration: Calibration) -> Shape:
    from relaygr.simulate.case import shape_of_model, shape_of_tokens

    if model is not None:
        return shape_of_model(model, settings, calibration)
    return shape_of_tokens(parse_size("--token-bytes", token_bytes), settings)


def _times(path: Path | None) -> MeasuredTimes:
    from relaygr.simulate.times import MeasuredTimes, load_times

    return MeasuredTimes() if path is None else load_times(path)


def _systems(text: str) -> list[System]:
    from relaygr.simulate.case import System

    if text == "both":
        return list(System)
    if text not in set(System):
        raise RelayError(f"--system {text}: write both, relay or off.")
    return [System(text)]


# -- output ----------------------------------------------------------------------------------------


def _caveat(times: MeasuredTimes, calibration: Calibration) -> str:
    device = calibration.machine.device_description
    return (
        f"Simulated, not measured. Device times: a calibration of {device}. Times of Kafka and worker, and noise: "
        f"{times.origin}. ± is half of the 95 % confidence interval of the sample. Above 80 % of a worker's capacity "
        "the simulation is out of range."
    )


def _described(settings: Settings, calibration: Calibration, times: MeasuredTimes) -> dict[str, Any]:
    return {
        "device": calibration.machine.device_description,
        "calibrated_at": calibration.measured_at,
        "times": times.origin,
        "traffic": settings.traffic.model_dump(mode="json"),
        "hbm_bytes": int(settings.worker.hbm_bytes),
        "dram_bytes": int(settings.worker.dram_bytes),
    }


@contextmanager
def _progress() -> Iterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress, progress.add_task("simulating", total=None)
