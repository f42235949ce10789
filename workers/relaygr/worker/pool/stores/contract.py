"""The contract of a store that workers share: immutable objects in the memory of other machines.

The module of a store (`StoreModule`) opens it, and the open store (`Store`) has five verbs:

    has, put, get, remove       of objects
    forget                      of all objects of some users, whatever their model

Every verb may block for long, for a minute if a machine hangs, and cannot be cancelled. So only the threads of the pool
call them, several at a time. Objects are read and written in memory that was named when the store was opened. What a
`get` reads into must never be used for anything else: bytes may still arrive after a call that failed has returned.

A store may lose or evict any object at any time, and may give back bytes of another object: whoever reads checks what
arrived. Verbs raise `StoreDownError` if the store does not answer.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Memory: TypeAlias = "NDArray[np.uint8]"
"""A text, since processes without numpy read the settings, which look at the URL of a store."""


class StoreDownError(Exception):
    """The store does not answer."""


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """SCHEME://ADDRESS/PATH?NAME=VALUE&... It has no secrets: logs and `relaygr settings` show `text`."""

    text: str
    scheme: str
    address: str
    path: str
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """The key of an object. No part has a slash. `model` is a digest of revision and layout, `user` a keyed hash."""

    model: str
    user: str
    digest: str
    """Of the history up to the end of the object."""

    def __str__(self) -> str:
        return f"{self.model}/{self.user}/{self.digest}"


@dataclass(frozen=True, slots=True, eq=False)
class StoredObject:
    """An object: its key, and its bytes as contiguous parts of the memory named at the opening, one after another."""

    key: ObjectKey
    parts: tuple[Memory, ...]


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


class Store(Protocol):
    """An open store. See the module."""

    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Whether each key exists. It may exist and be unreadable."""

    def put(self, object: StoredObject) -> PutOutcome:
        """Writes an object. It appears as a whole, or not at all. Never waits for room."""

    def get(self, objects: Sequence[StoredObject]) -> list[GetOutcome]:
        """Reads objects into their parts, whose sizes must be those that were put."""

    def remove(self, key: ObjectKey) -> bool:
        """Removes an object, also while others read it. Whether there was one."""

    def forget(self, users: Collection[str] | None) -> int:
        """As `remove`, of every object of these users, of all models; None: of every object. Returns their number.

        It finds objects that any process has put. A put that is under way is not seen: its object appears when it ends.
        """


class StoreModule(Protocol):
    """What the module of a store has. Importing it imports no library that is not always installed."""

    @property
    def FORM(self) -> str:  # noqa: N802 - a constant of the module
        """The form of its URLs, for errors and the reference of the settings."""

    def check(self, url: StoreUrl) -> None:
        """Raises ValueError, with what to write instead, if address, path or options of the URL are wrong."""

    def missing(self) -> str | None:
        """The packages or libraries that this machine lacks, a colon, and the remedy; None if it has all."""

    def unreachable(self, url: StoreUrl, timeout_s: float) -> str | None:
        """Why this machine cannot reach the store, a colon, and the remedy; None if it can."""

    def open_store(self, url: StoreUrl, prefix: str, memory: Sequence[Memory]) -> Store:
        """Opens the store for the objects under `prefix`, which are read and written in these contiguous arrays.

        Raises StoreDownError if the store does not answer, RelayError if it cannot be used here. It may be called again
        after an error.
        """
