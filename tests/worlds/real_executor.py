"""An executor over a real engine on the CPU, for models of every kind of prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from relaygr.admission.corrector import Corrector
from relaygr.admission.latency import LatencyModel
from relaygr.admission.settings import AdmissionSettings
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.messages import (
    Behaviours,
    History,
    HistoryVersion,
    LatencyCoefficients,
    PreInferJob,
    RankingRequest,
)
from relaygr.worker.cache import CacheConfig, Tier
from relaygr.worker.cache.arena import copy_page, zero_pages
from relaygr.worker.cache.build import BuiltCache, DramMemory, build_cache
from relaygr.worker.cache.copies import PageGuard
from relaygr.worker.device import CpuDevice
from relaygr.worker.executor.device_record import DeviceRecord
from relaygr.worker.executor.executor import Executor
from relaygr.worker.executor.job_admission import JobAdmission
from relaygr.worker.executor.parts import ExecutorParts
from relaygr.worker.executor.work import RankingWork
from relaygr.worker.history.resolve import StoredHistory
from relaygr.worker.kv import DramGeometry, KvDtype
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.checkpoint import Checkpoint, random_checkpoint
from relaygr.worker.model.engine import build_engine
from relaygr.worker.model.options import ContextualFeature, InputForm, PositionOrigin, RelativeBias, TimeEncoding
from relaygr.worker.pool.tier import PoolTier
from relaygr.worker.settings import WorkerSettings
from relaygr.worker.shared.dram_tier import ArenaShape, SharedArena
from relaygr.worker.shared.lock import ArenaLock
from tests.worlds.dense import full_inference
from tests.worlds.executor import DrivenExecutor
from tests.worlds.model import VOCABULARY, small_config
from tests.worlds.outbox import Outbox

PAGE_TOKENS = 16
HBM_PAGES = 64
TOLERANCE = 2e-5
HOUR_MS = 3_600_000
COEFFICIENTS = LatencyCoefficients(0, 1, 0, b0=0, b1=1, b2=0, c0=1, c1=0, c2=0, d0=100, d1=0)

FEATURES = (ContextualFeature(name="country", cardinality=8), ContextualFeature(name="age", cardinality=8))
KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "interleaved actions": {"inputs": InputForm.INTERLEAVED, "num_positions": 600},
    "window": {"max_attn_len": 24},
    "relative positions": {"relative_bias": RelativeBias(positions=300)},
    "time encoding": {"time_encoding": TimeEncoding.SQRT, "num_times": 64},
    "positions from the end": {"position_origin": PositionOrigin.END},
    "positions from the end and times": {
        "position_origin": PositionOrigin.END, "time_encoding": TimeEncoding.LOG, "num_times": 64,
    },
    "contextual mask": {"contextual_features": FEATURES, "contextual_mask": True},
    "full attention near the end": {"max_attn_len": 24, "min_full_attn_len": 8},
    "relative times": {"relative_bias": RelativeBias(positions=300, time_buckets=64)},
}  # fmt: skip


def behaviours_of(count: int, seed: int = 0, start: int = 0) -> Behaviours:
    random = np.random.default_rng(seed)
    items, actions = random.integers(0, VOCABULARY, 1_000), random.integers(0, 4, 1_000)
    part = slice(start, start + count)
    times = (np.cumsum(random.integers(1, 50, 1_000)) * 1_000).astype("<i8")
    return Behaviours(items[part].astype("<i8"), actions[part].astype("<u2"), times[part])


class OverRealEngine(DrivenExecutor):
    """An executor over a real engine. The world is its history store. A subclass makes the engine and its memory."""

    def _assemble(
        self,
        engine: Any,
        built: BuiltCache,
        clock: Any,
        latency: LatencyCoefficients,
        settings: WorkerSettings,
        admission: AdmissionSettings,
        outbox: Outbox,
        pool: Callable[[], PoolTier] | None = None,
    ) -> None:
        """The pages of `built` after the HBM tier are scratch pages."""
        hbm_pages = built.cache.stats().hbm.capacity
        self.engine, self.cache, self.arena, self.clock = engine, built.cache, built.hbm_arena, clock
        self.engine.bind(self.arena)
        self.outbox, self.settings = outbox, settings
        self.histories: dict[str, StoredHistory] = {}
        self.corrector = Corrector(LatencyModel(latency))
        self.built = built
        self.pool = pool() if pool is not None else None
        self.registry = CollectorRegistry()
        capacity = hbm_pages * engine.geometry.page_bytes
        self.executor = Executor(
            engine,
            ExecutorParts(
                cache=self.cache,
                scratch_pages=np.arange(hbm_pages, self.arena.shape[0], dtype=np.int32),
                histories=self,
                copy_page=lambda copy: copy_page(self.arena, copy),
                zero_pages=lambda tier, pages: zero_pages(self.arena, pages) if tier is Tier.HBM else None,
                corrector=self.corrector,
                settings=settings,
                admission_settings=admission,
                results=outbox,
                device_record=DeviceRecord(),
                metrics=WorkerMetrics(self.registry),
                clock=clock,
                admission=JobAdmission(admission, capacity, engine.geometry, clock),
                pool=self.pool,
            ),
        )

    # -- the history store, as the executor sees it

    def get(self, user_id: str) -> StoredHistory | None:
        return self.histories.get(user_id)

    def is_loading(self, partition: int) -> bool:
        return False

    def is_settling(self, partition: int) -> bool:
        return False

    def deleted_at_ms(self, user_id: str) -> int:
        return 0

    def keep(self, history: History) -> HistoryVersion:
        self.histories[history.user_id] = StoredHistory(history, history.chain())
        return history.version()


class RealExecutorWorld(OverRealEngine):
    """An executor over a real engine on the CPU."""

    def __init__(
        self,
        kind: str,
        hbm_pages: int = HBM_PAGES,
        shared: Path | None = None,
        dram_pages: int = 0,
        latency: LatencyCoefficients = COEFFICIENTS,
        pool: Callable[[RealExecutorWorld, PageGuard | None], PoolTier] | None = None,
        **settings,
    ) -> None:
        """`shared`: the folder of an arena for the DRAM tier, with the prefixes that an earlier world left there."""
        self.checkpoint: Checkpoint = random_checkpoint(small_config(**KINDS[kind]), seed=3)
        device = CpuDevice()
        engine = build_engine(self.checkpoint, device, KvDtype.FLOAT32, PAGE_TOKENS)
        longest = engine.geometry.pages_for(engine.layout.tokens(engine.limits.max_prefix_behaviours))
        config = CacheConfig(DramGeometry(engine.geometry), engine.layout, hbm_pages, dram_pages)
        memory = None
        if shared is not None:
            self.lock = ArenaLock(shared)
            assert self.lock.try_acquire() is not None
            shape = ArenaShape("worker-00", dram_pages, config.geometry, config.layout)
            arena = SharedArena.attach(shared, shape, device, self.lock)
            memory = DramMemory(arena.tensor, arena.journal, arena.journal)
        built = build_cache(device, config, extra_hbm_pages=longest, dram=memory)
        clock = ManualClock(monotonic_us=1_000_000, wall_us=1_700_000_000_000_000)
        if shared is not None:
            built.cache.restore(arena.adopt(engine.namespace), clock.monotonic_us())
        tiers = {"dram_bytes": dram_pages * engine.geometry.page_bytes}
        values = {"page_tokens": PAGE_TOKENS, "chunk_ms": 0.04, "longest_chunk_ms": 0.04} | tiers | settings
        admission = AdmissionSettings(load_limit=1.0, footprint_reserve=0.0, burst_ms=60_000)
        outbox = Outbox(may_expire=False)
        guard = memory.guard if memory is not None else None
        make_pool = partial(pool, self, guard) if pool is not None else None
        self._assemble(engine, built, clock, latency, WorkerSettings(**values), admission, outbox, make_pool)

    @contextmanager
    def erases(self, user_id: str) -> Iterator[None]:
        """The user's pages in HBM and the scratch pages are zeroed within moments of the block."""
        (entry,) = self.cache.ledger.hbm.index.of_user(user_id)
        rows = [self.arena[int(page)].numpy().tobytes() for page in entry.pages]
        scratch = int(self.executor._parts.scratch_pages[0])
        self.arena[scratch] = 7
        yield
        for _ in range(3):
            self.clock.advance_us(100_000)
            self.run()
        left = self.arena.numpy().tobytes()
        assert not any(row in left for row in rows)
        assert not self.arena[scratch].any()

    def die(self) -> None:
        """Ends the copy threads. The arena stays, and its lock is free."""
        self.cache.close()
        self.lock.release()

    def put(self, user_id: str, count: int, seed: int = 0) -> HistoryVersion:
        history = History(user_id, count, np.array([seed % 8, 1], "<i8"), behaviours_of(count, seed))
        return self.keep(history)

    # -- what tests do

    def job(self, user_id: str, version: HistoryVersion, request_id: str = "r", at_ms: int = 10 * HOUR_MS, suffix=0):
        self.queue_job(user_id, version, request_id, at_ms, suffix)
        self.run()

    def queue_job(
        self, user_id: str, version: HistoryVersion, request_id: str = "r", at_ms: int = 10 * HOUR_MS, suffix=0
    ):
        message = PreInferJob(
            request_id, user_id, at_ms * 1000, at_ms * 1000 + 100_000, 50, 10, suffix, at_ms * 1000, version
        )
        self.take_job(message, 100_000, 50_000)

    def rank(
        self,
        user_id: str,
        version: HistoryVersion | None,
        request_id: str = "r",
        at_ms: int = 10 * HOUR_MS,
        suffix: Behaviours | None = None,
        candidates: int = 9,
        budget_us: int = 1_000_000,
    ) -> RankingWork:
        self.submit(user_id, version, request_id, at_ms, suffix, candidates, budget_us)
        self.run()
        return self.outbox.answered[request_id][0]

    def submit(self, user_id, version, request_id, at_ms=10 * HOUR_MS, suffix=None, candidates=9, budget_us=1_000_000):
        wall_us = self.clock.wall_us()
        items = np.random.default_rng(candidates).integers(0, VOCABULARY, candidates)
        request = RankingRequest(
            request_id, user_id, wall_us, wall_us + budget_us, at_ms, items,
            Behaviours.empty() if suffix is None else suffix, version,
        )  # fmt: skip
        self.take_ranking(request, budget_us)

    def expected(self, work: RankingWork, behaviours: Behaviours, checkpoint: Checkpoint | None = None) -> np.ndarray:
        """Scores of full inference over these behaviours, by this model (none: the world's)."""
        request = work.request
        stored = self.histories.get(request.user_id)
        features = stored.history.features if stored is not None else np.empty(0, "<i8")
        outputs = full_inference(
            checkpoint or self.checkpoint, features, behaviours, request.candidates, request.query_time_ms
        )
        self.executor.run_posted()
        return outputs.scores.numpy()

    def assert_exact(self, work: RankingWork, behaviours: Behaviours, checkpoint: Checkpoint | None = None) -> None:
        scores = self.outbox.answered[work.request.request_id][1]
        expected = self.expected(work, behaviours, checkpoint)
        assert np.abs(scores - expected).max() <= TOLERANCE * np.abs(expected).max()
        assert np.ptp(expected[:, 1]) > 0
