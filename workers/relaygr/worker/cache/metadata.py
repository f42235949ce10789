"""Books of one tier: who holds which pages. No bytes, no threads, no clock; the cache's lock guards it.

| operation | needs | gives | leaves behind |
|---|---|---|---|
| `begin` | pages free or evictable | `Work`: pages in flight | entry FILLING or LOADING, or one that grows |
| `publish` | work still current | the READY entry | work closed; longer table, older handles keep theirs |
| `abort` | open work | | its pages free; a new entry EMPTY again |
| `take_overdue` | | pins and work held too long | stale work; both keep their pages until `unpin`, `abort` |
| `remove` | | the work that is stale now | entry out of the index; pages free as readers leave |
| `restore` | free pages | | entries READY that an earlier process left |

Every page is in exactly one of free, in flight, pinned, leased, evictable. An entry's pages count as
one: pinned while it has readers, else leased while requests hold it, else evictable. A page that lost
its entry but still has readers counts as pinned. `begin` evicts only when that makes enough room, and
only entries that are evictable. A `TierJournal` hears of every entry that comes, changes or goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache.entries import CacheEntry, EntryState, Holding, Pin, PrefixMatch, WorkInFlight
from relaygr.worker.cache.entry_index import EntryIndex
from relaygr.worker.cache.identity import Mark, PrefixKey
from relaygr.worker.cache.invariants import check_tier
from relaygr.worker.cache.journal import NoJournal, StoredEntry, TierJournal
from relaygr.worker.cache.leases import LeaseTable
from relaygr.worker.cache.leasing import TierLeases
from relaygr.worker.cache.pages import PageArray, PagePool
from relaygr.worker.cache.policies import EntryWeight, EvictionPolicy
from relaygr.worker.cache.readers import Readers
from relaygr.worker.cache.results import NoRoomReason, PageCopy, PendingKind, Purpose, WasteReason
from relaygr.worker.cache.stats import Counters, TierStats
from relaygr.worker.cache.tier_state import TierState
from relaygr.worker.cache.tiers import Tier
from relaygr.worker.kv import PrefixLayout

# How many expired entries are looked at in one go: a section under the lock is short.
_EXPIRED_AT_ONCE = 256

_NEVER = -1
"""A generation that no entry has."""
# Look-ups walk a user's entries, so a user whose history keeps changing may not have many.
MAX_ENTRIES_PER_USER = 4


class TierMetadata:
    """The books of one tier."""

    def __init__(
        self,
        tier: Tier,
        capacity_pages: int,
        page_tokens: int,
        layout: PrefixLayout,
        policy: EvictionPolicy,
        counters: Counters,
        lease_limit: int,
        journal: TierJournal | None = None,
    ) -> None:
        self.tier = tier
        self._journal: TierJournal = journal if journal is not None else NoJournal()
        self._is_open = journal is None
        self._counters = counters
        self._state = TierState(page_tokens, layout, PagePool(capacity_pages), policy, LeaseTable(lease_limit))
        self._pool, self._policy = self._state.pool, policy
        self._index, self._account = self._state.index, self._state.account
        self.readers = Readers(self._state)
        self.leasing = TierLeases(self._state, counters)
        self._layout = layout
        self._last_number = 0
        self.saved_us: Callable[[int], float] = float
        """Predicted time that a hit on so many tokens saves; until it is known, a µs each."""

    # Looking, changing nothing.

    @property
    def index(self) -> EntryIndex:
        """For looking."""
        return self._index

    def state(self, key: PrefixKey) -> EntryState:
        """The state of the entry that serves `key`, or will; EMPTY if there is none."""
        match = self._index.find(key)
        if match is not None:
            return match.entry.state
        coming = self._index.find_work(key)
        return coming.work.entry.state if coming is not None else EntryState.EMPTY

    def stats(self) -> TierStats:
        return self._state.stats()

    def check_invariants(self) -> None:
        """Raises AssertionError that says what does not add up."""
        check_tier(self._state)

    # Use.

    def touch(self, entry: CacheEntry, now_us: int) -> None:
        """The entry was used: later in the order of eviction."""
        if entry.attached:
            self._policy.touch(entry.number, now_us)
            self._journal.touched(entry, now_us)

    def demote(self, entry: CacheEntry) -> None:
        """The entry goes first when room is needed."""
        if entry.attached:
            self._policy.demote(entry.number)

    def expire(self, now_us: int) -> int:
        """Evicts entries that nobody holds and whose time the policy says is over; how many."""
        numbers = list(itertools.islice(self._policy.expired(now_us), _EXPIRED_AT_ONCE))
        entries = [entry for entry in map(self._index.__getitem__, numbers) if self._is_evictable(entry)]
        for entry in entries:
            self._evict(entry)
        return len(entries)

    # Work in flight.

    def begin(
        self,
        key: PrefixKey,
        kind: PendingKind,
        purpose: Purpose,
        now_us: int,
        base: PrefixMatch | None,
        own_pins: int = 0,
    ) -> WorkInFlight | NoRoomReason:
        """Takes pages for `key`: those after `base`'s where it can grow, else for the whole.

        `own_pins` of the base's readers belong to the caller, and do not make its tail page shared.
        """
        tokens = self._layout.tokens(key.length)
        if key.length == 0 or tokens <= 0:
            return NoRoomReason.NOTHING_TO_CACHE
        if self._state.pages_for(tokens) > self._pool.capacity:
            return NoRoomReason.TOO_LARGE
        if not self._is_open:
            return NoRoomReason.FULL
        if base is not None and not self._may_grow(base, own_pins):
            base = None
        if base is None:
            return self._begin_new(key, kind, purpose, tokens, now_us)
        return self._begin_growth(key, kind, purpose, tokens, now_us, base, own_pins)

    def pages_needed(self, key: PrefixKey, base: PrefixMatch | None) -> int:
        """New pages that loading `key` onto `base` takes."""
        needed = self._state.pages_for(self._layout.tokens(key.length))
        if base is None or not self._may_grow(base, 0):
            return needed
        return needed - self._layout.tokens(base.behaviours) // self._state.page_tokens

    def publish(self, work: WorkInFlight, now_us: int, source: PrefixSource) -> CacheEntry | None:
        """Makes the work's pages visible; None, and the pages free, if it went stale meanwhile."""
        if not work.is_current:
            self.abort(work)
            return None
        entry = work.entry
        self._close(work)
        if work.base is None:
            entry.step(EntryState.READY)
            entry.pages = work.new_pages
            entry.key = work.key.held()
            entry.source = source
            self._demote_others(entry)
        else:
            self._journal.removed(entry)
            replaced = entry.pages[work.kept :]
            entry.pages = work.table
            self._account.orphaned += replaced.size - self._pool.drop(replaced)
            earlier = (*entry.key.marks, Mark(entry.key.length, entry.key.chain.digest))
            entry.key = work.key.held(tuple(mark for mark in earlier if mark.length <= work.start_behaviours))
            if work.kind is PendingKind.LOAD:
                entry.source = source
            self.readers.unpin(work.base)
        entry.tokens = work.tokens
        entry.unused_pre_infer = work.purpose is Purpose.PRE_INFER
        self._show(entry, now_us)
        self._journal.published(entry, now_us)
        return entry

    def restore(self, stored: Sequence[StoredEntry], now_us: int) -> None:
        """Shows what an earlier process left, in this order of use, before the tier is open.

        Raises ValueError if a page is not free.
        """
        if stored:
            self._pool.claim(np.concatenate([each.pages for each in stored]))
        for each in stored:
            entry = CacheEntry(self._next_number(), each.key, self._next_number())
            entry.step(EntryState.LOADING)
            entry.step(EntryState.READY)
            entry.pages, entry.tokens, entry.source = each.pages, each.tokens, each.source
            self._index.add(entry)
            self._show(entry, now_us)

    def open(self) -> None:
        """All is restored: other pages may be taken. Until then a tier with a journal gives none."""
        self._is_open = True

    def end_journal(self) -> None:
        """What happens to the entries from now on is this process's alone."""
        self._journal.end()

    def abort(self, work: WorkInFlight) -> None:
        """Gives the work's pages back. A new entry is EMPTY again; one that grew is as before."""
        self._close(work)
        self._give_up(work)
        # Whoever reads a prefix under way keeps its pages.
        self._account.orphaned += work.new_pages.size - self._pool.drop(work.new_pages)
        if work.base is not None:
            self.readers.unpin(work.base)

    def remove(self, entry: CacheEntry, reason: WasteReason) -> WorkInFlight | None:
        """Takes the entry out of the index; the open work, stale from now on.

        Its pages are free at once, or when their last reader leaves; those in flight when the work ends.
        """
        stale = entry.work
        if entry.is_visible:
            self._journal.removed(entry)
        self.leasing.count_waste(entry, reason)
        self._detach(entry)
        if entry.is_visible:
            entry.step(EntryState.EVICTED)
            self._account.orphaned += entry.pages.size - self._pool.drop(entry.pages)
        else:
            entry.step(EntryState.EMPTY)
        return stale

    def give_up_truncation(self, leased: PrefixMatch) -> WorkInFlight | None:
        """The work, if any, that would have taken a part of what was just leased away: stale from now on."""
        work = leased.entry.work
        if work is None or self._layout.tokens(leased.behaviours) <= work.start_tokens:
            return None
        self._give_up(work)
        return work

    # What users hold.

    def hold(self, held: Pin | WorkInFlight, until_us: int) -> None:
        """A handle has this pin, or a fill this work, until then at most. Later ones may not end earlier."""
        self._state.held_until_us[held] = until_us

    def take_overdue(self, now_us: int) -> list[Pin | WorkInFlight]:
        """Takes what was held too long from its holders. It keeps its pages, so that the device may go on with them."""
        until_us = self._state.held_until_us
        overdue = list(itertools.takewhile(lambda held: until_us[held] <= now_us, until_us))
        for held in overdue:
            del until_us[held]
            held.forced = True
            if isinstance(held, WorkInFlight):
                self._give_up(held)
        return overdue

    # How it is done.

    def _may_grow(self, base: PrefixMatch, own_pins: int) -> bool:
        entry = base.entry
        if entry.work is not None or not entry.attached:
            return False
        truncates = self._layout.tokens(base.behaviours) < entry.tokens
        # Growth from inside takes the old end away; whoever holds the entry may want just that.
        return not (truncates and (entry.leases or entry.pins > own_pins))

    def _begin_new(
        self, key: PrefixKey, kind: PendingKind, purpose: Purpose, tokens: int, now_us: int
    ) -> WorkInFlight | NoRoomReason:
        siblings = self._index.of_user(key.user_id)
        surplus = None
        if len(siblings) >= MAX_ENTRIES_PER_USER:
            surplus = next((entry for entry in siblings if self._is_evictable(entry)), None)
            if surplus is None:
                return NoRoomReason.FULL
        pages = self._take(self._state.pages_for(tokens), now_us)
        if pages is None:
            return NoRoomReason.FULL
        if surplus is not None and surplus.attached:
            self._evict(surplus)
        entry = CacheEntry(self._next_number(), key.held(), self._next_number())
        entry.step(EntryState.FILLING if kind is PendingKind.FILL else EntryState.LOADING)
        self._index.add(entry)
        return self._open(WorkInFlight(self._next_number(), kind, purpose, key, tokens, entry, entry.generation, pages))

    def _begin_growth(
        self,
        key: PrefixKey,
        kind: PendingKind,
        purpose: Purpose,
        tokens: int,
        now_us: int,
        base: PrefixMatch,
        own_pins: int,
    ) -> WorkInFlight | NoRoomReason:
        entry = base.entry
        start_tokens = self._layout.tokens(base.behaviours)
        whole, partial = divmod(start_tokens, self._state.page_tokens)
        # A partial tail page is written in place only where nobody else reads it, and never where that
        # would overwrite rows still shown. A load brings the whole page, so it never needs the old one.
        in_place = start_tokens == entry.tokens and entry.pins == own_pins and kind is PendingKind.FILL
        kept = whole + 1 if partial and in_place else whole
        pin = self.readers.pin(entry, base.behaviours)
        pages = self._take(self._state.pages_for(tokens) - kept, now_us)
        if pages is None:
            self.readers.unpin(pin)
            return NoRoomReason.FULL
        copies = partial and not in_place and kind is PendingKind.FILL
        work = WorkInFlight(self._next_number(), kind, purpose, key, tokens, entry, entry.generation, pages)
        work.base = pin
        work.kept = kept
        work.start_behaviours = base.behaviours
        work.start_tokens = start_tokens
        work.copy_page = PageCopy(int(pin.pages[whole]), int(pages[0])) if copies else None
        return self._open(work)

    def _open(self, work: WorkInFlight) -> WorkInFlight:
        work.entry.work = work
        self._state.works.add(work)
        self._account.in_flight += work.new_pages.size
        return work

    def _give_up(self, work: WorkInFlight) -> None:
        """Nothing will come of the work, and other work may begin in its place."""
        if work.is_current and work.base is None:
            self._detach(work.entry)
            work.entry.step(EntryState.EMPTY)
        elif work.is_current:
            work.entry.work = None
        work.generation = _NEVER

    def _close(self, work: WorkInFlight) -> None:
        if not work.open:
            raise ValueError("work in flight was ended twice")
        work.open = False
        self._state.works.remove(work)
        self._state.held_until_us.pop(work, None)
        self._account.in_flight -= work.new_pages.size
        if work.entry.work is work:
            work.entry.work = None

    def _take(self, count: int, now_us: int) -> PageArray | None:
        missing = count - self._pool.free
        if missing > self._account.held[Holding.EVICTABLE]:
            return None
        if missing > 0:
            chosen = []
            for number in self._policy.victims(now_us):
                entry = self._index[number]
                if self._is_evictable(entry):
                    chosen.append(entry)
                    missing -= entry.pages.size
                    if missing <= 0:
                        break
            for entry in chosen:
                self._evict(entry)
        return self._pool.take(count)

    def _is_evictable(self, entry: CacheEntry) -> bool:
        return entry.is_visible and entry.holding is Holding.EVICTABLE

    def _evict(self, entry: CacheEntry) -> None:
        self._counters.evictions[self.tier] += 1
        self._policy.evict(entry.number)
        self.remove(entry, WasteReason.EVICTED)

    def _weight(self, entry: CacheEntry) -> EntryWeight:
        identity = hash((entry.key.user_id, entry.key.namespace))
        return EntryWeight(entry.pages.size, entry.tokens, self.saved_us(entry.tokens), identity)

    def _demote_others(self, entry: CacheEntry) -> None:
        """A user's newer prefix makes the older ones the first to go."""
        for other in self._index.of_user(entry.key.user_id):
            if other is not entry:
                self._policy.demote(other.number)

    def _show(self, entry: CacheEntry, now_us: int) -> None:
        self._policy.add(entry.number, self._weight(entry), now_us)
        self._account.reclassify(entry)

    def _detach(self, entry: CacheEntry) -> None:
        self._index.remove(entry)
        self._policy.remove(entry.number)
        entry.attached = False
        entry.generation = self._next_number()
        entry.work = None
        self.leasing.end_all(entry)
        self._account.reclassify(entry)

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number
