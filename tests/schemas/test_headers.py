"""Headers: a reply address and a deadline that are read without the body."""

from __future__ import annotations

import pytest

from relaygr.schemas import DecodeError, DecodeReason
from relaygr.schemas.headers import DIVERTED_BY, MAX_HEADER_BYTES, RankingHeaders, ResultHeaders

HEADERS = RankingHeaders("gateway.1.7", "gateway", "relaygr.results", 5, 1_700_000_000_000_000)


def test_headers_are_equal_after_a_round_trip() -> None:
    assert RankingHeaders.decode(HEADERS.encode()) == HEADERS
    result = ResultHeaders("gateway.1.7", "gateway")
    assert ResultHeaders.decode(result.encode()) == result


def test_other_systems_headers_are_ignored() -> None:
    noise = [("traceparent", b"00-1"), ("traceparent", b"00-2"), ("empty", None), ("odd", "\ud800"), ("raw", b"\xff")]
    assert RankingHeaders.decode([*noise, *HEADERS.encode()]) == HEADERS


def test_a_header_given_twice_with_two_values_is_refused() -> None:
    with pytest.raises(DecodeError, match="request_id is given twice"):
        RankingHeaders.decode([*HEADERS.encode(), ("request_id", b"another")])


@pytest.mark.parametrize("name", ["request_id", "gateway_id", "reply_topic", "reply_partition", "deadline_us"])
def test_an_absent_header_is_refused_by_name(name: str) -> None:
    with pytest.raises(DecodeError, match=f"header {name} is absent"):
        RankingHeaders.decode([(key, value) for key, value in HEADERS.encode() if key != name])


BROKEN: dict[str, tuple[str, bytes, DecodeReason]] = {
    "a sign": ("deadline_us", b"-1", DecodeReason.INVALID_FIELD),
    "a fraction": ("deadline_us", b"1.5", DecodeReason.INVALID_FIELD),
    "digits of another script": ("deadline_us", "٣".encode(), DecodeReason.INVALID_FIELD),
    "beyond 63 bits": ("deadline_us", str(2**63).encode(), DecodeReason.INVALID_FIELD),
    "a thousand digits": ("deadline_us", b"1" * 1000, DecodeReason.INVALID_FIELD),
    "no partition": ("reply_partition", str(2**31).encode(), DecodeReason.INVALID_FIELD),
    "no UTF-8": ("gateway_id", b"\xff", DecodeReason.MALFORMED),
    "a control character": ("gateway_id", b"a\nb", DecodeReason.INVALID_FIELD),
    "too long": ("gateway_id", b"a" * (MAX_HEADER_BYTES + 1), DecodeReason.INVALID_FIELD),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_header_is_refused(name: str) -> None:
    header, value, reason = BROKEN[name]
    with pytest.raises(DecodeError, match=f"header {header}") as caught:
        RankingHeaders.decode([(key, value if key == header else old) for key, old in HEADERS.encode()])
    assert caught.value.reason is reason


def test_a_request_id_that_no_result_could_carry_is_refused() -> None:
    """A request with a broken body is answered from its header alone, so both have the same bound on the id."""
    with pytest.raises(DecodeError, match="request_id: 129 bytes of text, expected 1 to 128"):
        ResultHeaders.decode(ResultHeaders("r" * 129, "gateway").encode())


@pytest.mark.parametrize("value", [b"", b"\xff", b"w" * 200])
def test_a_broken_header_that_only_informs_is_left_out(value: bytes) -> None:
    raw = [*HEADERS.encode(), (DIVERTED_BY, value)]
    assert RankingHeaders.decode(raw) == HEADERS
