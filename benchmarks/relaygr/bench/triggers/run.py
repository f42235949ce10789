"""The runs of the trigger processes, and the output of their figures. `__main__` describes the figures."""

from __future__ import annotations

import itertools
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from confluent_kafka import TopicPartition
from rich.console import Console
from rich.table import Table

from relaygr.admission.settings import AdmissionSettings
from relaygr.bench.rows import append_rows, machine, now
from relaygr.bench.small_relay import own_prefix
from relaygr.demo.processes import CommandProcess, Processes, read_metrics, write_config
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.kafka.clients import ProducerKind, make_assigned_consumer, make_group_consumer, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.codec import encode
from relaygr.schemas.messages import HistoryVersion, LatencyCoefficients, RetrievalEvent, WorkerState, WorkerStatus
from relaygr.schemas.topics import Topic
from relaygr.settings import Settings

PARTITIONS: Final = 24
JOB_US: Final = 2_000
HIT_US: Final = 10_000
"""A few hundred rankings a second fill the device, so jobs get their guaranteed share and no more."""
FULL_US: Final = 20_000
"""Device time of a request without a prefix: more than the budget, so that every event is at risk."""
BUDGET_MS: Final = 10
LEAD_US: Final = 600_000_000
TOLERANCE: Final = 0.05
STATUS_S: Final = 0.3
START_S: Final = 120.0
TABLE_WIDTH: Final = 130
_POLL_S: Final = 0.05
_SETTLE_S: Final = 2.0
_ANSWER_S: Final = 10.0
_TURN_S: Final = 0.005
_ENCODE_S: Final = 25e-6
"""An upper bound of the time to encode an event."""
_FROM, _UNTIL = 0.15, 0.75
"""The part of a drain that is measured: all processes read, and none has run out of events."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    processes: tuple[int, ...]
    events: int
    load: float
    seconds: float


@dataclass(frozen=True, slots=True)
class TriggerRow:
    """The figures of one run."""

    measured_at: str
    machine: str
    broker: str
    phase: str
    processes: str
    seconds: float
    offered_per_s: float
    """0 for a drain."""
    decided_per_s: float
    jobs: int
    budget_jobs: float
    ratio: float
    kept: bool
    age_p99_ms: float
    """Upper bound of a histogram's bucket; infinite for a drain, whose events are old."""


def measure_triggers(plan: Plan, broker: str, out: Path, json_file: Path | None) -> list[TriggerRow]:
    """Measures every phase, prints the rows, appends them to `out`. Raises RelayError if a process does not start."""
    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    rows: list[TriggerRow] = []
    with tempfile.TemporaryDirectory(prefix="relaygr-triggers-") as folder, local_broker(broker) as started:
        console.print(f"broker: {started.what}", soft_wrap=True)
        most_per_s: dict[int, float] = {}
        for count in plan.processes:
            with _Run(started, Path(folder), f"triggers-{count}").running() as run:
                rows.append(run.drain(count, plan.events * count))
                most_per_s[count] = rows[-1].decided_per_s
                rate_per_s = plan.load * most_per_s[count]
                rows.append(run.offer("steady", str(count), rate_per_s, plan.seconds, lambda _: None))
        with _Run(started, Path(folder), "triggers-rebalance").running() as run:
            rate_per_s = plan.load * most_per_s[min(most_per_s)]
            rows.append(run.rebalance(rate_per_s, plan.seconds))
    console.print(_table(rows))
    append_rows(out, [asdict(row) for row in rows])
    console.print(f"appended to {out}")
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    return rows


class _Run:
    """Topics of its own, the worker's statuses, and the trigger processes."""

    def __init__(self, broker: LocalBroker, folder: Path, name: str) -> None:
        prefix = own_prefix(broker, name)
        kafka = KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=PARTITIONS)
        # The worker's status may be late on a busy machine.
        trigger = {"status_stale_ms": 60_000, "rebuild_s": 0}
        self._settings = Settings.model_validate({**broker.settings(kafka).model_dump(), "trigger": trigger})
        self._broker = broker
        self._folder = folder / name
        self._folder.mkdir()
        write_config(self._settings, self._folder / "settings.yaml")
        self._processes = Processes(self._folder, self._folder / "settings.yaml")
        self._producer = make_producer(self._settings, ProducerKind.DURABLE, "bench-events")
        self._users = itertools.count()
        self._names = itertools.count()
        self._decided_by_ended = 0
        self._stopping = threading.Event()

    @contextmanager
    def running(self) -> Iterator[_Run]:
        """With the topics and the statuses; the processes end with it."""
        self._broker.create_topics(self._settings)
        statuses = threading.Thread(target=self._send_statuses, daemon=True)
        statuses.start()
        try:
            with self._processes:
                yield self
        finally:
            self._stopping.set()
            statuses.join()
            self._broker.delete_topics(self._settings)

    def drain(self, count: int, events: int) -> TriggerRow:
        """`count` processes read `events` that are there already."""
        self._commit_the_start()
        self._send(self._encoded(events, time.time()))
        self._producer.flush(60)
        children = [self._start() for _ in range(count)]
        counts = [(time.time(), 0)]
        while counts[-1][1] < events:
            self._processes.require_running()
            counts.append((time.time(), self._decided(children)))
            time.sleep(_POLL_S)
        until = next(place for place, look in enumerate(counts) if look[1] >= _UNTIL * events)
        # All may be read between two looks: then from the one before.
        begin = min(next(place for place, look in enumerate(counts) if look[1] >= _FROM * events), until - 1)
        (from_s, first), (until_s, last) = counts[begin], counts[until]
        return self._row("drain", str(count), 0.0, from_s, until_s, last - first, float("inf"))

    def offer(
        self, phase: str, processes: str, rate_per_s: float, seconds: float, each_turn: Callable[[float], None]
    ) -> TriggerRow:
        """Sends `rate_per_s` events a second."""
        count = int(rate_per_s * (_SETTLE_S + seconds))
        begin_s = time.time() + count * _ENCODE_S
        events = iter(self._encoded(count, begin_s, rate_per_s))
        time.sleep(max(0.0, begin_s - time.time()))
        self._paced(events, rate_per_s, _SETTLE_S, lambda _: None)
        ages, before, from_s = self._ages(), self._decided(self._processes.running), time.time()
        self._paced(events, rate_per_s, seconds, each_turn)
        until_s, after = time.time(), self._decided(self._processes.running) + self._decided_by_ended
        return self._row(phase, processes, rate_per_s, from_s, until_s, after - before, _p99_ms(ages, self._ages()))

    def rebalance(self, rate_per_s: float, seconds: float) -> TriggerRow:
        """One process, then two, then three, then two again."""
        first = self._start()
        self._await_ready(first)
        others: list[CommandProcess] = []
        steps = [(0.1, lambda: others.append(self._start())), (0.4, lambda: others.append(self._start())),
                 (0.7, lambda: self._end(others[0]))]  # fmt: skip

        def step(passed_s: float) -> None:
            if steps and passed_s >= steps[0][0] * 2 * seconds:
                steps.pop(0)[1]()

        return self.offer("rebalance", "1 2 3 2", rate_per_s, 2 * seconds, step)

    def _row(
        self,
        phase: str,
        processes: str,
        offered_per_s: float,
        from_s: float,
        until_s: float,
        decided: float,
        age: float,
    ) -> TriggerRow:
        seconds = until_s - from_s
        budget = AdmissionSettings().preinfer_share * seconds * 1e6 / JOB_US
        jobs = self._jobs_between(from_s, until_s)
        return TriggerRow(
            measured_at=now(),
            machine=machine(),
            broker=self._broker.what.split(" at ")[0],
            phase=phase,
            processes=processes,
            seconds=round(seconds, 2),
            offered_per_s=round(offered_per_s, 1),
            decided_per_s=round(decided / seconds, 1),
            jobs=jobs,
            budget_jobs=round(budget, 1),
            ratio=round(jobs / budget, 4),
            kept=(1 - TOLERANCE if offered_per_s else 0) <= jobs / budget <= 1 + TOLERANCE,
            age_p99_ms=age,
        )

    # Events and statuses.

    def _encoded(self, count: int, begin_s: float, rate_per_s: float = float("inf")) -> list[tuple[str, bytes]]:
        """Events with their keys, to be sent from a wall time on. To encode them takes as long as to decide."""
        found = []
        for place in range(count):
            number, at_us = next(self._users), int((begin_s + place / rate_per_s) * 1e6)
            event = RetrievalEvent(
                f"bench.1.{number}", f"user-{number}", at_us, at_us + LEAD_US, BUDGET_MS, 100, 0,
                history_version=HistoryVersion(1, 1000, bytes(16)),
            )  # fmt: skip
            found.append((event.user_id, encode(event)))
        return found

    def _send(self, events: Iterable[tuple[str, bytes]]) -> None:
        topic = self._settings.topic(Topic.RETRIEVAL)
        for key, value in events:
            while True:
                try:
                    self._producer.produce(topic, value, key)
                    break
                except BufferError:
                    self._producer.poll(_POLL_S)
        self._producer.poll(0)

    def _paced(
        self, events: Iterator[tuple[str, bytes]], rate_per_s: float, seconds: float, each_turn: Callable[[float], None]
    ) -> None:
        """Sends the next events for some seconds. `each_turn` gets the seconds so far."""
        began_s, sent = time.monotonic(), 0
        while (passed_s := time.monotonic() - began_s) < seconds:
            due = int(passed_s * rate_per_s) - sent
            self._send(itertools.islice(events, due))
            sent += due
            each_turn(passed_s)
            time.sleep(_TURN_S)

    def _send_statuses(self) -> None:
        status = WorkerStatus(
            worker_id="worker-00", state=WorkerState.READY, written_at_us=0, assignment_epoch=1,
            partitions=tuple(range(PARTITIONS)), model_revision="bench", kv_bytes_per_token=1, contextual_tokens=0,
            tokens_per_behaviour=1, max_prefix_behaviours=8192, hbm_capacity_bytes=2**50, hbm_free_bytes=2**50,
            dram_capacity_bytes=0, dram_free_bytes=0, ranking_queue_p99_us=0, preinfer_queue_us=0,
            latency=LatencyCoefficients(FULL_US, 0, 0, JOB_US, 0, 0, HIT_US, 0, 0, 0, 0),
        )  # fmt: skip
        producer = make_producer(self._settings, ProducerKind.LATENCY, "bench-statuses")
        while not self._stopping.wait(STATUS_S):
            fresh = encode(replace(status, written_at_us=time.time_ns() // 1000))
            producer.produce(self._settings.topic(Topic.WORKERS), fresh, status.worker_id)
            producer.poll(0)
        producer.flush(1)

    # The processes.

    def _start(self) -> CommandProcess:
        name = f"trigger-{next(self._names):02d}"
        return self._processes.start(name, ["trigger"], "trigger", [f"trigger.instance_id={name}"])

    def _await_ready(self, *children: CommandProcess) -> None:
        self._processes.await_ready(children, START_S)

    def _end(self, child: CommandProcess) -> None:
        self._decided_by_ended += self._decided([child])
        self._processes.stop([child])

    def _decided(self, children: Sequence[CommandProcess]) -> int:
        """Events that these processes have decided; a process that does not answer yet has none."""
        total = 0.0
        for child in children:
            try:
                total += read_metrics(child.port).total("relaygr_trigger_decisions_total")
            except (RelayError, OSError):
                continue
        return int(total)

    def _ages(self) -> dict[float, float]:
        """The histogram of the time to a decision: events by upper bound in seconds, cumulative."""
        found: dict[float, float] = {}
        for child in self._processes.running:
            try:
                buckets = read_metrics(child.port).by_label("relaygr_trigger_event_age_seconds_bucket", "le")
            except (RelayError, OSError):
                continue
            for bound, count in buckets.items():
                found[float(bound)] = found.get(float(bound), 0.0) + count
        return found

    # Offsets.

    def _commit_the_start(self) -> None:
        """A trigger whose group has no commit would begin at the end."""
        consumer = make_group_consumer(self._settings, self._settings.trigger_group, "bench-start")
        topic = self._settings.topic(Topic.RETRIEVAL)
        consumer.commit(offsets=[TopicPartition(topic, part, 0) for part in range(PARTITIONS)], asynchronous=False)
        consumer.close()

    def _jobs_between(self, from_s: float, until_s: float) -> int:
        """Jobs with time stamps from one wall time to another."""
        consumer, topic = make_assigned_consumer(self._settings, "bench-jobs"), self._settings.topic(Topic.PREINFER)
        ends = {
            part: consumer.get_watermark_offsets(TopicPartition(topic, part), timeout=_ANSWER_S)[1]
            for part in range(PARTITIONS)
        }

        def before(at_s: float) -> int:
            asked = [TopicPartition(topic, part, int(at_s * 1000)) for part in ends]
            found = consumer.offsets_for_times(asked, timeout=_ANSWER_S)
            return sum(place.offset if place.offset >= 0 else ends[place.partition] for place in found)

        jobs = before(until_s) - before(from_s)
        consumer.close()
        return jobs


def _p99_ms(before: Mapping[float, float], after: Mapping[float, float]) -> float:
    """The bound of the bucket that holds the P99 of what was added to a cumulative histogram."""
    added = {bound: max(0.0, count - before.get(bound, 0.0)) for bound, count in after.items()}
    total = max(added.values(), default=0.0)
    return 1e3 * min((bound for bound, count in added.items() if count >= 0.99 * total), default=float("nan"))


def _table(rows: Sequence[TriggerRow]) -> Table:
    table = Table(title="Trigger processes that share one budget")
    for name in ("phase", "processes", "offered/s", "decided/s", "jobs", "budget", "ratio", "age P99 ms"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.phase, row.processes, f"{row.offered_per_s:,.0f}", f"{row.decided_per_s:,.0f}", f"{row.jobs:,}",
            f"{row.budget_jobs:,.0f}", f"{row.ratio:.3f}", f"{row.age_p99_ms:.0f}",
        )  # fmt: skip
    return table
