"""The overload benchmark: the figures of a row, and a run in miniature."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from relaygr.bench.overload import rules
from relaygr.bench.overload import run as overload
from relaygr.bench.overload.__main__ import OverloadModel
from relaygr.bench.overload.run import PLANS, OverloadRow, Used, measure_overload, row_of
from relaygr.schemas.messages import StageTimings
from relaygr.traffic.records import LOST, ImpressionRecord

BUDGET_MS = 500
TIMINGS = StageTimings(pre_infer_us=50_000, rank_us=30_000, total_us=86_000)
RANKED = ImpressionRecord(
    0, "g.0.0", "u", "ranked", 90_000, 1_000, False, path="full", to_worker_us=1_000, timings=TIMINGS,
)  # fmt: skip
REFUSED = replace(RANKED, status="failed", path=None, timings=StageTimings())
LATE = {"latency_us": 600_000, "late": True}


def test_a_row_counts_what_was_in_time_what_was_told_and_what_was_wasted() -> None:
    requests = [
        *[RANKED] * 6,
        *[replace(RANKED, path="truncated")] * 2,
        replace(RANKED, **LATE),
        *[REFUSED] * 8,
        replace(REFUSED, **LATE),
        replace(REFUSED, status="expired", **LATE),
        replace(REFUSED, status=LOST, latency_us=None, late=True),
    ]
    calm = [*[RANKED] * 3, REFUSED]
    used = Used(device_s=0.8, cores={"worker": 1.0, "gateway": 0.2, "broker": 0.3}, foreign_cpu=0.1)
    row = row_of(requests, calm, 2.0, BUDGET_MS, 2.0, used)
    assert (row.offered_per_s, row.in_time_per_s, row.whole_in_time_per_s) == (10.0, 4.0, 3.0)
    assert row.told_in_time_share == pytest.approx(8 / 12)
    assert row.wasted_device_share == pytest.approx(0.1)
    assert (row.refused, row.expired, row.late, row.unanswered) == (9, 1, 1, 1)
    assert (row.latency_p50_ms, row.latency_p99_ms) == (90, 90), "of those in time"
    assert row.calm_in_time_share == 0.75
    assert (row.cpu_worker, row.cpu_load, row.cpu_broker, row.foreign_cpu) == (1.0, 0.2, 0.3, 0.1)
    assert row.valid


def test_the_time_of_a_request_is_the_way_to_the_worker_the_time_in_it_and_the_way_back() -> None:
    row = row_of([RANKED], [], 1.0, BUDGET_MS, 1.0, Used())
    assert (row.to_worker_p99_ms, row.in_worker_p99_ms, row.to_gateway_p99_ms) == (1, 86, 2)


def test_a_row_whose_generator_was_late_is_not_valid() -> None:
    assert not row_of([replace(RANKED, send_lag_us=60_000)], [], 1.0, BUDGET_MS, 1.0, Used()).valid
    assert not row_of([], [], 1.0, BUDGET_MS, 1.0, Used()).valid


def test_probes_whose_sender_was_late_are_told_beside_the_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Runs:
        """From 20 requests a second on the sender is late."""

        def __init__(self, *_: object) -> None:
            pass

        def warm_up(self, rate_per_s: float) -> None:
            pass

        def play(self, title: str, load: float, rate_per_s: float, *_: float) -> OverloadRow:
            return row_of([replace(RANKED, send_lag_us=60_000 * (rate_per_s >= 20))], [], load, BUDGET_MS, 1.0, Used())

    monkeypatch.setattr(overload, "_settings", lambda *_: (None, (1.0, 100.0)))
    monkeypatch.setattr(overload, "DemoStack", lambda *_, **__: nullcontext())
    monkeypatch.setattr(overload, "_Runs", Runs)
    said = io.StringIO()
    plan = replace(PLANS[OverloadModel.SMALL], probes=2)
    overload.measure(Console(file=said), None, tmp_path, plan, 1.0)  # type: ignore[arg-type]
    assert said.getvalue() == (
        "capacity: 10.0 requests a second; the sender was late in 1 of 2 probes, which count as failed\n"
    )


def test_the_row_of_a_rule_has_the_mean_of_the_pairs_and_its_interval() -> None:
    whole, without = [np.array([90.0, 10.0, 50.0]), np.array([80.0, 12.0, 60.0])], [np.array([88.0, 20.0, 50.0])] * 2
    row = rules.row_of("load", "rule", whole, without)
    assert (row.in_time, row.in_time_change, row.p50_change_ms, row.p99_change_ms) == (85.0, 3.0, 9.0, -5.0)
    assert row.in_time_interval == pytest.approx(12.7062 * 5, rel=1e-4)  # Student's t of two pairs.


@pytest.mark.slow
def test_without_short_work_first_requests_with_a_ready_prefix_wait_for_long_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "LOADS", rules.LOADS[1:2])
    monkeypatch.setattr(rules, "RULES", {"short work first": rules.RULES["short work first"]})
    rules.measure_rules(2, tmp_path / "rules.csv", tmp_path / "rules.json")
    (row,) = json.loads((tmp_path / "rules.json").read_text(encoding="utf-8"))
    assert row["p50_change_ms"] > 0.5 * row["p50_ms"], row
    assert len((tmp_path / "rules.csv").read_text(encoding="utf-8").splitlines()) == 2


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
