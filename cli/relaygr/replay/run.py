"""Plays demands against a real `PrefixCache` and its policies, as a worker would, with a simulated link.

| demand | effect |
|---|---|
| prepare | reloads from DRAM if that pays, computes the rest, and leases the prefix |
| rank | the same; then ends the lease and spills the prefix |
| forget | invalidates the user's prefixes |

The part of the prefix in HBM is counted once for each visit, at its first look-up. Reloads and computations after that
are counted when they happen. A *hit* is a visit that found everything it could reuse: what its history has in common
with the user's previous visit. So a first visit is never a hit. Computing takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from relaygr.admission.latency import LatencyModel
from relaygr.replay.demand import Demand, DemandKind, PrefixKeyMaker, Visit, Visits
from relaygr.replay.link import LinkSpeed, VirtualLink
from relaygr.worker.cache import (
    CacheConfig,
    Fill,
    Hit,
    PendingOutcome,
    PendingPrefix,
    PrefixCache,
    PrefixKey,
    Presence,
    Purpose,
    Tier,
)
from relaygr.worker.cache.invariants import check_invariants
from relaygr.worker.cache.policies import VISIT_US, TierPolicies
from relaygr.worker.cache.transfers import SpillGate
from relaygr.worker.kv import DramGeometry, PrefixLayout

# A replay always admits spills: nothing else uses the link, and its queue is bounded.
_OPEN_GATE_US = 1e15


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
    hbm_tokens: int
    """Tokens found in HBM at the first look-up of a visit."""
    reloaded_tokens: int
    recomputed_tokens: int
    """Tokens computed, including first visits and growth."""
    spilled_bytes: int
    reloaded_bytes: int
    hbm_evictions: int
    dram_evictions: int
    no_room: int
    """Prefixes that were computed but not cached for lack of room."""


class CacheReplay:
    """One replay. Call `play` for each demand in order, then `result`."""

    def __init__(self, environment: ReplayEnvironment, candidate: Candidate) -> None:
        self._candidate = candidate
        self._layout = environment.layout
        self._latency = environment.latency
        self._link = VirtualLink(environment.geometry.page_bytes, environment.link)
        self._cache = PrefixCache(
            CacheConfig(
                environment.geometry,
                environment.layout,
                candidate.hbm_bytes // environment.geometry.kv.page_bytes,
                candidate.dram_bytes // environment.geometry.page_bytes,
                candidate.policies,
            ),
            self._link if candidate.dram_bytes else None,
            spill_gate=SpillGate(_OPEN_GATE_US, _OPEN_GATE_US),
        )
        self._cache.weigh_by(environment.latency.pre_us)
        self._histories = PrefixKeyMaker()
        self._visits = Visits()
        self._expires_us = 0
        self._reloads: set[PendingPrefix] = set()
        """Reloads under way. A demand that joins one adds no bytes."""
        self._counted = dict.fromkeys(
            ("visits", "hbm_hits", "dram_hits", "asked_tokens", "hbm_tokens", "reloaded_tokens", "recomputed_tokens"), 0
        )

    def play(self, demand: Demand) -> None:
        """Plays one demand. Times may not decrease."""
        now_us = demand.at_us
        self._link.advance(now_us)
        if now_us >= self._expires_us:
            self._cache.expire_leases(now_us)
            self._cache.expire_prefixes(now_us)
            self._expires_us = now_us + VISIT_US
        key = self._histories.key(demand)
        visit = self._visits.begin(demand)
        if demand.kind is DemandKind.FORGET:
            self._cache.invalidate_user(key.user_id)
            return
        presence = self._cache.peek(key)
        if visit is not None:
            self._count(visit, presence)
        ranks = demand.kind is DemandKind.RANK
        found = self._cache.acquire(key, now_us, join=False, purpose=Purpose.RANKING if ranks else Purpose.PRE_INFER)
        if isinstance(found, Hit):
            self._cache.release(found.handle)
        if presence.hbm_behaviours == key.length:
            self._keep(key, now_us, ranks)
        else:
            self._prepare(key, presence, now_us, ranks)

    def result(self) -> ReplayResult:
        """Completes the copies under way and returns the totals."""
        self._link.run()
        stats = self._cache.stats()
        check_invariants(self._cache)
        return ReplayResult(
            candidate=self._candidate,
            **self._counted,
            spilled_bytes=self._link.moved_bytes[Tier.DRAM],
            reloaded_bytes=self._link.moved_bytes[Tier.HBM],
            hbm_evictions=stats.evictions.get(Tier.HBM, 0),
            dram_evictions=stats.evictions.get(Tier.DRAM, 0),
            no_room=sum(stats.no_room.values()),
        )

    def _count(self, visit: Visit, presence: Presence) -> None:
        counted = self._counted
        counted["visits"] += 1
        counted["asked_tokens"] += self._tokens(visit.behaviours)
        counted["hbm_tokens"] += self._tokens(presence.hbm_behaviours)
        if visit.reusable:
            hbm_hit = presence.hbm_behaviours >= visit.reusable
            counted["hbm_hits"] += hbm_hit
            counted["dram_hits"] += not hbm_hit and presence.dram_behaviours >= visit.reusable

    def _prepare(self, key: PrefixKey, presence: Presence, now_us: int, ranks: bool) -> None:
        """Reloads if DRAM has more than HBM and if that pays; then computes the rest."""
        in_hbm, in_dram = self._tokens(presence.hbm_behaviours), self._tokens(presence.dram_behaviours)
        if in_dram > in_hbm:
            saved_us = self._latency.append_us(in_hbm, in_dram - in_hbm)
            reload = self._cache.transfers.start_reload(key, now_us + int(saved_us), now_us, saved_us)
            if isinstance(reload, PendingPrefix):
                self._reloads.add(reload)
                reload.add_done_callback(partial(self._reloaded, key, in_hbm, ranks))
                return
        self._compute(key, ranks)

    def _reloaded(self, key: PrefixKey, cached_tokens: int, ranks: bool, pending: PendingPrefix) -> None:
        is_first = pending in self._reloads
        self._reloads.discard(pending)
        if is_first and pending.outcome is PendingOutcome.PUBLISHED:
            self._counted["reloaded_tokens"] += self._tokens(pending.behaviours) - cached_tokens
        self._compute(key, ranks)

    def _compute(self, key: PrefixKey, ranks: bool) -> None:
        """Computes the rest of the prefix."""
        now_us = self._link.now_us
        fill = self._cache.reserve(key, now_us)
        if isinstance(fill, Fill):
            self._counted["recomputed_tokens"] += fill.tokens - fill.start_tokens
            fill.progress(fill.tokens)
            handle = fill.publish(now_us)
            if handle is not None:
                self._cache.release(handle)
        elif not isinstance(fill, PendingPrefix):
            self._counted["recomputed_tokens"] += self._tokens(key.length)
        self._keep(key, now_us, ranks)

    def _keep(self, key: PrefixKey, now_us: int, ranks: bool) -> None:
        """Leases the prefix until its ranking; after the ranking ends the lease and spills."""
        if ranks:
            self._cache.end_lease(key.user_id, key.user_id)
            self._cache.transfers.spill(key)
        else:
            self._cache.lease(key, key.user_id, now_us + VISIT_US)

    def _tokens(self, behaviours: int) -> int:
        return self._layout.tokens(behaviours) if behaviours else 0


def replay(
    demands: Iterable[Demand],
    environment: ReplayEnvironment,
    candidate: Candidate,
    on_progress: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Plays all demands against one candidate. `on_progress` gets the number of demands played, every 256 demands."""
    run = CacheReplay(environment, candidate)
    for number, demand in enumerate(demands, 1):
        run.play(demand)
        if on_progress is not None and number % 256 == 0:
            on_progress(number)
    return run.result()
