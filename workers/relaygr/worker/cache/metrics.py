"""The cache's figures for Prometheus, read from `stats` at each scrape: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relaygr.worker.cache.stats import CacheStats
from relaygr.worker.cache.tiers import Tier

_HOLDINGS = ("free", "evictable", "leased", "pinned", "in_flight")


class CacheCollector(Collector):
    """Metrics `relaygr_cache_*` of one cache; registers itself, `unregister` ends that."""

    def __init__(self, read: Callable[[], CacheStats], registry: CollectorRegistry = REGISTRY) -> None:
        self._read = read
        self._registry = registry
        registry.register(self)

    def unregister(self) -> None:
        self._registry.unregister(self)

    def collect(self) -> Iterable[Metric]:
        stats = self._read()
        pages = GaugeMetricFamily(
            "relaygr_cache_bytes",
            "Bytes of a tier by what holds them; they add up to its capacity",
            labels=["tier", "held"],
        )
        entries = GaugeMetricFamily("relaygr_cache_entries", "Prefixes in a tier", labels=["tier"])
        tiers = ((Tier.HBM, stats.hbm, stats.hbm_page_bytes), (Tier.DRAM, stats.dram, stats.dram_page_bytes))
        for tier, figures, page_bytes in tiers:
            for held in _HOLDINGS:
                pages.add_metric([tier, held], getattr(figures, held) * page_bytes)
            entries.add_metric([tier], figures.entries)
        yield pages
        yield entries
        yield GaugeMetricFamily("relaygr_cache_leases", "Requests that hold a prefix", value=stats.leases)
        hits = CounterMetricFamily("relaygr_cache_hits", "Look-ups served from HBM", labels=["coverage"])
        hits.add_metric(["complete"], stats.hits - stats.partial_hits)
        hits.add_metric(["partial"], stats.partial_hits)
        yield hits
        yield _family("relaygr_cache_joins", "Look-ups that found the prefix under way", "kind", stats.joins.items())
        yield _family("relaygr_cache_misses", "Look-ups that found nothing in HBM", "reason", stats.misses.items())
        yield _family("relaygr_cache_no_room", "Fills and reloads that got no pages", "reason", stats.no_room.items())
        yield _family("relaygr_cache_fills", "Computed prefixes by how they ended", "outcome", stats.fills.items())
        yield CounterMetricFamily("relaygr_cache_appends", "Fills that computed a tail only", value=stats.appends)
        yield _family("relaygr_cache_reloads", "Copies from DRAM by how they ended", "outcome", stats.reloads.items())
        yield CounterMetricFamily(
            "relaygr_cache_reload_retries",
            "Copies from DRAM that failed and were tried again",
            value=stats.reload_retries,
        )
        yield _family(
            "relaygr_cache_reloads_declined", "Reloads that were not started", "reason", stats.declined.items()
        )
        yield _family("relaygr_cache_spills", "Wishes to spill by what became of them", "outcome", stats.spills.items())
        yield _family(
            "relaygr_cache_spills_ended", "Copies to DRAM by how they ended", "outcome", stats.spills_ended.items()
        )
        yield _family("relaygr_cache_evictions", "Prefixes evicted for room", "tier", stats.evictions.items())
        yield _family(
            "relaygr_cache_preinfers_wasted",
            "Pre-inferred prefixes that served no ranking",
            "reason",
            stats.wasted.items(),
        )
        yield CounterMetricFamily("relaygr_cache_leases_granted", "Leases given", value=stats.leases_granted)
        yield CounterMetricFamily(
            "relaygr_cache_leases_leaked", "Leases that ended by their time", value=stats.leases_leaked
        )
        yield CounterMetricFamily(
            "relaygr_cache_forced_unpins",
            "Handles that were never released, and were taken from their holders",
            value=stats.forced_unpins,
        )
        yield CounterMetricFamily(
            "relaygr_cache_forced_aborts",
            "Computations that were never ended, and whose pages were taken from their holders",
            value=stats.forced_aborts,
        )
        yield CounterMetricFamily(
            "relaygr_cache_late_releases", "Releases of handles that had been taken away", value=stats.late_releases
        )


def _family(name: str, text: str, label: str, totals: Iterable[tuple[str, int]]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, total in totals:
        family.add_metric([str(value)], total)
    return family
