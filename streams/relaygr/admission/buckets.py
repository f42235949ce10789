"""The buckets: how much pre-infer work one owner's share allows.

**Footprint.** By Little's law the cache holds, on average, rate × E[bytes × time alive]. The account is charged
bytes × time alive for each admission and drains at (1 - r) × capacity bytes a second, so over any window

    sum of admitted bytes × time alive <= drain × (window + burst) + the largest admission.

**Load.** The account is charged the device time of each admitted preparation and drains at

    max(preinfer_share, rho - ranking load)

where the ranking load is a running mean over every impression, cached (T_hit) or not (T_full). Without the
guaranteed share, an overload would refuse every job, turn every ranking into full inference and so keep itself
alive for good.

**Value.** From half full on, an account asks for a value density (time saved per byte) of at least a quantile of
what was lately offered; the fuller, the higher. Ties are admitted.

An account is per owner and process. Its share is (the owner's partitions that this process is assigned) /
(the owner's partitions), so the accounts of several trigger processes add up to one whole budget.

Not thread-safe: the deciding thread owns it. Time comes in as numbers; one that goes back counts as standing still.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from relaygr.admission.policy import Estimate, OwnerView, Refusal

_SHORT_FROM = 0.5
"""Fill of an account from which value decides."""
_TOP_QUANTILE = 0.95
_VALUE_WINDOW = 256
_RANKING_WINDOW_US = 1_000_000.0
"""Time constant of the ranking load."""
MAX_OWNERS = 4096


class LeakyBucket:
    """A level that drains at a constant rate and refuses what would lift it above its burst.

    A charge larger than the burst is taken when the account is empty: it may not starve for being large.
    """

    def __init__(self, rate_per_us: float, burst_us: float, now_us: int) -> None:
        """Drains `rate_per_us` units a µs; holds `rate_per_us * burst_us` units. Raises ValueError below 0."""
        self._level = 0.0
        self._at_us = now_us
        self._set(rate_per_us, burst_us)

    def _set(self, rate_per_us: float, burst_us: float) -> None:
        if not (rate_per_us >= 0 and burst_us >= 0):
            raise ValueError(f"rate {rate_per_us} and burst {burst_us} must be at least 0")
        self._rate_per_us = rate_per_us
        self._burst = rate_per_us * burst_us

    def configure(self, rate_per_us: float, burst_us: float, now_us: int) -> None:
        """A new rate from now on; what was charged stays charged."""
        self._drain(now_us)
        self._set(rate_per_us, burst_us)

    def _drain(self, now_us: int) -> None:
        if now_us > self._at_us:
            self._level = max(0.0, self._level - (now_us - self._at_us) * self._rate_per_us)
            self._at_us = now_us

    def fill(self, now_us: int) -> float:
        """Level / burst, 0 when empty. At most 1, but after an oversized charge or a lowered rate."""
        self._drain(now_us)
        if self._level == 0:
            return 0.0
        return self._level / self._burst if self._burst else math.inf

    def has_room(self, charge: float, now_us: int) -> bool:
        """Would `charge` be taken?"""
        self._drain(now_us)
        if self._rate_per_us == 0:
            return charge == 0
        return self._level == 0 or self._level + charge <= self._burst

    def charge(self, amount: float, now_us: int) -> None:
        """Adds to the level, room or not."""
        self._drain(now_us)
        self._level += amount


class ValueGate:
    """A running quantile over the value densities that were lately offered, admitted or not."""

    def __init__(self, window: int = _VALUE_WINDOW) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._window = window

    def observe(self, density: float) -> None:
        """Notes an offer; the oldest beyond the window is forgotten. O(log window) and a short move."""
        if len(self._recent) == self._window:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(density)
        bisect.insort(self._sorted, density)

    def asks(self, fill: float) -> float:
        """The density that an account filled to `fill` asks for."""
        if fill <= _SHORT_FROM or not self._sorted:
            return 0.0
        quantile = min(_TOP_QUANTILE, (fill - _SHORT_FROM) / (1 - _SHORT_FROM))
        return self._sorted[int(quantile * (len(self._sorted) - 1))]


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """Settings of the buckets; `share` and the owner's capacity come with the owner."""

    footprint_reserve: float
    load_limit: float
    preinfer_share: float
    burst_us: int


class OwnerBuckets:
    """One owner's footprint and load, as far as this process may spend them. Implements `policy.Buckets`."""

    def __init__(self, limits: BucketLimits, hbm_capacity_bytes: int, share: float, now_us: int) -> None:
        """`share` in (0, 1] of the owner's whole budget."""
        self._limits = limits
        self._capacity_bytes = 0.0
        self._share = share
        self._footprint = LeakyBucket(0.0, limits.burst_us, now_us)
        self._load = LeakyBucket(0.0, limits.burst_us, now_us)
        self._value = ValueGate()
        self._ranking_us = 0.0
        self._ranking_at_us = now_us
        self.configure(hbm_capacity_bytes, share, now_us)

    def configure(self, hbm_capacity_bytes: int, share: float, now_us: int) -> None:
        """The owner's capacity or our share changed."""
        self._capacity_bytes = (1 - self._limits.footprint_reserve) * hbm_capacity_bytes
        self._share = share
        self._footprint.configure(self._capacity_bytes * share, self._limits.burst_us, now_us)
        self._configure_load(now_us)

    def ranking_load(self, now_us: int) -> float:
        """Device time of ranking per unit of time, as part of our share; 1 is a device fully busy with it."""
        self._decay_ranking(now_us)
        return self._ranking_us / _RANKING_WINDOW_US / self._share

    def count_ranking(self, device_us: float, now_us: int) -> None:
        """See `policy.Buckets`."""
        self._decay_ranking(now_us)
        self._ranking_us += device_us

    def admit(self, estimate: Estimate, now_us: int) -> Refusal | None:
        """See `policy.Buckets`."""
        self._configure_load(now_us)
        density = estimate.saved_us_per_byte
        self._value.observe(density)
        # No burst makes a prefix fit that is larger than all there is.
        fits = estimate.new_bytes <= self._capacity_bytes
        if not (fits and self._footprint.has_room(estimate.footprint_byte_us, now_us)):
            return Refusal.FOOTPRINT
        if not self._load.has_room(estimate.prepare_us, now_us):
            return Refusal.LOAD
        fill = max(self._footprint.fill(now_us), self._load.fill(now_us))
        if density < self._value.asks(fill):
            return Refusal.LOW_VALUE
        self.charge(estimate.footprint_byte_us, estimate.prepare_us, now_us)
        return None

    def charge(self, footprint_byte_us: float, device_us: float, now_us: int) -> None:
        """Counts what is done, whether there is room for it or not."""
        self._footprint.charge(footprint_byte_us, now_us)
        self._load.charge(device_us, now_us)

    def _configure_load(self, now_us: int) -> None:
        free = max(self._limits.preinfer_share, self._limits.load_limit - self.ranking_load(now_us))
        self._load.configure(free * self._share, self._limits.burst_us, now_us)

    def _decay_ranking(self, now_us: int) -> None:
        if now_us > self._ranking_at_us:
            self._ranking_us *= math.exp((self._ranking_at_us - now_us) / _RANKING_WINDOW_US)
            self._ranking_at_us = now_us


class FleetBuckets:
    """The buckets of every owner that this process decides for, at most `MAX_OWNERS`, longest unchanged forgotten."""

    def __init__(self, limits: BucketLimits) -> None:
        self._limits = limits
        self._assigned: frozenset[int] = frozenset()
        self._buckets: OrderedDict[str, tuple[OwnerView | None, OwnerBuckets]] = OrderedDict()

    def reassign(self, partitions: frozenset[int]) -> None:
        """This process now decides for these partitions, and spends as much of each owner's budget."""
        if partitions != self._assigned:
            self._assigned = partitions
            for worker_id, (_, buckets) in self._buckets.items():
                self._buckets[worker_id] = (None, buckets)

    def of(self, owner: OwnerView, now_us: int) -> OwnerBuckets:
        """The owner's buckets, following its latest view."""
        known = self._buckets.get(owner.worker_id)
        if known is not None and known[0] is owner:
            return known[1]
        share = self._share(owner)
        if known is None:
            buckets = OwnerBuckets(self._limits, owner.hbm_capacity_bytes, share, now_us)
        else:
            buckets = known[1]
            buckets.configure(owner.hbm_capacity_bytes, share, now_us)
        self._buckets[owner.worker_id] = (owner, buckets)
        self._buckets.move_to_end(owner.worker_id)
        if len(self._buckets) > MAX_OWNERS:
            self._buckets.popitem(last=False)
        return buckets

    def _share(self, owner: OwnerView) -> float:
        # An event of a partition just taken over may be ahead of the news: then it is one partition's worth.
        held = max(1, len(owner.partitions & self._assigned))
        return held / max(1, len(owner.partitions))
