"""An upper bound on the hits of any policy, for any capacity.

Belady's MIN (1966) is the best policy if all entries have one size. With different sizes the best policy is NP-hard
to find, so this is a bound on it, PFOO-L: Berger, Beckmann, Harchol-Balter, "Practical bounds on optimal caching with
variable object sizes", SIGMETRICS 2018.

Number the look-ups 1..N. Take a visit that begins with look-up j and whose user had its last look-up at i. The visit
is a hit only if the reusable pages of its prefix were cached just before each of the look-ups i+1 .. j. That takes
`pages * (j - i)` page-steps. There are `capacity * N` page-steps in all. So no policy has more hits than this budget
covers if the cheapest visits come first.

It is a bound and not a policy, for three reasons. It may use more than the capacity at one time and less at another.
Prefixes that are being computed take no room. And a prefix counts as cached at once after its look-up: on a link so
slow that other look-ups come meanwhile, a prefix is cached for fewer steps than are counted here. With the capacity of
both tiers together, it bounds the hits in HBM or DRAM, since a cached page takes a page of one of the tiers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relaygr.replay.demand import NO_VISIT, DemandKind, Demands
from relaygr.worker.kv import PrefixLayout


class HitBound:
    """The bound for one list of demands."""

    def __init__(self, demands: Demands, layout: PrefixLayout, page_tokens: int) -> None:
        self.visits = int((demands.reusable != NO_VISIT).sum())
        reusable = demands.reusable > 0
        tokens = layout.contextual_tokens + demands.reusable[reusable].astype(np.int64) * layout.tokens_per_behaviour
        steps = -(-tokens // page_tokens) * demands.waits[reusable]
        self._lookups = int((demands.kinds != DemandKind.FORGET).sum())
        self._spent: NDArray[np.int64] = np.cumsum(np.sort(steps))

    @property
    def with_all_room(self) -> int:
        """Hits of a cache that never evicts: all visits that have something to reuse."""
        return int(self._spent.size)

    def hits(self, capacity_pages: int) -> int:
        """The highest possible number of hits with this capacity."""
        return int(np.searchsorted(self._spent, capacity_pages * self._lookups, side="right"))
