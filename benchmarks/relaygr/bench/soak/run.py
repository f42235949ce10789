"""The processes of a soak, its events, its samples, and its end. `__main__` describes the verdicts."""

from __future__ import annotations

import enum
import itertools
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from relaygr.bench.rows import now
from relaygr.bench.small_relay import (
    CANDIDATES,
    NO_RESTART_LIMIT,
    SUFFIX,
    VOCABULARY,
    own_prefix,
    small_config,
    small_settings,
)
from relaygr.bench.soak.judge import (
    BROKER,
    FILES,
    Account,
    Ends,
    Growth,
    Life,
    Resource,
    Sample,
    Window,
    accounts,
    growths,
)
from relaygr.bench.soak.report import CounterRow, print_verdicts, save_json, save_plot, save_samples
from relaygr.bench.standby.pair import await_pair, child_pages
from relaygr.demo.board import RecordTail
from relaygr.demo.processes import CommandProcess, Processes, Reading, is_ready, read_metrics, write_config
from relaygr.devbroker import BrokerChoice, LocalBroker, local_broker
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import LatencyCoefficients, Outcome
from relaygr.schemas.topics import Topic
from relaygr.settings import Settings
from relaygr.traffic.player import WARM_UP_REQUESTS
from relaygr.traffic.population import population_of
from relaygr.traffic.records import LOST, NOT_SENT
from relaygr.traffic.schedule import impressions
from relaygr.worker.calibration import Calibration, describe, save_calibration
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.engine import load_engine
from relaygr.worker.model.interface import Engine
from relaygr.worker.shared.lock import memory_folder

PARTITIONS = 8
HISTORY_MAX = 512
CALIBRATION = "calibration.json"
BUDGET_MS = 55_000
"""Longer than a restart of the broker: no request may be lost, not even then."""
START_TIMEOUT_S = 120.0
EVENTS_TIMEOUT_S = 120.0
"""Longest time after the planned end for which the traffic goes on until the last event is done."""
END_TIMEOUT_S = 120.0
"""Longest time for the gateway to end: its last request may be lost, after its budget and its grace time."""
LONGEST_WAIT_S = 120.0
"""An event is due after a gap in which the relay recovers; on a busy machine it waits a little longer."""
RECOVERY_S = 10.0
"""Time for all clients to find a restarted broker."""
IDLE_S = 3.0
"""Time after the last answer for leases and spills to end."""
AGREE_TIMEOUT_S = 20.0
"""Longest time after that for the counters to agree, on a busy machine."""
SAMPLE_S = 1.0
LAST_READ_S = 0.1
"""Time between two readings of the gateway's metrics while it ends."""
READ_EVERY = 5
"""Samples between two readings of the metrics."""
CYCLE_S = 600.0
REDELIVERED_S = 6.0
"""A new trigger decides again on events whose offsets the killed one had not committed."""
_GAUGES = {
    Resource.STORE_USED: "relaygr_history_bytes",
    Resource.LEASES: "relaygr_cache_leases",
    Resource.IN_FLIGHT: "relaygr_consumer_in_flight_messages",
}
_SECTIONS = {"trigger": "trigger", "lag": "lag", "gateway": "traffic"}


class EventKind(enum.StrEnum):
    """What the benchmark does to the relay."""

    WORKER_KILLED = "worker killed"
    TRIGGER_KILLED = "trigger killed"
    MODEL_RELOADED = "model reloaded"
    BROKER_RESTARTED = "broker restarted"


_CYCLE = (
    (0.08, EventKind.MODEL_RELOADED),
    (0.14, EventKind.WORKER_KILLED),
    (0.20, EventKind.TRIGGER_KILLED),
    (0.26, EventKind.MODEL_RELOADED),
    (0.32, EventKind.WORKER_KILLED),
    (0.40, EventKind.BROKER_RESTARTED),
    (0.46, EventKind.MODEL_RELOADED),
    (0.48, EventKind.WORKER_KILLED),
    (0.53, EventKind.TRIGGER_KILLED),
    (0.56, EventKind.WORKER_KILLED),
    (0.66, EventKind.MODEL_RELOADED),
    (0.73, EventKind.MODEL_RELOADED),
    (0.80, EventKind.MODEL_RELOADED),
    (0.86, EventKind.MODEL_RELOADED),
    (0.92, EventKind.MODEL_RELOADED),
)
"""The events of a cycle by the part of it that is over. The last life of a worker is long, with several reloads."""
_LEAST_GAP_S = {
    EventKind.WORKER_KILLED: 30.0,
    EventKind.TRIGGER_KILLED: 15.0,
    EventKind.MODEL_RELOADED: 3.0,
    EventKind.BROKER_RESTARTED: 60.0,
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the benchmark does at a second of the run."""

    second: float
    kind: EventKind


def planned_events(seconds: float, can_restart_broker: bool) -> list[Event]:
    """The events of a run, in cycles of about ten minutes. In a short run each kind has fewer."""
    cycles = max(1, round(seconds / CYCLE_S))
    found: list[Event] = []
    latest: dict[EventKind, float] = {}
    for cycle, (share, kind) in itertools.product(range(cycles), _CYCLE):
        second = (cycle + share) * seconds / cycles
        if kind is EventKind.BROKER_RESTARTED and not can_restart_broker:
            continue
        if second - latest.get(kind, -math.inf) >= _LEAST_GAP_S[kind]:
            latest[kind] = second
            found.append(Event(second, kind))
    return found


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """The size of a run."""

    seconds: float
    rate_per_s: float
    users: int


@dataclass(frozen=True, slots=True)
class SoakResult:
    """The verdicts of a run, and what they come from."""

    seconds: float
    """The length of the traffic."""
    samples: Sequence[Sample]
    counters: Sequence[CounterRow]
    events: Sequence[Event]
    growths: Sequence[Growth]
    accounts: Sequence[Account]
    missed: Sequence[Event]
    """Planned events that the relay was not ready for in time."""

    @property
    def passed(self) -> bool:
        return all(one.is_flat for one in self.growths) and all(one.adds_up for one in self.accounts)


def soak(plan: SoakPlan, broker: str, out: Path, json_out: Path | None) -> bool:
    """Runs, prints and writes everything. Returns whether the run passed."""
    console = Console(highlight=False)
    with (
        tempfile.TemporaryDirectory(prefix="relaygr-soak-", dir=memory_folder(), ignore_cleanup_errors=True) as name,
        local_broker(broker) as started,
    ):
        console.print(f"broker: {started.what}", soft_wrap=True)
        if started.restart is None:
            console.print("The broker is not restarted: only a Kafka that is started here (KAFKA_HOME) can be.")
        described = {"measured_at": now(), "broker": started.what.split(" at ")[0]}
        try:
            result = run_soak(console, started, Path(name), plan)
        finally:
            _keep_logs(Path(name), out.with_name("logs"))
    save_samples(out, result.samples, result.counters)
    plot = out.with_name("soak.png")
    marks = [(event.second, event.kind.value) for event in result.events]
    save_plot(plot, result.samples, marks, Window.of(result.seconds).from_s)
    for event in result.missed:
        console.print(f"not done, since the relay did not recover: {event.kind}, planned at {event.second:.0f} s")
    print_verdicts(console, result.growths, result.accounts, result.passed)
    if json_out is not None:
        ended = {"seconds": round(result.seconds, 1), "passed": result.passed}
        save_json(json_out, described | ended, marks, result.growths, result.accounts)
    console.print(f"samples: {out}; plot: {plot}")
    return result.passed


def _keep_logs(folder: Path, kept: Path) -> None:
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for log in folder.glob("*.log"):
        shutil.copy(log, kept)


def run_soak(console: Console, broker: LocalBroker, folder: Path, plan: SoakPlan) -> SoakResult:
    """One run on a broker that is there. Raises RelayError if a process ends that was not killed."""
    settings = _settings(broker, folder, plan)
    broker.create_topics(settings)
    config = folder / "settings.yaml"
    write_config(settings, config)
    try:
        with Processes(folder, config) as processes:
            run = _Run(console, broker, folder, plan, settings, processes)
            with console.status("starting the processes"):
                run.start()
            run.play()
            return run.finish()
    finally:
        if not broker.ours:
            broker.delete_topics(settings)


@dataclass(slots=True)
class _Told:
    """The last metrics of a process, when they were read, and whether it was killed after that."""

    role: str
    pid: int
    reading: Reading
    read_s: float
    unseen: int = 0


@dataclass(slots=True)
class _Run:
    """The processes under test, and what was sampled of them. Seconds count from the begin of the traffic."""

    console: Console
    broker: LocalBroker
    folder: Path
    plan: SoakPlan
    settings: Settings
    processes: Processes
    samples: list[Sample] = field(default_factory=list)
    counters: list[CounterRow] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    _commands: dict[str, CommandProcess] = field(default_factory=dict)
    _told: dict[int, _Told] = field(default_factory=dict)
    _known: dict[int, psutil.Process] = field(default_factory=dict)
    _keepers: list[psutil.Process] = field(default_factory=list)
    _killed: set[int] = field(default_factory=set)
    _due: list[Event] = field(default_factory=list)
    _begun_s: float = 0.0
    _ended_s: float = 0.0
    _revisions: list[str] = field(default_factory=list)
    """The models that were put in place of the first one."""
    _scheduled: int = field(init=False)
    """Impressions of the schedule until the planned end."""
    _tail: RecordTail = field(init=False)
    _restart: Future[None] | None = None
    _outage_s: float = 0.0
    _longest_wait_s: float = 0.0
    """How long an event waited for the relay to recover from those before."""

    def __post_init__(self) -> None:
        self._tail = RecordTail(self._records)
        traffic = self.settings.traffic
        self._scheduled = sum(1 for _ in impressions(traffic, population_of(traffic)))

    # -- begin and end -------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when the traffic begins."""
        self._keepers = psutil.Process().children()
        self._commands["supervisor"] = self.processes.start("worker-00", ["worker", "--standby"], "worker")
        self._start("trigger", ["trigger"])
        if self.broker.kind is not BrokerChoice.EMBEDDED:
            self._start("lag", ["lag", "serve"])
        self.processes.await_ready(list(self._commands.values()), START_TIMEOUT_S)
        await_pair(self._commands["supervisor"].port, START_TIMEOUT_S)
        # The gateway plays until it is stopped.
        self._start("gateway", ["traffic", "--out", str(self._records)], ["traffic.duration_s=0"])
        ends_s = time.monotonic() + START_TIMEOUT_S
        while not (self._records.exists() and self._records.stat().st_size):
            self.processes.require_running()
            if time.monotonic() > ends_s:
                raise RelayError(f"the gateway recorded nothing:\n{self._commands['gateway'].log_tail()}")
            time.sleep(0.1)
        self._begun_s = time.monotonic()

    def play(self) -> None:
        """Samples and carries out the events, and then ends the traffic.

        The traffic lasts longer than planned if the relay needs the time to recover from an event.
        """
        self._due = planned_events(self.plan.seconds, self.broker.restart is not None)
        with _progress(self.console, self.plan.seconds) as show:
            for turn in itertools.count():
                self.processes.require_running()
                self._sample(with_metrics=turn % READ_EVERY == 0)
                self._carry_out_events()
                show(self._second, str(self.events[-1].kind) if self.events else "")
                if self._is_played() or self._second > self.plan.seconds + EVENTS_TIMEOUT_S:
                    break
                time.sleep(max(0.0, (turn + 1) * SAMPLE_S - self._second))
        if self._restart is not None:
            self._restart.result()
        self._end_traffic()

    def finish(self) -> SoakResult:
        """The verdicts, and the orderly stop of all processes."""
        time.sleep(IDLE_S)
        ends_s = time.monotonic() + AGREE_TIMEOUT_S
        found = self._accounts()
        while not all(one.adds_up for one in found) and time.monotonic() < ends_s:
            time.sleep(SAMPLE_S)
            found = self._accounts()
        stopped = self.processes.running
        self.processes.stop(stopped)
        found += [Account(f"exit code of {child.name}", 0, child.process.returncode) for child in stopped]
        judged = growths(self.samples, Window.of(self._ended_s))
        return SoakResult(self._ended_s, self.samples, self.counters, self.events, judged, found, self._due)

    def _is_played(self) -> bool:
        """Whether the schedule was answered, all events are done, and the relay has recovered from the last one."""
        if self._due or self._second < self.plan.seconds or not self._has_recovered(self._children()):
            return False
        self._tail.read()
        return len(self._tail.records) >= self._scheduled and self._last_model() == len(self._revisions)

    def _last_model(self) -> int:
        """The number of the model that ranked the last request; 0: the first one."""
        ranked = (record.model_revision for record in reversed(self._tail.records) if record.model_revision)
        revision = next(ranked, None)
        return self._revisions.index(revision) + 1 if revision in self._revisions else 0

    def _end_traffic(self) -> None:
        """Stops the gateway, which completes what it has begun. Its metrics are read as late as possible."""
        self._ended_s = self._second
        gateway = self._commands["gateway"]
        gateway.process.terminate()
        ends_s = time.monotonic() + END_TIMEOUT_S
        while gateway.process.poll() is None:
            if time.monotonic() > ends_s:
                raise RelayError(f"the gateway did not end:\n{gateway.log_tail()}")
            self._read("gateway", gateway.process.pid, gateway.port)
            time.sleep(LAST_READ_S)

    def _accounts(self) -> list[Account]:
        """The accounts as of now."""
        self.processes.require_running()
        self._sample(with_metrics=True)
        lives = {
            role: [
                Life(told.role, told.pid, told.reading, told.unseen)
                for told in self._told.values()
                if told.role == role
            ]
            for role in ("worker", "trigger", "supervisor")
        }
        kills = sum(event.kind is EventKind.WORKER_KILLED for event in self.events)
        return [
            Account("events planned, and done", len(self.events) + len(self._due), len(self.events)),
            Account("seconds that an event waited for the relay to recover", 0, self._longest_wait_s, LONGEST_WAIT_S),
            *accounts(lives["worker"], lives["trigger"], lives["supervisor"][0], self._ends(), kills),
            Account("model written last, and model of the last answer", len(self._revisions), self._last_model()),
        ]

    def _ends(self) -> Ends:
        self._tail.read()
        recorded = self._tail.records
        lost = sum(record.status == LOST for record in recorded)
        not_sent = sum(record.status == NOT_SENT for record in recorded)
        without_prefix = sum(record.status == Outcome.RANKED and not record.prefix_tokens for record in recorded)
        gateway = next(told.reading for told in self._told.values() if told.role == "gateway")
        traffic = self.settings.traffic
        return Ends(
            # The gateway begins the impressions in the order of their numbers.
            offered=max(self._scheduled, 1 + max((record.number for record in recorded), default=-1)),
            recorded=len(recorded),
            answered=len(recorded) - lost - not_sent,
            lost=lost,
            not_sent=not_sent,
            unrecorded_answers=WARM_UP_REQUESTS + int(gateway.total("relaygr_gateway_duplicate_results_total")),
            without_prefix=WARM_UP_REQUESTS + without_prefix,
            excused=math.ceil(2 * traffic.rate_per_s * max(0.0, self._outage_s + RECOVERY_S - BUDGET_MS / 1000)),
            events_unacknowledged=int(
                gateway.total(
                    "relaygr_gateway_published_total",
                    topic=self.settings.topic(Topic.RETRIEVAL),
                    acknowledged="no",
                )
            ),
        )

    # -- events --------------------------------------------------------------------------------------

    def _carry_out_events(self) -> None:
        while self._due and self._due[0].second <= self._second:
            kind = self._due[0].kind
            if not self._carry_out(kind):
                return
            due = self._due.pop(0)
            self._longest_wait_s = max(self._longest_wait_s, self._second - due.second)
            self.events.append(Event(self._second, kind))

    def _carry_out(self, kind: EventKind) -> bool:
        """False: not yet possible. Each event finds a relay that has recovered from the one before."""
        pids = self._children()
        if not self._has_recovered(pids):
            return False
        if kind is EventKind.WORKER_KILLED:
            return self._kill(pids["active"])
        if kind is EventKind.TRIGGER_KILLED:
            trigger = self._commands["trigger"]
            if not self._kill(trigger.process.pid, REDELIVERED_S):
                return False
            self.processes.stop([trigger])
            self._start("trigger", ["trigger"])
        elif kind is EventKind.MODEL_RELOADED:
            engine = _save_model(self._model, len(self._revisions) + 1)
            self._revisions.append(engine.revision)
            self._commands["supervisor"].process.send_signal(signal.SIGHUP)
        else:
            self._restart = ThreadPoolExecutor(1).submit(self._restart_broker)
        return True

    def _has_recovered(self, pids: Mapping[str, int]) -> bool:
        """Whether the broker is there, the worker has its standby, and everybody is ready. `pids` is by phase."""
        # The supervisor notices a kill a little later.
        has_pair = {"active", "standby"} <= pids.keys() and not self._killed & set(pids.values())
        if not has_pair or self._is_restarting():
            return False
        return all(is_ready(child.port) for child in self._commands.values())

    def _restart_broker(self) -> None:
        assert self.broker.restart is not None
        begun_s = self._second
        self.broker.restart()
        self._outage_s = max(self._outage_s, self._second - begun_s)

    def _is_restarting(self) -> bool:
        """Whether the broker is being restarted. Raises RelayError if it did not start again."""
        restart = self._restart
        if restart is not None and restart.done():
            restart.result()
        return restart is not None and not restart.done()

    def _kill(self, pid: int, redelivered_s: float = 0.0) -> bool:
        """False: the process lives, because nothing is known of its counters yet."""
        self._read_metrics()
        if pid not in self._told:
            return False
        told = self._told[pid]
        os.kill(pid, signal.SIGKILL)
        self._killed.add(pid)
        in_flight = told.reading.total("relaygr_consumer_in_flight_messages")
        since_s = self._second - told.read_s + redelivered_s
        told.unseen = int(in_flight) + math.ceil(2 * self.plan.rate_per_s * since_s) + 1
        return True

    # -- samples -------------------------------------------------------------------------------------

    def _sample(self, with_metrics: bool) -> None:
        second = self._second
        for role, pid in self._pids().items():
            with suppress(psutil.Error):
                usage = _usage(self._process(pid))
                # A process that has just died has no memory.
                if usage[Resource.RSS]:
                    self.samples += [Sample(second, role, pid, *each) for each in usage.items()]
        files = {
            Resource.STORE_FILE: _bytes_of(self.settings.worker.history_path.rglob("data.mdb")),
            Resource.SHARED: _bytes_of(Path(str(self.settings.worker.shared_path)).rglob("*")),
            Resource.LOGS: _bytes_of(self.folder.glob("*.log")),
        }
        self.samples += [Sample(second, FILES, 0, resource, value) for resource, value in files.items()]
        if with_metrics:
            self._read_metrics()

    def _read_metrics(self) -> None:
        pages = self._child_pages()
        for page in pages:
            if page["port"] and self._read("worker", page["pid"], page["port"]) and page["phase"] == "active":
                self._note_gauges(page["pid"])
        for name, child in self._commands.items():
            self._read(name, child.process.pid, child.port)

    def _read(self, role: str, pid: int, port: int) -> bool:
        """Whether the process told its metrics. Its counters are sampled when they change."""
        # The time before the reading: the process goes on while it tells.
        second, reading = self._second, read_metrics(port)
        if not reading.samples:
            return False
        before = self._told[pid].reading if pid in self._told else Reading()
        for name in reading.samples:
            if name.endswith("_total") and reading.total(name) != before.total(name):
                self.counters.append((second, role, pid, name, reading.total(name)))
        self._told[pid] = _Told(role, pid, reading, second)
        return True

    def _note_gauges(self, pid: int) -> None:
        reading = self._told[pid].reading
        for resource, name in _GAUGES.items():
            process, life = (FILES, 0) if resource is Resource.STORE_USED else ("active", pid)
            self.samples.append(Sample(self._second, process, life, resource, reading.total(name)))

    def _pids(self) -> dict[str, int]:
        """The process ids by role."""
        found = {name: child.process.pid for name, child in self._commands.items()}
        found |= {phase: pid for phase, pid in self._children().items() if phase in ("active", "standby")}
        for keeper in self._keepers:
            with suppress(psutil.Error):
                # A Kafka is the child of its guard; the embedded cluster has none.
                found[BROKER] = next((child.pid for child in keeper.children(recursive=True)), keeper.pid)
        return found

    def _children(self) -> dict[str, int]:
        return {page["phase"]: page["pid"] for page in self._child_pages()}

    def _child_pages(self) -> list[dict[str, Any]]:
        try:
            return child_pages(self._commands["supervisor"].port)
        except OSError:
            return []

    def _process(self, pid: int) -> psutil.Process:
        if pid not in self._known:
            self._known[pid] = psutil.Process(pid)
        return self._known[pid]

    def _start(self, name: str, command: Sequence[str], settings: Sequence[str] = ()) -> None:
        self._commands[name] = self.processes.start(name, command, _SECTIONS[name], settings)

    @property
    def _second(self) -> float:
        return time.monotonic() - self._begun_s

    @property
    def _records(self) -> Path:
        return self.folder / "records.jsonl"

    @property
    def _model(self) -> Path:
        return self.folder / "model"


def _usage(process: psutil.Process) -> Mapping[Resource, float]:
    """Of one process. Its private memory is what it shares with no file and no other process."""
    with process.oneshot():
        memory = process.memory_info()
        return {
            Resource.RSS: memory.rss,
            Resource.PRIVATE: memory.rss - getattr(memory, "shared", 0),
            Resource.FDS: process.num_fds(),
            Resource.THREADS: process.num_threads(),
        }


def _bytes_of(paths: Iterable[Path]) -> int:
    """The bytes that files take. An arena has holes, which take none."""
    total = 0
    for path in paths:
        with suppress(OSError):
            total += path.stat().st_blocks * 512
    return total


@contextmanager
def _progress(console: Console, seconds: float) -> Iterator[Callable[[float, str], None]]:
    """Shows a bar while the block runs; the function tells the second and the latest event."""
    columns = (TextColumn("soak"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=seconds)
        yield lambda second, text: progress.update(bar, completed=second, description=text)


def _save_model(folder: Path, revision: int) -> Engine:
    """Writes a model with its calibration, which is made up: by it every event is at risk."""
    config = small_config(HISTORY_MAX)
    save_checkpoint(folder, config, random_checkpoint(config, revision).tensors)
    engine = load_engine(folder, "cpu", threads=1)
    coefficients = LatencyCoefficients(
        a0=800e6, a1=0, a2=0, b0=500, b1=10, b2=0.001, c0=500, c1=10, c2=0.001, d0=200, d1=0.0001
    )
    save_calibration(Calibration(describe(engine), now(), coefficients, (), (), (), ()), folder / CALIBRATION)
    return engine


def _settings(broker: LocalBroker, folder: Path, plan: SoakPlan) -> Settings:
    """Both tiers hold a part of the prefixes. What is kept up to a bound reaches its bound early."""
    model = folder / "model"
    engine = _save_model(model, revision=0)
    prefix_bytes = engine.geometry.pages_for(engine.layout.tokens(HISTORY_MAX)) * engine.geometry.page_bytes
    name = own_prefix(broker, "soak")
    return small_settings(
        broker.settings(KafkaSettings(topic_prefix=name, group_prefix=name, partitions=PARTITIONS)),
        folder,
        worker={
            "calibration": model / CALIBRATION,
            "hbm_bytes": max(1 << 20, plan.users // 5 * prefix_bytes),
            "dram_bytes": max(1 << 20, plan.users // 2 * prefix_bytes),
        },
        client={"remembered_answers": 1_000},
        supervisor=NO_RESTART_LIMIT,
        traffic={
            "duration_s": plan.seconds,
            "rate_per_s": plan.rate_per_s,
            "users": plan.users,
            "items": VOCABULARY,
            "history_median": HISTORY_MAX // 3,
            "history_max": HISTORY_MAX,
            "growth": 16,
            "start_again": True,
            "suffix": SUFFIX,
            "candidates": CANDIDATES,
            "budget_ms": BUDGET_MS,
            # Longer than client.lost_after_ms: a request without an answer is to be counted as lost.
            "drain_s": 60,
        },
    )
