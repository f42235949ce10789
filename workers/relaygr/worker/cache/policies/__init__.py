"""Eviction policies: in which order ready entries are evicted. `choose` makes a policy by its name.

An `EvictionOrder` orders entries, which it identifies by number. Its caller walks `victims` and skips entries that are
pinned or leased. `Demoting` wraps any order and puts demoted entries first. No policy reads a clock, takes a
lock or counts bytes.

| name | evicts first | suits | does not suit |
|---|---|---|---|
| `lru` | the least recently used | most traffic | long runs of users who come once |
| `slru` | entries with one visit, least recently used | a hot set beside a scan | a hot set that keeps changing |
| `s3fifo` | entries with one visit, in order of arrival | many users who come once | few, large entries |
| `cost` | the least time saved per byte | histories of very different lengths | equal lengths: it only counts visits |
| `ttl` | the least recently used, and all that expired | a bound on how long prefixes stay | the highest hit ratio |
"""

from relaygr.worker.cache.policies.choose import PolicyName, PolicyOptions, TierPolicies, make_policy
from relaygr.worker.cache.policies.contract import VISIT_US, EntryWeight, EvictionOrder, EvictionPolicy
from relaygr.worker.cache.policies.cost_aware import CostAware
from relaygr.worker.cache.policies.recency import Demoting, Lru, Slru, Ttl
from relaygr.worker.cache.policies.s3fifo import S3Fifo

__all__ = [
    "VISIT_US",
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
