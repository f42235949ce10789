"""What a tier tells to whoever keeps its entries beyond the process, and what it takes back from there.

A `TierJournal` hears of entries under the cache's lock, in the order in which the books change:

* `removed` before any page of the entry can be free, and before an entry's page table changes;
* `published` after its last byte was copied and sealed, once it is READY with its table;
* `touched` when it was used.

A `PageGuard` hears of pages from the thread that copies them, outside the lock: `seal` once a copy into the tier
is complete, `verify` before one out of it begins. Neither knows what the pages belong to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.pages import PageArray

if TYPE_CHECKING:
    from relaygr.worker.cache.entries import CacheEntry


@dataclass(frozen=True, slots=True, eq=False)
class StoredEntry:
    """A READY entry as an earlier process left it. `pages` int32 is its page table, `tokens` the rows in it."""

    key: PrefixKey
    pages: PageArray
    tokens: int
    source: PrefixSource


class TierJournal(Protocol):
    """Must be quick, and must not raise: it is called under the cache's lock."""

    def published(self, entry: CacheEntry, now_us: int) -> None:
        """The entry is READY: its key, tokens and pages are what they will stay until `removed`."""

    def touched(self, entry: CacheEntry, now_us: int) -> None:
        """The entry was used."""

    def removed(self, entry: CacheEntry) -> None:
        """From now on its pages may be written."""

    def end(self) -> None:
        """The tier goes, its entries stay: nothing is told any more."""


class PageGuard(Protocol):
    """Called by copy threads, outside the cache's lock."""

    def seal(self, pages: PageArray) -> None:
        """These pages were written in full. Raises if they may not be kept."""

    def verify(self, pages: PageArray) -> None:
        """These pages are about to be read. Raises if they are not what was sealed: the copy then fails."""


class NoJournal:
    """For a tier that ends with its process."""

    def published(self, entry: CacheEntry, now_us: int) -> None:  # noqa: ARG002
        return

    def touched(self, entry: CacheEntry, now_us: int) -> None:  # noqa: ARG002
        return

    def removed(self, entry: CacheEntry) -> None:  # noqa: ARG002
        return

    def end(self) -> None:
        return


class NoGuard:
    """For pages that nobody but this process has written."""

    def seal(self, pages: PageArray) -> None:  # noqa: ARG002
        return

    def verify(self, pages: PageArray) -> None:  # noqa: ARG002
        return
