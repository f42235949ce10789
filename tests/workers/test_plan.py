"""How a ranking request is to be served in its time, and how long a chunk is: tables of pure decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.messages import LatencyCoefficients
from streams.latency import LatencyModel
from workers.scheduler.plan import Route, chunk_end, plan_ranking, plan_truncation

PAGE = 16
# A prefix token takes 10 µs, ranking 1,000 µs.
LATENCY = LatencyModel(LatencyCoefficients(a0=1000, a1=10, a2=0, b0=0, b1=10, b2=0, c0=1000, c1=0, c2=0, d0=100, d1=0))


@pytest.mark.parametrize(
    ("cached", "remaining_us", "route", "kept"),
    [
        pytest.param(100, 1_000, Route.WHOLE, 100, id="all cached, and time for ranking alone"),
        pytest.param(0, 2_000, Route.WHOLE, 100, id="nothing cached, and time for everything"),
        pytest.param(50, 1_500, Route.WHOLE, 100, id="half cached, and time for the tail"),
        pytest.param(0, 1_999, Route.TRUNCATE, 96, id="a microsecond short: all whole pages but the last"),
        pytest.param(0, 1_320, Route.TRUNCATE, 32, id="two pages"),
        pytest.param(0, 1_000, Route.TRUNCATE, 0, id="no prefix at all"),
        pytest.param(100, 999, Route.REJECT, 0, id="not even ranking"),
        pytest.param(0, -5, Route.REJECT, 0, id="past the deadline"),
    ],
)
def test_the_longest_prefix_that_fits_is_served(cached: int, remaining_us: int, route: Route, kept: int) -> None:
    plan = plan_ranking(100, 10, cached, remaining_us, LATENCY, PAGE)
    assert (plan.route, plan.prefix_tokens) == (route, kept)
    if route is not Route.REJECT:
        assert plan.predicted_us <= remaining_us


@given(prefix=st.integers(1, 5_000), remaining_us=st.integers(-10, 100_000), page=st.sampled_from([1, 16, 64]))
def test_a_truncation_is_shorter_than_the_prefix_in_whole_pages_and_one_page_more_would_not_fit(
    prefix: int, remaining_us: int, page: int
) -> None:
    plan = plan_truncation(prefix, 10, remaining_us, LATENCY, page)
    if plan.route is Route.REJECT:
        assert remaining_us < 1_000
        return
    assert plan.prefix_tokens < prefix and plan.prefix_tokens % page == 0
    assert plan.predicted_us <= remaining_us
    more = plan.prefix_tokens + page
    assert more >= prefix or LATENCY.pre_us(more) + LATENCY.hit_us(more, 10) > remaining_us


@given(
    total=st.integers(1, 5_000),
    chunk_us=st.floats(1, 20_000),
    most=st.integers(1, 600),
    page=st.sampled_from([1, 16, 64]),
)
def test_chunks_reach_the_end_each_with_progress_and_within_their_bounds(
    total: int, chunk_us: float, most: int, page: int
) -> None:
    done = chunks = 0
    while done < total:
        end = chunk_end(done, total, chunk_us, most, LATENCY, page)
        assert done < end <= total
        assert end == total or end % page == 0
        # One page is the least.
        assert end - done <= max(most, page)
        assert end - done <= page or LATENCY.append_us(done, end - done) <= chunk_us + 1e-6
        done, chunks = end, chunks + 1
        assert chunks <= total
