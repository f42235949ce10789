"""One tier of a replay: the entries and numbers of pages that `TierMetadata` would have, without page tables.

A replay needs no page numbers, so a tier counts pages instead of listing them, and costs a tenth. The rules are those
of `relaygr.worker.cache.metadata`, and the policies are the worker's own. `tests/cli/test_replay_equality.py` plays
the same demands against the real cache and compares results and pages after each.

| operation | effect |
|---|---|
| `begin` | takes pages for a prefix, and evicts for them; None without room |
| `publish` | makes the pages visible; None if the entry was removed meanwhile |
| `abort` | gives the pages back |
| `pin`, `unpin` | a copy reads the first pages of an entry |
| `remove` | the entry leaves the index; pages that a copy reads are free when it ends |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from relaygr.replay.histories import PrefixHistory, covered_behaviours
from relaygr.worker.cache.metadata import EXPIRED_AT_ONCE, MAX_ENTRIES_PER_USER
from relaygr.worker.cache.policies import EntryWeight, EvictionPolicy
from relaygr.worker.kv import PrefixLayout


class Entry:
    """A prefix in one tier. It is invisible while it is loaded for the first time: `pages` is 0 then."""

    __slots__ = (
        "attached", "counted", "history", "is_leased", "number", "owner", "pages", "pins", "tokens", "user", "work",
    )  # fmt: skip

    def __init__(self, number: int, user: int, owner: int, history: PrefixHistory) -> None:
        self.number = number
        self.user = user
        self.owner = owner
        self.history = history
        self.pages = 0
        self.tokens = 0
        self.is_leased = False
        self.attached = True
        """Whether the entry is in the index."""
        self.counted = 0
        """Pages of the entry that count as evictable."""
        self.pins: list[Pin] = []
        self.work: Work | None = None


class Pin:
    """A copy that reads the first `pages` pages of an entry. `orphans`: those of them that the entry has lost."""

    __slots__ = ("entry", "orphans", "pages")

    def __init__(self, entry: Entry, pages: int) -> None:
        self.entry = entry
        self.pages = pages
        self.orphans: list[Orphans] = []


class Orphans:
    """Pages that left their entry while pins kept them: as many as the longest of these pins reads."""

    __slots__ = ("by_pin", "pages")

    def __init__(self, by_pin: dict[Pin, int]) -> None:
        self.by_pin = by_pin
        self.pages = max(by_pin.values())

    def leave(self, pin: Pin) -> int:
        """The pin has ended. Returns the number of pages that are free now."""
        del self.by_pin[pin]
        before, self.pages = self.pages, max(self.by_pin.values(), default=0)
        return before - self.pages


class Work:
    """Pages that are filled or loaded, for a new entry or after the first `kept` pages of one that grows.

    `base` pins the `start_tokens` tokens that are there already.
    """

    __slots__ = (
        "base", "entry", "first_tokens", "history", "is_current", "kept", "new_pages", "start_behaviours",
        "start_tokens", "tokens", "waiters",
    )  # fmt: skip

    def __init__(self, entry: Entry, history: PrefixHistory, tokens: int, new_pages: int) -> None:
        self.entry = entry
        self.history = history
        self.tokens = tokens
        self.new_pages = new_pages
        self.base: Pin | None = None
        self.kept = 0
        self.start_behaviours = 0
        self.start_tokens = 0
        self.is_current = True
        """False once the entry was removed, or the work was given up."""
        self.waiters: list[tuple[int, PrefixHistory, bool]] = []
        """Demands that wait for a reload: owner, history, whether it is a ranking."""
        self.first_tokens = 0
        """Tokens in HBM when the first of them began to wait."""


class Tier:
    """See the module. `saved_us` is the device time that a hit saves, by tokens."""

    def __init__(
        self,
        capacity_pages: int,
        page_tokens: int,
        layout: PrefixLayout,
        policy: EvictionPolicy,
        saved_us: Callable[[int], float],
    ) -> None:
        self.capacity = capacity_pages
        self.free = capacity_pages
        self.evictable = 0
        """Pages of visible entries that are neither pinned nor leased."""
        self.evictions = 0
        self.policy = policy
        self.by_user: dict[int, list[Entry]] = {}
        self.by_number: dict[int, Entry] = {}
        self.leases: dict[int, tuple[Entry, int]] = {}
        """The leased entry of a user, and the end of the lease."""
        self._open_works = 0
        self._page_tokens = page_tokens
        self._tokens_of = layout.tokens
        self._saved_us = saved_us
        self._saved: dict[int, float] = {}
        self._numbers = itertools.count(1)

    def find(self, user: int, history: PrefixHistory) -> tuple[Entry | None, int]:
        """The visible entry that covers most of the history, and the number of behaviours that it covers."""
        best, most = None, 0
        for entry in self.by_user.get(user, ()):
            if entry.pages:
                if entry.history is history and history.length > most:
                    return entry, history.length
                covered = covered_behaviours(history, entry.history)
                if covered > most:
                    best, most = entry, covered
        return best, most

    def find_work(self, user: int, history: PrefixHistory) -> tuple[Work | None, int]:
        """The work that will cover most of the history, and the number of behaviours that it will cover."""
        best, most = None, 0
        if not self._open_works:
            return best, most
        for entry in self.by_user.get(user, ()):
            if entry.work is not None:
                covered = covered_behaviours(history, entry.work.history)
                if covered > most:
                    best, most = entry.work, covered
        return best, most

    def expire(self, now_us: int) -> None:
        """Evicts entries that are evictable and expired by the policy."""
        numbers = list(itertools.islice(self.policy.expired(now_us), EXPIRED_AT_ONCE))
        self._evict([entry for entry in map(self.by_number.__getitem__, numbers) if entry.counted])

    # Leases. A user has at most one at a time.

    def begin_lease(self, entry: Entry, until_us: int) -> None:
        if not entry.is_leased:
            self.end_lease(entry.user)
            entry.is_leased = True
            self._protect(entry)
        self.leases[entry.user] = (entry, until_us)

    def end_lease(self, user: int) -> None:
        lease = self.leases.pop(user, None)
        if lease is not None:
            lease[0].is_leased = False
            self._settle(lease[0])

    # Pins.

    def pin(self, entry: Entry, tokens: int) -> Pin:
        """Pins the pages of the first `tokens` tokens."""
        pin = Pin(entry, -(-tokens // self._page_tokens))
        entry.pins.append(pin)
        self._protect(entry)
        return pin

    def unpin(self, pin: Pin) -> None:
        pin.entry.pins.remove(pin)
        for orphans in pin.orphans:
            self.free += orphans.leave(pin)
        self._settle(pin.entry)

    # Work.

    def pages_needed(self, tokens: int, base: Entry | None, covered: int) -> int:
        """Number of new pages that a load of `tokens` tokens onto the first `covered` behaviours of `base` takes."""
        needed = -(-tokens // self._page_tokens)
        if base is None or not self._may_grow(base, covered):
            return needed
        return needed - self._tokens_of(covered) // self._page_tokens

    def begin(
        self, user: int, owner: int, history: PrefixHistory, fills: bool, now_us: int, base: Entry | None, covered: int
    ) -> Work | None:
        """Takes pages for the tail after `covered` behaviours of `base` if that entry can grow, else for everything.

        `fills`: the tail is computed, and may be written into a page that is partly filled.
        """
        tokens = self._tokens_of(history.length)
        needed = -(-tokens // self._page_tokens)
        if not history.length or tokens <= 0 or needed > self.capacity:
            return None
        if base is None or not self._may_grow(base, covered):
            return self._begin_new(user, owner, history, tokens, needed, now_us)
        start_tokens = self._tokens_of(covered)
        kept, partial = divmod(start_tokens, self._page_tokens)
        if partial and fills and start_tokens == base.tokens and not base.pins:
            kept += 1
        pin = self.pin(base, start_tokens)
        if not self._take(needed - kept, now_us):
            self.unpin(pin)
            return None
        work = Work(base, history, tokens, needed - kept)
        work.base = pin
        work.kept = kept
        work.start_behaviours = covered
        work.start_tokens = start_tokens
        base.work = work
        self._open_works += 1
        return work

    def publish(self, work: Work, now_us: int) -> Entry | None:
        """Makes the work's pages visible. None, with the pages freed, if the work is not current any more."""
        if not work.is_current:
            self.abort(work)
            return None
        self._open_works -= 1
        entry = work.entry
        entry.work = None
        base = work.base
        if base is None:
            entry.pages = work.new_pages
            siblings = self.by_user[entry.user]
            if len(siblings) > 1:
                for other in siblings:
                    if other is not entry:
                        self.policy.demote(other.number)
        else:
            entry.pins.remove(base)
            replaced = entry.pages - work.kept
            if replaced:
                self.free += replaced - self._orphaned(entry, work.kept)
            entry.pages = work.kept + work.new_pages
            before = entry.history
            earlier = (*before.marks, (before.length, before.digest))
            if work.start_behaviours < before.length:
                earlier = tuple([mark for mark in earlier if mark[0] <= work.start_behaviours])
            entry.history = work.history.held(earlier)
        tokens = entry.tokens = work.tokens
        saved_us = self._saved.get(tokens)
        if saved_us is None:
            saved_us = self._saved[tokens] = self._saved_us(tokens)
        self.policy.add(entry.number, EntryWeight(entry.pages, tokens, saved_us, entry.owner), now_us)
        self._settle(entry)
        return entry

    def abort(self, work: Work) -> None:
        """Frees the work's pages. A new entry is gone; an entry that grew is as before."""
        self._open_works -= 1
        self.give_up(work)
        self.free += work.new_pages
        if work.base is not None:
            self.unpin(work.base)

    def give_up(self, work: Work) -> None:
        """The work will not be published. Other work may begin in its place."""
        if not work.is_current:
            return
        work.is_current = False
        work.entry.work = None
        if work.base is None:
            self._detach(work.entry)

    def remove(self, entry: Entry) -> Work | None:
        """Removes the entry from the index. Returns its open work, which is stale from now on."""
        stale = entry.work
        self._detach(entry)
        if entry.pages:
            self.free += entry.pages - self._orphaned(entry, 0)
        return stale

    # Helpers.

    def _settle(self, entry: Entry) -> None:
        """Counts the entry's pages as evictable or not, after a change of its pages, pins or lease."""
        counted = 0 if entry.pins or entry.is_leased or not entry.attached else entry.pages
        self.evictable += counted - entry.counted
        entry.counted = counted

    def _protect(self, entry: Entry) -> None:
        """The entry's pages are not evictable any more."""
        self.evictable -= entry.counted
        entry.counted = 0

    def _begin_new(
        self, user: int, owner: int, history: PrefixHistory, tokens: int, needed: int, now_us: int
    ) -> Work | None:
        siblings = self.by_user.get(user, ())
        surplus = None
        if len(siblings) >= MAX_ENTRIES_PER_USER:
            surplus = next((entry for entry in siblings if entry.counted), None)
            if surplus is None:
                return None
        if not self._take(needed, now_us):
            return None
        if surplus is not None and surplus.attached:
            self._evict([surplus])
        entry = Entry(next(self._numbers), user, owner, history)
        self.by_number[entry.number] = entry
        self.by_user.setdefault(user, []).append(entry)
        entry.work = Work(entry, history, tokens, needed)
        self._open_works += 1
        return entry.work

    def _may_grow(self, base: Entry, covered: int) -> bool:
        if base.work is not None or not base.attached:
            return False
        # Growth from inside the entry removes its old end, which a holder of the entry may need.
        return self._tokens_of(covered) >= base.tokens or not (base.is_leased or base.pins)

    def _take(self, pages: int, now_us: int) -> bool:
        missing = pages - self.free
        if missing > 0:
            if missing > self.evictable:
                return False
            chosen = []
            for number in self.policy.victims(now_us):
                entry = self.by_number[number]
                if entry.counted:
                    chosen.append(entry)
                    missing -= entry.pages
                    if missing <= 0:
                        break
            self._evict(chosen)
        self.free -= pages
        return True

    def _evict(self, entries: list[Entry]) -> None:
        """Evicts entries that are evictable: they have no readers, leases or work."""
        self.evictions += len(entries)
        for entry in entries:
            self.policy.evict(entry.number)
            self._leave_index(entry)
            self._protect(entry)
            self.free += entry.pages

    def _orphaned(self, entry: Entry, kept: int) -> int:
        """The entry has lost its pages from number `kept` on. Returns how many of them pins keep."""
        by_pin = {pin: pin.pages - kept for pin in entry.pins if pin.pages > kept}
        if not by_pin:
            return 0
        orphans = Orphans(by_pin)
        for pin in by_pin:
            pin.pages = kept
            pin.orphans.append(orphans)
        return orphans.pages

    def _leave_index(self, entry: Entry) -> None:
        entry.attached = False
        del self.by_number[entry.number]
        siblings = self.by_user[entry.user]
        if len(siblings) > 1:
            siblings.remove(entry)
        else:
            del self.by_user[entry.user]

    def _detach(self, entry: Entry) -> None:
        self._leave_index(entry)
        self.policy.remove(entry.number)
        if entry.work is not None:
            entry.work.is_current = False
            entry.work = None
        if entry.is_leased:
            entry.is_leased = False
            del self.leases[entry.user]
        self._protect(entry)
