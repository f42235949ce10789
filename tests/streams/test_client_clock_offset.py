"""Worker clocks against ours: the sample with the shortest round trip decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.client.clock_offset import KEPT_US, SAMPLES_KEPT, ClockOffset, ClockOffsets, measure

MS = 1000


def test_equal_hops_give_the_offset_exactly() -> None:
    # The worker's clock is 7 ms ahead; the request takes 2 ms, the work 10 ms, the answer 2 ms.
    assert measure(0, 2 * MS + 7 * MS, 12 * MS + 7 * MS, 14 * MS) == ClockOffset(7 * MS, 2 * MS)


@given(
    offset_us=st.integers(-(10**9), 10**9),
    there_us=st.integers(0, 10**6),
    work_us=st.integers(0, 10**6),
    back_us=st.integers(0, 10**6),
)
def test_the_error_is_at_most_half_the_round_trip(offset_us: int, there_us: int, work_us: int, back_us: int) -> None:
    sent_us = 1_700_000_000_000_000
    received_us = sent_us + there_us + offset_us
    sample = measure(sent_us, received_us, received_us + work_us, sent_us + there_us + work_us + back_us)
    assert sample is not None
    assert abs(sample.offset_us - offset_us) <= sample.error_us + 1


@pytest.mark.parametrize(
    "times",
    [
        pytest.param((0, 5, 4, 10), id="answered before it was received"),
        pytest.param((0, 5, 30, 10), id="the worker worked longer than we waited"),
        pytest.param((1_700_000_000_000_000, 0, 0, 1_700_000_000_000_010), id="a worker's clock that was never set"),
        pytest.param((0, 1, 2, 120_000_000), id="minutes on the way"),
    ],
)
def test_times_of_no_round_trip_are_no_sample(times: tuple[int, int, int, int]) -> None:
    assert measure(*times) is None


def test_the_shortest_round_trip_wins() -> None:
    offsets = ClockOffsets(4)
    offsets.add("w", ClockOffset(900, 800), 0)
    offsets.add("w", ClockOffset(100, 50), 1)
    assert offsets.all(2)["w"] == ClockOffset(100, 50)
    offsets.add("w", ClockOffset(700, 600), 3)
    assert offsets.all(4)["w"] == ClockOffset(100, 50), "a worse sample changes nothing"
    offsets.add("w", ClockOffset(130, 50), 5)
    assert offsets.all(6)["w"] == ClockOffset(130, 50), "of equal ones the newest"


def test_a_good_sample_ages_so_that_a_drifting_clock_is_followed() -> None:
    offsets = ClockOffsets(4)
    offsets.add("w", ClockOffset(100, 50), 0)
    for _ in range(SAMPLES_KEPT):
        offsets.add("w", ClockOffset(400, 200), 0)
    assert offsets.all(0)["w"] == ClockOffset(400, 200)


def test_a_worker_that_is_gone_has_no_estimate_and_a_rare_one_none_of_long_ago() -> None:
    offsets = ClockOffsets(4)
    offsets.add("gone", ClockOffset(7_000, 10), 0)
    offsets.add("rare", ClockOffset(9_000, 10), 0)
    offsets.add("rare", ClockOffset(20, 400), KEPT_US)
    assert offsets.all(KEPT_US) == {"gone": ClockOffset(7_000, 10), "rare": ClockOffset(9_000, 10)}
    assert offsets.all(KEPT_US + 1) == {"rare": ClockOffset(20, 400)}
    assert offsets.all(3 * KEPT_US) == {}


@pytest.mark.parametrize(
    ("offset", "least_us"),
    [(ClockOffset(-600_000, 601_000), 0), (ClockOffset(-600_000, 250_000), 350_000), (ClockOffset(40, 0), 40)],
)
def test_clocks_are_apart_at_least_by_what_the_way_does_not_explain(offset: ClockOffset, least_us: int) -> None:
    assert offset.least_us == least_us


def test_the_worker_longest_unheard_makes_room() -> None:
    offsets = ClockOffsets(2)
    offsets.add("a", ClockOffset(1, 1), 0)
    offsets.add("b", ClockOffset(2, 1), 1)
    offsets.add("a", ClockOffset(3, 1), 2)
    offsets.add("c", ClockOffset(4, 1), 3)
    assert set(offsets.all(4)) == {"a", "c"}
