"""In which order ready entries are evicted: one module a policy, chosen by name.

An `EvictionOrder` knows entries by number and puts them in order; whether one may go (pins, leases) is for
its caller, which walks `victims` and skips what is held. `Demoting` adds to any order that some entries go
before all others. Nothing here reads a clock, takes a lock or counts bytes.

| name | goes first | good for | not for |
|---|---|---|---|
| `lru` | least recently used | most traffic | long runs of users who come once |
| `slru` | came once and not lately | a hot set beside a scan | a hot set that keeps changing |
| `s3fifo` | came once, in the order of arrival | many who come once | few, large entries |
| `cost` | least time saved per byte | histories of very different lengths | equal ones: then it counts visits |
| `ttl` | longest unused; none stays longer | a bound on how long prefixes stay | the most hits |
"""

from workers.cache.policies.choose import PolicyName, PolicyOptions, TierPolicies, make_policy
from workers.cache.policies.contract import EntryWeight, EvictionOrder, EvictionPolicy
from workers.cache.policies.cost_aware import CostAware
from workers.cache.policies.demoting import Demoting
from workers.cache.policies.lru import Lru
from workers.cache.policies.s3fifo import S3Fifo
from workers.cache.policies.slru import Slru
from workers.cache.policies.ttl import Ttl
from workers.cache.policies.visits import VISIT_US

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
