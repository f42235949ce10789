"""A real engine and executor on a simulated device: reloads take virtual time, and so does each layer of a ranking."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from relaygr.admission.settings import AdmissionSettings
from relaygr.schemas.messages import (
    Behaviours,
    History,
    HistoryVersion,
    LatencyCoefficients,
    RankingRequest,
)
from relaygr.worker.cache import CacheConfig
from relaygr.worker.cache.build import build_cache
from relaygr.worker.device import CpuDevice
from relaygr.worker.executor.work import RankingWork
from relaygr.worker.kv import DramGeometry, DramKvDtype, KvDtype
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.checkpoint import random_checkpoint
from relaygr.worker.model.engine import build_engine
from relaygr.worker.model.inference import FullRequest, full_inference
from relaygr.worker.model.interface import Engine, RankInputs, RankOutputs
from relaygr.worker.settings import WorkerSettings
from tests.workers.simulated_device import SimulatedDevice
from tests.worlds.model import VOCABULARY, small_config
from tests.worlds.outbox import Outbox
from tests.worlds.real_executor import OverRealEngine

PAGE_TOKENS = 8
LAYERS = 4
LAYER_US = 100
"""Virtual time that one layer of a ranking pass takes, whatever the batch."""
BEHAVIOURS = 160
PAGES = BEHAVIOURS // PAGE_TOKENS
COEFFICIENTS = LatencyCoefficients(
    a0=LAYERS * LAYER_US, a1=100, a2=0, b0=0, b1=100, b2=0, c0=LAYERS * LAYER_US, c1=0, c2=0, d0=0, d1=0
)


class TimedEngine:
    """An engine whose ranking takes LAYER_US for each layer, from the time when the K,V of the layer has arrived."""

    def __init__(self, engine: Engine, device: SimulatedDevice) -> None:
        self._engine = engine
        self._timed_device = device
        self.layers_ranked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def rank(self, batch: Sequence[RankInputs]) -> list[RankOutputs]:
        first, *others = batch
        return self._engine.rank([replace(first, layer_ready=self._timed(first.layer_ready)), *others])

    def _timed(self, layer_ready: Callable[[int], None] | None) -> Callable[[int], None]:
        def ready(layer: int) -> None:
            if layer_ready is not None:
                layer_ready(layer)
            self._timed_device.timeline.advance(LAYER_US)
            self.layers_ranked += 1

        return ready


class OverlapWorld(OverRealEngine):
    """Copies take `copy_us_per_layer` of a whole prefix of BEHAVIOURS behaviours."""

    def __init__(
        self, copy_us_per_layer: float = 100.0, dram: DramKvDtype = DramKvDtype.SAME, hbm_pages: int = 2 * PAGES
    ) -> None:
        config = small_config(num_layers=LAYERS)
        checkpoint = random_checkpoint(config, seed=3)
        geometry = config.geometry(PAGE_TOKENS, KvDtype.FLOAT32)
        self.device = SimulatedDevice(bytes_per_us=PAGES * geometry.layer_bytes / copy_us_per_layer)
        engine = TimedEngine(build_engine(checkpoint, self.device, KvDtype.FLOAT32, PAGE_TOKENS), self.device)
        self.oracle = build_engine(checkpoint, CpuDevice(), KvDtype.FLOAT32, PAGE_TOKENS)
        bind_own_arena(self.oracle)
        built = build_cache(
            self.device,
            CacheConfig(DramGeometry(geometry, dram), config.layout(), hbm_pages, 4 * PAGES),
            extra_hbm_pages=geometry.pages_for(config.layout().tokens(config.max_prefix_behaviours)),
            clock=self.device,
        )
        settings = WorkerSettings(page_tokens=PAGE_TOKENS, chunk_ms=5.0, longest_chunk_ms=5.0)
        outbox = Outbox(may_expire=False, takes_jobs=False)
        self._assemble(engine, built, self.device, COEFFICIENTS, settings, AdmissionSettings(), outbox)

    def close(self) -> None:
        """Ends the copies under way first: the mover waits for them."""
        self.device.timeline.finish()
        self.cache.close()

    def put(self, user_id: str, seed: int, count: int = BEHAVIOURS) -> HistoryVersion:
        random = np.random.default_rng(seed)
        items, actions = random.integers(0, VOCABULARY, 1000), random.integers(0, 4, 1000).astype("<u2")
        behaviours = Behaviours(items[:count], actions[:count], np.arange(count, dtype="<i8"))
        history = History(user_id, count, np.empty(0, "<i8"), behaviours)
        return self.keep(history)

    # What tests do.

    def submit(self, user_id: str, version: HistoryVersion, request_id: str, budget_us: int = 1_000_000) -> None:
        wall_us = self.device.wall_us()
        items = np.random.default_rng(5).integers(0, VOCABULARY, 9)
        request = RankingRequest(
            request_id, user_id, wall_us, wall_us + budget_us, 0, items, Behaviours.empty(), version, None
        )
        self.take_ranking(request, budget_us)

    def spill_and_evict(self, user_id: str, version: HistoryVersion) -> None:
        """Leaves the user's prefix in DRAM only."""
        self.submit(user_id, version, f"first-{user_id}")
        self.run()
        self.until(lambda: self.cache.stats().dram.in_flight == 0)
        assert self.cache.stats().dram.evictable >= PAGES
        for seed in (101, 102):
            filler = f"filler-{seed}"
            self.submit(filler, self.put(filler, seed), filler)
            self.run()
        self.until(lambda: self.cache.stats().dram.in_flight == 0)
        for seed in (101, 102):
            self.cache.invalidate_user(f"filler-{seed}")
        assert self.cache.stats().hbm.entries == 0

    def until(self, condition: Callable[[], bool]) -> None:
        """Ends copies one by one until the condition holds. Only copies take virtual time."""
        step = threading.Event()
        for _ in range(4000):
            self.run()
            if condition():
                return
            if not self.device.timeline.step():
                step.wait(0.005)
        raise AssertionError("it never came to that")

    def settle(self, condition: Callable[[], bool]) -> None:
        """Waits in real time until the copy threads have handled all events. Virtual time stands still."""
        step = threading.Event()
        for _ in range(4000):
            if condition():
                return
            step.wait(0.005)
        raise AssertionError("the copy threads did not act")

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(name)

    def scores(self, request_id: str) -> np.ndarray:  # type: ignore[type-arg]
        return self.outbox.answered[request_id][1]

    def work(self, request_id: str) -> RankingWork:
        return self.outbox.answered[request_id][0]

    def exact(self, user_id: str) -> np.ndarray:  # type: ignore[type-arg]
        """Scores of full inference on another engine."""
        history = self.histories[user_id].history
        items = np.random.default_rng(5).integers(0, VOCABULARY, 9)
        pages = np.arange(self.oracle.geometry.pages_for(self.oracle.layout.tokens(len(history.behaviours))))
        request = FullRequest(history.features, history.behaviours, items, 0)
        return full_inference(self.oracle, request, pages.astype(np.int32)).outputs.scores


def worst(scores: np.ndarray, exact: np.ndarray) -> float:  # type: ignore[type-arg]
    """The largest difference, as a share of the largest score."""
    return float(np.abs(scores - exact).max() / np.abs(exact).max())
