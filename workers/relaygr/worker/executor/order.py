"""The order of work on the device. Pure decisions.

Ranking goes first, in the order of its deadlines; short work overtakes longer work that has time to spare. Pre-infer
takes what is left, and has a guaranteed share: a burst of ranking requests without prefixes would starve it, the next
ranking requests would then need full inference, too, and this state would never end. Time is counted only while
pre-infer work waits, and decays with a half-life, so that an idle device earns no credit. Warm-up runs only while no
other work is queued.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from relaygr.worker.executor.backlog import Backlog
from relaygr.worker.executor.schedulable import IDLE_CLASSES, SchedulableWork, WorkClass

_OVERTAKING_PART = 0.5
"""The part of the spare time of longer work that one overtaking piece may take, so that several never take all."""

W = TypeVar("W", bound=SchedulableWork)


def _due_us(work: SchedulableWork) -> float:
    """When the device work must have ended."""
    return work.latest_start_us + work.remaining_us


def _overtakes(short: SchedulableWork, longer: SchedulableWork, spare_us: float) -> bool:
    """Whether `short` runs before `longer`, whose deadline is earlier and which can wait for `spare_us`."""
    return 2 * short.remaining_us < longer.remaining_us and short.remaining_us <= _OVERTAKING_PART * spare_us


_SHARE_HALF_LIFE_US = 1_000_000
"""A budget or two: what pre-infer was owed longer ago helps no request of now."""
IDLE_CHUNKS = 4
"""The device is idle when it ran no other work for the time of this many chunks."""


class QueueEntry(NamedTuple, Generic[W]):
    """One push of work. A later push of the same work invalidates it."""

    due_us: float
    """When its device work must have ended."""
    number: int
    """No other push has it. So entries with the same due time keep their order, and no work is compared."""
    work: W


class DeadlineQueue(Generic[W]):
    """Work of one class in the order of its deadlines. Push work again when its prediction changed.

    `backlog`: gets the demand of the queued work.
    """

    def __init__(self, backlog: Backlog | None = None) -> None:
        self._backlog = backlog
        self._heap: list[QueueEntry[W]] = []
        self._entries: dict[int, QueueEntry[W]] = {}
        """The last push of each queued work, by its `id`."""
        self._in_chunks: dict[int, W] = {}
        self._sequence = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[W]:
        return (entry.work for entry in self._entries.values())

    def push(self, work: W) -> None:
        """Adds the work, or moves it to the place of its present deadline."""
        latest_start_us = work.latest_start_us
        entry = QueueEntry(latest_start_us + work.remaining_us, next(self._sequence), work)
        self._entries[id(work)] = entry
        heapq.heappush(self._heap, entry)
        if self._backlog is not None:
            self._backlog.put(work, latest_start_us)
            if work.runs_in_chunks:
                self._in_chunks[id(work)] = work
                self._note_longest()
        if len(self._heap) > 64 + 2 * len(self._entries):
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def remove(self, work: W) -> None:
        """Removes the work, if it is queued."""
        if self._entries.pop(id(work), None) is not None and self._backlog is not None:
            self._backlog.drop(work)
            if self._in_chunks.pop(id(work), None) is not None:
                self._note_longest()

    def longest(self) -> W | None:
        """The longest work that may be displaced."""
        displaceable = (work for work in self._in_chunks.values() if work.may_be_displaced)
        return max(displaceable, key=lambda work: work.remaining_us, default=None)

    def _note_longest(self) -> None:
        assert self._backlog is not None
        self._backlog.note_displaceable(self.longest())

    def peek(self) -> W | None:
        """The work with the earliest deadline."""
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(id(entry.work)) is entry:
                return entry.work
            heapq.heappop(self._heap)
        return None

    def pop(self) -> W | None:
        """Removes and returns the work with the earliest deadline."""
        work = self.peek()
        if work is not None:
            self.remove(work)
        return work


class ShareAccount:
    """The part of the device time that pre-infer gets while pre-infer work waits."""

    def __init__(self, share: float, tolerance_us: int) -> None:
        self._share = share
        self._tolerance_us = tolerance_us
        self._preinfer_us = 0.0
        self._ranking_us = 0.0
        self._updated_us: int | None = None

    def charge(self, work_class: WorkClass, duration_us: int, now_us: int, preinfer_waits: bool) -> None:
        """Counts device time that was just used. Ranking's time counts only if pre-infer work waited meanwhile."""
        self._decay(now_us)
        if work_class is WorkClass.PREINFER:
            self._preinfer_us += duration_us
        elif work_class is WorkClass.RANKING and preinfer_waits:
            self._ranking_us += duration_us

    def preinfer_is_owed(self) -> bool:
        """Whether pre-infer got less than its share, by more than the tolerance."""
        owed_us = self._share * (self._preinfer_us + self._ranking_us) - self._preinfer_us
        return owed_us > self._tolerance_us

    def _decay(self, now_us: int) -> None:
        if self._updated_us is not None and now_us > self._updated_us:
            factor = 0.5 ** ((now_us - self._updated_us) / _SHARE_HALF_LIFE_US)
            self._preinfer_us *= factor
            self._ranking_us *= factor
        self._updated_us = now_us


class Scheduler(Generic[W]):
    """Picks the work that runs next. Not thread-safe: it belongs to the device thread."""

    def __init__(self, preinfer_share: float, chunk_us: int, warm_up_share: float = 1.0) -> None:
        """`warm_up_share` of the time is the most that warm-up gets."""
        self.backlog = Backlog()
        self.ranking: DeadlineQueue[W] = DeadlineQueue(self.backlog)
        self.preinfer: DeadlineQueue[W] = DeadlineQueue()
        self.warm_up: DeadlineQueue[W] = DeadlineQueue()
        self._preinfer_share = preinfer_share
        self._warm_up_share = warm_up_share
        self._warm_up_from_us = 0
        self._share = ShareAccount(preinfer_share, tolerance_us=chunk_us)
        self._chunk_us = chunk_us

    def push(self, work: W) -> None:
        """Queues the work under its class. Work whose class changed leaves the other queue."""
        mine = self._queue(work.work_class)
        for other in (self.ranking, self.preinfer, self.warm_up):
            if other is not mine:
                other.remove(work)
        mine.push(work)
        self.backlog.share_with_preinfer(self._preinfer_share if len(self.preinfer) else 0.0)

    def remove(self, work: W) -> None:
        """Removes the work from its queue."""
        self.ranking.remove(work)
        self.preinfer.remove(work)
        self.warm_up.remove(work)
        self.backlog.share_with_preinfer(self._preinfer_share if len(self.preinfer) else 0.0)

    def pick(self, now_us: int) -> W | None:
        """The work to run next, which stays in its queue; None if there is none.

        Ranking goes first, unless pre-infer got less than its share. Warm-up is picked only without other work.
        """
        ranking, preinfer = self._next_ranking(now_us), self.preinfer.peek()
        if ranking is not None and preinfer is not None:
            return preinfer if self._share.preinfer_is_owed() else ranking
        if ranking is not None or preinfer is not None:
            return ranking if preinfer is None else preinfer
        return self.warm_up.peek() if self.warm_up_in_us(now_us) == 0 else None

    def _next_ranking(self, now_us: int) -> W | None:
        """The ranking work with the earliest deadline, or short work that may overtake it."""
        first = self.ranking.peek()
        if first is None or len(self.ranking) == 1 or first.remaining_us <= self._chunk_us or not first.runs_in_chunks:
            return first
        shortest = min(self.ranking, key=lambda work: work.remaining_us)
        spare_us = self.backlog.spare_us(now_us, _due_us(shortest), self.backlog.preinfer_share)
        return shortest if _overtakes(shortest, first, spare_us) else first

    def warm_up_in_us(self, now_us: int) -> int:
        """Time until warm-up may run if no other work arrives; 0: now."""
        return max(0, self._warm_up_from_us - now_us)

    def charge(self, work_class: WorkClass, duration_us: int, now_us: int) -> None:
        """Counts device time that work of this class just used."""
        if work_class in IDLE_CLASSES:
            pause_us = int(duration_us * (1 - self._warm_up_share) / self._warm_up_share)
        else:
            pause_us = IDLE_CHUNKS * self._chunk_us
        if work_class is WorkClass.PREINFER:
            self.backlog.measured.did_preinfer(duration_us)
        self._warm_up_from_us = max(self._warm_up_from_us, now_us + pause_us)
        self._share.charge(work_class, duration_us, now_us, preinfer_waits=len(self.preinfer) > 0)

    def _queue(self, work_class: WorkClass) -> DeadlineQueue[W]:
        if work_class is WorkClass.RANKING:
            return self.ranking
        return self.preinfer if work_class is WorkClass.PREINFER else self.warm_up
