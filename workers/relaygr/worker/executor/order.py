"""The order of work on the device: least laxity first, with a guaranteed share for pre-infer. Pure decisions.

Laxity is deadline - now - predicted time. `now` is the same for all work, so the order is that of the *latest start*
(deadline - predicted time), which changes only when a prediction changes.

The share is needed because a burst of ranking requests without prefixes would starve pre-infer if ranking always went
first. The next ranking requests would then need full inference, too, and this state would never end. Time is
counted only while pre-infer work waits, and decays with a half-life, so that an idle device earns no credit.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class WorkClass(enum.StrEnum):
    """Which deadline the work serves: that of a ranking request, or of a pre-infer job."""

    RANKING = "ranking"
    PREINFER = "preinfer"


class SchedulableWork(Protocol):
    """Work that the device can run, whole or in chunks."""

    @property
    def work_class(self) -> WorkClass: ...

    @property
    def latest_start_us(self) -> int:
        """Deadline less predicted remaining device time, on the monotonic clock."""


W = TypeVar("W", bound=SchedulableWork)


@dataclass(order=True, slots=True)
class QueueEntry(Generic[W]):
    """One push of the work. A later push of the same work invalidates this one."""

    latest_start_us: int
    sequence: int
    work: W = field(compare=False)


class LaxityQueue(Generic[W]):
    """Work of one class in the order of its latest start. Push work again when its prediction changed."""

    def __init__(self) -> None:
        self._heap: list[QueueEntry[W]] = []
        self._current: dict[int, QueueEntry[W]] = {}
        self._sequence = itertools.count()

    def __len__(self) -> int:
        return len(self._current)

    def __iter__(self) -> Iterator[W]:
        return (entry.work for entry in self._current.values())

    def push(self, work: W) -> None:
        """Adds the work, or moves it to the place of its present latest start."""
        entry = QueueEntry(work.latest_start_us, next(self._sequence), work)
        self._current[id(work)] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 2 * len(self._current):
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)

    def remove(self, work: W) -> None:
        """Removes the work, if it is queued."""
        self._current.pop(id(work), None)

    def peek(self) -> W | None:
        """The work with the earliest latest start."""
        while self._heap:
            entry = self._heap[0]
            if self._current.get(id(entry.work)) is entry:
                return entry.work
            heapq.heappop(self._heap)
        return None

    def pop(self) -> W | None:
        """Removes and returns the work with the earliest latest start."""
        work = self.peek()
        if work is not None:
            self.remove(work)
        return work


class ShareAccount:
    """The part of the device time that pre-infer gets while pre-infer work waits."""

    def __init__(self, share: float, tolerance_us: int, half_life_us: int = 1_000_000) -> None:
        self._share = share
        self._tolerance_us = tolerance_us
        self._half_life_us = half_life_us
        self._preinfer_us = 0.0
        self._ranking_us = 0.0
        self._updated_us: int | None = None

    def charge(self, work_class: WorkClass, duration_us: int, now_us: int, preinfer_waits: bool) -> None:
        """Counts device time that was just used. Ranking's time counts only if pre-infer work waited meanwhile."""
        self._decay(now_us)
        if work_class is WorkClass.PREINFER:
            self._preinfer_us += duration_us
        elif preinfer_waits:
            self._ranking_us += duration_us

    def preinfer_is_owed(self) -> bool:
        """Whether pre-infer got less than its share, by more than the tolerance."""
        owed_us = self._share * (self._preinfer_us + self._ranking_us) - self._preinfer_us
        return owed_us > self._tolerance_us

    def _decay(self, now_us: int) -> None:
        if self._updated_us is not None and now_us > self._updated_us:
            factor = 0.5 ** ((now_us - self._updated_us) / self._half_life_us)
            self._preinfer_us *= factor
            self._ranking_us *= factor
        self._updated_us = now_us


class Scheduler(Generic[W]):
    """Picks the work that runs next. Not thread-safe: it belongs to the device thread."""

    def __init__(self, preinfer_share: float, chunk_us: int) -> None:
        self.ranking: LaxityQueue[W] = LaxityQueue()
        self.preinfer: LaxityQueue[W] = LaxityQueue()
        self._share = ShareAccount(preinfer_share, tolerance_us=chunk_us)
        self._chunk_us = chunk_us

    def push(self, work: W) -> None:
        """Queues the work under its class. Work whose class changed leaves the other queue."""
        mine, other = self._queues(work.work_class)
        other.remove(work)
        mine.push(work)

    def remove(self, work: W) -> None:
        """Removes the work from its queue."""
        self.ranking.remove(work)
        self.preinfer.remove(work)

    def pick(self, now_us: int) -> W | None:
        """The work to run next, which stays in its queue; None if there is none.

        Pre-infer goes first if it got less than its share. It also goes first if it is more urgent and the most urgent
        ranking request can wait for one chunk. On ties ranking goes first.
        """
        ranking, preinfer = self.ranking.peek(), self.preinfer.peek()
        if ranking is None or preinfer is None:
            return ranking if preinfer is None else preinfer
        if self._share.preinfer_is_owed():
            return preinfer
        can_wait = ranking.latest_start_us - now_us >= self._chunk_us
        if can_wait and preinfer.latest_start_us < ranking.latest_start_us:
            return preinfer
        return ranking

    def charge(self, work_class: WorkClass, duration_us: int, now_us: int) -> None:
        """Counts device time that work of this class just used."""
        self._share.charge(work_class, duration_us, now_us, preinfer_waits=len(self.preinfer) > 0)

    def _queues(self, work_class: WorkClass) -> tuple[LaxityQueue[W], LaxityQueue[W]]:
        if work_class is WorkClass.RANKING:
            return self.ranking, self.preinfer
        return self.preinfer, self.ranking
