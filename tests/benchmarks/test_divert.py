"""The benchmark of diverting: its loads, its figures and its paced model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relaygr.bench.divert import run
from relaygr.bench.divert.paced import read_pace, set_pace
from relaygr.bench.divert.run import BUDGET_MS, RATES, USERS, Load, row_of, trace_of, users_of
from relaygr.bench.divert.simulated import SimulatedFleet
from relaygr.bench.generator.samples import LOST, Sample
from relaygr.schemas.partitioner import partition_for

PARTITIONS = 8
RANKED = Sample(
    row=0, part=1, user_id="u", history_length=8, ranking_us=0, lag_us=1_000, latency_us=90_000, status="ranked",
    path="full",
)  # fmt: skip


def test_a_row_counts_as_late_what_has_no_whole_answer_in_time() -> None:
    samples = [
        *[RANKED] * 5,
        replace(RANKED, path="truncated"),
        replace(RANKED, latency_us=(BUDGET_MS + 1) * 1000),
        *[replace(RANKED, status="failed", path=None)] * 2,
        replace(RANKED, status=LOST, latency_us=None),
    ]
    row = row_of(Load.HOT_USER, True, samples, diverted=4, diverted_late=1)
    assert (row.requests, row.late_share, row.unranked_share) == (10, 0.5, pytest.approx(0.3))
    assert (row.truncated_share, row.diverted_share, row.diverted_late) == (0.1, 0.4, 1)
    assert (row.latency_p50_ms, row.valid) == (90, True)


def test_a_row_whose_generator_was_late_is_not_valid() -> None:
    assert not row_of(Load.HOT_USER, False, [replace(RANKED, lag_us=60_000)], 0, 0).valid


@pytest.mark.parametrize("load", Load)
def test_a_load_has_its_rate_and_every_fleet_gets_the_same(load: Load) -> None:
    seconds = 60.0
    trace = trace_of(load, seconds, PARTITIONS, seed=1)
    rates = RATES[load]
    assert len(trace) == pytest.approx((rates.even_per_s + rates.hot_per_s) * seconds, rel=0.1)
    assert np.array_equal(trace.ranking_us, trace_of(load, seconds, PARTITIONS, seed=1).ranking_us)
    assert set(trace.user_id) <= set(users_of(load, PARTITIONS))


def test_a_hot_user_has_most_of_the_requests_and_a_hot_partition_all() -> None:
    users = Counter(trace_of(Load.HOT_USER, 30.0, PARTITIONS, seed=0).user_id)
    assert users.most_common(1)[0][1] > 0.6 * users.total()
    hot = trace_of(Load.HOT_PARTITION, 30.0, PARTITIONS, seed=0).user_id
    assert {partition_for(user.encode(), PARTITIONS) for user in hot} == {0}
    assert 0.7 * USERS < len(set(hot)) <= USERS
    even = {partition_for(user.encode(), PARTITIONS) for user in users_of(Load.SLOW_WORKER, PARTITIONS)}
    assert len(even) == PARTITIONS


def test_a_pace_is_one_until_it_is_set(tmp_path: Path) -> None:
    file = tmp_path / "pace"
    assert read_pace(file) == 1.0
    set_pace(file, 2.5)
    assert read_pace(file) == 2.5
    file.write_text("")
    assert read_pace(file) == 1.0


@pytest.mark.parametrize("load", Load)
def test_diverting_lowers_the_late_share_in_virtual_time(load: Load) -> None:
    without, with_divert = (SimulatedFleet(divert) for divert in (False, True))
    late = without.run(load, 6.0, 1)
    row = with_divert.run(load, 6.0, 1)
    assert late.late_share > 0.1 and late.diverted_share == 0
    assert row.late_share < late.late_share / 4
    assert row.diverted_share > 0.05
    # Each request has exactly one answer, and a fleet that diverts twice raises an error.
    assert {request.answers for fleet in (without, with_divert) for request in fleet.requests} == {1}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_in_miniature_has_a_row_for_each_load_and_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "USERS", 5)
    monkeypatch.setattr(run, "SETTLE_S", 0.1)
    run.measure_divert(1.0, 1, "embedded", tmp_path / "rows.csv", None)
    lines = (tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 2 * len(Load)
