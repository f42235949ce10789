"""The measured and the simulated runs of each cell, and their differences. `__main__` describes them."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from relaygr.bench.pipeline.run import MeasuredWindow
from relaygr.bench.rows import append_rows, machine, now
from relaygr.bench.simulated.agreement import Outcome, Row, inverted, outcome_of, row_of
from relaygr.bench.speed import MachineSpeed
from relaygr.demo.plan import PlanOverrides
from relaygr.demo.prepare import CALIBRATION_FILE, make_model, plan_for_this_machine, planned_settings
from relaygr.demo.stack import DemoStack
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings, load_settings
from relaygr.simulate.case import Shape, System, case_of, shape_of_model
from relaygr.simulate.demand import COLD_SHARE
from relaygr.simulate.figures import RANKED, PartOutcome, Requests, requests_of
from relaygr.simulate.relay import RelaySimulation
from relaygr.simulate.times import MeasuredTimes, learn
from relaygr.traffic.population import population_of
from relaygr.traffic.records import ImpressionRecord, read_records
from relaygr.worker.calibration import load_calibration

PROBE_IMPRESSIONS = 1_500
PROBE_PARTS = {System.RELAY: 1 / 2, System.OFF: 1 / 8}
"""Parts of the demo's rate at which a capacity is estimated: so low that few requests wait."""
FIRST_SEED = 100
LEARNING_LOAD = 0.45
"""A part of the capacity between those of the cells. At a much lower load the processor has less else to do, so
forwards and hops take less time than in the cells."""
LEARNING_S = 12.0
LEARNT_REQUESTS = 200
WAIT_S = 60.0
"""A pair of runs waits for so long, at most, until the machine is quiet."""
TABLE_WIDTH = 150
_SETTINGS = (
    "log.level=warning",
    "traffic.users=60",
    "traffic.history_median=1024",
    "traffic.history_max=2048",
    "traffic.items=5000",
    # With a warm-up, the first part of a run would depend on the moment when the warm-up ends.
    "worker.warm_up_users=0",
)


def compare_with_measured(
    loads: str, seconds: float, repeats: int, broker: str, out: Path, json_out: Path | None
) -> bool:
    """Measures, simulates, prints and writes the rows. Returns whether all cells in range agree."""
    wanted = parse_loads(loads)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="relaygr-bench-") as name, local_broker(broker) as started:
        console.print(f"broker: {started.what}", soft_wrap=True)
        bench = _Bench(console, started, Path(name), seconds, out.parent)
        rows = bench.rows(wanted, repeats)
        described = {
            "measured_at": now(),
            "machine": machine(),
            "broker": started.what.split(" at ")[0],
            "seconds": seconds,
            "impressions_per_cpu_s": round(bench.simulated / max(1e-9, bench.took_s)),
        }
    wide = Console(highlight=False, width=max(console.width, TABLE_WIDTH))
    wide.print(_table(rows))
    worst = max(rows, key=lambda row: row.excess)
    console.print(
        f"worst cell: {worst.system} at {worst.load:g} of capacity, {worst.excess:.1f} times the limit; "
        f"order inverted: {'; '.join(inverted(rows)) or 'no pair of cells'}; "
        f"{described['impressions_per_cpu_s']:,} simulated impressions a second of CPU",
        soft_wrap=True,
    )
    written = [described | asdict(row) | {"agrees": row.agrees, "verdict": row.verdict} for row in rows]
    append_rows(out, written)
    if json_out is not None:
        json_out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return all(row.agrees for row in rows if row.in_range) and not inverted(rows)


def parse_loads(text: str) -> list[float]:
    """Raises RelayError for something else than parts of the capacity."""
    try:
        loads = [float(each) for each in text.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(0 < each <= 1 for each in loads):
        raise RelayError(f"--loads {text}: write parts of the capacity, such as 0.3,0.6,0.8.")
    return loads


@dataclass(frozen=True, slots=True)
class _Played:
    """A measured run: its records in the order of their numbers, the cores that other processes used, and how many
    times as long as on a quiet machine fixed work took.
    """

    records: list[ImpressionRecord]
    foreign_cpu: float
    slowdown: float


class _Bench:
    """One broker, one model and one calibration for all runs."""

    def __init__(self, console: Console, broker: LocalBroker, folder: Path, seconds: float, results: Path) -> None:
        self._console, self._broker, self._folder, self._seconds = console, broker, folder, seconds
        self._speed = MachineSpeed(results)
        self._wait()
        settings = load_settings(None, overrides=_SETTINGS)
        population = population_of(settings.traffic)
        model = make_model(folder / "model", settings, population)
        plan = plan_for_this_machine(console, folder, model, settings, population, PlanOverrides(duration_s=seconds))
        planned = planned_settings(settings, plan, model, folder, broker, population.size)
        traffic = planned.traffic.model_copy(update={"duration_s": seconds})
        self._settings = planned.model_copy(update={"traffic": traffic})
        calibration = load_calibration(folder / CALIBRATION_FILE)
        self._shape: Shape = shape_of_model(model, self._settings, calibration)
        self._latency = calibration.model
        self._runs = 0
        self.simulated, self.took_s = 0, 0.0
        self._capacity_per_s = {
            system: self._capacity(system, part * plan.rate_per_s) for system, part in PROBE_PARTS.items()
        }

    def rows(self, loads: Sequence[float], repeats: int) -> list[Row]:
        rows = []
        seeds = range(FIRST_SEED, FIRST_SEED + repeats)
        for load in loads:
            rates = {system: load * self._capacity_per_s[system] for system in System}
            learnt: dict[System, list[ImpressionRecord]] = {system: [] for system in System}
            measured: dict[System, list[Outcome]] = {system: [] for system in System}
            foreign_cpu: dict[System, list[float]] = {system: [] for system in System}
            slowdowns: dict[System, list[float]] = {system: [] for system in System}
            for seed, system in itertools.product(seeds, System):
                # The speed of the machine changes within minutes, so a run to learn from precedes each measured one.
                self._wait()
                learning_rate = LEARNING_LOAD * self._capacity_per_s[system]
                seconds = max(LEARNING_S, LEARNT_REQUESTS / learning_rate)
                learnt[system] += self._play(self._at(learning_rate, seed + repeats, seconds), system).records
                played = self._play(self._at(rates[system], seed), system)
                counted = played.records[round(COLD_SHARE * len(played.records)) :]
                measured[system].append(self._outcome(requests_of(counted)))
                foreign_cpu[system].append(played.foreign_cpu)
                slowdowns[system].append(played.slowdown)
            for system in System:
                times = self._learnt(learnt[system], system)
                runs = [self._simulate(self._at(rates[system], seed), system, times).requests for seed in seeds]
                simulated = [self._outcome(each) for each in runs]
                other, slowest = float(np.median(foreign_cpu[system])), max(slowdowns[system])
                rows.append(row_of(load, system.value, rates[system], measured[system], simulated, other, slowest))
        return rows

    def _wait(self) -> None:
        with self._console.status("waiting for a quiet machine") as status:
            self._speed.wait_until_quiet(
                WAIT_S, lambda slowdown: status.update(f"waiting: the machine takes {slowdown:.2f} times as long")
            )

    def _at(self, rate_per_s: float, seed: int, seconds: float | None = None) -> Settings:
        update = {"rate_per_s": rate_per_s, "seed": seed, "duration_s": seconds or self._seconds}
        return self._settings.model_copy(update={"traffic": self._settings.traffic.model_copy(update=update)})

    def _learnt(self, records: Sequence[ImpressionRecord], system: System) -> MeasuredTimes:
        traffic = self._settings.traffic
        scored = traffic.suffix * self._shape.layout.tokens_per_behaviour + traffic.candidates
        times = learn(records, self._latency, scored, f"a run of {system.value}")
        self._console.print(
            f"{system.value}: learnt from {times.requests:,} requests, median: a hop {times.hop_us[50] / 1000:.1f} ms; "
            f"measured / calibrated {times.hit_noise[50]:.2f} for ranking, {times.pre_noise[50]:.2f} for prefixes",
            soft_wrap=True,
        )
        return times

    def _capacity(self, system: System, rate_per_s: float) -> float:
        """The load that fills the worker's device thread, by its simulated time for each ranking at this low rate."""
        learning = self._at(rate_per_s, FIRST_SEED - 1, max(self._seconds, LEARNT_REQUESTS / rate_per_s))
        times = self._learnt(self._play(learning, system).records, system)
        done = self._simulate(self._at(rate_per_s, FIRST_SEED - 2, PROBE_IMPRESSIONS / rate_per_s), system, times)
        ranked = int(np.isin(done.requests.endings, RANKED).sum())
        capacity = ranked / done.thread_s
        self._console.print(f"{system.value}: simulated capacity {capacity:.1f} impressions a second")
        return capacity

    @property
    def _budget_ms(self) -> int:
        return self._settings.traffic.budget_ms

    def _simulate(self, settings: Settings, system: System, times: MeasuredTimes) -> PartOutcome:
        case = case_of(settings, self._shape, self._latency, times, on_cpu=True, system=system)
        done = RelaySimulation(case, range(settings.partitions), 1, lambda _: None).run()
        self.simulated += done.impressions
        self.took_s += done.took_s
        return done

    def _outcome(self, requests: Requests) -> Outcome:
        return outcome_of(requests, self._budget_ms * 1000)

    def _play(self, settings: Settings, system: System) -> _Played:
        """Plays a run on topics of its own."""
        self._runs += 1
        prefix = f"simulated-{self._runs}"
        records = self._folder / f"{prefix}.jsonl"
        named = settings.model_copy(update={"topic_prefix": prefix, "group_prefix": prefix})
        relay = system is System.RELAY
        title = f"run {self._runs}: {system.value}, {settings.traffic.rate_per_s:.1f}/s"
        with (
            DemoStack(
                self._console, self._folder, self._broker, named, relay=relay, workers=1, observed=False
            ) as stack,
            self._console.status(title),
            self._speed.watch() as watch,
        ):
            window, began_s = MeasuredWindow(records, stack.roles), time.monotonic()
            stack.play_unobserved(records, window.sample)
        played = sorted(read_records(records), key=lambda each: each.number)
        return _Played(played, window.foreign_cpu_per_second(), watch.slowdown_since(began_s))


def _table(rows: Sequence[Row]) -> Table:
    table = Table(
        title="Simulated against measured (± half the spread of the measured runs)",
        caption="late: without an answer over the whole history in time; mix: the path that differs most",
    )
    for name in ("load", "system", "rate", "requests", "P50", "simulated", "P99", "simulated", "late", "simulated"):
        table.add_column(name, justify="right")
    table.add_column("mix", justify="right")
    table.add_column("other cores", justify="right")
    table.add_column("slowdown", justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(
            f"{row.load:g}",
            row.system,
            f"{row.rate_per_s:.1f}/s",
            str(row.requests),
            f"{row.measured_p50_ms:.1f} ± {row.measured_p50_ms * row.p50_spread / 2:.1f} ms",
            f"{row.simulated_p50_ms:.1f} ms ({row.p50_error:+.0%})",
            f"{row.measured_p99_ms:.1f} ± {row.measured_p99_ms * row.p99_spread / 2:.1f} ms",
            f"{row.simulated_p99_ms:.1f} ms ({row.p99_error:+.0%})",
            f"{row.measured_late:.1%} ± {row.late_spread / 2:.1%}",
            f"{row.simulated_late:.1%}",
            f"{row.mix_worst} {row.mix_error:.1%}",
            f"{row.foreign_cpu:.2f}",
            f"{row.slowdown:.2f}",
            row.verdict,
        )
    return table
