"""What each rule of trigger and executor is worth: simulations in virtual time with all rules, and without one.

Both have the same impressions and the same noise of the device, and the differences are taken pair by pair. Only the
product's own code decides; device, hops and the time of messages are a model (`relaygr.simulate`). Intervals are of
95 %, so about one figure in twenty lies outside by chance. Without the limit of the wait there is no reservation
either, and displacement never pauses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from pydantic import ByteSize
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.special import stdtrit

from relaygr.admission import buckets, corrector
from relaygr.admission.corrector import Corrector
from relaygr.admission.latency import LatencyModel, Stage
from relaygr.admission.risk import RiskFeedback
from relaygr.bench.rows import append_rows, machine, now
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.settings import Settings
from relaygr.simulate.case import Case, System, case_of, shape_of_tokens
from relaygr.simulate.figures import RANKED
from relaygr.simulate.relay import RelaySimulation
from relaygr.simulate.times import MeasuredTimes
from relaygr.worker.executor import (
    backlog,
    batches,
    capacity,
    chunks,
    impressions,
    look_up,
    measured,
    order,
    prefixes,
    serving,
)
from relaygr.worker.executor.job_admission import JobAdmission
from relaygr.worker.executor.reloads import Reloads
from relaygr.worker.executor.work import JobWork
from relaygr.worker.settings import WorkerSettings

_NOISE: Final = tuple(float(each) for each in np.exp(0.25 * np.linspace(-2.3, 2.6, 101)))
"""Device times against their prediction: as on a machine that is shared."""

_NONE: Final = ""
"""No rule is left out."""


def _admit(_self: JobAdmission, work: JobWork, *_: object) -> None:
    """In the place of `JobAdmission.refuse`."""
    work.is_charged = True


Patches = Sequence[tuple[object, str, Any]]
RULES: Final[dict[str, Patches]] = {
    "margin after missed deadlines": [(measured, "_MISS_STEP", 0.0)],
    "measured slowdown": [(measured.Measured, "observe_slowdown", lambda _self, _now_us: None)],
    "limit of the wait": [(measured, "_REFUSED_STEP", 0.0)],
    "reservation for ready requests": [(backlog, "_MOST_RESERVED", 0.0)],
    "long work is displaced": [(backlog, "_DISPLACES_FROM", 2.0)],
    "short work first": [(order, "_overtakes", lambda _short, _longer, _spare_us: False)],
    "wait for a copy that ends soon": [(look_up, "WAITED_PART", 0.0)],
    "no small part of a history behind others": [(serving, "LEAST_KEPT_BEHIND_OTHERS", 0.0)],
    "chunks by the next arrival": [
        (
            capacity.Capacity,
            "next_chunking",
            lambda self, _work, _now_us: self.chunking.within(self._settings.chunk_ms * 1000),
        )
    ],
    "feedback of the risk": [(RiskFeedback, "_adjust", lambda _self, _bucket, _now_us: None)],
    "a short tail stays in the suffix": [(prefixes.Prefixes, "tail_stays_in_suffix", lambda *_: False)],
    "guaranteed share of pre-infer": [(order.ShareAccount, "preinfer_is_owed", lambda _self: False)],
    "two bursts of jobs": [(buckets, "LOAD_BURSTS", 1)],
    "the worker admits jobs again": [(JobAdmission, "refuse", _admit)],
    "a batch has to pay": [(batches.BatchPlan, "_pays", lambda *_: True)],
    "chunks beside ranking": [(WorkerSettings, "mixes_chunks", lambda _self, _is_cpu: False)],
    "rest restores the limit of the wait": [(measured, "_WAIT_LIMIT_PER_IDLE_S", 0.0)],
    "a displaced request keeps a part": [(serving, "KEPT_PART", 0.0)],
    "early arrivals are learnt": [(impressions, "_EARLY_STEP", 0.0)],
    "longer chunks while many wait": [(chunks, "MOST_COUNTED", 1)],
    "least length of a chunk": [(chunks, "LEAST_CHUNK_CUTS", 0)],
    "chunks by the rate of other requests": [(chunks, "DELAYED_SHARE", math.inf)],
    "a reload waits for room": [(Reloads, "wait_for_room", lambda *_: None)],
    "correction by measured times": [(Corrector, "observe", lambda *_, **__: None)],
    "correction by length": [(corrector, "MOST_LENGTH_RATIO", 1.0)],
}
"""How trigger and executor are made to do without each rule."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A device and the requests that suit it."""

    latency: LatencyCoefficients
    is_cpu: bool
    token_bytes: int
    history: int
    candidates: int
    suffix: int
    budget_ms: int
    per_s: float
    """Requests a second at a load of 1: about what it serves if most are of new users."""
    seconds: float


CPU: Final = Machine(
    LatencyCoefficients(1000, 15, 0.008, 500, 18, 0.0045, 2000, 20, 0.015, 200, 1.5e-4, c3=0.3),
    True, 4096, 2048, 128, 16, 326, 38.0, 16.0,
)  # fmt: skip
GPU: Final = Machine(
    LatencyCoefficients(500, 1, 0.0002, 300, 1, 0.0002, 400, 0.5, 0.0004, 100, 2e-5, c3=0.02),
    False, 8192, 4096, 512, 64, 30, 500.0, 2.5,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """A load of one worker."""

    name: str
    machine: Machine
    load: float
    new_users: bool
    """Whether most requests are of users without a cached prefix."""
    slower: float = 1.0
    """The device takes this many times its calibrated time."""


LOADS: Final = (
    Load("CPU, new users, below capacity", CPU, 0.8, True),
    Load("CPU, new users, at capacity", CPU, 1.2, True),
    Load("CPU, returning users, above capacity", CPU, 2.4, False),
    Load("CPU, new users, twice capacity", CPU, 2.4, True),
    Load("CPU slower than calibrated, new users, at capacity", CPU, 0.8, True, slower=1.5),
    Load("GPU, new users, at capacity", GPU, 0.3, True),
    Load("GPU, returning users, above capacity", GPU, 0.8, False),
)


@dataclass(frozen=True, slots=True)
class RuleRow:
    """One load without one rule. Differences are without the rule less with it: mean of the pairs, and its interval."""

    load: str
    rule: str
    seeds: int
    in_time: float
    """Percent of the requests that were ranked whole and in time, with all rules."""
    in_time_change: float
    in_time_interval: float
    p50_ms: float
    """Latency of the ranked requests, with all rules."""
    p50_change_ms: float
    p50_interval_ms: float
    p99_ms: float
    p99_change_ms: float
    p99_interval_ms: float


def measure_rules(seeds: int, out: Path, json_file: Path | None) -> None:
    """Simulates every load with all rules and without each, and appends the rows to the CSV."""
    console = Console(highlight=False)
    found: dict[tuple[str, str], list[NDArray[np.float64]]] = {}
    tasks = [(load, rule, seed) for seed in range(1, seeds + 1) for load in LOADS for rule in (_NONE, *RULES)]
    with ProcessPoolExecutor() as processes, Progress(console=console) as progress:
        bar = progress.add_task("simulating", total=len(tasks))
        for (load, rule, _), figures in zip(tasks, processes.map(_simulate, *zip(*tasks, strict=True)), strict=True):
            found.setdefault((load.name, rule), []).append(figures)
            progress.advance(bar)
    rows = [
        row_of(load.name, rule, found[load.name, _NONE], found[load.name, rule]) for load in LOADS for rule in RULES
    ]
    described = {"measured_at": now(), "machine": machine()}
    append_rows(out, [{**described, **asdict(row)} for row in rows])
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    console.print(_table(rows))
    useless = [rule for rule in RULES if not any(row.rule == rule and _is_worth(row) for row in rows)]
    console.print(
        f"These rules change nothing beyond the interval: {', '.join(useless)}."
        if useless
        else "Without any one of these rules fewer requests are in time at some load, or they take longer."
    )


def row_of(
    load: str, rule: str, whole: Sequence[NDArray[np.float64]], without: Sequence[NDArray[np.float64]]
) -> RuleRow:
    """The row of these pairs; each is percent in time, P50 and P99 in ms."""
    differences = np.array(without) - np.array(whole)
    mean = np.array(whole).mean(axis=0)
    change = differences.mean(axis=0)
    interval = stdtrit(len(whole) - 1, 0.975) * differences.std(axis=0, ddof=1) / np.sqrt(len(whole))
    figures = [float(value) for each in zip(mean, change, interval, strict=True) for value in each]
    return RuleRow(load, rule, len(whole), *figures)


def _is_worth(row: RuleRow) -> bool:
    return (
        row.in_time_change < -row.in_time_interval
        or row.p50_change_ms > row.p50_interval_ms
        or row.p99_change_ms > row.p99_interval_ms
    )


def _simulate(load: Load, rule: str, seed: int) -> NDArray[np.float64]:
    """Percent in time, P50 and P99 in ms, without the rule. Runs in a process of its own."""
    with ExitStack() as changes:
        for change in RULES.get(rule, ()):
            changes.enter_context(patch.object(*change))
        requests = RelaySimulation(_case(load, seed), range(8)).run().requests
    latencies_ms = requests.latencies_us[np.isin(requests.endings, RANKED)] / 1000
    in_time = requests.in_time(load.machine.budget_ms * 1000).mean()
    return np.array([100 * in_time, *np.quantile(latencies_ms, (0.5, 0.99), method="inverted_cdf")])


def _case(load: Load, seed: int) -> Case:
    host, settings = load.machine, Settings()
    users = (600 if load.new_users else 60) * (1 if host.is_cpu else 10)
    traffic = settings.traffic.model_copy(
        update={
            "seed": seed, "duration_s": host.seconds, "rate_per_s": host.per_s * load.load, "users": users,
            "zipf_exponent": 0.8, "history_median": int(0.7 * host.history), "history_sigma": 0.4,
            "history_max": host.history, "growth": 8, "lead_median_ms": 0.6 * host.budget_ms, "lead_sigma": 0.3,
            "candidates": host.candidates, "suffix": host.suffix, "budget_ms": host.budget_ms, "settle_s": 0.0,
        }
    )  # fmt: skip
    prefix_bytes = host.token_bytes * host.history
    memory = {
        "hbm_bytes": ByteSize(30 * prefix_bytes),
        "dram_bytes": ByteSize((100 if host.is_cpu else 1000) * prefix_bytes),
    }
    worker = settings.worker.model_copy(update={**memory, "divert": False})
    settings = settings.model_copy(update={"traffic": traffic, "worker": worker, "partitions": 8})
    times = MeasuredTimes(hit_noise=_NOISE, pre_noise=_NOISE)
    shape, latency = shape_of_tokens(host.token_bytes, settings), LatencyModel(host.latency)
    case = case_of(settings, shape, latency, times, on_cpu=host.is_cpu, system=System.RELAY)
    device = latency.scaled_by([load.slower] * len(Stage), [0.0] * len(Stage))
    return replace(case, model=replace(case.model, device=device))


def _table(rows: Sequence[RuleRow]) -> Table:
    table = Table(title="Without each rule")
    for name in ("load", "rule", "in time %", "change", "P50 ms", "change", "P99 ms", "change"):
        table.add_column(name, justify="left" if name in ("load", "rule") else "right")
    for row in rows:
        table.add_row(
            row.load, row.rule,
            f"{row.in_time:.1f}", f"{row.in_time_change:+.1f} ± {row.in_time_interval:.1f}",
            f"{row.p50_ms:.1f}", f"{row.p50_change_ms:+.1f} ± {row.p50_interval_ms:.1f}",
            f"{row.p99_ms:.0f}", f"{row.p99_change_ms:+.0f} ± {row.p99_interval_ms:.0f}",
        )  # fmt: skip
    return table
