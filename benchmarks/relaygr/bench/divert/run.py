"""The two fleets, the loads, and the figures of each. `__main__` describes them."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from relaygr.bench.divert.paced import LATENCY, set_pace
from relaygr.bench.generator import player
from relaygr.bench.generator.samples import Sample, read_samples
from relaygr.bench.generator.trace import Trace, write_trace
from relaygr.bench.pipeline.run import null_settings
from relaygr.bench.rows import append_rows, machine, now
from relaygr.bench.small_relay import own_prefix
from relaygr.demo.processes import CommandProcess, Processes, read_metrics, write_config
from relaygr.demo.summary import percentile
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Path as RankingPath
from relaygr.schemas.partitioner import partition_for
from relaygr.settings import Settings
from relaygr.worker.shared.lock import memory_folder

WORKERS: Final = 3
HISTORY, CANDIDATES, ITEMS = 512, 128, 10_000
BUDGET_MS: Final = 250
WARM_UP_BUDGET_MS: Final = 30_000
USERS: Final = 60
SLOW_FACTOR: Final = 4.0
LATEST_SEND: Final = 0.1
"""A row is valid if the generator's P99 delay is at most this part of the budget."""
START_TIMEOUT_S: Final = 180.0
STATUS_INTERVAL_MS: Final = 200
SETTLE_S: Final = 3.0
"""Pause between two runs: longer than a worker stays short of time, and longer than a status stays valid."""


class Load(StrEnum):
    """What overloads one worker."""

    HOT_USER = "hot user"
    HOT_PARTITION = "hot partition"
    SLOW_WORKER = "slow worker"


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests a second: of all users alike, and of the users that overload one worker."""

    even_per_s: float
    hot_per_s: float


RATES: Final = {
    Load.HOT_USER: Rates(40.0, 100.0),
    Load.HOT_PARTITION: Rates(0.0, 110.0),
    Load.SLOW_WORKER: Rates(100.0, 0.0),
}
"""A worker answers about 80 hits a second, in batches."""


@dataclass(frozen=True, slots=True)
class DivertRow:
    """The figures of one load on one fleet, over all its runs. Shares are 0 to 1."""

    load: str
    divert: bool
    requests: int
    late_share: float
    unranked_share: float
    truncated_share: float
    latency_p50_ms: float
    latency_p99_ms: float
    """Of the requests that were ranked."""
    diverted_share: float
    diverted_late: int
    """Diverted requests that the other worker answered after their deadline."""
    generator_lag_p99_ms: float
    valid: bool


def row_of(load: Load, divert: bool, samples: Sequence[Sample], diverted: float, diverted_late: float) -> DivertRow:
    """The figures of these requests."""
    budget_us, count = BUDGET_MS * 1000, max(1, len(samples))
    ranked = [each for each in samples if each.status == "ranked"]
    latencies_ms = np.array([each.latency_us or 0 for each in ranked], np.float64) / 1000
    lag_ms = percentile(np.array([each.lag_us for each in samples], np.float64) / 1000, 99)
    return DivertRow(
        load=load.value,
        divert=divert,
        requests=len(samples),
        late_share=sum(each.is_late(budget_us) for each in samples) / count,
        unranked_share=1 - len(ranked) / count,
        truncated_share=sum(each.path == RankingPath.TRUNCATED for each in ranked) / count,
        latency_p50_ms=percentile(latencies_ms, 50),
        latency_p99_ms=percentile(latencies_ms, 99),
        diverted_share=diverted / count,
        diverted_late=int(diverted_late),
        generator_lag_p99_ms=lag_ms,
        valid=bool(samples) and lag_ms <= LATEST_SEND * BUDGET_MS,
    )


def trace_of(load: Load, seconds: float, partitions: int, seed: int) -> Trace:
    """An open-loop schedule with exponential gaps."""
    random = np.random.default_rng(seed)
    users, rates = users_of(load, partitions), RATES[load]
    calls = [(at_us, str(random.choice(users))) for at_us in _times(random, rates.even_per_s, seconds)]
    hot = users[:1] if load is Load.HOT_USER else users
    calls += [(at_us, str(random.choice(hot))) for at_us in _times(random, rates.hot_per_s, seconds)]
    return _trace(sorted(calls))


def users_of(load: Load, partitions: int) -> list[str]:
    """The users of a load, each with a prefix of its own on one worker."""
    names = [f"{load.name.lower()}-{number}" for number in range(USERS * partitions)]
    if load is Load.HOT_PARTITION:
        names = [name for name in names if partition_for(name.encode(), partitions) == 0]
    return names[:USERS]


def _times(random: np.random.Generator, rate_per_s: float, seconds: float) -> list[int]:
    if not rate_per_s:
        return []
    at_s = np.cumsum(random.exponential(1 / rate_per_s, int(2 * rate_per_s * seconds) + 10))
    return [int(each * 1e6) for each in at_s[at_s < seconds]]


def _trace(calls: Sequence[tuple[int, str]]) -> Trace:
    count = len(calls)
    at_us = np.array([at_us for at_us, _ in calls], np.int64)
    return Trace(
        retrieval_us=at_us,
        ranking_us=at_us,
        user_id=[user for _, user in calls],
        history_length=np.full(count, HISTORY, np.int32),
        suffix=np.zeros(count, np.int32),
        candidates=np.full(count, CANDIDATES, np.int32),
        part=np.ones(count, np.int32),
    )


class Fleet:
    """Three paced workers on topics of their own, and the process that sends them requests. A context manager."""

    def __init__(self, folder: Path, broker: LocalBroker, settings: Settings, divert: bool) -> None:
        self._name = "divert-on" if divert else "divert-off"
        prefix = own_prefix(broker, self._name)
        worker = settings.worker.model_copy(update={"divert": divert, "status_interval_ms": STATUS_INTERVAL_MS})
        own = {"topic_prefix": prefix, "group_prefix": prefix, "worker": worker}
        self.settings = settings.model_copy(update=own)
        self._folder, self._broker = folder / self._name, broker
        self._cleanup = ExitStack()
        self._played = 0
        self.workers: list[CommandProcess] = []

    def __enter__(self) -> Fleet:
        self._folder.mkdir(parents=True)
        self._broker.create_topics(self.settings)
        if not self._broker.ours:
            self._cleanup.callback(self._broker.delete_topics, self.settings)
        config = self._folder / "settings.yaml"
        write_config(self.settings, config)
        try:
            shared = self._cleanup.enter_context(
                tempfile.TemporaryDirectory(prefix="relaygr-divert-", dir=memory_folder(), ignore_cleanup_errors=True)
            )
            processes = self._cleanup.enter_context(Processes(self._folder, config))
            for number in range(WORKERS):
                name = f"worker-{number:02d}"
                own = [
                    f"worker.worker_id={name}",
                    f"worker.history_path={self._folder / name}",
                    f"worker.shared_path={shared}",
                ]
                pace = ["relaygr.bench.divert.paced", str(self.pace_file(number))]
                self.workers.append(processes.start(name, ["worker"], "worker", own, module=pace))
            processes.await_ready(self.workers, START_TIMEOUT_S)
            self._player = player.Player(self._folder / "load", self.settings, player.Requests(ITEMS))
            self._cleanup.enter_context(self._player)
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def pace_file(self, number: int) -> Path:
        """The file with the factor of a worker's times."""
        return self._folder / f"pace-{number}"

    def warm_up(self, load: Load) -> None:
        """Ranks each user of a load once, with a deadline that leaves time for all."""
        users = users_of(load, self.settings.partitions)
        samples = self._play(_trace([(0, user) for user in users]), WARM_UP_BUDGET_MS)
        if any(sample.status != "ranked" for sample in samples):
            raise RelayError("the warm-up was not answered")

    def play(self, trace: Trace) -> list[Sample]:
        """Offers a load."""
        return self._play(trace, BUDGET_MS)

    def _play(self, trace: Trace, budget_ms: int) -> list[Sample]:
        self._played += 1
        name = f"run-{self._played}"
        path, samples = self._folder / f"{name}.parquet", self._folder / f"{name}.samples.parquet"
        write_trace(trace, path)
        self._player.play(player.Run(name, path, samples, budget_ms))
        return read_samples(samples)

    def counts(self) -> Mapping[str, float]:
        """Diverted requests so far, and those of them that were late."""
        readings = [read_metrics(worker.port) for worker in self.workers]
        return {
            "diverted": sum(each.total("relaygr_worker_diverted_total", outcome="delivered") for each in readings),
            "late": sum(each.total("relaygr_worker_diverted_received_total", outcome="late") for each in readings),
        }


def measure_divert(seconds: float, rounds: int, broker: str, out: Path, json_out: Path | None) -> None:
    """Measures every load on both fleets, prints and writes the figures."""
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="relaygr-bench-") as name, local_broker(broker) as started:
        console.print(f"broker: {started.what}", soft_wrap=True)
        rows = measure(console, started, Path(name), seconds, rounds)
        broker_name = started.what.split(" at ")[0]
    _report(console, rows, broker_name, seconds, rounds, out, json_out)


def simulate_divert(seconds: float, rounds: int, out: Path, json_out: Path | None) -> None:
    """Simulates every load on both fleets, prints and writes the figures."""
    from relaygr.bench.divert.simulated import simulate

    console = Console(highlight=False)
    with console.status("simulating"):
        rows = simulate(seconds, rounds)
    _report(console, rows, "none (simulated)", seconds, rounds, out, json_out)


def _report(
    console: Console,
    rows: Sequence[DivertRow],
    broker: str,
    seconds: float,
    rounds: int,
    out: Path,
    json_out: Path | None,
) -> None:
    described = {
        "measured_at": now(),
        "machine": machine(),
        "broker": broker,
        "seconds": seconds,
        "rounds": rounds,
        "budget_ms": BUDGET_MS,
    }
    Console(highlight=False, width=max(console.width, 130)).print(_table(rows))
    append_rows(out, [described | asdict(row) for row in rows])
    if json_out is not None:
        json_out.write_text(json.dumps([described | asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    console.print(f"appended to {out}")


def measure(console: Console, broker: LocalBroker, folder: Path, seconds: float, rounds: int) -> list[DivertRow]:
    """Two rows a load: without and with `worker.divert`."""
    settings = null_settings(broker, folder, 1.0, 1.0, LATENCY)
    with ExitStack() as stack:
        with console.status("starting two fleets of three workers"):
            fleets = {divert: stack.enter_context(Fleet(folder, broker, settings, divert)) for divert in (False, True)}
        return [row for load in Load for row in _measure_load(console, load, fleets, seconds, rounds)]


def _measure_load(
    console: Console, load: Load, fleets: Mapping[bool, Fleet], seconds: float, rounds: int
) -> list[DivertRow]:
    samples: dict[bool, list[Sample]] = {False: [], True: []}
    with console.status(f"{load.value}: warm-up"):
        for fleet in fleets.values():
            fleet.warm_up(load)
            if load is Load.SLOW_WORKER:
                set_pace(fleet.pace_file(0), SLOW_FACTOR)
    before = {divert: fleet.counts() for divert, fleet in fleets.items()}
    for turn in range(rounds):
        # Off, on, on, off: neither comes first more often.
        for divert in (False, True) if turn % 2 == 0 else (True, False):
            time.sleep(SETTLE_S)
            with console.status(f"{load.value}, {'with' if divert else 'without'} divert, {turn + 1} of {rounds}"):
                trace = trace_of(load, seconds, fleets[divert].settings.partitions, seed=turn)
                samples[divert] += fleets[divert].play(trace)
    rows = []
    for divert, fleet in fleets.items():
        after = fleet.counts()
        diverted, late = (after[name] - before[divert][name] for name in ("diverted", "late"))
        rows.append(row_of(load, divert, samples[divert], diverted, late))
        set_pace(fleet.pace_file(0), 1.0)
    return rows


def _table(rows: Sequence[DivertRow]) -> Table:
    table = Table(title=f"One worker of three has too much to do, deadline {BUDGET_MS} ms")
    for name in (
        "load", "divert", "requests", "late", "unranked", "truncated", "P50", "P99", "diverted", "", "lag", "",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.load,
            "on" if row.divert else "off",
            str(row.requests),
            f"{row.late_share:.1%}",
            f"{row.unranked_share:.1%}",
            f"{row.truncated_share:.1%}",
            f"{row.latency_p50_ms:.0f} ms",
            f"{row.latency_p99_ms:.0f} ms",
            f"{row.diverted_share:.1%}",
            f"{row.diverted_late} late",
            f"{row.generator_lag_p99_ms:.1f} ms",
            "" if row.valid else "not valid: generator late",
        )
    return table
