"""Real engines of every kind of prefix in the executor: scores on relayed prefixes equal those of full inference.

The oracle is `tests.workers.reference`: everything in one dense pass, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from relaygr.admission.latency import Corrector, LatencyModel
from relaygr.admission.settings import AdmissionSettings
from relaygr.consumer import Received, Token
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import (
    Behaviours,
    History,
    HistoryVersion,
    LatencyCoefficients,
    Path,
    PreInferJob,
    RankingRequest,
)
from relaygr.worker.cache import CacheConfig
from relaygr.worker.cache.arena import copy_page
from relaygr.worker.cache.build import build_cache
from relaygr.worker.cache.invariants import check_invariants
from relaygr.worker.device import CpuDevice
from relaygr.worker.executor.admission import JobAdmission
from relaygr.worker.executor.context import ExecutorParts
from relaygr.worker.executor.executor import Executor
from relaygr.worker.executor.work import JobOutcome, JobWork, RankingWork
from relaygr.worker.history.resolve import StoredHistory
from relaygr.worker.kv import DramGeometry, KvDtype
from relaygr.worker.memory import forward_bytes
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.checkpoint import Checkpoint, random_checkpoint
from relaygr.worker.model.engine import build_engine
from relaygr.worker.model.options import ContextualFeature, InputForm, PositionOrigin, RelativeBias, TimeEncoding
from relaygr.worker.settings import WorkerSettings
from tests.workers.model_world import VOCABULARY, small_config
from tests.workers.reference import full_inference

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
GROWING = [name for name in KINDS if name in ("plain", "interleaved actions", "window", "relative positions")]
FIXED = [
    "positions from the end",
    "positions from the end and times",
    "contextual mask",
    "full attention near the end",
    "relative times",
]
TIMED = ["time encoding", "positions from the end and times", "relative times"]


@dataclass
class Outbox:
    answered: dict[str, tuple[RankingWork, np.ndarray]] = field(default_factory=dict)
    failures: list[tuple[object, str]] = field(default_factory=list)
    jobs: list[JobOutcome] = field(default_factory=list)

    def ranked(self, work, outputs):
        self.answered[work.request.request_id] = (work, outputs.scores)

    def expired(self, work):
        raise AssertionError("expired")

    def failed(self, work, reason, detail):
        self.failures.append((reason, detail))

    def job_done(self, received, outcome):
        self.jobs.append(outcome)


def behaviours_of(count: int, seed: int = 0, start: int = 0) -> Behaviours:
    random = np.random.default_rng(seed)
    items, actions = random.integers(0, VOCABULARY, 1_000), random.integers(0, 4, 1_000)
    part = slice(start, start + count)
    times = (np.cumsum(random.integers(1, 50, 1_000)) * 1_000).astype("<i8")
    return Behaviours(items[part].astype("<i8"), actions[part].astype("<u2"), times[part])


class World:
    """An executor over a real engine on the CPU."""

    def __init__(self, kind: str, hbm_pages: int = HBM_PAGES, **settings) -> None:
        self.checkpoint: Checkpoint = random_checkpoint(small_config(**KINDS[kind]), seed=3)
        device = CpuDevice()
        self.engine = build_engine(self.checkpoint, device, KvDtype.FLOAT32, PAGE_TOKENS)
        longest = self.engine.geometry.pages_for(self.engine.layout.tokens(self.engine.limits.max_prefix_behaviours))
        config = CacheConfig(DramGeometry(self.engine.geometry), self.engine.layout, hbm_pages)
        built = build_cache(device, config, extra_hbm_pages=longest)
        self.arena, self.cache = built.hbm_arena, built.cache
        self.engine.bind(self.arena)
        self.clock = ManualClock(monotonic_us=1_000_000, wall_us=1_700_000_000_000_000)
        self.outbox = Outbox()
        self.histories: dict[str, StoredHistory] = {}
        values = {"page_tokens": PAGE_TOKENS, "chunk_ms": 0.04, "dram_bytes": 0} | settings
        self.settings = WorkerSettings(**values)
        admission = AdmissionSettings(load_limit=1.0, footprint_reserve=0.0, burst_ms=60_000)
        capacity = hbm_pages * self.engine.geometry.page_bytes
        self.corrector = Corrector(LatencyModel(COEFFICIENTS))
        self.executor = Executor(
            self.engine,
            ExecutorParts(
                cache=self.cache,
                scratch_pages=np.arange(hbm_pages, hbm_pages + longest, dtype=np.int32),
                histories=self,
                copy_page=lambda copy: copy_page(self.arena, copy),
                corrector=self.corrector,
                settings=self.settings,
                admission_settings=admission,
                results=self.outbox,
                metrics=WorkerMetrics(CollectorRegistry()),
                clock=self.clock,
                admission=JobAdmission(admission, capacity, self.engine.geometry, self.clock),
            ),
        )
        self._offset = 0

    # -- the history store, as the executor sees it

    def get(self, user_id: str) -> StoredHistory | None:
        return self.histories.get(user_id)

    def is_loading(self, partition: int) -> bool:
        return False

    def put(self, user_id: str, count: int, seed: int = 0) -> HistoryVersion:
        history = History(user_id, count, np.array([seed % 8, 1], "<i8"), behaviours_of(count, seed))
        self.histories[user_id] = StoredHistory(history, history.chain())
        return history.version()

    # -- what tests do

    def job(self, user_id: str, version: HistoryVersion, request_id: str = "r", at_ms: int = 10 * HOUR_MS, suffix=0):
        message = PreInferJob(
            request_id, user_id, at_ms * 1000, at_ms * 1000 + 100_000, 50, 10, suffix, at_ms * 1000, version
        )
        expected_us = self.clock.monotonic_us() + 100_000
        self.executor.take_job(JobWork(message, self._received(), expected_us, expected_us + 50_000))
        self.run()

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
        reply = RankingHeaders(request_id, "g", "relaygr.results", 0, request.deadline_us)
        deadline_us = self.clock.monotonic_us() + budget_us
        work = RankingWork(request, reply, self._received(), wall_us, deadline_us, deadline_us)
        self.executor.take_ranking(work)
        self.executor.take_mail()

    def run(self) -> None:
        for _ in range(1_000):
            if self.executor.step() != 0 and not self.executor.has_mail:
                break
        check_invariants(self.cache)

    def expected(self, work: RankingWork, behaviours: Behaviours, checkpoint: Checkpoint | None = None) -> np.ndarray:
        """Scores of full inference over these behaviours, by this model (none: the world's)."""
        request = work.request
        stored = self.histories.get(request.user_id)
        features = stored.history.features if stored is not None else np.empty(0, "<i8")
        outputs = full_inference(
            checkpoint or self.checkpoint, features, behaviours, request.candidates, request.query_time_ms
        )
        self.executor.take_mail()
        return outputs.scores.numpy()

    def assert_exact(self, work: RankingWork, behaviours: Behaviours, checkpoint: Checkpoint | None = None) -> None:
        scores = self.outbox.answered[work.request.request_id][1]
        expected = self.expected(work, behaviours, checkpoint)
        assert np.abs(scores - expected).max() <= TOLERANCE * np.abs(expected).max()
        assert np.ptp(expected[:, 1]) > 0

    def _received(self) -> Received:
        self._offset += 1
        token = Token("t", 0, self._offset, 0)
        return Received("t", 0, self._offset, b"", b"", [], 0, self.clock.monotonic_us(), 1, token, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_pre_inferred_scores_as_full_inference(kind: str) -> None:
    world = World(kind)
    version = world.put("u", 100)
    world.job("u", version)
    assert world.outbox.jobs == [JobOutcome.COMPUTED]
    work = world.rank("u", version)
    assert (work.path, work.tokens_cached) == (Path.HBM, world.engine.layout.tokens(100))
    world.assert_exact(work, behaviours_of(100))


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_with_a_suffix_scores_as_full_inference_over_both(kind: str) -> None:
    world = World(kind)
    version = world.put("u", 100)
    world.job("u", version)
    work = world.rank("u", version, suffix=behaviours_of(7, start=100))
    world.assert_exact(work, behaviours_of(107))
    grows = world.engine.rules.grows
    assert work.path is (Path.HBM if grows else Path.FULL)
    assert work.prefix.tokens == world.engine.layout.tokens(100 if grows else 107)
    assert work.scored_tokens == 9 + (7 * world.engine.layout.tokens_per_behaviour if grows else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_grown_history_is_an_append_or_a_miss_and_never_wrong(kind: str) -> None:
    world = World(kind)
    world.rank("u", world.put("u", 90), "r1")
    work = world.rank("u", world.put("u", 110), "r2")
    world.assert_exact(work, behaviours_of(110))
    if world.engine.rules.grows:
        assert (work.path, work.tokens_cached) == (Path.HBM, world.engine.layout.tokens(90))
    else:
        assert (work.path, work.tokens_cached) == (Path.FULL, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_history_cut_for_lack_of_time_scores_as_full_inference_over_what_is_left(kind: str) -> None:
    world = World(kind)
    version = world.put("u", 150)
    suffix = behaviours_of(5, start=150)
    work = world.rank("u", version, suffix=suffix, budget_us=100)
    assert work.path is Path.TRUNCATED
    assert 0 < len(work.prefix.behaviours) < 150
    whole = behaviours_of(155)
    kept = len(work.prefix.behaviours) + len(work.prefix.suffix)
    world.assert_exact(work, whole[155 - kept :])


@pytest.mark.parametrize("kind", TIMED)
def test_a_prefix_of_another_query_time_is_a_miss(kind: str) -> None:
    """Days later the K,V are different, though user and history are the same."""
    world = World(kind)
    version = world.put("u", 100)
    world.job("u", version, "r1", at_ms=10 * HOUR_MS)
    later = world.rank("u", version, "r2", at_ms=100 * HOUR_MS)
    assert (later.path, later.tokens_cached) == (Path.FULL, 0)
    world.assert_exact(later, behaviours_of(100))
    first = world.rank("u", version, "r1", at_ms=10 * HOUR_MS)
    assert first.path is Path.HBM
    world.assert_exact(first, behaviours_of(100))
    scores = [world.outbox.answered[request_id][1] for request_id in ("r1", "r2")]
    assert not np.allclose(*scores, rtol=1e-6)


def test_a_prefix_that_has_a_query_time_may_still_grow_within_its_impression() -> None:
    world = World("time encoding")
    world.job("u", world.put("u", 90), "r1")
    work = world.rank("u", world.put("u", 110), "r1", suffix=behaviours_of(4, start=110))
    assert (work.path, work.tokens_cached) == (Path.HBM, 90)
    world.assert_exact(work, behaviours_of(114))


@pytest.mark.parametrize("kind", FIXED)
def test_a_job_whose_request_will_bring_a_suffix_is_not_computed_where_that_makes_another_prefix(kind: str) -> None:
    world = World(kind)
    world.job("u", world.put("u", 100), suffix=4)
    assert world.outbox.jobs == [JobOutcome.NOT_USABLE]


def test_a_model_that_allows_no_cut_is_computed_in_one_chunk_and_its_memory_is_planned_so() -> None:
    world = World("contextual mask", max_chunk_tokens=16)
    calls: list[tuple[int, int]] = []
    whole = world.engine.forward
    world.engine.forward = lambda chunks, requests: (  # type: ignore[method-assign]
        calls.extend((chunk.start, chunk.end) for chunk in chunks),
        whole(chunks, requests),
    )[1]
    world.job("u", world.put("u", 150))
    assert calls == [(0, 152)]
    longest = world.engine.layout.tokens(world.engine.limits.max_prefix_behaviours)
    assert forward_bytes(world.engine, world.settings) >= world.engine.scratch_bytes(longest, 0)
    plain = World("plain", max_chunk_tokens=16)
    assert forward_bytes(plain.engine, plain.settings) < forward_bytes(world.engine, world.settings)


@pytest.mark.parametrize("kind", GROWING)
def test_a_tail_as_suffix_scores_as_full_inference(kind: str) -> None:
    world = World(kind)
    world.rank("u", world.put("u", 100), "r1")
    # An append is said to take longer than there is.
    slow = LatencyModel(replace(COEFFICIENTS, b0=1e6))
    world.corrector.recalibrate(slow)
    work = world.rank("u", world.put("u", 109), "r2", suffix=behaviours_of(5, start=109), budget_us=500_000)
    assert (work.path, work.tokens_cached) == (Path.HBM, world.engine.layout.tokens(100))
    assert len(work.suffix) == 14
    world.assert_exact(work, behaviours_of(114))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in GROWING and kind not in TIMED])
def test_what_is_good_for_one_impression_is_evicted_before_what_others_may_use(kind: str) -> None:
    """The suffix is a part of the prefix. The other prefix is older, and would be evicted first."""
    world = World(kind, hbm_pages=28)
    often = world.put("often", 180, seed=1)
    world.rank("often", often, "r1")
    world.rank("once", world.put("once", 180), "r2", suffix=behaviours_of(3, start=180))
    world.rank("third", world.put("third", 180, seed=2), "r3")
    again = world.rank("often", often, "r4")
    assert again.path is Path.HBM
    world.assert_exact(again, behaviours_of(180, seed=1))
    assert not world.cache.peek(world.outbox.answered["r2"][0].prefix.key).hbm_behaviours
