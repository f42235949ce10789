"""The conditions for meaningful latencies of a load generator: stories 15 and 16 of docs/testing.md."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from scipy import stats

from relaygr.client import Ended, RankOutcome
from relaygr.traffic.player import Player
from relaygr.traffic.population import SyntheticPopulation
from relaygr.traffic.records import ImpressionRecord
from relaygr.traffic.schedule import Impression, impressions
from relaygr.traffic.settings import TrafficSettings

RATE_PER_S = 500.0
COUNT = 4_000


def first_impressions(seed: int) -> list[Impression]:
    settings = TrafficSettings(seed=seed, rate_per_s=RATE_PER_S, users=5, history_median=8, history_max=16, growth=0)
    return list(itertools.islice(impressions(settings, SyntheticPopulation(settings)), COUNT))


def exponential_p_value(gaps_us: np.ndarray) -> float:  # type: ignore[type-arg]
    return float(stats.kstest(gaps_us, stats.expon(scale=1e6 / RATE_PER_S).cdf).pvalue)


class TestArrivals:
    """15. A generator that spaced its requests evenly, or stretched them to a round total, measured no queueing."""

    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_gaps_are_exponential_by_kolmogorov_and_smirnov(self, seed: int) -> None:
        times_us = np.array([0, *(each.retrieval_us for each in first_impressions(seed))])
        gaps_us = np.diff(times_us)
        assert exponential_p_value(gaps_us) > 0.01
        # The test detects even gaps, and gaps stretched by a tenth.
        assert exponential_p_value(np.full(COUNT, gaps_us.mean())) < 1e-6
        assert exponential_p_value(gaps_us * 1.1) < 0.01

    def test_gaps_do_not_depend_on_those_before(self) -> None:
        gaps_us = np.diff([each.retrieval_us for each in first_impressions(1)])
        assert abs(np.corrcoef(gaps_us[:-1], gaps_us[1:])[0, 1]) < 4 / np.sqrt(COUNT)

    @pytest.mark.slow
    def test_the_total_duration_varies_with_the_seed_as_a_sum_of_such_gaps_does(self) -> None:
        totals_us = [first_impressions(seed)[-1].retrieval_us for seed in range(1, 21)]
        spread_us = np.sqrt(COUNT) / RATE_PER_S * 1e6
        assert 0.5 * spread_us < np.std(totals_us) < 2 * spread_us
        assert abs(np.mean(totals_us) - COUNT / RATE_PER_S * 1e6) < 4 * spread_us / np.sqrt(len(totals_us))


STALL_S = 0.3


class StallingClient:
    """Answers each request within a millisecond of taking it, but stalls for a while when it takes the first."""

    def __init__(self, on_late: Any, on_lost: Any) -> None:
        self.ids = itertools.count()
        self.stalled = False

    def __enter__(self) -> StallingClient:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def new_request_id(self) -> str:
        return f"g.0.{next(self.ids)}"

    def publish_history(self, history: Any) -> None:
        return None

    def publish_behaviours(self, event: Any) -> None:
        return None

    def publish_retrieval(self, user_id: str, **_: Any) -> None:
        return None

    def submit_rank(
        self, user_id: str, candidates: Any, request_id: str | None = None, **_: Any
    ) -> Future[RankOutcome]:
        taken_us = time.monotonic_ns() // 1000
        if request_id is not None and not self.stalled:
            self.stalled = True
            time.sleep(STALL_S)
        future: Future[RankOutcome] = Future()
        latency_us = time.monotonic_ns() // 1000 - taken_us
        future.set_result(RankOutcome(request_id or "", Ended.RANKED, latency_us))
        return future

    def drain(self, timeout_s: float) -> bool:
        return True


@pytest.mark.slow
def test_a_stalled_server_yields_growing_latency() -> None:
    """16. Coordinated omission: a generator that waited for a stalled server sent nothing meanwhile, so its P99
    covered only the requests that it had sent. Here the latency of every request counts from its due time.
    """
    settings = TrafficSettings(
        duration_s=0.6, rate_per_s=200, users=3, history_median=8, history_max=16, settle_s=0, lead_median_ms=1,
        lead_sigma=0, relay=False,
    )  # fmt: skip
    population = SyntheticPopulation(settings)
    records: list[ImpressionRecord] = []
    Player(StallingClient, settings, population, records.append).play()
    due_us = {each.number: each.ranking_us for each in impressions(settings, population)}
    assert sorted(record.number for record in records) == sorted(due_us), "every impression of the schedule was sent"
    first_due_us = min(due_us.values())
    during = [record for record in records if due_us[record.number] - first_due_us < STALL_S * 1e6]
    assert len(during) > 20
    for record in during:
        # The rest of the stall at the due time: a request due during the stall waits only for the rest.
        left_us = STALL_S * 1e6 - (due_us[record.number] - first_due_us)
        assert record.latency_us is not None
        assert record.latency_us >= left_us
    assert np.percentile([record.latency_us or 0 for record in records], 99) >= 0.8 * STALL_S * 1e6
