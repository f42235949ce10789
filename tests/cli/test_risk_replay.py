"""The replay of the trigger's test of the risk on recorded requests, and its command."""

from __future__ import annotations

import random
from pathlib import Path as FilePath

import numpy as np
import pytest
from typer.testing import CliRunner

from relaygr.admission.latency import LatencyModel
from relaygr.admission.risk import RiskTargets, full_path_us
from relaygr.cli.app import app
from relaygr.replay.risk import RULES, RecordedRequest, RiskRule, replay_risk, requests_of
from relaygr.schemas.messages import LatencyCoefficients, StageTimings
from relaygr.traffic.records import ImpressionRecord, RecordWriter, pack_scores
from relaygr.worker.calibration import Calibration, MachineDescription, save_calibration
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.options import ComputeDtype

COEFFICIENTS = LatencyCoefficients(0, 10, 0, 0, 10, 0, 0, 10, 0, 0, 0)
LINEAR = LatencyModel(COEFFICIENTS)
BUDGET_US = 32_000
OLD = RiskRule("old", uses_reports=False)
FIXED = RiskRule("fixed")
LEARNING = RiskRule("learning", targets=RiskTargets())


def crowded(count: int = 3_000, slowness: float = 2.0) -> list[RecordedRequest]:
    """Requests of a worker whose full inference takes twice the calibrated time."""
    rng = random.Random(3)
    made = []
    for _ in range(count):
        tokens, outside_us = rng.randint(200, 4_000), rng.randint(500, 3_000)
        device_us = round(full_path_us(LINEAR, tokens, 100) * slowness * rng.uniform(0.95, 1.05))
        made.append(RecordedRequest(tokens, 100, 0, outside_us, device_us, outside_us + device_us <= BUDGET_US))
    return made


def test_the_calibrated_time_alone_misjudges_what_a_crowded_worker_cuts() -> None:
    old, fixed, learning = (
        replay_risk(crowded(), rule, LINEAR, BUDGET_US, rate_per_s=20) for rule in (OLD, FIXED, LEARNING)
    )
    assert old.missed_share > 0.3
    assert fixed.missed_share < old.missed_share / 5
    assert learning.missed_share < 0.02
    assert learning.needless_share < 0.25


def test_a_larger_margin_trades_missed_requests_for_needless_ones() -> None:
    results = [
        replay_risk(crowded(), RiskRule("", margin=margin), LINEAR, BUDGET_US, rate_per_s=20)
        for margin in (0.8, 1.0, 1.25)
    ]
    low, middle, high = results
    assert low.missed > middle.missed > high.missed
    assert low.needless < middle.needless < high.needless
    for result in results:
        assert result.left + result.prepared == 3_000


def record(number: int, path: str, **fields: object) -> ImpressionRecord:
    timings = StageTimings(queue_us=500, pre_infer_us=6_000, rank_us=1_000, total_us=8_000)
    values = {"latency_us": 10_000, "late": False, "prefix_tokens": 800, "history_length": 400, "timings": timings}
    return ImpressionRecord(
        number, f"r{number}", "u", "ranked", send_lag_us=0, path=path, scores=pack_scores(np.zeros(9, np.float32)),
        **{**values, **fields},
    )  # type: ignore[arg-type]  # fmt: skip


def test_a_truncated_request_counts_with_the_whole_length_of_its_history() -> None:
    whole, cut = requests_of([record(2, "truncated", prefix_tokens=64, history_length=600), record(1, "full")])
    assert whole == RecordedRequest(800, 9, 500, 3_000, 7_000, True)
    assert (cut.prefix_tokens, cut.in_time) == (1_200, False)


def test_requests_that_hit_or_have_no_answer_are_left_out() -> None:
    records = [record(1, "hbm"), record(2, "full", latency_us=None), record(3, "full", timings=None)]
    assert requests_of(records) == []


@pytest.fixture
def calibration(tmp_path: FilePath) -> FilePath:
    machine = MachineDescription("-", "cpu", "-", "-", 1, "-", KvDtype.FLOAT32, 16, ComputeDtype.FLOAT32, "torch")
    path = tmp_path / "calibration.json"
    save_calibration(Calibration(machine, "2026-01-01T00:00:00Z", COEFFICIENTS, (), (), (), ()), path)
    return path


def test_the_command_prints_a_line_for_each_rule(tmp_path: FilePath, calibration: FilePath) -> None:
    records = tmp_path / "full.jsonl"
    writer = RecordWriter(records)
    for number in range(20):
        writer.write(record(number, "full" if number % 2 else "truncated"))
    writer.close()
    done = CliRunner().invoke(app, ["risk", str(records), "--calibration", str(calibration), "--budget-ms", "32"])
    assert done.exit_code == 0, done.output
    assert "20 requests ran in full, 10 of them truncated or late" in done.output
    assert done.output.count("quantiles") == len(RULES) - 1


def test_a_run_with_no_full_request_is_refused(tmp_path: FilePath, calibration: FilePath) -> None:
    records = tmp_path / "hits.jsonl"
    writer = RecordWriter(records)
    writer.write(record(1, "hbm"))
    writer.close()
    done = CliRunner().invoke(app, ["risk", str(records), "--calibration", str(calibration), "--budget-ms", "32"])
    assert done.exit_code == 1
    assert "no request that ran in full" in done.output
