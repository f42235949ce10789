"""Capacity, the rows above it, and the output of their figures. `__main__` describes the figures."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from relaygr.bench.overload.__main__ import OverloadModel
from relaygr.bench.pipeline.run import MeasuredWindow, append_rows, null_settings
from relaygr.demo.stack import DemoStack
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.schemas.messages import Outcome
from relaygr.schemas.messages import Path as RankingPath
from relaygr.settings import Settings
from relaygr.traffic.records import ImpressionRecord, read_records
from relaygr.worker.calibration import QUICK_BUDGET_S, calibrate, save_calibration
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.engine import load_engine

IN_TIME_SHARE = 0.99
LATEST_SEND = 0.1
"""A row is valid if the generator's P99 delay is at most this part of the budget."""
HISTORY = 1_024
CANDIDATES = 128
SUFFIX = 16
TABLE_WIDTH = 130


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """What is measured with one model."""

    model: OverloadModel
    budget_ms: int
    loads: tuple[float, ...]
    """Multiples of capacity."""
    lowest_per_s: float
    highest_per_s: float
    """The bounds of the capacity that is looked for."""
    probe_s: float
    probes: int
    users: int


PLANS = {
    OverloadModel.SMALL: OverloadPlan(OverloadModel.SMALL, 500, (1, 2, 3, 5, 10), 2.0, 40.0, 10.0, 6, 150),
    OverloadModel.NULL: OverloadPlan(OverloadModel.NULL, 200, (1, 2, 3), 50.0, 2_000.0, 6.0, 7, 500),
}


@dataclass(frozen=True, slots=True)
class OverloadRow:
    """The figures of one load. Shares are 0 to 1; rates are requests a second."""

    load: float
    offered_per_s: float
    in_time_per_s: float
    whole_in_time_per_s: float
    """Without those that were cut to the newest part of their history."""
    told_in_time_share: float
    """Of the requests that were not ranked in time; 1 if there were none."""
    wasted_device_share: float
    refused: int
    expired: int
    late: int
    unanswered: int
    latency_p50_ms: float
    latency_p99_ms: float
    generator_lag_p99_ms: float
    foreign_cpu: float
    valid: bool

    @property
    def in_time_share(self) -> float:
        return self.in_time_per_s / self.offered_per_s


def row_of(
    records: Iterable[ImpressionRecord], load: float, plan: OverloadPlan, seconds: float, device_s: float,
    foreign_cpu: float = 0.0,
) -> OverloadRow:  # fmt: skip
    """The figures of the records of one run, whose worker used `device_s` seconds of its device."""
    ended = list(records)
    in_time = [record for record in ended if record.status == Outcome.RANKED and not record.late]
    late = [record for record in ended if record.status == Outcome.RANKED and record.late]
    others = [record for record in ended if record.status in (Outcome.FAILED, Outcome.EXPIRED)]
    told = sum(not record.late for record in others)
    not_ranked = len(ended) - len(in_time)
    wasted_us = sum(record.timings.pre_infer_us + record.timings.rank_us for record in late if record.timings)
    latencies = np.array([record.latency_us for record in in_time if record.latency_us is not None]) / 1000
    lag_ms = _percentile(np.array([record.send_lag_us for record in ended]) / 1000, 99)
    return OverloadRow(
        load=load,
        offered_per_s=len(ended) / seconds,
        in_time_per_s=len(in_time) / seconds,
        whole_in_time_per_s=sum(record.path != RankingPath.TRUNCATED for record in in_time) / seconds,
        told_in_time_share=told / not_ranked if not_ranked else 1.0,
        wasted_device_share=wasted_us / 1e6 / device_s if device_s else 0.0,
        refused=sum(record.status == Outcome.FAILED for record in others),
        expired=sum(record.status == Outcome.EXPIRED for record in others),
        late=len(late),
        unanswered=not_ranked - len(late) - len(others),
        latency_p50_ms=_percentile(latencies, 50),
        latency_p99_ms=_percentile(latencies, 99),
        generator_lag_p99_ms=lag_ms,
        foreign_cpu=foreign_cpu,
        valid=bool(ended) and lag_ms <= LATEST_SEND * plan.budget_ms,
    )


def measure_overload(plan: OverloadPlan, seconds: float, broker: str, out: Path, json_out: Path | None) -> None:
    """Finds the capacity, offers its multiples, prints and writes the figures."""
    console = Console(highlight=False, soft_wrap=False)
    with tempfile.TemporaryDirectory(prefix="relaygr-bench-") as name, local_broker(broker) as started:
        console.print(f"broker: {started.what}", soft_wrap=True)
        rows = measure(console, started, Path(name), plan, seconds)
        described = {
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "broker": started.what.split(" at ")[0],
            "model": plan.model.value,
            "seconds": seconds,
        }
    Console(highlight=False, width=max(console.width, TABLE_WIDTH)).print(_table(plan, rows))
    append_rows(out, [described | asdict(row) for row in rows])
    plot = out.with_name(f"{plan.model}.png")
    _plot(plot, plan, rows)
    if json_out is not None:
        json_out.write_text(json.dumps([described | asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    console.print(f"appended to {out}; plot: {plot}")


def measure(
    console: Console, broker: LocalBroker, folder: Path, plan: OverloadPlan, seconds: float
) -> list[OverloadRow]:
    """Finds the capacity, and offers each load for `seconds`, with one worker."""
    settings = _settings(console, broker, folder, plan)
    with DemoStack(console, folder, broker, settings, relay=True, workers=1, observed=False) as stack:
        runs = _Runs(console, stack, folder, plan)
        runs.play("warm-up", 0.0, plan.lowest_per_s * 2, plan.probe_s)
        lowest, highest = plan.lowest_per_s, plan.highest_per_s
        for probe in range(plan.probes):
            rate = (lowest * highest) ** 0.5
            row = runs.play(f"capacity, probe {probe + 1} of {plan.probes}: {rate:.1f}/s", 0.0, rate, plan.probe_s)
            # Of fewer than 100 requests, one may be late.
            if row.valid and round((1 - row.in_time_share) * row.offered_per_s * plan.probe_s) <= max(
                1, (1 - IN_TIME_SHARE) * row.offered_per_s * plan.probe_s
            ):
                lowest = rate
            else:
                highest = rate
        console.print(f"capacity: {lowest:.1f} requests a second")
        return [runs.play(f"{load:g} times capacity", load, load * lowest, seconds) for load in plan.loads]


class _Runs:
    """Plays one run after the other against the same worker, each with another schedule."""

    def __init__(self, console: Console, stack: DemoStack, folder: Path, plan: OverloadPlan) -> None:
        self._console, self._stack, self._folder, self._plan = console, stack, folder, plan
        self._count = 0

    def play(self, title: str, load: float, rate_per_s: float, seconds: float) -> OverloadRow:
        """One run at one rate."""
        self._count += 1
        records = self._folder / f"run-{self._count}.jsonl"
        overrides = [
            "gateway.relay=false",
            f"gateway.rate_per_s={rate_per_s}",
            f"gateway.duration_s={seconds}",
            f"gateway.seed={self._count}",
        ]
        before_s = self._device_s()
        window = MeasuredWindow(records, self._stack.roles)
        with self._console.status(title):
            self._stack.play_unobserved(records, window.sample, overrides)
        foreign_cpu = window.foreign_cpu_per_second()
        device_s = self._device_s() - before_s
        return row_of(read_records(records), load, self._plan, seconds, device_s, foreign_cpu)

    def _device_s(self) -> float:
        (worker,) = self._stack.worker_readings()
        return worker.total("relaygr_worker_device_seconds_total")


def _settings(console: Console, broker: LocalBroker, folder: Path, plan: OverloadPlan) -> Settings:
    settings = null_settings(broker, folder, 1.0, 1.0)
    gateway = settings.gateway.model_copy(
        update={"budget_ms": plan.budget_ms, "users": plan.users, "settle_s": 0.5, "lead_median_ms": 0.0}
    )
    if plan.model is OverloadModel.NULL:
        return settings.model_copy(update={"gateway": gateway})
    model = folder / "small"
    config = ModelConfig(
        embedding_dim=256,
        num_heads=4,
        attention_dim=64,
        hidden_dim=64,
        num_layers=4,
        normalizer=float(HISTORY),
        vocabulary_size=10_000,
        num_positions=HISTORY + SUFFIX + 1,
        max_prefix_behaviours=HISTORY,
        max_suffix_behaviours=SUFFIX,
        max_candidates=CANDIDATES,
    )
    save_checkpoint(model, config, random_checkpoint(config, seed=0).tensors)
    engine = load_engine(model, "cpu", threads=1)
    bind_own_arena(engine)
    with console.status("calibrating"):
        save_calibration(calibrate(engine, QUICK_BUDGET_S), folder / "small.json")
    # HBM holds the prefixes of a part of the users, so some need full inference at any load.
    prefixes = plan.users * 2 // 5
    hbm_bytes = prefixes * engine.geometry.pages_for(engine.layout.tokens(HISTORY)) * engine.geometry.page_bytes
    worker = settings.worker.model_copy(
        update={
            "model": model,
            "calibration": folder / "small.json",
            "hbm_bytes": type(settings.worker.hbm_bytes)(hbm_bytes),
        }
    )
    gateway = gateway.model_copy(
        update={"history_median": HISTORY, "history_max": HISTORY * 5 // 4, "suffix": SUFFIX, "zipf_exponent": 0.6}
    )
    return settings.model_copy(update={"worker": worker, "gateway": gateway})


def _percentile(values: np.ndarray, share: float) -> float:
    return float(np.percentile(values, share)) if values.size else float("nan")


def _table(plan: OverloadPlan, rows: Sequence[OverloadRow]) -> Table:
    table = Table(title=f"Above capacity: model {plan.model}, deadline {plan.budget_ms} ms; requests a second")
    for name in (
        "load", "offered", "in time", "whole", "told in time", "device wasted", "refused", "expired", "late",
        "unanswered", "P50", "P99", "generator lag P99", "foreign CPU", "",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.load:g}",
            f"{row.offered_per_s:.1f}",
            f"{row.in_time_per_s:.1f}",
            f"{row.whole_in_time_per_s:.1f}",
            f"{row.told_in_time_share:.1%}",
            f"{row.wasted_device_share:.1%}",
            *(str(count) for count in (row.refused, row.expired, row.late, row.unanswered)),
            f"{row.latency_p50_ms:.0f} ms",
            f"{row.latency_p99_ms:.0f} ms",
            f"{row.generator_lag_p99_ms:.1f} ms",
            f"{row.foreign_cpu:.2f}",
            "" if row.valid else "not valid: generator late",
        )
    return table


def _plot(path: Path, plan: OverloadPlan, rows: Sequence[OverloadRow]) -> None:
    """Goodput and refusals against the offered load, and the wasted share of the device time below."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    offered = [row.offered_per_s for row in rows]
    series: list[tuple[str, list[Any]]] = [
        ("ranked in time", [row.in_time_per_s for row in rows]),
        ("not ranked in time", [row.offered_per_s - row.in_time_per_s for row in rows]),
        ("told so in time", [(row.offered_per_s - row.in_time_per_s) * row.told_in_time_share for row in rows]),
    ]
    for (label, values), style in zip(series, ("o-", "s-", "x--"), strict=True):
        upper.plot(offered, values, style, label=label)
    upper.set_ylabel("requests a second")
    upper.set_ylim(bottom=0)
    upper.legend()
    upper.set_title(f"A worker above its capacity (model {plan.model}, deadline {plan.budget_ms} ms)")
    lower.plot(offered, [100 * row.wasted_device_share for row in rows], "o-")
    lower.set_ylabel("device wasted, %")
    lower.set_xlabel("offered requests a second")
    lower.set_ylim(0, max(2.0, *(110 * row.wasted_device_share for row in rows)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
