"""The pages of one tier: which are free, how many readers each has, and how many pages each kind of entry holds.

Not thread-safe: the cache's lock guards it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from relaygr.worker.cache.entries import CacheEntry, Holding
from relaygr.worker.cache.results import PageArray

NO_PAGES: PageArray = np.empty(0, np.int32)


class PagePool:
    """Free list and reference counts of the pages of a tier. A page is a number below `capacity`.

    A page leaves the free list with one reference, that of its owner (an entry or work in flight). Every reader adds
    one. The page is free again when the last reference is dropped, so a reader keeps an evicted or replaced page alive.
    A dirty page may hold bytes of a prefix that used it.
    Raises ValueError for a negative capacity.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"a pool cannot have {capacity} pages")
        self.capacity = capacity
        # A stack whose top is the lowest index: a fresh pool gives adjacent pages, which are copied in one run.
        self._stack: PageArray = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self.free = capacity
        """Number of free pages."""
        self._references = np.zeros(capacity, dtype=np.int32)
        self._dirty = np.zeros(capacity, dtype=np.bool_)
        self._may_have_dirty = False
        """False if no free page is dirty."""

    def take(self, count: int) -> PageArray | None:
        """Takes `count` free pages, with one reference each. None, without taking any, if there are fewer."""
        if count > self.free:
            return None
        pages = self._stack[self.free - count : self.free][::-1].copy()
        self.free -= count
        self._references[pages] = 1
        self._dirty[pages] = True
        return pages

    def take_dirty(self, count: int) -> PageArray:
        """Takes at most `count` of the dirty free pages, the last freed first, with one reference each."""
        if not self._may_have_dirty:
            return NO_PAGES
        free = self._stack[: self.free]
        (places,) = self._dirty[free.astype(np.intp)].nonzero()
        self._may_have_dirty = places.size > count
        places = places[-count:]
        pages = free[places]
        is_kept = np.ones(self.free, np.bool_)
        is_kept[places] = False
        kept = free[is_kept]
        self.free = kept.size
        self._stack[: self.free] = kept
        self._references[pages] = 1
        return pages

    def drop_clean(self, pages: PageArray) -> None:
        """Frees pages of `take_dirty` that hold zeros now."""
        self._dirty[pages] = False
        self._references[pages] = 0
        self._put_back(pages)

    def mark_dirty(self) -> None:
        """Every page may hold bytes of an earlier process."""
        self._dirty[:] = True
        self._may_have_dirty = True

    def claim(self, pages: PageArray) -> None:
        """Takes these pages, with one reference each. Raises ValueError unless they are distinct and all free."""
        ordered = np.sort(pages)
        if (ordered[1:] == ordered[:-1]).any() or self._references[pages].any():
            raise ValueError("a page that is not free was claimed")
        self._references[pages] = 1
        self._dirty[pages] = True
        free = np.flatnonzero(self._references == 0)[::-1]
        self.free = free.size
        self._stack[: self.free] = free

    def share(self, pages: PageArray) -> None:
        """Adds a reference to each of `pages`, which are distinct and not free."""
        # Numpy would convert the numbers of pages to its own type of index twice, which takes as long as the rest.
        self._references[pages.astype(np.intp)] += 1

    def drop(self, pages: PageArray) -> int:
        """Drops a reference of each of `pages`, which are distinct. Returns the number of pages that became free.

        Raises ValueError if one is free already.
        """
        places = pages.astype(np.intp)
        left = self._references[places] - 1
        # `left.min()` takes four times as long for the few pages of a prefix.
        least = int(left[left.argmin()]) if left.size else 1
        if least < 0:
            raise ValueError("a free page was dropped again")
        self._references[places] = left
        if least:
            return 0  # The usual end of a request: the prefix keeps its pages.
        freed = pages[left == 0]
        self._put_back(freed)
        self._may_have_dirty = True  # Every page that was in use is dirty.
        return int(freed.size)

    def _put_back(self, pages: PageArray) -> None:
        self._stack[self.free : self.free + pages.size] = pages[::-1]
        self.free += pages.size

    def free_pages(self) -> PageArray:
        """A copy of the free list."""
        return self._stack[: self.free].copy()

    def references(self) -> PageArray:
        """A copy of the reference counts, int32 [capacity]."""
        return self._references.copy()


@dataclass(slots=True)
class PageAccount:
    """Number of pages by `Holding`. `orphaned` pages have readers but no entry any more."""

    held: Counter[Holding] = field(default_factory=Counter)
    orphaned: int = 0
    in_flight: int = 0

    def reclassify(self, entry: CacheEntry) -> None:
        """Counts the entry's pages under its present `Holding`."""
        held = self.held
        held[entry.holding] -= entry.counted_pages
        entry.holding = Holding.PINNED if entry.pins else Holding.LEASED if entry.leases else Holding.EVICTABLE
        entry.counted_pages = entry.pages.size if entry.attached else 0
        held[entry.holding] += entry.counted_pages
