"""Policies by name, and `Demoting`, which adds demotion to any order."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from relaygr.worker.cache.policies.contract import EntryWeight, EvictionOrder, EvictionPolicy
from relaygr.worker.cache.policies.cost_aware import CostAware
from relaygr.worker.cache.policies.recency import Lru, Slru, Ttl
from relaygr.worker.cache.policies.s3fifo import S3Fifo

DEFAULT_TTL_US = 600_000_000


class PolicyName(enum.StrEnum):
    """The package says which policy suits which traffic."""

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


class Demoting:
    """An `EvictionPolicy` over `order`: demoted entries go first, in the order in which they were demoted.

    A demoted entry keeps its place in `order`, which counts again once a touch has ended the demotion. If it goes
    while it is demoted, `order` sees a removal and not an eviction, and so does not remember the entry.
    """

    def __init__(self, order: EvictionOrder) -> None:
        self._order = order
        self._demoted: OrderedDict[int, None] = OrderedDict()

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        self._demoted.pop(entry_id, None)
        self._order.add(entry_id, weight, now_us)

    def touch(self, entry_id: int, now_us: int) -> None:
        self._demoted.pop(entry_id, None)
        self._order.touch(entry_id, now_us)

    def demote(self, entry_id: int) -> None:
        if entry_id in self._order:
            self._demoted[entry_id] = None

    def evict(self, entry_id: int) -> None:
        if self._demoted.pop(entry_id, self) is self:
            self._order.evict(entry_id)
        else:
            self._order.remove(entry_id)

    def remove(self, entry_id: int) -> None:
        self._demoted.pop(entry_id, None)
        self._order.remove(entry_id)

    def victims(self, now_us: int) -> Iterator[int]:
        yield from self._demoted
        yield from (entry_id for entry_id in self._order.victims(now_us) if entry_id not in self._demoted)

    def expired(self, now_us: int) -> Iterator[int]:
        return self._order.expired(now_us)

    def __contains__(self, entry_id: int) -> bool:
        return entry_id in self._order

    def __len__(self) -> int:
        return len(self._order)


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
