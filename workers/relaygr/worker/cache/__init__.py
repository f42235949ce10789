"""Prefix cache: pages of K,V in two tiers, found by identity, shared by pins and leases.

Books (`books`, `metadata` and what they use: no torch, no threads, no clock) and bytes (`arena`, `mover`) do not
import each other; `PrefixCache` joins them through the `Mover` protocol of `transfer`.
"""

from relaygr.worker.cache.cache import PrefixCache
from relaygr.worker.cache.handles import Fill, Handle
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.pending import PendingPrefix
from relaygr.worker.cache.results import (
    Declined,
    DeclineReason,
    Hit,
    Miss,
    MissReason,
    NoRoom,
    NoRoomReason,
    PageCopy,
    PendingKind,
    PendingOutcome,
    Presence,
    Purpose,
    SpillOutcome,
    WasteReason,
)
from relaygr.worker.cache.stats import CacheStats, TierStats
from relaygr.worker.cache.tiers import Tier

__all__ = [
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
    "SpillOutcome",
    "Tier",
    "TierStats",
    "WasteReason",
]
