"""A worker's admission of pre-infer jobs: the trigger's buckets, filled with the worker's own figures.

A job is charged for the tokens that HBM does not hold. A reload from DRAM is charged for its copy and is never refused.
The trigger has checked risk and lead time already. The worker checks footprint and load again, because several triggers
and a stale status can admit too much.
"""

from __future__ import annotations

from relaygr.admission.buckets import OwnerBuckets
from relaygr.admission.latency import LatencyModel
from relaygr.admission.policy import Estimate, Refusal
from relaygr.admission.scenarios import ONLY_DEFAULT, Scenarios, shares_of
from relaygr.admission.settings import AdmissionSettings
from relaygr.runtime.clock import Clock
from relaygr.schemas.messages import DEFAULT_SCENARIO
from relaygr.worker.executor.work import JobOutcome, JobWork, ResolvedPrefix
from relaygr.worker.kv import KvGeometry

MAX_UNCOUNTED_PASSES = 1024
"""Ranking passes that wait to be counted: a worker without jobs must not keep all of them."""

_OUTCOMES = {
    Refusal.FOOTPRINT: JobOutcome.OVER_FOOTPRINT,
    Refusal.LOAD: JobOutcome.OVER_LOAD,
}


class JobAdmission:
    """One worker's buckets. Belongs to the device thread."""

    def __init__(
        self,
        settings: AdmissionSettings,
        hbm_capacity_bytes: int,
        geometry: KvGeometry,
        clock: Clock,
        scenarios: Scenarios = ONLY_DEFAULT,
    ) -> None:
        """`scenarios`: those that the worker serves."""
        limits, shares = settings.bucket_limits(), shares_of(scenarios)
        self._buckets = OwnerBuckets(limits, hbm_capacity_bytes, 1.0, clock.monotonic_us(), shares)
        self._geometry = geometry
        self._lease_margin_us = settings.lease_margin_ms * 1000
        self._clock = clock
        self._uncounted: list[tuple[int, int]] = []
        """Device time and end of ranking passes. Many are counted at once, since few requests have jobs to admit."""

    def refuse(
        self,
        work: JobWork,
        prefix: ResolvedPrefix,
        cached_tokens: int,
        scored_tokens: int,
        prepare_us: float,
        latency: LatencyModel,
    ) -> JobOutcome | None:
        """The reason why the job is not admitted; or None, and the job is charged, unless it was before.

        `scored_tokens`: suffix tokens and candidates of the expected request. `prepare_us`: device time of the tokens
        that are not cached.
        """
        self.count_rankings()
        if work.is_charged:
            return None
        now_us = self._clock.monotonic_us()
        tail_tokens = prefix.tokens - cached_tokens
        estimate = Estimate(
            prefix_tokens=prefix.tokens,
            scored_tokens=scored_tokens,
            full_us=latency.full_us(prefix.tokens, scored_tokens),
            hit_us=latency.hit_us(prefix.tokens, scored_tokens),
            prepare_us=prepare_us,
            new_bytes=tail_tokens * self._geometry.bytes_per_token,
            alive_us=self._alive_us(work, now_us),
            cached_tokens=cached_tokens,
        )
        refusal = self._buckets.admit(estimate, now_us, work.job.scenario or DEFAULT_SCENARIO)
        work.is_charged = refusal is None
        return None if refusal is None else _OUTCOMES[refusal]

    def charge_reload(self, work: JobWork, tokens: int, latency: LatencyModel) -> None:
        """Charges the copy of `tokens` tokens from DRAM that has begun for the job."""
        self.count_rankings()
        now_us = self._clock.monotonic_us()
        size_bytes = tokens * self._geometry.bytes_per_token
        footprint_byte_us = float(size_bytes) * self._alive_us(work, now_us)
        scenario = work.job.scenario or DEFAULT_SCENARIO
        self._buckets.charge(footprint_byte_us, latency.reload_us(size_bytes), now_us, scenario)

    def ranked(self, device_us: int, at_us: int) -> None:
        """A ranking pass ended at `at_us`, and is counted before the next decision. Pre-infer gets a part of the rest
        of the device time.
        """
        self._uncounted.append((device_us, at_us))
        if len(self._uncounted) >= MAX_UNCOUNTED_PASSES:
            self.count_rankings()

    def count_rankings(self) -> None:
        """Counts the ranking passes that were not counted yet."""
        for device_us, at_us in self._uncounted:
            self._buckets.count_ranking(device_us, at_us)
        self._uncounted.clear()

    def _alive_us(self, work: JobWork, now_us: int) -> int:
        """How long the job's pages stay taken: until its request, and the margin of the lease."""
        return max(0, work.expected_ranking_us - now_us) + self._lease_margin_us


class SlotAdmission(JobAdmission):
    """Admits every job, in a pre-infer worker: there are never more than slots."""

    def refuse(self, work: JobWork, *_: object) -> JobOutcome | None:
        work.is_charged = True
        return None

    def charge_reload(self, *_: object) -> None:
        """Nothing is charged."""
