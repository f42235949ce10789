"""What a record of the history topic says: a pure reading of key, value and partition."""

from __future__ import annotations

from dataclasses import dataclass

from relaygr.schemas.codec import DecodeError, DecodeReason, decode
from relaygr.schemas.fields import FieldError, Text
from relaygr.schemas.messages import History
from relaygr.schemas.partitioner import partition_for
from relaygr.worker.history.store import HistoryRecord

KEY_MISMATCH = "key_mismatch"
WRONG_PARTITIONER = "wrong_partitioner"
REASONS = (*DecodeReason, KEY_MISMATCH, WRONG_PARTITIONER)
_USER_ID = Text(256)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record for dead letters: a reason of `REASONS`, and a sentence."""

    reason: str
    detail: str


def read_record(
    key: bytes | None, value: bytes | None, partition: int, partition_count: int, offset: int
) -> HistoryRecord | Rejected:
    """The record, or why it is none. A value of None is a tombstone; an empty one is not."""
    if not key:
        return Rejected(DecodeReason.EMPTY, "a history record needs the user id as its key")
    try:
        user_id = _USER_ID.unpack(key.decode())
    except UnicodeDecodeError:
        return Rejected(DecodeReason.MALFORMED, "the key is not UTF-8")
    except FieldError as error:
        return Rejected(DecodeReason.INVALID_FIELD, f"the key is no user id: {error}")
    right = partition_for(key, partition_count)
    if right != partition:
        return Rejected(
            WRONG_PARTITIONER,
            f"murmur2 puts this user in partition {right} of {partition_count}, the record is in {partition}: "
            "set the producer's partitioner to murmur2_random",
        )
    if value is None:
        return HistoryRecord(user_id, offset, None)
    try:
        history = decode(History, value)
    except DecodeError as error:
        return Rejected(error.reason, str(error))
    if history.user_id != user_id:
        return Rejected(KEY_MISMATCH, f"the key is {user_id!r}, the body's user is {history.user_id!r}")
    return HistoryRecord(user_id, offset, history)
