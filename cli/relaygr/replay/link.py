"""A simulated link between the tiers on a virtual clock: copies in the order of the real queue, without bytes.

Copies cross the link one after the other. Each takes `delay_us` + its bytes / `bytes_per_us`. `advance` ends the copies
that are complete by its time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from relaygr.worker.cache.copies import CopyForecast, CopyLimits, CopyPriority, CopyQueue, QueuedCopy
from relaygr.worker.cache.results import Tier


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The time of a copy."""

    delay_us: float
    bytes_per_us: float

    def duration_us(self, size_bytes: int) -> float:
        return self.delay_us + size_bytes / self.bytes_per_us


class LinkCopy(QueuedCopy, Protocol):
    """The part of a copy that the link needs: a `CopyRequest`, or a copy of a number of pages."""

    @property
    def target(self) -> Tier: ...

    @property
    def on_done(self) -> Callable[[bool], None]: ...


class VirtualLink:
    """A `Mover`. A page takes `page_bytes` on the link."""

    def __init__(self, page_bytes: int, speed: LinkSpeed, limits: CopyLimits | None = None) -> None:
        self._page_bytes = page_bytes
        self._speed = speed
        self._queue: CopyQueue[LinkCopy] = CopyQueue(page_bytes, limits if limits is not None else CopyLimits())
        self._under_way: deque[tuple[float, LinkCopy]] = deque()
        """(end, request) of the copies under way, in order of their ends."""
        self._free_us = 0.0
        self.now_us = 0
        self.moved_bytes = dict.fromkeys(Tier, 0)
        """Bytes of the copies that have ended, by target tier."""

    def submit(self, request: LinkCopy) -> bool:
        if not self._queue.push(request):
            return False
        self._start()
        return True

    def forecast(self, size_bytes: int, priority: CopyPriority) -> CopyForecast:
        ahead = self._queue.forecast(size_bytes, priority, self.now_us)
        return CopyForecast(ahead.wait_us, self._speed.duration_us(size_bytes))

    def advance(self, now_us: int) -> None:
        """Advances the clock to `now_us`. Each copy that ends before ends at its own time."""
        while self._under_way and self._under_way[0][0] <= now_us:
            self._end_first()
        if now_us > self.now_us:
            self.now_us = now_us

    @property
    def next_end_us(self) -> int | None:
        """When the next copy ends; None if none is under way."""
        return math.ceil(self._under_way[0][0]) if self._under_way else None

    def run(self) -> None:
        """Advances the clock until no copy is left."""
        while self._under_way:
            self._end_first()

    def close(self) -> None:
        for request in self._queue.drain():
            request.on_done(False)
        self.run()

    def _start(self) -> None:
        while (request := self._queue.start(self.now_us)) is not None:
            begins_us = max(self._free_us, float(self.now_us))
            self._free_us = begins_us + self._speed.duration_us(request.size_bytes(self._page_bytes))
            self._under_way.append((self._free_us, request))

    def _end_first(self) -> None:
        ends_us, request = self._under_way.popleft()
        self.now_us = max(self.now_us, int(ends_us))
        self.moved_bytes[request.target] += request.size_bytes(self._page_bytes)
        self._queue.end(request, self.now_us, True)
        self._start()
        request.on_done(True)
