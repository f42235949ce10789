"""The header `traceparent`: what is valid by W3C Trace Context, and what is ignored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.schemas.headers import RankingHeaders, ResultHeaders, traceparent_of
from relaygr.schemas.trace_context import TraceContext, is_sampled

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"
INVALID = {
    "nothing": "",
    "a word": "trace",
    "version ff": f"ff-{TRACE}-{SPAN}-01",
    "a version of one digit": f"0-{TRACE}-{SPAN}-01",
    "no trace": f"00-{'0' * 32}-{SPAN}-01",
    "no span": f"00-{TRACE}-{'0' * 16}-01",
    "capitals": VALID.upper(),
    "a short trace": f"00-{TRACE[1:]}-{SPAN}-01",
    "a long span": f"00-{TRACE}-{SPAN}0-01",
    "no flags": f"00-{TRACE}-{SPAN}",
    "flags of one digit": f"00-{TRACE}-{SPAN}-1",
    "more fields in version 00": f"{VALID}-more",
    "a longer form without a dash": f"01-{TRACE}-{SPAN}-01more",
    "a space": f" {VALID}",
    "a line feed": f"{VALID}\n",
    "another script": VALID.replace("4", "٤"),
    "half a surrogate pair": VALID[:-1] + "\ud800",
    "much too long": f"01-{TRACE}-{SPAN}-01-" + "a" * 1000,
}


def test_a_valid_header_names_trace_span_and_sampling() -> None:
    assert TraceContext.parse(VALID) == TraceContext(int(TRACE, 16), int(SPAN, 16), True)
    assert TraceContext.parse(VALID.encode()) == TraceContext.parse(VALID)
    assert TraceContext.parse(f"00-{TRACE}-{SPAN}-00") == TraceContext(int(TRACE, 16), int(SPAN, 16), False)


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert TraceContext.parse(f"cc-{TRACE}-{SPAN}-03-what-is-new") == TraceContext.parse(VALID)


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_header_names_nothing(name: str) -> None:
    assert TraceContext.parse(INVALID[name]) is None


def test_an_absent_header_names_nothing() -> None:
    assert TraceContext.parse(None) is None


@pytest.mark.parametrize("flags", ["00", "01", "02", "03", "a0", "0a", "0b", "ff"])
def test_the_flags_of_a_valid_header_alone_tell_whether_it_is_recorded(flags: str) -> None:
    for header in (f"00-{TRACE}-{SPAN}-{flags}", f"cc-{TRACE}-{SPAN}-{flags}-more"):
        context = TraceContext.parse(header)
        assert context is not None and is_sampled(header.encode()) is context.is_sampled
    assert not is_sampled(None)


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_a_context_is_equal_after_a_round_trip(trace_id: int, span_id: int, recorded: bool) -> None:
    context = TraceContext(trace_id, span_id, recorded)
    assert TraceContext.parse(context.encode()) == context


@given(st.binary(max_size=80))
def test_no_bytes_raise(data: bytes) -> None:
    TraceContext.parse(data)


@pytest.mark.parametrize("given_header", [*INVALID.values(), VALID])
def test_requests_and_results_keep_valid_headers_only(given_header: str) -> None:
    data = given_header.encode(errors="surrogatepass")
    kept = data if given_header == VALID else None
    request, result = RankingHeaders("r", "g", "t", 0, 1, data), ResultHeaders("r", "g", data)
    assert RankingHeaders.decode(request.encode()).traceparent == kept
    assert ResultHeaders.decode(result.encode()).traceparent == kept


def test_without_a_trace_no_header_is_written() -> None:
    assert "traceparent" not in dict(RankingHeaders("r", "g", "t", 0, 1).encode())
    assert "traceparent" not in dict(ResultHeaders("r", "g").encode())


def test_of_two_headers_neither_is_taken() -> None:
    assert traceparent_of([("traceparent", VALID.encode())]) == VALID.encode()
    assert traceparent_of([("traceparent", VALID.encode()), ("traceparent", b"other")]) is None
    assert traceparent_of(None) is None
