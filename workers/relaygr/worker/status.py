"""The times that ranking requests waited lately, for the worker's status."""

from __future__ import annotations

from collections import deque


class QueueWaits:
    """P99 of the latest waits of ranking requests. One writer; readers may come from other threads."""

    def __init__(self, window: int = 512) -> None:
        self._waits_us: deque[int] = deque(maxlen=window)

    def observe(self, wait_us: int) -> None:
        self._waits_us.append(wait_us)

    def p99_us(self) -> int:
        """0 before the first."""
        waits = sorted(self._waits_us.copy())
        return waits[min(len(waits) - 1, int(0.99 * len(waits)))] if waits else 0
