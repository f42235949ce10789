"""Counters of the cache, their snapshot, and their Prometheus metrics. Each counter is listed once, in `Counters`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relaygr.worker.cache.results import (
    DeclineReason,
    MissReason,
    NoRoomReason,
    PendingKind,
    PendingOutcome,
    SpillOutcome,
    Tier,
    WasteReason,
)

HOLDINGS = ("free", "evictable", "leased", "pinned", "in_flight")
"""The fields of `TierStats` that add up to the capacity."""


def _metric(name: str, text: str, label: str | None = None) -> dict[str, str | None]:
    """Metadata of a counter that is exported as `name`; with a `label` if it counts by an enum."""
    return {"metric": name, "text": text, "label": label}


@dataclass(slots=True)
class Counters:
    """Totals since the cache started. The keys of each `Counter` are members of an enum, so each is bounded."""

    hits: int = 0
    """Look-ups served from HBM, partial hits included."""
    partial_hits: int = 0
    joins: Counter[PendingKind] = field(
        default_factory=Counter,
        metadata=_metric("relaygr_cache_joins", "Look-ups that joined a fill or a reload under way", "kind"),
    )
    misses: Counter[MissReason] = field(
        default_factory=Counter, metadata=_metric("relaygr_cache_misses", "Look-ups that found no K,V in HBM", "reason")
    )
    no_room: Counter[NoRoomReason] = field(
        default_factory=Counter,
        metadata=_metric("relaygr_cache_no_room", "Fills and reloads that got no pages", "reason"),
    )
    fills: Counter[PendingOutcome] = field(
        default_factory=Counter,
        metadata=_metric("relaygr_cache_fills", "Computations of a prefix that ended, by outcome", "outcome"),
    )
    appends: int = field(
        default=0, metadata=_metric("relaygr_cache_appends", "Computations that extended a cached prefix by its tail")
    )
    reloads: Counter[PendingOutcome] = field(
        default_factory=Counter,
        metadata=_metric("relaygr_cache_reloads", "Copies from DRAM to HBM that ended, by outcome", "outcome"),
    )
    reload_retries: int = field(
        default=0,
        metadata=_metric("relaygr_cache_reload_retries", "Copies from DRAM to HBM that failed and were tried again"),
    )
    declined: Counter[DeclineReason] = field(
        default_factory=Counter,
        metadata=_metric("relaygr_cache_reloads_declined", "Reloads that were not started", "reason"),
    )
    spills: Counter[SpillOutcome] = field(
        default_factory=Counter,
        metadata=_metric("relaygr_cache_spills", "Requests to copy a prefix to DRAM, by outcome", "outcome"),
    )
    spills_ended: Counter[PendingOutcome] = field(
        default_factory=Counter,
        metadata=_metric("relaygr_cache_spills_ended", "Copies from HBM to DRAM that ended, by outcome", "outcome"),
    )
    evictions: Counter[Tier] = field(
        default_factory=Counter, metadata=_metric("relaygr_cache_evictions", "Prefixes evicted to make room", "tier")
    )
    wasted: Counter[WasteReason] = field(
        default_factory=Counter,
        metadata=_metric(
            "relaygr_cache_preinfers_wasted", "Pre-inferred prefixes that served no ranking request", "reason"
        ),
    )
    leases_granted: int = field(default=0, metadata=_metric("relaygr_cache_leases_granted", "Leases granted"))
    leases_leaked: int = field(
        default=0, metadata=_metric("relaygr_cache_leases_leaked", "Leases that expired because no request ended them")
    )
    forced_unpins: int = field(
        default=0,
        metadata=_metric("relaygr_cache_forced_unpins", "Pins revoked because their holders never released them"),
    )
    forced_aborts: int = field(
        default=0,
        metadata=_metric(
            "relaygr_cache_forced_aborts", "Fills revoked because they were neither published nor aborted"
        ),
    )
    late_releases: int = 0
    """Releases of pins that had been revoked before."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """Pages of one tier. Each is in exactly one of free, evictable, leased, pinned, in flight."""

    capacity: int
    free: int
    evictable: int
    leased: int
    pinned: int
    in_flight: int
    entries: int


@dataclass(slots=True, kw_only=True)
class CacheStats(Counters):
    """A snapshot: a copy of the counters, and what both tiers hold at that moment."""

    hbm: TierStats
    dram: TierStats
    hbm_page_bytes: int
    dram_page_bytes: int
    leases: int

    @property
    def lookups(self) -> int:
        return self.hits + sum(self.joins.values()) + sum(self.misses.values())


def snapshot_of(counters: Counters) -> dict[str, Any]:
    """A copy of all counters by name; later counting does not change it."""
    values = {each.name: getattr(counters, each.name) for each in fields(Counters)}
    return {name: Counter(value) if isinstance(value, Counter) else value for name, value in values.items()}


class CacheCollector(Collector):
    """Prometheus metrics `relaygr_cache_*` of one cache, read from `read` at each scrape."""

    def __init__(self, read: Callable[[], CacheStats], registry: CollectorRegistry = REGISTRY) -> None:
        """Registers itself."""
        self._read = read
        self._registry = registry
        registry.register(self)

    def unregister(self) -> None:
        self._registry.unregister(self)

    def collect(self) -> Iterable[Metric]:
        stats = self._read()
        pages = GaugeMetricFamily(
            "relaygr_cache_bytes",
            "Bytes of a tier: free, evictable, leased, pinned or in flight; the sum is the tier's capacity",
            labels=["tier", "held"],
        )
        entries = GaugeMetricFamily("relaygr_cache_entries", "Prefixes in a tier", labels=["tier"])
        tiers = ((Tier.HBM, stats.hbm, stats.hbm_page_bytes), (Tier.DRAM, stats.dram, stats.dram_page_bytes))
        for tier, figures, page_bytes in tiers:
            for held in HOLDINGS:
                pages.add_metric([tier, held], getattr(figures, held) * page_bytes)
            entries.add_metric([tier], figures.entries)
        yield pages
        yield entries
        yield GaugeMetricFamily("relaygr_cache_leases", "Requests that lease a prefix now", value=stats.leases)
        hits = CounterMetricFamily("relaygr_cache_hits", "Look-ups served from HBM", labels=["coverage"])
        hits.add_metric(["complete"], stats.hits - stats.partial_hits)
        hits.add_metric(["partial"], stats.partial_hits)
        yield hits
        for counter in fields(Counters):
            if "metric" in counter.metadata:
                yield _family(counter.metadata, getattr(stats, counter.name))


def _family(metadata: Any, value: Any) -> Metric:
    name, text, label = metadata["metric"], metadata["text"], metadata["label"]
    if label is None:
        return CounterMetricFamily(name, text, value=value)
    family = CounterMetricFamily(name, text, labels=[label])
    for member, total in value.items():
        family.add_metric([str(member)], total)
    return family
