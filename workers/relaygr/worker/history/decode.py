"""Decodes the records of both topics. An invalid record is `Rejected`, and goes to dead letters."""

from __future__ import annotations

from dataclasses import dataclass

from relaygr.schemas.codec import DecodeError, DecodeReason, decode
from relaygr.schemas.fields import FieldError, Text
from relaygr.schemas.headers import RawHeaders, RepeatedTombstone
from relaygr.schemas.messages import BehaviourEvent, History
from relaygr.schemas.partitioner import partition_for
from relaygr.worker.history.batches import EventRecord, HistoryRecord

KEY_MISMATCH = "key_mismatch"
WRONG_PARTITIONER = "wrong_partitioner"
REASONS = (*DecodeReason, KEY_MISMATCH, WRONG_PARTITIONER)
_USER_ID = Text(256)


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why a record goes to dead letters: one of `REASONS`, and a sentence."""

    reason: str
    detail: str


def read_record(
    key: bytes | None,
    value: bytes | None,
    partition: int,
    partition_count: int,
    offset: int,
    written_at_ms: int = 0,
    headers: RawHeaders = None,
) -> HistoryRecord | Rejected:
    """The decoded snapshot, or why it is rejected. A value of None is a tombstone; an empty value is not."""
    user_id = _user_of(key, partition, partition_count)
    if isinstance(user_id, Rejected):
        return user_id
    try:
        if value is None:
            return HistoryRecord(user_id, offset, None, written_at_ms, RepeatedTombstone.decode(headers))
        history = decode(History, value)
    except DecodeError as error:
        return Rejected(error.reason, str(error))
    if history.user_id != user_id:
        return Rejected(KEY_MISMATCH, "the key is not the user id of the body")
    return HistoryRecord(user_id, offset, history, written_at_ms)


def read_event(
    key: bytes | None,
    value: bytes | None,
    partition: int,
    partition_count: int,
    offset: int,
    written_at_ms: int = 0,
) -> EventRecord | Rejected:
    """The decoded behaviours, or why they are rejected."""
    user_id = _user_of(key, partition, partition_count)
    if isinstance(user_id, Rejected):
        return user_id
    try:
        event = decode(BehaviourEvent, value or b"")
    except DecodeError as error:
        return Rejected(error.reason, str(error))
    if event.user_id != user_id:
        return Rejected(KEY_MISMATCH, "the key is not the user id of the body")
    return EventRecord(event, offset, written_at_ms)


def _user_of(key: bytes | None, partition: int, partition_count: int) -> str | Rejected:
    if not key:
        return Rejected(DecodeReason.EMPTY, "the record needs the user id as its key")
    try:
        user_id = _USER_ID.unpack(key.decode())
    except UnicodeDecodeError:
        return Rejected(DecodeReason.MALFORMED, "the key is not UTF-8")
    except FieldError as error:
        return Rejected(DecodeReason.INVALID_FIELD, f"the key is not a user id: {error}")
    right = partition_for(key, partition_count)
    if right != partition:
        return Rejected(
            WRONG_PARTITIONER,
            f"murmur2 puts this user in partition {right} of {partition_count}, the record is in {partition}: "
            "set the producer's partitioner to murmur2_random, or, if somebody added partitions to the topic, set a "
            "new topic_prefix and publish the histories again",
        )
    return user_id
