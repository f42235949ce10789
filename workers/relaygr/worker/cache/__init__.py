"""Prefix cache: pages of K,V in two tiers, found by identity, protected by pins and leases.

    cache         `PrefixCache`: look-up, release, reserve, leases, removal
    fill          a prefix that is computed into pages: publish, abort
    transfers     reloads and spills, the break-even rule, the spill gate
    ledger        both tiers under one lock, with counters and pending prefixes
    metadata      entries of one tier, pins, work in flight, evictions
    pages         the pages of one tier: free list, reference counts, sums
    entries       entries and their states, pins, handles, leases
    identity      which cached prefix may serve which request
    policies      eviction policies
    results       answers of the cache, and the reasons by which it counts them
    journal       contract with the journal of a DRAM tier that outlives the process
    stats         counters and their metrics
    admin         requests of operators, and the reports that answer them
    copies        copies between the tiers: request, queue, forecast; contract of the mover
    arena, codec  bytes of the pages; K,V in fewer bits for DRAM
    build         builds a cache for a device, with the threads that copy

The executor and the poll thread call `PrefixCache`. Metadata (`cache`, `ledger`, `metadata`, `transfers` and their
helpers: no torch, no clock) and bytes (`arena`, `codec`) do not import each other. `copies` is the contract between
them, and `build` puts both together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relaygr.schemas.lazy import lazy_names

if TYPE_CHECKING:
    from relaygr.worker.cache.cache import CacheConfig, PrefixCache
    from relaygr.worker.cache.entries import Handle, Hit, Presence
    from relaygr.worker.cache.fill import Fill
    from relaygr.worker.cache.identity import PrefixKey
    from relaygr.worker.cache.ledger import PendingPrefix
    from relaygr.worker.cache.results import (
        Declined,
        DeclineReason,
        Miss,
        MissReason,
        NoRoom,
        NoRoomReason,
        PageCopy,
        PendingKind,
        PendingOutcome,
        Purpose,
        Room,
        SpillOutcome,
        Tier,
        WasteReason,
    )
    from relaygr.worker.cache.stats import CacheStats, TierStats

__all__ = [
    "CacheConfig",
    "CacheStats",
    "DeclineReason",
    "Declined",
    "Fill",
    "Handle",
    "Hit",
    "Miss",
    "MissReason",
    "NoRoom",
    "NoRoomReason",
    "PageCopy",
    "PendingKind",
    "PendingOutcome",
    "PendingPrefix",
    "PrefixCache",
    "PrefixKey",
    "Presence",
    "Purpose",
    "Room",
    "SpillOutcome",
    "Tier",
    "TierStats",
    "WasteReason",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        __all__,
        (
            "relaygr.worker.cache.results",
            "relaygr.worker.cache.identity",
            "relaygr.worker.cache.entries",
            "relaygr.worker.cache.stats",
            "relaygr.worker.cache.ledger",
            "relaygr.worker.cache.fill",
            "relaygr.worker.cache.cache",
        ),
    )
