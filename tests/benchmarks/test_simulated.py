"""The comparison of simulated with measured runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relaygr.bench.simulated.agreement import Outcome, Row, inverted, outcome_of, row_of
from relaygr.bench.simulated.run import parse_loads
from relaygr.runtime.errors import RelayError
from relaygr.simulate.case import System
from relaygr.simulate.figures import CODE, NO_LATENCY, Ending, Requests, requests_of
from relaygr.traffic.records import ImpressionRecord

RUN = Outcome(100, p50_ms=20.0, p99_ms=50.0, late_share=0.10, mix=(0.8, 0.1, 0.0, 0.1, 0, 0, 0, 0, 0))


def row(measured: list[Outcome], simulated: Outcome, load: float = 0.3, system: System = System.RELAY) -> Row:
    return row_of(load, system, 10.0, measured, [simulated] * len(measured))


@pytest.mark.parametrize(
    ("changed", "agrees"),
    [
        ({}, True),
        ({"p50_ms": 20.9, "p99_ms": 46.0, "late_share": 0.115, "mix": (0.775, 0.125, 0, 0.1, 0, 0, 0, 0, 0)}, True),
        ({"p50_ms": 21.1}, False),
        ({"p99_ms": 44.0}, False),
        ({"late_share": 0.13}, False),
        ({"mix": (0.76, 0.14, 0, 0.1, 0, 0, 0, 0, 0)}, False),
    ],
)
def test_a_cell_agrees_within_the_limits(changed: dict[str, object], agrees: bool):
    assert row([RUN], replace(RUN, **changed)).agrees is agrees  # type: ignore[arg-type]


def test_where_repeated_runs_differ_by_more_their_spread_is_the_limit():
    measured = [RUN, replace(RUN, p50_ms=24.0), replace(RUN, p50_ms=22.0)]
    assert row(measured, replace(RUN, p50_ms=25.0)).agrees
    assert not row(measured, replace(RUN, p50_ms=27.0)).agrees


def test_a_verdict_names_what_differs_and_its_limit():
    assert row([RUN], RUN).verdict == "agrees"
    assert row([RUN], replace(RUN, p50_ms=24.0)).verdict == "differs: P50 +20% (limit 5%)"
    assert row([RUN], replace(RUN, p99_ms=40.0), load=0.9).verdict == "out of range (differs: P99 -20% (limit 10%))"


def test_a_cell_near_saturation_is_out_of_range():
    assert [row([RUN], RUN, load).in_range for load in (0.3, 0.8, 0.81)] == [True, True, False]


def test_an_inverted_order_of_two_cells_is_named():
    slow = replace(RUN, p99_ms=90.0)
    right = [row([RUN], RUN), row([slow], slow, system=System.OFF)]
    wrong = [row([RUN], slow), row([slow], RUN, load=0.6, system=System.OFF)]
    assert inverted(right) == []
    assert inverted(wrong) == ["relay at 0.3 and off at 0.6"]
    # Above 80 % of capacity nothing is promised.
    assert inverted([wrong[0], row([slow], RUN, load=0.9, system=System.OFF)]) == []


def test_measured_and_simulated_requests_have_the_same_figures():
    def record(number: int, status: str, path: str | None, latency_us: int | None, reason: str | None = None):
        return ImpressionRecord(number, str(number), "u", status, latency_us, 0, False, reason, path)

    measured = requests_of(
        [
            record(0, "ranked", "hbm", 10_000),
            record(1, "ranked", "truncated", 30_000),
            record(2, "failed", None, 5_000, "overloaded"),
            record(3, "lost", None, None),
        ]
    )
    endings = [Ending.HBM, Ending.TRUNCATED, Ending.REFUSED, Ending.LOST]
    simulated = Requests(
        np.array([10_000, 30_000, 5_000, NO_LATENCY]), np.array([CODE[each] for each in endings], np.uint8)
    )
    assert outcome_of(measured, 40_000) == outcome_of(simulated, 40_000)
    assert (outcome_of(measured, 40_000).p50_ms, outcome_of(measured, 40_000).late_share) == (20.0, 0.75)


@pytest.mark.parametrize("text", ["", "much", "0.3,2", "0"])
def test_loads_are_parts_of_the_capacity(text: str):
    assert parse_loads("0.3,0.6") == [0.3, 0.6]
    with pytest.raises(RelayError, match="--loads"):
        parse_loads(text)
