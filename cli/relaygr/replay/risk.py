"""Replays the trigger's test of the risk on the records of a run without the relay, where every request ran in full.

Such a run shows for each request whether full inference ended in time, which a run with the relay cannot. A rule
decides about the requests one after the other, with what it would have known by then: the reports of a worker that
sees only the requests that the rule left to full inference.

* missed: left to full inference, which truncated, rejected or was late with it.
* needless: prepared, though full inference ended in time.

Pure. The prepared requests would have made room for the others, so a run with the relay misses fewer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relaygr.admission.latency import LatencyModel
from relaygr.admission.risk import (
    FullPathObserver,
    RiskFeedback,
    RiskTargets,
    factors_of,
    full_path_us,
    quantile,
    risky_us,
)
from relaygr.schemas.messages import LENGTH_BUCKETS, Path
from relaygr.traffic.records import ImpressionRecord

STATUS_REQUESTS = 8
"""A worker's status comes after this many of its requests."""
_QUEUE_WINDOW = 512


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request that ran in full. Times in µs."""

    prefix_tokens: int
    scored_tokens: int
    queue_us: int
    outside_us: int
    """Its time outside device work, on its whole way."""
    device_us: int
    in_time: bool
    """Answered in time and not truncated."""


@dataclass(frozen=True, slots=True)
class RiskRule:
    """One way to decide. `uses_reports` False: calibrated T_full and the P99 of the queue alone."""

    name: str
    uses_reports: bool = True
    margin: float = 1.0
    targets: RiskTargets | None = None
    """If set, outcomes move the margin, which then begins at 1."""


RULES = (
    RiskRule("calibrated T_full + P99 of the queue", uses_reports=False),
    *(RiskRule(f"quantiles, margin {margin:g}", margin=margin) for margin in (0.8, 0.9, 1.0, 1.1, 1.25, 1.5)),
    RiskRule("quantiles, margin by outcomes", targets=RiskTargets()),
)


@dataclass(frozen=True, slots=True)
class RiskResult:
    """The decisions of one rule over all requests."""

    rule: RiskRule
    left: int
    missed: int
    prepared: int
    needless: int
    prepare_us: float
    """Predicted device time of the preparations."""

    @property
    def missed_share(self) -> float:
        return self.missed / self.left if self.left else 0.0

    @property
    def needless_share(self) -> float:
        return self.needless / self.prepared if self.prepared else 0.0


def requests_of(records: Iterable[ImpressionRecord], scored_tokens: int | None = None) -> list[RecordedRequest]:
    """The requests of a run without the relay that full inference answered, in the order of its schedule.

    `scored_tokens`: suffix tokens and candidates; None: the number of scores. The prefix of a truncated request has the
    length that others show for its history.
    """
    ranked = [record for record in records if record.timings is not None and record.history_length and record.path]
    ranked.sort(key=lambda record: record.number)
    per_behaviour = [
        record.prefix_tokens / record.history_length
        for record in ranked
        if record.history_length and record.path == Path.FULL
    ]
    typical = quantile(per_behaviour, 0.5) if per_behaviour else 1.0
    return [request for record in ranked if (request := _request_of(record, typical, scored_tokens)) is not None]


def _request_of(record: ImpressionRecord, per_behaviour: float, scored_tokens: int | None) -> RecordedRequest | None:
    timings, scores = record.timings, record.score_array()
    if timings is None or record.latency_us is None or record.path not in (Path.FULL, Path.TRUNCATED):
        return None
    tokens = record.prefix_tokens
    if record.path == Path.TRUNCATED:
        tokens = max(tokens, round(per_behaviour * (record.history_length or 0)))
    scored = scored_tokens if scored_tokens is not None else 0 if scores is None else int(scores.size)
    device_us = timings.pre_infer_us + timings.rank_us
    return RecordedRequest(
        prefix_tokens=tokens,
        scored_tokens=scored,
        queue_us=timings.queue_us,
        outside_us=max(0, record.latency_us - device_us),
        device_us=device_us,
        in_time=not record.late and record.path == Path.FULL,
    )


def replay_risk(
    requests: Sequence[RecordedRequest], rule: RiskRule, latency: LatencyModel, budget_us: int, rate_per_s: float
) -> RiskResult:
    """The decisions of one rule about all requests, which come at a steady rate."""
    observer, feedback = FullPathObserver(), RiskFeedback(rule.targets or RiskTargets())
    queue: deque[int] = deque(maxlen=_QUEUE_WINDOW)
    margins: Sequence[float] = feedback.margins if rule.targets is not None else (rule.margin,) * LENGTH_BUCKETS
    left = missed = prepared = needless = 0
    prepare_us = 0.0
    report = observer.report(latency, 0)
    for number, request in enumerate(requests):
        now_us = int(number * 1e6 / rate_per_s)
        if number % STATUS_REQUESTS == 0:
            report = observer.report(latency, now_us)
            feedback.take("worker", report, now_us)
        tokens, scored = request.prefix_tokens, request.scored_tokens
        if rule.uses_reports:
            expected_us = report.outside_us + risky_us(latency, factors_of(report.ratios), margins, tokens, scored)
        else:
            expected_us = latency.full_us(tokens, scored) + (quantile(queue, 0.99) if queue else 0)
        queue.append(request.queue_us)
        observer.outside.append((now_us, request.outside_us))
        if expected_us > budget_us:
            prepared += 1
            needless += request.in_time
            prepare_us += latency.pre_us(tokens)
            fits = request.in_time or request.outside_us + full_path_us(latency, tokens, scored) <= budget_us
            observer.prepared.append((tokens, scored, float("inf") if fits else 0.0))
            continue
        left += 1
        missed += not request.in_time
        feedback.judged(str(number), tokens, now_us)
        if request.in_time:
            observer.ran(tokens, scored, request.device_us, now_us)
        else:
            observer.missed(str(number), now_us)
    return RiskResult(rule, left, missed, prepared, needless, prepare_us)
