"""Greedy-Dual-Size-Frequency: the entry that saves the least time per byte goes first, with aging.

The rank of an entry is `floor + visits * saved_us / pages`: how often it was visited, times the device time that a
hit saves, divided by its size. `floor` is the rank of the last evicted entry. So newer entries overtake an entry with a
high rank that is not visited any more. Entries of equal rank go in order of last use.

Entries lie in a heap. A touch pushes the new rank and leaves the old one in the heap. Old ranks are dropped when they
reach the top, or when they are more than half of the heap.

Sources: Cao, Irani, "Cost-aware WWW proxy caching algorithms", USITS 1997 (the floor); Cherkasova,
"Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Labs 1998 (frequency);
with visits instead of uses (`contract`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from relaygr.worker.cache.policies.contract import VISIT_US, EntryWeight


@dataclass(slots=True)
class _Node:
    value: float
    """µs saved per page."""
    visit_us: int
    """Start of the entry's latest visit."""
    visits: int = 1
    rank: float = 0.0
    turn: int = 0
    """The turn of the latest rank. Ranks of other turns in the heap are outdated."""


class CostAware:
    """An `EvictionOrder`."""

    def __init__(self, visit_us: int = VISIT_US) -> None:
        self._visit_us = visit_us
        self._nodes: dict[int, _Node] = {}
        self._heap: list[tuple[float, int, int]] = []
        """(rank, turn, entry)"""
        self._floor = 0.0
        self._last_turn = 0

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        value = weight.saved_us / max(1, weight.pages)
        node = self._nodes.get(entry_id)
        if node is None:
            self._nodes[entry_id] = node = _Node(value, now_us)
        node.value = value
        self.touch(entry_id, now_us)

    def touch(self, entry_id: int, now_us: int) -> None:
        node = self._nodes[entry_id]
        if now_us - node.visit_us >= self._visit_us:
            node.visit_us = now_us
            node.visits += 1
        self._last_turn += 1
        node.turn = self._last_turn
        node.rank = self._floor + node.visits * node.value
        heapq.heappush(self._heap, (node.rank, node.turn, entry_id))
        self._tidy()

    def evict(self, entry_id: int) -> None:
        node = self._nodes.get(entry_id)
        if node is not None:
            self._floor = max(self._floor, node.rank)
            self.remove(entry_id)

    def remove(self, entry_id: int) -> None:
        if self._nodes.pop(entry_id, None) is not None:
            self._tidy()

    def victims(self, now_us: int) -> Iterator[int]:  # noqa: ARG002
        heap = self._heap
        while heap and not self._is_latest(heap[0]):
            heapq.heappop(heap)
        # Walks the heap in order without changing it: the next entry is always a child of one visited before.
        front = [(heap[0], 0)] if heap else []
        while front:
            item, place = heapq.heappop(front)
            for below in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heapq.heappush(front, (heap[below], below))
            if self._is_latest(item):
                yield item[2]

    def expired(self, now_us: int) -> Iterator[int]:  # noqa: ARG002
        return iter(())

    def __contains__(self, entry_id: int) -> bool:
        return entry_id in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def _is_latest(self, item: tuple[float, int, int]) -> bool:
        node = self._nodes.get(item[2])
        return node is not None and node.turn == item[1]

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._nodes) + 64:
            self._heap = [item for item in self._heap if self._is_latest(item)]
            heapq.heapify(self._heap)
