"""The rounds of pipeline and echo at each rate, and the output of their figures. `__main__` describes the figures."""

from __future__ import annotations

import json
import math
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from relaygr.bench.pipeline.echo import Echo, read_run
from relaygr.bench.pipeline.http import Http
from relaygr.bench.rows import append_rows, machine, now, refuse_other_columns
from relaygr.demo.machine import busy_s
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
SAMPLE_S = 0.1
TABLE_WIDTH = 150


@dataclass(frozen=True, slots=True)
class Plan:
    """How long each run takes, how many there are, how long each warm-up is, and whether HTTP is measured, too."""

    seconds: float
    rounds: int
    warm_up_s: float
    http: bool = False


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run of one system. Latencies are in ms, CPU in seconds in a second of wall time."""

    offered: int
    answered: int
    p50_ms: float
    p99_ms: float
    python_cpu: float
    """Of gateway, trigger and worker."""
    foreign_cpu: float
    """Of processes that this one did not start."""
    generator_lag_p99_ms: float = float("nan")

    @property
    def answered_share(self) -> float:
        return self.answered / self.offered if self.offered else 0.0


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """The systems at one rate, one after the other."""

    pipeline: RunFigures
    echo: RunFigures
    http: RunFigures | None = None

    def row(self) -> dict[str, float | None]:
        """The row of this round, without its rate. Without HTTP its columns are empty."""
        pipeline, echo = self.pipeline, self.echo
        row: dict[str, float | None] = {
            "p50_ratio": pipeline.p50_ms / echo.p50_ms,
            "p99_ratio": pipeline.p99_ms / echo.p99_ms,
            "python_cpu_ratio": pipeline.python_cpu / echo.python_cpu if echo.python_cpu else float("nan"),
            "foreign_cpu": (pipeline.foreign_cpu + echo.foreign_cpu) / 2,
            "pipeline_p50_ms": pipeline.p50_ms,
            "pipeline_p99_ms": pipeline.p99_ms,
            "pipeline_cpu": pipeline.python_cpu,
            "pipeline_answered_share": pipeline.answered_share,
            "echo_p50_ms": echo.p50_ms,
            "echo_p99_ms": echo.p99_ms,
            "echo_cpu": echo.python_cpu,
            "echo_answered_share": echo.answered_share,
            "pipeline_foreign_cpu": pipeline.foreign_cpu,
            "echo_foreign_cpu": echo.foreign_cpu,
        }
        http = self.http
        return row | {
            "http_p50_ms": http.p50_ms if http else None,
            "http_p99_ms": http.p99_ms if http else None,
            "http_cpu": http.python_cpu if http else None,
            "http_answered_share": http.answered_share if http else None,
        }


def measure_rates(rates: Sequence[float], plan: Plan, broker: str, out: Path, json_out: Path | None) -> None:
    """Measures each rate on one broker, prints the medians of the rounds and appends them to `out`."""
    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    refuse_other_columns(out, COLUMNS)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="relaygr-bench-") as name, local_broker(broker) as started:
        console.print(f"broker: {started.what}", soft_wrap=True)
        for number, rate in enumerate(rates):
            folder = Path(name) / f"rate-{number}"
            folder.mkdir()
            rounds = measure(console, started, folder, rate, plan)
            rows.append(medians(rate, rounds))
            lag_ms = float(np.median([each.pipeline.generator_lag_p99_ms for each in rounds]))
            console.print(f"{rate:.0f}/s: the gateway sent at most {lag_ms:.1f} ms late (P99, median of the rounds)")
        described = {"measured_at": now(), "machine": machine(), "broker": started.what.split(" at ")[0]}
    _print(console, rows, plan.http)
    if json_out is not None:
        json_out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    append_rows(out, [described | {"seconds": plan.seconds} | row for row in rows])
    console.print(f"appended to {out}")


def medians(rate: float, rounds: Sequence[RoundFigures]) -> dict[str, Any]:
    """The medians of all rounds at one rate."""
    rows = [each.row() for each in rounds]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {"rate": rate, "rounds": len(rows)} | {
        name: None if None in values else round(float(np.median(values)), 4)  # type: ignore[arg-type]
        for name, values in columns.items()
    }


_NO_RUN = RunFigures(0, 0, math.nan, math.nan, math.nan, math.nan)
COLUMNS = ("measured_at", "machine", "broker", "seconds", *medians(math.nan, [RoundFigures(_NO_RUN, _NO_RUN)]))
"""Of the CSV."""


def measure(console: Console, broker: LocalBroker, folder: Path, rate_per_s: float, plan: Plan) -> list[RoundFigures]:
    """All rounds at one rate, with new processes and topics. The processes of the others wait while one runs."""
    settings = null_settings(broker, folder, rate_per_s, plan.seconds)
    warm = settings.traffic.model_copy(update={"rate_per_s": rate_per_s / 2, "duration_s": plan.warm_up_s})
    rounds = []
    with (
        DemoStack(console, folder, broker, settings, relay=True, workers=1, observed=False) as stack,
        Echo(folder, broker, settings) as echo,
        Http(folder, folder / settings.topic_prefix / "settings.yaml") if plan.http else nullcontext() as http,
    ):
        with console.status(f"warm-up at {rate_per_s / 2:.0f}/s"):
            _run_pipeline(stack, folder / "warm-up.jsonl", warm)
            _run_echo(echo, folder / "warm-up-echo.json", warm)
            if http is not None:
                _run_http(http, stack, folder / "warm-up-http.jsonl", warm)
        for number in range(plan.rounds):
            with console.status(f"{rate_per_s:.0f}/s, round {number + 1} of {plan.rounds}"):
                relay = _run_pipeline(stack, folder / f"round-{number}.jsonl", settings.traffic)
                over_http = None
                if http is not None:
                    over_http = _run_http(http, stack, folder / f"http-{number}.jsonl", settings.traffic)
                bare = _run_echo(echo, folder / f"echo-{number}.json", settings.traffic)
            rounds.append(RoundFigures(relay, bare, over_http))
    return rounds


def _run_pipeline(stack: DemoStack, records: Path, traffic: TrafficSettings) -> RunFigures:
    window = MeasuredWindow(records, stack.roles)
    stack.play_unobserved(
        records, window.sample, [f"traffic.rate_per_s={traffic.rate_per_s}", f"traffic.duration_s={traffic.duration_s}"]
    )
    return _recorded(records, window)


def _run_http(http: Http, stack: DemoStack, records: Path, traffic: TrafficSettings) -> RunFigures:
    window = MeasuredWindow(records, lambda: stack.roles() | http.roles())
    _watch(http.start_run(records, traffic), window, "player over HTTP")
    return _recorded(records, window)


def _run_echo(echo: Echo, records: Path, traffic: TrafficSettings) -> RunFigures:
    window = MeasuredWindow(records.with_suffix(".begun"), echo.roles)
    _watch(echo.start_run(records, traffic), window, "echo's gateway")
    latencies, offered = read_run(records)
    return _figures(latencies, offered, window)


def _watch(sender: subprocess.Popen[Any], window: MeasuredWindow, what: str) -> None:
    while sender.poll() is None:
        window.sample()
        time.sleep(SAMPLE_S)
    if sender.returncode != 0:
        raise RelayError(f"the {what} ended with exit code {sender.returncode}")


def _recorded(records: Path, window: MeasuredWindow) -> RunFigures:
    """The figures of a run of the player."""
    ended = list(read_records(records))
    latencies = np.array([record.latency_us for record in ended if record.status == Outcome.RANKED]) / 1000
    lags = np.array([record.send_lag_us for record in ended]) / 1000
    return replace(_figures(latencies, len(ended), window), generator_lag_p99_ms=percentile(lags, 99))


def _figures(latencies_ms: NDArray[np.float64], offered: int, window: MeasuredWindow) -> RunFigures:
    cpu = window.cpu_per_second()
    return RunFigures(
        offered=offered,
        answered=int(latencies_ms.size),
        p50_ms=percentile(latencies_ms, 50),
        p99_ms=percentile(latencies_ms, 99),
        python_cpu=sum(cpu.get(role, 0.0) for role in ("gateway", "trigger", "worker")),
        foreign_cpu=window.foreign_cpu_per_second(),
    )


class MeasuredWindow:
    """The measured part of a run: CPU time of each process, of the broker, and of the rest of the machine."""

    def __init__(
        self,
        begun: Path,
        roles: Callable[[], Mapping[int, str]],
        longest_s: float = math.inf,
    ) -> None:
        """The window begins when the file `begun` has content, and ends after `longest_s` or with the last sample.
        `roles`: the measured processes by their ids.
        """
        self._begun = begun
        self._longest_s, self._ends_s = longest_s, math.inf
        self._roles = roles
        self._processes: dict[psutil.Process, str] = {}
        self._first: dict[psutil.Process, tuple[float, float]] = {}
        self._last: dict[psutil.Process, tuple[float, float]] = {}
        self._machine: list[tuple[float, float]] = []
        self._next_s = 0.0

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
    # The topics are deleted at the end: another's run on the same cluster keeps its own.
    prefix = f"bench-{secrets.token_hex(3)}"
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


def _print(console: Console, rows: Sequence[Mapping[str, Any]], http: bool) -> None:
    table = Table(title="Medians of the rounds; CPU of the Python processes in cores")
    for name in ("rate/s", "system", "P50", "P99", "CPU", "answered", "P50 / echo's", "P99 / echo's", "CPU / echo's"):
        table.add_column(name, justify="right")
    for row in rows:
        for system in ("pipeline", *(("http",) if http else ()), "echo"):
            p50_ms, p99_ms, cpu = (row[f"{system}_{name}"] for name in ("p50_ms", "p99_ms", "cpu"))
            table.add_row(
                f"{row['rate']:.0f}",
                system,
                f"{p50_ms:.1f} ms",
                f"{p99_ms:.1f} ms",
                f"{cpu:.2f}",
                f"{row[f'{system}_answered_share']:.1%}",
                f"{p50_ms / row['echo_p50_ms']:.2f}",
                f"{p99_ms / row['echo_p99_ms']:.2f}",
                f"{cpu / row['echo_cpu']:.2f}" if row["echo_cpu"] else "",
            )
    console.print(table)
    foreign = ", ".join(f"{row['foreign_cpu']:.2f}" for row in rows)
    console.print(f"other processes used meanwhile, in cores: {foreign}")
