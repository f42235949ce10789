"""Prefixes that other tiers have: reloads from DRAM, fetches from the pool, and requests that wait for room in HBM."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from relaygr.schemas.record import record
from relaygr.worker.cache import Declined, Hit, Miss, NoRoom, PendingKind, PendingOutcome, PendingPrefix
from relaygr.worker.executor.capacity import Capacity
from relaygr.worker.executor.parts import ExecutorParts
from relaygr.worker.executor.resolver import PrefixResolver
from relaygr.worker.executor.work import JobWork, RankingWork, ResolvedPrefix

if TYPE_CHECKING:
    # The simulation runs the executor without torch.
    from relaygr.worker.pool.tier import Fetch

MOST_RELOADS = 16
"""Reloads under way up to which requests that wait for room begin theirs. More would end no earlier, and the queue of
copies is bounded."""
ROOM_INTERVAL_US = 1_000
"""How often an idle device thread looks for room: a copy to DRAM gives its pages back without a notice."""


@record(frozen=True, slots=True)
class RoomWait:
    """A request that waits for `pages` pages of HBM, to reload its prefix. `pending` ends when the wait ends."""

    latest_start_us: int
    user_id: str
    pages: int
    pending: PendingPrefix


class Reloads:
    """Belongs to the device thread."""

    def __init__(self, parts: ExecutorParts, resolver: PrefixResolver, capacity: Capacity) -> None:
        self._cache, self._pool, self._clock = parts.cache, parts.pool, parts.clock
        self._resolver = resolver
        self._capacity = capacity
        self.waits: list[RoomWait] = []
        """Waits for room in HBM, the earliest latest start first."""
        self.awaited = 0
        """Requests that wait for a reload. Until it has looked up its prefix, such a request leases it."""

    def reload(
        self, prefix: ResolvedPrefix, found: Hit | Miss, deadline_us: int, rank_us: float = 0.0
    ) -> PendingPrefix | NoRoom | Declined | None:
        """Starts a reload if DRAM holds more of the prefix than HBM does, and copying ends earlier than computing,
        which waits for the ranking work on the device. None if DRAM holds no more.

        A ranking pass of `rank_us` may run beside the copy.
        """
        in_hbm, in_dram = self._cached(prefix, found)
        if in_dram <= in_hbm:
            return None
        saved_us, now_us = self._computing_us(in_hbm, in_dram), self._clock.monotonic_us()
        return self._cache.transfers.start_reload(prefix.key, deadline_us, now_us, saved_us, rank_us)

    def fetch(self, work: JobWork | RankingWork, prefix: ResolvedPrefix, found: Hit | Miss, at_us: int) -> Fetch | None:
        """As `fetch_missing`, once for each job and request."""
        if self._pool is None or work.asked_pool:
            return None
        fetch = self.fetch_missing(prefix, max(self._cached(prefix, found)), at_us)
        work.asked_pool = fetch is not None
        return fetch

    def fetch_missing(
        self, prefix: ResolvedPrefix, cached: int, at_us: int, *, saved_us: float | None = None
    ) -> Fetch | None:
        """Starts, or joins, a fetch of the prefix from the pool to DRAM, if that is expected to take less than
        `saved_us`: by default the time of computing what follows its first `cached` behaviours. It is needed at
        `at_us`. None without a pool.
        """
        pool = self._pool
        if pool is None or prefix.for_one_impression or self._resolver.is_forgotten(prefix):
            return None
        covered = pool.covered(prefix.key)
        if covered <= cached:
            return None
        saved_us = self._computing_us(cached, covered) if saved_us is None else saved_us
        return pool.fetch(prefix.key, cached, at_us, saved_us, self._clock.monotonic_us())

    def _cached(self, prefix: ResolvedPrefix, found: Hit | Miss) -> tuple[int, int]:
        """The prefix's behaviours in HBM, and in DRAM."""
        if isinstance(found, Hit):
            return found.handle.behaviours, self._cache.dram_behaviours(prefix.key)
        return 0, found.dram_behaviours

    def _computing_us(self, cached: int, wanted: int) -> float:
        """Time until the behaviours after the first `cached` are computed, behind the ranking work on the device."""
        layout = self._resolver.engine.layout
        return self._capacity.computed_in_us(layout.tokens(cached) if cached else 0, layout.tokens(wanted))

    def lease(self, work: RankingWork, prefix: ResolvedPrefix) -> bool:
        """Leases the prefix that a reload brings, for a request that waits for it. False if there is no such entry."""
        has_lease = self._cache.lease(prefix.key, work.request.request_id, work.deadline_us)
        self.awaited += has_lease
        return has_lease

    def end_wait(self, work: RankingWork) -> None:
        """The request waits for no copy any more, if it did. Its lease ends with the request."""
        wait, work.wait = work.wait, None
        if wait is not None:
            self.awaited -= wait.has_lease
            if wait.timer is not None:
                wait.timer.cancel()

    def has_more_urgent(self, latest_start_us: int) -> bool:
        """Whether more urgent requests wait for room."""
        return bool(self.waits) and self.waits[0].latest_start_us <= latest_start_us

    def wait_for_room(self, work: RankingWork, dram_behaviours: int) -> PendingPrefix | None:
        """A wait of a request for room in HBM, to reload its prefix: the requests whose prefixes fill HBM will be
        ranked and give their pages back. Without this wait most prefixes of a backlog would be computed although DRAM
        has them. None if no more urgent request waits, and no ranking request holds pages that it will give back.
        """
        engine = self._resolver.engine
        pages = engine.geometry.pages_for(engine.layout.tokens(dram_behaviours))
        if not (self.has_more_urgent(work.latest_start_us) or self.awaited or self._cache.room().held_pages):
            return None
        # The request loses no prefix by this wait.
        work.lookups = max(1, work.lookups - 1)
        pending = PendingPrefix(PendingKind.LOAD, dram_behaviours)
        wait = RoomWait(work.latest_start_us, work.request.user_id, pages, pending)
        insort(self.waits, wait, key=lambda each: each.latest_start_us)
        return pending

    def find_room(self) -> bool:
        """Ends the waits that may go on: there is room, or room can not come. Returns whether a wait ended."""
        room = self._cache.room()
        free_pages, reloads, is_open = room.free_pages, room.reloads, True
        may_come = room.held_pages > 0 or self.awaited > 0
        if may_come and (reloads >= MOST_RELOADS or self.waits[0].pages > free_pages):
            return False
        users, kept = set(), []
        for wait in self.waits:
            if wait.user_id not in users and may_come:
                # A long prefix is not passed by shorter ones, which could keep it waiting for ever.
                is_open = is_open and reloads < MOST_RELOADS and wait.pages <= free_pages
                if not is_open:
                    kept.append(wait)
                    continue
                free_pages, reloads = free_pages - wait.pages, reloads + 1
            users.add(wait.user_id)
            wait.pending.finish(PendingOutcome.PUBLISHED)
        has_ended, self.waits = len(kept) < len(self.waits), kept
        return has_ended

    def end_wait_for_room(self, pending: PendingPrefix) -> None:
        """The request gave up this wait. Does nothing if it was no wait for room."""
        self.waits = [wait for wait in self.waits if wait.pending is not pending]
