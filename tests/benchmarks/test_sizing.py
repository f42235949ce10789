"""`python -m benchmarks.sizing`: how a prediction and a run are compared, and a short run of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relaygr.bench.sizing.run import Line, Sample, SizingPlan, compare_with_run, counted, returning, sample_of
from relaygr.settings import load_settings
from relaygr.traffic.records import ImpressionRecord
from relaygr.ui.scrape import parse_reading

METRICS = """
relaygr_worker_device_seconds_total{work_class="ranking"} 2
relaygr_worker_device_seconds_total{work_class="pre_infer"} 3
relaygr_cache_leases 4
relaygr_cache_bytes{tier="hbm",held="free"} 100
relaygr_cache_bytes{tier="hbm",held="withheld"} 50
relaygr_cache_bytes{tier="hbm",held="evictable"} 30
relaygr_cache_bytes{tier="hbm",held="leased"} 20
relaygr_cache_bytes{tier="dram",held="evictable"} 70
relaygr_cache_entries{tier="hbm"} 5
relaygr_cache_entries{tier="dram"} 7
"""


def record(number: int, user: str) -> ImpressionRecord:
    return ImpressionRecord(number, f"r{number}", user, "ranked", 1_000, 0, False, path="hbm")


def sample(at_s: float, device_s: float) -> Sample:
    return Sample(at_s, device_s, 0.0, {"hbm": 0.0, "dram": 0.0}, {"hbm": 0.0, "dram": 0.0})


def test_used_bytes_are_those_that_prefixes_hold() -> None:
    found = sample_of(parse_reading(METRICS), 1.5)
    assert (found.device_s, found.leases) == (5.0, 4.0)
    assert found.bytes_used == {"hbm": 50.0, "dram": 70.0}
    assert found.entries == {"hbm": 5.0, "dram": 7.0}


def test_shares_differ_in_points_and_amounts_by_a_part_of_the_measured_one() -> None:
    assert Line("load", "%", 0.5, 0.6).difference == pytest.approx(-0.1)
    assert Line("users", "", 120, 100).difference == pytest.approx(0.2)


def test_a_user_who_came_only_in_the_beginning_does_not_return_at_the_end() -> None:
    """Of eight impressions the last two count, each with the six before it."""
    users = ["early", "old", "a", "b", "c", "d", "old", "early"]
    assert returning([record(number, user) for number, user in enumerate(users)]) == 0.5
    assert returning([record(number, str(number)) for number in range(8)]) == 0.0


def test_samples_count_after_the_cold_beginning_and_until_the_last_impression() -> None:
    settings = load_settings(None, environment={}, overrides=("traffic.duration_s=8",))
    samples = [sample(0, 1), sample(1, 1), *(sample(2 + second, 2 + second) for second in range(12))]
    found = counted(samples, settings)
    assert (found[0].at_s, found[-1].at_s) == (4, 10)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_short_run_compares_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LEARNING_S", 5.0), ("LEARNING_REQUESTS", 120), ("IMPRESSIONS", 300), ("SEARCH_STEPS", 2)):
        monkeypatch.setattr(f"relaygr.bench.sizing.run.{name}", value)
    compare_with_run(SizingPlan(0.5, 6.0), "embedded", tmp_path / "rows.csv", tmp_path / "rows.json")
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))}
    assert rows["K,V of a user in HBM"]["measured"] > 0
    assert rows["device load"]["measured"] > 0 and rows["device load"]["alone"] > 0
    assert 0 <= rows["late requests"]["measured"] <= 1
    assert (tmp_path / "rows.csv").exists()
