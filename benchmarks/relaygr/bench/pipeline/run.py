"""The rounds of pipeline and echo at each rate, and the output of their figures. `__main__` describes the figures."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from relaygr.bench.null_model import null_settings
from relaygr.bench.pipeline.echo import Echo, read_run, schedule_of
from relaygr.bench.rows import append_rows, machine, now, refuse_other_columns
from relaygr.bench.window import SAMPLE_S, MeasuredWindow
from relaygr.demo.stack import DemoStack
from relaygr.demo.summary import percentile
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.processes import CommandProcess
from relaygr.runtime.errors import RelayError
from relaygr.schemas.ended import Ended
from relaygr.traffic.records import read_records
from relaygr.traffic.settings import TrafficSettings

TABLE_WIDTH = 150


@dataclass(frozen=True, slots=True)
class Plan:
    """How long each run takes, how many there are, and how long each warm-up is."""

    seconds: float
    rounds: int
    warm_up_s: float


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
    """Pipeline, echo and the echo by asyncio at one rate, one after the other."""

    pipeline: RunFigures
    echo: RunFigures
    asyncio: RunFigures

    def row(self) -> dict[str, float]:
        """The row of this round, without its rate."""
        pipeline, echo, by_asyncio = self.pipeline, self.echo, self.asyncio
        return {
            "p50_ratio": pipeline.p50_ms / echo.p50_ms,
            "p99_ratio": pipeline.p99_ms / echo.p99_ms,
            "python_cpu_ratio": pipeline.python_cpu / echo.python_cpu if echo.python_cpu else float("nan"),
            "foreign_cpu": (pipeline.foreign_cpu + echo.foreign_cpu + by_asyncio.foreign_cpu) / 3,
            "pipeline_p50_ms": pipeline.p50_ms,
            "pipeline_p99_ms": pipeline.p99_ms,
            "pipeline_cpu": pipeline.python_cpu,
            "pipeline_answered_share": pipeline.answered_share,
            "echo_p50_ms": echo.p50_ms,
            "echo_p99_ms": echo.p99_ms,
            "echo_cpu": echo.python_cpu,
            "echo_answered_share": echo.answered_share,
            "asyncio_p50_ms": by_asyncio.p50_ms,
            "asyncio_p99_ms": by_asyncio.p99_ms,
            "asyncio_cpu": by_asyncio.python_cpu,
            "asyncio_answered_share": by_asyncio.answered_share,
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
    _print(console, rows)
    if json_out is not None:
        json_out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    append_rows(out, [described | {"seconds": plan.seconds} | row for row in rows])
    console.print(f"appended to {out}")


def medians(rate: float, rounds: Sequence[RoundFigures]) -> dict[str, Any]:
    """The medians of all rounds at one rate."""
    rows = [each.row() for each in rounds]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {"rate": rate, "rounds": len(rows)} | {
        name: round(float(np.median(values)), 4) for name, values in columns.items()
    }


_NO_RUN = RunFigures(0, 0, math.nan, math.nan, math.nan, math.nan)
COLUMNS = (
    "measured_at", "machine", "broker", "seconds", *medians(math.nan, [RoundFigures(_NO_RUN, _NO_RUN, _NO_RUN)])
)  # fmt: skip
"""Of the CSV."""


def measure(console: Console, broker: LocalBroker, folder: Path, rate_per_s: float, plan: Plan) -> list[RoundFigures]:
    """All rounds at one rate, with new processes and topics. The processes of the others wait while one runs."""
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
            _run_echo(echo, folder / "warm-up-asyncio.json", warm, "asyncio")
        for number in range(plan.rounds):
            with console.status(f"{rate_per_s:.0f}/s, round {number + 1} of {plan.rounds}"):
                relay = _run_pipeline(stack, folder / f"round-{number}.jsonl", settings.traffic)
                bare = _run_echo(echo, folder / f"echo-{number}.json", settings.traffic)
                by_asyncio = _run_echo(echo, folder / f"asyncio-{number}.json", settings.traffic, "asyncio")
            rounds.append(RoundFigures(relay, bare, by_asyncio))
    return rounds


def _run_pipeline(stack: DemoStack, records: Path, traffic: TrafficSettings) -> RunFigures:
    window = MeasuredWindow(records, stack.roles)
    stack.play_unobserved(records, window.sample, schedule_of(traffic))
    return _recorded(records, window)


def _run_echo(echo: Echo, records: Path, traffic: TrafficSettings, role: str = "gateway") -> RunFigures:
    window = MeasuredWindow(records.with_suffix(".begun"), echo.roles)
    _watch(echo.start_run(records, traffic, role), window)
    latencies, offered = read_run(records)
    return _figures(latencies, offered, window)


def _watch(sender: CommandProcess, window: MeasuredWindow) -> None:
    """Raises RelayError, with its log, if the sender fails."""
    while sender.process.poll() is None:
        window.sample()
        time.sleep(SAMPLE_S)
    if sender.process.returncode:
        raise RelayError(f"{sender.name} ended with exit code {sender.process.returncode}:\n{sender.log_tail()}")


def _recorded(records: Path, window: MeasuredWindow) -> RunFigures:
    """The figures of a run of the player."""
    ended = list(read_records(records))
    latencies = np.array([record.latency_us for record in ended if record.status == Ended.RANKED]) / 1000
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


def _print(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="Medians of the rounds; CPU of the Python processes in cores")
    for name in ("rate/s", "system", "P50", "P99", "CPU", "answered", "P50 / echo's", "P99 / echo's", "CPU / echo's"):
        table.add_column(name, justify="right")
    for row in rows:
        for system in ("pipeline", "echo", "asyncio"):
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
