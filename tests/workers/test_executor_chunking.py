"""The chunks of a prefix: their bounds, and their time together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.admission.latency import LatencyModel
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.executor.plan import Chunking

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
