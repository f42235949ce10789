"""Prefix cache: pages of K,V in two tiers, found by identity, protected by pins and leases.

Metadata (`cache`, `ledger`, `metadata`, `transfers` and their helpers: no torch, no clock) and bytes (`arena`, `codec`)
do not import each other. `copies` is the contract between them, and `build` puts both together.
"""

from relaygr.worker.cache.cache import CacheConfig, Fill, PrefixCache
from relaygr.worker.cache.entries import Handle, Hit, Presence
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
