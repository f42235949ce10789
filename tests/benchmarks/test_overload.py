"""The overload benchmark: the figures of a row, and a run in miniature."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from relaygr.bench.overload.__main__ import OverloadModel
from relaygr.bench.overload.run import PLANS, measure_overload, row_of
from relaygr.schemas.messages import StageTimings
from relaygr.traffic.records import LOST, ImpressionRecord

PLAN = PLANS[OverloadModel.SMALL]
RANKED = ImpressionRecord(
    0, "r", "u", "ranked", 90_000, 1_000, late=False, path="full",
    timings=StageTimings(pre_infer_us=60_000, rank_us=20_000),
)  # fmt: skip
REFUSED = replace(RANKED, status="failed", reason="overloaded", path=None, timings=StageTimings())


def test_a_row_counts_what_was_in_time_what_was_told_and_what_was_wasted() -> None:
    records = [
        *[RANKED] * 6,
        *[replace(RANKED, path="truncated")] * 2,
        replace(RANKED, late=True),
        *[REFUSED] * 8,
        replace(REFUSED, late=True),
        replace(REFUSED, status="expired", reason=None, late=True),
        replace(REFUSED, status=LOST, latency_us=None, late=True),
    ]
    row = row_of(records, 2.0, PLAN, seconds=2.0, device_s=0.8)
    assert (row.offered_per_s, row.in_time_per_s, row.whole_in_time_per_s) == (10.0, 4.0, 3.0)
    assert row.told_in_time_share == pytest.approx(8 / 12)
    assert row.wasted_device_share == pytest.approx(0.1)
    assert (row.refused, row.expired, row.late, row.unanswered) == (9, 1, 1, 1)
    assert (row.latency_p50_ms, row.valid) == (90.0, True)


def test_a_row_whose_generator_was_late_is_not_valid() -> None:
    row = row_of([replace(RANKED, send_lag_us=60_000)], 1.0, PLAN, seconds=1.0, device_s=1.0)
    assert not row.valid
    assert not row_of([], 1.0, PLAN, seconds=1.0, device_s=0.0).valid


@pytest.mark.slow
def test_a_run_in_miniature_writes_its_rows_and_its_plot(tmp_path: Path) -> None:
    plan = replace(
        PLANS[OverloadModel.NULL], loads=(1, 2), lowest_per_s=5.0, highest_per_s=20.0, probe_s=1.0, probes=1, users=20
    )
    measure_overload(plan, 1.0, "embedded", tmp_path / "rows.csv", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [row["load"] for row in rows] == [1, 2]
    assert all(row["offered_per_s"] > 0 for row in rows)
    assert {"in_time_per_s", "told_in_time_share", "wasted_device_share", "valid"} <= rows[0].keys()
    assert (tmp_path / "null.png").stat().st_size > 10_000
    assert len((tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()) == 3
