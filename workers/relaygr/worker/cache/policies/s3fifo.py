"""S3-FIFO: three first-in-first-out queues. Most new entries are used once only, and are evicted early.

* A new entry enters `small`, which has a tenth of the tier's pages. At the end of `small` an entry with at least two
  later visits moves to `main`. Any other is evicted, and `ghosts` remembers its identity.
* An entry that `ghosts` remembers enters `main` at once, since it was evicted too early.
* At the end of `main` an entry goes round once more for each of its visits, at most three times.
* Victims come from `small` while it has its tenth or more, else from `main`.

Sizes are pages. `ghosts` remembers as many pages as `main` may have. A touch moves nothing, it only counts. A walk
that passes over an entry (pinned or leased) moves it to the young end, since it is in use.

Source: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023;
with visits instead of uses (`contract`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from relaygr.worker.cache.policies.contract import VISIT_US, EntryWeight
from relaygr.worker.cache.policies.ghosts import Ghosts

_SMALL_SHARE = 0.1
_MOST_VISITS = 3
_VISITS_FOR_MAIN = 2


@dataclass(slots=True)
class _Node:
    pages: int
    identity: int
    visit_us: int
    """Start of the entry's latest visit."""
    visits: int = 0
    """Visits since the entry entered its queue or went round."""


class S3Fifo:
    """An `EvictionOrder`."""

    def __init__(self, capacity_pages: int, visit_us: int = VISIT_US) -> None:
        self._small_limit = max(1, int(capacity_pages * _SMALL_SHARE))
        self._ghost_limit = max(0, capacity_pages - self._small_limit)
        self._visit_us = visit_us
        self._small: OrderedDict[int, _Node] = OrderedDict()
        self._main: OrderedDict[int, _Node] = OrderedDict()
        self._ghosts = Ghosts()
        self._small_pages = 0

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        small = self._small.get(entry_id)
        node = small or self._main.get(entry_id)
        if node is not None:
            self._small_pages += weight.pages - node.pages if small else 0
            node.pages = weight.pages
            self.touch(entry_id, now_us)
            return
        node = _Node(weight.pages, weight.identity, now_us)
        if self._ghosts.forget(weight.identity):
            self._main[entry_id] = node
        else:
            self._small[entry_id] = node
            self._small_pages += node.pages

    def touch(self, entry_id: int, now_us: int) -> None:
        node = self._small.get(entry_id) or self._main[entry_id]
        if now_us - node.visit_us >= self._visit_us:
            node.visit_us = now_us
            node.visits = min(node.visits + 1, _MOST_VISITS)

    def evict(self, entry_id: int) -> None:
        node = self._small.get(entry_id)
        self.remove(entry_id)
        if node is not None:
            self._ghosts.remember(node.identity, node.pages)
            while self._ghosts.pages > self._ghost_limit:
                self._ghosts.forget_oldest()

    def remove(self, entry_id: int) -> None:
        node = self._small.pop(entry_id, None)
        if node is not None:
            self._small_pages -= node.pages
        else:
            self._main.pop(entry_id, None)

    def victims(self, now_us: int) -> Iterator[int]:  # noqa: ARG002
        offered: set[int] = set()
        """Entries of `main` that this walk has yielded."""
        small_left, small_pages = len(self._small), self._small_pages
        while small_left or len(offered) < len(self._main):
            if small_left and (small_pages >= self._small_limit or len(offered) == len(self._main)):
                small_left -= 1
                entry_id, node = next(iter(self._small.items()))
                small_pages -= node.pages
                if node.visits >= _VISITS_FOR_MAIN:
                    self.remove(entry_id)
                    node.visits = 0
                    self._main[entry_id] = node
                    continue
                self._small.move_to_end(entry_id)
                yield entry_id
                continue
            entry_id, node = next(iter(self._main.items()))
            self._main.move_to_end(entry_id)
            if entry_id in offered:
                continue
            if node.visits:
                node.visits -= 1
                continue
            offered.add(entry_id)
            yield entry_id

    def expired(self, now_us: int) -> Iterator[int]:  # noqa: ARG002
        return iter(())

    def __contains__(self, entry_id: int) -> bool:
        return entry_id in self._small or entry_id in self._main

    def __len__(self) -> int:
        return len(self._small) + len(self._main)
