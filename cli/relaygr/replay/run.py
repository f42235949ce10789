"""Plays demands against the policies of the worker, as a worker would, with a simulated link.

| demand | effect |
|---|---|
| prepare | reloads from DRAM if that pays, computes the rest, and leases the prefix |
| rank | the same; then ends the lease and spills the prefix |
| forget | invalidates the user's prefixes |

The part of the prefix in HBM is counted once for each visit, at its first look-up. Reloads and computations after that
are counted when they happen. A *hit* is a visit that found everything it could reuse: what its history has in common
with the user's previous visit. So a first visit is never a hit. Computing takes no time.

`CacheReplay` makes the decisions of `PrefixCache` and `TierTransfers` on `Tier`, which counts pages. It asks the
worker's policies, `reload_pays` and `CopyQueue` themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from relaygr.admission.latency import LatencyModel
from relaygr.replay.demand import NO_VISIT, SAME, DemandKind, DemandRow, Demands
from relaygr.replay.histories import HistoryMaker, PrefixHistory
from relaygr.replay.link import LinkSpeed, VirtualLink
from relaygr.replay.tiers import Entry, Pin, Tier, Work
from relaygr.worker.cache import Tier as TierName
from relaygr.worker.cache.cache import LEASE_LIMIT
from relaygr.worker.cache.copies import CopyPriority, Deadline
from relaygr.worker.cache.policies import VISIT_US, PolicyOptions, TierPolicies, make_policy
from relaygr.worker.cache.transfers import FAR_FUTURE_US, reload_pays
from relaygr.worker.kv import DramGeometry, PrefixLayout

_PROGRESS_DEMANDS = 1024
_NO_DEADLINE = Deadline(FAR_FUTURE_US)
_RANK, _FORGET = int(DemandKind.RANK), int(DemandKind.FORGET)


@dataclass(frozen=True, slots=True)
class ReplayEnvironment:
    """The conditions of all candidates: the shape of K,V, the device's latency, and the link between the tiers."""

    geometry: DramGeometry
    layout: PrefixLayout
    latency: LatencyModel
    link: LinkSpeed


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cache to compare: its policies and sizes."""

    policies: TierPolicies
    hbm_bytes: int
    dram_bytes: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Totals of one replay. Tokens are tokens of prefixes; bytes are those that crossed the link."""

    candidate: Candidate
    visits: int
    hbm_hits: int
    dram_hits: int
    """Visits whose reusable part was in DRAM but not in HBM."""
    asked_tokens: int
    asked_us: float
    """Device time to compute the whole prefix of every visit."""
    hbm_tokens: int
    """Tokens found in HBM at the first look-up of a visit."""
    reloaded_tokens: int
    recomputed_tokens: int
    """Tokens computed, including first visits and growth."""
    recomputed_us: float
    """Device time of these computations."""
    spilled_bytes: int
    reloaded_bytes: int
    hbm_evictions: int
    dram_evictions: int
    no_room: int
    """Prefixes that were computed but not cached for lack of room."""


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy of a number of pages, for the link."""

    target: TierName
    priority: CopyPriority
    deadline: Deadline
    pages: int
    on_done: Callable[[bool], None]

    def size_bytes(self, page_bytes: int) -> int:
        return self.pages * page_bytes


@dataclass(slots=True)
class _Counted:
    """What a replay counts itself."""

    visits: int = 0
    hbm_hits: int = 0
    dram_hits: int = 0
    hbm_tokens: int = 0
    reloaded_tokens: int = 0
    recomputed_tokens: int = 0
    recomputed_us: float = 0.0
    no_room: int = 0


class CacheReplay:
    """One replay. Call `play` for each demand in order, then `result`."""

    def __init__(self, demands: Demands, environment: ReplayEnvironment, candidate: Candidate) -> None:
        self._demands = demands
        self._candidate = candidate
        self._environment = environment
        self._latency = environment.latency
        self._tokens_of = environment.layout.tokens
        geometry = environment.geometry
        self._page_bytes = geometry.page_bytes
        self.link = VirtualLink(geometry.page_bytes, environment.link)

        def tier_of(name: TierName) -> Tier:
            is_hbm, policies = name is TierName.HBM, candidate.policies
            pages = (
                candidate.hbm_bytes // geometry.kv.page_bytes if is_hbm else candidate.dram_bytes // geometry.page_bytes
            )
            policy = make_policy(policies.hbm if is_hbm else policies.dram, PolicyOptions(pages, policies.ttl_us))
            return Tier(pages, geometry.kv.page_tokens, environment.layout, policy, environment.latency.pre_us)

        self.hbm, self.dram = tier_of(TierName.HBM), tier_of(TierName.DRAM)
        self._users: list[int] = demands.users.tolist()
        self._histories = HistoryMaker()
        self._latest: list[PrefixHistory | None] = [None] * len(self._users)
        """The latest history of each owner."""
        self._latest_us = 0
        """The time of spills, which have none of their own."""
        self._expires_us = 0
        self._lease_ends: deque[tuple[int, int]] = deque()
        """(end, user) of leases, some of which have ended or moved. Every lease has the same length."""
        self._counted = _Counted()

    def play(self, demand: DemandRow) -> None:
        """Plays one demand. Times may not decrease."""
        kind, now_us, owner, length, shared, reusable = demand
        link = self.link
        link.advance(now_us)
        if now_us >= self._expires_us:
            self._expire(now_us)
        history = self._latest[owner]
        if history is None:
            history = self._latest[owner] = self._histories.first(length)
        elif shared != SAME:
            history = self._latest[owner] = self._histories.after(history, shared, length)
        user = self._users[owner]
        if kind == _FORGET:
            self._forget(user)
            return
        if now_us > self._latest_us:
            self._latest_us = now_us
        found, covered = self.hbm.find(user, history)
        if found is not None:
            self.hbm.policy.touch(found.number, now_us)
        ranks = kind == _RANK
        if covered == length:
            if reusable != NO_VISIT:
                self._count(covered, covered, reusable)
            self._keep(user, history, found, covered, now_us, ranks)
            return
        stored, stored_behaviours = self.dram.find(user, history)
        if reusable != NO_VISIT:
            self._count(covered, stored_behaviours, reusable)
        if stored is not None and stored_behaviours > covered:
            work = self._reload(owner, history, found, covered, stored, stored_behaviours, now_us)
            if work is not None:
                work.waiters.append((owner, history, ranks))
                return
            # The copy queue may have refused the reload after the tier had evicted for it.
            found, covered = self.hbm.find(user, history)
        self._compute(owner, history, found, covered, ranks)

    def result(self) -> ReplayResult:
        """Completes the copies under way and returns the totals."""
        self.link.run()
        counted, environment = self._counted, self._environment
        lengths = self._demands.visit_lengths
        tokens = np.where(lengths > 0, environment.layout.tokens(lengths), 0)  # type: ignore[arg-type]
        asked_us = environment.latency.pre_us(tokens.astype(np.float64))  # type: ignore[arg-type]
        return ReplayResult(
            candidate=self._candidate,
            visits=counted.visits,
            hbm_hits=counted.hbm_hits,
            dram_hits=counted.dram_hits,
            asked_tokens=int(tokens.sum()),
            asked_us=float(np.sum(asked_us)),
            hbm_tokens=counted.hbm_tokens,
            reloaded_tokens=counted.reloaded_tokens,
            recomputed_tokens=counted.recomputed_tokens,
            recomputed_us=counted.recomputed_us,
            spilled_bytes=self.link.moved_bytes[TierName.DRAM],
            reloaded_bytes=self.link.moved_bytes[TierName.HBM],
            hbm_evictions=self.hbm.evictions,
            dram_evictions=self.dram.evictions,
            no_room=counted.no_room,
        )

    def _count(self, covered: int, stored_behaviours: int, reusable: int) -> None:
        """Counts a visit that found these behaviours in HBM and in DRAM."""
        counted = self._counted
        counted.visits += 1
        if covered:
            counted.hbm_tokens += self._tokens_of(covered)
        if reusable:
            if covered >= reusable:
                counted.hbm_hits += 1
            elif stored_behaviours >= reusable:
                counted.dram_hits += 1

    def _reload(
        self, owner: int, history: PrefixHistory, found: Entry | None, covered: int, stored: Entry,
        stored_behaviours: int, now_us: int,
    ) -> Work | None:  # fmt: skip
        """Starts to copy `stored_behaviours` from DRAM to HBM. None if that does not pay, or if there is no room."""
        user, hbm, dram = self._users[owner], self.hbm, self.dram
        coming, coming_behaviours = hbm.find_work(user, history)
        if coming is not None and coming_behaviours >= stored_behaviours:
            return coming
        target = stored.history.head(stored_behaviours)
        in_hbm = self._tokens_of(covered) if covered else 0
        in_dram = self._tokens_of(stored_behaviours)
        if target is None:
            return None
        saved_us = self._latency.append_us(in_hbm, in_dram - in_hbm)
        pages = hbm.pages_needed(in_dram, found, covered)
        if not reload_pays(self.link.forecast(pages * self._page_bytes, CopyPriority.RELOAD), saved_us):
            return None
        work = hbm.begin(user, owner, target, False, now_us, found, covered)
        if work is None:
            self._counted.no_room += 1
            return None
        work.first_tokens = in_hbm
        dram.policy.touch(stored.number, now_us)
        pin = dram.pin(stored, in_dram)
        done = partial(self._reloaded, work, pin)
        deadline = Deadline(now_us + int(saved_us))
        if self.link.submit(_Copy(TierName.HBM, CopyPriority.RELOAD, deadline, work.new_pages, done)):
            return work
        dram.unpin(pin)
        hbm.abort(work)
        return None

    def _reloaded(self, work: Work, pin: Pin, copied: bool) -> None:  # noqa: ARG002
        self.dram.unpin(pin)
        self._finish(work, self.hbm.publish(work, self._latest_us) is not None)

    def _finish(self, work: Work, is_published: bool) -> None:
        """The reload has ended, or its entry was removed: computes the rest for the demands that wait for it."""
        waiters, work.waiters = work.waiters, []
        if waiters and is_published:
            self._counted.reloaded_tokens += self._tokens_of(work.history.length) - work.first_tokens
        for owner, history, ranks in waiters:
            self._compute(owner, history, *self.hbm.find(self._users[owner], history), ranks)

    def _compute(self, owner: int, history: PrefixHistory, entry: Entry | None, covered: int, ranks: bool) -> None:
        """Computes the rest of the prefix, after the `covered` behaviours that `entry` in HBM has."""
        user, hbm, now_us, counted = self._users[owner], self.hbm, self.link.now_us, self._counted
        self._latest_us = max(self._latest_us, now_us)
        if covered < history.length and hbm.find_work(user, history)[1] <= covered:
            work = hbm.begin(user, owner, history, True, now_us, entry, covered)
            if work is not None:
                computed = work.tokens - work.start_tokens
                counted.recomputed_us += self._latency.append_us(work.start_tokens, computed)
                entry, covered = hbm.publish(work, now_us), history.length
            else:
                computed = self._tokens_of(history.length)
                counted.recomputed_us += self._latency.pre_us(computed)
                counted.no_room += 1
            counted.recomputed_tokens += computed
        self._keep(user, history, entry, covered, now_us, ranks)

    def _keep(
        self, user: int, history: PrefixHistory, entry: Entry | None, covered: int, now_us: int, ranks: bool
    ) -> None:
        """Leases the prefix until its ranking; after the ranking ends the lease and spills.

        `entry` is the one in HBM that covers most of the history, `covered` behaviours.
        """
        if ranks:
            self.hbm.end_lease(user)
            if entry is not None:
                self._spill(user, entry)
        else:
            self._lease(user, history, entry, covered, now_us + VISIT_US)

    def _lease(self, user: int, history: PrefixHistory, entry: Entry | None, covered: int, until_us: int) -> None:
        hbm, leased = self.hbm, entry
        if covered < history.length:
            coming, coming_behaviours = hbm.find_work(user, history)
            leased = coming.entry if coming is not None and coming_behaviours > covered else entry
        if leased is None or (user not in hbm.leases and len(hbm.leases) >= LEASE_LIMIT):
            return
        hbm.begin_lease(leased, until_us)
        self._lease_ends.append((until_us, user))
        if leased is entry and entry.work is not None and self._tokens_of(covered) > entry.work.start_tokens:
            # The work would remove a part of the entry that was just leased.
            stale = entry.work
            hbm.give_up(stale)
            self._finish(stale, False)

    def _spill(self, user: int, entry: Entry) -> None:
        """Copies the entry to DRAM, or its tail if DRAM has the beginning. The worker's gate for spills is open."""
        hbm, dram, history = self.hbm, self.dram, entry.history
        stored, covered = dram.find(user, history)
        if stored is not None and covered == history.length:
            dram.policy.touch(stored.number, self._latest_us)
            return
        if dram.find_work(user, history)[0] is not None:
            return
        work = dram.begin(user, entry.owner, history, False, self._latest_us, stored, covered)
        if work is None:
            return
        pin = hbm.pin(entry, entry.tokens)
        done = partial(self._spilled, work, pin)
        if not self.link.submit(_Copy(TierName.DRAM, CopyPriority.SPILL, _NO_DEADLINE, entry.pages - work.kept, done)):
            hbm.unpin(pin)
            dram.abort(work)

    def _spilled(self, work: Work, pin: Pin, copied: bool) -> None:  # noqa: ARG002
        self.dram.publish(work, self._latest_us)
        self.hbm.unpin(pin)

    def _forget(self, user: int) -> None:
        entries = [(tier, entry) for tier in (self.hbm, self.dram) for entry in tier.by_user.get(user, ())]
        stale = [tier.remove(entry) for tier, entry in entries]
        for work in stale:
            if work is not None:
                self._finish(work, False)

    def _expire(self, now_us: int) -> None:
        self._latest_us = max(self._latest_us, now_us)
        ends, leases = self._lease_ends, self.hbm.leases
        while ends and ends[0][0] <= now_us:
            until_us, user = ends.popleft()
            lease = leases.get(user)
            if lease is not None and lease[1] == until_us:
                self.hbm.end_lease(user)
        self.hbm.expire(now_us)
        self.dram.expire(now_us)
        self._expires_us = now_us + VISIT_US


def replay(
    demands: Demands,
    environment: ReplayEnvironment,
    candidate: Candidate,
    on_progress: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Plays all demands against one candidate. `on_progress` gets the number of demands played so far at intervals."""
    run = CacheReplay(demands, environment, candidate)
    for number, demand in enumerate(demands.rows(), 1):
        run.play(demand)
        if on_progress is not None and number % _PROGRESS_DEMANDS == 0:
            on_progress(number)
    return run.result()
