"""Objects that callers of the cache hold: a `Handle` to read a prefix, a `PendingPrefix` to wait for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache.copies import Deadline, LayerArrival
from relaygr.worker.cache.entries import EntryState, Pin
from relaygr.worker.cache.pages import PageArray
from relaygr.worker.cache.results import PendingKind, PendingOutcome

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Presence:
    """Ready behaviours of a key in each tier, and the state of each tier's best entry."""

    hbm_behaviours: int
    dram_behaviours: int
    hbm_state: EntryState
    dram_state: EntryState


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A pinned prefix in HBM. Its pages do not change until it is released, whatever happens to the entry.

    `pages` is int32 [pages_for(tokens)]: token t lies in row t % page_tokens of pages[t // page_tokens].
    The handle covers the first `behaviours` behaviours of the key; `complete` means all of them.
    `approximate` means that a part of the K,V came from a DRAM tier that stores it in fewer bits.
    With an `arrival`, the last layers may still be on their way from DRAM. The reader then calls
    `arrival.wait(layer)` before it reads each layer, and discards its results if the arrival failed.
    """

    behaviours: int
    tokens: int
    pages: PageArray
    complete: bool
    source: PrefixSource
    pin: Pin = field(repr=False)
    approximate: bool = False
    arrival: LayerArrival | None = None

    @property
    def is_held(self) -> bool:
        """False once the handle was released or revoked. Its pages may then hold other data."""
        return self.pin.open and not self.pin.revoked


@dataclass(frozen=True, slots=True)
class Hit:
    """K,V in HBM, pinned until the caller releases the handle."""

    handle: Handle


class PendingPrefix:
    """A fill or reload under way that several requests may wait for: one per user and identity.

    It ends once, with an outcome; `behaviours` of the key will then be covered. Each waiter keeps its own
    deadline elsewhere. A waiter that gives up ignores the callback, and the work goes on for the others.
    """

    def __init__(
        self,
        kind: PendingKind,
        behaviours: int,
        outcome: PendingOutcome | None = None,
        arrival: LayerArrival | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """`arrival` belongs to a reload that can be read before it has ended, `deadline` to its copy."""
        self.kind = kind
        self.behaviours = behaviours
        self.arrival = arrival
        self._deadline = deadline
        self._lock = threading.Lock()
        self._outcome = outcome
        self._callbacks: list[Callable[[PendingPrefix], None]] = []

    @property
    def outcome(self) -> PendingOutcome | None:
        """None while the work is under way."""
        return self._outcome

    @property
    def done(self) -> bool:
        return self._outcome is not None

    def needed_by(self, deadline_us: int) -> None:
        """Moves the deadline of a reload forward, so that it starts before reloads with later deadlines."""
        if self._deadline is not None:
            self._deadline.bring_forward(deadline_us)

    def add_done_callback(self, callback: Callable[[PendingPrefix], None]) -> None:
        """Calls `callback(self)` once when the work ends, in the thread that ends it; at once if it has ended."""
        with self._lock:
            if self._outcome is None:
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, outcome: PendingOutcome) -> None:
        """Ends the wait and calls the waiters. Only the cache calls it; later calls change nothing."""
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = outcome
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                # An exception of one waiter must not keep the others from being called.
                _log.exception("a waiter for a prefix failed", kind=self.kind, outcome=outcome)
