"""Real engines of every kind of prefix in the executor: scores on relayed prefixes equal those of full inference.

The oracle is `tests.worlds.dense`: everything in one dense pass, in float64.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relaygr.admission.latency import LatencyModel
from relaygr.schemas.messages import Path, PreInferJob
from relaygr.worker.cache import Hit
from relaygr.worker.executor.work import JobOutcome
from relaygr.worker.memory import forward_bytes
from tests.worlds.real_executor import COEFFICIENTS, HOUR_MS, KINDS, RealExecutorWorld, behaviours_of

GROWING = [name for name in KINDS if name in ("plain", "interleaved actions", "window", "relative positions")]
FIXED = [
    "positions from the end",
    "positions from the end and times",
    "contextual mask",
    "full attention near the end",
    "relative times",
]
TIMED = ["time encoding", "positions from the end and times", "relative times"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pre_inferred_prefix_scores_as_full_inference(kind: str) -> None:
    world = RealExecutorWorld(kind)
    version = world.put("u", 100)
    world.job("u", version)
    assert world.outbox.jobs == [JobOutcome.COMPUTED]
    work = world.rank("u", version)
    assert (work.path, work.tokens_cached) == (Path.HBM, world.engine.layout.tokens(100))
    world.assert_exact(work, behaviours_of(100))


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_with_a_suffix_scores_as_full_inference_over_both(kind: str) -> None:
    world = RealExecutorWorld(kind)
    version = world.put("u", 100)
    world.job("u", version)
    work = world.rank("u", version, suffix=behaviours_of(7, start=100))
    world.assert_exact(work, behaviours_of(107))
    grows = world.engine.rules.grows
    assert work.path is (Path.HBM if grows else Path.FULL)
    assert work.prefix.tokens == world.engine.layout.tokens(100 if grows else 107)
    assert work.scored_tokens == 9 + (7 * world.engine.layout.tokens_per_behaviour if grows else 0)


@pytest.mark.parametrize("grown", [106, 120], ids=["on the last page", "onto another page"])
@pytest.mark.parametrize("joined_by_both", [False, True])
def test_a_request_whose_history_grew_is_not_ranked_on_the_shorter_prefix_of_its_job(
    grown: int, joined_by_both: bool
) -> None:
    """Its job's prefix had no room in the cache. The scratch pages held 100 tokens, of which 106 were ranked."""
    world = RealExecutorWorld("plain", hbm_pages=9)
    other = world.rank("other", world.put("other", 100), "other")
    pinned = world.cache.acquire(other.prefix.key, world.clock.monotonic_us())
    assert isinstance(pinned, Hit)
    before = world.put("u", 100)
    world.take_job(
        PreInferJob("r1", "u", 10 * HOUR_MS * 1000, 10 * HOUR_MS * 1000 + 100_000, 50, 10, 0, 0, before),
        100_000,
        50_000,
    )
    if joined_by_both:
        world.submit("u", before, "r1")
    world.submit("u", world.put("u", grown), "r2")
    world.run()
    assert world.outbox.failures == []
    assert world.outbox.jobs == [JobOutcome.NO_ROOM]
    for request_id, length in (("r2", grown), ("r1", 100)):
        if request_id in world.outbox.answered:
            world.assert_exact(world.outbox.answered[request_id][0], behaviours_of(length))
    assert ("r1" in world.outbox.answered) == joined_by_both and "r2" in world.outbox.answered


@pytest.mark.parametrize("kind", KINDS)
def test_a_grown_history_is_an_append_or_a_miss_and_never_wrong(kind: str) -> None:
    world = RealExecutorWorld(kind)
    world.rank("u", world.put("u", 90), "r1")
    work = world.rank("u", world.put("u", 110), "r2")
    world.assert_exact(work, behaviours_of(110))
    if world.engine.rules.grows:
        assert (work.path, work.tokens_cached) == (Path.HBM, world.engine.layout.tokens(90))
    else:
        assert (work.path, work.tokens_cached) == (Path.FULL, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_history_cut_for_lack_of_time_scores_as_full_inference_over_what_is_left(kind: str) -> None:
    world = RealExecutorWorld(kind)
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
    world = RealExecutorWorld(kind)
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
    world = RealExecutorWorld("time encoding")
    world.job("u", world.put("u", 90), "r1")
    work = world.rank("u", world.put("u", 110), "r1", suffix=behaviours_of(4, start=110))
    assert (work.path, work.tokens_cached) == (Path.HBM, 90)
    world.assert_exact(work, behaviours_of(114))


@pytest.mark.parametrize("kind", FIXED)
def test_a_job_whose_request_will_bring_a_suffix_is_not_computed_where_that_makes_another_prefix(kind: str) -> None:
    world = RealExecutorWorld(kind)
    world.job("u", world.put("u", 100), suffix=4)
    assert world.outbox.jobs == [JobOutcome.NOT_USABLE]


def test_a_model_that_allows_no_cut_is_computed_in_one_chunk_and_its_memory_is_planned_so() -> None:
    world = RealExecutorWorld("contextual mask", max_chunk_tokens=16)
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
    plain = RealExecutorWorld("plain", max_chunk_tokens=16)
    assert forward_bytes(plain.engine, plain.settings) < forward_bytes(world.engine, world.settings)


@pytest.mark.parametrize("kind", GROWING)
def test_a_tail_as_suffix_scores_as_full_inference(kind: str) -> None:
    world = RealExecutorWorld(kind)
    world.rank("u", world.put("u", 100), "r1")
    # An append is predicted to take longer than the time left.
    slow = LatencyModel(replace(COEFFICIENTS, b0=1e6))
    world.corrector.recalibrate(slow)
    work = world.rank("u", world.put("u", 109), "r2", suffix=behaviours_of(5, start=109), budget_us=500_000)
    assert (work.path, work.tokens_cached) == (Path.HBM, world.engine.layout.tokens(100))
    assert len(work.suffix) == 14
    world.assert_exact(work, behaviours_of(114))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in GROWING and kind not in TIMED])
def test_a_prefix_for_one_impression_is_evicted_before_reusable_ones(kind: str) -> None:
    """The suffix is a part of the prefix. The other prefix is older, and LRU alone would evict it first."""
    world = RealExecutorWorld(kind, hbm_pages=28)
    often = world.put("often", 180, seed=1)
    world.rank("often", often, "r1")
    world.rank("once", world.put("once", 180), "r2", suffix=behaviours_of(3, start=180))
    world.rank("third", world.put("third", 180, seed=2), "r3")
    again = world.rank("often", often, "r4")
    assert again.path is Path.HBM
    world.assert_exact(again, behaviours_of(180, seed=1))
    assert not world.cache.peek(world.outbox.answered["r2"][0].prefix.key).hbm_behaviours
