"""The relay under load: its settings, its processes by name, and what each of them uses and counts."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Final

import psutil

from relaygr.bench.events import Plan
from relaygr.bench.events.judge import Life, Resource, Sample
from relaygr.bench.rows import now
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess, Processes, is_ready, read_children, read_metrics, write_config
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.settings import Settings
from relaygr.worker.calibration import Calibration, describe, save_calibration
from relaygr.worker.executor.schedulable import WorkClass
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.engine import load_engine
from relaygr.worker.model.interface import Engine
from relaygr.worker.pool.settings import PoolSettings

PARTITIONS: Final = 12
SUFFIX: Final = 16
CANDIDATES: Final = 64
VOCABULARY: Final = 10_000
PAIR: Final = "worker-00"
"""The supervisor of the worker with a hot standby."""
START_TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.05
SAMPLE_S: Final = 1.0
READ_EVERY: Final = 5
"""Samples between two readings of the metrics."""
REDELIVERED_S: Final = 6.0
"""A new trigger decides again on events whose offsets the killed one had not committed."""
_SECTIONS: Final = {"trigger": "trigger", "gateway": "traffic", "hot": "traffic"}


class Stack:
    """The processes under test. The context manager starts all but the gateways, and stops all that still run."""

    def __init__(self, broker: LocalBroker, folder: Path, settings: Settings, most_per_s: float) -> None:
        """`most_per_s`: the most messages that a process may get in a second."""
        self.folder = folder
        self.settings = settings
        self.samples: list[Sample] = []
        self.lives: dict[int, Life] = {}
        self.revision = ""
        self._broker = broker
        self._most_per_s = most_per_s
        self._commands: dict[str, CommandProcess] = {}
        self._known: dict[int, psutil.Process] = {}
        self._models = 1
        self._ended: set[int] = set()
        self._reading = threading.RLock()
        self._ending = threading.Event()
        self._sampler = threading.Thread(target=self._sample_until_the_end, name="samples", daemon=True)
        self._begun_s = time.monotonic()

    def __enter__(self) -> Stack:
        with ExitStack() as started:
            self._broker.create_topics(self.settings)
            if not self._broker.ours:
                started.callback(self._broker.delete_topics, self.settings)
            write_config(self.settings, self.folder / "settings.yaml")
            self._processes = started.enter_context(Processes(self.folder, self.folder / "settings.yaml"))
            self.start(PAIR, ["worker", "--standby"])
            self.start("worker-01", ["worker"])
            self.start("trigger", ["trigger"])
            self.await_calm()
            self._cleanup = started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        if self._sampler.is_alive():
            self._sampler.join()
        self._cleanup.close()

    def sample(self) -> None:
        """Samples what each process uses from now on, on a thread."""
        self._begun_s = time.monotonic()
        self._sampler.start()

    # -- processes ---------------------------------------------------------------------------------

    def start(self, name: str, command: Sequence[str], own: Sequence[str] = ()) -> CommandProcess:
        """Starts a process. A worker gets a store of its own."""
        if name.startswith("worker"):
            own = [f"worker.worker_id={name}", f"worker.history_path={self.folder / f'history-{name}'}", *own]
        self._commands[name] = self._processes.start(name, command, _SECTIONS.get(name, "worker"), own)
        return self._commands[name]

    def has(self, name: str) -> bool:
        return name in self._commands

    def end(self, name: str, by: signal.Signals) -> None:
        """Sends a signal to a process, and waits for its end."""
        child = self._commands[name]
        self._end_unread(child.process.pid, by, REDELIVERED_S if name == "trigger" else 0.0)
        child.process.wait(START_TIMEOUT_S)
        self._processes.stop([child])
        del self._commands[name]

    def kill_active(self) -> None:
        """kill -9 of the active process of the pair."""
        active = read_children(self._commands[PAIR].port)["active"]["pid"]
        self._end_unread(active, signal.SIGKILL)
        self._await("the supervisor has noticed", lambda: active not in self._pair_pids())

    def reload(self) -> None:
        """Gives all workers another model, and waits until they have it."""
        before = {page[1]: self._swapped(page[2]) for page in self._worker_pages()}
        self._models += 1
        self.revision = save_model(self.folder / "model", self._models, self.settings.traffic.history_max).revision
        for name, child in self._commands.items():
            if name.startswith("worker"):
                child.process.send_signal(signal.SIGHUP)
        self._await(
            "all workers have the new model",
            lambda: all(self._swapped(port) > before.get(pid, -1) for _, pid, port in self._worker_pages()),
        )

    def await_calm(self) -> None:
        """Waits until every process is ready, the pair is whole, and each partition has an owner."""
        self._await("all processes are ready, and own all partitions", self._is_calm)

    def await_partitions(self, name: str) -> None:
        """Waits until a worker owns partitions."""
        self._await(f"{name} owns partitions", lambda: _owned(self._commands[name].port) > 0)

    def device_seconds(self, work_class: WorkClass) -> float:
        """The device seconds of all workers for one class of work."""
        return sum(
            read_metrics(port).total("relaygr_worker_device_seconds_total", work_class=work_class)
            for _, _, port in self._worker_pages()
        )

    def await_end(self, name: str) -> int:
        """Waits until a gateway has ended. Its metrics are read as late as possible. Returns its exit code."""
        child = self._commands[name]
        while child.process.poll() is None:
            self._read(name, name, child.process.pid, child.port)
            time.sleep(2 * POLL_S)
        del self._commands[name]
        return child.process.returncode

    def end_gateway(self) -> None:
        """Ends the traffic: the gateway completes what it has begun."""
        self._commands["gateway"].process.terminate()
        self.await_end("gateway")

    def await_records(self, path: Path) -> None:
        """Waits until a gateway has recorded its first request."""
        self._await("the gateway has an answer", lambda: path.exists() and path.stat().st_size > 0)

    def stop(self) -> dict[str, int]:
        """Stops all processes in order. Returns their exit codes."""
        running = self._processes.running
        self._processes.stop(running)
        return {child.name: child.process.returncode for child in running}

    def _await(self, what: str, is_so: Callable[[], bool]) -> None:
        self._processes.await_so(what, is_so, START_TIMEOUT_S)

    def _is_calm(self) -> bool:
        lives = [child for name, child in self._commands.items() if name not in ("gateway", "hot")]
        if not all(is_ready(child.port) for child in lives):
            return False
        if not {"active", "standby"} <= read_children(self._commands[PAIR].port).keys():
            return False
        owned = sum(_owned(child.port) for name, child in self._commands.items() if name.startswith("worker"))
        return owned == PARTITIONS

    def _pair_pids(self) -> set[int]:
        return {child["pid"] for child in read_children(self._commands[PAIR].port).values()}

    def _worker_pages(self) -> list[tuple[str, int, int]]:
        """Name, process id and port of every process that computes."""
        commands = dict(self._commands)
        pages = [
            (f"{PAIR} {phase}", child["pid"], child["port"])
            for phase, child in read_children(commands[PAIR].port).items()
            if child["port"]
        ]
        for name, child in commands.items():
            if name.startswith("worker") and name != PAIR:
                pages.append((name, child.process.pid, child.port))
        return pages

    def _swapped(self, port: int) -> float:
        return read_metrics(port).total("relaygr_model_reloads_total", outcome="swapped")

    # -- samples and counters ----------------------------------------------------------------------

    def read(self) -> None:
        """Reads the metrics of every process."""
        with self._reading:
            for name, pid, port in self._worker_pages():
                self._read("worker", name, pid, port)
            for name, child in dict(self._commands).items():
                if name == PAIR:
                    self._read("supervisor", name, child.process.pid, child.port)
                elif not name.startswith("worker"):
                    self._read(name, name, child.process.pid, child.port)

    def _read(self, role: str, name: str, pid: int, port: int) -> None:
        # The time before the reading: the process goes on while it answers.
        read_s, reading = time.monotonic(), read_metrics(port)
        with self._reading:
            if reading.samples and pid not in self._ended:
                self.lives[pid] = Life(role, name, pid, reading, read_s)

    def _end_unread(self, pid: int, by: signal.Signals, redelivered_s: float = 0.0) -> None:
        """Ends a process. Its last reading comes directly before, and what it may have done since is noted."""
        with self._reading:
            self.read()
            os.kill(pid, by)
            self._ended.add(pid)
            life = self.lives[pid]
            in_flight = life.reading.total("relaygr_consumer_in_flight_messages")
            since_s = time.monotonic() - life.read_s + redelivered_s
            life.unseen = int(in_flight) + math.ceil(2 * self._most_per_s * since_s) + 1

    def _sample_until_the_end(self) -> None:
        turn = 0
        while not self._ending.wait(SAMPLE_S):
            self._sample_once()
            turn += 1
            if turn % READ_EVERY == 0:
                self.read()

    def _sample_once(self) -> None:
        second = time.monotonic() - self._begun_s
        processes = {name: child.process.pid for name, child in dict(self._commands).items()}
        processes |= {name: pid for name, pid, _ in self._worker_pages()}
        for name, pid in processes.items():
            with suppress(psutil.Error):
                if pid not in self._known:
                    self._known[pid] = psutil.Process(pid)
                process = self._known[pid]
                with process.oneshot():
                    used = (process.memory_info().rss, process.num_fds(), process.num_threads())
                # A process that has just died has no memory.
                if used[0]:
                    resources = (Resource.RSS, Resource.FDS, Resource.THREADS)
                    self.samples += [
                        Sample(second, name, pid, resource, value)
                        for resource, value in zip(resources, used, strict=True)
                    ]
        files = {
            Resource.STORE: self.folder.rglob("data.mdb"),
            Resource.SHARED: (self.folder / "shared").rglob("*"),
            Resource.LOGS: self.folder.glob("*.log"),
        }
        self.samples += [Sample(second, "files", 0, resource, _bytes_of(paths)) for resource, paths in files.items()]


def _owned(port: int) -> float:
    return read_metrics(port).total("relaygr_consumer_owned_partitions")


def _bytes_of(paths: Iterable[Path]) -> int:
    """The bytes that files take. An arena has holes, which take none."""
    total = 0
    for path in paths:
        with suppress(OSError):
            total += path.stat().st_blocks * 512
    return total


def save_model(folder: Path, seed: int, history_max: int) -> Engine:
    """Writes a model with its calibration, which is made up: by it every event is at risk."""
    config = ModelConfig(
        embedding_dim=64,
        num_heads=2,
        attention_dim=32,
        hidden_dim=32,
        num_layers=4,
        normalizer=float(history_max),
        vocabulary_size=VOCABULARY,
        num_positions=history_max + 128,
        max_prefix_behaviours=history_max,
        max_suffix_behaviours=SUFFIX,
        max_candidates=CANDIDATES,
    )
    save_checkpoint(folder, config, random_checkpoint(config, seed).tensors)
    engine = load_engine(folder, "cpu", threads=1)
    latency = LatencyCoefficients(
        a0=800e6, a1=0, a2=0, b0=500, b1=10, b2=0.001, c0=500, c1=10, c2=0.001, d0=200, d1=0.0001
    )
    save_calibration(Calibration(describe(engine), now(), latency, (), (), (), ()), folder / "calibration.json")
    return engine


def settings_of(
    broker: LocalBroker, name: str, folder: Path, replicas: int, plan: Plan, pool: PoolSettings
) -> Settings:
    """The settings of all processes. Both tiers hold a part of the prefixes."""
    engine = save_model(folder / "model", 1, plan.history)
    prefix_bytes = engine.geometry.pages_for(engine.layout.tokens(plan.history)) * engine.geometry.page_bytes
    kafka = broker.settings(KafkaSettings(topic_prefix=name, group_prefix=name, partitions=PARTITIONS))
    kafka = kafka.model_copy(update={"replication_factor": replicas} if replicas > 1 else {})
    return Settings.model_validate(
        {
            **kafka.model_dump(),
            "worker": {
                "model": folder / "model",
                "calibration": folder / "model" / "calibration.json",
                "shared_path": folder / "shared",
                "history_max_bytes": 64 << 20,
                "hbm_bytes": max(1 << 20, plan.users // 5 * prefix_bytes),
                "dram_bytes": max(1 << 20, plan.users // 2 * prefix_bytes),
                "warm_up_users": plan.warm_up_users,
                "pool": pool,
            },
            # Kills must not use up the limit of restarts.
            "supervisor": {"restarts_max": 1_000, "restart_window_s": 1.0},
            # A bound on memory is reached early.
            "client": {"remembered_answers": 1_000},
            "traffic": {
                "rate_per_s": plan.rate_per_s,
                "users": plan.users,
                "items": VOCABULARY,
                "history_median": plan.history // 3,
                "history_max": plan.history,
                "growth": 16,
                "start_again": True,
                "suffix": SUFFIX,
                "candidates": CANDIDATES,
                "budget_ms": plan.budget_ms,
                # Longer than client.lost_after_ms: a request without an answer is to be counted as lost.
                "drain_s": 60,
            },
        }
    )
