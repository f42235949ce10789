"""Entries and pages of one tier: which are ready, in flight, pinned, leased or free. It holds no K,V.

| operation | needs | returns | effect |
|---|---|---|---|
| `begin` | pages free or evictable | `WorkInFlight` | a new entry FILLING or LOADING, or an entry that grows |
| `publish` | work still current | the READY entry | closes the work; older handles keep the old page table |
| `abort` | open work | | frees the work's pages; a new entry is EMPTY again |
| `revoke_overdue` | | pins and work held too long | gives up the work; pages stay taken until `unpin` or `abort` |
| `remove` | | the open work, now stale | the entry leaves the index; its pages are free once the last reader leaves |
| `restore` | free pages | | entries of an earlier process are READY |

Every page is in exactly one of free, in flight, pinned, leased, evictable. All pages of an entry count as one of these:
pinned while the entry has readers, else leased while requests lease it, else evictable. A page that lost its entry but
still has readers counts as pinned. `begin` evicts only evictable entries, and only if that makes enough room.
A `TierJournal` records every entry that is published, used or removed.

Not thread-safe: the cache's lock guards it. Every time is passed in.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from relaygr.schemas.messages import PrefixSource
from relaygr.schemas.record import record
from relaygr.worker.cache.entries import (
    CacheEntry,
    EntryIndex,
    EntryState,
    Holding,
    Leases,
    Pin,
    PrefixMatch,
    WorkInFlight,
)
from relaygr.worker.cache.identity import Mark, PrefixKey
from relaygr.worker.cache.journal import StoredEntry, TierJournal
from relaygr.worker.cache.pages import NO_PAGES, PageAccount, PagePool
from relaygr.worker.cache.policies import EntryWeight, EvictionPolicy
from relaygr.worker.cache.results import (
    NoRoomReason,
    PageArray,
    PageCopy,
    PendingKind,
    Purpose,
    Room,
    Tier,
    WasteReason,
)
from relaygr.worker.cache.stats import Counters, TierStats
from relaygr.worker.kv import PrefixLayout

_NEVER = -1
"""A generation that no entry has."""
MAX_ENTRIES_PER_USER = 4
"""A look-up walks all entries of its user. Without a bound, a user whose history keeps changing could have many."""


@record(frozen=True, slots=True)
class TierShape:
    """Size of a tier, and how tokens lie in its pages."""

    tier: Tier
    capacity_pages: int
    page_tokens: int
    layout: PrefixLayout

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)


_STEPS: dict[EntryState, frozenset[EntryState]] = {
    EntryState.EMPTY: frozenset({EntryState.FILLING, EntryState.LOADING}),
    EntryState.FILLING: frozenset({EntryState.READY, EntryState.EMPTY}),
    EntryState.LOADING: frozenset({EntryState.READY, EntryState.EMPTY}),
    EntryState.READY: frozenset({EntryState.SPILLING, EntryState.EVICTED}),
    # An entry that is invalidated during its spill is evicted at once; the pin of the copy keeps the pages.
    EntryState.SPILLING: frozenset({EntryState.READY, EntryState.EVICTED}),
    EntryState.EVICTED: frozenset(),
}


class TierMetadata:
    """See the module."""

    def __init__(
        self,
        shape: TierShape,
        policy: EvictionPolicy,
        counters: Counters,
        lease_limit: int,
        journal: TierJournal | None = None,
    ) -> None:
        """With a journal the tier gives no pages before `open`."""
        self.shape = shape
        self.tier = shape.tier
        self.policy = policy
        self.pool = PagePool(shape.capacity_pages)
        self.index = EntryIndex()
        self.account = PageAccount()
        self.leases = Leases(lease_limit)
        self.works: set[WorkInFlight] = set()
        self.cleaned: PageArray = NO_PAGES
        """Free pages that are being zeroed; they count as in flight."""
        self.pins: set[Pin] = set()
        self.held_until_us: dict[Pin | WorkInFlight, int] = {}
        """Pins of handles and work of fills, with the time at which each is overdue. The times may not decrease."""
        self._layout = shape.layout
        self._counters = counters
        self._journal = journal
        self.is_open = journal is None
        """False until the entries of an earlier process are restored."""
        self._numbers = itertools.count(1)

    # Reading.

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

    def room(self) -> Room:
        """The pages that `begin` could take, and those that ranking requests will give back."""
        account = self.account
        works = [work for work in self.works if work.purpose is Purpose.RANKING]
        return Room(
            free_pages=self.pool.free + account.held[Holding.EVICTABLE],
            held_pages=account.held[Holding.PINNED] + account.orphaned + sum(work.new_pages.size for work in works),
            reloads=sum(work.kind is PendingKind.LOAD for work in works),
        )

    # Order of eviction.

    def touch(self, entry: CacheEntry, now_us: int) -> None:
        """Records a use of the entry, so that it is evicted later."""
        if entry.attached:
            entry.used_us = now_us
            self.policy.touch(entry.number, now_us)
            if self._journal is not None:
                self._journal.touched(entry, now_us)

    def demote(self, entry: CacheEntry) -> None:
        """Puts the entry first in the order of eviction."""
        if entry.attached:
            self.policy.demote(entry.number)

    def count_waste(self, entry: CacheEntry, reason: WasteReason) -> None:
        """Counts the entry's pre-infer as wasted, once, if nothing used it."""
        if entry.unused_pre_infer:
            entry.unused_pre_infer = False
            self._counters.wasted[reason] += 1

    # Leases.

    def begin_lease(self, entry: CacheEntry, request_id: str, until_us: int) -> bool:
        """Leases the entry to the request. False if there are too many leases."""
        changed = self.leases.begin(entry, request_id, until_us)
        for each in changed:
            self.account.reclassify(each)
        return bool(changed)

    def end_lease(self, user_id: str, request_id: str, wasted: WasteReason | None) -> bool:
        """Ends the request's lease, and counts waste if no other request leases the entry. False without a lease."""
        entry = self.leases.end(user_id, request_id)
        if entry is None:
            return False
        self.account.reclassify(entry)
        if wasted is not None and not entry.leases:
            self.count_waste(entry, wasted)
        return True

    def expire_leases(self, now_us: int) -> int:
        """Ends every lease whose time has come, and counts waste. Returns their number."""
        entries = self.leases.expire(now_us)
        for entry in entries:
            self.account.reclassify(entry)
            if not entry.leases:
                self.count_waste(entry, WasteReason.LEASE_EXPIRED)
        return len(entries)

    # Pins. A pin keeps its pages even if their entry, or the work that fills them, ends.

    def pin(self, entry: CacheEntry, table: PageArray, tokens: int, until_us: int | None = None) -> Pin:
        """Pins the pages of the first `tokens` tokens in `table`: the entry's own, or that of its work in flight.

        The pin of a handle is overdue at `until_us`. Those times may not decrease from call to call.
        """
        pages = table[: self.shape.pages_for(tokens)]
        self.pool.share(pages)
        pin = Pin(entry, pages)
        self.pins.add(pin)
        if until_us is not None:
            self.held_until_us[pin] = until_us
        entry.pins += 1
        self.account.reclassify(entry)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Ends a pin. Raises ValueError if it has ended."""
        if not pin.open:
            raise ValueError("a handle was released twice")
        pin.open = False
        self.pins.remove(pin)
        self.held_until_us.pop(pin, None)
        pin.entry.pins -= 1
        # Pages that become free here had lost their entry before.
        self.account.orphaned -= self.pool.drop(pin.pages)
        self.account.reclassify(pin.entry)

    def begin_spill(self, entry: CacheEntry) -> Pin:
        """Pins the whole entry for a copy to DRAM."""
        if entry.state is EntryState.READY:
            _step(entry, EntryState.SPILLING)
        entry.spills += 1
        return self.pin(entry, entry.pages, entry.tokens)

    def end_spill(self, pin: Pin) -> None:
        """The copy ended, with or without success."""
        entry = pin.entry
        entry.spills -= 1
        if entry.spills == 0 and entry.state is EntryState.SPILLING:
            _step(entry, EntryState.READY)
        self.unpin(pin)

    def revoke_overdue(self, now_us: int) -> list[Pin | WorkInFlight]:
        """Revokes pins and work that are overdue. Their pages stay taken, since the device may still use the pages."""
        until_us = self.held_until_us
        overdue = list(itertools.takewhile(lambda held: until_us[held] <= now_us, until_us))
        for held in overdue:
            del until_us[held]
            held.revoked = True
            if isinstance(held, WorkInFlight):
                self._give_up(held)
        return overdue

    # Work in flight.

    def begin(
        self,
        key: PrefixKey,
        kind: PendingKind,
        purpose: Purpose,
        base: PrefixMatch | None,
        own_pins: int = 0,
    ) -> WorkInFlight | NoRoomReason:
        """Takes pages for `key`: for the tail after `base` if that entry can grow, else for the whole prefix.

        `own_pins` pins of the base belong to the caller. They do not make its tail page shared.
        """
        tokens = self._layout.tokens(key.length)
        if key.length == 0 or tokens <= 0:
            return NoRoomReason.NOTHING_TO_CACHE
        needed = self.shape.pages_for(tokens)
        if needed > self.pool.capacity:
            return NoRoomReason.TOO_LARGE
        if not self.is_open:
            return NoRoomReason.FULL
        if base is not None and not self._may_grow(base, own_pins):
            base = None
        if purpose is Purpose.FOLLOW and (base is None or base.behaviours < base.entry.key.length):
            return NoRoomReason.NOTHING_TO_CACHE
        if base is None:
            return self._begin_new(key, kind, purpose, tokens, needed)
        return self._begin_growth(key, kind, purpose, tokens, base, own_pins)

    def pages_needed(self, tokens: int, base: PrefixMatch | None) -> int:
        """Number of new pages that a load of `tokens` tokens onto `base` takes."""
        needed = self.shape.pages_for(tokens)
        if base is None or not self._may_grow(base, 0):
            return needed
        return needed - self._layout.tokens(base.behaviours) // self.shape.page_tokens

    def publish(self, work: WorkInFlight, now_us: int, source: PrefixSource) -> CacheEntry | None:
        """Makes the work's pages visible. None, with the pages freed, if the work is not current any more."""
        entry = work.entry
        if work.generation != entry.generation:
            self.abort(work)
            return None
        self._close(work)
        if work.base is None:
            _step(entry, EntryState.READY)
            entry.pages = work.new_pages
            entry.source = source
            entry.ready_us = now_us
            self._demote_others(entry)
        else:
            if self._journal is not None:
                self._journal.removed(entry)
            replaced = entry.pages[work.kept :]
            entry.pages = work.table
            self.account.orphaned += replaced.size - self.pool.drop(replaced)
            earlier = (*entry.key.marks, Mark(entry.key.length, entry.key.chain.digest))
            entry.key = work.key.held(tuple(mark for mark in earlier if mark.length <= work.start_behaviours))
            if work.kind is PendingKind.LOAD:
                entry.source = source
            self.unpin(work.base)
        entry.tokens = work.tokens
        entry.used_us = now_us
        if work.purpose is not Purpose.FOLLOW:
            entry.unused_pre_infer = work.purpose is Purpose.PRE_INFER
        self._show(entry, now_us)
        if self._journal is not None:
            self._journal.published(entry, now_us)
        return entry

    def restore(self, stored: Sequence[StoredEntry], now_us: int) -> None:
        """Makes entries of an earlier process READY, the least recently used first. Called before `open`.

        Raises ValueError if a page is not free.
        """
        if stored:
            self.pool.claim(np.concatenate([each.pages for each in stored]))
        for each in stored:
            entry = CacheEntry(next(self._numbers), each.key, next(self._numbers), each.pages)
            _step(entry, EntryState.LOADING)
            _step(entry, EntryState.READY)
            entry.tokens, entry.source, entry.ready_us = each.tokens, each.source, now_us
            self.index.add(entry)
            self._show(entry, now_us)

    def open(self) -> None:
        """All entries are restored. From now on `begin` gives pages."""
        if not self.is_open:
            self.pool.mark_dirty()
        self.is_open = True

    def begin_cleaning(self, count: int) -> PageArray:
        """Takes at most `count` free pages that may hold bytes of a removed prefix, for the caller to zero."""
        if self.is_open and not self.cleaned.size:
            self.cleaned = self.pool.take_dirty(count)
            self.account.in_flight += self.cleaned.size
            return self.cleaned
        return NO_PAGES

    def end_cleaning(self) -> None:
        """The pages of `begin_cleaning` hold zeros."""
        self.account.in_flight -= self.cleaned.size
        self.pool.drop_clean(self.cleaned)
        self.cleaned = NO_PAGES

    def end_journal(self) -> None:
        """Stops the journal: later changes concern this process only."""
        if self._journal is not None:
            self._journal.end()

    def abort(self, work: WorkInFlight) -> None:
        """Frees the work's pages. A new entry is EMPTY again; an entry that grew is as before."""
        self._close(work)
        self._give_up(work)
        # Readers of a prefix that is still being copied keep its pages.
        self.account.orphaned += work.new_pages.size - self.pool.drop(work.new_pages)
        if work.base is not None:
            self.unpin(work.base)

    def remove(self, entry: CacheEntry, reason: WasteReason) -> WorkInFlight | None:
        """Removes the entry from the index. Returns its open work, which is stale from now on.

        The entry's pages are free at once, or when their last reader leaves. Pages in flight are free when the work
        ends.
        """
        stale = entry.work
        if self._journal is not None and entry.is_visible:
            self._journal.removed(entry)
        self.count_waste(entry, reason)
        self._detach(entry)
        if entry.is_visible:
            _step(entry, EntryState.EVICTED)
            self.account.orphaned += entry.pages.size - self.pool.drop(entry.pages)
        else:
            _step(entry, EntryState.EMPTY)
        return stale

    def give_up_truncation(self, leased: PrefixMatch) -> WorkInFlight | None:
        """Gives up and returns the work that would have removed a part of the entry that was just leased."""
        work = leased.entry.work
        if work is None or self._layout.tokens(leased.behaviours) <= work.start_tokens:
            return None
        self._give_up(work)
        return work

    # Helpers.

    def _may_grow(self, base: PrefixMatch, own_pins: int) -> bool:
        entry = base.entry
        if entry.work is not None or not entry.attached:
            return False
        truncates = self._layout.tokens(base.behaviours) < entry.tokens
        # Growth from inside the entry removes its old end, which a holder of the entry may need.
        return not (truncates and (entry.leases or entry.pins > own_pins))

    def _begin_new(
        self, key: PrefixKey, kind: PendingKind, purpose: Purpose, tokens: int, needed: int
    ) -> WorkInFlight | NoRoomReason:
        siblings = self.index.by_user.get(key.user_id, ())
        surplus = None
        if len(siblings) >= MAX_ENTRIES_PER_USER:
            surplus = next((entry for entry in siblings if self._is_evictable(entry)), None)
            if surplus is None:
                return NoRoomReason.FULL
        pages = self._take(needed)
        if pages is None:
            return NoRoomReason.FULL
        if surplus is not None and surplus.attached:
            self._evict(surplus)
        entry = CacheEntry(next(self._numbers), key.held(), next(self._numbers), NO_PAGES)
        _step(entry, EntryState.FILLING if kind is PendingKind.FILL else EntryState.LOADING)
        self.index.add(entry)
        return self._open(WorkInFlight(next(self._numbers), kind, purpose, key, tokens, entry, entry.generation, pages))

    def _begin_growth(
        self,
        key: PrefixKey,
        kind: PendingKind,
        purpose: Purpose,
        tokens: int,
        base: PrefixMatch,
        own_pins: int,
    ) -> WorkInFlight | NoRoomReason:
        entry = base.entry
        start_tokens = self._layout.tokens(base.behaviours)
        whole, partial = divmod(start_tokens, self.shape.page_tokens)
        # A partial tail page is written in place only if no other reader has it, and never if that would overwrite
        # visible rows. A load copies the whole page, so it never needs the old one.
        in_place = start_tokens == entry.tokens and entry.pins == own_pins and kind is PendingKind.FILL
        kept = whole + 1 if partial and in_place else whole
        pin = self.pin(entry, entry.pages, start_tokens)
        wanted = self.shape.pages_for(tokens) - kept
        pages = self._take(wanted) if purpose is not Purpose.FOLLOW or wanted <= self.pool.free else None
        if pages is None:
            self.unpin(pin)
            return NoRoomReason.FULL
        copies = partial and not in_place and kind is PendingKind.FILL
        work = WorkInFlight(next(self._numbers), kind, purpose, key, tokens, entry, entry.generation, pages)
        work.base = pin
        work.kept = kept
        work.start_behaviours = base.behaviours
        work.start_tokens = start_tokens
        work.copy_page = PageCopy(int(pin.pages[whole]), int(pages[0])) if copies else None
        return self._open(work)

    def _open(self, work: WorkInFlight) -> WorkInFlight:
        work.entry.work = work
        self.works.add(work)
        self.account.in_flight += work.new_pages.size
        return work

    def _give_up(self, work: WorkInFlight) -> None:
        """The work will not be published. Other work may begin in its place."""
        if work.is_current and work.base is None:
            self._detach(work.entry)
            _step(work.entry, EntryState.EMPTY)
        elif work.is_current:
            work.entry.work = None
        work.generation = _NEVER

    def _close(self, work: WorkInFlight) -> None:
        if not work.open:
            raise ValueError("work in flight was ended twice")
        work.open = False
        self.works.remove(work)
        self.held_until_us.pop(work, None)
        self.account.in_flight -= work.new_pages.size
        if work.entry.work is work:
            work.entry.work = None

    def _take(self, count: int) -> PageArray | None:
        # A growth within the last page takes none.
        missing = count - self.pool.free if count else 0
        if missing > self.account.held[Holding.EVICTABLE]:
            return None
        if missing > 0:
            self._make_room(missing)
        return self.pool.take(count)

    def _make_room(self, pages: int) -> None:
        """Evicts entries until `pages` more pages are free."""
        chosen = []
        for number in self.policy.victims():
            entry = self.index[number]
            if self._is_evictable(entry):
                chosen.append(entry)
                pages -= entry.pages.size
                if pages <= 0:
                    break
        for entry in chosen:
            self._evict(entry)

    def _is_evictable(self, entry: CacheEntry) -> bool:
        return entry.is_visible and entry.holding is Holding.EVICTABLE

    def _evict(self, entry: CacheEntry) -> None:
        self._counters.evictions[self.tier] += 1
        self.policy.evict(entry.number)
        self.remove(entry, WasteReason.EVICTED)

    def _demote_others(self, entry: CacheEntry) -> None:
        """Puts the user's older prefixes first in the order of eviction."""
        for other in self.index.by_user[entry.key.user_id]:
            if other is not entry:
                self.policy.demote(other.number)

    def _show(self, entry: CacheEntry, now_us: int) -> None:
        identity = hash((entry.key.user_id, entry.key.namespace))
        weight = EntryWeight(entry.pages.size, identity)
        self.policy.add(entry.number, weight, now_us)
        self.account.reclassify(entry)

    def _detach(self, entry: CacheEntry) -> None:
        self.index.remove(entry)
        self.policy.remove(entry.number)
        entry.attached = False
        entry.generation = next(self._numbers)
        entry.work = None
        self.leases.end_all(entry)
        self.account.reclassify(entry)


def _step(entry: CacheEntry, state: EntryState) -> None:
    """Moves the entry to `state`. Raises ValueError for a step that the diagram in `entries` does not have."""
    if state not in _STEPS[entry.state]:
        raise ValueError(f"an entry cannot go from {entry.state} to {state}")
    entry.state = state
    entry.is_visible = state is EntryState.READY or state is EntryState.SPILLING
