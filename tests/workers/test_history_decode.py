"""Reading a record of the history topic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.schemas.codec import DecodeReason, encode
from relaygr.schemas.messages import Behaviours, History
from relaygr.schemas.partitioner import partition_for
from relaygr.worker.history.batches import HistoryRecord
from relaygr.worker.history.decode import KEY_MISMATCH, REASONS, WRONG_PARTITIONER, Rejected, read_record

PARTITIONS = 12


def history(user_id: str) -> History:
    return History(user_id, 1, np.array([1]), Behaviours(np.array([5]), np.array([0], "<u2"), np.array([9])))


def test_a_history_under_its_users_key_is_a_record() -> None:
    key = "zoë".encode()
    record = read_record(key, encode(history("zoë")), partition_for(key, PARTITIONS), PARTITIONS, 7)
    assert record == HistoryRecord("zoë", 7, history("zoë"))


def test_a_record_has_the_time_of_its_message() -> None:
    record = read_record(b"u", encode(history("u")), partition_for(b"u", PARTITIONS), PARTITIONS, 7, 1_234)
    assert record == HistoryRecord("u", 7, history("u"), 1_234)


def test_a_version_number_beyond_2_to_the_53_is_rejected() -> None:
    packed = encode(replace(history("u"), number=2**53 - 1))
    too_large = packed.replace((2**53 - 1).to_bytes(8, "big"), (2**53).to_bytes(8, "big"))
    assert too_large != packed
    rejected = read_record(b"u", too_large, partition_for(b"u", PARTITIONS), PARTITIONS, 0)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == DecodeReason.INVALID_FIELD


def test_the_reason_of_a_rejected_record_names_no_user() -> None:
    """Details go to dead letters, which outlive the user."""
    key = b"secret-key"
    rejected = read_record(key, encode(history("secret-user")), partition_for(key, PARTITIONS), PARTITIONS, 0)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == KEY_MISMATCH
    assert "secret" not in rejected.detail


def test_a_record_of_a_topic_that_somebody_enlarged_says_what_to_do() -> None:
    """The producer did nothing wrong: murmur2 had put the user there when the topic had fewer partitions."""
    before = partition_for(b"user-2", 3)
    assert before != partition_for(b"user-2", PARTITIONS)
    rejected = read_record(b"user-2", encode(history("user-2")), before, PARTITIONS, 7)
    assert isinstance(rejected, Rejected)
    assert "if somebody added partitions to the topic, set a new topic_prefix" in rejected.detail


def test_no_value_is_a_tombstone() -> None:
    record = read_record(b"u", None, partition_for(b"u", PARTITIONS), PARTITIONS, 7)
    assert record == HistoryRecord("u", 7, None)


@pytest.mark.parametrize(
    ("key", "value", "shift", "reason"),
    [
        pytest.param(None, encode(history("u")), 0, DecodeReason.EMPTY, id="no key"),
        pytest.param(b"", encode(history("u")), 0, DecodeReason.EMPTY, id="empty key"),
        pytest.param(b"\xff\xfe", None, 0, DecodeReason.MALFORMED, id="key is not UTF-8"),
        pytest.param(b"a\nb", None, 0, DecodeReason.INVALID_FIELD, id="key holds a control character"),
        pytest.param(b"x" * 257, None, 0, DecodeReason.INVALID_FIELD, id="key too long"),
        pytest.param(b"u", encode(history("u")), 1, WRONG_PARTITIONER, id="another partition"),
        pytest.param(b"u", None, 1, WRONG_PARTITIONER, id="a tombstone in another partition"),
        pytest.param(b"u", b"", 0, DecodeReason.EMPTY, id="empty value"),
        pytest.param(b"u", b"garbage", 0, DecodeReason.UNSUPPORTED_VERSION, id="garbage"),
        pytest.param(b"u", b"\x01garbage", 0, DecodeReason.MALFORMED, id="garbage after the version"),
        pytest.param(b"u", encode(history("v")), 0, KEY_MISMATCH, id="another user's body"),
    ],
)
def test_an_invalid_history_record_is_rejected_with_its_reason(
    key: bytes | None, value: bytes | None, shift: int, reason: str
) -> None:
    partition = (partition_for(key or b"u", PARTITIONS) + shift) % PARTITIONS
    rejected = read_record(key, value, partition, PARTITIONS, 0)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == reason
    assert rejected.detail


@given(st.none() | st.binary(max_size=40), st.none() | st.binary(max_size=80), st.integers(0, PARTITIONS - 1))
def test_any_bytes_are_a_record_or_a_rejection(key: bytes | None, value: bytes | None, partition: int) -> None:
    result = read_record(key, value, partition, PARTITIONS, 0)
    assert isinstance(result, HistoryRecord) or result.reason in REASONS
