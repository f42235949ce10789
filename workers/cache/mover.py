"""Threads that copy pages, in the order of a `CopyQueue`. What a copy is, a `Copier` knows.

`submit` never blocks. `close` lets the copies under way end, fails those that wait, and joins the threads.
For tests and for trying out slower links `SimulatedLink` makes each copy last longer than it does; such
a wait ends, and the copy fails, when the mover closes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import structlog

from streams.clock import Clock
from workers.cache.copy_queue import CopyLimits, CopyQueue
from workers.cache.transfer import CopyForecast, CopyPriority, CopyRequest

_log = structlog.get_logger()


class Copier(Protocol):
    """Does one copy in the calling thread, all of it or an exception."""

    def copy(self, request: CopyRequest) -> None:
        """Returns when the bytes are there."""


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """A copy lasts at least `delay_us` + its bytes / `bytes_per_us`."""

    delay_us: float = 0.0
    bytes_per_us: float = float("inf")

    def duration_us(self, size_bytes: int) -> float:
        return self.delay_us + size_bytes / self.bytes_per_us


class ThreadMover:
    """A `Mover` with as many threads as copies may be under way. Starts them at once."""

    def __init__(
        self,
        copier: Copier,
        page_bytes: int,
        clock: Clock,
        limits: CopyLimits | None = None,
        link: SimulatedLink | None = None,
    ) -> None:
        limits = limits if limits is not None else CopyLimits()
        self._copier = copier
        self._page_bytes = page_bytes
        self._clock = clock
        self._link = link
        self._queue = CopyQueue(page_bytes, limits)
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"page-copies-{index}", daemon=True)
            for index in range(limits.max_in_flight)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: CopyRequest) -> bool:
        with self._changed:
            if self._closing.is_set() or not self._queue.push(request):
                return False
            self._changed.notify()
            return True

    def forecast(self, size_bytes: int, priority: CopyPriority) -> CopyForecast:
        with self._changed:
            return self._queue.forecast(size_bytes, priority)

    def close(self) -> None:
        with self._changed:
            self._closing.set()
            waiting = self._queue.drain()
            self._changed.notify_all()
        for request in waiting:
            request.on_done(False)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (request := self._next()) is not None:
            copied = False
            try:
                copied = self._passes_link(request)
                if copied:
                    self._copier.copy(request)
            except Exception:
                # The books drop what may be torn; the thread has other copies to make.
                copied = False
                _log.exception("pages could not be copied", source=request.source, target=request.target)
            with self._changed:
                self._queue.end(request, self._clock.monotonic_us(), copied)
                self._changed.notify_all()
            request.on_done(copied)

    def _next(self) -> CopyRequest | None:
        with self._changed:
            while not self._closing.is_set():
                request = self._queue.start(self._clock.monotonic_us())
                if request is not None:
                    return request
                self._changed.wait()
            return None

    def _passes_link(self, request: CopyRequest) -> bool:
        if self._link is None:
            return True
        duration_us = self._link.duration_us(request.size_bytes(self._page_bytes))
        return not self._closing.wait(duration_us / 1e6)
