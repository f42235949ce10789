"""The options that `relaygr simulate` and `relaygr size` share: a fleet, its load, and the case that they describe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from relaygr.cli.options import command_settings
from relaygr.cli.texts import parse_size
from relaygr.runtime.errors import RelayError

if TYPE_CHECKING:
    from relaygr.settings import Settings
    from relaygr.simulate.case import Shape, System
    from relaygr.simulate.figures import Figures
    from relaygr.simulate.output import PlanRow
    from relaygr.simulate.plan import CapacityPlan
    from relaygr.simulate.relay import Changes
    from relaygr.simulate.times import MeasuredTimes
    from relaygr.traffic.settings import TrafficSettings
    from relaygr.worker.calibration import Calibration

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
ImpressionsOption = Annotated[
    int, typer.Option(min=600, help="Simulated for each number of workers, and more where it is not clear.")
]
JobsOption = Annotated[int | None, typer.Option(min=1, help="Processes.", show_default="cores")]
_USERS_PER_WORKER = 10
"""With fewer, the load of a worker depends on which users it happens to own."""


def fleet_settings(
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
        median, longest = parse_pair("--lengths", f"{lengths}:{2 * int(lengths)}" if lengths.isdecimal() else lengths)
        wanted += [f"traffic.history_median={median}", f"traffic.history_max={longest}"]
    settings = command_settings(config, overrides=wanted)
    _check_lengths(settings.traffic)
    return settings


def _check_lengths(traffic: TrafficSettings) -> None:
    """Raises RelayError where more than half of the synthetic users would begin with a shorter history than asked."""
    from relaygr.traffic.population import FIRST_SHARE

    longest_first = int(FIRST_SHARE * traffic.history_max)
    if traffic.interactions is None and traffic.history_median > longest_first:
        needed = math.ceil(traffic.history_median / FIRST_SHARE)
        raise RelayError(
            f"A median of {traffic.history_median} behaviours is too long: a history begins with at most "
            f"{FIRST_SHARE:.0%} of the longest one, which is {traffic.history_max}. Set the longest to at least "
            f"{needed}, as in {traffic.history_median}:{needed}."
        )


def parse_pair(option: str, text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    if not (first.isdecimal() and second.isdecimal() and 0 < int(first) <= int(second)):
        raise RelayError(f"{option} {text}: write two whole numbers, such as 2:8, the smaller one first.")
    return int(first), int(second)


def read_calibration(path: Path) -> Calibration:
    from relaygr.worker.calibration import load_calibration

    return load_calibration(path)


def shape_of(model: Path | None, token_bytes: str, settings: Settings, calibration: Calibration) -> Shape:
    from relaygr.simulate.case import shape_of_model, shape_of_tokens

    if model is not None:
        return shape_of_model(model, settings, calibration)
    return shape_of_tokens(parse_size("--token-bytes", token_bytes), settings)


def read_times(path: Path | None) -> MeasuredTimes:
    from relaygr.simulate.times import MeasuredTimes, load_times

    return MeasuredTimes() if path is None else load_times(path)


@dataclass(frozen=True, slots=True)
class Probes:
    """How a plan tries a number of workers: simulated impressions, parts of the fleet, seeds, processes."""

    impressions: int
    sample: int
    seeds: int
    jobs: int | None


def plan_systems(
    settings: Settings,
    shape: Shape,
    measured: Calibration,
    times: MeasuredTimes,
    systems: Iterable[System],
    probes: Probes,
    price_per_worker_hour: float | None = None,
) -> list[PlanRow]:
    """The smallest fleet of each system that answers in time. Shows a progress bar on standard error."""
    from relaygr.simulate.case import case_of, is_cpu
    from relaygr.simulate.fleet import Runner
    from relaygr.simulate.plan import plan_capacity

    rows = []
    with Runner(probes.jobs) as runner, progress_bar() as (progress, task):
        for each in systems:
            case = case_of(settings, shape, measured.model, times, on_cpu=is_cpu(measured), system=each)

            def show(workers: int, share: float, name: str = each.value) -> None:
                progress.update(task, total=1.0, completed=share, description=f"{name}: {workers:,} workers")

            found = plan_capacity(case, probes.sample, probes.seeds, runner, show, probes.impressions)
            rows.append(plan_row(each, found, settings, shape, price_per_worker_hour))
    return rows


def plan_row(
    system: System, plan: CapacityPlan, settings: Settings, shape: Shape, price_per_worker_hour: float | None
) -> PlanRow:
    """A plan with its memory and costs: none of either if no number of workers is enough."""
    from relaygr.simulate.case import System
    from relaygr.simulate.output import PlanRow
    from relaygr.simulate.plan import memory_of

    if plan.best is None:
        return PlanRow(system, plan, None, None, None, None)
    hbm_bytes, dram_bytes = memory_of(settings.worker, shape.geometry, plan.workers)
    if system is System.OFF:
        # Nothing is kept without the relay.
        hbm_bytes = dram_bytes = 0
    if price_per_worker_hour is None:
        return PlanRow(system, plan, hbm_bytes, dram_bytes, None, None)
    cost = price_per_worker_hour * plan.workers
    return PlanRow(system, plan, hbm_bytes, dram_bytes, cost, cost / (settings.traffic.rate_per_s * 3600) * 1e6)


def caveat(times: MeasuredTimes, calibration: Calibration) -> str:
    device = calibration.machine.device_description
    return (
        f"Simulated, not measured. Device times: a calibration of {device}. Times of Kafka and worker, and noise: "
        f"{times.origin}. ± is half of the 95 % confidence interval of the sample. Out of range, small errors of the "
        "times become large ones of the latency."
    )


def error_caveat(results: Iterable[Figures]) -> str | None:
    """What to know about figures without a sampling error; None if each has one."""
    if all(each.late_share.error is not None for each in results):
        return None
    return "± ?: the sampling error is not known, since one seed tells none: raise --seeds."


def plan_caveats(rows: Sequence[PlanRow], users: int) -> list[str]:
    """What to know about plans that have no certain number of workers, several topic prefixes or few users."""
    from relaygr.kafka.settings import MOST_PARTITIONS
    from relaygr.simulate.plan import LATE_SHARE, MOST_WORKERS

    found = []
    if any(row.plan.is_unclear for row in rows):
        found.append(
            f"About {LATE_SHARE:.0%} of the requests are late even if the workers are idle. It is not certain that any "
            "number is enough: raise --impressions or --slo-ms."
        )
    most = max(row.plan.workers for row in rows)
    if most > MOST_WORKERS:
        found.append(
            f"A topic prefix has at most {MOST_PARTITIONS:,} partitions, enough for {MOST_WORKERS} workers. A larger "
            "fleet needs several (topic_prefix and group_prefix of its processes): share users and workers among them."
        )
    few = users_caveat(users, most)
    return [*found, few] if few else found


def users_caveat(users: int, workers: int) -> str | None:
    """What to know about a fleet of so few users; None with enough of them."""
    if users >= _USERS_PER_WORKER * workers:
        return None
    return f"{users:,} users are few for {workers:,} workers, and some workers may have none: raise --users."


def inputs_as_json(
    settings: Settings,
    calibration: Calibration,
    times: MeasuredTimes,
    sample: int,
    seeds: int,
    changes: Changes | None = None,
) -> dict[str, Any]:
    """What was simulated, in the form of JSON. `changes`: None where none are possible."""
    return {
        "device": calibration.machine.device_description,
        "calibrated_at": calibration.measured_at,
        "times": times.origin,
        "traffic": settings.traffic.model_dump(mode="json"),
        "hbm_bytes": int(settings.worker.hbm_bytes),
        "dram_bytes": int(settings.worker.dram_bytes),
        "sample": sample,
        "seeds": seeds,
        **(asdict(changes) if changes is not None else {}),
    }


@contextmanager
def progress_bar() -> Iterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress, progress.add_task("simulating", total=None)
