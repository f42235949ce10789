"""Lag in seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.kafka.record_time import is_record_time
from relaygr.lag.report import EndOffsets, TimeLag, TimeLagSource, record_time_lag

SECOND = 1_000_000


def ends(*polls: tuple[float, int], capacity: int = 100) -> EndOffsets:
    history = EndOffsets(capacity)
    for seconds, end in polls:
        history.add(int(seconds * SECOND), end)
    return history


def test_a_group_at_the_end_is_not_behind() -> None:
    assert ends((0, 5)).time_lag(5) == TimeLag(0.0, TimeLagSource.CAUGHT_UP)
    assert ends((0, 5)).time_lag(9) == TimeLag(0.0, TimeLagSource.CAUGHT_UP), "polled before the commit"


def test_the_arrival_of_the_next_message_is_interpolated_between_two_polls() -> None:
    history = ends((0, 0), (10, 10), (20, 20))
    assert history.time_lag(4) == TimeLag(15.0, TimeLagSource.INTERPOLATED)
    assert history.time_lag(19) == TimeLag(0.0, TimeLagSource.INTERPOLATED)


def test_a_message_that_arrived_before_the_first_poll_must_be_read() -> None:
    assert ends((0, 5), (1, 6)).time_lag(3) is None
    assert ends().time_lag(3) is None


def test_an_end_that_stands_still_takes_no_memory_and_lag_still_grows() -> None:
    history = ends((0, 0), (1, 10), *((seconds, 10) for seconds in range(2, 500)), capacity=4)
    assert history.time_lag(9) == TimeLag(498.0, TimeLagSource.INTERPOLATED)


def test_after_a_quiet_time_the_next_message_is_not_dated_into_it() -> None:
    history = ends((0, 10), (100, 10), (200, 10), (201, 11))
    assert history.time_lag(10) == TimeLag(0.0, TimeLagSource.INTERPOLATED)


def test_a_log_that_was_made_anew_is_dated_anew() -> None:
    assert ends((0, 0), (1, 100), (2, 3)).time_lag(2) is None


NOW_MS = 1_794_010_590_000


def test_a_record_is_dated_by_its_timestamp_and_never_in_the_future() -> None:
    assert record_time_lag(NOW_MS * 1000, NOW_MS - 1_500) == TimeLag(1.5, TimeLagSource.RECORD)
    assert record_time_lag(NOW_MS * 1000, NOW_MS + 900) == TimeLag(0.0, TimeLagSource.RECORD), "clocks differ a little"


@pytest.mark.parametrize(
    "timestamp_ms",
    [
        -1,
        0,
        1,
        20_000,
        NOW_MS // 60_000,
        NOW_MS // 1_000,
        NOW_MS * 1_000,
        NOW_MS * 1_000_000,
        2**63 - 1,
        NOW_MS + 7_200_000,
    ],
    ids=["none", "zero", "one", "days", "minutes", "seconds", "us", "ns", "largest", "two hours ahead"],
)
def test_a_timestamp_that_can_not_be_true_gives_no_lag(timestamp_ms: int) -> None:
    """Records with timestamps in seconds had a lag of 1,794,010,590 s, and those in µs one of 0 s."""
    assert not is_record_time(timestamp_ms, NOW_MS)
    assert record_time_lag(NOW_MS * 1000, timestamp_ms) is None


@given(
    arrivals=st.lists(st.integers(0, 20), min_size=2, max_size=40),
    data=st.data(),
)
def test_the_error_is_below_one_poll_interval(arrivals: list[int], data: st.DataObject) -> None:
    history = EndOffsets(100)
    arrived: list[int] = []
    for poll, count in enumerate(arrivals):
        # The messages of a poll arrive evenly over the second before it.
        arrived += [(poll - 1) * SECOND + (i + 1) * SECOND // count for i in range(count)]
        history.add(poll * SECOND, len(arrived))
    now_us = (len(arrivals) - 1) * SECOND
    committed = data.draw(st.integers(0, len(arrived)))
    measured = history.time_lag(committed)
    if committed == len(arrived):
        assert measured is not None and measured.seconds == 0
    elif measured is None:
        assert arrived[committed] <= 0, "unknown only for messages from before the first poll"
    else:
        assert abs(measured.seconds * SECOND - (now_us - arrived[committed])) <= SECOND
