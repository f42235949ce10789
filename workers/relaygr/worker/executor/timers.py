"""Calls at a later time, of a loop that reads the clock itself."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable


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
