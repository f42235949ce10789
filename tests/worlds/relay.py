"""A relay of real processes for the pipeline tests: workers and a trigger, a gateway's client, and raw producers."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from confluent_kafka import Consumer, Message, TopicPartition
from prometheus_client import CollectorRegistry
from pydantic import ByteSize

from relaygr.client import RelayClient
from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import ProducerKind, make_assigned_consumer, make_group_consumer, make_producer
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess, Processes, read_metrics, write_config
from relaygr.runtime.clock import SystemClock
from relaygr.schemas import codec
from relaygr.schemas.headers import RankingHeaders, ResultHeaders
from relaygr.schemas.messages import Behaviours, History, LatencyCoefficients, RankingRequest, RankingResult
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.settings import Settings
from relaygr.ui.scrape import Reading
from relaygr.worker.calibration import Calibration, describe, save_calibration
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.engine import load_engine
from relaygr.worker.model.options import ContextualFeature, Task, TaskKind
from relaygr.worker.settings import WorkerSettings
from tests.waiting import PATIENCE_S, until

PARTITIONS = 12
MAX_PREFIX = 1024
MAX_CANDIDATES = 64
VOCABULARY = 500
START_TIMEOUT_S = 180.0

COEFFICIENTS = LatencyCoefficients(
    # Full inference is said to take 200 s, so that every event is at risk, though the worker finds that an eighth of it
    # is the most that it can believe; what it decides by itself is real enough.
    a0=200e6, a1=0, a2=0, b0=500, b1=10, b2=0.001, c0=500, c1=10, c2=0.001, d0=200, d1=0.0001,
)  # fmt: skip


COUNTRY = ContextualFeature(name="country", cardinality=8)


def model_config(contextual_features: tuple[ContextualFeature, ...] = (COUNTRY,)) -> ModelConfig:
    """A small model with two tasks."""
    return ModelConfig(
        embedding_dim=32,
        num_heads=2,
        attention_dim=16,
        hidden_dim=16,
        num_layers=2,
        normalizer=200.0,
        vocabulary_size=VOCABULARY,
        num_actions=4,
        num_positions=MAX_PREFIX + 64,
        contextual_features=contextual_features,
        tasks=(Task(name="click"), Task(name="watch", kind=TaskKind.REGRESSION)),
        max_prefix_behaviours=MAX_PREFIX,
        max_suffix_behaviours=32,
        max_candidates=MAX_CANDIDATES,
    )


def make_model(folder: Path, seed: int = 7, contextual_features: tuple[ContextualFeature, ...] = (COUNTRY,)) -> Path:
    """A small random checkpoint, and its calibration beside it."""
    config = model_config(contextual_features)
    return save_model(folder, config, random_checkpoint(config, seed).tensors)


def save_model(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    latency: LatencyCoefficients = COEFFICIENTS,
) -> Path:
    """A checkpoint, and its calibration beside it."""
    save_checkpoint(folder, config, tensors)
    defaults = WorkerSettings()
    engine = load_engine(folder, "cpu", defaults.kv_dtype, defaults.page_tokens, defaults.threads)
    now = datetime.now(UTC).isoformat()
    save_calibration(Calibration(describe(engine), now, latency, (), (), (), ()), folder / "calibration.json")
    return folder


def history_of(user_id: str, length: int, seed: int = 0, number: int | None = None) -> History:
    """The first `length` behaviours of an endless sequence that the seed names."""
    random = np.random.default_rng(seed)
    items = random.integers(0, VOCABULARY, MAX_PREFIX * 2)[:length]
    actions = random.integers(0, 4, MAX_PREFIX * 2)[:length]
    behaviours = Behaviours(
        items.astype("<i8"), actions.astype("<u2"), 1_700_000_000_000 + np.arange(length, dtype="<i8") * 60_000
    )
    return History(user_id, length if number is None else number, np.array([seed % 8], "<i8"), behaviours)


def candidates_of(count: int = 20, seed: int = 0) -> np.ndarray:
    """Distinct item ids."""
    return np.random.default_rng((9, seed)).permutation(VOCABULARY)[:count].astype(np.int64)


def new_user(name: str = "user") -> str:
    """An id that no other test has."""
    return f"{name}-{uuid.uuid4().hex[:10]}"


@contextmanager
def own_topics(broker: LocalBroker, **fields: Any) -> Iterator[KafkaSettings]:
    """Topics and groups that nobody else has, on `broker`."""
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    settings = broker.settings(
        KafkaSettings(
            topic_prefix=prefix,
            group_prefix=prefix,
            partitions=PARTITIONS,
            dead_letter_bodies=True,
            connect_timeout_s=PATIENCE_S,
            **fields,
        )
    )
    broker.create_topics(settings)
    yield settings
    broker.delete_topics(settings)


class Relay:
    """Processes on topics of their own. Used as a context, which stops all of them."""

    def __init__(self, kafka: KafkaSettings, folder: Path, model: Path, **worker: Any) -> None:
        self.kafka = kafka
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        defaults = {
            "model": model,
            "calibration": model / "calibration.json",
            "device": "cpu",
            "hbm_bytes": ByteSize(1 << 20),
            "dram_bytes": ByteSize(8 << 20),
            "history_max_bytes": ByteSize(64 << 20),
            "shared_path": folder / "shared",
            "status_interval_ms": 100,
        }
        # Buckets that no test empties: what they refuse is tested elsewhere.
        admission = {"burst_ms": 60_000, "load_limit": 1.0, "footprint_reserve": 0.0}
        self.settings = Settings(**kafka.model_dump(), worker=defaults | worker, admission=admission)
        config = folder / "settings.yaml"
        write_config(self.settings, config)
        self.processes = Processes(folder, config)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.stop(self.processes.running)

    def start_worker(
        self,
        worker_id: str = "worker-00",
        *settings: str,
        store: str | None = None,
        command: Sequence[str] = ("worker",),
    ) -> CommandProcess:
        own = [f"worker.worker_id={worker_id}", f"worker.history_path={self.folder / (store or worker_id)}", *settings]
        return self.processes.start(worker_id, command, "worker", own)

    def start_trigger(self, *settings: str) -> CommandProcess:
        return self.processes.start("trigger", ["trigger"], "trigger", settings)

    def await_ready(self, *children: CommandProcess) -> None:
        self.processes.await_ready(children, START_TIMEOUT_S)

    def stop(self, child: CommandProcess) -> int:
        """SIGTERM; the exit code. A busy machine has all the time that a test has."""
        child.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(60)
        self.processes.stop([child])
        return child.process.returncode

    def kill(self, child: CommandProcess) -> None:
        """kill -9."""
        child.process.kill()
        child.process.wait()
        self.forget(child)

    def forget(self, child: CommandProcess) -> None:
        """It ended in a way that the test expects."""
        self.processes.stop([child])

    def process_ids(self) -> set[int]:
        """Of the processes that run."""
        return {child.process.pid for child in self.processes.running}

    def client(self, **callbacks: Any) -> RelayClient:
        """A gateway's client, not yet started."""
        return RelayClient(self.kafka, f"gw-{uuid.uuid4().hex[:6]}", registry=CollectorRegistry(), **callbacks)

    def committed(self, topic: Topic) -> dict[int, int]:
        """The workers' committed offsets; partitions without one are left out."""
        consumer = make_group_consumer(self.kafka, self.kafka.workers_group, "test-offsets")
        places = [TopicPartition(self.kafka.topic(topic), partition) for partition in range(self.kafka.partitions)]
        found = {tp.partition: tp.offset for tp in consumer.committed(places, timeout=10) if tp.offset >= 0}
        consumer.close()
        return found

    def ends(self, topic: Topic) -> dict[int, int]:
        """The end offset of each partition that holds something."""
        consumer = make_assigned_consumer(self.kafka, "test-ends")
        name = self.kafka.topic(topic)
        count = len(consumer.list_topics(name, timeout=10).topics[name].partitions)
        ends = {p: consumer.get_watermark_offsets(TopicPartition(name, p), timeout=10)[1] for p in range(count)}
        consumer.close()
        return {partition: end for partition, end in ends.items() if end}

    def await_all_committed(self, *topics: Topic) -> None:
        """Until nothing of these topics is unfinished."""
        for topic in topics:
            ends = self.ends(topic)

            def is_committed(topic: Topic = topic, ends: dict[int, int] = ends) -> bool:
                committed = self.committed(topic)
                return all(committed.get(partition, 0) >= end for partition, end in ends.items())

            until(is_committed, f"{topic} committed up to {ends}")


def reading(child: CommandProcess) -> Reading:
    """What the process counts now."""
    return read_metrics(child.port)


def jobs_done(*workers: CommandProcess) -> dict[str, float]:
    """Pre-infer jobs by outcome, of all workers."""
    totals: dict[str, float] = {}
    for worker in workers:
        for outcome, count in reading(worker).by_label("relaygr_worker_preinfer_jobs_total", "outcome").items():
            totals[outcome] = totals.get(outcome, 0.0) + count
    return {outcome: count for outcome, count in totals.items() if count}


def computed_ahead(client: RelayClient, worker: CommandProcess, history: History, **event: Any) -> str:
    """Publishes a history and the event of a request whose prefix a job computes. Returns the request's id."""
    client.publish_history(history)
    before = jobs_done(worker).get("computed", 0)
    published = client.publish_retrieval(history.user_id, history_version=history.version(), **event)
    until(lambda: jobs_done(worker).get("computed", 0) > before, "a job that was computed", 60)
    return published.request_id


@dataclass
class RawGateway:
    """Produces what it is told, byte by byte, and reads the answers on results partition 0."""

    kafka: KafkaSettings
    gateway_id: str = field(default_factory=lambda: f"raw-{uuid.uuid4().hex[:8]}")
    sent: int = 0
    answers: dict[str, list[RankingResult]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._producer = make_producer(self.kafka, ProducerKind.DURABLE, self.gateway_id)
        self._consumer = make_assigned_consumer(self.kafka, self.gateway_id)
        place = TopicPartition(self.kafka.topic(Topic.RESULTS), 0)
        place.offset = self._consumer.get_watermark_offsets(place, timeout=10)[1]
        self._consumer.assign([place])

    def close(self) -> None:
        self._producer.flush(5)
        self._consumer.close()

    def headers(self, budget_ms: float = 5_000, **changes: Any) -> RankingHeaders:
        self.sent += 1
        values: dict[str, Any] = {
            "request_id": f"{self.gateway_id}.0.{self.sent}",
            "gateway_id": self.gateway_id,
            "reply_topic": self.kafka.topic(Topic.RESULTS),
            "reply_partition": 0,
            "deadline_us": SystemClock().wall_us() + int(budget_ms * 1000),
        }
        return RankingHeaders(**(values | changes))

    def request(self, headers: RankingHeaders, user_id: str, **changes: Any) -> RankingRequest:
        now_us = SystemClock().wall_us()
        values: dict[str, Any] = {
            "request_id": headers.request_id,
            "user_id": user_id,
            "sent_at_us": now_us,
            "deadline_us": headers.deadline_us,
            "query_time_ms": now_us // 1000,
            "candidates": candidates_of(),
            "suffix": Behaviours.empty(),
        }
        return RankingRequest(**(values | changes))

    def send(
        self,
        topic: Topic | str,
        value: bytes | None,
        key: bytes | None = b"some-user",
        headers: Sequence[tuple[str, bytes]] | None = None,
        partition: int | None = None,
    ) -> None:
        """Raises AssertionError if the broker does not take it."""
        errors: list[Any] = []
        where = {} if partition is None else {"partition": partition}
        name = self.kafka.topic(topic) if isinstance(topic, Topic) else topic
        self._producer.produce(
            name, value, key, headers=[*(headers or ())], on_delivery=lambda error, _: errors.append(error), **where
        )
        assert self._producer.flush(10) == 0 and errors == [None]

    def rank(self, user_id: str, budget_ms: float = 5_000, **changes: Any) -> RankingHeaders:
        """Sends a request like a client of another language, and returns its headers."""
        headers = self.headers(budget_ms, **changes)
        self.send(
            Topic.RANKING, codec.encode(self.request(headers, user_id)), user_id.encode(), headers.encode(),
            partition_for(user_id.encode(), self.kafka.partitions),
        )  # fmt: skip
        return headers

    def read(self) -> None:
        """Takes in the answers that are there."""
        for message in self._consumer.consume(100, 0.05):
            try:
                reply = ResultHeaders.decode(headers_of(message))
            except codec.DecodeError:
                continue  # Garbage that a test put onto this topic too.
            if reply.gateway_id == self.gateway_id:
                self.answers.setdefault(reply.request_id, []).append(codec.decode(RankingResult, message.value()))

    def answer(self, headers: RankingHeaders, timeout_s: float = 40.0) -> RankingResult:
        """The first answer to a request."""

        def came() -> bool:
            self.read()
            return headers.request_id in self.answers

        until(came, f"an answer to {headers.request_id}", timeout_s)
        return self.answers[headers.request_id][0]


class DeadLetters:
    """What comes to the dead-letter topic from now on."""

    def __init__(self, kafka: KafkaSettings) -> None:
        name = kafka.topic(Topic.DEAD_LETTERS)
        self._consumer: Consumer = make_assigned_consumer(kafka, "test-dead-letters")
        count = len(self._consumer.list_topics(name, timeout=10).topics[name].partitions)
        places = [TopicPartition(name, partition) for partition in range(count)]
        for place in places:
            place.offset = self._consumer.get_watermark_offsets(place, timeout=10)[1]
        self._consumer.assign(places)
        self._found: list[Message] = []

    def close(self) -> None:
        self._consumer.close()

    def of(self, value: bytes | None, topic: str, timeout_s: float = 40.0, **wanted: str) -> dict[str, str]:
        """The headers of the letter that holds `value`, came from `topic` and has these headers, waited for."""
        matching: list[dict[str, str]] = []

        def came() -> bool:
            self._found += [m for m in self._consumer.consume(100, 0.05) if m.error() is None]
            for message in self._found:
                headers = {name: raw.decode(errors="replace") for name, raw in message.headers() or []}
                found = message.value() == value and headers["origin_topic"] == topic
                if found and wanted.items() <= headers.items():
                    matching.append(headers)
            return bool(matching)

        until(came, f"a dead letter of {topic}", timeout_s)
        return matching[0]


def environment() -> dict[str, str]:
    """Without settings of the caller's."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RELAYGR_") or name.startswith("RELAYGR_TEST_")
    }
