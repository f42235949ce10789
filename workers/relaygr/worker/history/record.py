"""How a history lies in the store: its identity first, then the arrays, ready to be viewed.

All little-endian:

    number u64 | partition u32 | feature count u32 | length u64 | block count u32 | reserved u32
    seed 16 bytes | block digests 16 bytes each
    features i64 | items i64 | timestamps_ms i64 | actions u16

Each part begins at a multiple of its element size. The version is read from the first bytes alone,
and the digest chain is stored, so that nothing is hashed again when a request comes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from relaygr.schemas.digest import DIGEST_BYTES, DigestChain
from relaygr.schemas.messages import Behaviours, History, HistoryVersion

_HEAD = struct.Struct("<QIIQII")


@dataclass(frozen=True, slots=True)
class StoredHistory:
    """A history with the digest chain of all of it."""

    history: History
    chain: DigestChain

    @property
    def version(self) -> HistoryVersion:
        return HistoryVersion(self.history.number, self.chain.length, self.chain.digest)


@dataclass(frozen=True, slots=True)
class RecordHead:
    """What a stored record says before its arrays."""

    number: int
    partition: int
    feature_count: int
    length: int
    block_count: int

    @property
    def arrays_offset(self) -> int:
        return _HEAD.size + DIGEST_BYTES * (1 + self.block_count)


def pack(history: History, partition: int) -> bytes:
    """The stored form of `history`, hashed once."""
    chain = history.chain()
    behaviours = history.behaviours
    return b"".join(
        (
            _HEAD.pack(history.number, partition, history.features.size, len(behaviours), len(chain.blocks), 0),
            chain.seed,
            *chain.blocks,
            history.features.astype("<i8", copy=False).tobytes(),
            behaviours.items.astype("<i8", copy=False).tobytes(),
            behaviours.timestamps_ms.astype("<i8", copy=False).tobytes(),
            behaviours.actions.astype("<u2", copy=False).tobytes(),
        )
    )


def read_head(record: bytes | memoryview) -> RecordHead:
    """The first fields; the arrays are not touched."""
    number, partition, feature_count, length, block_count, _ = _HEAD.unpack_from(record)
    return RecordHead(number, partition, feature_count, length, block_count)


def read_version(record: bytes | memoryview) -> HistoryVersion:
    """The version of a stored record; the arrays are not touched."""
    head = read_head(record)
    end = head.arrays_offset
    return HistoryVersion(head.number, head.length, bytes(record[end - DIGEST_BYTES : end]))


def unpack(user_id: str, record: bytes) -> StoredHistory:
    """The history in `record`; its arrays are read-only views of `record`, which they keep alive."""
    head = read_head(record)
    view = memoryview(record)
    digests = [
        bytes(view[start : start + DIGEST_BYTES]) for start in range(_HEAD.size, head.arrays_offset, DIGEST_BYTES)
    ]
    features_at = head.arrays_offset
    items_at = features_at + 8 * head.feature_count
    timestamps_at = items_at + 8 * head.length
    actions_at = timestamps_at + 8 * head.length
    history = History(
        user_id=user_id,
        number=head.number,
        features=np.frombuffer(record, "<i8", head.feature_count, features_at),
        behaviours=Behaviours(
            items=np.frombuffer(record, "<i8", head.length, items_at),
            actions=np.frombuffer(record, "<u2", head.length, actions_at),
            timestamps_ms=np.frombuffer(record, "<i8", head.length, timestamps_at),
        ),
    )
    return StoredHistory(history, DigestChain(digests[0], tuple(digests[1:]), head.length))
