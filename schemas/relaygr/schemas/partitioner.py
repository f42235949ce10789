"""The partition of a key: murmur2, as Java's clients compute it. Every producer of the relay uses this hash.

librdkafka's default partitioner gives the same partition for 8.5 % of keys only. So every producer sets
`partitioner=murmur2_random`, and receivers check with `partition_for`. The hash is implemented here, so that a
gateway can route without a Kafka library. Source: `org.apache.kafka.common.utils.Utils.murmur2`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Container
from typing import Final

_SEED: Final = 0x9747B28C
_MULTIPLIER: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
_SIGN: Final = 0x7FFFFFFF


def murmur2(key: bytes) -> int:
    """The hash of a key as an unsigned 32-bit number."""
    length = len(key)
    whole = length & ~3
    state = _SEED ^ length
    for word in struct.unpack_from(f"<{whole // 4}I", key):
        word = (word * _MULTIPLIER) & _MASK
        state = ((state * _MULTIPLIER) & _MASK) ^ (((word ^ (word >> 24)) * _MULTIPLIER) & _MASK)
    if length > whole:
        state = ((state ^ int.from_bytes(key[whole:], "little")) * _MULTIPLIER) & _MASK
    state = ((state ^ (state >> 13)) * _MULTIPLIER) & _MASK
    return state ^ (state >> 15)


@functools.lru_cache(maxsize=4096)
def partition_for(key: bytes, partition_count: int) -> int:
    """The partition of `key` in a topic of `partition_count` partitions. A user's messages follow each other closely.

    Raises ValueError for a count below 1.
    """
    if partition_count < 1:
        raise ValueError("the partition count must be at least 1")
    return (murmur2(key) & _SIGN) % partition_count


def users_in(partitions: Container[int], partition_count: int) -> Callable[[str], bool]:
    """Whether a user, given by its id, belongs to one of these partitions."""
    return lambda user_id: partition_for(user_id.encode(), partition_count) in partitions
