"""Eviction policies by name."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from relaygr.worker.cache.policies.contract import EvictionOrder, EvictionPolicy
from relaygr.worker.cache.policies.cost_aware import CostAware
from relaygr.worker.cache.policies.recency import Demoting, Lru, Slru, Ttl
from relaygr.worker.cache.policies.s3fifo import S3Fifo

DEFAULT_TTL_US = 600_000_000


class PolicyName(enum.StrEnum):
    """The names of the policies. The package lists the traffic that each suits."""

    LRU = "lru"
    SLRU = "slru"
    S3FIFO = "s3fifo"
    COST = "cost"
    TTL = "ttl"


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Size of the tier, and the time to live for `ttl`."""

    capacity_pages: int
    ttl_us: int = DEFAULT_TTL_US


@dataclass(frozen=True, slots=True)
class TierPolicies:
    """The policy of each tier. `ttl_us` applies to each tier whose policy is `ttl`."""

    hbm: PolicyName = PolicyName.LRU
    dram: PolicyName = PolicyName.LRU
    ttl_us: int = DEFAULT_TTL_US


_ORDERS: Mapping[PolicyName, Callable[[PolicyOptions], EvictionOrder]] = {
    PolicyName.LRU: lambda _: Lru(),
    PolicyName.SLRU: lambda options: Slru(options.capacity_pages),
    PolicyName.S3FIFO: lambda options: S3Fifo(options.capacity_pages),
    PolicyName.COST: lambda _: CostAware(),
    PolicyName.TTL: lambda options: Ttl(options.ttl_us),
}


def make_policy(name: PolicyName, options: PolicyOptions) -> EvictionPolicy:
    """Makes the policy of that name for one tier. Raises ValueError for a time to live that is not positive."""
    return Demoting(_ORDERS[name](options))
