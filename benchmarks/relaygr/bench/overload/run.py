"""Capacity, the rows above it, and the output of their figures. `__main__` describes the figures."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from pydantic import ByteSize
from rich.console import Console
from rich.table import Table

from relaygr.bench.null_model import null_settings
from relaygr.bench.overload.__main__ import OverloadModel
from relaygr.bench.rows import append_rows, machine, now, refuse_other_columns
from relaygr.bench.window import MeasuredWindow
from relaygr.demo.stack import DemoStack
from relaygr.demo.summary import percentile
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.runtime.errors import RelayError
from relaygr.schemas.ended import Ended
from relaygr.settings import Settings
from relaygr.traffic.population import FIRST_SHARE
from relaygr.traffic.records import ImpressionRecord, is_whole, read_records
from relaygr.worker.calibration import QUICK_BUDGET_S, calibrate, save_calibration
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.engine import load_engine

IN_TIME_SHARE = 0.99
LATEST_SEND = 0.1
"""A row is valid if the generator's P99 delay is at most this part of the budget."""
CALM_S = 5.0
CALM_LOAD = 0.7
"""After each row's burst: this load as a multiple of capacity."""
SETTLE_S = 2.0
SETTLE_BYTES_PER_S = 40e6
"""Histories that a worker surely reads and stores in a second."""
BYTES_PER_BEHAVIOUR = 18
ITEMS = 10_000
CACHED_NEW_USERS = 48
"""Prefixes of new users that HBM holds beside those of the returning ones, which therefore stay."""
HISTORY_BYTES = 4 << 30
"""Enough for the users of all runs: a full store would refuse the histories of those who come later."""
TABLE_WIDTH = 190
DESCRIBED = ("measured_at", "machine", "broker", "model", "seconds")
"""The first columns of the CSV."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What all requests of a benchmark have in common."""

    budget_ms: int
    history: int
    suffix: int
    candidates: int
    items: int
    returning_users: int
    new_share: float
    """The share of the requests that is of users who come once."""


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """What is measured with one model."""

    model: OverloadModel
    requests: Requests
    loads: tuple[float, ...]
    """Multiples of capacity."""
    bounds: tuple[float, float]
    """The bounds of the capacity that is looked for: requests a second; for the small model, parts of the rate at which
    the calibrated times fill the device."""
    probe_s: float
    probes: int


PLANS = {
    OverloadModel.SMALL: OverloadPlan(
        OverloadModel.SMALL,
        Requests(
            budget_ms=1_000, history=2_048, suffix=16, candidates=128, items=ITEMS, returning_users=16, new_share=1 / 2
        ),
        loads=(1, 2, 3, 5, 10),
        bounds=(0.4, 1.2),
        probe_s=20.0,
        probes=5,
    ),
    OverloadModel.NULL: OverloadPlan(
        OverloadModel.NULL,
        Requests(budget_ms=200, history=512, suffix=16, candidates=128, items=ITEMS, returning_users=500, new_share=0),
        loads=(1, 2, 3),
        bounds=(200.0, 3_200.0),
        probe_s=8.0,
        probes=7,
    ),
}


@dataclass(frozen=True, slots=True)
class OverloadRow:
    """The figures of one load. Shares are 0 to 1; rates are requests a second; CPU is in cores, in the burst."""

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
    to_worker_p99_ms: float
    in_worker_p99_ms: float
    to_gateway_p99_ms: float
    """The three parts of the time of requests that were ranked."""
    calm_in_time_share: float
    """Of the requests at a calm load, which a gateway offers that is started after the burst; 1 if there were none."""
    generator_lag_p99_ms: float
    cpu_worker: float
    cpu_load: float
    cpu_broker: float
    foreign_cpu: float
    valid: bool

    @property
    def not_in_time(self) -> int:
        """Requests that were not ranked in time."""
        return self.refused + self.expired + self.late + self.unanswered


@dataclass(frozen=True, slots=True)
class Used:
    """What a run used of the machine: device seconds of the worker, and, in its burst, cores by role and by others."""

    device_s: float = 0.0
    cores: Mapping[str, float] = field(default_factory=dict)
    foreign_cpu: float = 0.0


def row_of(
    burst: Sequence[ImpressionRecord],
    calm: Sequence[ImpressionRecord],
    load: float,
    budget_ms: float,
    seconds: float,
    used: Used,
) -> OverloadRow:
    """The figures of a burst of `seconds`, and of the calm load after it."""
    ranked = [each for each in burst if each.status == Ended.RANKED]
    punctual = [each for each in ranked if not each.late]
    others = [each for each in burst if each.status in (Ended.FAILED, Ended.EXPIRED)]
    not_ranked = len(burst) - len(punctual)
    late = [each for each in (*burst, *calm) if each.status == Ended.RANKED and each.late]
    calm_in_time = sum(each.status == Ended.RANKED and not each.late for each in calm)
    lag_ms = _percentile_ms([each.send_lag_us for each in (*burst, *calm)], 99)
    parts = [_parts_us(each) for each in ranked]
    return OverloadRow(
        load=load,
        offered_per_s=len(burst) / seconds,
        in_time_per_s=len(punctual) / seconds,
        whole_in_time_per_s=sum(is_whole(each) and not each.history_stale for each in punctual) / seconds,
        told_in_time_share=sum(not each.late for each in others) / not_ranked if not_ranked else 1.0,
        wasted_device_share=sum(_device_us(each) for each in late) / 1e6 / used.device_s if used.device_s else 0.0,
        refused=sum(each.status == Ended.FAILED for each in others),
        expired=sum(each.status == Ended.EXPIRED for each in others),
        late=len(ranked) - len(punctual),
        unanswered=len(burst) - len(ranked) - len(others),
        latency_p50_ms=_percentile_ms([each.latency_us or 0 for each in punctual], 50),
        latency_p99_ms=_percentile_ms([each.latency_us or 0 for each in punctual], 99),
        to_worker_p99_ms=_percentile_ms([to_worker for to_worker, _, _ in parts], 99),
        in_worker_p99_ms=_percentile_ms([in_worker for _, in_worker, _ in parts], 99),
        to_gateway_p99_ms=_percentile_ms([to_gateway for _, _, to_gateway in parts], 99),
        calm_in_time_share=calm_in_time / len(calm) if calm else 1.0,
        generator_lag_p99_ms=lag_ms,
        cpu_worker=used.cores.get("worker", 0.0),
        cpu_load=used.cores.get("gateway", 0.0),
        cpu_broker=used.cores.get("broker", 0.0),
        foreign_cpu=used.foreign_cpu,
        valid=bool(burst) and lag_ms <= LATEST_SEND * budget_ms,
    )


def _parts_us(record: ImpressionRecord) -> tuple[int, int, int]:
    """The way to the worker, the time in it, and the way back."""
    to_worker_us = record.to_worker_us or 0
    in_worker_us = record.timings.total_us if record.timings is not None else 0
    return to_worker_us, in_worker_us, (record.latency_us or 0) - record.send_lag_us - to_worker_us - in_worker_us


def _device_us(record: ImpressionRecord) -> int:
    """Device time that the request itself took."""
    return 0 if record.timings is None else record.timings.pre_infer_us + record.timings.rank_us


def _percentile_ms(times_us: Sequence[int], share: float) -> float:
    return percentile(np.array(times_us, dtype=np.float64) / 1000, share)


def measure_overload(plan: OverloadPlan, seconds: float, broker: str, out: Path, json_out: Path | None) -> None:
    """Finds the capacity, offers its multiples, prints and writes the figures."""
    console = Console(highlight=False, soft_wrap=False)
    refuse_other_columns(out, [*DESCRIBED, *(field.name for field in fields(OverloadRow))])
    with tempfile.TemporaryDirectory(prefix="relaygr-bench-") as name, local_broker(broker) as started:
        console.print(f"broker: {started.what}", soft_wrap=True)
        rows = measure(console, started, Path(name), plan, seconds)
        values = (now(), machine(), started.what.split(" at ")[0], plan.model.value, seconds)
        described = dict(zip(DESCRIBED, values, strict=True))
    Console(highlight=False, width=max(console.width, TABLE_WIDTH)).print(_table(plan, rows))
    if json_out is not None:
        json_out.write_text(json.dumps([described | asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    append_rows(out, [described | asdict(row) for row in rows])
    plot = out.with_name(f"{plan.model}.png")
    _plot(plot, plan, rows)
    console.print(f"appended to {out}; plot: {plot}")


def measure(
    console: Console, broker: LocalBroker, folder: Path, plan: OverloadPlan, seconds: float
) -> list[OverloadRow]:
    """Finds the capacity, and offers each load for `seconds`, with one worker."""
    settings, (lowest, highest) = _settings(console, broker, folder, plan)
    with DemoStack(console, folder, broker, settings, relay=False, workers=1, observed=False, reuse=True) as stack:
        runs = _Runs(console, stack, folder, plan)
        runs.warm_up(lowest)
        capacity, bound, invalid = 0.0, highest, 0
        for probe in range(plan.probes):
            rate = (lowest * highest) ** 0.5
            row = runs.play(f"capacity, probe {probe + 1} of {plan.probes}: {rate:.1f}/s", 0.0, rate, plan.probe_s)
            invalid += not row.valid
            # Of fewer than 100 requests, one may be late.
            if row.valid and row.not_in_time <= max(1, (1 - IN_TIME_SHARE) * row.offered_per_s * plan.probe_s):
                lowest = capacity = rate
            else:
                highest = rate
        late = f"; the sender was late in {invalid} of {plan.probes} probes, which count as failed" if invalid else ""
        if not capacity:
            raise RelayError(f"no probe had {IN_TIME_SHARE:.0%} in time, down to {highest:.1f} a second{late}")
        more = " or more: no probe was above it" if highest == bound else ""
        console.print(f"capacity: {capacity:.1f} requests a second{more}{late}", soft_wrap=True)
        calm = CALM_LOAD * capacity
        return [runs.play(f"{each:g} times capacity", each, each * capacity, seconds, calm) for each in plan.loads]


class _Runs:
    """Plays one run after the other against the same worker, each by a gateway of its own."""

    def __init__(self, console: Console, stack: DemoStack, folder: Path, plan: OverloadPlan) -> None:
        self._console, self._stack, self._folder, self._plan = console, stack, folder, plan
        self._count = 0

    def warm_up(self, rate_per_s: float) -> None:
        """Plays a low load, so that nearly all returning users are cached."""
        with self._console.status("warm-up"):
            self._records(rate_per_s, self._plan.probe_s, lambda: None)

    def play(
        self, title: str, load: float, rate_per_s: float, seconds: float, calm_per_s: float | None = None
    ) -> OverloadRow:
        """One run at one rate, and then one at `calm_per_s`."""
        before_s = self._device_s()
        window = MeasuredWindow(self._folder / f"run-{self._count + 1}.jsonl", self._stack.roles, longest_s=seconds)
        with self._console.status(title):
            burst = self._records(rate_per_s, seconds, window.sample)
            calm = self._records(calm_per_s, CALM_S, lambda: None) if calm_per_s is not None else []
        used = Used(self._device_s() - before_s, window.cpu_per_second(), window.foreign_cpu_per_second())
        return row_of(burst, calm, load, self._plan.requests.budget_ms, seconds, used)

    def _records(self, rate_per_s: float, seconds: float, watch: Callable[[], None]) -> list[ImpressionRecord]:
        self._count += 1
        requests, path = self._plan.requests, self._folder / f"run-{self._count}.jsonl"
        users = requests.returning_users + requests.new_share * rate_per_s * seconds
        settle_s = SETTLE_S + users * requests.history * BYTES_PER_BEHAVIOUR / SETTLE_BYTES_PER_S
        own = {"rate_per_s": rate_per_s, "duration_s": seconds, "settle_s": round(settle_s, 1)}
        self._stack.play_unobserved(path, watch, [f"traffic.{name}={value}" for name, value in own.items()])
        return list(read_records(path))

    def _device_s(self) -> float:
        (worker,) = self._stack.worker_readings()
        return worker.total("relaygr_worker_device_seconds_total")


def _settings(
    console: Console, broker: LocalBroker, folder: Path, plan: OverloadPlan
) -> tuple[Settings, tuple[float, float]]:
    """The settings, and the bounds of the capacity in requests a second."""
    requests = plan.requests
    settings = null_settings(broker, folder, 1.0, 1.0)
    traffic = settings.traffic.model_copy(
        update={
            "users": requests.returning_users,
            "zipf_exponent": 0.0,
            "new_share": requests.new_share,
            "items": requests.items,
            "history_median": requests.history,
            "history_max": math.ceil(requests.history / FIRST_SHARE),
            "lead_median_ms": 0.0,
            "candidates": requests.candidates,
            "suffix": requests.suffix,
            "budget_ms": requests.budget_ms,
        }
    )
    settings = settings.model_copy(update={"traffic": traffic})
    if plan.model is OverloadModel.NULL:
        return settings, plan.bounds
    model = folder / "small"
    config = ModelConfig(
        embedding_dim=256,
        num_heads=4,
        attention_dim=64,
        hidden_dim=64,
        num_layers=2,
        normalizer=float(requests.history),
        vocabulary_size=requests.items,
        num_positions=requests.history + requests.suffix + 1,
        max_prefix_behaviours=requests.history,
        max_suffix_behaviours=requests.suffix,
        max_candidates=requests.candidates,
    )
    save_checkpoint(model, config, random_checkpoint(config, seed=0).tensors)
    engine = load_engine(model, "cpu", threads=1)
    bind_own_arena(engine)
    with console.status("calibrating"):
        calibration = calibrate(engine, QUICK_BUDGET_S)
        save_calibration(calibration, folder / "small.json")
    tokens = engine.layout.tokens(requests.history)
    scored = requests.suffix * engine.layout.tokens_per_behaviour + requests.candidates
    full_us, hit_us = calibration.model.full_us(tokens, scored), calibration.model.hit_us(tokens, scored)
    mean_us = requests.new_share * full_us + (1 - requests.new_share) * hit_us
    console.print(f"calibrated: full inference {full_us / 1000:.0f} ms, a hit {hit_us / 1000:.0f} ms")
    prefixes = requests.returning_users + CACHED_NEW_USERS
    hbm_bytes = prefixes * engine.geometry.pages_for(tokens) * engine.geometry.page_bytes
    worker = settings.worker.model_copy(
        update={
            "model": model,
            "calibration": folder / "small.json",
            "hbm_bytes": ByteSize(hbm_bytes),
            "history_max_bytes": ByteSize(HISTORY_BYTES),
        }
    )
    lowest, highest = (part * 1e6 / mean_us for part in plan.bounds)
    return settings.model_copy(update={"worker": worker}), (lowest, highest)


def _table(plan: OverloadPlan, rows: Sequence[OverloadRow]) -> Table:
    title = f"Above capacity: model {plan.model}, deadline {plan.requests.budget_ms} ms; requests a second"
    caption = "to worker, in worker, to gateway, send lag: P99; the last figures are CPU cores in the burst"
    table = Table(title=title, caption=caption)
    for name in (
        "load", "offered", "in time", "whole", "told in time", "wasted", "refused", "expired", "late", "lost",
        "P50", "P99", "to worker", "in worker", "to gateway", "calm in time", "send lag", "worker", "load", "broker",
        "others", "",
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
            f"{row.to_worker_p99_ms:.0f} ms",
            f"{row.in_worker_p99_ms:.0f} ms",
            f"{row.to_gateway_p99_ms:.0f} ms",
            f"{row.calm_in_time_share:.1%}",
            f"{row.generator_lag_p99_ms:.1f} ms",
            *(f"{cores:.2f}" for cores in (row.cpu_worker, row.cpu_load, row.cpu_broker, row.foreign_cpu)),
            "" if row.valid else "not valid: generator late",
        )
    return table


def _plot(path: Path, plan: OverloadPlan, rows: Sequence[OverloadRow]) -> None:
    """Goodput and refusals against the offered load, and the wasted share of the device time below."""
    figure = Figure(figsize=(7, 6), layout="constrained")
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
    upper.set_title(f"A worker above its capacity (model {plan.model}, deadline {plan.requests.budget_ms} ms)")
    lower.plot(offered, [100 * row.wasted_device_share for row in rows], "o-")
    lower.set_ylabel("device wasted, %")
    lower.set_xlabel("offered requests a second")
    lower.set_ylim(0, max(2.0, *(110 * row.wasted_device_share for row in rows)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
