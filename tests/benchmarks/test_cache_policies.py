"""The benchmark of eviction policies: its traffic, its figures, and what the default policy has to show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relaygr.bench.cache import policies, report
from relaygr.bench.cache.run import LATENCY
from relaygr.replay.demand import NO_VISIT, demands_of
from relaygr.worker.cache.policies import DEFAULT_POLICY, PolicyName, TierPolicies
from relaygr.worker.settings import WorkerSettings

VISITS = 1_500


@pytest.mark.parametrize("name", policies.TRAFFIC)
def test_every_kind_of_traffic_is_visits_of_users_who_return(name: str) -> None:
    random = np.random.default_rng(1)
    demands = demands_of(policies.rows_of(policies.TRAFFIC[name](random, 300), random))
    begun = demands.reusable != NO_VISIT
    assert 100 < int(begun.sum()) <= len(demands)
    assert 0 < int((demands.reusable > 0).sum()) < int(begun.sum())
    assert policies.footprint_bytes(demands) > 0


def test_the_settings_and_the_cache_have_one_default() -> None:
    settings = WorkerSettings()
    assert settings.hbm_policy is settings.dram_policy is TierPolicies().hbm is TierPolicies().dram is DEFAULT_POLICY


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least_gain"), [("scans", 0.02), ("drifting", -0.05)])
def test_the_default_policy_gains_where_some_users_return_often_and_loses_little_elsewhere(
    name: str, least_gain: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """LRU was the default. With four fifths protected, SLRU loses 0.12 of the device time on drifting traffic."""
    monkeypatch.setattr(policies, "SHARES", ((0.2, 0.0),))
    random = np.random.default_rng(1)
    demands = demands_of(policies.rows_of(policies.TRAFFIC[name](random, VISITS), random))
    compared = [TierPolicies(each, each) for each in (PolicyName.LRU, DEFAULT_POLICY)]
    lru, default = figures = list(policies.measure(name, demands, LATENCY, "now", 1, compared))
    assert default.time_saved - lru.time_saved > least_gain
    assert max(lru.in_either, default.in_either) <= lru.bound
    report.plot_policies(tmp_path / "x.png", figures)
    assert report.policies_table(name, figures).row_count == 1
    assert (tmp_path / "x.png").exists()
