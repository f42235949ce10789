"""The contract with the journal of a DRAM tier that outlives the process, and the entries that it gives back."""

from __future__ import annotations

from typing import Protocol

from relaygr.schemas.messages import PrefixSource
from relaygr.schemas.record import record
from relaygr.worker.cache.entries import CacheEntry
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.results import PageArray


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
