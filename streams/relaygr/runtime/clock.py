"""Time: a wall clock for messages, a monotonic clock for decisions, and the histogram buckets of latencies."""

from __future__ import annotations

import time
from typing import Final, Protocol


class Clock(Protocol):
    """Both clocks, in microseconds. Decision code takes a `Clock` and never reads `time` itself."""

    def monotonic_us(self) -> int:
        """A time that never goes back. Only differences of two readings have a meaning."""

    def wall_us(self) -> int:
        """Time since the epoch. It may jump."""


class SystemClock:
    """The machine's clocks."""

    def monotonic_us(self) -> int:
        return time.monotonic_ns() // 1000

    def wall_us(self) -> int:
        return time.time_ns() // 1000


class ManualClock:
    """A clock that moves only when it is told to, for tests and simulation."""

    __slots__ = ("_ahead_us", "now_us")

    def __init__(self, monotonic_us: int = 0, wall_us: int = 1_700_000_000_000_000) -> None:
        self.now_us = monotonic_us
        """The monotonic time. Setting it moves both clocks."""
        self._ahead_us = wall_us - monotonic_us

    def monotonic_us(self) -> int:
        return self.now_us

    def wall_us(self) -> int:
        return self.now_us + self._ahead_us

    def advance_us(self, duration_us: int) -> None:
        """Moves both clocks forward. Raises ValueError for a negative duration."""
        if duration_us < 0:
            raise ValueError("time does not go back")
        self.now_us += duration_us

    def set_back_us(self, step_us: int) -> None:
        """Sets the wall clock back. The monotonic clock stays."""
        self._ahead_us -= step_us


LATENCY_BUCKETS_S: Final = (
    *(ms / 1000 for ms in range(1, 21)),
    *(ms / 1000 for ms in (25, 30, 40, 50, 60, 75, 100, 150, 200, 300, 500, 1000, 2500, 5000, 10_000)),
)
"""Histogram buckets of every latency that is counted, in seconds.

Steps of 1 ms up to 20 ms, because deadlines are tens of milliseconds and a P99 is computed from the buckets.
"""
