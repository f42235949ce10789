"""Keeps the arena's index true to the DRAM tier's books, and the pages' checksums.

Books and copy threads call it (`relaygr.worker.cache.journal`); it writes plain memory. The order that makes a kill at
any moment harmless: `removed` drops a record before its pages may be written; `seal` computes the checksums of
pages that a copy has filled, and only then `published` stores the record.

Restored pages are held against their checksums when a copy first reads them. That costs a quarter of a
millisecond a MiB, once. A page that differs fails the copy, and the cache then drops the prefix as it does
for any copy that fails for good.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from relaygr.worker.cache.entries import CacheEntry
from relaygr.worker.cache.journal import StoredEntry
from relaygr.worker.cache.pages import PageArray
from relaygr.worker.shared import metrics
from relaygr.worker.shared.index import ArenaIndex
from relaygr.worker.shared.lock import ArenaLock
from relaygr.worker.shared.record import Record, pack

log = structlog.get_logger()


class TornPageError(Exception):
    """A page of the arena does not hold what was sealed."""


class NotTheWriterError(Exception):
    """This process does not hold the arena's lock."""


class ArenaJournal:
    """A `TierJournal` and a `PageGuard`, of no effect before `lock` is held. `pages` uint8 [num_pages, page_bytes]."""

    def __init__(self, index: ArenaIndex, pages: NDArray[np.uint8], lock: ArenaLock) -> None:
        self._index = index
        self._pages = pages
        self._lock = lock
        self._checksums = np.zeros(len(pages), np.uint32)
        self._unverified = np.zeros(len(pages), np.bool_)
        self._torn = np.zeros(len(pages), np.bool_)
        self._records = 0
        self._ended = False

    def restored(self, records: Sequence[Record]) -> None:
        """These are in the index, and in the books from now on; their pages are unverified."""
        if records:
            pages = np.concatenate([record.entry.pages for record in records])
            self._checksums[pages] = np.concatenate([record.checksums for record in records])
            self._unverified[pages] = True

    # The books, under the cache's lock.

    def published(self, entry: CacheEntry, now_us: int) -> None:
        if self._ended or not self._lock.is_held():
            return
        stored = StoredEntry(entry.key, entry.pages, entry.tokens, entry.source)
        record = pack(Record(stored, self._checksums[entry.pages], self._lock.arena_epoch))
        self._records += 1
        # No two records of an index have it: epochs count the writers.
        stamp = (self._lock.arena_epoch << 40) + self._records
        if not self._index.put(record, entry.pages, now_us, stamp):
            metrics.UNRECORDED.inc()

    def touched(self, entry: CacheEntry, now_us: int) -> None:
        if not self._ended:
            self._index.use(int(entry.pages[0]), now_us)

    def removed(self, entry: CacheEntry) -> None:
        if not self._ended:
            self._index.drop(int(entry.pages[0]))

    def end(self) -> None:
        self._ended = True

    # The copy threads.

    def seal(self, pages: PageArray) -> None:
        """Raises NotTheWriterError: another process may have the arena, and these pages, by now."""
        if not self._lock.is_held():
            raise NotTheWriterError("the arena's lock is not this process's any more")
        self._checksums[pages] = [zlib.crc32(self._pages[page]) for page in pages]
        self._unverified[pages] = self._torn[pages] = False

    def verify(self, pages: PageArray) -> None:
        """Raises TornPageError."""
        unverified = pages[self._unverified[pages]]
        for page in unverified:
            if zlib.crc32(self._pages[page]) != self._checksums[page]:
                if not self._torn[page]:
                    # Once, though a copy that failed is tried again.
                    self._torn[page] = True
                    metrics.PAGES.labels("torn").inc()
                    log.warning("a page of the arena is torn: its prefix will be dropped", page=int(page))
                raise TornPageError(f"page {page}")
            self._unverified[page] = False
            metrics.PAGES.labels("whole").inc()
