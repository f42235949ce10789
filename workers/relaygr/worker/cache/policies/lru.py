"""Least recently used first. Source: any textbook; a linked hash map."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from relaygr.worker.cache.policies.contract import EntryWeight


class Lru:
    """An `EvictionOrder`."""

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
