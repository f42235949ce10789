"""The chunks of a prefix: their bounds, and their time together."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.admission.latency import LatencyModel
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.executor.chunks import LEAST_CHUNK_CUTS, MOST_COUNTED, PREDICTION_MARGIN, Chunking, chunk_bound_us
from relaygr.worker.executor.impressions import ExpectedArrivals
from relaygr.worker.executor.work import Impression
from tests.worlds.executor import TOKEN_US, ExecutorWorld

LATENCY = LatencyModel(LatencyCoefficients(0, 0, 0, b0=100, b1=10, b2=0.01, c0=0, c1=0, c2=0, d0=0, d1=0))
chunkings = st.builds(Chunking, st.floats(1, 20_000), st.integers(1, 600), st.sampled_from([1, 16, 64]))


@given(chunkings, st.integers(1, 5_000), st.integers(0, 5_000))
def test_chunks_reach_the_end_each_with_progress_and_within_its_bounds(
    chunking: Chunking, total: int, done: int
) -> None:
    page = chunking.page_tokens
    while done < total:
        end = chunking.end(done, total, LATENCY)
        assert done < end <= total
        assert end == total or end % page == 0
        # One page is the least.
        assert end - done <= max(chunking.max_tokens, page)
        assert end - done <= page or LATENCY.append_us(done, end - done) <= chunking.chunk_us + 1e-6
        done = end


@given(chunkings, st.integers(0, 3_000), st.integers(0, 3_000))
def test_the_chunks_together_take_the_time_of_one_and_the_fixed_part_of_the_others(
    chunking: Chunking, done: int, more: int
) -> None:
    total, chunks, at = done + more, 0, done
    while at < total:
        at, chunks = chunking.end(at, total, LATENCY), chunks + 1
    expected = LATENCY.append_us(done, more) + 100 * (chunks - 1) if more else 0.0
    assert chunking.duration_us(done, total, LATENCY) == pytest.approx(expected)


def test_a_model_that_allows_no_cut_gets_its_prefix_in_one_chunk() -> None:
    chunking = Chunking(1.0, 16, 16, in_one_chunk=True)
    assert chunking.end(0, 4_000, LATENCY) == 4_000
    assert chunking.duration_us(0, 4_000, LATENCY) == LATENCY.pre_us(4_000)


@given(chunkings, st.integers(1, 5_000), st.floats(0, 1))
def test_a_prediction_for_whole_prefixes_is_the_time_of_their_chunks(
    chunking: Chunking, longest: int, part: float
) -> None:
    whole = chunking.for_whole_prefixes(LATENCY, longest)
    assert whole.pre_us(longest) == pytest.approx(chunking.duration_us(0, longest, LATENCY))
    tokens = max(1, int(part * longest))
    assert LATENCY.pre_us(tokens) <= whole.pre_us(tokens) + 1e-6
    assert whole.coefficients.c0 == LATENCY.coefficients.c0


def test_prefixes_in_one_chunk_are_predicted_as_they_are() -> None:
    whole = Chunking(1.0, 16, 16, in_one_chunk=True)
    assert whole.for_whole_prefixes(LATENCY, 4_000).pre_us(1_000) == pytest.approx(LATENCY.pre_us(1_000))
    nothing = LatencyModel(LatencyCoefficients(0, 0, 0, b0=100, b1=0, b2=0, c0=0, c1=0, c2=0, d0=0, d1=0))
    assert whole.for_whole_prefixes(nothing, 4_000) == nothing


# -- how long a chunk may be ---------------------------------------------------------------

times_us = st.one_of(st.floats(-1e6, 1e6), st.just(math.inf))


some_us, costs_us = st.floats(1, 1e5), st.floats(0, 1e5)
gaps_us = st.one_of(st.floats(1, 1e7), st.just(math.inf))


@given(some_us, some_us, costs_us, times_us, times_us, gaps_us)
def test_a_chunk_leaves_the_most_urgent_request_its_time(
    shortest_us: float, longest_us: float, cut_us: float, slack_us: float, arrival_us: float, others_us: float
) -> None:
    bound_us = chunk_bound_us(shortest_us, longest_us, cut_us, slack_us, arrival_us, others_us)
    assert shortest_us <= bound_us <= max(shortest_us, longest_us)
    for leaves_us in (slack_us, arrival_us, others_us):
        assert bound_us <= max(shortest_us, leaves_us, LEAST_CHUNK_CUTS * cut_us)


@given(some_us, some_us, costs_us, times_us, times_us, gaps_us, st.integers(1, 9))
def test_however_dear_a_cut_is_a_chunk_takes_no_time_of_a_waiting_request(
    shortest_us: float, longest_us: float, cut_us: float, slack_us: float, arrival_us: float, others_us: float, n: int
) -> None:
    bound_us = chunk_bound_us(shortest_us, longest_us, cut_us, slack_us, arrival_us, others_us, n)
    assert bound_us <= max(shortest_us, slack_us / PREDICTION_MARGIN)


@given(some_us, some_us, costs_us, times_us, gaps_us, st.integers(1, 9))
def test_a_chunk_takes_a_few_times_what_its_cut_costs_while_no_request_waits_and_more_behind_other_prefixes(
    shortest_us: float, longest_us: float, cut_us: float, arrival_us: float, others_us: float, prefixes: int
) -> None:
    bound_us = chunk_bound_us(shortest_us, longest_us, cut_us, math.inf, arrival_us, others_us, prefixes)
    assert bound_us >= min(LEAST_CHUNK_CUTS * min(prefixes, MOST_COUNTED) * cut_us, longest_us)
    assert bound_us >= chunk_bound_us(shortest_us, longest_us, cut_us, math.inf, arrival_us, others_us)


@given(some_us, some_us, costs_us)
def test_a_chunk_is_as_long_as_allowed_while_nobody_waits_or_is_expected(
    shortest_us: float, longest_us: float, cut_us: float
) -> None:
    bound_us = chunk_bound_us(shortest_us, longest_us, cut_us, math.inf, math.inf, math.inf)
    assert bound_us == max(shortest_us, longest_us)


def test_an_announced_request_may_arrive_from_a_part_of_its_lead_time_on_until_it_is_overdue() -> None:
    arrivals, first, second = ExpectedArrivals(), Impression("u", "r"), Impression("v", "r")
    arrivals.announce(first, 0, 100_000, 150_000)
    arrivals.announce(second, 0, 300_000, 350_000)
    assert arrivals.next_us(0) == (50_000, math.inf)
    assert arrivals.next_us(0, [first]) == (150_000, math.inf)
    assert arrivals.next_us(120_000) == (0, math.inf)
    assert arrivals.next_us(150_001) == (0, math.inf)
    assert first.announced is None and second.announced is not None
    assert arrivals.next_us(350_001) == (math.inf, math.inf)


@given(st.floats(0, 0.9))
def test_the_earliest_arrival_is_learned_from_arrivals(least: float) -> None:
    """Only a small share of the requests arrives before it."""
    arrivals, impression = ExpectedArrivals(), Impression("u", "r")
    for number in range(4_000):
        part = least + (0.99 - least) * (number * 0.618 % 1)
        arrivals.announce(impression, 0, 1_000_000, 2_000_000)
        arrivals.arrived(impression, int(part * 1_000_000))
        arrivals.next_us(0)
    arrivals.announce(impression, 0, 1_000_000, 2_000_000)
    earliest_us, _ = arrivals.next_us(0)
    assert earliest_us <= 1_000_000 * (least + 0.1 * (1 - least))
    assert earliest_us >= 1_000_000 * least - 50_000


def test_unannounced_requests_are_expected_at_the_rate_of_the_last_seconds() -> None:
    arrivals = ExpectedArrivals()
    for number in range(200):
        arrivals.arrived_ready(50_000 * number)
    _, others_us = arrivals.next_us(10_000_000)
    assert others_us == pytest.approx(50_000, rel=0.05)
    assert arrivals.next_us(60_000_000) == (math.inf, math.inf)


def test_the_announcements_are_bounded() -> None:
    arrivals = ExpectedArrivals()
    impressions = [Impression("u", str(number)) for number in range(5_000)]
    for impression in impressions:
        arrivals.announce(impression, 0, 1, 60_000_000)
    assert [impression.announced is not None for impression in impressions] == [False] * 904 + [True] * 4_096


def world_of_long_chunks(**settings: int) -> ExecutorWorld:
    return ExecutorWorld(chunk_ms=1.0, longest_chunk_ms=50.0, **settings)


def test_a_prefix_is_not_cut_while_nobody_waits_or_is_expected() -> None:
    world = world_of_long_chunks()
    world.job("u", world.store.put("u", 400), "own request")
    world.run()
    assert world.engine.chunks == [(0, 400)]
    world.rank("v", world.store.put("v", 300), "alone")
    world.run()
    assert world.engine.chunks[1:] == [(0, 300)]


def test_a_chunk_ends_when_the_most_urgent_request_has_to_start() -> None:
    world = world_of_long_chunks(max_batch_requests=1)
    cached = world.store.put("a", 100)
    world.job("a", cached, "a1")
    world.run()
    world.clock.advance_us(60_000_000)
    world.engine.chunks.clear()
    world.job("b", world.store.put("b", 500), "b1")
    for number in range(3):
        world.rank("a", cached, f"a{number + 1}", budget_us=6_000)
    world.run()
    # Two of the rankings take 1 ms each. Then pre-infer gets its share, and the third has 4 ms.
    first_us = (world.engine.chunks[0][1] - world.engine.chunks[0][0]) * TOKEN_US
    assert 1_000 < first_us <= 3_000, "a ranking takes 1 ms of the 4"


@settings(max_examples=25)
@given(lead_us=st.integers(1_000, 30_000), part=st.floats(0.5, 1.2), tokens=st.integers(1, 512))
def test_an_announced_request_waits_for_one_chunk_of_the_shortest_at_most(
    lead_us: int, part: float, tokens: int
) -> None:
    world = world_of_long_chunks()
    cached = world.store.put("a", 100)
    world.job("a", cached, "a1", lead_us=lead_us)
    world.run()
    arrives_us = world.clock.monotonic_us() + int(part * lead_us)
    user = 0
    while world.clock.monotonic_us() < arrives_us:
        if not world.executor._prefixes.by_user and user < 8:
            user += 1
            world.job(f"b{user}", world.store.put(f"b{user}", tokens), f"b{user}", lead_us=10_000_000)
        if world.executor.step() != 0:
            world.clock.advance_us(100)
    late_us = world.clock.monotonic_us() - arrives_us
    assert late_us <= 1_000
    world.rank("a", cached, "a1", budget_us=5_000)
    world.run()
    assert world.outbox.ranked_works[0].path == "hbm"


def test_a_prefix_counts_once_beside_those_that_wait_whether_a_request_or_a_job_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []

    def bound_us(*arguments: float) -> float:
        counts.append(int(arguments[-1]))
        return chunk_bound_us(*arguments[:-1])

    monkeypatch.setattr("relaygr.worker.executor.capacity.chunk_bound_us", bound_us)
    world = world_of_long_chunks()
    for user in ("a", "b"):
        world.job(user, world.store.put(user, 300), user, lead_us=10_000_000)
    world.executor.step()
    world.rank("c", world.store.put("c", 300), "c", budget_us=10_000_000)
    world.executor.step()
    assert world.engine.chunks == [(0, 300)] * 2
    assert counts == [2, 2], "a and b; c and b"


def test_predictions_count_the_chunks_that_a_prefix_gets() -> None:
    world = world_of_long_chunks()
    capacity = world.executor._capacity
    assert capacity.chunking.chunk_us == 50_000
    for number in range(60):
        world.job(f"u{number}", world.store.put(f"u{number}", 150), f"r{number}", lead_us=1)
        world.rank("nobody", None, f"other {number}")
        world.run()
        world.clock.advance_us(2_000)
    assert capacity.chunking.chunk_us < 2_000


def test_full_inference_without_the_relay_is_not_cut() -> None:
    """In small chunks the baseline took about twice the time that it needs."""
    world = ExecutorWorld(reuse_prefixes=False, chunk_ms=1.0, longest_chunk_ms=2.0)
    for number in range(3):
        world.rank("u", world.store.put("u", 512), f"r{number}")
    world.run()
    assert world.engine.chunks == [(0, 512)] * 3
    assert world.outbox.failures == []
