"""The contract of the codec: equal after a round trip, read without a copy, refused with a reason."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
import typing
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.schemas import (
    SCHEMA_VERSION,
    Behaviours,
    DecodeError,
    DecodeReason,
    EncodeError,
    Ended,
    History,
    Other,
    Path,
    RankingRequest,
    RankingResult,
    Reason,
    RetrievalEvent,
    StageTimings,
    WorkerStatus,
    decode,
    encode,
)
from relaygr.schemas.codec import (
    MAX_CONTAINERS,
    MAX_ENTRIES,
    MAX_LIST_ENTRIES,
    MAX_MAP_ENTRIES,
    MAX_TEXT_BYTES,
    SHORT_ENTRIES,
)
from relaygr.schemas.fields import FEW, INT64_MAX, MAX_CHOICE_BYTES, Choice, FieldError, Packed, Real, choice_label
from relaygr.schemas.limits import MAX_MESSAGE_BYTES
from relaygr.schemas.messages import (
    LENGTH_BUCKETS,
    MAX_BEHAVIOURS,
    MAX_CANDIDATES,
    MAX_MISSED_IDS,
    MAX_SUFFIX_BEHAVIOURS,
    FullPathReport,
    Message,
)
from tests.strategies import messages

STRATEGIES = messages()
INT64_MIN = -(2**63)
MIB = 1024 * 1024


def request(**changes: Any) -> RankingRequest:
    values = {
        "request_id": "gateway.1.7",
        "user_id": "u1",
        "sent_at_us": 1,
        "deadline_us": 2,
        "query_time_ms": 3,
        "candidates": np.array([10, 11], "<i8"),
        "suffix": some_behaviours(2),
    }
    return RankingRequest(**(values | changes))


def some_behaviours(length: int) -> Behaviours:
    return Behaviours(np.arange(length, dtype="<i8"), np.zeros(length, "<u2"), np.arange(length, dtype="<i8"))


def result(**changes: Any) -> RankingResult:
    values = {
        "request_id": "gateway.1.7",
        "worker_id": "worker-00",
        "outcome": Ended.RANKED,
        "request_sent_at_us": 1,
        "received_at_us": 2,
        "sent_at_us": 3,
        "timings": StageTimings(),
        "path": Path.HBM,
        "num_tasks": 2,
        "scores": np.zeros(4, "<f4"),
        "model_revision": "abc",
    }
    return RankingResult(**(values | changes))


def body(message: Any) -> dict[str, Any]:
    return typing.cast(dict[str, Any], msgpack.unpackb(encode(message)[1:]))


def wire(content: Any) -> bytes:
    return bytes((SCHEMA_VERSION,)) + typing.cast(bytes, msgpack.packb(content))


def test_every_message_has_a_strategy() -> None:
    assert set(STRATEGIES) == set(typing.get_args(Message))


@pytest.mark.parametrize("message_class", STRATEGIES, ids=lambda cls: cls.__name__)
@settings(max_examples=50)
@given(data=st.data())
def test_a_message_is_equal_after_a_round_trip(message_class: type[Any], data: st.DataObject) -> None:
    message = data.draw(STRATEGIES[message_class])
    encoded = encode(message)
    decoded = decode(message_class, encoded)
    assert decoded == message
    assert encode(decoded) == encoded


@pytest.mark.slow
@pytest.mark.parametrize("message_class", STRATEGIES, ids=lambda cls: cls.__name__)
@settings(max_examples=25)
@given(data=st.data(), added=st.integers() | st.none() | st.text(max_size=9) | st.lists(st.integers(0, 9), max_size=3))
def test_an_older_reader_ignores_a_field_that_it_does_not_know(
    message_class: type[Any], data: st.DataObject, added: Any
) -> None:
    message = data.draw(STRATEGIES[message_class])
    if isinstance(added, int):
        added %= 2**63
    assert decode(message_class, wire(body(message) | {"added_later": added})) == message


def test_nil_for_an_optional_field_is_its_default() -> None:
    assert decode(RankingRequest, wire(body(request()) | {"history": None})).history is None
    assert decode(RankingResult, wire(body(result()) | {"unknown_items": None})).unknown_items == 0


@pytest.mark.parametrize("version", [0, 2, 0x7F, 0x80, 0xFF])
def test_an_unknown_version_is_refused_with_its_number(version: int) -> None:
    with pytest.raises(DecodeError, match=f"version byte is {version}, this reader supports 1") as caught:
        decode(RankingRequest, bytes((version,)) + encode(request())[1:])
    assert caught.value.reason is DecodeReason.UNSUPPORTED_VERSION


@pytest.mark.parametrize("nothing", [None, b""])
def test_no_bytes_are_refused_as_empty(nothing: bytes | None) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(RankingRequest, nothing)
    assert caught.value.reason is DecodeReason.EMPTY


def test_too_many_bytes_are_refused_before_they_are_read() -> None:
    with pytest.raises(DecodeError, match=str(MAX_MESSAGE_BYTES)) as caught:
        decode(RankingRequest, bytes(MAX_MESSAGE_BYTES + 1))
    assert caught.value.reason is DecodeReason.TOO_LARGE


def test_the_longest_allowed_history_fits_into_a_message() -> None:
    longest = request(
        history=History("u1", 1, np.empty(0, "<i8"), some_behaviours(MAX_BEHAVIOURS)),
        suffix=some_behaviours(MAX_SUFFIX_BEHAVIOURS),
        candidates=np.arange(MAX_CANDIDATES),
    )
    decoded = decode(RankingRequest, encode(longest))
    assert decoded.history is not None
    assert len(decoded.history.behaviours) == MAX_BEHAVIOURS


BREAKAGES: dict[str, tuple[type[Any], dict[str, Any], str]] = {
    "text for a whole number": (RankingRequest, {"sent_at_us": "1"}, ".sent_at_us: expected a whole number"),
    "a float for a whole number": (RankingRequest, {"sent_at_us": 1.0}, ".sent_at_us: expected a whole number"),
    "true for a whole number": (RankingRequest, {"sent_at_us": True}, ".sent_at_us: expected a whole number"),
    "a negative time": (RankingRequest, {"sent_at_us": -1}, ".sent_at_us: -1 is outside"),
    "a time beyond 63 bits": (RankingRequest, {"sent_at_us": 2**63}, ".sent_at_us: 9223372036854775808 is outside"),
    "a number for text": (RankingRequest, {"user_id": 7}, ".user_id: expected text"),
    "bytes for text": (RankingRequest, {"user_id": b"u1"}, ".user_id: expected text"),
    "empty text": (RankingRequest, {"user_id": ""}, ".user_id: 0 bytes"),
    "long text": (RankingRequest, {"user_id": "é" * 129}, ".user_id: 258 bytes"),
    "a control character": (RankingRequest, {"user_id": "a\nb"}, ".user_id: text contains control"),
    "a required field that is absent": (RankingRequest, {"user_id": None}, ".user_id: is required"),
    "no candidates": (RankingRequest, {"candidates": b""}, ".candidates: 0 entries, expected 1"),
    "half a candidate": (RankingRequest, {"candidates": bytes(12)}, ".candidates: 12 bytes is not a multiple of 8"),
    "a list for packed numbers": (RankingRequest, {"candidates": [1, 2]}, ".candidates: expected packed bytes"),
    "a list for a message": (RankingRequest, {"suffix": []}, ".suffix: expected a map"),
    "too many candidates": (
        RankingRequest,
        {"candidates": bytes(8 * (MAX_CANDIDATES + 1))},
        f"expected 1 to {MAX_CANDIDATES}",
    ),
    "another user's history": (
        RankingRequest,
        {"history": body(History("other", 1, np.empty(0, "<i8"), Behaviours.empty()))},
        ".history.user_id: not the message's user",
    ),
    "arrays of different lengths": (
        RankingRequest,
        {"suffix": {"items": bytes(16), "actions": bytes(2), "timestamps_ms": bytes(16)}},
        ".suffix: 2 items, 1 actions, 2 timestamps",
    ),
    "1 for true": (RankingResult, {"history_stale": 1}, ".history_stale: expected true or false"),
    "an unknown outcome": (
        RankingResult,
        {"outcome": "postponed"},
        ".outcome: 'postponed' is not one of ranked, expired",
    ),
    "a path that is too long": (RankingResult, {"path": "x" * 65}, ".path: 65 bytes of text, expected 1 to 64"),
    "a path that is no text": (RankingResult, {"path": 7}, ".path: expected text"),
    "a score that is no number": (
        RankingResult,
        {"scores": np.array([0, np.nan, 0, 0], "<f4").tobytes()},
        ".scores: an entry is not finite",
    ),
    "an infinite score": (
        RankingResult,
        {"scores": np.array([0, np.inf, 0, 0], "<f4").tobytes()},
        ".scores: an entry is not finite",
    ),
    "scores that are no whole rows": (RankingResult, {"num_tasks": 3}, ".scores: not a multiple of 3 tasks"),
    "ranked without scores": (RankingResult, {"scores": None}, "outcome is ranked, but scores is absent"),
    "failed without a reason": (RankingResult, {"outcome": "failed"}, ".reason: is required"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_field_is_refused_by_name(name: str) -> None:
    message_class, change, text = BREAKAGES[name]
    whole = request() if message_class is RankingRequest else result()
    with pytest.raises(DecodeError) as caught:
        decode(message_class, wire(body(whole) | change))
    assert caught.value.reason is DecodeReason.INVALID_FIELD
    assert text in str(caught.value)
    assert str(caught.value).startswith(message_class.__name__)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), True, "1", None, b""])
def test_a_coefficient_must_be_a_finite_number(value: Any, status: WorkerStatus) -> None:
    content = body(status)
    content["latency"]["a1"] = value
    with pytest.raises(DecodeError, match=r"WorkerStatus\.latency\.a1: "):
        decode(WorkerStatus, wire(content))


@pytest.mark.parametrize(
    "times",
    [[2, 1], [INT64_MAX, INT64_MIN], [0, INT64_MAX, -1]],
    ids=["by one", "from the last to the first instant", "after the last instant"],
)
def test_behaviours_whose_time_falls_are_refused(times: list[int]) -> None:
    falling = Behaviours(np.zeros(len(times), "<i8"), np.zeros(len(times), "<u2"), np.array(times, "<i8"))
    with pytest.raises(EncodeError, match="times decrease"):
        encode(request(suffix=falling))


def test_the_widest_span_of_time_is_accepted() -> None:
    """The difference of the two times would overflow 64 bits and seem negative."""
    span = Behaviours(np.zeros(2, "<i8"), np.zeros(2, "<u2"), np.array([INT64_MIN, INT64_MAX], "<i8"))
    assert decode(RankingRequest, encode(request(suffix=span))).suffix == span


MALFORMED: dict[str, bytes] = {
    "nothing after the version": b"",
    "an unfinished map": b"\x85",
    "two bodies": msgpack.packb({}) * 2,
    "a reserved code": b"\xc1",
    "text that is no UTF-8": b"\x81\xa7user_id\xa2\xff\xfe",
    "a surrogate in UTF-8": b"\x81\xa7user_id\xa3\xed\xa0\x80",
    "a name given twice": b"\x82" + b"\xa7user_id\xa1u" * 2,
    "a number as a name": b"\x81\x01\x02",
    "a list as a name": b"\x81\x91\x01\x02",
    "an array that claims 4 billion entries": b"\xdd\xff\xff\xff\xff",
    "a map that claims 4 billion entries": b"\xdf\xff\xff\xff\xff",
    "bytes that claim 4 billion": b"\xc6\xff\xff\xff\xff",
    "text that claims 4 billion": b"\xdb\xff\xff\xff\xff",
    "an extension type that claims 4 billion": b"\xc9\xff\xff\xff\xff\x01",
    "a timestamp extension": b"\xd6\xff\x00\x00\x00\x00",
    "an extension of no bytes": b"\x81\xa1a\xc7\x00\x05",
    "a long list with an extension of no bytes": b"\x81\xa1a\xdc\x00\x21\xc7\x00\x05" + b"\x00" * 32,
    "a long list that is cut off": b"\x81\xa1a\xdc\x00\x21" + b"\x00" * 32,
    "lists in lists without end": b"\x91" * 100_000,
    "maps in maps without end": b"\x81\xa1a" * 100_000,
    "a list too long": msgpack.packb([0] * (MAX_LIST_ENTRIES + 1)),
    "a map too large": msgpack.packb({str(n): 0 for n in range(MAX_MAP_ENTRIES + 1)}),
    "text too long": msgpack.packb("a" * (MAX_TEXT_BYTES + 1)),
    "too many lists": msgpack.packb([[]] * (MAX_CONTAINERS + 1)),
    "too many maps": b"\x81\xa1a" + msgpack.packb([{}] * MAX_CONTAINERS),
    "too many maps inside each other": b"\x81\xa1a" * MAX_CONTAINERS + b"\x80",
    "too many short lists": b"\x81\xa1a" + msgpack.packb([[[]] * 20] * 20),
    "a million empty lists": msgpack.packb([[[]] * MAX_LIST_ENTRIES] * 250),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_bytes_that_are_no_bounded_messagepack_are_refused(name: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(RankingRequest, bytes((SCHEMA_VERSION,)) + MALFORMED[name])
    assert caught.value.reason is DecodeReason.MALFORMED


EXTENSIONS = {
    "8": b"\xc7\x00\x05",
    "16": b"\xc8\x00\x00\x05",
    "32": b"\xc9\x00\x00\x00\x00\x05",
    "fixed": b"\xd4\x05\x00",
    "timestamp": b"\xc7\x00\xff",
}
"""Headers of extensions, which end a look at headers that does not know them. Four of them have no bytes."""
_NESTED = b"\xdc\x10\x00" * 1000

ATTACKS: dict[str, bytes] = MALFORMED | {
    **{f"extension {name}, then a thousand nested lists": b"\x92" + ext + _NESTED for name, ext in EXTENSIONS.items()},
    **{f"extension {name} in each of them": (b"\xdc\x10\x00" + ext) * 1000 for name, ext in EXTENSIONS.items()},
    "extensions as names": b"\x8f" + (EXTENSIONS["8"] + b"\x00") * 14 + b"\xa1a" + _NESTED,
    "empty bytes, text, lists and maps, then a thousand nested lists": b"\x95\xc4\x00\xa0\x90\x80" + _NESTED,
    "a long list and empty lists, then a thousand nested lists": b"\xdc\x10\x00" + b"\x90" * 4095 + _NESTED,
    "a thousand nested lists as a name": b"\x81" + _NESTED,
    "a thousand nested maps as names": b"\xde\x00\x40" * 1000,
    "a reserved code, then a thousand nested lists": b"\x92\xc1" + _NESTED,
    "a thousand nested lists that claim 4,095 entries": b"\xdc\x0f\xff" * 1000,
    "four thousand nested lists that claim 4,096 entries": b"\xdc\x10\x00" * 4097,
    "a thousand nested lists that claim 32 entries": b"\xdc\x00\x20" * 1000,
    "a thousand nested maps that claim 64 entries": b"\xde\x00\x40\xa1a" * 1000,
    "a thousand nested maps that claim 32 entries": b"\xde\x00\x20\xa1a" * 1000,
    "a thousand nested lists of 4,095 numbers": (b"\xdc\x10\x00" + b"\xe0" * 4095) * 1000,
    "a thousand nested lists of 31 numbers": (b"\xdc\x00\x20" + b"\xe0" * 31) * 1000,
    "a thousand nested lists of 31 texts": (b"\xdc\x00\x20" + b"\xa2\xc4\x80" * 31) * 1000,
    "a map of 64 lists of 4,096 numbers": b"\xde\x00\x40"
    + b"".join(b"\xa1%c\xdc\x10\x00" % name + b"\xe0" * 4096 for name in range(64)),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("message", [RankingRequest, WorkerStatus], ids=["a request", "a status"])
def test_refusing_takes_bounded_memory(message: type[Any], name: str) -> None:
    """msgpack would allocate what each header claims: 32 MiB for the first attack, which has 3,000 bytes."""
    data = bytes((SCHEMA_VERSION,)) + ATTACKS[name]
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decode(message, data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 400_000 + min(40 * len(data), 4 * MIB)


def test_the_longest_status_is_decoded(status: WorkerStatus) -> None:
    buckets = tuple(range(LENGTH_BUCKETS))
    report = FullPathReport(1, tuple(map(float, buckets)), buckets, buckets, tuple(map(str, range(MAX_MISSED_IDS))))
    longest = replace(status, partitions=tuple(range(MAX_LIST_ENTRIES)), full_path=report)
    assert decode(WorkerStatus, encode(longest)) == longest


@pytest.mark.parametrize("length", [1, SHORT_ENTRIES, SHORT_ENTRIES + 1, MAX_LIST_ENTRIES])
@pytest.mark.parametrize(
    "value",
    [None, False, 3, -1, -100, 200, 2**31, 2**63, -(2**62), 1.5, "text", "t" * 40, "t" * 300, b"b", b"b" * 300],
    ids=repr,
)
def test_an_unknown_field_with_a_long_list_of_any_values_is_ignored(length: int, value: Any) -> None:
    body = msgpack.unpackb(encode(request())[1:]) | {"new_list": [value] * length, "later": {"a": [[value]]}}
    data = bytes((SCHEMA_VERSION,)) + typing.cast(bytes, msgpack.packb(body))
    assert decode(RankingRequest, data) == request()


def test_an_unknown_field_with_a_long_map_is_ignored() -> None:
    body = msgpack.unpackb(encode(request())[1:]) | {"new_map": {str(key): [key] for key in range(MAX_CONTAINERS - 4)}}
    assert decode(RankingRequest, bytes((SCHEMA_VERSION,)) + typing.cast(bytes, msgpack.packb(body))) == request()


def test_lists_that_are_short_enough_alone_and_too_long_together_are_refused() -> None:
    body = {"one": [0] * MAX_LIST_ENTRIES, "two": [0] * MAX_LIST_ENTRIES, "three": [0] * MAX_LIST_ENTRIES}
    with pytest.raises(DecodeError, match=f"more than {MAX_ENTRIES} entries"):
        decode(WorkerStatus, bytes((SCHEMA_VERSION,)) + typing.cast(bytes, msgpack.packb(body)))


def test_arrays_are_read_without_a_copy_and_read_only() -> None:
    """Reading all arrays of a request takes less memory than one copy of the longest array."""
    data = encode(request(user_id="u", history=History("u", 1, np.empty(0, "<i8"), some_behaviours(100_000))))
    decode(RankingRequest, data)
    tracemalloc.start()
    try:
        decoded = decode(RankingRequest, data)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert decoded.history is not None
    assert held_bytes < len(data) + 100_000
    for array in (decoded.candidates, decoded.suffix.items, decoded.history.behaviours.actions):
        assert isinstance(array.base, bytes), "the array uses the memory of the bytes from msgpack"
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_packed_field_is_a_view_of_the_bytes_it_is_given() -> None:
    raw = bytes(80)
    array = Packed("<i8", 10, "n").unpack(raw)
    assert np.shares_memory(array, np.frombuffer(raw, np.uint8))


def test_messages_of_plain_sequences_equal_those_of_arrays() -> None:
    rows = [(5, 1, 1000), (6, 0, 2000)]
    own = Behaviours(np.array([5, 6]), np.array([1, 0], np.uint16), np.array([1000, 2000]))
    history = History("u", 1, [3], Behaviours.of(rows))  # type: ignore[arg-type]
    assert history == History("u", 1, np.array([3]), own)
    assert history.version() == History("u", 1, np.array([3]), own).version()
    mixed = Behaviours(own.items, own.actions.tolist(), own.timestamps_ms.tolist())  # type: ignore[arg-type]
    assert History("u", 1, np.array([3]), mixed).version() == history.version()
    assert decode(History, encode(history)) == history
    sent = request(candidates=[1, 2], suffix=Behaviours([5, 6], [1, 0], [1000, 2000]))  # type: ignore[arg-type]
    assert encode(sent) == encode(request(candidates=np.array([1, 2]), suffix=own))
    assert Behaviours.of([]) == Behaviours.empty() and (Behaviours.of([]) + own).items.dtype == np.int64


UNENCODABLE: dict[str, tuple[Any, str]] = {
    "a matrix": (request(candidates=np.zeros((2, 2), "<i8")), "one dimension"),
    "a scalar": (request(candidates=np.int64(3)), "one dimension"),
    "ragged lists": (request(candidates=[[1], [2, 3]]), "not an array of numbers"),
    "texts": (request(candidates=np.array(["a"])), "do not all fit"),
    "objects": (request(candidates=[None]), "do not all fit"),
    "fractions for ids": (request(candidates=np.array([1.5])), "do not all fit"),
    "truths for ids": (request(candidates=np.array([True])), "do not all fit"),
    "ids beyond 63 bits": (request(candidates=np.array([2**63], np.uint64)), "do not all fit"),
    "ids beyond 64 bits": (request(candidates=[2**70]), "candidates"),
    "no candidates": (request(candidates=[]), "0 entries"),
    "a surrogate": (request(user_id="\ud800"), "not encodable as UTF-8"),
    "a suffix too long": (request(suffix=some_behaviours(MAX_SUFFIX_BEHAVIOURS + 1)), "4097 behaviours"),
    "a score beyond 32 bits": (result(scores=np.array([1e300, 0.0])), "not finite"),
    "a part of the wrong class": (request(suffix=StageTimings()), "expected Behaviours"),
    "a required value that is None": (request(user_id=None), "is required"),
    "a reason that is no member": (result(outcome=Ended.FAILED, reason="tired"), "is not one of"),
}


@pytest.mark.parametrize("name", UNENCODABLE)
def test_a_message_outside_its_bounds_is_not_encoded(name: str) -> None:
    message, text = UNENCODABLE[name]
    with pytest.raises(EncodeError, match=text):
        encode(message)


def test_numbers_of_other_types_are_packed_if_they_fit() -> None:
    wanted = request(candidates=np.array([1, 2], "<i8"))
    assert encode(request(candidates=[1, 2])) == encode(wanted)
    assert encode(request(candidates=np.array([1, 2], ">i8"))) == encode(wanted)
    assert encode(request(candidates=np.array([1, 9, 2, 9], "<i4")[::2])) == encode(wanted)
    assert encode(request(sent_at_us=np.int64(1))) == encode(request())


def test_a_number_too_large_for_a_float_is_a_field_error() -> None:
    with pytest.raises(ValueError, match="too large"):
        Real().pack(10**400)


def test_text_of_every_script_is_a_user_id() -> None:
    """Also characters that `str.isprintable` refuses: an ideographic space, a joiner, a no-break space."""
    for user_id in ("用户\u3000一", "👩\u200d💻", "a\u00a0b", "مستخدم"):
        assert decode(RankingRequest, encode(request(user_id=user_id))).user_id == user_id


def test_an_inline_history_must_have_the_length_that_its_version_says() -> None:
    history = History("u1", 1, np.empty(0, "<i8"), some_behaviours(3))
    event = RetrievalEvent("r", "u1", 1, 2, 50, 10, 0, history=history, history_version=history.version())
    assert decode(RetrievalEvent, encode(event)).history_length == 3
    shorter = History("u1", 1, np.empty(0, "<i8"), some_behaviours(2))
    with pytest.raises(EncodeError, match="2 behaviours, but history_version has 3"):
        encode(RetrievalEvent("r", "u1", 1, 2, 50, 10, 0, history=shorter, history_version=history.version()))


def test_a_failed_result_keeps_its_reason() -> None:
    failed = result(outcome=Ended.FAILED, reason=Reason.OVERLOADED, path=None, scores=None, num_tasks=0)
    assert decode(RankingResult, encode(failed)).reason is Reason.OVERLOADED


def test_an_unknown_reason_is_kept_as_other_and_equals_its_text() -> None:
    failed = result(outcome=Ended.FAILED, reason=Other("tired"), path=None, scores=None, num_tasks=0)
    reason = decode(RankingResult, encode(failed)).reason
    assert isinstance(reason, Other)
    assert not isinstance(reason, Reason)
    assert (reason, reason.value) == ("tired", "tired")


def test_metrics_count_every_unknown_choice_under_one_label() -> None:
    assert [choice_label(choice) for choice in (Reason.TOO_LONG, Other("tired"), Other("bored"))] == [
        "too_long",
        "other",
        "other",
    ]


@pytest.mark.parametrize("text", ["", "x" * (MAX_CHOICE_BYTES + 1), "tired\n"])
def test_the_text_of_an_unknown_choice_is_bounded(text: str) -> None:
    choice = Choice(Reason, is_open=True)
    with pytest.raises(FieldError):
        choice.unpack(text)
    with pytest.raises(FieldError):
        choice.pack(Other(text))


def test_schemas_need_neither_kafka_nor_torch() -> None:
    script = (
        "import sys\n"
        "for name in ('confluent_kafka', 'torch', 'faust', 'aiokafka', 'pydantic', 'typer', 'structlog', 'yaml'):\n"
        "    sys.modules[name] = None\n"
        "import relaygr.schemas as schemas\n"
        "import relaygr.schemas.headers, relaygr.schemas.partitioner, relaygr.schemas.reference\n"
        "event = schemas.RetrievalEvent('r', 'u', 1, 2, 50, 10, 0)\n"
        "assert schemas.decode(schemas.RetrievalEvent, schemas.encode(event)) == event\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)


@pytest.mark.parametrize("size", [2, FEW, FEW + 2])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_few_scores_are_checked_like_many(size: int, value: float) -> None:
    """Few are checked without numpy."""
    whole = np.full(size, np.finfo("<f4").max)
    assert np.array_equal(decode(RankingResult, encode(result(scores=whole))).scores, whole)
    whole[-1] = value
    with pytest.raises(EncodeError, match="not finite"):
        encode(result(scores=whole))


def test_finite_numbers_may_have_an_infinite_sum() -> None:
    kind = Packed("<f8", 4, "n", finite=True)
    largest = np.full(4, np.finfo("<f8").max)
    assert np.array_equal(kind.unpack(kind.pack(largest)), largest)


@pytest.mark.parametrize("size", [2, FEW, FEW + 1])
def test_few_times_are_checked_like_many(size: int) -> None:
    times = np.full(size, 7, "<i8")
    behaviours = Behaviours(times, np.ones(size, "<u2"), times.copy())
    behaviours.check()
    behaviours.timestamps_ms[-1] = 6
    with pytest.raises(FieldError, match="times decrease"):
        behaviours.check()
