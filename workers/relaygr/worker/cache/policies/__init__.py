"""Eviction policies: in which order ready entries are evicted. `make_policy` makes one by its name.

An `EvictionOrder` orders entries, which it identifies by number. Its caller walks `victims` and skips entries that are
pinned or leased. `Demoting` wraps any order and puts demoted entries first. No policy reads a clock, takes a
lock or counts bytes.

| name | evicts first | suits | does not suit |
|---|---|---|---|
| `arc` (default) | entries with one visit, until too many of them return after eviction | most traffic | scans |
| `lru` | the least recently used | users who come often and then never again | users who come once |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from relaygr.worker.cache.policies.arc import Arc
from relaygr.worker.cache.policies.contract import VISIT_US, EntryWeight, EvictionOrder, EvictionPolicy
from relaygr.worker.cache.policies.lru import Demoting, Lru

__all__ = [
    "DEFAULT_POLICY",
    "VISIT_US",
    "Arc",
    "Demoting",
    "EntryWeight",
    "EvictionOrder",
    "EvictionPolicy",
    "Lru",
    "PolicyName",
    "TierPolicies",
    "make_policy",
]


class PolicyName(enum.StrEnum):
    """The names of the policies. The table above lists the traffic that each suits."""

    ARC = "arc"
    LRU = "lru"


DEFAULT_POLICY = PolicyName.ARC


@dataclass(frozen=True, slots=True)
class TierPolicies:
    """The policy of each tier."""

    hbm: PolicyName = DEFAULT_POLICY
    dram: PolicyName = DEFAULT_POLICY


def make_policy(name: PolicyName, capacity_pages: int) -> EvictionPolicy:
    """Makes the policy of that name for a tier of that size."""
    return Demoting(Arc(capacity_pages) if name is PolicyName.ARC else Lru())
