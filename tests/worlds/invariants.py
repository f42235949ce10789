"""Recounts a cache from its entries, work and pins.

In each tier: free + evictable + leased + pinned + in flight = capacity, with each page in exactly one of these;
every reference has a holder; indexes, policy and leases agree.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from relaygr.worker.cache.cache import PrefixCache
from relaygr.worker.cache.entries import CacheEntry, EntryIndex, EntryState, Holding
from relaygr.worker.cache.metadata import TierMetadata
from relaygr.worker.cache.results import PageArray
from relaygr.worker.cache.stats import HOLDINGS


def check_invariants(cache: PrefixCache) -> None:
    """Raises AssertionError with the first contradiction."""
    ledger = cache.ledger
    with ledger.lock:
        for tier in ledger.tiers:
            check_tier(tier)
        stale = [work for work in ledger.pending if not work.open or work.entry.work is not work]
        _require(not stale, "a pending prefix has no open work")


def check_tier(tier: TierMetadata) -> None:
    """Raises AssertionError with the first contradiction in one tier."""
    _check_index(tier.index)
    owners, held = _check_entries(tier)
    for work in tier.works:
        _require(work.open, "closed work is still in flight")
        _require(not work.is_current or work.entry.work is work, "an entry lost its work")
        owners[work.new_pages] += 1
    owners[tier.cleaned] += 1
    _require(int(owners.max(initial=0)) <= 1, "a page has two owners")
    references = _check_references(tier, owners)
    _require(tier.held_until_us.keys() <= tier.pins | tier.works, "a handle or fill is held though it has ended")
    orphans = int(((owners == 0) & (references > 0)).sum())
    _require(orphans == tier.account.orphaned, "orphaned pages are miscounted")
    _require(all(held[each] == tier.account.held[each] for each in Holding), "held pages are miscounted")
    in_flight = sum(work.new_pages.size for work in tier.works) + tier.cleaned.size
    _require(in_flight == tier.account.in_flight, "pages in flight are miscounted")
    now = tier.stats()
    total = sum(getattr(now, held) for held in HOLDINGS)
    _require(total == now.capacity, f"{total} pages of {now.capacity}")
    visible = sum(entry.is_visible for entry in tier.index.all())
    _require(len(tier.policy) == visible, "the policy orders other entries than the visible ones")
    _require(all(lease.entry.attached for lease in tier.leases.all()), "a lease outlived its entry")


def _check_index(index: EntryIndex) -> None:
    for number, entry in index.by_number.items():
        _require(entry.number == number and entry.attached, "an entry is indexed under another number")
        _require(entry in index.by_user[entry.key.user_id], "an entry is missing from its user")
        _require(number in index.by_namespace[entry.key.namespace], "an entry is missing from its namespace")
    _require(all(index.by_user.values()) and all(index.by_namespace.values()), "an empty list was left behind")
    _require(sum(map(len, index.by_user.values())) == len(index), "the user index is stale")
    _require(sum(map(len, index.by_namespace.values())) == len(index), "the namespace index is stale")


def _check_entries(tier: TierMetadata) -> tuple[PageArray, Counter[Holding]]:
    """Number of entries that own each page, and number of pages by holding."""
    owners = np.zeros(tier.pool.capacity, np.int32)
    held: Counter[Holding] = Counter()
    for entry in tier.index.all():
        work = entry.work
        _require(work is None or (work in tier.works and work.is_current), "work has ended or is stale")
        _require(entry.holding is _holding_of(entry), "an entry's holding is stale")
        visible = entry.state in (EntryState.READY, EntryState.SPILLING)
        _require(entry.is_visible is visible, "visibility disagrees with the state")
        if visible:
            _require(entry.pages.size == tier.shape.pages_for(entry.tokens), "a page table has the wrong length")
            _require(entry.tokens == tier.shape.layout.tokens(entry.key.length), "tokens disagree with behaviours")
        else:
            _require(entry.pages.size == 0 and work is not None, "an entry in flight owns pages")
        _require((entry.state is EntryState.SPILLING) == (entry.spills > 0), "spilling without a spill")
        owners[entry.pages] += 1
        held[entry.holding] += entry.pages.size
        for request_id in entry.leases:
            lease = tier.leases.get(entry.key.user_id, request_id)
            _require(lease is not None and lease.entry is entry, "an entry has a lease that the tier does not have")
    return owners, held


def _holding_of(entry: CacheEntry) -> Holding:
    if entry.pins:
        return Holding.PINNED
    return Holding.LEASED if entry.leases else Holding.EVICTABLE


def _check_references(tier: TierMetadata, owners: PageArray) -> PageArray:
    expected = owners.copy()
    pins: Counter[CacheEntry] = Counter()
    for pin in tier.pins:
        expected[pin.pages] += 1
        pins[pin.entry] += 1
    _require(all(pin.entry.pins == pins[pin.entry] for pin in tier.pins), "pins are miscounted")
    _require(all(entry.pins == pins[entry] for entry in tier.index.all()), "an entry counts pins that do not exist")
    references = tier.pool.references()
    _require(np.array_equal(expected, references), "reference counts disagree with owners and pins")
    free = tier.pool.free_pages()
    _require(free.size == np.unique(free).size, "a page is free twice")
    _require(np.array_equal(np.sort(free), np.flatnonzero(references == 0)), "the free list is wrong")
    return references


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)
