"""One retrieval event in, one decision out: decodes the event, checks its route and asks the admission policy.

No I/O: bytes in, bytes out. The app applies the decision. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from relaygr.admission.buckets import FleetBuckets
from relaygr.admission.policy import (
    MAX_JOB_LIFETIME_US,
    CachedPrefix,
    Decision,
    DecisionReason,
    ImpressionFacts,
    OwnerView,
    PolicyCase,
    PrefixTier,
)
from relaygr.admission.risk import RiskFeedback
from relaygr.admission.scenarios import ONLY_DEFAULT, PreInferBy, Scenarios, ScenarioSettings, shares_of
from relaygr.admission.settings import AdmissionSettings
from relaygr.runtime.clock import Clock
from relaygr.schemas.codec import DecodeError, EncodeError, decode, encode, field_specs
from relaygr.schemas.messages import DEFAULT_SCENARIO, PreInferJob, RetrievalEvent
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.record import record
from relaygr.trigger.fleet import Fleet
from relaygr.trigger.policies import make_policy
from relaygr.trigger.recent import RecentPrefixes
from relaygr.trigger.settings import TriggerSettings
from relaygr.trigger.users import LastJob, Users


@record(frozen=True, slots=True)
class TriggerDecision:
    """The action for one event: send `job`, or write the event to dead letters if `detail` is set, or nothing."""

    reason: DecisionReason
    job: bytes | None = None
    """The encoded PreInferJob. Its key is that of the event."""
    detail: str | None = None
    """The explanation in the dead letter."""
    age_us: int | None = None
    """Time from the start of retrieval (the gateway's clock) to this decision (our clock); None if undecodable."""
    request_id: str | None = None
    """None if undecodable."""
    scenario: str | None = None
    """A known scenario; None if undecodable, misrouted, or of an unknown one."""
    by_pool: bool = False
    """Whether the job goes to the pre-infer workers."""


class EventHandler:
    """Decides about the events of the retrieval topic."""

    def __init__(
        self,
        settings: TriggerSettings,
        admission: AdmissionSettings,
        fleet: Fleet,
        partition_count: int,
        clock: Clock,
        on_misjudged: Callable[[int], None] | None = None,
        scenarios: Scenarios = ONLY_DEFAULT,
    ) -> None:
        """`on_misjudged` gets the length bucket of each request that was decided as not at risk and then missed.
        `scenarios`: those whose events come on the topic.

        Raises RelayError if there is no policy of the name in the settings.
        """
        self._enabled = settings.enabled
        self._lease_margin_us = admission.lease_margin_ms * 1000
        self._rules = {
            name: _Rules(scenario, settings, admission.lease_margin_ms) for name, scenario in scenarios.items()
        }
        self._fleet = fleet
        self._partition_count = partition_count
        self._clock = clock
        self._recent = RecentPrefixes()
        self._users = Users(settings.remembered_users)
        self._buckets = FleetBuckets(admission.bucket_limits(), shares_of(scenarios))
        self._on_misjudged = on_misjudged
        self.feedback = RiskFeedback(settings.risk_targets())
        """The margins of the risk, from the outcomes of earlier decisions."""

    def reassign(self, partitions: frozenset[int]) -> None:
        """Sets the partitions of the retrieval topic that this process reads."""
        self._buckets.reassign(partitions)

    def decide(self, key: bytes | None, value: bytes | None, partition: int) -> TriggerDecision:
        """The decision about a message read from `partition`. Raises no exception for any bytes."""
        now_us = self._clock.wall_us()
        if self._fleet.reports:
            self.take_reports()
        try:
            event = decode(RetrievalEvent, value)
        except DecodeError as error:
            return TriggerDecision(DecisionReason.UNDECODABLE, detail=str(error))
        decided = partial(TriggerDecision, request_id=event.request_id, age_us=max(0, now_us - event.retrieval_at_us))
        misrouted = self._misrouted(key, event.user_id, partition)
        if misrouted is not None:
            return decided(DecisionReason.MISROUTED, detail=misrouted)
        scenario = event.scenario or DEFAULT_SCENARIO
        if scenario not in self._rules:
            return decided(DecisionReason.UNKNOWN_SCENARIO)
        if not self._enabled:
            return decided(DecisionReason.DISABLED, scenario=scenario)
        decision = self.decide_event(event, partition, now_us)
        if not decision.admit:
            return decided(decision.reason, scenario=scenario)
        try:
            job = encode(job_of(event, now_us))
        except EncodeError as error:
            # A job is an event with one more number, so only an event of the largest size can fail here.
            self.unsent(event.user_id)
            return decided(DecisionReason.NOT_SENT, detail=str(error), scenario=scenario)
        return decided(decision.reason, job=job, scenario=scenario, by_pool=decision.by_pool)

    def take_reports(self) -> None:
        """Takes the workers' reports of full inference since the last call."""
        now_us, reports = self._clock.wall_us(), self._fleet.reports
        while reports:
            for bucket in self.feedback.take(*reports.popleft(), now_us):
                if self._on_misjudged is not None:
                    self._on_misjudged(bucket)

    def _misrouted(self, key: bytes | None, user_id: str, partition: int) -> str | None:
        if key is None or key != user_id.encode():
            return "the key is not the user id of the body"
        expected = partition_for(key, self._partition_count)
        if expected != partition:
            return (
                f"partition {partition}, but murmur2 of the key gives {expected}: the producer has another partitioner"
            )
        return None

    def decide_event(self, event: RetrievalEvent, partition: int, now_us: int) -> Decision:
        """The decision about an event of this partition, at this wall time."""
        owner = self._fleet.owner_of(partition, now_us)
        rules = self._rules.get(event.scenario or DEFAULT_SCENARIO)
        if rules is None:
            return Decision(False, DecisionReason.UNKNOWN_SCENARIO)
        impression = rules.facts(event)
        user_id, users = event.user_id, self._users
        if users.is_repeat(user_id, event.request_id):
            return Decision(False, DecisionReason.REPEATED)
        users.seen(user_id, event.request_id, event.retrieval_at_us)
        holder = None if owner is None else owner.holder
        live = users.live_job(user_id, holder, now_us)
        if live is not None and _prepares(live, event, owner, now_us):
            if owner is not None:
                self._count_hit(owner, impression, live.prefix_tokens, now_us)
            return Decision(False, DecisionReason.UNDER_WAY)
        case = self._case(impression, user_id, owner, live, now_us)
        by_pool = owner is not None and self._goes_to_pool(rules, case)
        if by_pool and owner is not None:
            case = replace(case, cached=CachedPrefix(PrefixTier.POOL, owner.prefix_tokens(owner.max_prefix_behaviours)))
        decision = replace(rules.policy.decide(case), by_pool=by_pool)
        tokens = 0 if decision.estimate is None else decision.estimate.prefix_tokens
        if decision.admit:
            until_us = self._lease_ends_us(impression, now_us)
            users.sent(user_id, LastJob(event.history_version, holder, tokens, event.expected_ranking_at_us, until_us))
        elif decision.reason is DecisionReason.NOT_AT_RISK:
            self.feedback.judged(event.request_id, tokens, now_us)
        else:
            # Full inference may have no time for the whole history, and then it leaves no prefix.
            return decision
        if owner is not None and tokens:
            self._recent.note(owner, user_id, tokens, now_us)
        return decision

    def unsent(self, user_id: str) -> None:
        """The user's last job did not reach Kafka."""
        self._users.unsent(user_id)

    def restore(self, job: PreInferJob, partition: int) -> None:
        """Remembers an earlier job of any trigger process for its user. Call it with the oldest job first."""
        now_us = self._clock.wall_us()
        owner = self._fleet.owner_of(partition, now_us)
        impression = ImpressionFacts.of(job)
        if owner is None or impression.history_behaviours is None or not self._users.precedes(job):
            return
        tokens = owner.prefix_tokens(impression.history_behaviours)
        until_us = self._lease_ends_us(impression, job.decided_at_us)
        self._users.seen(job.user_id, job.request_id, job.retrieval_at_us)
        self._recent.note(owner, job.user_id, tokens, job.decided_at_us)
        # An older job went to an earlier process of the owner.
        if job.decided_at_us >= (owner.active_since_us or 0):
            last = LastJob(job.history_version, owner.holder, tokens, job.expected_ranking_at_us, until_us)
            self._users.sent(job.user_id, last)

    def _lease_ends_us(self, impression: ImpressionFacts, decided_us: int) -> int:
        """The latest end of the lease of a job that was decided at `decided_us`."""
        expires_us = impression.expected_ranking_at_us + impression.ranking_budget_us
        return min(expires_us, decided_us + MAX_JOB_LIFETIME_US) + self._lease_margin_us

    def _case(
        self, impression: ImpressionFacts, user_id: str, owner: OwnerView | None, live: LastJob | None, now_us: int
    ) -> PolicyCase:
        if owner is None:
            return PolicyCase(impression, now_us)
        if live is not None and live.prefix_tokens and owner.reuses_prefixes:
            cached = CachedPrefix(PrefixTier.HBM, live.prefix_tokens)
        else:
            cached = self._recent.guess(owner, user_id)
        buckets = self._buckets.of(owner, now_us)
        return PolicyCase(impression, now_us, owner, buckets, cached, self.feedback.margins)

    def _goes_to_pool(self, rules: _Rules, case: PolicyCase) -> bool:
        """Whether pre-infer workers compute the prefix. An owner that has a part of it needs less than they do."""
        return (
            rules.pre_infer is PreInferBy.POOL
            and case.cached.tier is PrefixTier.NONE
            and self._fleet.pool_takes(case.now_us)
        )

    def _count_hit(self, owner: OwnerView, impression: ImpressionFacts, tokens: int, now_us: int) -> None:
        scored = owner.tokens_per_behaviour * impression.expected_suffix + impression.expected_candidates
        self._buckets.of(owner, now_us).count_ranking(owner.latency.hit_us(tokens, scored), now_us)


class _Rules:
    """The policy and the time limit of one scenario."""

    def __init__(self, scenario: ScenarioSettings, settings: TriggerSettings, lease_margin_ms: int) -> None:
        """Raises RelayError if there is no policy of the name in the settings."""
        self.policy = make_policy(settings.policy, settings.limits(lease_margin_ms, scenario))
        self.pre_infer = scenario.pre_infer
        self._budget_us = math.inf if scenario.budget_ms is None else scenario.budget_ms * 1000

    def facts(self, event: RetrievalEvent) -> ImpressionFacts:
        """The event's metadata, with the scenario's time limit where the event has a longer one."""
        facts = ImpressionFacts.of(event)
        if facts.ranking_budget_us <= self._budget_us:
            return facts
        return replace(facts, ranking_budget_us=int(self._budget_us))


def _prepares(live: LastJob, event: RetrievalEvent, owner: OwnerView | None, now_us: int) -> bool:
    """Whether the live job prepares the prefix of this event, too, and its lease covers the expected request."""
    return (
        now_us < live.ranking_at_us
        and event.history_version is not None
        and event.history_version == live.version
        and event.expected_ranking_at_us <= live.until_us
        and (owner is None or owner.reuses_prefixes)
    )


def job_of(event: RetrievalEvent, now_us: int) -> PreInferJob:
    """The job of an event that was admitted at this wall time. It has every field of the event."""
    copied: dict[str, Any] = {name: getattr(event, name) for name in _EVENT_FIELDS}
    return PreInferJob(**copied, decided_at_us=now_us)


_EVENT_FIELDS: Final = tuple(spec.name for spec in field_specs(RetrievalEvent))
