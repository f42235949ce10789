"""Worker clocks against ours: the sample with the shortest round trip decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.client.clock_offset import SAMPLES_KEPT, ClockOffset, ClockOffsets, measure

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
    assert offsets.add("w", ClockOffset(900, 800)).estimate == ClockOffset(900, 800)
    assert offsets.add("w", ClockOffset(100, 50)).estimate == ClockOffset(100, 50)
    assert offsets.add("w", ClockOffset(700, 600)).estimate is None, "a worse sample changes nothing"
    assert offsets.all()["w"] == ClockOffset(100, 50)


def test_a_good_sample_ages_so_that_a_drifting_clock_is_followed() -> None:
    offsets = ClockOffsets(4)
    offsets.add("w", ClockOffset(100, 50))
    for _ in range(SAMPLES_KEPT):
        offsets.add("w", ClockOffset(400, 200))
    assert offsets.all()["w"] == ClockOffset(400, 200)


def test_the_worker_longest_unheard_makes_room() -> None:
    offsets = ClockOffsets(2)
    offsets.add("a", ClockOffset(1, 1))
    offsets.add("b", ClockOffset(2, 1))
    offsets.add("a", ClockOffset(3, 1))
    assert offsets.add("c", ClockOffset(4, 1)).evicted == "b"
    assert set(offsets.all()) == {"a", "c"}
