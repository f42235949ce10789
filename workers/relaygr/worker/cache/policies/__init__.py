"""Eviction policies: in which order ready entries are evicted. `make_policy` makes one by its name.

An `EvictionOrder` orders entries, which it identifies by number. Its caller walks `victims` and skips entries that are
pinned or leased. `Demoting` wraps any order and puts demoted entries first. No policy reads a clock, takes a
lock or counts bytes.

| name | evicts first | suits | does not suit |
|---|---|---|---|
| `arc` (default) | entries with one visit, until too many of them return after eviction | most traffic | scans |
| `slru` | entries with one visit, least recently used | most traffic | a hot set that changes fast |
| `lru` | the least recently used | users who come often and then never again | users who come once |
| `s3fifo` | entries with one visit, in order of arrival | many users who come once | few, large entries |
| `cost` | the least time saved per byte | histories of very different lengths | equal lengths: it only counts visits |
| `ttl` | the least recently used, and all that expired | a bound on how long prefixes stay | the highest hit ratio |
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from relaygr.worker.cache.policies.arc import Arc
from relaygr.worker.cache.policies.contract import VISIT_US, EntryWeight, EvictionOrder, EvictionPolicy
from relaygr.worker.cache.policies.cost_aware import CostAware
from relaygr.worker.cache.policies.recency import Demoting, Lru, Slru, Ttl
from relaygr.worker.cache.policies.s3fifo import S3Fifo

__all__ = [
    "DEFAULT_POLICY",
    "VISIT_US",
    "Arc",
    "CostAware",
    "Demoting",
    "EntryWeight",
    "EvictionOrder",
    "EvictionPolicy",
    "Lru",
    "PolicyName",
    "PolicyOptions",
    "S3Fifo",
    "Slru",
    "TierPolicies",
    "Ttl",
    "make_policy",
]

DEFAULT_TTL_US = 600_000_000


class PolicyName(enum.StrEnum):
    """The names of the policies. The table above lists the traffic that each suits."""

    LRU = "lru"
    SLRU = "slru"
    ARC = "arc"
    S3FIFO = "s3fifo"
    COST = "cost"
    TTL = "ttl"


DEFAULT_POLICY = PolicyName.ARC
"""`docs/cache-policies.md` compares the policies on traffic of many kinds."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Size of the tier, and the time to live for `ttl`."""

    capacity_pages: int
    ttl_us: int = DEFAULT_TTL_US


@dataclass(frozen=True, slots=True)
class TierPolicies:
    """The policy of each tier. `ttl_us` applies to each tier whose policy is `ttl`."""

    hbm: PolicyName = DEFAULT_POLICY
    dram: PolicyName = DEFAULT_POLICY
    ttl_us: int = DEFAULT_TTL_US


_ORDERS: Mapping[PolicyName, Callable[[PolicyOptions], EvictionOrder]] = {
    PolicyName.LRU: lambda _: Lru(),
    PolicyName.SLRU: lambda options: Slru(options.capacity_pages),
    PolicyName.ARC: lambda options: Arc(options.capacity_pages),
    PolicyName.S3FIFO: lambda options: S3Fifo(options.capacity_pages),
    PolicyName.COST: lambda _: CostAware(),
    PolicyName.TTL: lambda options: Ttl(options.ttl_us),
}


def make_policy(name: PolicyName, options: PolicyOptions) -> EvictionPolicy:
    """Makes the policy of that name for one tier. Raises ValueError for a time to live that is not positive."""
    return Demoting(_ORDERS[name](options))
