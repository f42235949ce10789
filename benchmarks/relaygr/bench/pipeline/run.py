"""The rounds of pipeline and echo at each rate, and the output of their figures. `__main__` describes the figures."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from relaygr.bench.pipeline.echo import Echo, read_run
from relaygr.bench.rows import append_rows, machine, now
from relaygr.demo.machine import busy_s
from relaygr.demo.processes import Reading
from relaygr.demo.stack import DemoStack
from relaygr.demo.summary import percentile
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import LatencyCoefficients, Outcome
from relaygr.settings import Settings
from relaygr.traffic.records import read_records
from relaygr.traffic.settings import TrafficSettings
from relaygr.worker.calibration import Calibration, describe, save_calibration
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.engine import load_engine
from relaygr.worker.model.options import Family

BUDGET_MS = 1_000
CANDIDATES = 128
HISTORY = 512
PARTITIONS = 8
"""The least number of partitions for one worker."""
CARRIED_SHARE = 0.999
SAMPLE_S = 0.1
TABLE_WIDTH = 150
_STARTS = "relaygr_worker_preinfer_start_seconds"


@dataclass(frozen=True, slots=True)
class RateFigures:
    """One run of the pipeline. Latencies are in ms, CPU in seconds in a second of wall time."""

    measured_at: str
    machine: str
    broker: str
    rate_per_s: float
    seconds: float
    offered: int
    answered: int
    p50_ms: float
    p99_ms: float
    p999_ms: float
    growth_ms: float
    """Median latency of the last tenth of the requests minus that of the middle fifth."""
    preinfer_jobs: int
    preinfer_start_p50_ms: float
    preinfer_start_p99_ms: float
    generator_lag_p99_ms: float
    cpu_gateway: float
    cpu_trigger: float
    cpu_worker: float
    cpu_broker: float

    @property
    def carried(self) -> bool:
        return self.answered >= CARRIED_SHARE * self.offered and self.growth_ms < max(5.0, self.p50_ms)


@dataclass(frozen=True, slots=True)
class Plan:
    """How long each run takes, how many there are, and how long each warm-up is."""

    seconds: float
    rounds: int
    warm_up_s: float


@dataclass(frozen=True, slots=True)
class EchoFigures:
    """One run of the echo. Latencies are in ms, CPU in seconds in a second of wall time."""

    offered: int
    answered: int
    p50_ms: float
    p99_ms: float
    cpu_python: float
    foreign_cpu: float


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """The pipeline and the echo at one rate, one after the other. `foreign_cpu`: cores that others used meanwhile."""

    pipeline: RateFigures
    pipeline_foreign_cpu: float
    echo: EchoFigures

    def ratios(self) -> dict[str, float]:
        """The row of this round, without its rate."""
        pipeline, echo = self.pipeline, self.echo
        cpu = pipeline.cpu_gateway + pipeline.cpu_trigger + pipeline.cpu_worker
        return {
            "p50_ratio": pipeline.p50_ms / echo.p50_ms,
            "p99_ratio": pipeline.p99_ms / echo.p99_ms,
            "python_cpu_ratio": cpu / echo.cpu_python if echo.cpu_python else float("nan"),
            "foreign_cpu": (self.pipeline_foreign_cpu + echo.foreign_cpu) / 2,
            "pipeline_p50_ms": pipeline.p50_ms,
            "pipeline_p99_ms": pipeline.p99_ms,
            "pipeline_cpu": cpu,
            "pipeline_answered_share": pipeline.answered / pipeline.offered if pipeline.offered else 0.0,
            "echo_p50_ms": echo.p50_ms,
            "echo_p99_ms": echo.p99_ms,
            "echo_cpu": echo.cpu_python,
            "echo_answered_share": echo.answered / echo.offered if echo.offered else 0.0,
            "pipeline_foreign_cpu": self.pipeline_foreign_cpu,
            "echo_foreign_cpu": echo.foreign_cpu,
        }


def measure_rates(rates: Sequence[float], plan: Plan, broker: str, out: Path, json_out: Path | None) -> None:
    """Measures each rate on one broker, prints the figures and appends them to `out` and to `ratios.csv` beside it."""
    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    figures: list[RateFigures] = []
    ratios: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="relaygr-bench-") as name, local_broker(broker) as started:
        console.print(f"broker: {started.what}", soft_wrap=True)
        for number, rate in enumerate(rates):
            folder = Path(name) / f"rate-{number}"
            folder.mkdir()
            rounds = measure(console, started, folder, rate, plan)
            figures += [each.pipeline for each in rounds]
            ratios.append(medians(rate, rounds))
    _print(console, figures)
    _print_ratios(console, ratios)
    append_rows(out, [asdict(each) for each in figures])
    beside = out.with_name("ratios.csv")
    append_rows(beside, [_described(figures[0]) | row for row in ratios])
    if json_out is not None:
        json_out.write_text(json.dumps(ratios, indent=1) + "\n", encoding="utf-8")
    console.print(f"appended to {out} and {beside}")


def medians(rate: float, rounds: Sequence[RoundFigures]) -> dict[str, Any]:
    """The medians of all rounds at one rate."""
    rows = [each.ratios() for each in rounds]
    return {"rate": rate, "rounds": len(rows)} | {
        name: round(float(np.median([row[name] for row in rows])), 4) for name in rows[0]
    }


def measure(console: Console, broker: LocalBroker, folder: Path, rate_per_s: float, plan: Plan) -> list[RoundFigures]:
    """All rounds at one rate, with new processes and topics. The processes of both wait while the other one runs."""
    settings = null_settings(broker, folder, rate_per_s, plan.seconds)
    warm = settings.traffic.model_copy(update={"rate_per_s": rate_per_s / 2, "duration_s": plan.warm_up_s})
    rounds = []
    with (
        DemoStack(console, folder, broker, settings, relay=True, workers=1, observed=False) as stack,
        Echo(folder, broker, settings) as echo,
    ):
        with console.status(f"warm-up at {rate_per_s / 2:.0f}/s"):
            _run_pipeline(stack, folder / "warm-up.jsonl", warm)
            _run_echo(echo, folder / "warm-up-echo.json", warm)
        for number in range(plan.rounds):
            with console.status(f"{rate_per_s:.0f}/s, round {number + 1} of {plan.rounds}"):
                records = folder / f"round-{number}.jsonl"
                window = _run_pipeline(stack, records, settings.traffic)
                pipeline = _pipeline_figures(broker, records, settings.traffic, window, stack)
                bare = _run_echo(echo, folder / f"echo-{number}.json", settings.traffic)
            rounds.append(RoundFigures(pipeline, window.foreign_cpu_per_second(), bare))
    return rounds


def _run_pipeline(stack: DemoStack, records: Path, traffic: TrafficSettings) -> MeasuredWindow:
    window = MeasuredWindow(records, stack.roles, at_begin=lambda: stack.worker_readings()[0])
    stack.play_unobserved(
        records, window.sample, [f"traffic.rate_per_s={traffic.rate_per_s}", f"traffic.duration_s={traffic.duration_s}"]
    )
    return window


def _run_echo(echo: Echo, records: Path, traffic: TrafficSettings) -> EchoFigures:
    window = MeasuredWindow(records.with_suffix(".begun"), echo.roles)
    gateway = echo.start_run(records, traffic)
    while gateway.poll() is None:
        window.sample()
        time.sleep(SAMPLE_S)
    if gateway.returncode != 0:
        raise RelayError(f"the echo's gateway ended with exit code {gateway.returncode}")
    latencies, offered = read_run(records)
    cpu = window.cpu_per_second()
    return EchoFigures(
        offered=offered,
        answered=int(latencies.size),
        p50_ms=percentile(latencies, 50),
        p99_ms=percentile(latencies, 99),
        cpu_python=cpu.get("gateway", 0.0) + cpu.get("trigger", 0.0) + cpu.get("worker", 0.0),
        foreign_cpu=window.foreign_cpu_per_second(),
    )


def _pipeline_figures(
    broker: LocalBroker, records: Path, traffic: TrafficSettings, window: MeasuredWindow, stack: DemoStack
) -> RateFigures:
    cpu, before, after = window.cpu_per_second(), window.before, stack.worker_readings()[0]
    ended = sorted(read_records(records), key=lambda record: record.number)
    latencies = np.array([record.latency_us for record in ended if record.status == Outcome.RANKED]) / 1000
    lags = np.array([record.send_lag_us for record in ended]) / 1000
    middle = latencies[int(0.4 * latencies.size) : int(0.6 * latencies.size)]
    last = latencies[int(0.9 * latencies.size) :]
    return RateFigures(
        measured_at=now(),
        machine=machine(),
        broker=broker.what.split(" at ")[0],
        rate_per_s=traffic.rate_per_s,
        seconds=traffic.duration_s,
        offered=len(ended),
        answered=int(latencies.size),
        p50_ms=percentile(latencies, 50),
        p99_ms=percentile(latencies, 99),
        p999_ms=percentile(latencies, 99.9),
        growth_ms=float(np.median(last) - np.median(middle)) if latencies.size else float("nan"),
        preinfer_jobs=int(after.total(f"{_STARTS}_count") - before.total(f"{_STARTS}_count")),
        preinfer_start_p50_ms=_histogram_percentile(before, after, 0.50),
        preinfer_start_p99_ms=_histogram_percentile(before, after, 0.99),
        generator_lag_p99_ms=percentile(lags, 99),
        cpu_gateway=cpu.get("gateway", 0.0),
        cpu_trigger=cpu.get("trigger", 0.0),
        cpu_worker=cpu.get("worker", 0.0),
        cpu_broker=cpu.get("broker", 0.0),
    )


class MeasuredWindow:
    """The measured part of a run: CPU time of each process, of the broker, and of the rest of the machine."""

    def __init__(
        self,
        begun: Path,
        roles: Callable[[], Mapping[int, str]],
        at_begin: Callable[[], Reading] = Reading,
        longest_s: float = math.inf,
    ) -> None:
        """The window begins when the file `begun` has content, and ends after `longest_s` or with the last sample.
        `roles`: the measured processes by their ids.
        """
        self._begun = begun
        self._longest_s, self._ends_s = longest_s, math.inf
        self._roles = roles
        self._at_begin = at_begin
        self._processes: dict[psutil.Process, str] = {}
        self._first: dict[psutil.Process, tuple[float, float]] = {}
        self._last: dict[psutil.Process, tuple[float, float]] = {}
        self._machine: list[tuple[float, float]] = []
        self._next_s = 0.0
        self.before = Reading()
        """The metrics of the worker at the beginning."""

    def sample(self) -> None:
        """Reads the CPU time of every process, at most once a second, because reading takes CPU time too."""
        if not self._next_s <= time.monotonic() <= self._ends_s:
            return
        self._next_s = time.monotonic() + (1.0 if self._processes else SAMPLE_S)
        if not self._processes:
            if not (self._begun.exists() and self._begun.stat().st_size):
                return
            self._open()
        for process in self._processes:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            now = (time.monotonic(), times.user + times.system)
            self._first.setdefault(process, now)
            self._last[process] = now
        self._machine.append((time.monotonic(), busy_s()))

    def _open(self) -> None:
        self._ends_s = time.monotonic() + self._longest_s
        self.before = self._at_begin()
        roles = self._roles()
        own = psutil.Process()
        self._processes = {process: roles.get(process.pid, _role_of_other(process)) for process in own.children(True)}
        self._processes[own] = "benchmark"

    def cpu_per_second(self) -> dict[str, float]:
        """CPU seconds in a second of wall time, by role. The longest sampled process gives the wall time."""
        wall_s = max((self._last[process][0] - self._first[process][0] for process in self._last), default=0.0)
        used: dict[str, float] = {}
        for process, last in self._last.items():
            role = self._processes[process]
            used[role] = used.get(role, 0.0) + last[1] - self._first[process][1]
        return {role: seconds / wall_s for role, seconds in used.items()} if wall_s else {}

    def foreign_cpu_per_second(self) -> float:
        """The CPU seconds a second that processes used which this one did not start."""
        if len(self._machine) < 2:
            return float("nan")
        (from_s, busy_from_s), (to_s, busy_to_s) = self._machine[0], self._machine[-1]
        return max(0.0, (busy_to_s - busy_from_s) / (to_s - from_s) - sum(self.cpu_per_second().values()))


def _role_of_other(process: psutil.Process) -> str:
    """`idle` for the Python processes that wait for their turn, else `broker`."""
    try:
        return "idle" if "python" in process.name() else "broker"
    except psutil.Error:
        return "broker"


SLOW_FULL = LatencyCoefficients(a0=10_000_000, a1=0, a2=0, b0=1, b1=0, b2=0, c0=1, c1=0, c2=0, d0=1, d1=0)
"""A latency model by which every impression is at risk and feasible."""


def null_settings(
    broker: LocalBroker, folder: Path, rate_per_s: float, seconds: float, latency: LatencyCoefficients = SLOW_FULL
) -> Settings:
    """Settings with a null model that is said to take these times."""
    config = ModelConfig(
        family=Family.NULL,
        embedding_dim=64,
        num_heads=1,
        attention_dim=16,
        hidden_dim=16,
        num_layers=1,
        normalizer=1024.0,
        vocabulary_size=10_000,
        max_prefix_behaviours=HISTORY * 2,
        max_suffix_behaviours=32,
        max_candidates=CANDIDATES,
    )
    model = folder / "model"
    save_checkpoint(model, config, random_checkpoint(config, seed=0).tensors)
    engine = load_engine(model, "cpu", threads=1)
    made = Calibration(describe(engine), now(), latency, (), (), (), ())
    save_calibration(made, folder / "calibration.json")
    prefix = f"pipeline-{rate_per_s:.0f}"
    kafka = broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=PARTITIONS))
    return Settings.model_validate(
        {
            **kafka.model_dump(),
            "log": {"level": "warning"},
            "worker": {
                "model": model,
                "calibration": folder / "calibration.json",
                "hbm_bytes": 256 << 20,
                "dram_bytes": 0,
                "history_max_bytes": 256 << 20,
            },
            "traffic": {
                "duration_s": seconds,
                "rate_per_s": rate_per_s,
                "users": 1_000,
                "history_median": HISTORY,
                "history_sigma": 0.0,
                "history_max": HISTORY * 2,
                "growth": 0,
                "candidates": CANDIDATES,
                "lead_median_ms": 200.0,
                "budget_ms": BUDGET_MS,
            },
        }
    )


def _histogram_percentile(before: Reading, after: Reading, share: float) -> float:
    """The percentile of the pre-infer starts between two readings, in ms, interpolated in its bucket."""
    earlier = before.by_label(f"{_STARTS}_bucket", "le")
    later = after.by_label(f"{_STARTS}_bucket", "le")
    buckets = sorted((float(bound), count - earlier.get(bound, 0.0)) for bound, count in later.items())
    if not buckets or not buckets[-1][1]:
        return float("nan")
    wanted, below, lower = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            upper = bound if np.isfinite(bound) else lower
            part = (wanted - below) / (count - below) if count > below else 1.0
            return 1000 * (lower + part * (upper - lower))
        below, lower = count, bound
    return float("nan")


def _print(console: Console, figures: Sequence[RateFigures]) -> None:
    table = Table(title="Ranking latency through the pipeline, no model, each round; CPU seconds a second")
    for name in (
        "rate/s", "answered", "P50", "P99", "P99.9", "carried", "job start P50", "P99", "generator lag P99",
        "gateway", "trigger", "worker", "broker",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for one in figures:
        table.add_row(
            f"{one.rate_per_s:.0f}",
            f"{one.answered}/{one.offered}",
            f"{one.p50_ms:.2f} ms",
            f"{one.p99_ms:.2f} ms",
            f"{one.p999_ms:.2f} ms",
            "yes" if one.carried else "no",
            f"{one.preinfer_start_p50_ms:.2f} ms",
            f"{one.preinfer_start_p99_ms:.2f} ms",
            f"{one.generator_lag_p99_ms:.2f} ms",
            *(f"{cpu:.2f}" for cpu in (one.cpu_gateway, one.cpu_trigger, one.cpu_worker, one.cpu_broker)),
        )
    console.print(table)


def _print_ratios(console: Console, ratios: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="Pipeline / echo, medians of the rounds; foreign CPU: cores that others used meanwhile")
    for name in ("rate/s", "P50", "P99", "Python CPU an impression", "echo P50", "P99", "Python CPU", "foreign CPU"):
        table.add_column(name, justify="right")
    for row in ratios:
        table.add_row(
            f"{row['rate']:.0f}",
            f"{row['p50_ratio']:.2f}",
            f"{row['p99_ratio']:.2f}",
            f"{row['python_cpu_ratio']:.2f}",
            f"{row['echo_p50_ms']:.2f} ms",
            f"{row['echo_p99_ms']:.2f} ms",
            f"{row['echo_cpu']:.2f}",
            f"{row['foreign_cpu']:.2f}",
        )
    console.print(table)


def _described(figures: RateFigures) -> dict[str, Any]:
    return {name: getattr(figures, name) for name in ("measured_at", "machine", "broker", "seconds")}
