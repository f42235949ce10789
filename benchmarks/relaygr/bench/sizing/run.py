"""The prediction, the run, and their comparison. `__main__` describes the figures."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from relaygr.bench.pipeline.run import MeasuredWindow
from relaygr.bench.rows import append_rows, machine, now
from relaygr.demo.plan import PlanOverrides
from relaygr.demo.prepare import CALIBRATION_FILE, make_model, plan_for_this_machine, planned_settings
from relaygr.demo.processes import Reading
from relaygr.demo.stack import DemoStack
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings, load_settings
from relaygr.simulate.case import System, case_of, shape_of_model
from relaygr.simulate.demand import COLD_SHARE, Demand
from relaygr.simulate.figures import Ending, Figures, PartOutcome, figures_of, requests_of
from relaygr.simulate.fleet import FleetSize, Runner, simulate
from relaygr.simulate.plan import LATE_SHARE
from relaygr.simulate.relay import Case
from relaygr.simulate.size import Sizing, size_of
from relaygr.simulate.times import MeasuredTimes, learn
from relaygr.traffic.population import Population, population_of
from relaygr.traffic.records import ImpressionRecord, read_records
from relaygr.worker.calibration import load_calibration

SEED: Final = 11
TABLE_WIDTH: Final = 110
LEARNING_S: Final = 30.0
LEARNING_REQUESTS: Final = 120
SEEDS: Final = 2
IMPRESSIONS: Final = 2_000
"""Simulated for each rate of the search."""
SEARCH_STEPS: Final = 7
PREPARED: Final = (Ending.HBM, Ending.DRAM, Ending.PENDING)
_SAMPLE_S: Final = 0.5
_SETTINGS: Final = (
    "log.level=warning",
    "traffic.users=200",
    "traffic.history_median=1024",
    "traffic.history_max=2048",
    "traffic.items=5000",
    # A warm-up computes prefixes that no impression asked for.
    "worker.warm_up_users=0",
)


@dataclass(frozen=True, slots=True)
class SizingPlan:
    """The part of the highest rate at which the relay runs, and for how long."""

    load: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Line:
    """One figure. `alone`: from the calibration without learnt times; None where times play no part."""

    name: str
    unit: str
    predicted: float
    measured: float
    alone: float | None = None

    @property
    def difference(self) -> float:
        """Points for a share; for others a part of the measured value."""
        if self.unit == "%":
            return self.predicted - self.measured
        return self.predicted / self.measured - 1 if self.measured else math.nan


@dataclass(frozen=True, slots=True)
class Sample:
    """The metrics of the worker at one moment. `at_s`: monotonic."""

    at_s: float
    device_s: float
    leases: float
    bytes_used: dict[str, float]
    """By tier."""
    entries: dict[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """What a run left: its records, and the samples after its cold beginning."""

    records: list[ImpressionRecord]
    samples: list[Sample]
    foreign_cpu: float

    @property
    def device_load(self) -> float:
        first, last = self.samples[0], self.samples[-1]
        return (last.device_s - first.device_s) / (last.at_s - first.at_s)


@dataclass(slots=True)
class Sampler:
    """Samples one worker during a run."""

    stack: DemoStack
    window: MeasuredWindow
    samples: list[Sample] = field(default_factory=list)
    _next_s: float = 0.0

    def __call__(self) -> None:
        self.window.sample()
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _SAMPLE_S
            (reading,) = self.stack.worker_readings()
            self.samples.append(sample_of(reading, time.monotonic()))


def sample_of(reading: Reading, at_s: float) -> Sample:
    """What the comparison needs of a worker's metrics."""
    unused = {
        tier: reading.total("relaygr_cache_bytes", tier=tier, held="free")
        + reading.total("relaygr_cache_bytes", tier=tier, held="withheld")
        for tier in ("hbm", "dram")
    }
    return Sample(
        at_s,
        reading.total("relaygr_worker_device_seconds_total"),
        reading.total("relaygr_cache_leases"),
        {tier: reading.total("relaygr_cache_bytes", tier=tier) - unused[tier] for tier in unused},
        {tier: reading.total("relaygr_cache_entries", tier=tier) for tier in unused},
    )


def compare_with_run(plan: SizingPlan, broker: str, out: Path, json_out: Path | None) -> None:
    """Calibrates, predicts, runs, prints the comparison and appends it to `out`."""
    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    with tempfile.TemporaryDirectory(prefix="relaygr-bench-") as name, local_broker(broker) as started:
        console.print(f"broker: {started.what}", soft_wrap=True)
        bench = _Bench(console, started, Path(name), plan)
        lines, run = bench.compare()
    described = {
        "measured_at": now(),
        "machine": machine(),
        "broker": started.what.split(" at ")[0],
        **asdict(plan),
        "in_time_per_s": round(bench.capacity.in_time_per_s, 2),
        "device_per_s": round(bench.capacity.device_per_s, 2),
        "rate_per_s": round(plan.load * bench.capacity.highest_per_s, 2),
        "requests": len(run.records),
        "foreign_cpu": round(run.foreign_cpu, 2),
    }
    if not bench.capacity.in_time_per_s:
        console.print(f"at no rate are {1 - LATE_SHARE:.0%} said to be in time: the load is a part of the device's")
    title = (
        f"One worker at {described['rate_per_s']}/s; said to take {described['in_time_per_s']}/s in time, and "
        f"{described['device_per_s']}/s to fill its device; {described['requests']} requests, "
        f"{described['foreign_cpu']} cores of other processes"
    )
    console.print(_table(title, lines))
    rows = [described | asdict(line) | {"difference": line.difference} for line in lines]
    append_rows(out, rows)
    if json_out is not None:
        json_out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    console.print(f"appended to {out}")


def lines_of(
    settings: Settings, sizing: Sizing, recent: Sizing, middle: Sizing, simulated: Figures, alone: Figures, run: Run
) -> list[Line]:
    """The figures of a prediction and of a run with the same settings.

    `sizing` keeps prefixes for the whole run, `recent` for the part of it that is counted, and `middle` for as long as
    a counted impression looks back on average.
    """
    traffic = settings.traffic
    counted = after_cold(run.records)
    measured = figures_of_records(counted, traffic.budget_ms)
    last = run.samples[-1]
    device = middle.work.figures.full_us / 1e6 * middle.device_share * traffic.rate_per_s
    leases = float(np.mean([each.leases for each in run.samples]))
    lines = [
        Line("device load", "%", simulated.device_load.value, run.device_load, alone.device_load.value),
        Line("device load, calculated from the savings", "%", device, run.device_load),
        Line("late requests", "%", simulated.late_share.value, measured.late_share.value, alone.late_share.value),
        Line("prefix prepared or cached", "%", prepared(simulated), prepared(measured), prepared(alone)),
    ]
    lines += [
        Line(f"path {ending.value}", "%", simulated.mix[ending].value, measured.mix[ending].value,
             alone.mix[ending].value)
        for ending in (*PREPARED, Ending.FULL)
    ]  # fmt: skip
    lines += [
        Line("K,V of a user in HBM", "bytes", sizing.prefix_bytes, _each(last, "hbm")),
        Line("K,V of a user in DRAM", "bytes", sizing.dram_prefix_bytes, _each(last, "dram")),
        Line("users who came", "", sizing.users_kept, len({record.user_id for record in run.records})),
        Line("DRAM for them", "bytes", sizing.dram_bytes, last.bytes_used["dram"]),
        Line("prefixes that wait", "", sizing.waiting, leases),
        Line("prefixes that wait, without the margin", "", _waiting_alone(settings, sizing), leases),
        Line("users who return", "%", recent.reuse, returning(run.records)),
    ]
    return lines


def after_cold(records: Sequence[ImpressionRecord]) -> list[ImpressionRecord]:
    """The records, by their numbers, without the cold beginning."""
    ordered = sorted(records, key=lambda record: record.number)
    return ordered[round(COLD_SHARE * len(ordered)) :]


def figures_of_records(records: Sequence[ImpressionRecord], budget_ms: int) -> Figures:
    """The figures of measured requests. Those that records do not tell are 0."""
    part = requests_of(records)
    if not len(part):
        raise RelayError("the run has no requests: this machine is too busy")
    outcome = PartOutcome(
        requests=part, found={}, jobs={}, device_s=0.0, seconds=1.0, worker_s=1.0, most_workers=1,
        impressions=len(part), took_s=0.0,
    )  # fmt: skip
    return figures_of([outcome], budget_ms)


def prepared(figures: Figures) -> float:
    """The share of requests that found their prefix."""
    return sum(figures.mix[ending].value for ending in PREPARED)


def returning(records: Sequence[ImpressionRecord]) -> float:
    """The share of the last impressions of a run whose user had come shortly before.

    The last impressions are as many as the cold beginning has, and shortly before is the time without it.
    """
    users = [record.user_id for record in sorted(records, key=lambda record: record.number)]
    cold = round(COLD_SHARE * len(users))
    window = len(users) - cold
    last_seen: dict[str, int] = {}
    back = 0
    for number, user in enumerate(users):
        back += number >= window and number - last_seen.get(user, -len(users)) <= window
        last_seen[user] = number
    return back / cold if cold else math.nan


@dataclass(frozen=True, slots=True)
class Capacity:
    """Impressions a second that one worker is said to take."""

    in_time_per_s: float
    """The highest rate at which 99 % are in time; 0: they are at no rate."""
    device_per_s: float
    """The rate that fills the device."""

    @property
    def highest_per_s(self) -> float:
        return self.in_time_per_s or self.device_per_s


def capacity_of(case: Case[Demand], runner: Runner) -> Capacity:
    """What the simulation says that one worker takes."""
    traffic = case.demand.traffic

    def at(rate_per_s: float) -> Figures:
        changed = traffic.model_copy(update={"rate_per_s": rate_per_s, "duration_s": IMPRESSIONS / rate_per_s / SEEDS})
        probed = replace(case, demand=replace(case.demand, traffic=changed))
        return simulate(probed, FleetSize(1, 1, SEEDS), runner, lambda _: None)

    idle = at(traffic.rate_per_s)
    high = traffic.rate_per_s / idle.device_load.value
    low = 0.0
    if idle.late_share.value <= LATE_SHARE:
        low = traffic.rate_per_s
        for _ in range(SEARCH_STEPS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if at(middle).late_share.value <= LATE_SHARE else (low, middle)
    return Capacity(low, traffic.rate_per_s / idle.device_load.value)


class _Bench:
    """One broker, one model and one calibration."""

    def __init__(self, console: Console, broker: LocalBroker, folder: Path, plan: SizingPlan) -> None:
        self._console, self._broker, self._folder, self._plan = console, broker, folder, plan
        settings = load_settings(None, overrides=_SETTINGS)
        population: Population = population_of(settings.traffic)
        model = make_model(folder / "model", settings, population)
        machine_plan = plan_for_this_machine(console, folder, model, settings, population, PlanOverrides())
        planned = planned_settings(settings, machine_plan, model, folder, broker, population.size)
        # The plan is for two workers; here is one.
        worker = planned.worker.model_copy(update={"hbm_bytes": machine_plan.workers * int(planned.worker.hbm_bytes)})
        self._settings = planned.model_copy(update={"worker": worker})
        self._calibration = load_calibration(folder / CALIBRATION_FILE)
        self._shape = shape_of_model(model, self._settings, self._calibration)
        self._learning_per_s = machine_plan.rate_per_s / 2
        self._runs = 0
        self.capacity = Capacity(0.0, 0.0)

    def compare(self) -> tuple[list[Line], Run]:
        times = self._learn()
        with Runner() as runner, self._console.status("simulating"):
            self.capacity = capacity_of(self._case(self._at(self._learning_per_s, self._plan.seconds), times), runner)
            settings = self._at(self._plan.load * self.capacity.highest_per_s, self._plan.seconds)
            cases = [self._case(settings, each) for each in (times, MeasuredTimes())]
            simulated, alone = (simulate(case, FleetSize(1, 1, 4), runner, lambda _: None) for case in cases)
        seconds = self._plan.seconds
        sizing, recent, middle = (
            size_of(cases[0], 1, keep_s)
            for keep_s in (seconds, (1 - COLD_SHARE) * seconds, (1 + COLD_SHARE) / 2 * seconds)
        )
        run = self._play(settings)
        return lines_of(settings, sizing, recent, middle, simulated, alone, run), run

    def _case(self, settings: Settings, times: MeasuredTimes) -> Case[Demand]:
        return case_of(settings, self._shape, self._calibration.model, times, on_cpu=True, system=System.RELAY)

    def _at(self, rate_per_s: float, seconds: float) -> Settings:
        update = {"rate_per_s": rate_per_s, "seed": SEED, "duration_s": seconds}
        return self._settings.model_copy(update={"traffic": self._settings.traffic.model_copy(update=update)})

    def _learn(self) -> MeasuredTimes:
        rate_per_s = self._learning_per_s
        settings = self._at(rate_per_s, max(LEARNING_S, LEARNING_REQUESTS / rate_per_s))
        run = self._play(settings)
        traffic = settings.traffic
        scored = traffic.suffix * self._shape.layout.tokens_per_behaviour + traffic.candidates
        return learn(run.records, self._calibration.model, scored, "a run at a low load")

    def _play(self, settings: Settings) -> Run:
        """Plays a run on topics of its own."""
        self._runs += 1
        prefix = f"sizing-{self._runs}"
        records = self._folder / f"{prefix}.jsonl"
        named = settings.model_copy(update={"topic_prefix": prefix, "group_prefix": prefix})
        title = f"a run of {settings.traffic.duration_s:.0f} s at {settings.traffic.rate_per_s:.1f}/s"
        with (
            DemoStack(self._console, self._folder, self._broker, named, relay=True, workers=1, observed=False) as stack,
            self._console.status(title),
        ):
            sampler = Sampler(stack, MeasuredWindow(records, stack.roles))
            stack.play_unobserved(records, sampler)
        return Run(
            list(read_records(records)), counted(sampler.samples, settings), sampler.window.foreign_cpu_per_second()
        )


def counted(samples: Sequence[Sample], settings: Settings) -> list[Sample]:
    """The samples while impressions arrive, without the cold beginning. Raises RelayError if there are too few."""
    begun_s = next((each.at_s for each in samples if each.device_s > samples[0].device_s), math.inf)
    seconds = settings.traffic.duration_s
    found = [each for each in samples if COLD_SHARE * seconds <= each.at_s - begun_s <= seconds]
    if len(found) < 2:
        raise RelayError("the worker computed nothing: this machine is too busy")
    return found


def _each(sample: Sample, tier: str) -> float:
    return sample.bytes_used[tier] / sample.entries[tier] if sample.entries[tier] else math.nan


def _waiting_alone(settings: Settings, sizing: Sizing) -> float:
    return sizing.waiting - settings.traffic.rate_per_s * settings.admission.lease_margin_ms / 1000


def _table(title: str, lines: Sequence[Line]) -> Table:
    table = Table(title=title, title_justify="left", caption="difference: in points for shares", box=None)
    for name in ("", "size, calibration alone", "size --times", "measured", "difference"):
        table.add_column(name, justify="right" if name else "left")
    for line in lines:
        alone = "" if line.alone is None else _shown(line.alone, line.unit)
        difference = f"{line.difference:+.1%}"
        table.add_row(line.name, alone, _shown(line.predicted, line.unit), _shown(line.measured, line.unit), difference)
    return table


def _shown(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.1%}"
    return f"{value / 2**20:,.2f} MiB" if unit == "bytes" else f"{value:,.1f}"
