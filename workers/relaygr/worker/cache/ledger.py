"""The books of both tiers under one lock, with what is counted, told, and waited for.

Sections under the lock are short and do no I/O; listeners and waiters are called after it is left. Every
method but `section` is for inside one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from relaygr.worker.cache.entries import CacheEntry, WorkInFlight
from relaygr.worker.cache.events import CacheEvent, CacheListener, EventKind
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.metadata import TierMetadata
from relaygr.worker.cache.pending import PendingPrefix
from relaygr.worker.cache.results import Miss, MissReason, PendingOutcome, WasteReason
from relaygr.worker.cache.stats import Counters

After = list[Callable[[], None]]
"""What is to be called once the lock is left."""


class TierLedger:
    """Shared by the cache and its copies."""

    def __init__(
        self, hbm: TierMetadata, dram: TierMetadata, counters: Counters, listener: CacheListener | None
    ) -> None:
        self.hbm = hbm
        self.dram = dram
        self.counters = counters
        self.pending: dict[WorkInFlight, PendingPrefix] = {}
        self.only_namespace: bytes | None = None
        self.latest_us = 0
        self._listener = listener
        self._lock = threading.Lock()
        self._sequence = itertools.count()

    @property
    def tiers(self) -> tuple[TierMetadata, TierMetadata]:
        return self.hbm, self.dram

    @contextmanager
    def section(self, now_us: int = 0) -> Iterator[After]:
        """The lock, and what is to be called once it is left. What ends by itself counts as the latest `now_us`."""
        after: After = []
        with self._lock:
            self.latest_us = max(self.latest_us, now_us)
            yield after
        for call in after:
            call()

    def tell(self, after: After, kind: EventKind | None, key: PrefixKey, outcome: str) -> None:
        """Tells the listener; of None there is nothing to tell."""
        if self._listener is not None and kind is not None:
            sequence = next(self._sequence)
            event = CacheEvent(sequence, self.latest_us, kind, key.user_id, key.namespace, key.chain, str(outcome))
            after.append(partial(self._listener.on_event, event))

    def finish(self, after: After, work: WorkInFlight, outcome: PendingOutcome) -> None:
        """Ends the wait for the work."""
        pending = self.pending.pop(work, None)
        if pending is not None:
            after.append(partial(pending.finish, outcome))

    def refusal(self, key: PrefixKey) -> MissReason | None:
        """Why the key may not match anything, if it may not."""
        if not key.is_known:
            return MissReason.UNKNOWN_IDENTITY
        if self.only_namespace is not None and key.namespace != self.only_namespace:
            return MissReason.OTHER_MODEL
        return None

    def miss(self, key: PrefixKey) -> Miss:
        """Why HBM has nothing for the key."""
        refusal = self.refusal(key)
        if refusal is not None:
            return Miss(refusal)
        stored = self.dram.index.find(key)
        if stored is not None:
            return Miss(MissReason.IN_DRAM, stored.behaviours)
        if any(tier.index.holds_user(key.user_id, key.namespace) for tier in self.tiers):
            return Miss(MissReason.OTHER_HISTORY)
        if any(tier.index.holds_user(key.user_id) for tier in self.tiers):
            return Miss(MissReason.OTHER_MODEL)
        return Miss(MissReason.ABSENT)

    def remove(self, after: After, entries: Iterable[tuple[TierMetadata, CacheEntry]]) -> None:
        """Invalidates the entries; the waiters for what they were getting learn it."""
        for tier, entry in entries:
            stale = tier.remove(entry, WasteReason.INVALIDATED)
            if stale is not None:
                self.finish(after, stale, PendingOutcome.INVALIDATED)
            self.tell(after, EventKind.INVALIDATE, entry.key, tier.tier)

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        for tier in self.tiers:
            tier.check_invariants()
        if any(not work.open or work.entry.work is not work for work in self.pending):
            raise AssertionError("a pending outlived its work")
