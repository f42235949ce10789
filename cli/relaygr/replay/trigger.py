"""Replays recorded retrieval events under a policy of the trigger, and shows the effect on the recorded requests.

The decisions are those of the product: its handler, fleet, buckets and policy, at the recorded times and with the
recorded statuses. What follows from them is predicted by the latency model of the owner's status:

* A job starts when the owner's device is free of earlier jobs and rankings. What it prepares stays in HBM until its
  lease ends, and in DRAM as long as the least recently used prefixes fit.
* A request that has no job in time takes the full path, or a reload if DRAM has its prefix.
* A request is in time if `outside` + wait for its prefix + device time <= its budget, with `outside` of the status:
  for full inference that of the full path.

The outcomes of the recorded run (margins, its pre-infer queue) are not used: they belong to the policy of that run. So
a replay compares policies; it does not simulate queueing, as `relaygr simulate` does. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from relaygr.admission.policy import ImpressionFacts, OwnerView, PrefixTier
from relaygr.admission.risk import full_path_us
from relaygr.admission.scenarios import ONLY_DEFAULT, Scenarios
from relaygr.admission.settings import AdmissionSettings
from relaygr.replay.recording import RankingLine, RecordedLine, RetrievalLine, StatusLine
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.messages import RetrievalEvent
from relaygr.trigger.fleet import Fleet
from relaygr.trigger.handler import EventHandler, RecentPrefixes
from relaygr.trigger.settings import TriggerSettings

_MOST_OPEN: Final = 262_144
"""Events that wait for their request. Of more, the oldest count as abandoned."""


@dataclass(slots=True)
class PolicyResult:
    """What one policy did with a recording."""

    policy: str
    events: int = 0
    jobs: int = 0
    wasted: int = 0
    """Jobs whose prefix no request used: it came too early, or not at all."""
    needless: int = 0
    """Jobs whose request would have been in time without them."""
    requests: int = 0
    """Ranking requests with a recorded event and a known owner."""
    missed: int = 0
    """Requests that were not in time."""
    prepared_bytes: int = 0
    """HBM bytes that the jobs filled."""
    prepare_us: float = 0.0
    """Device time of the jobs."""
    ranking_us: float = 0.0
    """Device time of the ranking requests."""
    decisions: dict[str, int] = field(default_factory=dict)

    @property
    def device_us(self) -> float:
        return self.prepare_us + self.ranking_us


@dataclass(frozen=True, slots=True)
class _Job:
    owner: str
    prefix_tokens: int
    ready_us: float


@dataclass(slots=True)
class _Impression:
    event: RetrievalEvent
    partition: int
    job: _Job | None


def replay_trigger(
    lines: Sequence[RecordedLine],
    settings: TriggerSettings,
    admission: AdmissionSettings | None = None,
    scenarios: Scenarios = ONLY_DEFAULT,
) -> PolicyResult:
    """The effect of `settings.policy` on lines in order of time. Raises RelayError for an unknown policy."""
    return _Replay(settings, admission or AdmissionSettings(), lines, scenarios).run(lines)


class _Replay:
    def __init__(
        self,
        settings: TriggerSettings,
        admission: AdmissionSettings,
        lines: Sequence[RecordedLine],
        scenarios: Scenarios,
    ) -> None:
        self._lease_margin_us = admission.lease_margin_ms * 1000
        self._limits = settings.limits(admission.lease_margin_ms)
        self._fleet = Fleet(settings.status_stale_ms)
        partitions = {line.partition for line in lines if isinstance(line, RetrievalLine)}
        count = max(partitions, default=0) + 1
        self._handler = EventHandler(settings, admission, self._fleet, count, ManualClock(), scenarios=scenarios)
        self._handler.reassign(frozenset(partitions))
        self._dram = RecentPrefixes()
        self._hbm: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        """By owner and user: the tokens of the leased prefix, and the end of its lease."""
        self._free_us: dict[str, float] = {}
        """When the device of each owner is free."""
        self._open: OrderedDict[str, _Impression] = OrderedDict()
        self._result = PolicyResult(settings.policy)

    def run(self, lines: Sequence[RecordedLine]) -> PolicyResult:
        for line in lines:
            if isinstance(line, StatusLine):
                self._take_status(line)
            elif isinstance(line, RetrievalLine):
                self._decide(line)
            else:
                self._rank(line)
        while self._open:
            self._abandon()
        return self._result

    def _take_status(self, line: StatusLine) -> None:
        status = line.status
        queue_us = max(0, round(self._free_us.get(status.worker_id, 0) - line.at_us))
        self._fleet.apply(status.worker_id, replace(status, preinfer_queue_us=queue_us), line.at_us)
        self._fleet.reports.clear()

    def _decide(self, line: RetrievalLine) -> None:
        result, event = self._result, line.event
        decision = self._handler.admit(event, line.partition, line.at_us)
        result.events += 1
        reason = decision.reason.value
        result.decisions[reason] = result.decisions.get(reason, 0) + 1
        owner = self._fleet.owner_of(line.partition, line.at_us)
        job = None
        if decision.admit:
            result.jobs += 1
            job = self._run_job(event, owner, line.at_us) if owner is not None else None
            if job is None:
                result.wasted += 1
        if event.request_id in self._open:
            return
        self._open[event.request_id] = _Impression(event, line.partition, job)
        if len(self._open) > _MOST_OPEN:
            self._abandon()

    def _abandon(self) -> None:
        _, oldest = self._open.popitem(last=False)
        self._result.wasted += oldest.job is not None

    def _tokens(self, event: RetrievalEvent, owner: OwnerView) -> int:
        known = ImpressionFacts.of(event).history_behaviours
        return owner.prefix_tokens(self._limits.assumed_behaviours if known is None else known)

    def _cached(self, owner: OwnerView, user_id: str, prefix_tokens: int, now_us: int) -> tuple[int, bool]:
        """The tokens that are cached, and whether in HBM."""
        if not owner.reuses_prefixes:
            return 0, False
        tokens, until_us = self._hbm.get((owner.worker_id, user_id), (0, 0))
        if tokens and now_us < until_us:
            return min(tokens, prefix_tokens), True
        found = self._dram.guess(owner, user_id)
        return (0, False) if found.tier is PrefixTier.NONE else (min(found.tokens, prefix_tokens), False)

    def _prepare_us(self, owner: OwnerView, prefix_tokens: int, cached: int, in_hbm: bool) -> float:
        latency = owner.latency
        needed_us = latency.append_us(cached, prefix_tokens - cached) if prefix_tokens > cached else 0.0
        return needed_us + (latency.reload_us(cached * owner.kv_bytes_per_token) if cached and not in_hbm else 0.0)

    def _run_job(self, event: RetrievalEvent, owner: OwnerView, now_us: int) -> _Job:
        tokens = self._tokens(event, owner)
        cached, in_hbm = self._cached(owner, event.user_id, tokens, now_us)
        prepare_us = self._prepare_us(owner, tokens, cached, in_hbm)
        self._result.prepare_us += prepare_us
        self._result.prepared_bytes += (tokens - cached if in_hbm else tokens) * owner.kv_bytes_per_token
        ready_us = self._use(owner, prepare_us, now_us)
        until_us = event.expected_ranking_at_us + event.ranking_budget_ms * 1000 + self._lease_margin_us
        key = owner.worker_id, event.user_id
        self._hbm[key] = tokens, until_us
        self._hbm.move_to_end(key)
        if len(self._hbm) > _MOST_OPEN:
            self._hbm.popitem(last=False)
        return _Job(owner.worker_id, tokens, ready_us)

    def _use(self, owner: OwnerView, device_us: float, now_us: float) -> float:
        """Adds work to the owner's device. Returns when it ends."""
        ends_us = max(now_us, self._free_us.get(owner.worker_id, 0.0)) + device_us
        self._free_us[owner.worker_id] = ends_us
        return ends_us

    def _rank(self, line: RankingLine) -> None:
        impression = self._open.pop(line.request_id, None)
        if impression is None:
            return
        result, event, job = self._result, impression.event, impression.job
        owner = self._fleet.owner_of(impression.partition, line.at_us)
        if owner is None:
            result.wasted += job is not None
            return
        result.requests += 1
        tokens, scored = self._tokens(event, owner), owner.tokens_per_behaviour * line.suffix + line.candidates
        outside_us = owner.ranking_queue_p99_us if owner.outside_us is None else owner.outside_us
        left_us = alone_left_us = event.ranking_budget_ms * 1000 - outside_us
        hit_us = owner.latency.hit_us(tokens, scored)
        cached, in_hbm = self._cached(owner, event.user_id, tokens, line.at_us)
        if job is not None:
            # Whether it would have been in time without the job: by what DRAM has of its prefix.
            cached, in_hbm = (cached, False) if self._dram.guess(owner, event.user_id).tokens else (0, False)
        alone_us = full_path_us(owner.latency, tokens, scored)
        if cached:
            alone_us = min(alone_us, self._prepare_us(owner, tokens, cached, in_hbm) + hit_us)
        else:
            alone_left_us = event.ranking_budget_ms * 1000 - owner.full_path_outside_us
        wait_us = 0.0 if job is None else max(0.0, job.ready_us - line.at_us)
        if job is not None and job.owner == owner.worker_id and wait_us + hit_us <= max(left_us, 0):
            took_us = hit_us
            result.needless += alone_us <= alone_left_us
        else:
            took_us = alone_us
            result.wasted += job is not None
            result.missed += alone_us > alone_left_us
        result.ranking_us += took_us
        self._use(owner, took_us, line.at_us)
        self._dram.note(owner, event.user_id, tokens, line.at_us)
