"""Policies by name."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from relaygr.worker.cache.policies.contract import EvictionOrder, EvictionPolicy
from relaygr.worker.cache.policies.cost_aware import CostAware
from relaygr.worker.cache.policies.demoting import Demoting
from relaygr.worker.cache.policies.lru import Lru
from relaygr.worker.cache.policies.s3fifo import S3Fifo
from relaygr.worker.cache.policies.slru import Slru
from relaygr.worker.cache.policies.ttl import Ttl

DEFAULT_TTL_US = 600_000_000


class PolicyName(enum.StrEnum):
    """See the package for which is good for what."""

    LRU = "lru"
    SLRU = "slru"
    S3FIFO = "s3fifo"
    COST = "cost"
    TTL = "ttl"


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What a policy may need to know of its tier."""

    capacity_pages: int
    ttl_us: int = DEFAULT_TTL_US


@dataclass(frozen=True, slots=True)
class TierPolicies:
    """Which policy orders each tier. `ttl_us` is that of `ttl`, wherever it is chosen."""

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
    """The policy of that name for one tier. Raises ValueError for a time to live that is not positive."""
    return Demoting(_ORDERS[name](options))
