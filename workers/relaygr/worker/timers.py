"""Calls at a later time, for a loop that looks at the clock itself. Not thread-safe."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timers:
    """Calls in order of their time; those of the same time in order of entry."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = itertools.count()

    def at(self, when_us: int, call: Callable[[], None]) -> None:
        """Calls `call` at the first `run_due` from `when_us` on."""
        heapq.heappush(self._heap, (when_us, next(self._sequence), call))

    def run_due(self, now_us: int) -> None:
        """Makes all calls that are due."""
        while self._heap and self._heap[0][0] <= now_us:
            heapq.heappop(self._heap)[2]()

    def next_in_us(self, now_us: int) -> int | None:
        """How long until the next call, 0 if it is due; None if there is none."""
        return max(0, self._heap[0][0] - now_us) if self._heap else None
