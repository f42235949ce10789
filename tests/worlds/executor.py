"""An executor that tests step: over the simulator's engine, whose work alone moves the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import CollectorRegistry

from relaygr.admission.corrector import Corrector
from relaygr.admission.latency import LatencyModel
from relaygr.admission.settings import AdmissionSettings
from relaygr.consumer.interface import Received, Token
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import (
    Behaviours,
    History,
    HistoryVersion,
    LatencyCoefficients,
    PreInferJob,
    RankingRequest,
)
from relaygr.simulate.device import SimulatedDevice, SimulatedEngine, SimulatedModel
from relaygr.simulate.times import Draws
from relaygr.worker.cache import CacheConfig, PrefixCache
from relaygr.worker.cache.copies import CopyForecast, CopyPriority, CopyRequest
from relaygr.worker.executor.device_record import DeviceRecord
from relaygr.worker.executor.executor import Executor
from relaygr.worker.executor.job_admission import JobAdmission
from relaygr.worker.executor.parts import ExecutorParts
from relaygr.worker.executor.work import JobWork, RankingWork
from relaygr.worker.history.resolve import StoredHistory
from relaygr.worker.kv import DramGeometry, KvDtype, KvGeometry, PrefixLayout
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.config import PrefixRules
from relaygr.worker.model.interface import EngineLimits, PrefixChunk, RankOutputs, TooLongError
from relaygr.worker.settings import WorkerSettings
from tests.worlds.invariants import check_invariants
from tests.worlds.outbox import Outbox

PAGE_TOKENS = 16
TOKEN_US = 10
HIT_US = 1_000
GEOMETRY = KvGeometry(1, 1, 4, 4, PAGE_TOKENS, KvDtype.FLOAT32)
LAYOUT = PrefixLayout(0, 1)
LIMITS = EngineLimits(512, 64, 100)
COEFFICIENTS = LatencyCoefficients(
    a0=HIT_US, a1=TOKEN_US, a2=0, b0=0, b1=TOKEN_US, b2=0, c0=0, c1=HIT_US / 10, c2=0, d0=100, d1=0
)
LATENCY = LatencyModel(COEFFICIENTS)


class FakeEngine(SimulatedEngine):
    """The simulator's engine: TOKEN_US a prefix token, HIT_US a ranking of ten candidates. It records the chunks and
    batches that it computed, and fails where a test asks for that.
    """

    def __init__(
        self,
        clock: ManualClock,
        outbox: Outbox | None = None,
        namespace: bytes = b"model-1",
        revision: str = "model-1",
    ) -> None:
        model = SimulatedModel(DramGeometry(GEOMETRY), LAYOUT, LIMITS, PrefixRules(), LATENCY, is_cpu=True)
        exact = Draws((1.0,), np.random.default_rng(0))
        super().__init__(model, SimulatedDevice(clock, is_cpu=True), exact, exact)
        self.namespace, self.revision = namespace, revision
        self.outbox = outbox if outbox is not None else Outbox()
        self.chunks: list[tuple[int, int]] = []
        self.batches: list[int] = []
        self.mixed: list[tuple[int, int]] = []
        """Tokens of the chunk, and requests, of each forward that had both."""
        self.fail_mixed = False
        self.fail_next: Exception | None = None
        self.fail_candidates: int | None = None
        self.on_forward: Callable[[list[int]], None] = lambda _: None
        """Called at each forward, with the number of candidates of each request."""

    def rank_inputs(self, prefix_tokens, pages, suffix, candidates, query_time_ms=0, prefix_timestamps_ms=None):
        if candidates.size > self.limits.max_candidates:
            raise TooLongError(f"{candidates.size} candidates, the model takes {self.limits.max_candidates}")
        assert len(pages) * PAGE_TOKENS >= prefix_tokens
        return super().rank_inputs(prefix_tokens, pages, suffix, candidates)

    def pre_infer(self, chunk: PrefixChunk) -> None:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        assert len(chunk.pages) * PAGE_TOKENS >= chunk.end
        assert not self.outbox.unsent, "an answer that is known waits for this chunk"
        self.on_forward([])
        self.chunks.append((chunk.start, chunk.end))
        super().pre_infer(chunk)

    def forward(self, chunks, requests):
        if self.fail_mixed:
            raise RuntimeError("kernel failed")
        self.mixed.append((sum(chunk.end - chunk.start for chunk in chunks), len(requests)))
        for chunk in chunks:
            self.pre_infer(chunk)
        return self.rank(requests)

    def rank(self, batch):
        if any(request.candidates == self.fail_candidates for request in batch):
            raise RuntimeError("kernel failed")
        assert not self.outbox.unsent, "an answer that is known waits for this batch"
        self.on_forward([request.candidates for request in batch])
        self.batches.append(len(batch))
        self.device.run(self._batch_us(batch))
        return [RankOutputs(np.zeros((request.candidates, 1), np.float32)) for request in batch]


@dataclass
class HeldMover:
    """Copies only when the test calls `finish`."""

    waiting: list[CopyRequest] = field(default_factory=list)
    copy_us: float = 100.0

    def submit(self, request: CopyRequest) -> bool:
        self.waiting.append(request)
        return True

    def forecast(self, size_bytes: int, priority: CopyPriority) -> CopyForecast:
        return CopyForecast(0.0, self.copy_us)

    def close(self) -> None:
        self.finish(False)

    def finish(self, ok: bool = True) -> None:
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            request.on_done(ok)


class Store:
    def __init__(self):
        self.histories: dict[str, StoredHistory] = {}
        self.loading = self.settling = False
        self.deleted: dict[str, int] = {}

    def put(self, user_id: str, length: int, number: int = 1) -> HistoryVersion:
        history = history_of(user_id, length, number)
        self.histories[user_id] = StoredHistory(history, history.chain())
        return history.version()

    def get(self, user_id):
        return self.histories.get(user_id)

    def is_loading(self, partition):
        return self.loading

    def is_settling(self, partition):
        return self.settling

    def deleted_at_ms(self, user_id):
        return self.deleted.get(user_id, 0)


def behaviours_of(length: int) -> Behaviours:
    return Behaviours(np.arange(length, dtype="<i8"), np.ones(length, "<u2"), np.arange(length, dtype="<i8"))


def history_of(user_id: str, length: int, number: int = 1) -> History:
    return History(user_id, number, np.empty(0, "<i8"), behaviours_of(length))


class DrivenExecutor:
    """An executor that a test steps itself. A subclass makes `executor`, `cache` and `clock`."""

    executor: Executor
    cache: PrefixCache
    clock: ManualClock
    _offset = 0

    def received(self, topic: str) -> Received:
        """The next message of a topic."""
        self._offset += 1
        token = Token(topic, 0, self._offset, 0)
        return Received(topic, 0, self._offset, b"", b"", [], self.clock.monotonic_us(), 1, token, None)  # type: ignore[arg-type]

    def take_job(self, job: PreInferJob, expected_in_us: int, budget_us: int) -> None:
        expected_us = self.clock.monotonic_us() + expected_in_us
        self.executor.take_job(JobWork(job, self.received("preinfer"), expected_us, expected_us + budget_us))
        self.executor.run_posted()

    def take_ranking(self, request: RankingRequest, budget_us: int, *, looks_up: bool = True) -> RankingWork:
        reply = RankingHeaders(request.request_id, "g", "relaygr.results", 0, request.deadline_us)
        deadline_us = self.clock.monotonic_us() + budget_us
        work = RankingWork(request, reply, self.received("ranking"), self.clock.wall_us(), deadline_us, deadline_us)
        self.executor.take_ranking(work)
        if looks_up:
            self.executor.run_posted()
        return work

    def run(self, steps: int = 1_000) -> None:
        """Steps until the executor has nothing to do."""
        for _ in range(steps):
            if self.executor.step() != 0:
                break
        check_invariants(self.cache)


class ExecutorWorld(DrivenExecutor):
    """An executor over a fake engine, with fakes around it, and the calls that tests make."""

    def __init__(
        self,
        hbm_pages: int = 128,
        dram_pages: int = 128,
        lease_margin_ms: int = 0,
        diverter=None,
        outbox: Outbox | None = None,
        device_record: DeviceRecord | None = None,
        **settings,
    ):
        self.clock = ManualClock(monotonic_us=1_000_000)
        self.outbox = outbox if outbox is not None else Outbox(tasks=1)
        self.engine = FakeEngine(self.clock, outbox=self.outbox)
        self.mover = HeldMover()
        self.cache = PrefixCache(
            CacheConfig(DramGeometry(self.engine.geometry), self.engine.layout, hbm_pages, dram_pages), self.mover
        )
        self.store = Store()
        chunks = {"chunk_ms": 1.0, "longest_chunk_ms": settings.get("chunk_ms", 1.0)}
        self.settings = WorkerSettings(**{"page_tokens": PAGE_TOKENS, **chunks, **settings})
        admission = AdmissionSettings(
            lease_margin_ms=lease_margin_ms, footprint_reserve=0.0, load_limit=1.0, preinfer_share=0.9, burst_ms=60_000
        )
        capacity = hbm_pages * self.engine.geometry.page_bytes
        self.corrector = Corrector(LATENCY)
        self.copied = []
        self.copy_page = self.copied.append
        self.registry = CollectorRegistry()
        self.executor = Executor(
            self.engine,
            ExecutorParts(
                cache=self.cache,
                scratch_pages=np.arange(hbm_pages, hbm_pages + 512 // PAGE_TOKENS, dtype=np.int32),
                histories=self.store,
                copy_page=lambda copy: self.copy_page(copy),
                corrector=self.corrector,
                settings=self.settings,
                admission_settings=admission,
                results=self.outbox,
                device_record=device_record if device_record is not None else DeviceRecord(),
                metrics=WorkerMetrics(self.registry),
                clock=self.clock,
                admission=JobAdmission(admission, capacity, self.engine.geometry, self.clock),
                diverter=diverter,
            ),
        )

    def job(self, user_id="u", version=None, request_id="r", lead_us=100_000, budget_ms=50, history=None):
        wall_us = self.clock.wall_us()
        message = PreInferJob(
            request_id, user_id, wall_us, wall_us + lead_us, budget_ms, 10, 0, wall_us, version, history
        )
        self.take_job(message, lead_us, budget_ms * 1000)

    def rank(
        self,
        user_id="u",
        version=None,
        request_id="r",
        budget_us=50_000,
        candidates=10,
        history=None,
        looks_up=True,
        diverted=None,
        sent_ago_us=0,
        suffix=0,
    ):
        wall_us = self.clock.wall_us()
        request = RankingRequest(
            request_id, user_id, wall_us - sent_ago_us, wall_us + budget_us, 0, np.arange(candidates),
            behaviours_of(suffix), version, history, diverted=diverted,
        )  # fmt: skip
        return self.take_ranking(request, budget_us, looks_up=looks_up)

    def idle_until(self, time_us: int):
        self.clock.advance_us(max(0, time_us - self.clock.monotonic_us()))
        self.run()


def world_with_a_in_dram() -> tuple[ExecutorWorld, HistoryVersion]:
    """User a was ranked and spilled to DRAM. Then user b took all of HBM."""
    world = ExecutorWorld(hbm_pages=32)
    first = world.store.put("a", 400)
    world.rank("a", first, "r1")
    world.run()
    world.mover.finish()
    world.rank("b", world.store.put("b", 400), "r2")
    world.run()
    world.mover.finish()
    return world, first
