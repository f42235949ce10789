"""The route of a ranking request within its time: tables of pure decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.admission.latency import LatencyModel
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.executor.batches import BatchPlan, BatchRequest
from relaygr.worker.executor.chunks import Chunking
from relaygr.worker.executor.routes import Route, plan_ranking, plan_truncation

PAGE = 16
WHOLE = Chunking(1e9, 10**9, PAGE)
# A prefix token takes 10 µs, ranking 1,000 µs and 2 µs a token that is scored.
LATENCY = LatencyModel(LatencyCoefficients(a0=1000, a1=10, a2=0, b0=0, b1=10, b2=0, c0=980, c1=2, c2=0, d0=100, d1=0))
# The same, but 5 µs a token that is scored.
DEAR_ROWS = LatencyModel(LatencyCoefficients(a0=1000, a1=10, a2=0, b0=0, b1=10, b2=0, c0=950, c1=5, c2=0, d0=100, d1=0))
LATENCY_WITH_CHUNKS = LatencyModel(LatencyCoefficients(0, 0, 0, b0=100, b1=10, b2=0, c0=1000, c1=0, c2=0, d0=0, d1=0))
# Each chunk of a prefix costs 100 µs by itself, here and above.
CHUNKS = LatencyModel(LatencyCoefficients(0, 0, 0, b0=100, b1=10, b2=0.01, c0=1000, c1=0, c2=0, d0=0, d1=0, c3=0.5))


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
    plan = plan_ranking(100, 10, cached, remaining_us, LATENCY, WHOLE)
    assert (plan.route, plan.prefix_tokens) == (route, kept)
    if route is not Route.REJECT:
        assert plan.predicted_us <= remaining_us


@pytest.mark.parametrize(
    ("cached", "remaining_us", "allowed", "route", "kept"),
    [
        pytest.param(90, 1_100, True, Route.WHOLE, 100, id="time to compute and keep the tail"),
        pytest.param(90, 1_099, True, Route.TAIL_AS_SUFFIX, 90, id="time to rank it only"),
        pytest.param(90, 1_050, True, Route.TAIL_AS_SUFFIX, 90, id="just that"),
        pytest.param(90, 1_049, True, Route.TRUNCATE, 0, id="not even that"),
        pytest.param(90, 1_099, False, Route.TRUNCATE, 0, id="the model or its limit forbids it"),
        pytest.param(0, 1_500, True, Route.TRUNCATE, 48, id="nothing cached that it could follow"),
        pytest.param(100, 999, True, Route.REJECT, 0, id="no tail, and no time"),
    ],
)
def test_a_tail_that_there_is_no_time_to_compute_is_ranked_as_suffix(
    cached: int, remaining_us: int, allowed: bool, route: Route, kept: int
) -> None:
    plan = plan_ranking(100, 10, cached, remaining_us, DEAR_ROWS, WHOLE, tail_may_be_suffix=allowed)
    assert (plan.route, plan.prefix_tokens) == (route, kept)
    if route is not Route.REJECT:
        assert plan.predicted_us <= remaining_us


def test_a_tail_that_lengthens_the_pass_little_is_ranked_as_suffix_although_there_is_time_to_keep_it() -> None:
    # The shortest append takes 100 µs. In the suffix a token takes 2 µs.
    fixed_cost = LatencyModel(replace(LATENCY.coefficients, b0=100))
    assert fixed_cost.tail_stays_in_suffix(75, 25, 10)
    assert not fixed_cost.tail_stays_in_suffix(74, 26, 10)
    # Where an append costs nothing but its tokens, waiting for a longer one saves nothing.
    assert not LATENCY.tail_stays_in_suffix(99, 1, 10)
    plan = plan_ranking(100, 10, 90, 9_999, LATENCY, WHOLE, tail_may_be_suffix=True, tail_stays_in_suffix=True)
    assert (plan.route, plan.predicted_us, plan.prefix_tokens) == (Route.TAIL_AS_SUFFIX, 1_020, 90)


def test_a_prefix_in_chunks_is_planned_with_what_each_chunk_costs() -> None:
    """Predicted as one chunk the prefix seemed to fit, was begun, and was then truncated for lack of time."""
    chunking = Chunking(1e9, 32, PAGE)
    one_chunk_us = int(LATENCY_WITH_CHUNKS.pre_us(128) + LATENCY_WITH_CHUNKS.hit_us(128, 1))
    assert plan_ranking(128, 1, 0, one_chunk_us, LATENCY_WITH_CHUNKS, WHOLE).route is Route.WHOLE
    assert plan_ranking(128, 1, 0, one_chunk_us, LATENCY_WITH_CHUNKS, chunking).route is Route.TRUNCATE
    assert plan_ranking(128, 1, 0, one_chunk_us + 300, LATENCY_WITH_CHUNKS, chunking).route is Route.WHOLE


@given(
    prefix=st.integers(1, 3_000),
    remaining_us=st.integers(-10, 100_000),
    chunking=st.builds(
        Chunking, st.floats(1, 20_000), st.integers(1, 600), st.sampled_from([1, 16, 64]), st.booleans()
    ),
)
def test_a_truncation_is_the_longest_in_whole_pages_that_fits(
    prefix: int, remaining_us: int, chunking: Chunking
) -> None:
    plan = plan_truncation(prefix, 10, remaining_us, CHUNKS, chunking)

    def full_us(tokens: int) -> float:
        return chunking.duration_us(0, tokens, CHUNKS) + CHUNKS.hit_us(tokens, 10)

    if plan.route is Route.REJECT:
        assert remaining_us < full_us(0)
        return
    assert plan.prefix_tokens < prefix and plan.prefix_tokens % chunking.page_tokens == 0
    assert full_us(plan.prefix_tokens) <= remaining_us + 1e-6
    assert abs(plan.predicted_us - full_us(plan.prefix_tokens)) <= 1
    more = plan.prefix_tokens + chunking.page_tokens
    assert more >= prefix or full_us(more) > remaining_us - 1e-6


batch_requests = st.builds(
    lambda alone, saved, rows, by: BatchRequest(alone, alone * (1 - saved), rows, by),
    st.floats(1, 1e5),
    st.floats(0, 1),
    st.integers(1, 3000),
    st.integers(0, 10**6),
)


def taken(requests: list[BatchRequest], max_rows: int = 4096, *, must_pay: bool = True) -> list[BatchRequest]:
    """The requests of the first pass, if the others wait behind."""
    first, *others = requests
    plan, batch = BatchPlan(first.alone_us, first.answer_by_us, first.rows, max_rows), [first]
    for place, request in enumerate(others, 1):
        if not plan.take(request, len(requests) - place - 1, must_pay=must_pay):
            break
        batch.append(request)
    assert plan.requests == len(batch)
    return batch


def pass_us(batch: list[BatchRequest]) -> float:
    return batch[0].alone_us + sum(request.further_us for request in batch[1:])


@given(st.lists(batch_requests, min_size=1, max_size=12), st.booleans())
def test_no_request_of_a_batch_is_late_because_of_another(requests: list[BatchRequest], must_pay: bool) -> None:
    batch = taken(requests, must_pay=must_pay)
    assert batch == requests[: len(batch)], "in order, and always the first"
    if len(batch) > 1:
        assert pass_us(batch) <= min(request.answer_by_us for request in batch) + 1e-3
        assert sum(request.rows for request in batch) <= 4096


@given(st.lists(batch_requests, min_size=2, max_size=12))
def test_a_batch_lowers_the_mean_time_of_all_that_wait(requests: list[BatchRequest]) -> None:
    """All but the batch then run one by one. The last request that joined made the sum of all times smaller."""
    batch = taken(requests)

    def sum_us(together: int) -> float:
        ends_us = pass_us(requests[:together])
        total_us = together * ends_us
        for request in requests[together:]:
            ends_us += request.alone_us
            total_us += ends_us
        return total_us

    if len(batch) > 1:
        assert sum_us(len(batch)) <= sum_us(len(batch) - 1) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("saved_us", "queued", "together"),
    [
        pytest.param(45, 2, 1, id="two short requests: the first would wait for longer than the second gains"),
        pytest.param(45, 3, 2, id="a third one gains, too"),
        pytest.param(45, 16, 8, id="sixteen short ones"),
        pytest.param(9, 8, 1, id="eight long ones"),
        pytest.param(9, 16, 2, id="sixteen long ones"),
        pytest.param(90, 4, 4, id="a device that four requests do not fill"),
        pytest.param(0, 32, 1, id="nothing is shared"),
    ],
)
def test_short_requests_are_batched_and_long_ones_only_from_a_long_queue(
    saved_us: float, queued: int, together: int
) -> None:
    request = BatchRequest(100.0, 100.0 - saved_us, 24, 10**6)
    assert len(taken([request] * queued)) == together
    assert len(taken([request] * queued, must_pay=False)) == queued


def test_time_that_other_work_needs_is_left() -> None:
    request = BatchRequest(100.0, 10.0, 24, 10**6)
    plan = BatchPlan(1_100.0, 10**6, 24, 4096)
    plan.end_before(1_110.0)
    assert [plan.take(request, 5, must_pay=True) for _ in range(2)] == [True, False]
    assert (plan.ends_us, plan.must_end_us) == (1_110.0, 1_110.0)
