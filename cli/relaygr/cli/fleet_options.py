"""The options that `relaygr simulate` and `relaygr size` share: a fleet, its load, and the case that they describe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relaygr.cli.options import command_settings
from relaygr.cli.texts import parse_size
from relaygr.progress import progress_bars
from relaygr.runtime.errors import RelayError

if TYPE_CHECKING:
    from relaygr.cli.fleet_output import PlanRow
    from relaygr.settings import Settings
    from relaygr.simulate.case import Case, Shape, System
    from relaygr.simulate.figures import Figures
    from relaygr.simulate.plan import CapacityPlan
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
LinkOption = Annotated[
    float, typer.Option("--link-gbit-s", min=0.01, help="Network between workers and the store of a pool, Gbit/s.")
]
SECONDS = 60.0
"""The simulated time by default."""
_USERS_PER_WORKER = 10
"""With fewer, the load of a worker depends on which users it happens to own."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the options describe: settings, device, model, and measured times."""

    settings: Settings
    calibration: Calibration
    shape: Shape
    times: MeasuredTimes

    def case(self, system: System, day_s: float | None = None) -> Case:
        from relaygr.simulate.case import case_of, is_cpu

        return case_of(
            self.settings, self.shape, self.calibration.model, self.times,
            on_cpu=is_cpu(self.calibration), system=system, day_s=day_s,
        )  # fmt: skip

    def caveat(self) -> str:
        device = self.calibration.machine.device_description
        return (
            f"Simulated, not measured. Device times: a calibration of {device}. Times of Kafka and worker, and noise: "
            f"{self.times.origin}. ± is half of the 95 % confidence interval of the sample. Out of range, small errors "
            "of the times become large ones of the latency."
        )

    def described(self, sample: int, seeds: int) -> dict[str, Any]:
        """What was simulated, in the form of JSON."""
        worker = self.settings.worker
        return {
            "device": self.calibration.machine.device_description,
            "calibrated_at": self.calibration.measured_at,
            "times": self.times.origin,
            "traffic": self.settings.traffic.model_dump(mode="json"),
            "hbm_bytes": int(worker.hbm_bytes),
            "dram_bytes": int(worker.dram_bytes),
            "sample": sample,
            "seeds": seeds,
        }


def fleet_of(
    calibration: Path,
    model: Path | None,
    token_bytes: str,
    times: Path | None,
    *,
    config: Path | None,
    overrides: list[str] | None,
    qps: float | None,
    slo_ms: int | None,
    lengths: str | None,
    users: int | None,
    seconds: float | None = None,
    lengths_option: str = "--lengths",
) -> Fleet:
    """`seconds`: how long is simulated; None: as long as the settings say, else `SECONDS`. `lengths_option`: the name
    of the option that has `lengths`, for errors.

    Raises RelayError for an option that is wrong, or a file that cannot be used.
    """
    from relaygr.simulate.case import shape_of_model, shape_of_tokens
    from relaygr.simulate.times import MeasuredTimes, load_times
    from relaygr.worker.calibration import load_calibration

    given = {"rate_per_s": qps, "budget_ms": slo_ms, "users": users, "duration_s": seconds}
    wanted = [*(overrides or [])]
    wanted += [f"traffic.{name}={value}" for name, value in given.items() if value is not None]
    if lengths is not None:
        median, longest = parse_pair(
            lengths_option, f"{lengths}:{2 * int(lengths)}" if lengths.isdecimal() else lengths
        )
        wanted += [f"traffic.history_median={median}", f"traffic.history_max={longest}"]
    settings = command_settings(config, overrides=wanted)
    if not settings.traffic.duration_s:
        settings = settings.model_copy(update={"traffic": settings.traffic.model_copy(update={"duration_s": SECONDS})})
    _check_lengths(settings.traffic)
    measured = load_calibration(calibration)
    if model is not None:
        shape = shape_of_model(model, settings, measured)
    else:
        shape = shape_of_tokens(parse_size("--token-bytes", token_bytes), settings)
    return Fleet(settings, measured, shape, MeasuredTimes() if times is None else load_times(times))


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


def us_per_byte(link_gbit_s: float) -> float:
    return 8 / (1000 * link_gbit_s)


def parse_pair(option: str, text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    if not (first.isdecimal() and second.isdecimal() and 0 < int(first) <= int(second)):
        raise RelayError(f"{option} {text}: write two whole numbers, such as 2:8, the smaller one first.")
    return int(first), int(second)


def plan_systems(
    fleet: Fleet,
    systems: Iterable[System],
    jobs: int | None,
    *,
    impressions: int,
    sample: int,
    seeds: int,
    price_per_worker_hour: float | None = None,
) -> list[PlanRow]:
    """The smallest fleet of each system that answers in time. `impressions`: simulated for each number of workers.
    Shows a progress bar on standard error.
    """
    from relaygr.simulate.fleet import Runner
    from relaygr.simulate.plan import plan_capacity

    rows = []
    with Runner(jobs) as runner, progress_bars() as bars:
        bars.began("simulating", 1)
        for each in systems:

            def show(workers: int, share: float, name: str = each.value) -> None:
                bars.share(share, f"{name}: {workers:,} workers")

            case = fleet.case(each)
            found = plan_capacity(case, sample, seeds, runner, show, impressions)
            rows.append(_plan_row(each, found, case, price_per_worker_hour))
    return rows


def _plan_row(system: System, plan: CapacityPlan, case: Case, price_per_worker_hour: float | None) -> PlanRow:
    """A plan with its memory and costs: none of either if no number of workers is enough."""
    from relaygr.cli.fleet_output import PlanRow
    from relaygr.simulate.case import System

    if plan.best is None:
        return PlanRow(system, plan, None, None, None, None)
    # Nothing is kept in full inference.
    hbm_bytes, dram_bytes = (0, 0) if system is System.OFF else case.memory(plan.workers)
    if price_per_worker_hour is None:
        return PlanRow(system, plan, hbm_bytes, dram_bytes, None, None)
    cost = price_per_worker_hour * plan.workers
    return PlanRow(system, plan, hbm_bytes, dram_bytes, cost, cost / (case.demand.traffic.rate_per_s * 3600) * 1e6)


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
