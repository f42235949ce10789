"""The metadata of both tiers under one lock, with the counters, the events and the pending prefixes.

A section under the lock is short and does no I/O. The ledger calls listeners and waiters after it has left the lock.
Every method but `section` is called inside a section.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from relaygr.worker.cache.entries import CacheEntry, WorkInFlight
from relaygr.worker.cache.events import CacheEvent, CacheListener, EventKind
from relaygr.worker.cache.handles import PendingPrefix
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.metadata import TierMetadata
from relaygr.worker.cache.results import Miss, MissReason, PendingOutcome, WasteReason
from relaygr.worker.cache.stats import Counters

AfterLock = list[Callable[[], None]]
"""Calls to make once the lock is left."""


class TierLedger:
    """Shared by `PrefixCache` and `TierTransfers`. `only_namespace` limits the cache to one model."""

    def __init__(
        self, hbm: TierMetadata, dram: TierMetadata, counters: Counters, listener: CacheListener | None
    ) -> None:
        self.hbm = hbm
        self.dram = dram
        self.tiers = (hbm, dram)
        self.counters = counters
        self.pending: dict[WorkInFlight, PendingPrefix] = {}
        self.only_namespace: bytes | None = None
        self.lock = threading.Lock()
        """For sections that neither pass a time nor call anybody afterwards."""
        self.latest_us = 0
        """The latest time that a caller passed in: the time of operations that have none, such as the end of a copy."""
        self._listener = listener
        self._sequence = itertools.count()

    @contextmanager
    def section(self, now_us: int = 0) -> Iterator[AfterLock]:
        """Holds the lock; afterwards makes the calls that the section has appended to the list."""
        after: AfterLock = []
        with self.lock:
            if now_us > self.latest_us:
                self.latest_us = now_us
            yield after
        for call in after:
            call()

    def tell(self, after: AfterLock, kind: EventKind, key: PrefixKey, outcome: str) -> None:
        """Tells the listener, once the lock is left."""
        if self._listener is not None:
            sequence = next(self._sequence)
            event = CacheEvent(sequence, self.latest_us, kind, key.user_id, key.namespace, key.chain, str(outcome))
            after.append(partial(self._listener, event))

    def finish(self, after: AfterLock, work: WorkInFlight, outcome: PendingOutcome) -> None:
        """Ends the wait for the work, once the lock is left."""
        pending = self.pending.pop(work, None)
        if pending is not None:
            after.append(partial(pending.finish, outcome))

    def refusal(self, key: PrefixKey) -> MissReason | None:
        """Why the key may match nothing; None if it may."""
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
        if any(tier.index.has_user(key.user_id, key.namespace) for tier in self.tiers):
            return Miss(MissReason.OTHER_HISTORY)
        if any(tier.index.has_user(key.user_id) for tier in self.tiers):
            return Miss(MissReason.OTHER_MODEL)
        return Miss(MissReason.ABSENT)

    def remove(self, after: AfterLock, entries: Iterable[tuple[TierMetadata, CacheEntry]]) -> None:
        """Invalidates the entries. Requests that wait for work on them get INVALIDATED."""
        for tier, entry in entries:
            stale = tier.remove(entry, WasteReason.INVALIDATED)
            if stale is not None:
                self.finish(after, stale, PendingOutcome.INVALIDATED)
            self.tell(after, EventKind.INVALIDATE, entry.key, tier.tier)
