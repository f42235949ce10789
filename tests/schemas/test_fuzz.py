"""Any bytes give a valid message or a DecodeError, never another exception.

Each decoded message is encoded again, to check that it is valid.
"""

from __future__ import annotations

import os
import typing
from datetime import UTC
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relaygr.schemas import SCHEMA_VERSION, DecodeError, decode, encode
from relaygr.schemas.codec import field_specs
from relaygr.schemas.fields import INT64_MAX
from relaygr.schemas.headers import RankingHeaders, ResultHeaders
from tests.strategies import messages

STRATEGIES = messages()
EXAMPLES = settings(
    max_examples=int(os.environ.get("RELAYGR_TEST_FUZZ_EXAMPLES", "150")),
    suppress_health_check=[HealthCheck.too_slow],
    deadline=None,
)

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([-1, 0, 1, INT64_MAX, INT64_MAX + 1, -(2**63), 2**64 - 1])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["ranked", "failed", "expired", "hbm", "ready", "\x00", "é" * 200])
    | st.binary(max_size=64)
    | st.binary(min_size=16, max_size=16)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
    | st.datetimes(timezones=st.just(UTC)),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9) | st.binary(max_size=3), inner),
    max_leaves=10,
)


@st.composite
def cut_and_flipped(draw: st.DrawFn, message_class: type[Any]) -> bytes:
    """A valid message in which a few bytes were changed, added, removed or repeated."""
    data = bytearray(encode(draw(STRATEGIES[message_class])))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        change = draw(st.sampled_from(["flip", "insert", "cut", "repeat", "truncate"]))
        length = draw(st.integers(1, 12))
        if change == "flip" and data:
            data[at] ^= draw(st.integers(1, 255))
        elif change == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=12))
        elif change == "cut":
            del data[at : at + length]
        elif change == "repeat":
            data[at:at] = data[at : at + length]
        else:
            del data[at:]
    return bytes(data)


@st.composite
def with_odd_values(draw: st.DrawFn, message_class: type[Any]) -> bytes:
    """Well-formed MessagePack with a valid message's names, some of whose values are something else."""
    body = msgpack.unpackb(encode(draw(STRATEGIES[message_class]))[1:], strict_map_key=False)
    for _ in range(draw(st.integers(1, 3))):
        level = body
        while True:
            maps = [name for name, value in level.items() if isinstance(value, dict) and value]
            if not maps or not draw(st.booleans()):
                break
            level = level[draw(st.sampled_from(maps))]
        name = draw(st.sampled_from([*level, *(spec.name for spec in field_specs(message_class))]))
        if draw(st.integers(0, 4)) == 0:
            level.pop(name, None)
        else:
            level[name] = draw(anything)
    return bytes((SCHEMA_VERSION,)) + typing.cast(bytes, msgpack.packb(body, datetime=True))


def any_bytes(message_class: type[Any]) -> st.SearchStrategy[bytes]:
    noise = st.binary(max_size=200)
    return (
        noise
        | noise.map(lambda data: bytes((SCHEMA_VERSION,)) + data)
        | anything.map(lambda value: bytes((SCHEMA_VERSION,)) + msgpack.packb(value, datetime=True))
        | cut_and_flipped(message_class)
        | with_odd_values(message_class)
    )


def a_message_or_a_decode_error(message_class: type[Any], data: bytes) -> None:
    try:
        message = decode(message_class, data)
    except DecodeError as error:
        assert str(error)
        assert len(str(error)) < 1000, "a broken message must not flood the log"
        return
    assert decode(message_class, encode(message)) == message


@pytest.mark.slow
@pytest.mark.parametrize("message_class", STRATEGIES, ids=lambda cls: cls.__name__)
@EXAMPLES
@given(data=st.data())
def test_any_bytes_are_a_message_or_a_decode_error(message_class: type[Any], data: st.DataObject) -> None:
    a_message_or_a_decode_error(message_class, data.draw(any_bytes(message_class)))


names = st.sampled_from([name for name, _ in RankingHeaders("r", "g", "t", 0, 1).encode()]) | st.text(max_size=5)
values = st.none() | st.binary(max_size=20) | st.integers().map(lambda n: str(n).encode()) | st.text(max_size=600)
any_headers = st.none() | st.lists(st.tuples(names, values), max_size=8)


@pytest.mark.slow
@pytest.mark.parametrize("headers_class", [RankingHeaders, ResultHeaders])
@EXAMPLES
@given(raw=any_headers)
def test_any_headers_are_headers_or_a_decode_error(headers_class: Any, raw: Any) -> None:
    try:
        headers = headers_class.decode(raw)
    except DecodeError:
        return
    assert headers_class.decode(headers.encode()) == headers
