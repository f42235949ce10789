"""The contract of a store that workers share: immutable objects under text keys, in the memory of other machines.

Every method may block for long (with Mooncake, for a minute) and cannot be cancelled, so only the threads of the pool
call them. Objects are read and written in the caller's memory without a copy. That memory is registered first. What a
`get` reads into must never be used for anything else: bytes may still arrive after a call that failed has returned.

A store may lose or evict any object at any time, and may give back bytes of another object: whoever reads checks what
arrived. Methods raise `StoreDownError` if the store does not answer.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Memory = NDArray[np.uint8]


class StoreDownError(Exception):
    """The store does not answer."""


class PutOutcome(enum.StrEnum):
    """What became of an object that was put. STORED also for a key that exists: nothing is written then."""

    STORED = "stored"
    NO_ROOM = "no_room"
    FAILED = "failed"


class GetOutcome(enum.StrEnum):
    """What became of an object that was asked for. UNREADABLE: it exists, but its bytes or its size are wrong."""

    FOUND = "found"
    ABSENT = "absent"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, eq=False)
class StoredObject:
    """An object: its key, and its bytes as contiguous parts of registered memory, one after another."""

    key: str
    parts: tuple[Memory, ...]


class Store(Protocol):
    """See the module."""

    def register(self, memory: Memory) -> None:
        """Allows `put` and `get` to use this contiguous memory. Raises StoreDownError if that fails."""

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key exists. It may exist and be unreadable."""

    def put(self, object: StoredObject) -> PutOutcome:
        """Writes an object. It appears as a whole, or not at all. Never waits for room."""

    def get(self, objects: Sequence[StoredObject]) -> list[GetOutcome]:
        """Reads objects into their parts, whose sizes must be those that were put."""

    def remove(self, key: str) -> bool:
        """Removes an object, also while others read it. Whether there was one."""

    def forget(self, pattern: str) -> int:
        """As `remove`, of every object whose key begins with a match of the regular expression. The store looks at all
        its keys.

        Returns their number. A put that is under way is not seen: its object appears when it ends.
        """
