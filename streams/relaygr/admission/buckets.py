"""The admission buckets: how much pre-infer work each owner (worker) may be given.

**Footprint.** By Little's law the cache holds, on average, rate × E[bytes × time alive]. Each admission charges
bytes × time alive to a leaky bucket that drains at (1 - r) × capacity bytes a second, so over any window

    sum of admitted bytes × time alive <= drain × (window + burst) + the largest admission.

**Load.** Each admission charges the device time of its preparation to a second bucket, of two bursts, which drains at

    max(preinfer_share, rho - ranking load)

where the ranking load is a moving average over all impressions: T_hit for those at risk, and for the others also the
computation of what is not cached. The guaranteed share is needed because an overload would otherwise refuse every job,
which turns every ranking into full inference, which keeps the overload going.

**Scenarios.** Each scenario has a bucket of its own within the owner's footprint and load, with its share of the drain
and of half the burst. The *lent* bucket has the other half of the burst. It takes charges that no longer fit a
scenario's own bucket, and while that bucket is empty, its share of the drain empties the lent bucket instead. So each
scenario always gets its share, and gets all while the others are idle. With one scenario there is no lent bucket.

Each process has its own buckets per owner. Their share of the owner's budget is (partitions of the owner that are
assigned to this process) / (partitions of the owner), so the buckets of several trigger processes add up to one budget.

Not thread-safe: the deciding thread owns the buckets. Times are arguments, and the trigger's are wall time. A time
before the last one has no effect, unless it is at least `SET_BACK_US` earlier: the clock was set back.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from relaygr.admission.policy import Estimate, OwnerView, Refusal
from relaygr.schemas.messages import DEFAULT_SCENARIO

_RANKING_WINDOW_US = 1_000_000.0
"""Time constant of the ranking load."""
SET_BACK_US = 1_000_000
"""A time so much before the last one means that the clock was set back. A smaller step is work that is counted late."""
MAX_OWNERS = 4096
LOAD_BURSTS = 2
"""The load bucket holds so many bursts. With one, the third of three long prefixes that came together was refused on an
idle device, and its request computed it without the lead time."""
_LENT = 0.5
"""The part of the burst that scenarios lend each other."""
ONE_SHARE: Mapping[str, float] = {DEFAULT_SCENARIO: 1.0}


class _Elapsed:
    """The time that passes from call to call."""

    def __init__(self, now_us: int) -> None:
        self._at_us = now_us

    def since_last(self, now_us: int) -> int:
        """Time since the last call, in µs; 0 if `now_us` is earlier."""
        elapsed_us = now_us - self._at_us
        # A restart from the time of work that is counted late would count the same time twice. Without a restart after
        # the clock was set back, no time would count until the clock is where it was.
        if elapsed_us > 0 or elapsed_us <= -SET_BACK_US:
            self._at_us = now_us
        return max(0, elapsed_us)


class SharedBucket:
    """A leaky bucket that scenarios share: each has its part of the drain, and borrows what others do not need.

    Over any window the admitted charges are at most drain × window + burst + the largest charge of each scenario.
    """

    def __init__(self, shares: Mapping[str, float], rate_per_us: float, burst_us: float, now_us: int) -> None:
        """`shares`: by scenario, 1 in sum. Drains `rate_per_us` units a µs; holds `rate_per_us * burst_us` units.

        Raises ValueError for a rate or burst below 0.
        """
        self._shares = shares
        self._levels = dict.fromkeys(shares, 0.0)
        self._lent_level = 0.0
        self._lent_part = _LENT if len(shares) > 1 else 0.0
        self._elapsed = _Elapsed(now_us)
        self._set(rate_per_us, burst_us)

    def _set(self, rate_per_us: float, burst_us: float) -> None:
        if not (rate_per_us >= 0 and burst_us >= 0):
            raise ValueError(f"rate {rate_per_us} and burst {burst_us} must be at least 0")
        self._rate_per_us = rate_per_us
        burst = rate_per_us * burst_us
        self._lent_burst = self._lent_part * burst
        self._own_burst = burst - self._lent_burst
        """Of all scenarios together."""

    def configure(self, rate_per_us: float, burst_us: float, now_us: int) -> None:
        """Changes the rate from now on and keeps the levels."""
        self._drain(now_us)
        self._set(rate_per_us, burst_us)

    def _drain(self, now_us: int) -> None:
        elapsed_us = self._elapsed.since_last(now_us)
        if not elapsed_us:
            return
        drained = elapsed_us * self._rate_per_us
        for scenario, share in self._shares.items():
            level = self._levels[scenario] - share * drained
            self._levels[scenario] = max(0.0, level)
            if level < 0:
                self._lent_level = max(0.0, self._lent_level + level)

    def has_room(self, scenario: str, charge: float, now_us: int) -> bool:
        """Whether there is room for a charge of the scenario, in its own bucket and the lent one."""
        self._drain(now_us)
        if self._rate_per_us == 0:
            return charge == 0
        own = self._levels[scenario]
        # An empty bucket has room for any charge. Otherwise a charge above the burst would never be admitted, nor one
        # for which the other scenarios leave no room.
        return own == 0 or charge <= self._own_room(scenario) + max(0.0, self._lent_burst - self._lent_level)

    def charge(self, scenario: str, amount: float, now_us: int) -> None:
        """Fills the scenario's own bucket, then the lent one, and adds the rest to its own beyond the burst."""
        self._drain(now_us)
        lent = min(max(0.0, amount - self._own_room(scenario)), max(0.0, self._lent_burst - self._lent_level))
        self._lent_level += lent
        self._levels[scenario] += amount - lent

    def _own_room(self, scenario: str) -> float:
        return max(0.0, self._shares[scenario] * self._own_burst - self._levels[scenario])


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """Settings of the buckets."""

    footprint_reserve: float
    load_limit: float
    preinfer_share: float
    burst_us: int


class OwnerBuckets:
    """The footprint and load buckets of one owner, for the share of this process. Implements `policy.Buckets`."""

    def __init__(
        self,
        limits: BucketLimits,
        hbm_capacity_bytes: int,
        share: float,
        now_us: int,
        scenarios: Mapping[str, float] = ONE_SHARE,
    ) -> None:
        """`share` in (0, 1] of the owner's whole budget. `scenarios`: their parts of it, 1 in sum."""
        self._limits = limits
        self._capacity_bytes = 0.0
        self._share = share
        self._footprint = SharedBucket(scenarios, 0.0, limits.burst_us, now_us)
        self._load = SharedBucket(scenarios, 0.0, LOAD_BURSTS * limits.burst_us, now_us)
        self._ranking_us = 0.0
        self._ranking_elapsed = _Elapsed(now_us)
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

    def admit(self, estimate: Estimate, now_us: int, scenario: str = DEFAULT_SCENARIO) -> Refusal | None:
        """See `policy.Buckets`. Raises KeyError for an unknown scenario."""
        self._configure_load(now_us)
        # A prefix that is larger than the capacity never fits, whatever the burst.
        fits = estimate.new_bytes <= self._capacity_bytes
        if not (fits and self._footprint.has_room(scenario, estimate.footprint_byte_us, now_us)):
            return Refusal.FOOTPRINT
        if not self._load.has_room(scenario, estimate.prepare_us, now_us):
            return Refusal.LOAD
        self.charge(estimate.footprint_byte_us, estimate.prepare_us, now_us, scenario)
        return None

    def charge(self, footprint_byte_us: float, device_us: float, now_us: int, scenario: str = DEFAULT_SCENARIO) -> None:
        """Charges both buckets, even without room."""
        self._footprint.charge(scenario, footprint_byte_us, now_us)
        self._load.charge(scenario, device_us, now_us)

    def _configure_load(self, now_us: int) -> None:
        free = max(self._limits.preinfer_share, self._limits.load_limit - self.ranking_load(now_us))
        self._load.configure(free * self._share, LOAD_BURSTS * self._limits.burst_us, now_us)

    def _decay_ranking(self, now_us: int) -> None:
        elapsed_us = self._ranking_elapsed.since_last(now_us)
        if elapsed_us:
            self._ranking_us *= math.exp(-elapsed_us / _RANKING_WINDOW_US)


class FleetBuckets:
    """The buckets of at most `MAX_OWNERS` owners. The owner whose buckets changed least recently is evicted."""

    def __init__(self, limits: BucketLimits, scenarios: Mapping[str, float] = ONE_SHARE) -> None:
        """`scenarios`: their parts of each owner's budget, 1 in sum."""
        self._limits = limits
        self._scenarios = scenarios
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
            buckets = OwnerBuckets(self._limits, owner.hbm_capacity_bytes, share, now_us, self._scenarios)
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
