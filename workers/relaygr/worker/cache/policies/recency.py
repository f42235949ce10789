"""Orders by recency: LRU, segmented LRU, LRU with a time to live, and demotion, which any order can have.

`Slru`: a new entry enters the probation segment. An entry that is used in another visit moves to the protected
segment, which has at most `protected_share` of the tier's pages. Entries that this pushes out of the old end of the
protected segment return to the young end of probation. Victims come from probation in order of last use, then from
the protected segment likewise. So a scan evicts only entries in probation. The share is a half: with the usual four
fifths, users who came often once and stopped keep their pages too long (`docs/cache-policies.md`).
Source: Karedla, Love, Wherry, "Caching strategies to improve disk system performance", Computer 27(3), 1994;
with visits instead of uses (`contract`).

`Ttl`: the order of LRU, but an entry that is not used for its time to live expires even if there is room. That frees
the pages of users who left, and bounds how long a prefix stays. An entry that is pinned or leased stays until it is
released.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from relaygr.worker.cache.policies.contract import VISIT_US, EntryWeight, EvictionOrder


class Demoting:
    """An `EvictionPolicy` over `order`: demoted entries go first, in the order in which they were demoted.

    A demoted entry keeps its place in `order`, which counts again once a touch has ended the demotion. If it is
    evicted while it is demoted, `order` gets `remove` and not `evict`, and so does not remember the entry.
    """

    def __init__(self, order: EvictionOrder) -> None:
        self._order = order
        self._demoted: OrderedDict[int, None] = OrderedDict()

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        self._demoted.pop(entry_id, None)
        self._order.add(entry_id, weight, now_us)

    def touch(self, entry_id: int, now_us: int) -> None:
        self._demoted.pop(entry_id, None)
        self._order.touch(entry_id, now_us)

    def demote(self, entry_id: int) -> None:
        if entry_id in self._order:
            self._demoted[entry_id] = None

    def evict(self, entry_id: int) -> None:
        if self._demoted.pop(entry_id, self) is self:
            self._order.evict(entry_id)
        else:
            self._order.remove(entry_id)

    def remove(self, entry_id: int) -> None:
        self._demoted.pop(entry_id, None)
        self._order.remove(entry_id)

    def victims(self, now_us: int) -> Iterator[int]:
        yield from self._demoted
        yield from (entry_id for entry_id in self._order.victims(now_us) if entry_id not in self._demoted)

    def expired(self, now_us: int) -> Iterator[int]:
        return self._order.expired(now_us)

    def __contains__(self, entry_id: int) -> bool:
        return entry_id in self._order

    def __len__(self) -> int:
        return len(self._order)


class Lru:
    """An `EvictionOrder`: the least recently used entry goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:  # noqa: ARG002
        self._order[entry_id] = None
        self._order.move_to_end(entry_id)

    def touch(self, entry_id: int, now_us: int) -> None:  # noqa: ARG002
        self._order.move_to_end(entry_id)

    def evict(self, entry_id: int) -> None:
        self.remove(entry_id)

    def remove(self, entry_id: int) -> None:
        self._order.pop(entry_id, None)

    def victims(self, now_us: int) -> Iterator[int]:  # noqa: ARG002
        return iter(self._order)

    def expired(self, now_us: int) -> Iterator[int]:  # noqa: ARG002
        return iter(())

    def __contains__(self, entry_id: int) -> bool:
        return entry_id in self._order

    def __len__(self) -> int:
        return len(self._order)


@dataclass(slots=True)
class _SlruNode:
    pages: int
    visit_us: int
    """Start of the entry's latest visit."""


class Slru:
    """An `EvictionOrder`. Raises ValueError unless 0 < protected_share < 1."""

    def __init__(self, capacity_pages: int, protected_share: float = 0.5, visit_us: int = VISIT_US) -> None:
        if not 0 < protected_share < 1:
            raise ValueError(f"a protected segment cannot take {protected_share} of a tier")
        self._protected_limit = int(capacity_pages * protected_share)
        self._visit_us = visit_us
        self._probation: OrderedDict[int, _SlruNode] = OrderedDict()
        self._protected: OrderedDict[int, _SlruNode] = OrderedDict()
        self._protected_pages = 0

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        protected = self._protected.get(entry_id)
        node = protected or self._probation.get(entry_id)
        if node is None:
            self._probation[entry_id] = _SlruNode(weight.pages, now_us)
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


class Ttl:
    """An `EvictionOrder`. Raises ValueError for a time to live that is not positive."""

    def __init__(self, ttl_us: int) -> None:
        if ttl_us <= 0:
            raise ValueError(f"a time to live must be positive, not {ttl_us} µs")
        self._ttl_us = ttl_us
        self._used_us: OrderedDict[int, int] = OrderedDict()

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:  # noqa: ARG002
        self._used_us[entry_id] = now_us
        self._used_us.move_to_end(entry_id)

    def touch(self, entry_id: int, now_us: int) -> None:
        self._used_us.move_to_end(entry_id)
        self._used_us[entry_id] = now_us

    def evict(self, entry_id: int) -> None:
        self.remove(entry_id)

    def remove(self, entry_id: int) -> None:
        self._used_us.pop(entry_id, None)

    def victims(self, now_us: int) -> Iterator[int]:  # noqa: ARG002
        return iter(self._used_us)

    def expired(self, now_us: int) -> Iterator[int]:
        for entry_id, used_us in self._used_us.items():
            if used_us + self._ttl_us > now_us:
                return
            yield entry_id

    def __contains__(self, entry_id: int) -> bool:
        return entry_id in self._used_us

    def __len__(self) -> int:
        return len(self._used_us)
