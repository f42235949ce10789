"""Timers of a loop that reads the clock itself, and the work that waits for its user's history."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Final

from relaygr.runtime.clock import Clock
from relaygr.schemas.messages import HistoryVersion
from relaygr.schemas.record import record
from relaygr.worker.history.resolve import StoredHistory, WantedLength, still_lacks

FAILED_WAITS: Final = 65_536
"""Users whose histories did not come: as many as the impressions that a worker remembers."""


class Timer:
    """A call that is due at some time."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """The call is not made, and what it refers to is let go at once."""
        self.call = None


class Timers:
    """Calls in order of their time; calls of the same time in order of entry."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Timer]] = []
        self._sequence = itertools.count()
        self.next_at_us: float = math.inf
        """The time at which the next call is due; infinity without one."""

    def at(self, when_us: int, call: Callable[[], None]) -> Timer:
        """Calls `call` at the first `run_due` from `when_us` on."""
        timer = Timer(call)
        heapq.heappush(self._heap, (when_us, next(self._sequence), timer))
        self.next_at_us = self._heap[0][0]
        return timer

    def run_due(self, now_us: int) -> None:
        """Makes all calls that are due."""
        while self._heap and self._heap[0][0] <= now_us:
            timer = heapq.heappop(self._heap)[2]
            call = timer.call
            # The owner of the timer may still refer to it.
            timer.cancel()
            if call is not None:
                call()
        self.next_at_us = self._heap[0][0] if self._heap else math.inf

    def next_in_us(self, now_us: int) -> int | None:
        """Time until the next call, 0 if it is due; None if there is none."""
        return max(0, self._heap[0][0] - now_us) if self._heap else None


class FailedWaits:
    """The history for which each user's work last waited in vain, of the newest `capacity` users. Until it or a newer
    one is there, no work waits for it or for what continues it: as many behaviours or more, and a version number that
    is not lower. So a false version with a high number ends no waits for true ones.
    """

    def __init__(self, capacity: int = FAILED_WAITS) -> None:
        self._capacity = capacity
        self._failed: OrderedDict[str, HistoryVersion | WantedLength] = OrderedDict()

    def add(self, user_id: str, wanted: HistoryVersion | WantedLength) -> None:
        """The history did not come in time."""
        self._failed[user_id] = wanted
        self._failed.move_to_end(user_id)
        if len(self._failed) > self._capacity:
            self._failed.popitem(last=False)

    def cover(self, user_id: str, wanted: HistoryVersion | WantedLength, stored: StoredHistory | None) -> bool:
        """Whether a wait for this history would be in vain again. `stored`: the user's present history."""
        failed = self._failed.get(user_id)
        if failed is None:
            return False
        if not still_lacks(stored, failed):
            del self._failed[user_id]
            return False
        return _continues(wanted, failed)


def _continues(wanted: HistoryVersion | WantedLength, failed: HistoryVersion | WantedLength) -> bool:
    """Whether a history that is named cannot be there without the one that did not come."""
    if isinstance(wanted, HistoryVersion):
        is_later = isinstance(failed, HistoryVersion) and wanted.number >= failed.number
    else:
        is_later = isinstance(failed, WantedLength)
    return is_later and wanted.length >= failed.length


@record(frozen=True, slots=True, eq=False)
class _Wait:
    """One piece of work. `on_change` is called when its user's history has changed, or else `timer` makes its call."""

    on_change: Callable[[], None]
    timer: Timer
    partition: int


class HistoryWaits:
    """The work that waits for a change of its user's history, at most `most` pieces. Work of a partition that settles
    counts, too, but is bounded by unanswered work alone. Belongs to the device thread.
    """

    def __init__(self, timers: Timers, failed: FailedWaits, clock: Clock, most: int) -> None:
        self._timers = timers
        self._failed = failed
        self._clock = clock
        self._most = most
        self._by_user: dict[str, list[_Wait]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def wait(
        self,
        user_id: str,
        partition: int,
        failed: HistoryVersion | WantedLength | None,
        until_us: int,
        on_change: Callable[[], None],
        *,
        is_settling: bool = False,
    ) -> bool:
        """Calls `on_change` when the user's history may have changed, and at `until_us` if it has not. Returns False,
        and never calls, if that time has passed, or if too much work waits.

        `failed`: what is remembered as missing after a wait in vain (`FailedWaits`); None: nothing. `is_settling`: the
        partition is read for the first time, so the number of waits is not bounded, and nothing is remembered.
        """
        if until_us <= self._clock.monotonic_us() or (self._count >= self._most and not is_settling):
            return False

        def timed_out() -> None:
            self._remove(user_id, wait)
            if failed is not None and not is_settling:
                self._failed.add(user_id, failed)
            on_change()

        wait = _Wait(on_change, self._timers.at(until_us, timed_out), partition)
        self._by_user.setdefault(user_id, []).append(wait)
        self._count += 1
        return True

    def partitions_read(self, partitions: Collection[int]) -> None:
        """Wakes the work of these partitions: their store was opened, or has caught up."""
        self.histories_changed(
            [user for user, waits in self._by_user.items() if any(wait.partition in partitions for wait in waits)]
        )

    def histories_changed(self, user_ids: Iterable[str]) -> None:
        """Wakes all work of these users, in order of arrival."""
        for user_id in user_ids:
            waits = self._by_user.pop(user_id, [])
            self._count -= len(waits)
            for wait in waits:
                wait.timer.cancel()
                wait.on_change()

    def _remove(self, user_id: str, wait: _Wait) -> None:
        waits = self._by_user[user_id]
        waits.remove(wait)
        self._count -= 1
        if not waits:
            del self._by_user[user_id]
