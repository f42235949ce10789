"""Events of the cache: operations for a listener, and changes of DRAM entries for a journal.

The cache calls the listener after it has left its lock, so events of two threads may arrive out of order;
`sequence` gives the order of the operations. The cache calls the journal under its lock, in order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

from relaygr.schemas.digest import DigestChain
from relaygr.schemas.messages import PrefixSource
from relaygr.schemas.record import record
from relaygr.worker.cache.entries import CacheEntry
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.results import PageArray


class EventKind(enum.StrEnum):
    """The operation."""

    ACQUIRE = "acquire"
    """The look-up of a ranking."""
    PREPARE = "prepare"
    """The look-up of a pre-infer job."""
    RESERVE = "reserve"
    PUBLISH = "publish"
    ABORT = "abort"
    RELOAD = "reload"
    RELOADED = "reloaded"
    SPILL = "spill"
    SPILLED = "spilled"
    LEASE = "lease"
    INVALIDATE = "invalidate"


@record(frozen=True, slots=True)
class CacheEvent:
    """One operation, its prefix, and its outcome (a value of the enum that the operation returns).

    `at_us` is monotonic. `chain` is that of the history that the prefix covers; its length counts behaviours.
    """

    sequence: int
    at_us: int
    kind: EventKind
    user_id: str
    namespace: bytes
    chain: DigestChain
    outcome: str


CacheListener = Callable[[CacheEvent], None]
"""A listener must be quick, and must not raise."""


@record(frozen=True, slots=True, eq=False)
class StoredEntry:
    """A READY entry that an earlier process left. `pages` int32 is its page table, `tokens` the rows in it."""

    key: PrefixKey
    pages: PageArray
    tokens: int
    source: PrefixSource


class TierJournal(Protocol):
    """Records the entries of a DRAM tier that outlives the process.

    The cache calls it under its lock, so a method must be quick and must not raise.
    """

    def published(self, entry: CacheEntry, now_us: int) -> None:
        """The entry is READY and its last byte is sealed. Key, tokens and pages stay the same until `removed`."""

    def touched(self, entry: CacheEntry, now_us: int) -> None:
        """The entry was used."""

    def removed(self, entry: CacheEntry) -> None:
        """Called before a page of the entry can be free, and before its page table changes."""

    def end(self) -> None:
        """The process gives up the tier and the entries stay. Later calls record nothing."""
