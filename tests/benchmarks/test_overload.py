"""The overload benchmark: the figures of a row, and a run in miniature."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from relaygr.bench.generator.samples import LOST, Sample
from relaygr.bench.overload.__main__ import OverloadModel
from relaygr.bench.overload.run import PLANS, Used, measure_overload, row_of

BUDGET_MS = 500
RANKED = Sample(
    row=0, part=1, user_id="u", history_length=8, ranking_us=0, lag_us=1_000, latency_us=90_000, status="ranked",
    path="full", to_worker_us=1_000, in_worker_us=86_000, to_gateway_us=2_000, pre_infer_us=50_000, rank_us=30_000,
)  # fmt: skip
REFUSED = replace(RANKED, status="failed", path=None, pre_infer_us=0, rank_us=0)
LATE_US = 600_000


def test_a_row_counts_what_was_in_time_what_was_told_and_what_was_wasted() -> None:
    requests = [
        *[RANKED] * 6,
        *[replace(RANKED, path="truncated")] * 2,
        replace(RANKED, latency_us=LATE_US),
        *[REFUSED] * 8,
        replace(REFUSED, latency_us=LATE_US),
        replace(REFUSED, status="expired", latency_us=LATE_US),
        replace(REFUSED, status=LOST, latency_us=None),
        *[replace(RANKED, part=3)] * 3,
        replace(REFUSED, part=3),
    ]
    used = Used(device_s=0.8, cores={"worker": 1.0, "broker": 0.3}, foreign_cpu=0.1)
    row = row_of(requests, 2.0, BUDGET_MS, 2.0, used)
    assert (row.offered_per_s, row.in_time_per_s, row.whole_in_time_per_s) == (10.0, 4.0, 3.0)
    assert row.told_in_time_share == pytest.approx(8 / 12)
    assert row.wasted_device_share == pytest.approx(0.1)
    assert (row.refused, row.expired, row.late, row.unanswered) == (9, 1, 1, 1)
    assert (row.latency_p50_ms, row.to_worker_p99_ms, row.in_worker_p99_ms, row.to_gateway_p99_ms) == (90, 1, 86, 2)
    assert row.calm_in_time_share == 0.75
    assert (row.cpu_worker, row.cpu_broker, row.foreign_cpu, row.valid) == (1.0, 0.3, 0.1, True)


def test_a_row_whose_generator_was_late_is_not_valid() -> None:
    assert not row_of([replace(RANKED, lag_us=60_000)], 1.0, BUDGET_MS, 1.0, Used()).valid
    assert not row_of([], 1.0, BUDGET_MS, 1.0, Used()).valid


@pytest.mark.slow
def test_a_run_in_miniature_writes_its_rows_and_its_plot(tmp_path: Path) -> None:
    plan = PLANS[OverloadModel.NULL]
    # On a busy machine, too, the capacity is above the first probe's rate, and no row is invalid.
    requests = replace(plan.requests, budget_ms=20_000, returning_users=20, new_share=1 / 3)
    plan = replace(plan, requests=requests, loads=(1, 2), bounds=(5.0, 20.0), probe_s=1.0, probes=1)
    measure_overload(plan, 1.0, "embedded", tmp_path / "rows.csv", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [row["load"] for row in rows] == [1, 2]
    assert all(row["in_time_per_s"] > 0 and row["unanswered"] == 0 for row in rows)
    assert {"offered_per_s", "told_in_time_share", "wasted_device_share", "valid"} <= rows[0].keys()
    assert (tmp_path / "null.png").stat().st_size > 10_000
    assert len((tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()) == 3
