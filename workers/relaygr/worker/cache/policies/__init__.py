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

from relaygr.worker.cache.policies.choose import PolicyName, PolicyOptions, TierPolicies, make_policy
from relaygr.worker.cache.policies.contract import EntryWeight, EvictionOrder, EvictionPolicy
from relaygr.worker.cache.policies.cost_aware import CostAware
from relaygr.worker.cache.policies.demoting import Demoting
from relaygr.worker.cache.policies.lru import Lru
from relaygr.worker.cache.policies.s3fifo import S3Fifo
from relaygr.worker.cache.policies.slru import Slru
from relaygr.worker.cache.policies.ttl import Ttl
from relaygr.worker.cache.policies.visits import VISIT_US

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
