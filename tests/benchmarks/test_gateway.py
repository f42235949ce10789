"""The benchmark of the HTTP gateway: its schedule, its open loop, and a short run of both ways."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path

import numpy as np
import pytest

from relaygr.bench.gateway.run import Plan, measure_gateway, play, schedule

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
    assert [row["direct_ranked"] for row in rows] == [row["http_ranked"] for row in rows] == [50, 50]
    for row in rows:
        assert row["added_p99_ms"] == pytest.approx(row["http_p99_ms"] - row["direct_p99_ms"], abs=0.01)
        assert row["gateway_cpu_ms"] > 0
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        assert [row["rate_per_s"] for row in csv.DictReader(file)] == ["50.0", "50.0"]
