"""Kills the active worker several times and measures each kill. `__main__` describes the figures."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from relaygr.bench.rows import append_rows, machine, now
from relaygr.bench.small_relay import (
    CANDIDATES,
    NO_RESTART_LIMIT,
    history_of,
    own_prefix,
    small_config,
    small_settings,
)
from relaygr.bench.standby.pair import Killed, await_pair
from relaygr.bench.standby.traffic import Traffic, hit_ratio
from relaygr.client import LostRequest, RankStatus, RelayClient
from relaygr.demo.processes import CommandProcess, Processes, write_config
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.kafka.settings import KafkaSettings
from relaygr.settings import Settings
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.shared.lock import memory_folder

PARTITIONS = 12
START_TIMEOUT_S = 120.0
BUDGET_MS = 10_000.0
STEPS = {
    "takes over": "lock_ms",
    "prefixes restored": "restored_ms",
    "assigned": "assigned_ms",
}
"""Events in the worker's log -> column for the time from the kill to the event."""


@dataclass(frozen=True, slots=True)
class KillFigures:
    """The figures of one kill. Times in ms."""

    measured_at: str
    machine: str
    broker: str
    standby_memory: str
    users: int
    history: int
    rate_per_s: float
    hbm_mib: int
    dram_mib: int
    p50_before_ms: float
    p99_before_ms: float
    longest_ms: float
    """Longest delay of requests that were in flight at the kill, or sent before the first result after it."""
    lock_ms: float
    restored_ms: float
    assigned_ms: float
    first_answer_ms: float
    """Time from the kill to the first result of the standby."""
    hits_before: float
    hits_after: float
    requests: int
    not_ranked: int
    lost: int
    standby_again_s: float


@dataclass(frozen=True, slots=True)
class RestartFigures:
    """The figures of a kill after which the supervisor is started again at once. Times in ms from the kill."""

    measured_at: str
    machine: str
    broker: str
    killed: str
    users: int
    history: int
    rate_per_s: float
    hbm_mib: int
    dram_mib: int
    load_before: float
    """The machine's load average of one minute."""
    p50_before_ms: float
    ready_ms: float
    """Until the supervisor's `/readyz` says ready."""
    first_hit_ms: float
    """Until the first request that was sent after the kill got its scores on a prefix of the cache."""
    longest_ms: float
    """Longest delay of a request."""
    hits_after: float
    not_ranked: int
    requests: int
    lost: int


def measure_kills(
    killed: Killed,
    kills: int,
    rate: float,
    users: int,
    history: int,
    hbm_mib: int,
    dram_mib: int,
    memory: str,
    broker: str,
    out: Path,
) -> None:
    """Measures the kills on one broker, prints the figures and appends them to `out`."""
    console = Console(highlight=False)
    figures: list[KillFigures | RestartFigures] = []
    with (
        tempfile.TemporaryDirectory(prefix="relaygr-standby-", dir=memory_folder()) as name,
        local_broker(broker) as started,
    ):
        console.print(f"broker: {started.what}", soft_wrap=True)
        settings = _settings(started, Path(name), history, hbm_mib, dram_mib, memory)
        started.create_topics(settings)
        try:
            run = _StandbyRun(started, settings, Path(name), users, history, rate)
            with run.processes:
                run.start()
                for number in range(kills):
                    figures.append(run.kill() if killed is Killed.ACTIVE else run.restart(killed))
                    console.print(f"kill {number + 1}: the longest request took {figures[-1].longest_ms:.0f} ms")
        finally:
            if not started.ours:
                started.delete_topics(settings)
    _print(console, figures)
    append_rows(out, [_rounded(one) for one in figures])
    console.print(f"appended to {out}")


class _StandbyRun:
    """The processes under test. `kill` measures one kill."""

    def __init__(
        self, broker: LocalBroker, settings: Settings, folder: Path, users: int, history: int, rate: float
    ) -> None:
        self._broker = broker
        self._settings = settings
        self._users = [f"user-{number:05d}" for number in range(users)]
        self._history = history
        self._rate = rate
        config = folder / "settings.yaml"
        write_config(settings, config)
        self.processes = Processes(folder, config)
        self._supervisor: CommandProcess | None = None

    def start(self) -> None:
        """Waits for an active worker and a standby, with every user's prefix in DRAM."""
        self._supervisor = self.processes.start("worker-00", ["worker", "--standby"], "worker")
        self.processes.await_ready([self._supervisor], START_TIMEOUT_S)
        await_pair(self._supervisor.port, START_TIMEOUT_S)
        with self._traffic() as traffic:
            time.sleep(len(self._users) / self._rate * 2 + 1)
            traffic.stop()

    def kill(self) -> KillFigures:
        """Kills the active process under load. Returns the figures."""
        supervisor = self._supervisor
        assert supervisor is not None
        pair = await_pair(supervisor.port, START_TIMEOUT_S)
        with self._traffic() as traffic:
            time.sleep(max(3.0, len(self._users) / self._rate))
            killed_s, killed_at_s = time.monotonic(), time.time()
            os.kill(pair.active, signal.SIGKILL)
            time.sleep(max(3.0, len(self._users) / self._rate))
            asked = traffic.stop()
            lost = len(traffic.lost)
        await_pair(supervisor.port, START_TIMEOUT_S, but_not=(pair.active,))
        again_s = time.monotonic() - killed_s
        worker, steps = self._settings.worker, _steps(supervisor.log, killed_at_s)
        before = [each for each in asked if each.answered_s <= killed_s]
        after = [each for each in asked if each.answered_s > killed_s]
        # Results that the killed process had sent still arrive; the standby's results follow its assignment.
        first_s = min(
            (each.answered_s for each in after if each.answered_s - killed_s > steps["assigned_ms"] / 1e3),
            default=float("nan"),
        )
        touched = [each.took_ms for each in after if each.sent_s <= first_s]
        took_before = np.array([each.took_ms for each in before])
        return KillFigures(
            measured_at=now(),
            machine=machine(),
            broker=self._broker.what.split(" at ")[0],
            standby_memory=worker.standby_memory.value,
            users=len(self._users),
            history=self._history,
            rate_per_s=self._rate,
            hbm_mib=int(worker.hbm_bytes) >> 20,
            dram_mib=int(worker.dram_bytes) >> 20,
            p50_before_ms=float(np.percentile(took_before, 50)),
            p99_before_ms=float(np.percentile(took_before, 99)),
            longest_ms=max(touched, default=float("nan")),
            first_answer_ms=(first_s - killed_s) * 1e3,
            hits_before=hit_ratio(before),
            hits_after=hit_ratio([each for each in after if each.sent_s > killed_s]),
            requests=len(asked),
            not_ranked=sum(each.outcome.status is not RankStatus.RANKED for each in asked),
            lost=lost,
            standby_again_s=again_s,
            **steps,
        )

    def restart(self, killed: Killed) -> RestartFigures:
        """Kills the supervisor, with or without its pair, and starts it again at once. Returns the figures."""
        supervisor = self._supervisor
        assert supervisor is not None
        pair = await_pair(supervisor.port, START_TIMEOUT_S)
        load_before, worker = os.getloadavg()[0], self._settings.worker
        with self._traffic() as traffic:
            time.sleep(max(3.0, len(self._users) / self._rate))
            killed_s = time.monotonic()
            pids = (pair.active, pair.standby) if killed is Killed.PAIR else ()
            for pid in (supervisor.process.pid, *pids):
                os.kill(pid, signal.SIGKILL)
            supervisor.process.wait()
            self.processes.stop([supervisor])
            self._supervisor = self.processes.start("worker-00", ["worker", "--standby"], "worker")
            self.processes.await_ready([self._supervisor], START_TIMEOUT_S)
            ready_s = time.monotonic()
            time.sleep(max(3.0, len(self._users) / self._rate))
            asked = traffic.stop()
            lost = len(traffic.lost)
        before = [each.took_ms for each in asked if each.answered_s <= killed_s]
        after = [each for each in asked if each.sent_s > killed_s]
        hits_s = [each.answered_s for each in after if hit_ratio([each])]
        return RestartFigures(
            measured_at=now(),
            machine=machine(),
            broker=self._broker.what.split(" at ")[0],
            killed=killed.value,
            users=len(self._users),
            history=self._history,
            rate_per_s=self._rate,
            hbm_mib=int(worker.hbm_bytes) >> 20,
            dram_mib=int(worker.dram_bytes) >> 20,
            load_before=load_before,
            p50_before_ms=float(np.percentile(before, 50)),
            ready_ms=(ready_s - killed_s) * 1e3,
            first_hit_ms=(min(hits_s, default=float("nan")) - killed_s) * 1e3,
            longest_ms=max(each.took_ms for each in asked if each.answered_s > killed_s),
            hits_after=hit_ratio(after),
            not_ranked=sum(each.outcome.status is not RankStatus.RANKED for each in asked),
            requests=len(asked),
            lost=lost,
        )

    def _traffic(self) -> Traffic:
        def make_client(on_lost: Callable[[LostRequest], None]) -> RelayClient:
            gateway = f"bench-{time.monotonic_ns()}"
            return RelayClient(self._settings, gateway, registry=CollectorRegistry(), on_lost=on_lost)

        candidates = np.arange(CANDIDATES, dtype=np.int64)
        histories = partial(history_of, length=self._history)
        return Traffic(make_client, self._users, histories, candidates, 1 / self._rate, BUDGET_MS)


def _steps(log: Path, killed_at_s: float) -> dict[str, float]:
    """Column -> ms from the kill to the first log line of the step; NaN without such a line."""
    found = dict.fromkeys(STEPS.values(), float("nan"))
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            told = json.loads(line)
            after_ms = (datetime.fromisoformat(told["timestamp"]).timestamp() - killed_at_s) * 1e3
        except (ValueError, KeyError, TypeError):
            continue
        column = STEPS.get(told.get("event"))
        if column is not None and after_ms > 0 and np.isnan(found[column]):
            found[column] = after_ms
    return found


def _settings(broker: LocalBroker, folder: Path, history: int, hbm_mib: int, dram_mib: int, memory: str) -> Settings:
    config = small_config(history)
    save_checkpoint(folder / "model", config, random_checkpoint(config, seed=0).tensors)
    name = own_prefix(broker, "standby")
    kafka = broker.settings(KafkaSettings(topic_prefix=name, group_prefix=name, partitions=PARTITIONS))
    worker = {"hbm_bytes": hbm_mib << 20, "dram_bytes": dram_mib << 20, "standby_memory": memory}
    return small_settings(kafka, folder, worker, supervisor=NO_RESTART_LIMIT)


def _print(console: Console, figures: Sequence[KillFigures | RestartFigures]) -> None:
    kills = [one for one in figures if isinstance(one, KillFigures)]
    if kills:
        _print_kills(console, kills)
        return
    table = Table(title="kill -9 and restart of the supervisor; ms from the kill, and the requests' delays")
    for name in ("killed", "P50", "ready", "first hit", "longest", "hits after", "missed", "lost"):
        table.add_column(name, justify="right")
    for one in figures:
        if isinstance(one, RestartFigures):
            times = (one.p50_before_ms, one.ready_ms, one.first_hit_ms, one.longest_ms)
            counts = (f"{one.hits_after:.3f}", str(one.not_ranked), str(one.lost))
            table.add_row(one.killed, *(f"{time_ms:.0f}" for time_ms in times), *counts)
    console.print(table)


def _print_kills(console: Console, figures: Sequence[KillFigures]) -> None:
    table = Table(title="kill -9 of the active worker; ms from the kill, and the requests' delays")
    for name in ("P50", "longest", "lock", "assigned", "answer", "hits", "after", "missed", "lost", "again"):
        table.add_column(name, justify="right")
    for one in figures:
        times = (one.p50_before_ms, one.longest_ms, one.lock_ms, one.assigned_ms, one.first_answer_ms)
        table.add_row(
            *(f"{time_ms:.0f}" for time_ms in times),
            f"{one.hits_before:.3f}",
            f"{one.hits_after:.3f}",
            str(one.not_ranked),
            str(one.lost),
            f"{one.standby_again_s:.0f} s",
        )
    console.print(table)


def _rounded(figures: KillFigures | RestartFigures) -> dict[str, Any]:
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in asdict(figures).items()}
