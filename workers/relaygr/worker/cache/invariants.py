"""Recounts the books of a tier from its entries, work and pins: the **must**s of the cache, for tests.

free + evictable + leased + pinned + in-flight = capacity, each page in exactly one of these; every reference
has a holder; no index, policy or lease book knows what another does not.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from relaygr.worker.cache.entries import CacheEntry, EntryState, Holding
from relaygr.worker.cache.pages import PageArray
from relaygr.worker.cache.tier_state import TierState, holding_of


def check_tier(state: TierState) -> None:
    """Raises AssertionError that says what does not add up."""
    state.index.check()
    owners, held = _check_entries(state)
    for work in state.works:
        _require(work.open, "closed work is still in flight")
        _require(not work.is_current or work.entry.work is work, "an entry lost its work")
        owners[work.new_pages] += 1
    _require(int(owners.max(initial=0)) <= 1, "a page has two owners")
    references = _check_references(state, owners)
    _require(state.held_until_us.keys() <= state.pins | state.works, "what is held has ended")
    orphans = int(((owners == 0) & (references > 0)).sum())
    _require(orphans == state.account.orphaned, "orphaned pages are miscounted")
    _require(all(held[each] == state.account.held[each] for each in Holding), "held pages are miscounted")
    in_flight = sum(work.new_pages.size for work in state.works)
    _require(in_flight == state.account.in_flight, "pages in flight are miscounted")
    now = state.stats()
    total = now.free + now.evictable + now.leased + now.pinned + now.in_flight
    _require(total == now.capacity, f"{total} pages of {now.capacity}")
    visible = sum(entry.is_visible for entry in state.index.all())
    _require(len(state.policy) == visible, "the policy orders other entries than the visible ones")
    _require(all(lease.entry.attached for lease in state.leases.all()), "a lease outlived its entry")


def _check_entries(state: TierState) -> tuple[PageArray, Counter[Holding]]:
    """How many entries own each page, and the pages by holding."""
    owners = np.zeros(state.pool.capacity, np.int32)
    held: Counter[Holding] = Counter()
    for entry in state.index.all():
        _require(entry.work is None or (entry.work in state.works and entry.work.is_current), "work is over, or stale")
        _require(entry.holding is holding_of(entry), "an entry's holding is stale")
        if entry.is_visible:
            _require(entry.pages.size == state.pages_for(entry.tokens), "a page table has the wrong length")
            _require(entry.tokens == state.layout.tokens(entry.key.length), "tokens disagree with behaviours")
        else:
            _require(entry.pages.size == 0 and entry.work is not None, "an entry in flight owns pages")
        _require((entry.state is EntryState.SPILLING) == (entry.spills > 0), "spilling without a spill")
        owners[entry.pages] += 1
        held[entry.holding] += entry.pages.size
        for request_id in entry.leases:
            lease = state.leases.get(request_id)
            _require(lease is not None and lease.entry is entry, "a lease is missing from the book")
    return owners, held


def _check_references(state: TierState, owners: PageArray) -> PageArray:
    expected = owners.copy()
    pins: Counter[CacheEntry] = Counter()
    for pin in state.pins:
        expected[pin.pages] += 1
        pins[pin.entry] += 1
    _require(all(pin.entry.pins == pins[pin.entry] for pin in state.pins), "pins are miscounted")
    _require(all(entry.pins == pins[entry] for entry in state.index.all()), "an entry has phantom pins")
    references = state.pool.references()
    _require(np.array_equal(expected, references), "reference counts disagree with who holds pages")
    free = state.pool.free_pages()
    _require(free.size == np.unique(free).size, "a page is free twice")
    _require(np.array_equal(np.sort(free), np.flatnonzero(references == 0)), "the free list is wrong")
    return references


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)
