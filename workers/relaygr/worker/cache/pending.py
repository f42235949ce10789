"""Something under way that requests may wait for: one per user and identity.

Each waiter has its own deadline elsewhere. One that leaves just ignores the call; the work goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from relaygr.worker.cache.arrival import LayerArrival
from relaygr.worker.cache.copies import Deadline
from relaygr.worker.cache.results import PendingKind, PendingOutcome

_log = structlog.get_logger()


class PendingPrefix:
    """Ends once, with an outcome. `behaviours` of the key asked for will then be covered."""

    def __init__(
        self,
        kind: PendingKind,
        behaviours: int,
        outcome: PendingOutcome | None = None,
        arrival: LayerArrival | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """`arrival`: of a reload that can be used before it has ended. `deadline`: of its copy."""
        self.kind = kind
        self.behaviours = behaviours
        self.arrival = arrival
        self._deadline = deadline
        self._lock = threading.Lock()
        self._outcome = outcome
        self._callbacks: list[Callable[[PendingPrefix], None]] = []

    @property
    def outcome(self) -> PendingOutcome | None:
        """None while under way."""
        return self._outcome

    @property
    def done(self) -> bool:
        return self._outcome is not None

    def needed_by(self, deadline_us: int) -> None:
        """A reload that has not begun goes before all that are needed later."""
        if self._deadline is not None:
            self._deadline.bring_forward(deadline_us)

    def add_done_callback(self, callback: Callable[[PendingPrefix], None]) -> None:
        """Calls `callback(self)` once when it ends, in the thread that ends it; at once if it has."""
        with self._lock:
            if self._outcome is None:
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, outcome: PendingOutcome) -> None:
        """For the cache alone: ends it and tells the waiters. Later calls change nothing."""
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = outcome
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                # One waiter's fault is not the others'.
                _log.exception("a waiter for a prefix failed", kind=self.kind, outcome=outcome)
