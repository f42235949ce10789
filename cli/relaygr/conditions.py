"""The conditions of a running relay that users must hear of: the live page, the demo's table, `relaygr doctor` and the
alerts tell them in the same words, and name the same section of the documentation.

Each `Condition` is declared once, with its sentence. Page, table and doctor fill a `Seen` with what they can measure,
and `judge` decides with the thresholds of this module. Prometheus decides by the expressions of
`compose/helm/relaygr/files/alerts.yaml`; tests hold its thresholds, severities and sentences to those here. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from relaygr.lag.report import GroupReport
from relaygr.lag.status import LagStatus

BUDGET_SHARE: Final = 0.01
"""The error budget: the objective is that 99 % of the ranking requests are ranked in time (docs/alerts.md).

Requests that are late, failed or truncated, on stale histories or long in the queue are told above this share.
"""
LEAST_REQUESTS: Final = 3
"""Fewer requests are chance, however large their share: of 20 requests a minute, of which 1 % are late, 3 are late in
one minute of 900. Prometheus averages over 5 minutes and waits for some more instead.
"""
THROTTLE_S: Final = 0.005
"""The time for which a quota may hold back an answer: a tenth of the default deadline of `relaygr traffic`, 50 ms."""
LAG_S: Final = 5.0
"""A group commits every few seconds, and what it has finished counts as lag until then."""
_STUCK: Final = frozenset({LagStatus.STALL, LagStatus.STOP, LagStatus.REWIND, LagStatus.BEYOND_END})


class Severity(enum.StrEnum):
    """How grave a condition is: the label `severity` of its alert."""

    CRITICAL = "critical"
    """Requests get no answer, or not in time."""
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that can be wrong. `page`: the section of the documentation that helps, from the repository's root."""

    name: str
    sentence: str
    """Without a full stop. Names in braces are filled by `found`, in an alert by labels and value."""
    page: str
    severity: Severity = Severity.WARNING
    alert: str | None = None
    """The alert that tells it; None: Prometheus does not see it."""

    def found(self, **seen: str) -> Finding:
        """The condition as it was found; `seen` fills its sentence."""
        text = self.sentence.format(**seen)
        return Finding(self.name, text[:1].upper() + text[1:], self.page, self.severity)


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that holds. `text`: its sentence, with a capital and without a full stop."""

    name: str
    text: str
    page: str
    severity: Severity


UNREAD: Final = Condition("unread", "{error}", "docs/troubleshooting.md#processes", Severity.CRITICAL)
NO_WORKER: Final = Condition(
    "no-worker",
    "no worker is ready, so no request is ranked",
    "docs/alerts.md#relaynoworker",
    Severity.CRITICAL,
    "RelayNoWorker",
)
LATE: Final = Condition(
    "late",
    "{share} of the ranking requests are late",
    "docs/alerts.md#relayrankinglate",
    Severity.CRITICAL,
    "RelayRankingLate",
)
FAILING: Final = Condition(
    "failing",
    "{share} of the ranking requests fail",
    "docs/alerts.md#relayrankingfailing",
    Severity.CRITICAL,
    "RelayRankingFailing",
)
STUCK: Final = Condition(
    "stuck",
    "the group {group} has the status {status}",
    "docs/alerts.md#relaygroupstuck",
    Severity.CRITICAL,
    "RelayGroupStuck",
)
OWNER_SPLIT: Final = Condition(
    "owner-split",
    "pre-infer jobs and ranking requests of {count} partitions of the group {group} go to different workers",
    "docs/alerts.md#relayownersplit",
    Severity.CRITICAL,
    "RelayOwnerSplit",
)
TRUNCATED: Final = Condition(
    "truncated",
    "{share} of the ranking requests are ranked on a truncated history",
    "docs/alerts.md#relayrankingtruncated",
    alert="RelayRankingTruncated",
)
QUEUE: Final = Condition(
    "queue",
    "{share} of the ranked requests waited in the queue for more than half of their time",
    "docs/alerts.md#relayqueueneardeadline",
    alert="RelayQueueNearDeadline",
)
LAGGING: Final = Condition(
    "lagging", "the group {group} is {seconds} behind", "docs/alerts.md#relaylagging", alert="RelayLagging"
)
THROTTLED: Final = Condition(
    "throttled",
    "a quota of Kafka holds back the answers to {who} for up to {seconds}",
    "docs/alerts.md#relaykafkathrottles",
    alert="RelayKafkaThrottles",
)
POOL_AWAY: Final = Condition(
    "pool-away",
    "the pool hangs or does not answer for {who}: prefixes are computed instead",
    "docs/alerts.md#relaypoolaway",
    alert="RelayPoolAway",
)
STALE: Final = Condition(
    "stale",
    "{share} of the ranked requests had a stale history, cause {cause}",
    "docs/troubleshooting.md#stale-histories",
    alert="RelayHistoriesStale",
)
REVISIONS: Final = Condition(
    "revisions",
    "ready workers have {count} revisions of the model, as while one is deployed: {names}",
    "docs/deploying.md#reload",
)
SILENT_PAGES: Final = Condition("silent-pages", "no metrics come from {who}", "docs/monitoring.md#the-live-page")
CONDITIONS: Final = (
    UNREAD, NO_WORKER, LATE, FAILING, STUCK, OWNER_SPLIT, TRUNCATED, QUEUE, LAGGING, THROTTLED, POOL_AWAY, STALE,
    REVISIONS, SILENT_PAGES,
)  # fmt: skip
"""All, the gravest first: the order in which they are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was measured lately, in a window of about a minute. The defaults say nothing: not measured, or all well."""

    errors: Sequence[str] = ()
    """Why the cluster cannot be read, each with what to do."""
    ready: int | None = None
    """Workers that rank and are ready; None: not known."""
    ended: int = 0
    """Ranking requests that ended in whatever way. Each counts once at most of the next three."""
    late: int = 0
    """Answered after the deadline, expired, or without an answer."""
    failed: int = 0
    truncated: int = 0
    ranked: int = 0
    """Requests with scores."""
    waited: int = 0
    """Of the ranked ones, those whose wait in the queue was long (`relaygr.admission.latency.is_long_wait`)."""
    stale: Mapping[str, int] = field(default_factory=dict)
    """Of the ranked ones, those on a stale history, by its cause."""
    groups: Sequence[GroupReport] = ()
    held_back_s: Mapping[str, float] = field(default_factory=dict)
    """The longest time for which Kafka held back an answer, by process."""
    away: Sequence[str] = ()
    """Workers whose pool is away."""
    revisions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The ready workers by the revision of their model."""
    silent_pages: Sequence[str] = ()
    """Processes whose metrics pages do not answer."""


def judge(seen: Seen) -> list[Finding]:
    """The conditions that hold, the gravest first."""
    found = [UNREAD.found(error=error.rstrip(".")) for error in dict.fromkeys(seen.errors)]
    if seen.ready == 0:
        found.append(NO_WORKER.found())
    for condition, count, of in (
        (LATE, seen.late, seen.ended),
        (FAILING, seen.failed, seen.ended),
        (TRUNCATED, seen.truncated, seen.ended),
        (QUEUE, seen.waited, seen.ranked),
    ):
        if is_too_many(count, of):
            found.append(condition.found(share=percent(count, of)))
    for group in seen.groups:
        if group.status in _STUCK:
            found.append(STUCK.found(group=group.group, status=group.status.value))
        elif group.max_time_lag is not None and group.max_time_lag.seconds > LAG_S:
            found.append(LAGGING.found(group=group.group, seconds=f"{group.max_time_lag.seconds:.0f} s"))
        if group.owner_split:
            found.append(OWNER_SPLIT.found(group=group.group, count=str(len(group.owner_split))))
    held = {name: held_s for name, held_s in seen.held_back_s.items() if held_s > THROTTLE_S}
    if held:
        names = sorted(held, key=lambda name: -held[name])
        found.append(THROTTLED.found(who=_some(names, "processes"), seconds=f"{held[names[0]]:.2f} s"))
    if seen.away:
        found.append(POOL_AWAY.found(who=_some(seen.away, "workers")))
    for cause, count in sorted(seen.stale.items(), key=lambda each: -each[1]):
        if is_too_many(count, seen.ranked):
            found.append(STALE.found(share=percent(count, seen.ranked), cause=cause))
    if len(seen.revisions) > 1:
        names = [f"{each} on {_some(those, 'workers')}" for each, those in seen.revisions.items()]
        found.append(REVISIONS.found(count=str(len(seen.revisions)), names="; ".join(names)))
    if seen.silent_pages:
        found.append(SILENT_PAGES.found(who=_some(seen.silent_pages, "processes")))
    order = [condition.name for condition in CONDITIONS]
    return sorted(found, key=lambda each: order.index(each.name))


def is_too_many(count: int, of: int) -> bool:
    """Whether so many requests are more than the error budget, and than chance."""
    return count >= LEAST_REQUESTS and count > BUDGET_SHARE * of


def percent(count: int, of: int) -> str:
    """The share as text."""
    share = 100 * count / of
    return f"{share:.0f} %" if share >= 10 else f"{share:.1f} %"


def _some(names: Sequence[str], what: str) -> str:
    """The one name, or how many there are with the first of them."""
    more = ", ..." if len(names) > 3 else ""
    return names[0] if len(names) == 1 else f"{len(names)} {what} ({', '.join(names[:3])}{more})"
