"""The worker's own look at a pre-infer job: the trigger's policy again, with what only the worker knows.

What HBM holds already is not charged, only the tail is; what comes back from DRAM is charged its copy, and is never
refused. The trigger has judged risk and lead time; here it is footprint and load that count, since several triggers and
a stale status can add up to too much.
"""

from __future__ import annotations

from relaygr.admission.buckets import OwnerBuckets
from relaygr.admission.latency import LatencyModel
from relaygr.admission.policy import Estimate, Refusal
from relaygr.admission.settings import AdmissionSettings
from relaygr.runtime.clock import Clock
from relaygr.worker.executor.work import JobOutcome, JobWork, ResolvedPrefix
from relaygr.worker.kv import KvGeometry

_OUTCOMES = {
    Refusal.FOOTPRINT: JobOutcome.OVER_FOOTPRINT,
    Refusal.LOAD: JobOutcome.OVER_LOAD,
    Refusal.LOW_VALUE: JobOutcome.SHED,
}


class JobAdmission:
    """One worker's buckets. Belongs to the device thread."""

    def __init__(
        self, settings: AdmissionSettings, hbm_capacity_bytes: int, geometry: KvGeometry, clock: Clock
    ) -> None:
        limits = settings.bucket_limits()
        self._buckets = OwnerBuckets(limits, hbm_capacity_bytes, share=1.0, now_us=clock.monotonic_us())
        self._geometry = geometry
        self._lease_margin_us = settings.lease_margin_ms * 1000
        self._clock = clock

    def refuse(
        self,
        work: JobWork,
        span: ResolvedPrefix,
        cached_tokens: int,
        scored_tokens: int,
        prepare_us: float,
        latency: LatencyModel,
    ) -> JobOutcome | None:
        """Why the job is not admitted; None admits and charges it.

        `scored_tokens`: of its request, as expected. `prepare_us`: device time of what is not cached.
        """
        now_us = self._clock.monotonic_us()
        tail_tokens = span.tokens - cached_tokens
        estimate = Estimate(
            prefix_tokens=span.tokens,
            scored_tokens=scored_tokens,
            full_us=latency.full_us(span.tokens, scored_tokens),
            hit_us=latency.hit_us(span.tokens, scored_tokens),
            prepare_us=prepare_us,
            new_bytes=tail_tokens * self._geometry.bytes_per_token,
            lead_us=work.expected_ranking_us - now_us,
            alive_us=self._alive_us(work, now_us),
        )
        refusal = self._buckets.admit(estimate, now_us)
        return None if refusal is None else _OUTCOMES[refusal]

    def charge_reload(self, work: JobWork, tokens: int, latency: LatencyModel) -> None:
        """A copy of so many tokens from DRAM has begun for the job."""
        now_us = self._clock.monotonic_us()
        size_bytes = tokens * self._geometry.bytes_per_token
        self._buckets.charge(float(size_bytes) * self._alive_us(work, now_us), latency.reload_us(size_bytes), now_us)

    def count_ranking(self, device_us: float) -> None:
        """Device time that a ranking request took: what is left is for pre-infer."""
        self._buckets.count_ranking(device_us, self._clock.monotonic_us())

    def _alive_us(self, work: JobWork, now_us: int) -> int:
        """How long its pages stay taken: to its request, and the lease's margin."""
        return max(0, work.expected_ranking_us - now_us) + self._lease_margin_us
