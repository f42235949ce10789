"""What no policy could have beaten: a bound on hits from above, for any capacity.

Belady's MIN (1966) is the best policy where all entries have one size; with different sizes the best is hard to
find (NP-hard), so this is a bound on it, PFOO-L: Berger, Beckmann, Harchol-Balter, "Practical bounds on
optimal caching with variable object sizes", SIGMETRICS 2018.

Number the look-ups 1..N. A visit that begins with look-up j, whose user looked last at i, is a hit only if the
reusable pages of its prefix lay in the cache just before every look-up i+1 .. j: that takes `pages * (j - i)`
page-steps. There are `capacity * N` page-steps in all. So no policy, however clever, has more hits than one may buy
with that budget, cheapest first. It is a bound and not a policy, since it may hold too much at one time and too
little at another; and prefixes that are being computed take no room in it. With a capacity of both tiers together it
bounds hits in either, since a page in either takes one of its pages. What look-up i asked for counts as there at
once: a link so slow that other look-ups come meanwhile keeps a prefix for fewer steps than are counted here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from relaygr.replay.demand import Demand, Visits
from relaygr.worker.kv import PrefixLayout


class HitBound:
    """The bound of one demand."""

    def __init__(self, demands: Iterable[Demand], layout: PrefixLayout, page_tokens: int) -> None:
        # Page-steps of each visit that can be a hit; eight bytes each, since a trace may be long.
        costs = array("q")
        visits, begun = Visits(), 0
        for demand in demands:
            visit = visits.begin(demand)
            if visit is not None:
                begun += 1
                if visit.reusable:
                    pages = -(-layout.tokens(visit.reusable) // page_tokens)
                    costs.append(pages * (visit.number - visit.before))
        self.visits = begun
        self._lookups = visits.lookups
        self._spent: NDArray[np.int64] = np.cumsum(np.sort(np.array(costs, np.int64)))

    @property
    def with_all_room(self) -> int:
        """Hits of a cache that never evicts: all but first visits, and those whose history began anew."""
        return int(self._spent.size)

    def hits(self, capacity_pages: int) -> int:
        """At most so many with so many pages."""
        return int(np.searchsorted(self._spent, capacity_pages * self._lookups, side="right"))
