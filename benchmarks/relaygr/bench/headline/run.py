"""Measures the engine alone, and plays one run: the processes of a system on topics of their own, and beside them the
one in which LoadGen sends the queries (`loadgen.py`).

Every run has new processes, so that no cache, no history and no learnt latency comes from an earlier one.
"""

from __future__ import annotations

import json
import secrets
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from relaygr.admission.latency import Stage
from relaygr.bench.headline.question import (
    CANDIDATES,
    HALF,
    LOADS,
    PAGE_TOKENS,
    PARTITIONS,
    SUFFIX,
    Asked,
    Effort,
    Plan,
    RunRow,
    System,
    figures_of,
    model_of,
    read_judged,
    settings_of,
    snapped,
    summary_path,
    traffic_of,
)
from relaygr.bench.rows import code, machine, now, refuse_other_machine
from relaygr.demo.stack import DemoStack
from relaygr.demo.summary import ScoreComparison, compare_scores
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings
from relaygr.simulate.case import case_of_load, is_cpu, shape_of
from relaygr.simulate.demand import COLD_SHARE, Demand
from relaygr.simulate.relay import RelaySimulation
from relaygr.simulate.times import MeasuredTimes, learn, load_times, save_times
from relaygr.traffic.records import read_records
from relaygr.traffic.settings import TrafficSettings
from relaygr.worker.calibration import QUICK_BUDGET_S, Calibration, calibrate, load_calibration, save_calibration
from relaygr.worker.measuring import EngineMeter, bind_own_arena
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.description import description_of
from relaygr.worker.model.engine import load_engine

ROUNDS = 5
VIRTUAL = "virtual time"
"""Stands in place of the broker."""
SETTLE_S = 3.0
"""Between the publication of the histories and the first impression: the worker reads them."""
START_S = 12.0
"""About the time for which processes start and histories are published."""
FREE = 1e-6
LEAD_SIGMA = 0.2
"""Lead times in virtual time are log-normal."""
SUMMARIES = "loadgen"
SENDER = "relaygr.bench.headline.loadgen"
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Machine:
    """The plan for this machine, and its calibrations: as a worker measures them, and of the engine alone."""

    plan: Plan
    predicted: Calibration
    alone: Calibration
    folder: Path

    def times_path(self, effort: Effort) -> Path:
        """What the simulation has learnt from a live run of this effort."""
        return self.folder / f"times-{effort.name}.json"


@dataclass(frozen=True, slots=True)
class Point:
    """A run that is asked for."""

    asked: Asked
    load: float
    system: System
    variant: str
    rate_per_s: float
    seed: int
    history: int


def measured_machine(out: Path, history: int, deadline_factor: float) -> Machine:
    """The plan in this folder. Without one the engine is measured now, which takes about half a minute.

    Raises RelayError for the plan of another machine or question.
    """
    path = out / "plan.json"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        plan = _measure(out, history, deadline_factor)
        path.write_text(json.dumps(asdict(plan), indent=1) + "\n", encoding="utf-8")
    try:
        plan = Plan(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RelayError(f"{path} is not a plan of this version ({error}): give another folder with --out") from error
    refuse_other_machine(path, plan.machine)
    if (plan.history, plan.deadline_factor) != (history, deadline_factor):
        raise RelayError(
            f"{path} is for histories of {plan.history:,} and a deadline of {plan.deadline_factor:g} times full "
            "inference: give another folder with --out"
        )
    calibrations = [load_calibration(out / f"{name}.json") for name in ("calibration", "alone")]
    return Machine(plan, calibrations[0], calibrations[1], out)


def _measure(out: Path, history: int, deadline_factor: float) -> Plan:
    with tempfile.TemporaryDirectory(prefix="relaygr-engine-") as name:
        engine = load_engine(_written_model(Path(name) / "model", history), None, page_tokens=PAGE_TOKENS, threads=1)
    bind_own_arena(engine)
    meter, tokens, pairs = EngineMeter(engine), engine.layout.tokens(history), list[tuple[float, float]]()

    def measure() -> None:
        for _ in range(ROUNDS):
            prefix_us = sum(point.duration_us for point in meter.prefix(tokens, tokens))
            pairs.append((prefix_us, meter.rank(tokens, CANDIDATES).duration_us))

    # The speed of a machine changes within seconds, so the rounds are spread over the time of the calibrations. Others
    # can only slow the machine down, so the fastest quarter of the rounds is that of the engine alone.
    measure()
    save_calibration(calibrate(engine, QUICK_BUDGET_S), out / "calibration.json")
    measure()
    save_calibration(calibrate(engine, QUICK_BUDGET_S, rest=lambda: None), out / "alone.json")
    measure()
    pre_ms, hit_ms = (round(statistics.quantiles(each)[0] / 1000, 3) for each in zip(*pairs, strict=True))
    return Plan(
        machine=machine(),
        engine=f"{engine.backend} on {engine.device.description}, one thread",
        made_at=now(),
        history=history,
        deadline_factor=deadline_factor,
        pre_ms=pre_ms,
        hit_ms=hit_ms,
        prefix_bytes=engine.geometry.pages_for(tokens) * engine.geometry.page_bytes,
    )


def _written_model(folder: Path, history: int) -> Path:
    config = model_of(history)
    save_checkpoint(folder, config, random_checkpoint(config, seed=0).tensors)
    return folder


# -- live -------------------------------------------------------------------------------------------


class LiveBench:
    """Plays runs on a broker. The records of a run stay in the folder until its scores were compared."""

    def __init__(self, on: Machine, broker: LocalBroker, effort: Effort) -> None:
        self._on, self._broker, self._effort = on, broker, effort

    def __enter__(self) -> LiveBench:
        self._work = tempfile.TemporaryDirectory(prefix="relaygr-headline-", ignore_cleanup_errors=True)
        self._model = _written_model(Path(self._work.name) / "model", self._on.plan.history)
        return self

    def __exit__(self, *_: object) -> None:
        self._work.cleanup()

    @property
    def broker_name(self) -> str:
        """The broker without its address, which changes."""
        return self._broker.what.split(" at ")[0]

    def expected_s(self, point: Point) -> float:
        """About how long this run takes."""
        effort, rate = self._effort, point.rate_per_s
        played_s = effort.warm_up_at(point.load, rate) + effort.queries_at(rate) / rate
        return START_S + SETTLE_S + played_s + 2 * self._on.plan.deadline_ms / 1000

    def play(self, point: Point) -> RunRow:
        """Plays the run once."""
        plan, traffic, effort = self._on.plan, self._traffic(point), self._effort
        records, warm_up_s = self.records_of(point), effort.warm_up_at(point.load, point.rate_per_s)
        sender = [
            SENDER, str(records), "--warm-up-s", str(warm_up_s),
            "--queries", str(effort.queries_at(point.rate_per_s)),
        ]  # fmt: skip
        with self._stack(point.system, point.variant, traffic) as stack:
            stack.play_by("gateway", sender, 2 * self.expected_s(point) + PATIENCE_S)
            qualities = [each.slowdown for each in stack.predictions().device.values()]
        judged = read_judged(records)
        self._keep_summary(records)
        return RunRow(
            **_about(point, plan, effort.name),
            broker=self.broker_name,
            slowdown=max(qualities, default=float("nan")),
            offered=judged.queries,
            late=judged.over,
            verdict=judged.verdict,
            p50_ms=judged.p50_ms,
            p99_ms=judged.p99_ms,
            lag_p99_ms=judged.lag_p99_ms,
            **figures_of(
                read_records(records), judged.first, lambda tokens: plan.engine_us(self._on.alone.model, tokens)
            ),
        )

    def _keep_summary(self, records: Path) -> None:
        """LoadGen's own words on each run, beside the rows."""
        folder = self._on.folder / SUMMARIES
        folder.mkdir(parents=True, exist_ok=True)
        attempt = 1 + len(list(folder.glob(f"{records.stem}-attempt-*")))
        shutil.copyfile(summary_path(records), folder / f"{records.stem}-attempt-{attempt}.txt")

    def compare_scores(self, point: Point) -> ScoreComparison:
        """Ranks a sample of the run's impressions again by full inference, and compares the scores."""
        records = self.records_of(point)
        reference = records.with_name(f"reference-{records.name}")
        with self._stack(System.FULL, point.variant, self._traffic(point)) as stack:
            stack.play_reference(reference, records)
        return compare_scores(read_records(records), read_records(reference))

    def records_of(self, point: Point) -> Path:
        """The file of the run's records."""
        own = (self._effort.name, point.asked, point.system, point.variant)
        about = (*own, f"{point.load:g}", f"{point.rate_per_s:g}", str(point.seed))
        return self._on.folder / "records" / f"{'-'.join(about).replace(' ', '-')}.jsonl"

    def forget_records(self) -> None:
        """Removes the records of all runs."""
        shutil.rmtree(self._on.folder / "records", ignore_errors=True)

    def learn_times(self, point: Point) -> None:
        """Learns from the run what a calibration does not cover: hops, the worker's own time, and the noise."""
        try:
            times = learn(
                read_records(self.records_of(point)), self._on.alone.model, SUFFIX + CANDIDATES,
                f"full inference at half load, {now()}",
            )  # fmt: skip
        except (RelayError, OSError):
            times = MeasuredTimes()  # Too few requests were ranked in full, or an earlier call ended before this.
        save_times(self._on.times_path(self._effort), times)

    def _traffic(self, point: Point) -> TrafficSettings:
        effort, rate = self._effort, point.rate_per_s
        # The gaps after the warm-up are LoadGen's, so the schedule needs only enough impressions.
        whole_s = effort.warm_up_at(point.load, rate) + 1.3 * effort.queries_at(rate) / rate
        return TrafficSettings(**traffic_of(self._on.plan, point.load, rate, point.seed, whole_s), settle_s=SETTLE_S)

    @contextmanager
    def _stack(self, system: System, variant: str, traffic: TrafficSettings) -> Iterator[DemoStack]:
        values = settings_of(self._on.plan, system, variant)
        values["worker"] |= {"model": self._model, "calibration": self._on.folder / "calibration.json"}
        prefix = f"headline-{secrets.token_hex(3)}"
        kafka = self._broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=PARTITIONS))
        settings = Settings.model_validate(
            kafka.model_dump() | values | {"traffic": traffic, "log": {"level": "warning"}}
        )
        with tempfile.TemporaryDirectory(dir=self._work.name, ignore_cleanup_errors=True) as folder:
            try:
                with DemoStack(
                    Console(quiet=True), Path(folder), self._broker, settings, relay=system is System.RELAY, workers=1,
                    observed=False, reuse=system is not System.FULL,
                ) as stack:  # fmt: skip
                    yield stack
            finally:
                if self._broker.ours:  # Of another broker the stack deletes them itself.
                    self._broker.delete_topics(settings)


def _about(point: Point, plan: Plan, effort: str) -> dict[str, Any]:
    return {
        "measured_at": now(), "machine": plan.machine, "code": code(), "effort": effort, "asked": point.asked.value,
        "load": point.load, "system": point.system.value, "variant": point.variant, "history": point.history,
        "deadline_ms": plan.deadline_ms, "full_ms": plan.full_ms, "rate_per_s": point.rate_per_s, "seed": point.seed,
    }  # fmt: skip


# -- in virtual time --------------------------------------------------------------------------------


def play_virtually(on: Machine, effort: Effort, point: Point) -> RunRow:
    """The same run in virtual time: the product's decisions, and device times of the engine alone with the noise of a
    live run. The only use of the simulation here.
    """
    plan, alone, predicted = on.plan, on.alone.model, on.predicted.model
    if point.system is System.ORACLE:
        alone, predicted = (each.scaled({Stage.PRE: FREE}) for each in (alone, predicted))
    seconds = effort.virtual_requests / (1 - COLD_SHARE) / point.rate_per_s
    settings = Settings.model_validate(
        settings_of(plan, point.system, point.variant)
        | {"traffic": traffic_of(plan, point.load, point.rate_per_s, point.seed, seconds, point.history, LEAD_SIGMA)}
    )
    case = case_of_load(
        Demand(settings.traffic, PARTITIONS, point.seed),
        settings,
        shape_of(description_of(model_of(plan.history)), settings, on.predicted),
        predicted,
        load_times(on.times_path(effort)),
        on_cpu=is_cpu(on.predicted),
        relay=point.system is System.RELAY,
        device=alone,
    )
    requests = RelaySimulation(case, range(PARTITIONS)).run().requests
    late = len(requests) - int(requests.in_time(plan.deadline_ms * 1000).sum())
    return RunRow(**_about(point, plan, effort.name), broker=VIRTUAL, offered=len(requests), late=late)


def tuning_points(plan: Plan, effort: Effort) -> Sequence[Point]:
    """Full inference at half of the rate that fills the device, in each variant."""
    rate = snapped(HALF * plan.full_rate_per_s)
    return [
        Point(Asked.TUNING, LOADS[0], System.FULL, variant, rate, effort.seeds[0], plan.history)
        for variant in effort.variants
    ]
