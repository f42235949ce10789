"""The admission policy: whether an impression gets a pre-infer job.

    at risk    outside + ratio × margin × full path > ranking budget                      (`relaygr.admission.risk`)
    feasible   queued pre-infer work + T_prepare + T_hit <= usable lead time + ranking budget
    footprint  admitted rate × E[bytes × time alive] <= (1 - r) × cache capacity          (Little's law)
    load       admitted rate × E[T_prepare] + ranking rate × E[T_hit; T_full if not at risk] <= rho

An impression is admitted if it is at risk and feasible and both buckets have room. While the owner is unknown or
silent, the length of the history decides alone. Skipping an impression is always safe: its request takes the full path.
docs/trigger.md explains the rules, which come from the RelayGR paper, arXiv 2601.01712 (sequence-aware trigger).

Pure. Only the buckets (`relaygr.admission.buckets`) hold state, and only `decide` charges them. All durations are in
µs; `now_us` is wall time, as in the messages.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Final, Protocol

from relaygr.admission.latency import LatencyModel, Stage, length_bucket
from relaygr.admission.lead import lead_shares_of
from relaygr.admission.risk import NO_FACTORS, factors_of, risky_us
from relaygr.schemas.messages import DEFAULT_SCENARIO, LengthRatios, PreInferJob, RetrievalEvent, WorkerStatus
from relaygr.schemas.record import record


class DecisionReason(enum.StrEnum):
    """The outcome of a retrieval event, a metric label. Every event is counted under exactly one reason."""

    ADMITTED = "admitted"
    NO_STATUS_THRESHOLD = "no_status_threshold"
    """Admitted by the length of its history, while the owner is unknown or silent."""
    BELOW_THRESHOLD = "below_threshold"
    """Refused by the length of its history, while the owner is unknown or silent."""
    NOT_AT_RISK = "not_at_risk"
    INFEASIBLE = "infeasible"
    """The request could not be ranked in time on the prefix, or the request comes before the job."""
    FOOTPRINT = "footprint"
    LOAD = "load"
    NO_HISTORY = "no_history"
    REPEATED = "repeated"
    """The user's last event had the same request id."""
    UNDER_WAY = "under_way"
    """A live job of the user prepares the same version of the history."""
    DECLINED = "declined"
    """Refused by a policy of another package, for reasons of its own."""
    EXPIRED = "expired"
    DISABLED = "disabled"
    UNDECODABLE = "undecodable"
    MISROUTED = "misrouted"
    UNKNOWN_SCENARIO = "unknown_scenario"
    """The settings have no scenario of the event's name."""
    NOT_SENT = "not_sent"
    """Admitted, but the producer did not accept the job."""
    ERROR = "error"
    """A bug in the trigger. The event is in dead letters, the traceback in the log."""


OFF_FACTOR: Final = 1.25
"""Factor on predicted times while a worker's predictions are off: more impressions are at risk, fewer feasible."""
LATE_PART: Final = 0.5
"""A worker orders jobs as due when this part of the ranking budget has passed after the request is expected. With an
earlier time the job would go before requests that have less time than its own request will have."""
MAX_JOB_LIFETIME_US: Final = 60_000_000
"""The longest time that a worker holds a job, which bounds the effect of a gateway's wrong clock or time unit."""


class PrefixTier(enum.StrEnum):
    """The tier in which a prefix is cached, if any."""

    NONE = "none"
    POOL = "pool"
    """A pre-infer worker computes it, and its owner loads it."""
    DRAM = "dram"
    HBM = "hbm"


@record(frozen=True, slots=True)
class CachedPrefix:
    """The cached part of an impression's prefix: exact in the worker, estimated in the trigger."""

    tier: PrefixTier = PrefixTier.NONE
    tokens: int = 0


NOTHING_CACHED = CachedPrefix()


@record(frozen=True, slots=True)
class ImpressionFacts:
    """The input of the policy: metadata of one retrieval event, or of the job made from it."""

    expected_ranking_at_us: int
    ranking_budget_us: int
    history_behaviours: int | None
    """None if the message names no history."""
    expected_suffix: int
    expected_candidates: int
    retrieval_at_us: int | None = None
    """When the lead time began; None: now."""
    scenario: str = DEFAULT_SCENARIO

    @classmethod
    def of(cls, message: RetrievalEvent | PreInferJob) -> ImpressionFacts:
        """The metadata of a message."""
        return cls(
            expected_ranking_at_us=message.expected_ranking_at_us,
            ranking_budget_us=message.ranking_budget_ms * 1000,
            history_behaviours=message.history_length,
            expected_suffix=message.expected_suffix,
            expected_candidates=message.expected_candidates,
            retrieval_at_us=message.retrieval_at_us,
            scenario=message.scenario or DEFAULT_SCENARIO,
        )


@record(frozen=True, slots=True)
class PrefixHolder:
    """A worker's process and its model. Another process does not have its HBM, and another model not its prefixes."""

    worker_id: str
    active_since_us: int | None
    model_revision: str


@record(frozen=True, slots=True)
class OwnerView:
    """Input of the policy: the worker that owns a partition."""

    worker_id: str
    partitions: frozenset[int]
    latency: LatencyModel
    kv_bytes_per_token: int
    contextual_tokens: int
    tokens_per_behaviour: int
    max_prefix_behaviours: int
    hbm_capacity_bytes: int
    dram_capacity_bytes: int
    ranking_queue_p99_us: int
    preinfer_queue_us: int
    outside_us: int | None = None
    """P99 of a ranking request's time outside device work. None: an older worker, which sends only its queue's P99."""
    full_outside_us: int | None = None
    """`outside_us` of the requests that full inference served. None: few lately, or an older worker."""
    full_path_ratios: tuple[float, ...] = NO_FACTORS
    """P98 of measured / predicted device time of full inference, by length bucket."""
    lead_shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    """A low quantile of measured / expected lead time, by scenario. Absent: too few were measured lately."""
    reuses_prefixes: bool = True
    """Whether a prefix serves later impressions of its user, too."""
    length_ratios: Mapping[Stage, tuple[float, ...]] = field(default_factory=dict, hash=False)
    """Measured / predicted device time by length bucket. Absent: 1 for each."""
    predictions_off: bool = False
    """Whether the worker's predictions were off lately."""
    active_since_us: int | None = None
    """Since when the worker's process serves. None: an older worker, which does not say it."""
    model_revision: str = ""
    scaled: dict[int, LatencyModel] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The result of `latency_at` by length bucket, as far as it was asked for."""

    @classmethod
    def of(cls, status: WorkerStatus) -> OwnerView:
        """The view of a status. Raises ValueError if its latency model is not valid."""
        report = status.full_path
        return cls(
            worker_id=status.worker_id,
            partitions=frozenset(status.partitions),
            latency=LatencyModel(status.latency),
            kv_bytes_per_token=status.kv_bytes_per_token,
            contextual_tokens=status.contextual_tokens,
            tokens_per_behaviour=status.tokens_per_behaviour,
            max_prefix_behaviours=status.max_prefix_behaviours,
            hbm_capacity_bytes=status.hbm_capacity_bytes,
            dram_capacity_bytes=status.dram_capacity_bytes,
            ranking_queue_p99_us=status.ranking_queue_p99_us,
            preinfer_queue_us=status.preinfer_queue_us,
            outside_us=None if report is None else report.outside_us,
            full_outside_us=None if report is None else report.full_outside_us,
            full_path_ratios=NO_FACTORS if report is None else factors_of(report.ratios),
            lead_shares=lead_shares_of(status.lead_times),
            reuses_prefixes=status.reuses_prefixes is not False,
            length_ratios=_length_ratios_of(status.length_ratios),
            predictions_off=status.predictions_off is True,
            active_since_us=status.active_since_us,
            model_revision=status.model_revision,
        )

    def latency_at(self, prefix_tokens: int) -> LatencyModel:
        """The latency model for prefixes of this length."""
        if not self.length_ratios:
            return self.latency
        bucket = length_bucket(prefix_tokens)
        model = self.scaled.get(bucket)
        if model is None:
            factors = {stage: ratios[bucket] for stage, ratios in self.length_ratios.items()}
            model = self.latency if set(factors.values()) == {1.0} else self.latency.scaled(factors)
            self.scaled[bucket] = model
        return model

    @property
    def holder(self) -> PrefixHolder:
        """The process and model whose prefixes the worker holds now."""
        return PrefixHolder(self.worker_id, self.active_since_us, self.model_revision)

    @property
    def full_path_outside_us(self) -> int:
        """A high quantile of the time of full inference outside device work."""
        outside_us = self.ranking_queue_p99_us if self.outside_us is None else self.outside_us
        return max(outside_us, self.full_outside_us or 0)

    @property
    def safety_factor(self) -> float:
        """The factor on predicted times where a prediction that is too short would cause a wrong decision."""
        return OFF_FACTOR if self.predictions_off else 1.0

    def prefix_tokens(self, behaviours: int) -> int:
        """Tokens of the prefix of a history. Behaviours beyond the model's limit add no tokens."""
        return self.contextual_tokens + self.tokens_per_behaviour * min(behaviours, self.max_prefix_behaviours)


@record(frozen=True, slots=True)
class PolicyLimits:
    """The policy's settings."""

    fallback_behaviours: int
    assumed_behaviours: int
    """The length assumed if a message names no history; 0: such messages are skipped."""
    lead_fraction: float
    lease_margin_us: int
    only_at_risk: bool = True
    """False: impressions that are not at risk are admitted, too."""

    def behaviours_of(self, impression: ImpressionFacts) -> int:
        """The length of the history, assumed if the message names none."""
        known = impression.history_behaviours
        return self.assumed_behaviours if known is None else known


@record(frozen=True, slots=True)
class Estimate:
    """The costs of an impression on its owner, with and without the relay."""

    prefix_tokens: int
    scored_tokens: int
    full_us: float
    hit_us: float
    prepare_us: float
    """Device time until the prefix is ready: pre-infer, or reload and pre-infer of the tail."""
    new_bytes: int
    """HBM bytes that the admission needs in addition. Tokens that are in HBM already need none."""
    alive_us: int
    """How long the bytes stay in use: until the expected ranking request plus the margin of the lease."""
    cached_tokens: int = 0
    """The part of the prefix that HBM or DRAM holds."""

    @property
    def alone_us(self) -> float:
        """Device time of the ranking request without a job: what is not cached is computed for it."""
        return min(self.full_us, self.prepare_us + self.hit_us) if self.cached_tokens else self.full_us

    @property
    def footprint_byte_us(self) -> float:
        """The charge to the footprint bucket: bytes × time alive."""
        return float(self.new_bytes) * self.alive_us


class Refusal(enum.StrEnum):
    """Why the buckets refused an impression."""

    FOOTPRINT = "footprint"
    LOAD = "load"


class Buckets(Protocol):
    """The buckets of one owner, for the share of this process (`relaygr.admission.buckets.OwnerBuckets`)."""

    def admit(self, estimate: Estimate, now_us: int, scenario: str = DEFAULT_SCENARIO) -> Refusal | None:
        """Charges both buckets for the scenario and returns None, or charges neither and returns the reason."""

    def count_ranking(self, device_us: float, now_us: int) -> None:
        """Adds the device time of an expected ranking request to the ranking load."""


@record(frozen=True, slots=True)
class PolicyCase:
    """One impression, and what the trigger knows about its user and its owner."""

    impression: ImpressionFacts
    now_us: int
    owner: OwnerView | None = None
    """None: unknown, or silent. Then the length of the history decides."""
    buckets: Buckets | None = None
    """The owner's buckets; None without an owner, or without limits."""
    cached: CachedPrefix = NOTHING_CACHED
    margins: Sequence[float] = NO_FACTORS
    """The margins of the risk, by length bucket."""


@record(frozen=True, slots=True)
class Decision:
    """Whether the impression is admitted, and why. `estimate` is None without an owner or if it was not needed."""

    admit: bool
    reason: DecisionReason
    estimate: Estimate | None = None
    by_pool: bool = False
    """Whether a pre-infer worker gets the job, and not the owner."""


_WITHOUT_RISK = (DecisionReason.NOT_AT_RISK, DecisionReason.NO_HISTORY)
_REFUSED = {
    Refusal.FOOTPRINT: DecisionReason.FOOTPRINT,
    Refusal.LOAD: DecisionReason.LOAD,
}


def _length_ratios_of(report: LengthRatios | None) -> dict[Stage, tuple[float, ...]]:
    if report is None:
        return {}
    return {
        Stage.FULL: factors_of(report.full),
        Stage.PRE: factors_of(report.pre),
        Stage.HIT: factors_of(report.hit),
    }


def estimate(
    impression: ImpressionFacts,
    behaviours: int,
    owner: OwnerView,
    limits: PolicyLimits,
    now_us: int,
    cached: CachedPrefix = NOTHING_CACHED,
) -> Estimate:
    """The costs of an impression with `behaviours` long-term behaviours on its owner."""
    prefix_tokens = owner.prefix_tokens(behaviours)
    latency = owner.latency_at(prefix_tokens)
    scored_tokens = owner.tokens_per_behaviour * impression.expected_suffix + impression.expected_candidates
    cached_tokens = 0 if cached.tier is PrefixTier.NONE else min(cached.tokens, prefix_tokens)
    tail_tokens = prefix_tokens - cached_tokens
    if tail_tokens and cached_tokens and latency.tail_stays_in_suffix(cached_tokens, tail_tokens, scored_tokens):
        # The worker ranks the tail with the suffix, if the model's longest suffix has room for it.
        scored_tokens, prefix_tokens, tail_tokens = scored_tokens + tail_tokens, cached_tokens, 0
    prepare_us = latency.append_us(cached_tokens, tail_tokens) if tail_tokens else 0.0
    if cached.tier in (PrefixTier.POOL, PrefixTier.DRAM):
        prepare_us += latency.reload_us(cached_tokens * owner.kv_bytes_per_token)
    new_tokens = tail_tokens if cached.tier is PrefixTier.HBM else prefix_tokens
    lead_us = impression.expected_ranking_at_us - now_us
    return Estimate(
        prefix_tokens=prefix_tokens,
        scored_tokens=scored_tokens,
        full_us=latency.full_us(prefix_tokens, scored_tokens),
        hit_us=latency.hit_us(prefix_tokens, scored_tokens),
        prepare_us=prepare_us,
        new_bytes=new_tokens * owner.kv_bytes_per_token,
        alive_us=min(max(0, lead_us), MAX_JOB_LIFETIME_US) + limits.lease_margin_us,
        # Without a job, nobody would compute it for the owner.
        cached_tokens=0 if cached.tier is PrefixTier.POOL else cached_tokens,
    )


def at_risk(
    owner: OwnerView, prefix_tokens: int, scored_tokens: int, ranking_budget_us: float, margins: Sequence[float]
) -> bool:
    """Whether full inference would miss the ranking budget more than rarely. `margins`: by length bucket."""
    full_us = risky_us(owner.latency, owner.full_path_ratios, margins, prefix_tokens, scored_tokens)
    return owner.full_path_outside_us + owner.safety_factor * full_us > ranking_budget_us


def usable_lead_us(impression: ImpressionFacts, owner: OwnerView, lead_fraction: float, now_us: int) -> float:
    """The time from now after which the ranking request comes, but for rare cases. At most the expected one."""
    lead_us = impression.expected_ranking_at_us - now_us
    share = owner.lead_shares.get(impression.scenario)
    if share is None:
        return lead_fraction * lead_us
    began_us = now_us if impression.retrieval_at_us is None else min(impression.retrieval_at_us, now_us)
    return lead_us - (1 - min(share, 1.0)) * (impression.expected_ranking_at_us - began_us)


def feasible(preinfer_queue_us: float, device_us: float, usable_us: float, ranking_budget_us: float) -> bool:
    """Whether the job comes before its request, and the request can be ranked on its prefix in time. `device_us`: of
    the prefix and the ranking. The request waits for a prefix that is nearly ready, so the job may end after it came.
    """
    return usable_us > 0 and preinfer_queue_us + device_us <= usable_us + ranking_budget_us


def expired(impression: ImpressionFacts, now_us: int) -> bool:
    """Whether the ranking deadline of the impression has passed."""
    return now_us >= impression.expected_ranking_at_us + impression.ranking_budget_us


def decide(case: PolicyCase, limits: PolicyLimits) -> Decision:
    """Decides about one impression. Charges its buckets for an admission, and counts the ranking request always."""
    impression, owner, now_us = case.impression, case.owner, case.now_us
    if owner is None:
        return decide_by_length(impression, limits, now_us)
    if expired(impression, now_us):
        return Decision(False, DecisionReason.EXPIRED)
    behaviours = limits.behaviours_of(impression)
    cost = estimate(impression, behaviours, owner, limits, now_us, case.cached)
    reason = DecisionReason.NO_HISTORY if behaviours == 0 else _refused_by(case, owner, cost, limits)
    if case.buckets is not None:
        # A request at risk counts with T_hit, with or without a job. If the refused ones counted with T_full, each
        # refusal would raise the ranking load and cause the next one.
        case.buckets.count_ranking(cost.alone_us if reason in _WITHOUT_RISK else cost.hit_us, now_us)
    if reason is None:
        return Decision(True, DecisionReason.ADMITTED, cost)
    return Decision(False, reason, cost)


def decide_by_length(impression: ImpressionFacts, limits: PolicyLimits, now_us: int) -> Decision:
    """Decides by the length of the history alone."""
    if expired(impression, now_us):
        return Decision(False, DecisionReason.EXPIRED)
    behaviours = limits.behaviours_of(impression)
    if behaviours == 0:
        return Decision(False, DecisionReason.NO_HISTORY)
    if behaviours < limits.fallback_behaviours:
        return Decision(False, DecisionReason.BELOW_THRESHOLD)
    if impression.expected_ranking_at_us <= now_us:
        return Decision(False, DecisionReason.INFEASIBLE)
    return Decision(True, DecisionReason.NO_STATUS_THRESHOLD)


def _refused_by(case: PolicyCase, owner: OwnerView, cost: Estimate, limits: PolicyLimits) -> DecisionReason | None:
    impression = case.impression
    budget_us = impression.ranking_budget_us
    if limits.only_at_risk and not at_risk(owner, cost.prefix_tokens, cost.scored_tokens, budget_us, case.margins):
        return DecisionReason.NOT_AT_RISK
    usable_us = usable_lead_us(impression, owner, limits.lead_fraction, case.now_us)
    device_us = owner.safety_factor * (cost.prepare_us + cost.hit_us)
    if not feasible(owner.preinfer_queue_us, device_us, usable_us, budget_us):
        return DecisionReason.INFEASIBLE
    refusal = None if case.buckets is None else case.buckets.admit(cost, case.now_us, impression.scenario)
    return None if refusal is None else _REFUSED[refusal]
