"""The metadata of both tiers under one lock, with the counters, the events and the pending prefixes.

A section under the lock is short and does no I/O. The ledger calls listeners and waiters after it has left the lock.
Every method is called inside a section.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial

import structlog

from relaygr.worker.cache.copies import Deadline, LayerArrival
from relaygr.worker.cache.entries import CacheEntry, WorkInFlight
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.metadata import TierMetadata
from relaygr.worker.cache.results import Miss, MissReason, PendingKind, PendingOutcome, WasteReason
from relaygr.worker.cache.stats import Counters

_log = structlog.get_logger()

AfterLock = list[Callable[[], None]]
"""Calls to make once the lock is left."""


class PendingPrefix:
    """A fill or reload under way that several requests may wait for: one per user and identity.

    It ends once, with an outcome; `behaviours` of the key will then be covered. Each waiter keeps its own
    deadline elsewhere. A waiter that gives up ignores the callback, and the work continues for the others.
    """

    def __init__(
        self,
        kind: PendingKind,
        behaviours: int,
        outcome: PendingOutcome | None = None,
        arrival: LayerArrival | None = None,
        deadline: Deadline | None = None,
        expected_us: float | None = None,
        longest_wait_us: float | None = None,
    ) -> None:
        """`arrival`: set for a reload that can be read before it ends. `deadline`: the deadline of its copy.
        `expected_us`: when its copy should end, on the monotonic clock. `longest_wait_us`: a request waits no longer,
        whatever time it has, because the work may hang.
        """
        self.kind = kind
        self.behaviours = behaviours
        self.arrival = arrival
        self.expected_us = expected_us
        self.longest_wait_us = longest_wait_us
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


class Section:
    """Holds the lock; afterwards makes the calls that the section has appended to the list.

    One object serves all sections, since the lock admits one at a time. A generator takes three times as long, and a
    ranking request has several sections.
    """

    __slots__ = ("_after", "_lock")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._after: AfterLock = []

    def __enter__(self) -> AfterLock:
        self._lock.acquire()
        after = self._after = []
        return after

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        after = self._after
        self._lock.release()
        if error is None:
            for call in after:
                call()


class TierLedger:
    """Shared by `PrefixCache` and `TierTransfers`. `only_namespace` limits the cache to one model."""

    def __init__(self, hbm: TierMetadata, dram: TierMetadata, counters: Counters) -> None:
        self.hbm = hbm
        self.dram = dram
        self.tiers = (hbm, dram)
        self.counters = counters
        self.pending: dict[WorkInFlight, PendingPrefix] = {}
        self.only_namespace: bytes | None = None
        self.lock = threading.Lock()
        """For sections that make no calls afterwards."""
        self.section = Section(self.lock)
        """For all other sections."""
        self.latest_us = 0
        """The latest time that a caller passed in: the time of operations that have none, such as the end of a copy."""

    def pass_time(self, now_us: int) -> None:
        """Notes the time of a section."""
        if now_us > self.latest_us:
            self.latest_us = now_us

    def finish(self, after: AfterLock, work: WorkInFlight, outcome: PendingOutcome) -> None:
        """Ends the wait for the work, once the lock is left."""
        pending = self.pending.pop(work, None)
        if pending is not None:
            after.append(partial(pending.finish, outcome))

    def refusal(self, key: PrefixKey) -> MissReason | None:
        """Why no entry may serve the key; None if an entry may."""
        if not key.is_known:
            return MissReason.UNKNOWN_IDENTITY
        if self.only_namespace is not None and key.namespace != self.only_namespace:
            return MissReason.OTHER_MODEL
        return None

    def miss(self, key: PrefixKey) -> Miss:
        """Why HBM has nothing for a key that `refusal` accepts."""
        stored = self.dram.index.find(key)
        if stored is not None:
            return Miss(MissReason.IN_DRAM, stored.behaviours)
        reason = MissReason.ABSENT
        for tier in self.tiers:
            for entry in tier.index.by_user.get(key.user_id, ()):
                if entry.key.namespace == key.namespace:
                    return Miss(MissReason.OTHER_HISTORY)
                reason = MissReason.OTHER_MODEL
        return Miss(reason)

    def remove(self, after: AfterLock, entries: Iterable[tuple[TierMetadata, CacheEntry]]) -> None:
        """Invalidates the entries. Requests that wait for work on them get INVALIDATED."""
        for tier, entry in entries:
            stale = tier.remove(entry, WasteReason.INVALIDATED)
            if stale is not None:
                self.finish(after, stale, PendingOutcome.INVALIDATED)
