"""One run of the pipeline at one rate, and the output of its figures. `__main__` describes the figures."""

from __future__ import annotations

import csv
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from relaygr.demo.processes import Reading
from relaygr.demo.stack import DemoStack
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.schemas.messages import LatencyCoefficients, Outcome
from relaygr.settings import Settings
from relaygr.traffic.records import read_records
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
_STARTS = "relaygr_worker_preinfer_start_seconds"


@dataclass(frozen=True, slots=True)
class RateFigures:
    """The figures of one rate. Latencies are in ms, CPU in seconds in a second of wall time."""

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


def measure_rates(rates: Sequence[float], seconds: float, warm_up_s: float, broker: str, out: Path) -> None:
    """Measures each rate on one broker, prints the figures and appends them to `out`."""
    console = Console(highlight=False)
    figures = []
    with tempfile.TemporaryDirectory(prefix="relaygr-bench-") as name, local_broker(broker) as started:
        console.print(f"broker: {started.what}", soft_wrap=True)
        for number, rate in enumerate(rates):
            folder = Path(name) / f"rate-{number}"
            folder.mkdir()
            figures.append(measure(console, started, folder, rate, seconds, warm_up_s))
    _print(console, figures)
    _append(out, figures)
    console.print(f"appended to {out}")


def measure(
    console: Console, broker: LocalBroker, folder: Path, rate_per_s: float, seconds: float, warm_up_s: float
) -> RateFigures:
    """One run at one rate, with new processes and topics."""
    settings = _settings(broker, folder, rate_per_s, seconds)
    records = folder / "records.jsonl"
    half = [f"gateway.rate_per_s={rate_per_s / 2}", f"gateway.duration_s={warm_up_s}"]
    with DemoStack(console, folder, broker, settings, relay=True, workers=1, observed=False) as stack:
        stack.play(f"warm-up at {rate_per_s / 2:.0f}/s", folder / "warm-up.jsonl", overrides=half)
        window = MeasuredWindow(stack, records)
        stack.play(f"{rate_per_s:.0f}/s", records, watch=window.sample)
        cpu = window.cpu_per_second()
        (worker,) = stack.worker_readings()
    ended = sorted(read_records(records), key=lambda record: record.number)
    latencies = np.array([record.latency_us for record in ended if record.status == Outcome.RANKED]) / 1000
    lags = np.array([record.send_lag_us for record in ended]) / 1000
    middle = latencies[int(0.4 * latencies.size) : int(0.6 * latencies.size)]
    last = latencies[int(0.9 * latencies.size) :]
    return RateFigures(
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        machine=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        broker=broker.what.split(" at ")[0],
        rate_per_s=rate_per_s,
        seconds=seconds,
        offered=len(ended),
        answered=int(latencies.size),
        p50_ms=_percentile(latencies, 50),
        p99_ms=_percentile(latencies, 99),
        p999_ms=_percentile(latencies, 99.9),
        growth_ms=float(np.median(last) - np.median(middle)) if latencies.size else float("nan"),
        preinfer_jobs=int(worker.total(f"{_STARTS}_count") - window.before.total(f"{_STARTS}_count")),
        preinfer_start_p50_ms=_histogram_percentile(window.before, worker, 0.50),
        preinfer_start_p99_ms=_histogram_percentile(window.before, worker, 0.99),
        generator_lag_p99_ms=_percentile(lags, 99),
        cpu_gateway=cpu.get("gateway", 0.0),
        cpu_trigger=cpu.get("trigger", 0.0),
        cpu_worker=cpu.get("worker", 0.0),
        cpu_broker=cpu.get("broker", 0.0),
    )


class MeasuredWindow:
    """The measured part of a run: CPU time of each process and of the broker, and the worker's metrics at its start."""

    def __init__(self, stack: DemoStack, records: Path) -> None:
        """The window begins with the first record."""
        self._stack = stack
        self._records = records
        self._processes: dict[psutil.Process, str] = {}
        self._first: dict[psutil.Process, tuple[float, float]] = {}
        self._last: dict[psutil.Process, tuple[float, float]] = {}
        self._next_s = 0.0
        self.before = Reading()
        """The metrics of the worker at the beginning."""

    def sample(self) -> None:
        """Reads the CPU time of every process, at most once a second, because reading takes CPU time too."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + 1.0
        if not self._processes:
            if not (self._records.exists() and self._records.stat().st_size):
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

    def _open(self) -> None:
        (self.before,) = self._stack.worker_readings()
        roles = {child.process.pid: child.name.split("-")[0] for child in self._stack.processes()}
        for process in psutil.Process().children(recursive=True):
            role = roles.get(process.pid, "broker")
            self._processes[process] = "gateway" if role == "records" else role

    def cpu_per_second(self) -> dict[str, float]:
        """CPU seconds in a second of wall time, by role. The longest sampled process gives the wall time."""
        wall_s = max((self._last[process][0] - self._first[process][0] for process in self._last), default=0.0)
        used: dict[str, float] = {}
        for process, last in self._last.items():
            role = self._processes[process]
            used[role] = used.get(role, 0.0) + last[1] - self._first[process][1]
        return {role: seconds / wall_s for role, seconds in used.items()} if wall_s else {}


def _settings(broker: LocalBroker, folder: Path, rate_per_s: float, seconds: float) -> Settings:
    """Settings with a null model and a calibration by which every impression is at risk and feasible."""
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
    slow_full = LatencyCoefficients(
        a0=10_000_000, a1=0, a2=0, b0=1, b1=0, b2=0, c0=1, c1=0, c2=0, d0=1, d1=0
    )  # fmt: skip
    made = Calibration(describe(engine), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), slow_full, (), (), (), ())
    save_calibration(made, folder / "calibration.json")
    base = broker.settings()
    return Settings.model_validate(
        {
            "bootstrap": base.bootstrap,
            "fetch_wait_max_ms": base.fetch_wait_max_ms,
            "session_timeout_ms": base.session_timeout_ms,
            "topic_prefix": f"pipeline-{rate_per_s:.0f}",
            "group_prefix": f"pipeline-{rate_per_s:.0f}",
            "partitions": PARTITIONS,
            "log": {"level": "warning"},
            "worker": {
                "model": model,
                "calibration": folder / "calibration.json",
                "hbm_bytes": 256 << 20,
                "dram_bytes": 0,
                "history_max_bytes": 256 << 20,
            },
            "gateway": {
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


def _percentile(values: np.ndarray, share: float) -> float:
    return float(np.percentile(values, share)) if values.size else float("nan")


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
    table = Table(title="Ranking latency through the pipeline, no model; CPU seconds a second")
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


def _append(path: Path, figures: Sequence[RateFigures]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(RateFigures)])
        if new:
            writer.writeheader()
        writer.writerows(asdict(one) for one in figures)
