"""The benchmark of the HTTP gateway: its schedule, its open loop, and a short run of both ways."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path

import numpy as np
import pytest

from relaygr.bench.gateway.__main__ import main
from relaygr.bench.gateway.run import Plan, measure_gateway, play, schedule
from relaygr.bench.gateway.tracing import ROUNDS, added

PLAN = Plan(rate_per_s=200.0, seconds=1.0, rounds=1, warm_up_s=0.5)


def test_both_ways_play_the_same_times_and_another_round_plays_others() -> None:
    one, again, other = schedule(PLAN, 1.0, 1), schedule(PLAN, 1.0, 1), schedule(PLAN, 1.0, 2)
    assert len(one) == 200 and np.array_equal(one, again) and not np.array_equal(one, other)


def test_a_request_is_sent_at_its_time_though_the_ones_before_it_are_open() -> None:
    """With a wait for each answer, the third request would be sent after 0.2 s and look fast."""
    seen: list[int] = []

    async def slow(number: int) -> bool:
        seen.append(number)
        await asyncio.sleep(0.1)
        return number != 1

    found = asyncio.run(play(np.array([0.0, 0.001, 0.002]), slow))
    assert seen == [0, 1, 2] and (found.offered, found.ranked) == (3, 2)
    assert found.p50_ms >= 100


@pytest.mark.slow
def test_a_short_run_has_the_figures_of_both_ways(tmp_path: Path) -> None:
    measure_gateway(Plan(50.0, 1.0, 2, 0.5), "embedded", tmp_path / "rows.csv", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    # On a machine that others keep busy a whole round of one second may be late.
    whole = [row for row in rows if row["direct_ranked"] == row["http_ranked"] == 50]
    assert len(rows) == 2 and whole
    for row in whole:
        assert row["added_p99_ms"] == pytest.approx(row["http_p99_ms"] - row["direct_p99_ms"], abs=0.01)
        assert row["gateway_cpu_ms"] > 0
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        assert [row["rate_per_s"] for row in csv.DictReader(file)] == ["50.0", "50.0"]


def test_what_slows_two_clients_alike_does_not_change_what_one_takes_more() -> None:
    random = np.random.default_rng(3)
    shared_us = random.lognormal(6, 0.5, 400)
    found = added(shared_us + random.normal(0, 4, 400), shared_us + 9 + random.normal(0, 4, 400))
    assert found.low_us < 9 < found.high_us and found.high_us - found.low_us < 3
    assert found.share == pytest.approx(found.us / np.median(shared_us), rel=0.05)
    with_export = added(shared_us, shared_us, 2.0)
    assert (with_export.low_us, with_export.us, with_export.high_us) == (2.0, 2.0, 2.0)


def test_each_client_has_each_place_once() -> None:
    for by_place in zip(*ROUNDS, strict=True):
        assert sorted(by_place) == [0, 1, 2]


@pytest.mark.slow
def test_a_short_run_has_the_cpu_time_that_tracing_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The run is shorter than the usual time between two exports.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    main(
        broker="embedded", tracing=True, sampled=0.5, blocks=6, impressions=10,
        out=tmp_path / "rows.csv", json=tmp_path / "row.json",
    )  # fmt: skip
    row = json.loads((tmp_path / "row.json").read_text(encoding="utf-8"))
    assert row["ranked_share"] > 0 and row["off_us"] > 0
    assert row["traced_low"] <= row["traced_share"] <= row["traced_high"]
    assert row["export_us"] > 0
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        assert [found["sampled"] for found in csv.DictReader(file)] == ["0.5"]
