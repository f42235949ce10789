"""Free list and reference counts of the pages of one tier.

A page is a number below `capacity`; its memory is allocated elsewhere. A page leaves the free list with one
reference, that of its owner (an entry or work in flight). Every reader adds one. The page is free again when the last
reference is dropped, so a reader keeps an evicted or replaced page alive. Not thread-safe: the cache's lock guards it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PageArray = NDArray[np.int32]


class PagePool:
    """A free list and reference counts. Raises ValueError for a negative capacity."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"a pool can not have {capacity} pages")
        self.capacity = capacity
        # A stack whose top is the lowest index: a fresh pool gives adjacent pages, which are copied in one run.
        self._stack: PageArray = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._top = capacity
        self._references = np.zeros(capacity, dtype=np.int32)

    @property
    def free(self) -> int:
        """Number of free pages."""
        return self._top

    def take(self, count: int) -> PageArray | None:
        """Takes `count` free pages, with one reference each. None, without taking any, if there are fewer."""
        if count > self._top:
            return None
        pages = self._stack[self._top - count : self._top][::-1].copy()
        self._top -= count
        self._references[pages] = 1
        return pages

    def claim(self, pages: PageArray) -> None:
        """Takes these pages, with one reference each. Raises ValueError unless they are distinct and all free."""
        ordered = np.sort(pages)
        if (ordered[1:] == ordered[:-1]).any() or self._references[pages].any():
            raise ValueError("a page that is not free was claimed")
        self._references[pages] = 1
        free = np.flatnonzero(self._references == 0)[::-1]
        self._top = free.size
        self._stack[: self._top] = free

    def share(self, pages: PageArray) -> None:
        """Adds a reference to each of `pages`, which are distinct and not free."""
        self._references[pages] += 1

    def drop(self, pages: PageArray) -> int:
        """Drops a reference of each of `pages`, which are distinct. Returns the number of pages that became free.

        Raises ValueError if one is free already.
        """
        left = self._references[pages] - 1
        if left.size and int(left.min()) < 0:
            raise ValueError("a free page was dropped again")
        self._references[pages] = left
        freed = pages[left == 0][::-1]
        self._stack[self._top : self._top + freed.size] = freed
        self._top += freed.size
        return int(freed.size)

    def free_pages(self) -> PageArray:
        """A copy of the free list."""
        return self._stack[: self._top].copy()

    def references(self) -> PageArray:
        """A copy of the reference counts, int32 [capacity]."""
        return self._references.copy()
