"""Slow models of the eviction orders, written from their papers: lists that are walked from the start each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from relaygr.worker.cache.policies import EntryWeight


@dataclass(slots=True)
class Line:
    """An entry in a list."""

    entry_id: int
    weight: EntryWeight
    visit_us: int
    used_us: int


class SlowOrder(Protocol):
    """The part of an `EvictionOrder` that all models share. `drain_order`: the order of evicting all entries."""

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None: ...
    def touch(self, entry_id: int, now_us: int) -> None: ...
    def evict(self, entry_id: int) -> None: ...
    def remove(self, entry_id: int) -> None: ...
    def first(self) -> int | None: ...


def _find(lines: list[Line], entry_id: int) -> Line | None:
    return next((line for line in lines if line.entry_id == entry_id), None)


class SlowLru:
    """The model of LRU."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        self.remove(entry_id)
        self.lines.append(Line(entry_id, weight, now_us, now_us))

    def touch(self, entry_id: int, now_us: int) -> None:
        line = _find(self.lines, entry_id)
        assert line is not None
        self.lines.remove(line)
        line.used_us = now_us
        self.lines.append(line)

    def evict(self, entry_id: int) -> None:
        self.remove(entry_id)

    def remove(self, entry_id: int) -> None:
        self.lines = [line for line in self.lines if line.entry_id != entry_id]

    def first(self) -> int | None:
        return self.lines[0].entry_id if self.lines else None


class SlowArc:
    """T1 and T2 are `recent` and `frequent`, B1 and B2 what they lost, p the target."""

    def __init__(self, capacity_pages: int, visit_us: int) -> None:
        self.capacity, self.visit_us, self.target = capacity_pages, visit_us, 0.0
        self.recent: list[Line] = []
        self.frequent: list[Line] = []
        self.lost_recent: list[tuple[int, int]] = []
        self.lost_frequent: list[tuple[int, int]] = []

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        line = _find(self.recent + self.frequent, entry_id)
        if line is not None:
            line.weight = weight
            self.touch(entry_id, now_us)
            return
        b1, b2 = (max(1, self._lost(lost)) for lost in (self.lost_recent, self.lost_frequent))
        was_recent, was_frequent = (weight.identity in dict(lost) for lost in (self.lost_recent, self.lost_frequent))
        self.lost_recent = [ghost for ghost in self.lost_recent if ghost[0] != weight.identity]
        self.lost_frequent = [ghost for ghost in self.lost_frequent if ghost[0] != weight.identity]
        if was_recent:
            self.target = min(self.capacity, self.target + weight.pages * max(1.0, b2 / b1))
        elif was_frequent:
            self.target = max(0.0, self.target - weight.pages * max(1.0, b1 / b2))
        order = self.frequent if was_recent or was_frequent else self.recent
        order.append(Line(entry_id, weight, now_us, now_us))

    def touch(self, entry_id: int, now_us: int) -> None:
        line = _find(self.recent + self.frequent, entry_id)
        assert line is not None
        order = self.recent if line in self.recent else self.frequent
        order.remove(line)
        if now_us - line.visit_us >= self.visit_us:
            line.visit_us = now_us
            order = self.frequent
        order.append(line)

    def evict(self, entry_id: int) -> None:
        line = _find(self.recent + self.frequent, entry_id)
        assert line is not None
        lost = self.lost_recent if line in self.recent else self.lost_frequent
        self.remove(entry_id)
        lost[:] = [ghost for ghost in lost if ghost[0] != line.weight.identity]
        lost.append((line.weight.identity, line.weight.pages))
        while self.lost_recent and self._pages(self.recent) + self._lost(self.lost_recent) > self.capacity:
            self.lost_recent.pop(0)
        while self.lost_frequent and self._lost(self.lost_recent + self.lost_frequent) > self.capacity:
            self.lost_frequent.pop(0)

    def remove(self, entry_id: int) -> None:
        self.recent = [line for line in self.recent if line.entry_id != entry_id]
        self.frequent = [line for line in self.frequent if line.entry_id != entry_id]

    def first(self) -> int | None:
        """REPLACE of the paper."""
        if self.recent and (self._pages(self.recent) > self.target or not self.frequent):
            return self.recent[0].entry_id
        return self.frequent[0].entry_id if self.frequent else None

    @staticmethod
    def _pages(lines: list[Line]) -> int:
        return sum(line.weight.pages for line in lines)

    @staticmethod
    def _lost(ghosts: list[tuple[int, int]]) -> int:
        return sum(pages for _, pages in ghosts)
