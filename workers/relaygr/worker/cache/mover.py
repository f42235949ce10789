"""Threads that copy pages, in the order of a `CopyQueue`. What a copy is, a `Copier` knows.

`submit` never blocks. `close` lets the copies under way end, fails those that wait, and joins the threads.
"""

from __future__ import annotations

import threading
from typing import Protocol

import structlog

from relaygr.runtime.clock import Clock
from relaygr.worker.cache.copies import CopyForecast, CopyPriority, CopyRequest
from relaygr.worker.cache.copy_queue import CopyLimits, CopyQueue

_log = structlog.get_logger()


class Copier(Protocol):
    """Does one copy in the calling thread, all of it or an exception."""

    def copy(self, request: CopyRequest) -> None:
        """Returns when the bytes are there."""


class ThreadMover:
    """A `Mover` with as many threads as copies may be under way. Starts them at once."""

    def __init__(
        self,
        copier: Copier,
        page_bytes: int,
        clock: Clock,
        limits: CopyLimits | None = None,
    ) -> None:
        """`page_bytes` of a page as it crosses the link."""
        limits = limits if limits is not None else CopyLimits()
        self._copier = copier
        self._clock = clock
        self._queue = CopyQueue(page_bytes, limits)
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"page-copies-{index}", daemon=True)
            for index in range(limits.max_in_flight)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: CopyRequest) -> bool:
        with self._changed:
            if self._closing or not self._queue.push(request):
                return False
            self._changed.notify()
            return True

    def forecast(self, size_bytes: int, priority: CopyPriority) -> CopyForecast:
        with self._changed:
            return self._queue.forecast(size_bytes, priority, self._clock.monotonic_us())

    def close(self) -> None:
        with self._changed:
            self._closing = True
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
                self._copier.copy(request)
                copied = True
            except Exception:
                # The books drop what may be torn; the thread has other copies to make.
                _log.exception("pages could not be copied", source=request.source, target=request.target)
            with self._changed:
                self._queue.end(request, self._clock.monotonic_us(), copied)
                self._changed.notify_all()
            try:
                request.on_done(copied)
            except Exception:
                # Without the thread, whoever waits for the next copies would wait in vain.
                _log.exception("the end of a copy could not be told", source=request.source, target=request.target)

    def _next(self) -> CopyRequest | None:
        with self._changed:
            while not self._closing:
                request = self._queue.start(self._clock.monotonic_us())
                if request is not None:
                    return request
                self._changed.wait()
            return None
