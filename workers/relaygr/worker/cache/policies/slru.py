"""Segmented LRU: who came once goes before who came back.

New entries enter a probation segment. One that is used in another visit moves to a protected segment of at
most `protected_share` of the tier's pages; what that pushes out at its old end goes back to the young end of
probation, for another chance. Victims: probation by least recent use, then protected likewise. A scan passes
through probation and leaves the protected prefixes alone.

Source: Karedla, Love, Wherry, "Caching strategies to improve disk system performance", Computer 27(3), 1994;
visits instead of uses: `visits`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from relaygr.worker.cache.policies.contract import EntryWeight
from relaygr.worker.cache.policies.visits import VISIT_US


@dataclass(slots=True)
class _Node:
    pages: int
    visit_us: int
    """When the visit that it last served began."""


class Slru:
    """An `EvictionOrder`. Raises ValueError unless 0 < protected_share < 1."""

    def __init__(self, capacity_pages: int, protected_share: float = 0.8, visit_us: int = VISIT_US) -> None:
        if not 0 < protected_share < 1:
            raise ValueError(f"a protected segment can not take {protected_share} of a tier")
        self._protected_limit = int(capacity_pages * protected_share)
        self._visit_us = visit_us
        self._probation: OrderedDict[int, _Node] = OrderedDict()
        self._protected: OrderedDict[int, _Node] = OrderedDict()
        self._protected_pages = 0

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        protected = self._protected.get(entry_id)
        node = protected or self._probation.get(entry_id)
        if node is None:
            self._probation[entry_id] = _Node(weight.pages, now_us)
            return
        self._protected_pages += weight.pages - node.pages if protected else 0
        node.pages = weight.pages
        self.touch(entry_id, now_us)

    def touch(self, entry_id: int, now_us: int) -> None:
        node = self._protected.get(entry_id)
        if node is not None:
            self._protected.move_to_end(entry_id)
        else:
            node = self._probation[entry_id]
            self._probation.move_to_end(entry_id)
        if now_us - node.visit_us >= self._visit_us:
            node.visit_us = now_us
            if self._probation.pop(entry_id, None) is not None:
                self._protected[entry_id] = node
                self._protected_pages += node.pages
        while self._protected_pages > self._protected_limit:
            pushed_id, pushed = self._protected.popitem(last=False)
            self._protected_pages -= pushed.pages
            self._probation[pushed_id] = pushed

    def evict(self, entry_id: int) -> None:
        self.remove(entry_id)

    def remove(self, entry_id: int) -> None:
        if self._probation.pop(entry_id, None) is None:
            node = self._protected.pop(entry_id, None)
            self._protected_pages -= node.pages if node is not None else 0

    def victims(self, now_us: int) -> Iterator[int]:  # noqa: ARG002
        yield from self._probation
        yield from self._protected

    def expired(self, now_us: int) -> Iterator[int]:  # noqa: ARG002
        return iter(())

    def __contains__(self, entry_id: int) -> bool:
        return entry_id in self._probation or entry_id in self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)
