"""The admission buckets: how much pre-infer work each owner (worker) may be given.

**Footprint.** By Little's law the cache holds, on average, rate × E[bytes × time alive]. Each admission charges
bytes × time alive to a leaky bucket that drains at (1 - r) × capacity bytes a second, so over any window

    sum of admitted bytes × time alive <= drain × (window + burst) + the largest admission.

**Load.** Each admission charges the device time of its preparation to a second bucket, which drains at

    max(preinfer_share, rho - ranking load)

where the ranking load is a moving average over all impressions, with T_hit for admitted ones and T_full for the
others. The guaranteed share is needed because an overload would otherwise refuse every job, which turns every ranking
into full inference, which keeps the overload going.

**Value.** When a bucket is more than half full, an admission must save at least a certain time per byte: a quantile of
the recently offered values, which rises with the level of the bucket. Equal values are admitted.

Each process has its own buckets per owner. Their share of the owner's budget is (partitions of the owner that are
assigned to this process) / (partitions of the owner), so the buckets of several trigger processes add up to one budget.

Not thread-safe: the deciding thread owns the buckets. Times are arguments; a time before the last one has no effect.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from relaygr.admission.policy import Estimate, OwnerView, Refusal

_SHORT_FROM = 0.5
"""The level, as a share of the burst, above which the value threshold applies."""
_TOP_QUANTILE = 0.95
_VALUE_WINDOW = 256
_RANKING_WINDOW_US = 1_000_000.0
"""Time constant of the ranking load."""
MAX_OWNERS = 4096


class LeakyBucket:
    """A level that drains at a constant rate. The bucket has room for a charge that keeps the level within the burst.

    An empty bucket has room for any charge; otherwise a charge larger than the burst would never be admitted.
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
        """Changes the rate from now on and keeps the level."""
        self._drain(now_us)
        self._set(rate_per_us, burst_us)

    def _drain(self, now_us: int) -> None:
        if now_us > self._at_us:
            self._level = max(0.0, self._level - (now_us - self._at_us) * self._rate_per_us)
            self._at_us = now_us

    def fill(self, now_us: int) -> float:
        """Level / burst; 0 when empty. It exceeds 1 only after an oversized charge or a lowered rate."""
        self._drain(now_us)
        if self._level == 0:
            return 0.0
        return self._level / self._burst if self._burst else math.inf

    def has_room(self, charge: float, now_us: int) -> bool:
        """Whether the bucket has room for `charge`."""
        self._drain(now_us)
        if self._rate_per_us == 0:
            return charge == 0
        return self._level == 0 or self._level + charge <= self._burst

    def charge(self, amount: float, now_us: int) -> None:
        """Adds to the level, even without room."""
        self._drain(now_us)
        self._level += amount


class ValueGate:
    """A moving quantile over the recently offered values (time saved per byte), admitted or not."""

    def __init__(self, window: int = _VALUE_WINDOW) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._window = window

    def observe(self, density: float) -> None:
        """Adds an offered value and drops the oldest one beyond the window: O(log window) and a short memory move."""
        if len(self._recent) == self._window:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(density)
        bisect.insort(self._sorted, density)

    def threshold(self, fill: float) -> float:
        """The least value that is admitted at the level `fill`."""
        if fill <= _SHORT_FROM or not self._sorted:
            return 0.0
        quantile = min(_TOP_QUANTILE, (fill - _SHORT_FROM) / (1 - _SHORT_FROM))
        return self._sorted[int(quantile * (len(self._sorted) - 1))]


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """Settings of the buckets."""

    footprint_reserve: float
    load_limit: float
    preinfer_share: float
    burst_us: int


class OwnerBuckets:
    """The footprint and load buckets of one owner, for the share of this process. Implements `policy.Buckets`."""

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
        """Sets the owner's capacity and the share of this process."""
        self._capacity_bytes = (1 - self._limits.footprint_reserve) * hbm_capacity_bytes
        # The ranking requests of partitions that were lost are not this process's any more.
        self._ranking_us *= share / self._share
        self._share = share
        self._footprint.configure(self._capacity_bytes * share, self._limits.burst_us, now_us)
        self._configure_load(now_us)

    def ranking_load(self, now_us: int) -> float:
        """Device time of ranking per unit of time, relative to the share; 1 is a device that only ranks."""
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
        # A prefix that is larger than the capacity never fits, whatever the burst.
        fits = estimate.new_bytes <= self._capacity_bytes
        if not (fits and self._footprint.has_room(estimate.footprint_byte_us, now_us)):
            return Refusal.FOOTPRINT
        if not self._load.has_room(estimate.prepare_us, now_us):
            return Refusal.LOAD
        fill = max(self._footprint.fill(now_us), self._load.fill(now_us))
        if density < self._value.threshold(fill):
            return Refusal.LOW_VALUE
        self.charge(estimate.footprint_byte_us, estimate.prepare_us, now_us)
        return None

    def charge(self, footprint_byte_us: float, device_us: float, now_us: int) -> None:
        """Charges both buckets, even without room."""
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
    """The buckets of at most `MAX_OWNERS` owners. The owner whose buckets changed least recently is evicted."""

    def __init__(self, limits: BucketLimits) -> None:
        self._limits = limits
        self._assigned: frozenset[int] = frozenset()
        self._buckets: OrderedDict[str, tuple[OwnerView | None, OwnerBuckets]] = OrderedDict()

    def reassign(self, partitions: frozenset[int]) -> None:
        """Sets the partitions that this process decides for, and with them its share of each owner's budget."""
        if partitions != self._assigned:
            self._assigned = partitions
            for worker_id, (_, buckets) in self._buckets.items():
                self._buckets[worker_id] = (None, buckets)

    def of(self, owner: OwnerView, now_us: int) -> OwnerBuckets:
        """The owner's buckets, configured by its latest view."""
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
        # An event can arrive before the assignment of its partition is known. The owner then gets the share of one
        # partition.
        held = max(1, len(owner.partitions & self._assigned))
        return held / max(1, len(owner.partitions))
