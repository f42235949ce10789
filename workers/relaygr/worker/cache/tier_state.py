"""What the books of one tier consist of: `metadata` changes it, `invariants` recounts it.

Guarded by the cache's lock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from relaygr.worker.cache.entries import CacheEntry, Holding, Pin, WorkInFlight
from relaygr.worker.cache.entry_index import EntryIndex
from relaygr.worker.cache.leases import LeaseTable
from relaygr.worker.cache.pages import PagePool
from relaygr.worker.cache.policies import EvictionPolicy
from relaygr.worker.cache.stats import TierStats
from relaygr.worker.kv import PrefixLayout


@dataclass(slots=True)
class PageAccount:
    """How many pages are held, by what. `orphaned`: without an entry, but with readers."""

    held: Counter[Holding] = field(default_factory=Counter)
    orphaned: int = 0
    in_flight: int = 0

    def reclassify(self, entry: CacheEntry) -> None:
        """Counts the entry's pages as what holds them now."""
        self.held[entry.holding] -= entry.counted_pages
        entry.holding = holding_of(entry)
        entry.counted_pages = entry.pages.size if entry.attached else 0
        self.held[entry.holding] += entry.counted_pages


@dataclass(slots=True)
class TierState:
    """See the module."""

    page_tokens: int
    layout: PrefixLayout
    pool: PagePool
    policy: EvictionPolicy
    leases: LeaseTable
    index: EntryIndex = field(default_factory=EntryIndex)
    works: set[WorkInFlight] = field(default_factory=set)
    pins: set[Pin] = field(default_factory=set)
    held_until_us: dict[Pin | WorkInFlight, int] = field(default_factory=dict)
    """Pins that handles hold and work that fills hold, the first to end first, and when each was held too long."""
    account: PageAccount = field(default_factory=PageAccount)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def stats(self) -> TierStats:
        account = self.account
        return TierStats(
            capacity=self.pool.capacity,
            free=self.pool.free,
            evictable=account.held[Holding.EVICTABLE],
            leased=account.held[Holding.LEASED],
            pinned=account.held[Holding.PINNED] + account.orphaned,
            in_flight=account.in_flight,
            entries=len(self.index),
        )


def holding_of(entry: CacheEntry) -> Holding:
    """What keeps the entry's pages, as its pins and leases are now."""
    if entry.pins:
        return Holding.PINNED
    return Holding.LEASED if entry.leases else Holding.EVICTABLE
