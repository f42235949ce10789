"""`relaygr model bench`: times and sizes of a model, and for which lengths and return gaps the relay saves work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from relaygr.cli.app import app
from relaygr.machine import Cores, CoreWatch
from relaygr.simulate.visit import Tier, VisitTimes, break_even

FIGURES = VisitTimes(
    behaviours=1000,
    tokens=1000,
    pre_us=90_000.0,
    append_us=5_000.0,
    hit_us=10_000.0,
    reload_us=2_500.0,
    kv_bytes=1_000_000,
    dram_kv_bytes=500_000,
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["model", *map(str, arguments)])


def test_a_tier_keeps_a_prefix_until_its_places_are_taken_by_other_visits() -> None:
    found = break_even(FIGURES, 50_000_000, 100_000_000, 10.0, grows=True)
    assert (found.prefixes_in_hbm, found.prefixes_in_dram) == (50, 200)
    assert (found.hbm_keeps_s, found.dram_keeps_s) == (5.0, 25.0)
    assert [found.tier(gap_s) for gap_s in (5, 6, 25, 26)] == [Tier.HBM, Tier.DRAM, Tier.DRAM, Tier.NONE]
    assert found.work == pytest.approx({Tier.HBM: 0.15, Tier.DRAM: 0.175, Tier.NONE: 1.0})


def test_the_default_rate_of_visits_loads_the_device_with_full_inference() -> None:
    found = break_even(FIGURES, 50_000_000, 0, None, grows=True)
    assert found.visits_per_second == pytest.approx(7.0)
    assert found.tier(8.0) is Tier.NONE


def test_prefixes_that_do_not_grow_are_kept_for_no_visit() -> None:
    found = break_even(FIGURES, 50_000_000, 100_000_000, 10.0, grows=False)
    assert found.tier(0.1) is Tier.NONE


@pytest.mark.slow
def test_a_model_is_measured_as_a_table_as_json_and_as_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = "--layers 1 --dim 16 --heads 2 --max-prefix 256 --vocabulary 100"
    assert run("init", tmp_path / "model", *sizes.split()).exit_code == 0
    common = ("bench", tmp_path / "model", "--device", "cpu", "--repeats", 1, "--hbm", "1MiB", "--dram", "4MiB")
    done = run(*common, "--length", 64, "--length", 256, "--plot", tmp_path / "bench.svg")
    assert done.exit_code == 0, done.output
    assert "T_append" in done.output and "1 day" in done.output
    assert (tmp_path / "bench.svg").stat().st_size > 1000
    (row,) = json.loads(run(*common, "--length", 256, "--json").stdout)
    # 256 tokens x 1 layer x 2 heads x (8 + 8) x 4 bytes.
    assert (row["behaviours"], row["kv_bytes"], row["prefixes_in_hbm"]) == (256, 32_768, 32)
    assert row["full_us"] == pytest.approx(row["pre_us"] + row["hit_us"])
    monkeypatch.setattr(CoreWatch, "__exit__", lambda watch, *_: setattr(watch, "cores", Cores(2, 1.1)))
    busy = run(*common, "--length", 64, "--json")
    assert "Other processes use 1.1 of 2 cores" in busy.stderr and json.loads(busy.stdout)
    refused = run(*common, "--length", 300)
    assert refused.exit_code == 1
    assert "The model takes 256 behaviours" in refused.output


@pytest.mark.slow
def test_a_model_whose_prefixes_do_not_grow_is_told_so(tmp_path: Path) -> None:
    sizes = "--preset dlrm-v3 --layers 1 --dim 16 --heads 2 --max-prefix 64 --vocabulary 100"
    assert run("init", tmp_path / "model", *sizes.split()).exit_code == 0
    done = run("bench", tmp_path / "model", "--device", "cpu", "--repeats", 1, "--candidates", 8)
    assert "saves no work" in done.output, done.output
