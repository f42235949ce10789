"""Requests that keep entries of a tier from eviction, from pre-infer to ranking, and pre-infers that served nobody.

The cache's lock guards it.
"""

from __future__ import annotations

from relaygr.worker.cache.entries import CacheEntry
from relaygr.worker.cache.leases import Lease
from relaygr.worker.cache.results import WasteReason
from relaygr.worker.cache.stats import Counters
from relaygr.worker.cache.tier_state import TierState


class TierLeases:
    """Of one tier."""

    def __init__(self, state: TierState, counters: Counters) -> None:
        self._leases = state.leases
        self._account = state.account
        self._counters = counters

    def __len__(self) -> int:
        return len(self._leases)

    def begin(self, entry: CacheEntry, request_id: str, until_us: int) -> bool:
        """Holds the entry for a request; False when there are too many leases."""
        previous = self._leases.get(request_id)
        if not self._leases.put(Lease(request_id, entry, until_us)):
            return False
        if previous is not None and previous.entry is not entry:
            self._let_go(previous)
        entry.leases.add(request_id)
        self._account.reclassify(entry)
        return True

    def end(self, request_id: str, wasted: WasteReason | None = None) -> bool:
        """Ends a request's lease; False if it has none.

        `wasted` counts its pre-infer if nothing used it, and no other request holds it.
        """
        lease = self._leases.take(request_id)
        if lease is None:
            return False
        self._let_go(lease)
        if wasted is not None and not lease.entry.leases:
            self.count_waste(lease.entry, wasted)
        return True

    def expire(self, now_us: int) -> int:
        """Ends every lease whose time has come; how many."""
        ended = self._leases.expired(now_us)
        for lease in ended:
            self._let_go(lease)
            if not lease.entry.leases:
                self.count_waste(lease.entry, WasteReason.LEASE_EXPIRED)
        return len(ended)

    def end_all(self, entry: CacheEntry) -> None:
        """The entry is gone: nobody holds it."""
        for request_id in entry.leases:
            self._leases.take(request_id)
        entry.leases.clear()

    def count_waste(self, entry: CacheEntry, reason: WasteReason) -> None:
        """Counts the entry's pre-infer, once, if nothing used it."""
        if entry.unused_pre_infer:
            entry.unused_pre_infer = False
            self._counters.wasted[reason] += 1

    def _let_go(self, lease: Lease) -> None:
        lease.entry.leases.discard(lease.request_id)
        self._account.reclassify(lease.entry)
