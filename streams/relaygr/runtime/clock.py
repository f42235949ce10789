"""Time as the rest of the code sees it: a wall clock for messages, a monotonic clock for decisions."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Both clocks, in microseconds. Decision code takes one, and never reads `time` itself."""

    def monotonic_us(self) -> int:
        """Never goes back; only differences mean anything."""

    def wall_us(self) -> int:
        """Since the epoch; may jump."""


class SystemClock:
    """The machine's clocks."""

    def monotonic_us(self) -> int:
        return time.monotonic_ns() // 1000

    def wall_us(self) -> int:
        return time.time_ns() // 1000


class ManualClock:
    """A clock that moves only when told, for tests and simulation."""

    def __init__(self, monotonic_us: int = 0, wall_us: int = 1_700_000_000_000_000) -> None:
        self._monotonic_us = monotonic_us
        self._wall_us = wall_us

    def monotonic_us(self) -> int:
        return self._monotonic_us

    def wall_us(self) -> int:
        return self._wall_us

    def advance_us(self, duration_us: int) -> None:
        """Moves both clocks forward. Raises ValueError for a negative duration."""
        if duration_us < 0:
            raise ValueError("time does not go back")
        self._monotonic_us += duration_us
        self._wall_us += duration_us
