"""What the cache counts: a mutable `Counters` that it adds to, and the frozen values it hands out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from relaygr.worker.cache.results import (
    DeclineReason,
    MissReason,
    NoRoomReason,
    PendingKind,
    PendingOutcome,
    SpillOutcome,
    WasteReason,
)
from relaygr.worker.cache.tiers import Tier
from relaygr.worker.kv import DramGeometry


@dataclass(slots=True)
class Counters:
    """Totals since start; each key is an enum, so each is bounded."""

    hits: int = 0
    partial_hits: int = 0
    joins: Counter[PendingKind] = field(default_factory=Counter)
    misses: Counter[MissReason] = field(default_factory=Counter)
    no_room: Counter[NoRoomReason] = field(default_factory=Counter)
    fills: Counter[PendingOutcome] = field(default_factory=Counter)
    appends: int = 0
    reloads: Counter[PendingOutcome] = field(default_factory=Counter)
    reload_retries: int = 0
    declined: Counter[DeclineReason] = field(default_factory=Counter)
    spills: Counter[SpillOutcome] = field(default_factory=Counter)
    spills_ended: Counter[PendingOutcome] = field(default_factory=Counter)
    evictions: Counter[Tier] = field(default_factory=Counter)
    wasted: Counter[WasteReason] = field(default_factory=Counter)
    leases_granted: int = 0
    leases_leaked: int = 0
    forced_unpins: int = 0
    forced_aborts: int = 0
    late_releases: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """Pages of one tier, each in exactly one of the five."""

    capacity: int
    free: int
    evictable: int
    leased: int
    pinned: int
    in_flight: int
    entries: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot. Totals only grow."""

    hbm: TierStats
    dram: TierStats
    hbm_page_bytes: int
    dram_page_bytes: int
    leases: int
    hits: int
    partial_hits: int
    joins: Mapping[PendingKind, int]
    misses: Mapping[MissReason, int]
    no_room: Mapping[NoRoomReason, int]
    fills: Mapping[PendingOutcome, int]
    appends: int
    reloads: Mapping[PendingOutcome, int]
    reload_retries: int
    declined: Mapping[DeclineReason, int]
    spills: Mapping[SpillOutcome, int]
    spills_ended: Mapping[PendingOutcome, int]
    evictions: Mapping[Tier, int]
    wasted: Mapping[WasteReason, int]
    leases_granted: int
    leases_leaked: int
    forced_unpins: int
    forced_aborts: int
    late_releases: int

    @property
    def lookups(self) -> int:
        return self.hits + sum(self.joins.values()) + sum(self.misses.values())

    @property
    def hit_ratio(self) -> float:
        """Lookups that found K,V ready in HBM; 0.0 before the first."""
        return self.hits / self.lookups if self.lookups else 0.0


def snapshot(counters: Counters, hbm: TierStats, dram: TierStats, geometry: DramGeometry, leases: int) -> CacheStats:
    """The counters as they are now; later counting does not change it."""
    return CacheStats(
        hbm=hbm,
        dram=dram,
        hbm_page_bytes=geometry.kv.page_bytes,
        dram_page_bytes=geometry.page_bytes,
        leases=leases,
        hits=counters.hits,
        partial_hits=counters.partial_hits,
        joins=dict(counters.joins),
        misses=dict(counters.misses),
        no_room=dict(counters.no_room),
        fills=dict(counters.fills),
        appends=counters.appends,
        reloads=dict(counters.reloads),
        reload_retries=counters.reload_retries,
        declined=dict(counters.declined),
        spills=dict(counters.spills),
        spills_ended=dict(counters.spills_ended),
        evictions=dict(counters.evictions),
        wasted=dict(counters.wasted),
        leases_granted=counters.leases_granted,
        leases_leaked=counters.leases_leaked,
        forced_unpins=counters.forced_unpins,
        forced_aborts=counters.forced_aborts,
        late_releases=counters.late_releases,
    )
