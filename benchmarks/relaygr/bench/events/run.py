"""Plays the events, and prints and writes their rows and the verdicts. `__main__` describes them."""

from __future__ import annotations

import csv
import json
import random
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from relaygr.bench.events import Event, Plan
from relaygr.bench.events.figures import DEVICE_S, EventRow, HandOver, Happened, is_lost, lost_outside, not_sent, row_of
from relaygr.bench.events.judge import BOUNDS, Account, Ends, Growth, Judged, Sample, accounts, growths
from relaygr.bench.events.stack import VOCABULARY, Stack, settings_of
from relaygr.bench.rows import machine, now
from relaygr.cluster.admin import create_topics, delete_topics
from relaygr.demo.pool import local_pool, require_pool
from relaygr.devbroker import BrokerChoice, LocalBroker, available_brokers, local_broker
from relaygr.devbroker.kafka import KafkaCluster
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from relaygr.traffic.player import WARM_UP_REQUESTS
from relaygr.traffic.records import ImpressionRecord, read_records
from relaygr.worker.executor.schedulable import WorkClass
from relaygr.worker.pool.settings import PoolSettings
from relaygr.worker.shared.lock import memory_folder

NAME: Final = "events"
JOINED: Final = "worker-02"
HOT_SECONDS: Final = 10.0
RECOVERY_S: Final = 10.0
"""Time for all clients to find a broker that was started again."""
BROKER_AWAY_S: Final = 12.0
"""How long one of several brokers is away: longer than it takes the others to notice."""
AGREE_TIMEOUT_S: Final = 30.0
"""Longest time after the last answer for leases and spills to end, and for the counters to agree."""
TABLE_WIDTH: Final = 130
KEPT: Final = (
    "worker-*.log", "trigger.log", "gateway.log", "hot.log", "records.jsonl", "hot-*.jsonl", "hot.csv", "samples.csv",
)  # fmt: skip
"""What a run leaves in --out."""


@dataclass(frozen=True, slots=True)
class Played:
    """The rows and the verdicts of a run."""

    rows: Sequence[EventRow]
    growths: Sequence[Growth]
    accounts: Sequence[Account]

    @property
    def passed(self) -> bool:
        return all(one.is_flat for one in self.growths) and all(one.adds_up for one in self.accounts)


def play_events(plan: Plan, broker: str, brokers: int, out: Path, json_out: Path | None) -> bool:
    """Plays, prints and writes everything. Returns whether the run passed."""
    console = Console(highlight=False)
    _refuse_other_files(out)
    if plan.pool:
        require_pool()
    with (
        tempfile.TemporaryDirectory(prefix="relaygr-events-", dir=memory_folder(), ignore_cleanup_errors=True) as name,
        _open(broker, brokers) as started,
    ):
        console.print(f"broker: {started.what}", soft_wrap=True)
        if started.restart is None and Event.BROKER_STOP in plan.events:
            console.print("broker-stop is left out: it needs a Kafka that is started here (KAFKA_HOME).")
            plan = without_broker_stop(plan)
        try:
            played = _play(console, started, Path(name), plan, min(3, brokers))
        finally:
            _keep(Path(name), out)
    _print(console, plan, played)
    if json_out is not None:
        described = {"measured_at": now(), "machine": machine(), "broker": started.what.split(" at ")[0]}
        content = {**described, **asdict(plan), "passed": played.passed, **asdict(played)}
        json_out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return played.passed


def without_broker_stop(plan: Plan) -> Plan:
    """The plan for a broker that cannot be stopped. Raises RelayError if no event is left."""
    events = tuple(each for each in plan.events if each is not Event.BROKER_STOP)
    if not events:
        raise RelayError("--events has no event that can happen here: choose others, or set KAFKA_HOME")
    return replace(plan, events=events)


@contextmanager
def _open(choice: str, brokers: int) -> Iterator[LocalBroker]:
    """One broker, or a Kafka of several. Either can be killed and started again if it was started here."""
    if brokers > 1 and choice not in ("auto", BrokerChoice.KAFKA):
        raise RelayError(f"--brokers starts a Kafka of its own: leave out --broker {choice}, or --brokers")
    if brokers == 1:
        with local_broker(choice) as broker:
            yield broker
        return
    home = available_brokers().kafka_home
    if home is None:
        raise RelayError("--brokers starts a cluster: set KAFKA_HOME to the folder of an unpacked Apache Kafka")
    with KafkaCluster(home, brokers) as cluster:

        def lose_the_leader() -> None:
            leader = cluster.leader(KafkaSettings(topic_prefix=NAME).topic(Topic.RANKING))
            cluster.kill(leader)
            time.sleep(BROKER_AWAY_S)
            cluster.start(leader)
            cluster.await_in_sync()

        defaults = KafkaSettings()
        yield LocalBroker(
            BrokerChoice.KAFKA,
            cluster.bootstrap,
            f"{brokers} brokers of KAFKA_HOME at {cluster.bootstrap}, started here",
            (),
            create_topics,
            delete_topics,
            fetch_wait_max_ms=defaults.fetch_wait_max_ms,
            session_timeout_ms=defaults.session_timeout_ms,
            restart=lose_the_leader,
        )


def _play(console: Console, broker: LocalBroker, folder: Path, plan: Plan, replicas: int) -> Played:
    name = NAME if broker.ours else f"{NAME}-{secrets.token_hex(3)}"
    with local_pool(folder / "pool") if plan.pool else nullcontext(PoolSettings()) as pool:
        settings = settings_of(broker, name, folder, replicas, plan, pool)
        with Stack(broker, folder, settings, max(plan.rate_per_s, plan.hot_rate_per_s)) as stack:
            return _Run(console, broker, folder, plan, stack).play()


class _Run:
    """One run. Times are by the monotonic clock, which the records of the gateways share."""

    def __init__(self, console: Console, broker: LocalBroker, folder: Path, plan: Plan, stack: Stack) -> None:
        self._console = console
        self._broker = broker
        self._folder = folder
        self._plan = plan
        self._stack = stack
        self._happened: list[Happened] = []
        self._outages: list[tuple[float, float]] = []
        self._hot: list[Path] = []
        self._owned_s, self._device_s = 0.0, (0.0, 0.0)

    def play(self) -> Played:
        plan, stack, records = self._plan, self._stack, self._folder / "records.jsonl"
        stack.start("gateway", ["traffic", "--out", str(records)])
        stack.await_records(records)
        begun_s = time.monotonic()
        stack.sample()
        for event in self._script(begun_s + plan.seconds):
            time.sleep(plan.window_s)
            self._play_event(event)
            time.sleep(plan.window_s)
        ended_s = time.monotonic()
        stack.end_gateway()
        found = self._accounts(records)
        samples = list(stack.samples)
        _save_samples(self._folder / "samples.csv", samples)
        exits = [Account(f"exit code of {name}", 0, code) for name, code in stack.stop().items()]
        ended = self._records(records)
        rows = [row_of(each, ended, plan.window_s, begun_s) for each in self._happened]
        judged = growths(samples, Judged.of(ended_s - begun_s)) if plan.seconds else []
        return Played(rows, judged, [*found, *exits])

    def _script(self, ends_s: float) -> Iterator[Event]:
        """Each event once, or all of them in a random order until the time is over."""
        if not self._plan.seconds:
            yield from self._plan.events
            return
        order = random.Random(self._plan.seed)
        rounds = (order.sample(self._plan.events, len(self._plan.events)) for _ in repeat(None))
        for event in chain.from_iterable(rounds):
            if time.monotonic() >= ends_s:
                return
            yield event

    def _play_event(self, event: Event) -> None:
        self._prepare(event)
        at_s = time.monotonic()
        self._make(event)
        self._stack.await_calm()
        ready_s = time.monotonic()
        hand_over = self._hand_over(ready_s) if event is Event.JOIN else None
        self._happened.append(Happened(event, at_s, ready_s, hand_over))
        self._console.print(f"{event}: ready again after {ready_s - at_s:.1f} s")

    def _prepare(self, event: Event) -> None:
        """Puts the fleet in the state in which the event can happen."""
        is_there = self._stack.has(JOINED)
        if event is Event.JOIN and is_there:
            self._leave()
        elif event is Event.LEAVE and not is_there:
            self._join()
        elif event is Event.HOT_USER:
            self._start_hot_user()
            return
        else:
            return
        self._stack.await_calm()
        time.sleep(self._plan.window_s)

    def _make(self, event: Event) -> None:
        stack = self._stack
        match event:
            case Event.KILL:
                stack.end("worker-01", signal.SIGKILL)
                stack.start("worker-01", ["worker"])
            case Event.TAKE_OVER:
                stack.kill_active()
            case Event.KILL_TRIGGER:
                stack.end("trigger", signal.SIGKILL)
                stack.start("trigger", ["trigger"])
            case Event.JOIN:
                self._join()
                self._stack.await_partitions(JOINED)
                self._owned_s, self._device_s = time.monotonic(), self._device_seconds()
            case Event.LEAVE:
                self._leave()
            case Event.RELOAD:
                stack.reload()
            case Event.BROKER_STOP:
                assert self._broker.restart is not None
                begun_s = time.monotonic()
                self._broker.restart()
                self._outages.append((begun_s, time.monotonic()))
            case Event.HOT_USER:
                if stack.await_end("hot"):
                    raise RelayError("the gateway of the hot user failed")

    def _join(self) -> None:
        self._stack.start(JOINED, ["worker", "--leave-on-stop"])

    def _hand_over(self, ready_s: float) -> HandOver:
        time.sleep(max(0.0, self._owned_s + DEVICE_S - time.monotonic()))
        (pre_infer_s, warm_up_s), (pre_infer_before_s, warm_up_before_s) = self._device_seconds(), self._device_s
        return HandOver(
            JOINED, round(ready_s - self._owned_s, 2), pre_infer_s - pre_infer_before_s, warm_up_s - warm_up_before_s
        )

    def _device_seconds(self) -> tuple[float, float]:
        """Of all workers, for jobs and requests, and for warm-ups."""
        return self._stack.device_seconds(WorkClass.PREINFER), self._stack.device_seconds(WorkClass.WARM_UP)

    def _leave(self) -> None:
        self._stack.end(JOINED, signal.SIGTERM)

    def _start_hot_user(self) -> None:
        """Starts a gateway with one user, whose history is an interaction log."""
        log, records = self._folder / "hot.csv", self._folder / f"hot-{len(self._hot)}.jsonl"
        lines = [f"hot-user,{item * 7 % VOCABULARY},1,{1_700_000_000 + item * 60}" for item in range(400)]
        log.write_text("\n".join(["userId,movieId,rating,timestamp", *lines]) + "\n", encoding="utf-8")
        own = {
            "gateway_id": f"hot-{len(self._hot)}",
            "interactions": log,
            "users": 1,
            "growth": 0,
            "start_again": "false",
            "rate_per_s": self._plan.hot_rate_per_s,
            "duration_s": HOT_SECONDS,
        }
        self._stack.start(
            "hot", ["traffic", "--out", str(records)], [f"traffic.{key}={value}" for key, value in own.items()]
        )
        self._stack.await_records(records)
        self._hot.append(records)

    # -- verdicts ----------------------------------------------------------------------------------

    def _records(self, records: Path) -> list[ImpressionRecord]:
        return [record for path in (records, *self._hot) for record in read_records(path)]

    def _accounts(self, records: Path) -> list[Account]:
        """The accounts, once they agree or the time for that is over."""
        ends_s = time.monotonic() + AGREE_TIMEOUT_S
        while True:
            time.sleep(1.0)
            self._stack.read()
            found = self._accounts_now(records)
            if all(one.adds_up for one in found) or time.monotonic() > ends_s:
                return found

    def _accounts_now(self, records: Path) -> list[Account]:
        files = [list(read_records(path)) for path in (records, *self._hot)]
        recorded = list(chain.from_iterable(files))
        lives = list(self._stack.lives.values())
        gateways = [life.reading for life in lives if life.role in ("gateway", "hot")]
        retrieval = self._stack.settings.topic(Topic.RETRIEVAL)
        ends = Ends(
            # A gateway begins its impressions in the order of their numbers.
            begun=sum(1 + max((record.number for record in file), default=-1) for file in files),
            recorded=len(recorded),
            lost=sum(is_lost(record) for record in recorded),
            lost_outside_outages=lost_outside(recorded, self._outages, self._plan.budget_ms / 1000 + RECOVERY_S),
            not_sent=not_sent(recorded),
            unrecorded_answers=WARM_UP_REQUESTS * len(files)
            + int(sum(each.total("relaygr_gateway_duplicate_results_total") for each in gateways)),
            events_unacknowledged=int(
                sum(
                    each.total("relaygr_gateway_published_total", topic=retrieval, acknowledged="no")
                    for each in gateways
                )
            ),
        )
        found = accounts(lives, ends, sum(each.event == Event.TAKE_OVER for each in self._happened))
        if self._stack.revision:
            last = max(recorded, key=lambda record: record.scheduled_us if record.model_revision else 0)
            found.append(Account("the last model ranks", 0, int(last.model_revision != self._stack.revision)))
        return found


def _refuse_other_files(out: Path) -> None:
    """Raises RelayError for a folder with files that no run left there: those of an earlier run are replaced."""
    others = sorted({path.name for path in out.glob("*")} - {path.name for path in _kept(out)})
    if others:
        raise RelayError(f"--out {out} has files that are not of this benchmark ({others[0]}): name another folder")


def _keep(folder: Path, out: Path) -> None:
    """Keeps the logs, records and samples of the run in place of those of an earlier one."""
    out.mkdir(parents=True, exist_ok=True)
    for path in _kept(out):
        path.unlink()
    for path in _kept(folder):
        shutil.copy(path, out)


def _kept(folder: Path) -> list[Path]:
    return [path for pattern in KEPT for path in folder.glob(pattern)]


def _save_samples(path: Path, samples: Sequence[Sample]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("second", "process", "pid", "resource", "value"))
        for one in samples:
            writer.writerow((round(one.second, 2), one.process, one.pid, one.resource.value, f"{one.value:.12g}"))


def _print(console: Console, plan: Plan, played: Played) -> None:
    wide = Console(highlight=False, width=max(console.width, TABLE_WIDTH))
    table = Table(title=f"Late / not whole / lost of all requests; deadline {plan.budget_ms} ms")
    for name in ("event", "before", "until ready", "after", "ready", "longest wait", "back"):
        table.add_column(name, justify="left" if name == "event" else "right")
    for row in played.rows:
        times = (f"{row.ready_s:.1f} s", f"{row.longest_ms:.0f} ms", f"{row.back_s:.1f} s")
        table.add_row(row.event, *map(str, (row.before, row.during, row.after)), *times)
    wide.print(table)
    for row in played.rows:
        if row.hand_over is not None:
            wide.print(f"{row.event}: {row.hand_over}")
    for growth in played.growths:
        unit, _ = BOUNDS[growth.resource]
        if not growth.is_flat:
            size = " MiB" if unit > 1 else ""
            wide.print(f"{growth.process}: {growth.resource} grows by {growth.per_minute:.2f}{size} a minute")
    for account in played.accounts:
        if not account.adds_up:
            wide.print(f"{account.name}: {account.expected:g} and {account.found:g}, may differ by {account.slack:g}")
    wide.print(_sentence(played), soft_wrap=True)


def _sentence(played: Played) -> str:
    """The run in one sentence."""
    worst = max(played.rows, key=lambda row: row.back_s, default=None)
    cost = "the share of late requests never rose"
    if worst is not None and worst.back_s:
        cost = f"after at most {worst.back_s:.1f} s ({worst.event}) the share of late requests was again as before"
    sums = f"{sum(one.adds_up for one in played.accounts)} of {len(played.accounts)} accounts add up"
    flat = f", {sum(one.is_flat for one in played.growths)} of {len(played.growths)} series are flat"
    verdict = "PASSED" if played.passed else "FAILED"
    return f"{len(played.rows)} events: {cost}; {sums}{flat if played.growths else ''}: {verdict}."
