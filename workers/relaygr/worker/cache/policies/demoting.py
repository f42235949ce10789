"""Adds to any order that some entries go before all others, in the order in which they were demoted.

A demoted entry keeps its place in the order behind it: what it did counts again once a touch has taken the
demotion back. One that goes while demoted teaches the order nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from relaygr.worker.cache.policies.contract import EntryWeight, EvictionOrder


class Demoting:
    """An `EvictionPolicy` over `order`."""

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
