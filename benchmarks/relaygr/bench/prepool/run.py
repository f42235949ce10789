"""The run of `benchmarks.prepool`."""

from __future__ import annotations

import enum
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import typer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewPartitions

from relaygr.bench.rows import append_rows, code, machine, now, refuse_other_columns
from relaygr.client import QueueFull, RelayClient
from relaygr.demo.pool import local_pool, require_pool
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.kafka.clients import ONE_A_BATCH, ProducerKind, make_admin, make_assigned_consumer, make_producer
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess, Processes, read_metrics, write_config
from relaygr.schemas.codec import decode, encode
from relaygr.schemas.headers import PREPARED_BY
from relaygr.schemas.messages import Behaviours, History, PreInferJob
from relaygr.schemas.topics import Topic
from relaygr.settings import Settings
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.pool.settings import PoolSettings
from relaygr.worker.pool.stores import STORES

LOADS: Final = (1, 2, 4, 5)
WORKERS: Final = 2
SLOTS: Final = 2
LENGTH: Final = 2048
FOLLOWED: Final = 1024
"""The length of the histories that are only followed."""
BUDGET_MS: Final = 100
BACKLOG: Final = 50
AT_ONCE: Final = 200
"""Histories that wait in the client."""
VOCABULARY: Final = 10_000
SETTLE_S: Final = 3.0
WAIT_S: Final = 180.0


class Mode(enum.StrEnum):
    """How workers get their jobs."""

    FORWARDING = "forwarding"
    QUEUES = "queues"


@dataclass(frozen=True, slots=True)
class Row:
    """One load."""

    at: str
    code: str
    machine: str
    mode: Mode
    load: int
    capacity_per_s: float
    sent: int
    accepted: int
    in_time: int

    @property
    def share(self) -> float:
        """Of the accepted jobs."""
        return self.in_time / max(1, self.accepted)


@dataclass
class Ready:
    """When the owner of each prepared job was told, in µs since the epoch, by request id."""

    kafka: KafkaSettings
    told_us: dict[str, int] = field(default_factory=dict)
    ending: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        consumer = make_assigned_consumer(self.kafka, "bench-ready")
        topic = self.kafka.topic(Topic.PREINFER)
        consumer.assign([TopicPartition(topic, each, 0) for each in range(self.kafka.partitions)])
        while not self.ending.is_set():
            for message in consumer.consume(100, 0.1):
                if message.error() is None and PREPARED_BY in dict(headers_of(message) or ()):
                    self.told_us[decode(PreInferJob, message.value()).request_id] = message.timestamp()[1] * 1000
        consumer.close()


@dataclass
class Fleet:
    """Running workers, and the user whose job is sent next."""

    kafka: KafkaSettings
    processes: Processes
    workers: Sequence[CommandProcess]
    client: RelayClient
    ready: Ready
    users: int = 0

    def await_so(self, what: str, is_so: Callable[[], bool]) -> None:
        self.processes.await_so(what, is_so, WAIT_S)

    def total(self, name: str, **labels: str) -> int:
        return int(sum(read_metrics(each.port).total(name, **labels) for each in self.workers))

    def jobs(self, event: str) -> int:
        return self.total("relaygr_preinfer_pool_jobs_total", event=event)

    def publish(self, count: int) -> list[History]:
        """New users, whose histories every worker has then."""
        histories = [_history(self.users + each) for each in range(count)]
        for history in histories:
            self.client.publish_history(history)
            self.users += 1
            if self.users % AT_ONCE == 0 or history is histories[-1]:
                self.await_so(
                    "the histories are there",
                    lambda: self.total("relaygr_history_users") == WORKERS * self.users,
                )
        return histories

    def send(self, histories: Sequence[History], at_s: Sequence[float], lead_ms: int) -> dict[str, int]:
        """A job of each user at its time. When each is due, µs since the epoch, by request id."""
        producer = make_producer(self.kafka, ProducerKind.PREINFER, "bench-jobs", options=ONE_A_BATCH)
        topic, began_s, due = self.kafka.topic(Topic.PREINFER_POOL), time.monotonic(), {}
        for history, due_s in zip(histories, at_s, strict=True):
            time.sleep(max(0.0, began_s + due_s - time.monotonic()))
            job = _job(history, lead_ms)
            producer.produce(topic, encode(job), history.user_id)
            producer.poll(0)
            due[job.request_id] = job.expected_ranking_at_us
        producer.flush(10)
        return due


def run(seconds: float, lead_ms: int, out: Path) -> None:
    """Prints and appends a row for each mode and load. Raises RelayError without a store or a real Kafka."""
    require_pool()
    refuse_other_columns(out, Row.__dataclass_fields__)
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="relaygr-prepool-") as name,
        local_broker("kafka") as broker,
        local_pool(Path(name) / "pool") as pool,
    ):
        model = _save_model(Path(name) / "model")
        capacity_per_s = 0.0
        for mode in Mode:
            with _fleet(Path(name) / mode, broker, pool, model, mode) as fleet:
                capacity_per_s = capacity_per_s or _capacity(fleet)
                for load in LOADS:
                    _empty(pool, fleet.kafka.topic_prefix)
                    rows.append(_measure(fleet, mode, load, capacity_per_s, seconds, lead_ms))
                    _print(rows[-1], seconds)
    append_rows(out, [asdict(row) for row in rows])


def follow(users: int) -> None:
    """Prints what the histories of so many users cost a pre-infer worker, and the size of a job that brings one along.

    Raises RelayError without a store or a real Kafka.
    """
    require_pool()
    with (
        tempfile.TemporaryDirectory(prefix="relaygr-prepool-") as name,
        local_broker("kafka") as broker,
        local_pool(Path(name) / "pool") as pool,
    ):
        folder = Path(name)
        kafka = _make_cluster(folder, broker, pool, _save_model(folder / "model"), Mode.FORWARDING)
        with RelayClient(kafka, "bench") as client:
            for number in range(users):
                _publish(client, _history(number, FOLLOWED))
        with Processes(folder, folder / "settings.yaml") as processes:
            for start in ("first", "second"):
                began_s = time.monotonic()
                worker = _start(processes, folder, 0, Mode.FORWARDING)
                processes.await_ready([worker], 10 * WAIT_S)
                typer.echo(f"{start} start: ready after {time.monotonic() - began_s:.0f} s")
                assert read_metrics(worker.port).total("relaygr_history_users") == users
                processes.stop([worker])
        disk_bytes = sum(each.stat().st_blocks * 512 for each in (folder / "0").rglob("*"))
        typer.echo(f"{users} users of {FOLLOWED} behaviours: {disk_bytes / 2**20:.0f} MiB on the worker's disk")
        history = _history(0, FOLLOWED)
        job = _job(history, 1000)
        with_history = replace(job, history_version=None, history=history)
        typer.echo(f"a job: {len(encode(job))} bytes, with its history {len(encode(with_history))}")


def _empty(pool: PoolSettings, prefix: str) -> None:
    assert pool.url is not None
    STORES[pool.url.scheme].open_store(pool.url, prefix, ()).forget(None)


def _publish(client: RelayClient, history: History) -> None:
    while True:
        try:
            return client.publish_history(history)
        except QueueFull:
            time.sleep(0.01)


def _job(history: History, lead_ms: int) -> PreInferJob:
    now_us = time.time_ns() // 1000
    return PreInferJob(
        uuid.uuid4().hex, history.user_id, now_us, now_us + lead_ms * 1000, BUDGET_MS, 100, 0, now_us,
        history_version=history.version(),
    )  # fmt: skip


def _capacity(fleet: Fleet) -> float:
    """Jobs a second, of a backlog in which each has much time. The first half touches all memory for the first time."""
    due = fleet.send(fleet.publish(2 * BACKLOG), [0.0] * 2 * BACKLOG, 60_000)
    fleet.await_so("the backlog is computed", lambda: due.keys() <= fleet.ready.told_us.keys())
    told_us = sorted(fleet.ready.told_us[each] for each in due)[BACKLOG:]
    return (BACKLOG - 1) / (told_us[-1] - told_us[0]) * 1e6


def _measure(fleet: Fleet, mode: Mode, load: int, capacity_per_s: float, seconds: float, lead_ms: int) -> Row:
    arrivals = np.random.default_rng(load).uniform(0, seconds, round(load * capacity_per_s * seconds))
    histories, accepted = fleet.publish(arrivals.size), fleet.jobs("accepted")
    due = fleet.send(histories, np.sort(arrivals).tolist(), lead_ms)
    time.sleep(lead_ms / 1000 + SETTLE_S)
    in_time = sum(fleet.ready.told_us.get(each, due_us + 1) <= due_us for each, due_us in due.items())
    taken = fleet.jobs("accepted") - accepted if mode is Mode.FORWARDING else len(due)
    return Row(now(), code(), machine(), mode, load, round(capacity_per_s, 1), len(due), taken, in_time)


def _print(row: Row, seconds: float) -> None:
    typer.echo(
        f"{row.mode:<11} load {row.load}: sent {row.sent:4} accepted {row.accepted:4} in time {row.share:6.1%} "
        f"ready a second {row.in_time / seconds:5.1f} (capacity {row.capacity_per_s:.1f})"
    )


@contextmanager
def _fleet(folder: Path, broker: LocalBroker, pool: PoolSettings, model: Path, mode: Mode) -> Iterator[Fleet]:
    folder.mkdir()
    kafka = _make_cluster(folder, broker, pool, model, mode)
    ready = Ready(kafka)
    reader = threading.Thread(target=ready.read)
    with Processes(folder, folder / "settings.yaml") as processes, RelayClient(kafka, "bench") as client:
        reader.start()
        try:
            workers = []
            for number in range(WORKERS):
                # One after the other: each measures its device at its start.
                workers.append(_start(processes, folder, number, mode))
                processes.await_ready(workers, WAIT_S)
            fleet = Fleet(kafka, processes, workers, client, ready)
            _warm(fleet)
            yield fleet
        finally:
            ready.ending.set()
            reader.join()


def _make_cluster(folder: Path, broker: LocalBroker, pool: PoolSettings, model: Path, mode: Mode) -> KafkaSettings:
    """Makes the topics, and writes the workers' settings."""
    name = f"bench-{mode}"
    kafka = broker.settings(KafkaSettings(topic_prefix=name, group_prefix=name, partitions=8))
    broker.create_topics(kafka)
    if mode is Mode.QUEUES:
        admin, wanted = make_admin(kafka, "bench"), NewPartitions(kafka.topic(Topic.PREINFER_POOL), WORKERS * SLOTS)
        [grown] = admin.create_partitions([wanted]).values()
        grown.result()
    worker = {
        "model": model, "device": "cpu", "hbm_bytes": 64 << 20, "dram_bytes": 64 << 20,
        "shared_path": folder / "shared", "history_max_bytes": 16 << 30, "pre_infer_slots": SLOTS,
        "pool": pool.model_copy(update={"prefix": name}),
    }  # fmt: skip
    write_config(Settings(**kafka.model_dump(), worker=worker), folder / "settings.yaml")
    return kafka


def _start(processes: Processes, folder: Path, number: int, mode: Mode) -> CommandProcess:
    own = [f"worker.worker_id=pre-infer-{number}", f"worker.history_path={folder / str(number)}"]
    module = "relaygr.bench.prepool.queued" if mode is Mode.QUEUES else "relaygr"
    return processes.start(f"pre-infer-{number}", ["worker", "--role", "pre-infer"], "worker", own, [module])


def _warm(fleet: Fleet) -> None:
    """Until every worker is a member of the group, and knows how long jobs take."""

    def has_each() -> bool:
        fleet.send(fleet.publish(8), [each / 4 for each in range(8)], 20_000)
        return all(
            read_metrics(each.port).total("relaygr_preinfer_pool_jobs_total", event="prepared") >= 8
            for each in fleet.workers
        )

    fleet.await_so("every worker has jobs", has_each)


def _history(number: int, length: int = LENGTH) -> History:
    random = np.random.default_rng(number)
    behaviours = Behaviours(
        random.integers(0, VOCABULARY, length, dtype=np.int64),
        np.zeros(length, np.uint16),
        np.arange(length, dtype=np.int64) * 60_000 + 1_700_000_000_000,
    )
    return History(f"user-{number}", 1, np.empty(0, np.int64), behaviours)


def _save_model(folder: Path) -> Path:
    """A model that takes a CPU core about a tenth of a second for a prefix."""
    config = ModelConfig(
        embedding_dim=512, num_heads=2, attention_dim=32, hidden_dim=32, num_layers=4, normalizer=float(LENGTH),
        vocabulary_size=VOCABULARY, num_positions=LENGTH + 128, max_prefix_behaviours=LENGTH,
    )  # fmt: skip
    save_checkpoint(folder, config, random_checkpoint(config, 1).tensors)
    return folder
