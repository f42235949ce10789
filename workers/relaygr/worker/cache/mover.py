"""Threads that copy pages, in the order of a `CopyQueue`. The mover touches no bytes: a function makes each copy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from relaygr.runtime.clock import Clock
from relaygr.worker.cache.copies import CopyForecast, CopyLimits, CopyPriority, CopyQueue, CopyRequest

_log = structlog.get_logger()


class ThreadMover:
    """A `Mover` with one thread for each copy that may be under way. The constructor starts the threads."""

    def __init__(
        self,
        copy: Callable[[CopyRequest], None],
        page_bytes: int,
        clock: Clock,
        limits: CopyLimits | None = None,
    ) -> None:
        """`copy` makes one copy in the calling thread and raises if it fails. A page takes `page_bytes` on the link."""
        limits = limits if limits is not None else CopyLimits()
        self._copy = copy
        self._clock = clock
        self._queue: CopyQueue[CopyRequest] = CopyQueue(page_bytes, limits)
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
                self._copy(request)
                copied = True
            except Exception:
                # The cache discards a copy that failed, and the thread has other copies to make.
                _log.exception("pages could not be copied", source=request.source, target=request.target)
            with self._changed:
                self._queue.end(request, self._clock.monotonic_us(), copied)
                self._changed.notify_all()
            try:
                request.on_done(copied)
            except Exception:
                # The thread must go on: without it the next copies would never be made.
                _log.exception("the callback of a copy failed", source=request.source, target=request.target)

    def _next(self) -> CopyRequest | None:
        with self._changed:
            while not self._closing:
                request = self._queue.start(self._clock.monotonic_us())
                if request is not None:
                    return request
                self._changed.wait()
            return None
