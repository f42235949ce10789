"""The push benchmark: the phases of a run, and the checkpoint that is pushed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from relaygr.bench.push.run import phases, replace_model
from relaygr.traffic.records import ImpressionRecord
from relaygr.worker.calibration import load_calibration
from relaygr.worker.model.checkpoint import load_checkpoint
from tests.worlds.relay import make_model

RECORD = ImpressionRecord(0, "g.0.0", "u", "ranked", 10_000, 0, False, path="hbm", model_revision="old")


def test_each_phase_counts_its_own_part_of_the_schedule_without_the_cold_start() -> None:
    records = [replace(RECORD, number=number) for number in range(100)]
    at_s = [number / 10 for number in range(100)]
    records[20] = replace(records[20], late=True)
    records[55] = replace(records[55], path="truncated")
    records[60:] = [replace(record, model_revision="new") for record in records[60:]]
    before, push, after = phases(records, at_s, pushed_s=5.0, push_ends_s=7.5, new_revision="new")
    assert [each.offered for each in (before, push, after)] == [33, 25, 25]
    assert (before.late_share, push.late_share, after.late_share) == (1 / 33, 1 / 25, 0)
    assert [each.new_revision for each in (before, push, after)] == [0, 15, 25]
    assert push.offered_p99_ms == float("inf")
    assert after.offered_p99_ms == pytest.approx(10)


def test_the_pushed_checkpoint_has_other_weights_and_a_calibration_under_its_revision(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    before = load_checkpoint(folder)
    revision = replace_model(folder, seed=8)
    after = load_checkpoint(folder)
    assert after.revision == revision != before.revision
    assert after.config == before.config
    assert load_calibration(folder / "calibration.json").machine.model_revision == revision
