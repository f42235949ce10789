"""The order by recency, and demotion, which any order can have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from relaygr.worker.cache.policies.contract import EntryWeight, EvictionOrder


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

    def victims(self) -> Iterator[int]:
        yield from self._demoted
        yield from (entry_id for entry_id in self._order.victims() if entry_id not in self._demoted)

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

    def victims(self) -> Iterator[int]:
        return iter(self._order)

    def __contains__(self, entry_id: int) -> bool:
        return entry_id in self._order

    def __len__(self) -> int:
        return len(self._order)
