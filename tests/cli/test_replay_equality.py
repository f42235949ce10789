"""A replay counts pages instead of listing them. Here it is held to the real cache, after each demand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.admission.latency import LatencyModel
from relaygr.replay.demand import SAME, DemandKind, Demands, demands_of
from relaygr.replay.histories import HistoryMaker, PrefixHistory, covered_behaviours
from relaygr.replay.link import LinkSpeed
from relaygr.replay.run import CacheReplay, Candidate, ReplayEnvironment
from relaygr.replay.synthetic import Sketches
from relaygr.replay.tiers import Tier
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.cache import PrefixKey
from relaygr.worker.cache.events import EventKind
from relaygr.worker.cache.identity import Mark, common_behaviours
from relaygr.worker.cache.invariants import check_invariants
from relaygr.worker.cache.policies import VISIT_US, PolicyName, TierPolicies
from relaygr.worker.cache.stats import TierStats
from relaygr.worker.cache.trace import TraceRow
from relaygr.worker.kv import DramGeometry, DramKvDtype, KvDtype, KvGeometry, PrefixLayout
from tests.worlds.replay import CacheReplayOracle, KeyMaker

PAGE_TOKENS = 16
SMALL_PAGES = DramGeometry(KvGeometry(1, 1, 1, 1, PAGE_TOKENS, KvDtype.FLOAT32), DramKvDtype.INT8)
# 64 MiB a page: the copy queue's bound of 1 GiB is reached.
LARGE_PAGES = DramGeometry(KvGeometry(1, 1, 2**20, 2**20, PAGE_TOKENS, KvDtype.BFLOAT16))
COEFFICIENTS = LatencyCoefficients(0, 0, 0, b0=50, b1=100, b2=0.1, c0=0, c1=0, c2=0, d0=0, d1=0)
SKETCHES = Sketches()
KINDS = [EventKind.PREPARE] * 6 + [EventKind.ACQUIRE] * 9 + [EventKind.INVALIDATE]


def random_rows(random: np.random.Generator, demands: int, users: int, mean_us: float) -> list[TraceRow]:
    """Users of Zipf popularity whose histories grow, shrink, slide or stay, under two models."""
    rows: list[TraceRow] = []
    lengths = random.integers(0, 200, (users, 2))
    starts = np.zeros((users, 2), int)
    at_us = 0
    for _ in range(demands):
        at_us += int(random.exponential(mean_us))
        user = min(int(random.zipf(1.3)) - 1, users - 1)
        model = int(random.random() < 0.1)
        change = random.random()
        if change < 0.25:
            lengths[user, model] += int(random.integers(1, 90))
        elif change < 0.3:
            lengths[user, model] = int(random.integers(0, lengths[user, model] + 1))
        elif change < 0.34:
            starts[user, model] += 1
        sketch = SKETCHES.of(str(user), int(starts[user, model]), int(lengths[user, model]))
        kind = KINDS[int(random.integers(len(KINDS)))]
        rows.append((kind.value, at_us, user, b"ab"[model : model + 1], sketch.behaviours, sketch.marks, "made"))
    return rows


def figures(tier: Tier | TierStats) -> tuple[int, int, int]:
    """Free and evictable pages, and entries."""
    return tier.free, tier.evictable, len(tier.by_number) if isinstance(tier, Tier) else tier.entries


def assert_equal(demands: Demands, environment: ReplayEnvironment, candidate: Candidate) -> None:
    fast, real = CacheReplay(demands, environment, candidate), CacheReplayOracle(demands, environment, candidate)
    for number, demand in enumerate(demands.rows()):
        fast.play(demand)
        real.play(demand)
        stats = real.cache.stats()
        assert figures(fast.hbm) == figures(stats.hbm), f"HBM after demand {number}: {demand}"
        assert figures(fast.dram) == figures(stats.dram), f"DRAM after demand {number}: {demand}"
        assert len(fast.hbm.leases) == stats.leases, f"leases after demand {number}: {demand}"
    counted, expected = fast.result(), real.result()
    check_invariants(real.cache)
    assert counted.asked_us == pytest.approx(expected.asked_us)
    assert replace(counted, asked_us=expected.asked_us) == expected


@pytest.mark.slow
@pytest.mark.parametrize("dram", PolicyName)
@pytest.mark.parametrize("hbm", PolicyName)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    hbm_pages=st.integers(1, 120),
    dram_pages=st.sampled_from([0, 5, 60, 400]),
    users=st.integers(2, 40),
    mean_us=st.sampled_from([500.0, 30_000.0, 400_000.0]),
    delay_us=st.sampled_from([0.0, 1_000.0, 5_000.0]),
    contextual_tokens=st.sampled_from([0, 3]),
    geometry=st.sampled_from([SMALL_PAGES, LARGE_PAGES]),
)
def test_a_replay_has_the_hits_evictions_and_pages_of_the_real_cache(
    hbm: PolicyName, dram: PolicyName, seed: int, hbm_pages: int, dram_pages: int, users: int, mean_us: float,
    delay_us: float, contextual_tokens: int, geometry: DramGeometry,
) -> None:  # fmt: skip
    demands = demands_of(random_rows(np.random.default_rng(seed), 150, users, mean_us))
    environment = ReplayEnvironment(
        geometry,
        PrefixLayout(contextual_tokens, 1),
        LatencyModel(COEFFICIENTS),
        LinkSpeed(delay_us, geometry.page_bytes / 100.0),
    )
    policies = TierPolicies(hbm, dram, ttl_us=5 * VISIT_US)
    assert_equal(
        demands,
        environment,
        Candidate(policies, hbm_pages * geometry.kv.page_bytes, dram_pages * geometry.page_bytes),
    )


@given(
    steps=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=2, max_size=14), merged=st.booleans()
)
def test_histories_cover_what_keys_cover(steps: list[tuple[int, int]], merged: bool) -> None:
    """Also after an entry grew and keeps marks, and for the beginning of a history."""
    keys: list[PrefixKey] = []
    histories: list[PrefixHistory] = []
    make_key, make_history = KeyMaker(), HistoryMaker()
    for length, shared in steps:
        if not keys:
            keys.append(make_key.key(1, 1, None, 0, length))
            histories.append(make_history.first(length))
            continue
        before = min(shared, length, keys[-1].length)
        keys.append(make_key.key(1, 1, keys[-1], before, length))
        histories.append(make_history.after(histories[-1], before, length))
    if merged:
        first, last = keys[0], keys[-1]
        keys.append(last.held((*first.marks, Mark(first.length, first.chain.digest))))
        histories.append(histories[-1].held((*histories[0].marks, (histories[0].length, histories[0].digest))))
    for key, history in list(zip(keys, histories, strict=True)):
        for length in {each.length for each in keys} | {64, 128}:
            head, beginning = key.head(length) if length <= key.length else None, None
            if length <= key.length:
                beginning = history.head(length)
                assert (head is None) == (beginning is None)
            if head is not None and beginning is not None:
                keys.append(head)
                histories.append(beginning)
    for asked, asked_history in zip(keys, histories, strict=True):
        assert asked.length == asked_history.length
        for held, held_history in zip(keys, histories, strict=True):
            assert covered_behaviours(asked_history, held_history) == common_behaviours(asked, held)


def test_demands_say_what_a_history_shares_with_the_one_before() -> None:
    first, grown, slid = SKETCHES.of("a", 0, 70), SKETCHES.of("a", 0, 130), SKETCHES.of("a", 5, 130)
    rows: list[TraceRow] = [
        (EventKind.PREPARE, 0, 7, b"m", first.behaviours, first.marks, ""),
        (EventKind.ACQUIRE, 10, 7, b"m", first.behaviours, first.marks, ""),
        (EventKind.RESERVE, 15, 7, b"m", first.behaviours, first.marks, ""),
        (EventKind.ACQUIRE, 2 * VISIT_US, 7, b"m", grown.behaviours, grown.marks, ""),
        (EventKind.ACQUIRE, 2 * VISIT_US - 5, 7, b"n", grown.behaviours, grown.marks, ""),
        (EventKind.ACQUIRE, 4 * VISIT_US, 7, b"m", slid.behaviours, slid.marks, ""),
        (EventKind.INVALIDATE, 5 * VISIT_US, 7, b"m", slid.behaviours, slid.marks, ""),
        (EventKind.ACQUIRE, 6 * VISIT_US, 7, b"m", slid.behaviours, slid.marks, ""),
    ]
    demands = demands_of(rows)
    assert demands.kinds.tolist() == [0, 1, 1, 1, 1, DemandKind.FORGET, 1]
    assert demands.owners.tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert demands.users.tolist() == [0, 0]
    assert demands.shared.tolist() == [0, SAME, 70, 0, 0, SAME, SAME]
    assert demands.reusable.tolist() == [0, -1, 70, 0, 0, -1, 0]
    assert demands.waits.tolist() == [0, 0, 1, 0, 2, 0, 0]
    assert demands.at_us.tolist() == [0, 10, 2 * VISIT_US, 2 * VISIT_US, 4 * VISIT_US, 5 * VISIT_US, 6 * VISIT_US]
    assert len(demands_of(rows, limit=3)) == 3
