"""ARC: two orders of recency, and a boundary between them that follows the traffic.

* `recent` has the entries of one visit, `frequent` those of more. Victims come from the old end of `recent` while it
  has more pages than its target, else from the old end of `frequent`.
* Each order remembers the identities of what it lost. An entry that returns from the memory of `recent` was evicted too
  early there, so the target grows; one that returns from the memory of `frequent` makes it smaller. Either enters
  `frequent` at once.

So a scan passes through a small `recent`, while a hot set that changes fast gets a large one. Sizes are pages. At each
eviction the memories shrink until `recent` and its memory are within the tier's pages, and both memories together, too.

Source: Megiddo and Modha, "ARC: A self-tuning, low overhead replacement cache", FAST 2003; with visits instead of uses
(`contract`), and pages instead of entries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from relaygr.worker.cache.policies.contract import VISIT_US, EntryWeight


@dataclass(slots=True)
class _Node:
    pages: int
    identity: int
    visit_us: int
    """Start of the entry's latest visit."""


class _Ghosts:
    """Identities of evicted entries, each with its pages, the oldest first. `forget_oldest` bounds them."""

    __slots__ = ("_pages_of", "pages")

    def __init__(self) -> None:
        self._pages_of: OrderedDict[int, int] = OrderedDict()
        self.pages = 0

    def __len__(self) -> int:
        return len(self._pages_of)

    def remember(self, identity: int, pages: int) -> None:
        """Makes it the youngest."""
        self.forget(identity)
        self._pages_of[identity] = pages
        self.pages += pages

    def forget(self, identity: int) -> bool:
        """Whether the identity was remembered."""
        pages = self._pages_of.pop(identity, None)
        self.pages -= pages or 0
        return pages is not None

    def forget_oldest(self) -> None:
        """Raises KeyError if none is remembered."""
        self.pages -= self._pages_of.popitem(last=False)[1]


class _Queue:
    """Entries by last use, and the memory of those that were evicted."""

    __slots__ = ("entries", "ghosts", "pages")

    def __init__(self) -> None:
        self.entries: OrderedDict[int, _Node] = OrderedDict()
        self.pages = 0
        self.ghosts = _Ghosts()

    def put(self, entry_id: int, node: _Node) -> None:
        self.entries[entry_id] = node
        self.pages += node.pages

    def pop(self, entry_id: int) -> _Node | None:
        node = self.entries.pop(entry_id, None)
        self.pages -= node.pages if node is not None else 0
        return node


class Arc:
    """An `EvictionOrder`."""

    def __init__(self, capacity_pages: int, visit_us: int = VISIT_US) -> None:
        self._capacity = capacity_pages
        self._visit_us = visit_us
        self._recent, self._frequent = _Queue(), _Queue()
        self._target = 0.0
        """Pages that `recent` may have before its entries are evicted."""

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        for queue in (self._recent, self._frequent):
            node = queue.entries.get(entry_id)
            if node is not None:
                queue.pages += weight.pages - node.pages
                node.pages = weight.pages
                self.touch(entry_id, now_us)
                return
        queue = self._frequent if self._remembers(weight) else self._recent
        queue.put(entry_id, _Node(weight.pages, weight.identity, now_us))

    def touch(self, entry_id: int, now_us: int) -> None:
        queue = self._frequent if entry_id in self._frequent.entries else self._recent
        queue.entries.move_to_end(entry_id)
        node = queue.entries[entry_id]
        if now_us - node.visit_us >= self._visit_us:
            node.visit_us = now_us
            queue.pop(entry_id)
            self._frequent.put(entry_id, node)

    def evict(self, entry_id: int) -> None:
        for queue in (self._recent, self._frequent):
            node = queue.pop(entry_id)
            if node is not None:
                queue.ghosts.remember(node.identity, node.pages)
        of_recent, of_frequent = self._recent.ghosts, self._frequent.ghosts
        while of_recent and self._recent.pages + of_recent.pages > self._capacity:
            of_recent.forget_oldest()
        while of_frequent and of_recent.pages + of_frequent.pages > self._capacity:
            of_frequent.forget_oldest()

    def remove(self, entry_id: int) -> None:
        self._recent.pop(entry_id)
        self._frequent.pop(entry_id)

    def victims(self) -> Iterator[int]:
        recent, frequent = iter(self._recent.entries.items()), iter(self._frequent.entries)
        recent_pages = self._recent.pages
        for entry_id, node in recent:
            while recent_pages <= self._target:
                of_frequent = next(frequent, None)
                if of_frequent is None:
                    break
                yield of_frequent
            recent_pages -= node.pages
            yield entry_id
        yield from frequent

    def __contains__(self, entry_id: int) -> bool:
        return entry_id in self._recent.entries or entry_id in self._frequent.entries

    def __len__(self) -> int:
        return len(self._recent.entries) + len(self._frequent.entries)

    def _remembers(self, weight: EntryWeight) -> bool:
        """Whether the entry was evicted lately. Then the target moves towards the order that lost it: by its pages, or
        by more where the memory of the other order is the larger one.
        """
        recent, frequent = self._recent.ghosts, self._frequent.ghosts
        of_recent, of_frequent = max(1, recent.pages), max(1, frequent.pages)
        left_recent, left_frequent = recent.forget(weight.identity), frequent.forget(weight.identity)
        if left_recent:
            step = weight.pages * max(1.0, of_frequent / of_recent)
            self._target = min(float(self._capacity), self._target + step)
        elif left_frequent:
            step = weight.pages * max(1.0, of_recent / of_frequent)
            self._target = max(0.0, self._target - step)
        return left_recent or left_frequent
