"""The prefix cache: two tiers of pages under one lock. Copies between the tiers are in `transfers`.

The poll thread calls it for leases, the device thread to acquire, reserve, publish, release and spill, and the copy
threads when a copy has ended. A section under the lock is short and does no I/O. The cache calls waiters, listeners
and the mover after it has left the lock. No call waits for free pages: if all pages are pinned, it returns `NoRoom`.

| operation | returns | effect |
|---|---|---|
| `peek`, `dram_behaviours`, `room` | Presence, a number, Room | none |
| `acquire` | Hit, PendingPrefix, Miss | a hit is pinned until `release` |
| `count_look_up` | Tier, None | counts the look-up of a request that waits for work it knows |
| `reserve`, `extend` | Fill, NoRoom, PendingPrefix | the caller computes, then calls `Fill.publish` or `Fill.abort` |
| `transfers.start_reload` | PendingPrefix, NoRoom, Declined | copies DRAM to HBM; call `acquire` after PUBLISHED |
| `transfers.spill` | SpillOutcome | copies HBM to DRAM |
| `revoke_overdue` | a number | takes back handles and fills that were held far too long |
| `lease`, `end_lease`, `expire_leases` | | an unpinned entry stays while it is leased |

Single flight: every request for a prefix that is being filled or loaded gets the same `PendingPrefix`. If the
prefix is ready already, `reserve` and `start_reload` return a `PendingPrefix` that has ended with PUBLISHED.
All times are monotonic microseconds and are passed in. A copy ends at the latest time passed in so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import structlog

from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache.copies import Mover, NoMover
from relaygr.worker.cache.entries import CacheEntry, Handle, Hit, Pin, Presence, WorkInFlight
from relaygr.worker.cache.fill import Fill, count_abort
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.journal import StoredEntry, TierJournal
from relaygr.worker.cache.ledger import AfterLock, PendingPrefix, TierLedger
from relaygr.worker.cache.metadata import TierMetadata, TierShape
from relaygr.worker.cache.policies import TierPolicies, make_policy
from relaygr.worker.cache.results import (
    Miss,
    MissReason,
    NoRoom,
    NoRoomReason,
    PageArray,
    PendingKind,
    PendingOutcome,
    Purpose,
    Room,
    Tier,
    WasteReason,
)
from relaygr.worker.cache.stats import CacheStats, Counters, snapshot_of
from relaygr.worker.cache.transfers import SpillGate, TierTransfers
from relaygr.worker.kv import DramGeometry, PrefixLayout

_log = structlog.get_logger()

LEASE_LIMIT = 65_536
LONGEST_HOLD_US = 180_000_000
"""A handle or fill that is held for longer counts as leaked. No request, job or forward holds one nearly as long: a
job may wait 60 s with a handle or a fill, and a device that takes 10 s for a forward is stuck."""
_BATCH = 256
"""Most entries that one section under the lock removes, restores or demotes."""


class Completion(Protocol):
    """An event of the device, seen from the host."""

    def add_done_callback(self, callback: Callable[[], None]) -> object:
        """Calls `callback()` once the event is complete, from any thread; at once if it is."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes and rules of a cache. `geometry` is the shape of a page in both tiers."""

    geometry: DramGeometry
    layout: PrefixLayout
    hbm_pages: int
    dram_pages: int = 0
    policies: TierPolicies = field(default_factory=TierPolicies)
    lease_limit: int = LEASE_LIMIT
    layer_wise: bool = False
    """Rankings may begin on a whole prefix while its last layers are still copied from DRAM."""
    longest_hold_us: int = LONGEST_HOLD_US


class PrefixCache:
    """See the module."""

    def __init__(
        self,
        config: CacheConfig,
        mover: Mover | None = None,
        *,
        spill_gate: SpillGate | None = None,
        dram_journal: TierJournal | None = None,
    ) -> None:
        """`mover` makes the copies between the tiers. Without one nothing is spilled or reloaded.

        With a `dram_journal` the DRAM tier takes no entries before `restore`.
        """
        geometry, policies = config.geometry, config.policies
        counters = Counters()

        def tier_of(tier: Tier, pages: int, journal: TierJournal | None) -> TierMetadata:
            shape = TierShape(tier, pages, geometry.kv.page_tokens, config.layout)
            name = policies.hbm if tier is Tier.HBM else policies.dram
            policy = make_policy(name, pages)
            return TierMetadata(shape, policy, counters, config.lease_limit, journal)

        hbm, dram = tier_of(Tier.HBM, config.hbm_pages, None), tier_of(Tier.DRAM, config.dram_pages, dram_journal)
        self.geometry = geometry
        """The shape of a page in both tiers."""
        self.ledger = TierLedger(hbm, dram, counters)
        """For modules of the cache and their tests."""
        gate = spill_gate if spill_gate is not None else SpillGate(20_000.0, 50_000.0)
        num_layers = geometry.kv.num_layers if config.layer_wise else 0
        self.transfers = TierTransfers(
            self.ledger, mover if mover is not None else NoMover(), gate, geometry.page_bytes, num_layers
        )
        """Spills and reloads."""
        self._hbm, self._dram = hbm, dram
        self._layout = config.layout
        self._is_exact = geometry.is_exact
        self._deleted_users: set[str] = set()
        self._deleted_early: list[Callable[[str], bool]] = []
        """`_deleted_users` and this: the users whose prefixes `restore` must not bring back."""
        self._longest_hold_us = config.longest_hold_us

    # Looking up and pinning.

    def peek(self, key: PrefixKey) -> Presence:
        """Returns how much of `key` each tier has. Changes and counts nothing."""
        with self.ledger.lock:
            hbm, dram = self._hbm.index.find(key), self._dram.index.find(key)
        return Presence(hbm.behaviours if hbm else 0, dram.behaviours if dram else 0)

    def in_hbm(self, users: Iterable[str]) -> list[str]:
        """Returns which of the users have a prefix in HBM. Changes and counts nothing."""
        with self.ledger.lock:
            return [user_id for user_id in users if user_id in self._hbm.index.by_user]

    def dram_behaviours(self, key: PrefixKey) -> int:
        """Returns how much of `key` DRAM has. Changes and counts nothing."""
        with self.ledger.lock:
            found = self._dram.index.find(key)
        return found.behaviours if found is not None else 0

    def room(self) -> Room:
        """Returns how many pages of HBM a fill or a reload could take, now and soon. Changes and counts nothing."""
        with self.ledger.lock:
            return self._hbm.room()

    def acquire(
        self,
        key: PrefixKey,
        now_us: int,
        join: bool = True,
        purpose: Purpose = Purpose.RANKING,
        arriving: int | None = None,
    ) -> Hit | PendingPrefix | Miss:
        """Pins the longest part of `key` that is ready in HBM.

        With `join`, work in flight that will cover more is returned instead; a caller that cannot wait for it calls
        again without `join`. A reload of at least `arriving` behaviours whose first layer has arrived is a hit, too:
        its handle then has an `arrival`. Only look-ups for RANKING are counted, each once. Look-ups for RANKING and
        AGAIN mark a pre-infer as used.
        """
        ledger = self.ledger
        with ledger.lock:
            ledger.pass_time(now_us)
            refusal = ledger.refusal(key)
            if refusal is not None:
                ledger.counters.misses[refusal] += purpose is Purpose.RANKING
                return Miss(refusal)
            return self._look_up(key, now_us, join, purpose, arriving)

    def _look_up(
        self, key: PrefixKey, now_us: int, join: bool, purpose: Purpose, arriving: int | None
    ) -> Hit | PendingPrefix | Miss:
        """The result of `acquire` for a key that may match. Counts the look-up."""
        ledger, hbm, counters = self.ledger, self._hbm, self.ledger.counters
        counted = purpose is Purpose.RANKING
        found = hbm.index.find(key)
        covered = found.behaviours if found else 0
        coming = hbm.index.find_work(key) if join and covered < key.length else None
        if coming is not None and coming.behaviours > covered:
            work = coming.work
            arrival = work.arrival if arriving is not None and coming.behaviours >= arriving else None
            if arrival is not None and arrival.begun:
                counters.hits += counted
                tokens, is_complete = self._layout.tokens(coming.behaviours), coming.behaviours == key.length
                counters.partial_hits += counted and not is_complete
                pin = hbm.pin(work.entry, work.table, tokens, ledger.latest_us + self._longest_hold_us)
                handle = Handle(
                    coming.behaviours,
                    tokens,
                    pin.pages,
                    is_complete,
                    PrefixSource.DRAM,
                    pin,
                    not self._is_exact,
                    arrival,
                )
                return Hit(handle)
            counters.joins[work.kind] += counted
            return ledger.pending[work]
        if found is not None:
            self._count_found(found.entry, covered, key, now_us, purpose)
            return Hit(self._handle_of(found.entry, covered, key))
        miss = ledger.miss(key)
        counters.misses[miss.reason] += counted
        return miss

    def count_look_up(self, key: PrefixKey, now_us: int) -> Tier | None:
        """Counts a look-up for RANKING, as `acquire` does, for a caller who knows what he waits for: pins nothing.

        Returns where the prefix, or its beginning, was found ready.
        """
        ledger, hbm = self.ledger, self._hbm
        counters = ledger.counters
        with ledger.lock:
            ledger.pass_time(now_us)
            refusal = ledger.refusal(key)
            if refusal is not None:
                counters.misses[refusal] += 1
                return None
            found, coming = hbm.index.find(key), hbm.index.find_work(key)
            covered = found.behaviours if found else 0
            if coming is not None and coming.behaviours > covered:
                counters.joins[coming.work.kind] += 1
                return None
            if found is not None:
                self._count_found(found.entry, covered, key, now_us, Purpose.RANKING)
                return Tier.HBM
            miss = ledger.miss(key)
            counters.misses[miss.reason] += 1
            return Tier.DRAM if miss.reason is MissReason.IN_DRAM else None

    def _count_found(self, entry: CacheEntry, covered: int, key: PrefixKey, now_us: int, purpose: Purpose) -> None:
        """A look-up found the prefix, or its first `covered` behaviours, ready in HBM."""
        self._hbm.touch(entry, now_us)
        if purpose is not Purpose.PRE_INFER:
            entry.unused_pre_infer = False
        counted = purpose is Purpose.RANKING
        self.ledger.counters.hits += counted
        self.ledger.counters.partial_hits += counted and covered < key.length

    def release(self, handle: Handle) -> None:
        """Unpins. Raises ValueError the second time. For a revoked handle it only counts a late release."""
        with self.ledger.lock:
            if handle.pin.revoked:
                self.ledger.counters.late_releases += 1
            else:
                self._hbm.unpin(handle.pin)

    def revoke_overdue(self, now_us: int, after: Completion | None = None) -> int:
        """Revokes handles and fills that were held far too long. Returns their number.

        The thread that gives the device its work calls it, with an event after all of that work. The device may use
        the pages until it has passed `after`; they are free then. A holder sees that its handle is not held, or its
        fill not current, and gives the device no more work on it. Requests that wait for such a fill get FAILED.
        """
        ledger = self.ledger
        with ledger.section as calls:
            ledger.pass_time(now_us)
            overdue = self._hbm.revoke_overdue(now_us)
            for held in overdue:
                if isinstance(held, Pin):
                    ledger.counters.forced_unpins += 1
                else:
                    ledger.counters.forced_aborts += 1
                    count_abort(ledger, calls, held)
        for held in overdue:
            if isinstance(held, Pin):
                _log.error("a handle was never released", pages=held.pages.size, tokens=held.entry.tokens)
            else:
                _log.error("a fill was never ended", pages=held.new_pages.size, tokens=held.tokens)
            if after is None:
                self._free(held)
            else:
                after.add_done_callback(partial(self._free, held))
        return len(overdue)

    # Computing.

    def reserve(
        self, key: PrefixKey, now_us: int, purpose: Purpose = Purpose.PRE_INFER
    ) -> Fill | NoRoom | PendingPrefix:
        """Reserves pages to compute `key` into: only for the tail, if an entry covers the beginning."""
        return self._reserve(key, now_us, purpose, None)

    def extend(
        self, handle: Handle, key: PrefixKey, now_us: int, purpose: Purpose = Purpose.RANKING
    ) -> Fill | NoRoom | PendingPrefix:
        """`reserve`, for a caller whose own handle on the entry must not make its tail page shared.

        The handle does not change, and the caller still releases it.
        """
        return self._reserve(key, now_us, purpose, handle)

    def _reserve(
        self, key: PrefixKey, now_us: int, purpose: Purpose, own: Handle | None
    ) -> Fill | NoRoom | PendingPrefix:
        ledger, hbm = self.ledger, self._hbm
        with ledger.lock:
            ledger.pass_time(now_us)
            refusal = ledger.refusal(key)
            if refusal is not None:
                return self._no_room(NoRoomReason(refusal.value))
            found, coming = hbm.index.find(key), hbm.index.find_work(key)
            covered = found.behaviours if found else 0
            if covered == key.length and found is not None:
                return PendingPrefix(PendingKind.FILL, covered, PendingOutcome.PUBLISHED)
            if coming is not None and coming.behaviours > covered:
                return ledger.pending[coming.work]
            own_pins = int(own is not None and own.pin.open and found is not None and own.pin.entry is found.entry)
            work = hbm.begin(key, PendingKind.FILL, purpose, found, own_pins)
            if isinstance(work, NoRoomReason):
                return self._no_room(work)
            ledger.counters.appends += work.base is not None
            ledger.pending[work] = PendingPrefix(PendingKind.FILL, key.length)
            hbm.held_until_us[work] = ledger.latest_us + self._longest_hold_us
            return Fill(ledger, work, self._handle_of)

    # Leases.

    def lease(self, key: PrefixKey, request_id: str, until_us: int) -> bool:
        """Protects the entry in HBM that serves `key`, or will serve it, from eviction until `until_us`.

        False if there is no such entry, or if there are too many leases.
        """
        ledger, hbm = self.ledger, self._hbm
        with ledger.section as after:
            found, coming = hbm.index.find(key), hbm.index.find_work(key)
            covered = found.behaviours if found else 0
            entry = found.entry if found else None
            if coming is not None and coming.behaviours > covered:
                entry = coming.work.entry
            if entry is None or not hbm.begin_lease(entry, request_id, until_us):
                return False
            if found is not None and entry is found.entry:
                stale = hbm.give_up_truncation(found)
                if stale is not None:
                    ledger.finish(after, stale, PendingOutcome.INVALIDATED)
            ledger.counters.leases_granted += 1
            return True

    def end_lease(self, user_id: str, request_id: str, wasted: WasteReason | None = None) -> bool:
        """Ends the lease of this user's request. False if it has none.

        `wasted`: the reason to count the pre-infer as wasted, if nothing used the prefix and no other request leases
        it.
        """
        with self.ledger.lock:
            return self._hbm.end_lease(user_id, request_id, wasted)

    def expire_leases(self, now_us: int) -> int:
        """Ends the leases whose time is over, and counts them as leaked. Returns their number."""
        with self.ledger.section:
            self.ledger.pass_time(now_us)
            expired = self._hbm.expire_leases(now_us)
            self.ledger.counters.leases_leaked += expired
            return expired

    # Removing. Readers keep their pages, and work in flight is discarded when it ends.

    def invalidate_user(self, user_id: str) -> int:
        """Removes all entries of the user from both tiers, those included that `restore` brings later. Returns the
        number of those that are there now.
        """
        ledger = self.ledger
        with ledger.section as after:
            if not self._dram.is_open:
                self._deleted_users.add(user_id)
            entries = [(tier, entry) for tier in ledger.tiers for entry in tier.index.of_user(user_id)]
            ledger.remove(after, entries)
            return len(entries)

    def invalidate_users(self, deleted: Callable[[str], bool]) -> int:
        """`invalidate_user` for every user that `deleted` accepts, in batches. It visits every user in the cache."""
        ledger = self.ledger
        with ledger.lock:
            if not self._dram.is_open:
                self._deleted_early.append(deleted)
        removed, remaining = 0, self._users_that(deleted)
        while batch := list(itertools.islice(remaining, _BATCH)):
            with ledger.section as after:
                entries = [(tier, each) for tier in ledger.tiers for user in batch for each in tier.index.of_user(user)]
                ledger.remove(after, entries)
                removed += len(entries)
        return removed

    def begin_cleaning(self, tier: Tier, max_bytes: int) -> PageArray:
        """Takes free pages that may still hold bytes of a removed prefix, at most one page or `max_bytes`. The caller
        zeroes them, and calls `end_cleaning`.
        """
        with self.ledger.lock:
            return self._tier(tier).begin_cleaning(max(1, max_bytes // self.page_bytes(tier)))

    def end_cleaning(self, tier: Tier) -> None:
        """The pages hold zeros, and are free."""
        with self.ledger.lock:
            self._tier(tier).end_cleaning()

    def _tier(self, tier: Tier) -> TierMetadata:
        return self._hbm if tier is Tier.HBM else self._dram

    def drop_namespace(self, namespace: bytes) -> int:
        """Removes all entries of one model, in batches. Returns their number."""
        ledger, dropped = self.ledger, 0
        while True:
            with ledger.section as after:
                entries = [
                    (tier, entry) for tier in ledger.tiers for entry in tier.index.of_namespace(namespace, _BATCH)
                ]
                if not entries:
                    return dropped
                ledger.remove(after, entries)
                dropped += len(entries)

    def admit_only(self, namespace: bytes) -> None:
        """From now on only keys of this model match or get pages. Entries of other models stay until `keep_only`."""
        with self.ledger.lock:
            self.ledger.only_namespace = namespace

    def keep_only(self, namespace: bytes) -> int:
        """`admit_only`, then removes the entries of all other models. Returns their number."""
        self.admit_only(namespace)
        return self._drop_all_but(namespace)

    def demote(self, users: Iterable[str] | Callable[[str], bool]) -> int:
        """Puts the entries of these users first in the order of eviction. Returns their number. They stay usable."""
        ledger = self.ledger
        if callable(users):
            users = self._users_that(users)
        demoted = 0
        remaining = iter(users)
        while batch := list(itertools.islice(remaining, _BATCH)):
            with ledger.lock:
                for tier, user_id in itertools.product(ledger.tiers, batch):
                    for entry in tier.index.of_user(user_id):
                        tier.demote(entry)
                        demoted += 1
        return demoted

    def held_bytes(self, users: Callable[[str], bool]) -> int:
        """Bytes of the pages of these users' prefixes, in both tiers."""
        ledger, held = self.ledger, 0
        remaining = self._users_that(users)
        while batch := list(itertools.islice(remaining, _BATCH)):
            with ledger.lock:
                for tier, user_id in itertools.product(ledger.tiers, batch):
                    pages = sum(len(entry.pages) for entry in tier.index.of_user(user_id))
                    held += pages * self.page_bytes(tier.tier)
        return held

    def clear(self) -> None:
        """Empties both tiers and every index, in batches."""
        self._drop_all_but(None)

    def close(self) -> None:
        """Ends the copies (those in the queue fail), then clears both tiers. A journal keeps its entries."""
        self.transfers.close()
        with self.ledger.lock:
            self._dram.end_journal()
        self.clear()

    # Restoring and counting.

    def restore(self, stored: Sequence[StoredEntry], now_us: int) -> None:
        """Puts the entries of the journal back into DRAM, the least recently used first, and opens the tier. Entries of
        users that were invalidated before are removed again.

        Until then a tier with a journal takes no entries; all other operations work. Raises ValueError if two entries
        claim one page.
        """
        for start in range(0, len(stored), _BATCH):
            with self.ledger.section as after:
                self.ledger.pass_time(now_us)
                self._dram.restore(stored[start : start + _BATCH], now_us)
                self._remove_deleted(after, {each.key.user_id for each in stored[start : start + _BATCH]})
        with self.ledger.section as after:
            self.ledger.pass_time(now_us)
            if self._deleted_users or self._deleted_early:
                # Users that were invalidated after `restore` had restored their batch.
                self._remove_deleted(after, self._dram.index.by_user)
            self._deleted_users.clear()
            self._deleted_early.clear()
            self._dram.open()

    def _remove_deleted(self, after: AfterLock, users: Iterable[str]) -> None:
        """Removes the restored entries of these users that were invalidated before."""
        deleted = [
            user
            for user in users
            if user in self._deleted_users or any(accepts(user) for accepts in self._deleted_early)
        ]
        self.ledger.remove(after, [(self._dram, each) for user in deleted for each in self._dram.index.of_user(user)])

    def page_bytes(self, tier: Tier) -> int:
        """Bytes of a page of the tier."""
        return self.geometry.kv.page_bytes if tier is Tier.HBM else self.geometry.page_bytes

    def stats(self) -> CacheStats:
        """A snapshot of the counters, and of the pages of both tiers."""
        with self.ledger.lock:
            return CacheStats(
                **snapshot_of(self.ledger.counters),
                hbm=self._hbm.stats(),
                dram=self._dram.stats(),
                hbm_page_bytes=self.geometry.kv.page_bytes,
                dram_page_bytes=self.geometry.page_bytes,
                leases=len(self._hbm.leases),
            )

    # Helpers. `_users_that`, `_drop_all_but` and `_free` take the lock; callers of the others hold it.

    def _users_that(self, accepts: Callable[[str], bool]) -> Iterator[str]:
        """The users in the cache that `accepts` accepts. The lock is held only to copy the names."""
        with self.ledger.lock:
            known = {user_id for tier in self.ledger.tiers for user_id in tier.index.by_user}
        return filter(accepts, known)

    def _handle_of(self, entry: CacheEntry, behaviours: int, key: PrefixKey) -> Handle:
        """Pins the first `behaviours` of a ready entry, for a caller that looked up `key`."""
        tokens = entry.tokens if behaviours == entry.key.length else self._layout.tokens(behaviours)
        pin = self._hbm.pin(entry, entry.pages, tokens, self.ledger.latest_us + self._longest_hold_us)
        approximate = entry.source is PrefixSource.DRAM and not self._is_exact
        return Handle(behaviours, tokens, pin.pages, behaviours == key.length, entry.source, pin, approximate)

    def _no_room(self, reason: NoRoomReason) -> NoRoom:
        self.ledger.counters.no_room[reason] += 1
        return NoRoom(reason)

    def _drop_all_but(self, namespace: bytes | None) -> int:
        """Removes the entries of all models but one, or of all for None. Returns their number."""
        with self.ledger.lock:
            others = {other for tier in self.ledger.tiers for other in tier.index.by_namespace} - {namespace}
        return sum(self.drop_namespace(other) for other in others)

    def _free(self, revoked: Pin | WorkInFlight) -> None:
        with self.ledger.lock:
            if isinstance(revoked, Pin):
                self._hbm.unpin(revoked)
            else:
                self._hbm.abort(revoked)
