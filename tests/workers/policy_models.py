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
    visits: int = 0
    rank: float = 0.0


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
    """The model of LRU, and of the order of TTL."""

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

    def expired(self, now_us: int, ttl_us: int) -> list[int]:
        return [line.entry_id for line in self.lines if now_us - line.used_us >= ttl_us]


class SlowSlru:
    def __init__(self, capacity_pages: int, visit_us: int) -> None:
        self.limit = int(capacity_pages * 0.5)
        self.visit_us = visit_us
        self.probation: list[Line] = []
        self.protected: list[Line] = []

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        line = _find(self.probation + self.protected, entry_id)
        if line is None:
            self.probation.append(Line(entry_id, weight, now_us, now_us))
        else:
            line.weight = weight
            self.touch(entry_id, now_us)

    def touch(self, entry_id: int, now_us: int) -> None:
        line = _find(self.probation + self.protected, entry_id)
        assert line is not None
        segment = self.protected if line in self.protected else self.probation
        segment.remove(line)
        if now_us - line.visit_us >= self.visit_us:
            line.visit_us = now_us
            segment = self.protected
        segment.append(line)
        while sum(each.weight.pages for each in self.protected) > self.limit:
            self.probation.append(self.protected.pop(0))

    def evict(self, entry_id: int) -> None:
        self.remove(entry_id)

    def remove(self, entry_id: int) -> None:
        self.probation = [line for line in self.probation if line.entry_id != entry_id]
        self.protected = [line for line in self.protected if line.entry_id != entry_id]

    def first(self) -> int | None:
        return next((line.entry_id for line in self.probation + self.protected), None)


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


class SlowS3Fifo:
    def __init__(self, capacity_pages: int, visit_us: int) -> None:
        self.small_limit = max(1, int(capacity_pages * 0.1))
        self.ghost_limit = capacity_pages - self.small_limit
        self.visit_us = visit_us
        self.small: list[Line] = []
        self.main: list[Line] = []
        self.ghosts: list[tuple[int, int]] = []

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        line = _find(self.small + self.main, entry_id)
        if line is not None:
            line.weight = weight
            self.touch(entry_id, now_us)
            return
        line = Line(entry_id, weight, now_us, now_us)
        remembered = any(identity == weight.identity for identity, _ in self.ghosts)
        self.ghosts = [ghost for ghost in self.ghosts if ghost[0] != weight.identity]
        (self.main if remembered else self.small).append(line)

    def touch(self, entry_id: int, now_us: int) -> None:
        line = _find(self.small + self.main, entry_id)
        assert line is not None
        if now_us - line.visit_us >= self.visit_us:
            line.visit_us = now_us
            line.visits = min(3, line.visits + 1)

    def evict(self, entry_id: int) -> None:
        line = _find(self.small, entry_id)
        self.remove(entry_id)
        if line is not None:
            self.ghosts = [ghost for ghost in self.ghosts if ghost[0] != line.weight.identity]
            self.ghosts.append((line.weight.identity, line.weight.pages))
            while sum(pages for _, pages in self.ghosts) > self.ghost_limit:
                self.ghosts.pop(0)

    def remove(self, entry_id: int) -> None:
        self.small = [line for line in self.small if line.entry_id != entry_id]
        self.main = [line for line in self.main if line.entry_id != entry_id]

    def first(self) -> int | None:
        """As in the paper: EVICT-S while `small` is large enough, else EVICT-M; second chances are taken."""
        while self.small or self.main:
            large = sum(line.weight.pages for line in self.small) >= self.small_limit
            if self.small and (large or not self.main):
                if self.small[0].visits < 2:
                    return self.small[0].entry_id
                promoted = self.small.pop(0)
                promoted.visits = 0
                self.main.append(promoted)
            elif self.main[0].visits == 0:
                return self.main[0].entry_id
            else:
                again = self.main.pop(0)
                again.visits -= 1
                self.main.append(again)
        return None


class SlowCostAware:
    def __init__(self, visit_us: int) -> None:
        self.visit_us = visit_us
        self.floor = 0.0
        self.lines: list[Line] = []
        """By last use."""

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        line = _find(self.lines, entry_id)
        if line is None:
            self.lines.append(Line(entry_id, weight, now_us, now_us, visits=1))
        else:
            line.weight = weight
        self.touch(entry_id, now_us)

    def touch(self, entry_id: int, now_us: int) -> None:
        line = _find(self.lines, entry_id)
        assert line is not None
        self.lines.remove(line)
        self.lines.append(line)
        if now_us - line.visit_us >= self.visit_us:
            line.visit_us = now_us
            line.visits += 1
        line.rank = self.floor + line.visits * (line.weight.saved_us / line.weight.pages)

    def evict(self, entry_id: int) -> None:
        line = _find(self.lines, entry_id)
        assert line is not None
        self.floor = max(self.floor, line.rank)
        self.remove(entry_id)

    def remove(self, entry_id: int) -> None:
        self.lines = [line for line in self.lines if line.entry_id != entry_id]

    def first(self) -> int | None:
        return min(self.lines, key=lambda line: line.rank).entry_id if self.lines else None
