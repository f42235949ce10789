"""A worker without broker, accelerator and LMDB: the real loop, handler, executor, cache and result writer.

A fake consumer drives them. The loop's thread calls `poll`, and `poll` takes the next step of a script: it returns a
message, or runs the executor, or delivers results. So one thread does everything, in a fixed order, and the clock
does not move: every run makes the same calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from confluent_kafka import Consumer, Producer, TopicPartition
from prometheus_client import CollectorRegistry

from relaygr.admission.latency import Corrector, LatencyModel
from relaygr.admission.settings import AdmissionSettings
from relaygr.bench.path.trace import Probe, Trace
from relaygr.consumer import ConsumerLoop
from relaygr.consumer.watermark import WatermarkTracker
from relaygr.kafka.dead_letters import DeadLetterWriter
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.codec import decode, encode
from relaygr.schemas.headers import Headers, RankingHeaders
from relaygr.schemas.messages import (
    Behaviours,
    History,
    LatencyCoefficients,
    PreInferJob,
    RankingRequest,
    RankingResult,
)
from relaygr.schemas.partitioner import partition_for
from relaygr.worker.cache import CacheConfig, PrefixCache
from relaygr.worker.cache.copies import CopyForecast, CopyPriority, CopyRequest
from relaygr.worker.device import CpuDevice
from relaygr.worker.executor.admission import JobAdmission
from relaygr.worker.executor.context import ExecutorParts
from relaygr.worker.executor.executor import Executor
from relaygr.worker.handler import HandlerSettings, WorkerHandler
from relaygr.worker.history.resolve import StoredHistory
from relaygr.worker.kv import DramGeometry, KvDtype
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.checkpoint import random_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.engine import NullEngine
from relaygr.worker.model.options import Family
from relaygr.worker.results import ResultWriter
from relaygr.worker.settings import WorkerSettings

PREINFER, RANKING, RESULTS = "preinfer", "ranking", "results"
PARTITIONS = 8
PAGES = 64
HISTORY = 512
SUFFIX = 8
CANDIDATES = 64
LEAD_US, BUDGET_US = 100_000, 1_000_000
LATENCY = LatencyCoefficients(100, 2, 0, 100, 2, 0, 100, 2, 0, 100, 1e-5)
"""A prefix of `HISTORY` behaviours is computed in one chunk."""
Step = Callable[[], "FakeMessage | None"]


@dataclass(frozen=True, slots=True)
class FakeMessage:
    """Has the methods of confluent-kafka's message that the loop calls."""

    in_topic: str
    offset_: int
    user_id: str
    in_partition: int
    body: bytes
    raw_headers: Headers

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return self.in_topic

    def partition(self) -> int:
        return self.in_partition

    def offset(self) -> int:
        return self.offset_

    def key(self) -> bytes:
        return self.user_id.encode()

    def value(self) -> bytes:
        return self.body

    def headers(self) -> Headers:
        return self.raw_headers

    def timestamp(self) -> tuple[int, int]:
        return 1, 0


@dataclass(slots=True)
class FakeProducer:
    """Delivers results when `deliver` is called."""

    values: list[bytes] = field(default_factory=list)
    waiting: list[Callable[[Any, Any], None]] = field(default_factory=list)

    def produce(self, _: str, value: bytes, *__: Any, on_delivery: Callable[[Any, Any], None], **___: Any) -> None:
        self.values.append(value)
        self.waiting.append(on_delivery)

    def deliver(self) -> None:
        """Reports success."""
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call(None, None)

    def poll(self, _: float) -> int:
        return 0


class FakeDeadLetters:
    """Nothing here is a dead letter."""

    def poll(self) -> None:
        return


class FakeMover:
    """Copies nothing. `finish` ends its copies, which in a worker another thread ends."""

    def __init__(self) -> None:
        self.waiting: list[CopyRequest] = []

    def submit(self, request: CopyRequest) -> bool:
        self.waiting.append(request)
        return True

    def finish(self) -> None:
        """Ends the copies."""
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            request.on_done(True)

    def forecast(self, size_bytes: int, priority: CopyPriority) -> CopyForecast:  # noqa: ARG002
        return CopyForecast(0.0, 0.0)

    def close(self) -> None:
        return


@dataclass(slots=True)
class FakeHistories:
    """A history store without LMDB."""

    by_user: dict[str, StoredHistory] = field(default_factory=dict)

    def get(self, user_id: str) -> StoredHistory | None:
        return self.by_user.get(user_id)

    def is_loading(self, partition: int) -> bool:  # noqa: ARG002
        return False


class ScriptedConsumer:
    """Its `poll` takes the next step of the script, and stops the loop after the last step."""

    def __init__(self, steps: deque[Step]) -> None:
        self._steps = steps
        self._assign: Callable[[], None] | None = None
        self.on_end: Callable[[], None] = lambda: None

    def subscribe(self, topics: list[str], on_assign: Callable[..., None], **_: Any) -> None:
        owned = [TopicPartition(topic, partition, 0) for topic in topics for partition in range(PARTITIONS)]
        self._assign = partial(on_assign, self, owned)

    def poll(self, _: float) -> FakeMessage | None:
        if self._assign is not None:
            assign, self._assign = self._assign, None
            assign()
            return None
        if not self._steps:
            self.on_end()
            return None
        return self._steps.popleft()()

    def consume(self, *_: Any) -> list[FakeMessage]:
        return []

    def committed(self, partitions: list[TopicPartition], **_: Any) -> list[TopicPartition]:
        return partitions

    def memberid(self) -> str:
        return "member"

    def store_offsets(self, **_: Any) -> None:
        return

    def pause(self, _: Any) -> None:
        return

    def close(self) -> None:
        return


class World:
    """One worker, and a script of messages and steps."""

    def __init__(self) -> None:
        self.clock = ManualClock(monotonic_us=1_000_000)
        self.producer = FakeProducer()
        self.mover = FakeMover()
        self.histories = FakeHistories()
        self.trace = Trace((ConsumerLoop._receive, Executor.step, FakeProducer.deliver, WatermarkTracker.finish))
        self._steps: deque[Step] = deque()
        self._consumer = ScriptedConsumer(self._steps)
        self._offsets = 0
        metrics = WorkerMetrics(CollectorRegistry())
        settings, admission = WorkerSettings(), AdmissionSettings()
        checkpoint = random_checkpoint(_config(), seed=0)
        engine = NullEngine(checkpoint, CpuDevice(), KvDtype.FLOAT32, settings.page_tokens)
        scratch = engine.geometry.pages_for(engine.layout.tokens(engine.limits.max_prefix_behaviours))
        engine.bind(torch.zeros((PAGES + scratch, engine.geometry.page_bytes), dtype=torch.uint8))
        cache = PrefixCache(CacheConfig(DramGeometry(engine.geometry), engine.layout, PAGES, PAGES), self.mover)
        results = ResultWriter(
            cast(Producer, self.producer),
            settings.worker_id,
            settings.max_clock_skew_ms,
            finish=lambda token: self.loop.finish(token),
            metrics=metrics,
            clock=self.clock,
        )
        self.executor = Executor(
            engine,
            ExecutorParts(
                cache=cache,
                scratch_pages=np.arange(PAGES, PAGES + scratch, dtype=np.int32),
                copy_page=lambda _: None,
                histories=self.histories,
                corrector=Corrector(LatencyModel(LATENCY)),
                settings=settings,
                admission_settings=admission,
                admission=JobAdmission(admission, PAGES * engine.geometry.page_bytes, engine.geometry, self.clock),
                results=results,
                metrics=metrics,
                clock=self.clock,
            ),
        )
        handler = WorkerHandler(
            HandlerSettings(
                ranking_topic=RANKING,
                results_topic=RESULTS,
                partitions=PARTITIONS,
                max_clock_skew_ms=settings.max_clock_skew_ms,
                reply_margin_ms=settings.reply_margin_ms,
            ),
            self.executor,
            results,
            cast(DeadLetterWriter, FakeDeadLetters()),
            self.clock,
            on_ownership=lambda _: None,
            on_work=lambda: False,
            on_tick=lambda _: None,
        )
        self.loop = ConsumerLoop(lambda _: cast(Consumer, self._consumer), [PREINFER, RANKING], handler, self.clock)
        self._consumer.on_end = self._stop

    def pre_infer(self, user_id: str) -> None:
        """Adds to the script: the worker receives the user's pre-infer job and computes the prefix."""
        now_us = self.clock.wall_us()
        version = self.histories.by_user[user_id].version
        job = PreInferJob(
            f"r.{user_id}", user_id, now_us, now_us + LEAD_US, BUDGET_US // 1000, CANDIDATES, SUFFIX, now_us, version
        )
        self._steps.append(partial(self._message, PREINFER, user_id, encode(job), []))
        self._steps.append(self._work)

    def store_history(self, user_id: str) -> None:
        """Puts a history of the user into the history store."""
        history = History(user_id, 1, np.empty(0, "<i8"), _behaviours(HISTORY))
        self.histories.by_user[user_id] = StoredHistory(history, history.chain())

    def pause(self, seconds: float) -> None:
        """Adds a pause to the script."""
        self._steps.append(partial(time.sleep, seconds))

    def rank(self, user_id: str, probe: Probe | None = None) -> None:
        """Adds to the script: the worker receives a ranking request and answers it. `probe` measures this."""
        now_us = self.clock.wall_us()
        version = self.histories.by_user[user_id].version
        request = RankingRequest(
            f"r.{user_id}", user_id, now_us, now_us + BUDGET_US, 0, np.arange(CANDIDATES), _behaviours(SUFFIX), version
        )
        headers = RankingHeaders(request.request_id, "gateway", RESULTS, 0, request.deadline_us).encode()
        if probe is not None:
            self._steps.append(probe.begin)
        self._steps.append(partial(self._message, RANKING, user_id, encode(request), headers))
        self._steps.append(self._work)
        self._steps.append(self.producer.deliver)
        if probe is not None:
            self._steps.append(probe.end)
        self._steps.append(self.mover.finish)

    def run(self) -> list[RankingResult]:
        """Runs the script, and returns the results in the order of the requests."""
        self.loop.start()
        if not self.loop.join(60.0):
            raise RuntimeError("the script did not end")
        if self.loop.error is not None:
            raise self.loop.error
        return [decode(RankingResult, value) for value in self.producer.values]

    def _message(self, topic: str, user_id: str, value: bytes, headers: Headers) -> FakeMessage:
        self._offsets += 1
        return FakeMessage(topic, self._offsets, user_id, partition_for(user_id.encode(), PARTITIONS), value, headers)

    def _stop(self) -> None:
        self.loop.stop(0)
        # The loop ends at its next tick.
        self.clock.advance_us(500_000)

    def _work(self) -> None:
        """Runs the executor until there is a result to deliver, or nothing left to do."""
        while self.executor.step() == 0 and not self.producer.waiting:
            pass


def _behaviours(count: int) -> Behaviours:
    return Behaviours(np.arange(count, dtype="<i8"), np.ones(count, "<u2"), np.arange(count, dtype="<i8"))


def _config() -> ModelConfig:
    return ModelConfig(
        family=Family.NULL,
        embedding_dim=64,
        num_heads=1,
        attention_dim=16,
        hidden_dim=16,
        num_layers=1,
        vocabulary_size=10_000,
        max_prefix_behaviours=2 * HISTORY,
        max_suffix_behaviours=32,
        max_candidates=2 * CANDIDATES,
    )
