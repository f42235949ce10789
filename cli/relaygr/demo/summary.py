"""The figures of a run, and the gates that the demo must pass: pure functions over records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from relaygr.admission.corrector import PredictionQuality
from relaygr.admission.latency import Stage
from relaygr.demo.plan import CROWDING
from relaygr.runtime.quantiles import quantile
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.messages import Path, PrefixSource
from relaygr.traffic.records import LOST, UNDELIVERED, ImpressionRecord, ending, in_time, is_whole
from relaygr.ui.page import GateView, RunView

T = TypeVar("T")
PLOTTED: Final = 600
"""The most points of a plot."""
COLD_SHARE = 1 / 3
"""The beginning of the schedule, as a share: processes warm up, and most users have their first impression."""
LEAST_RANKED_SHARE = 0.90
LEAST_HBM_SHARE = 0.30
LEAST_COMPARED = 200
LEAST_COMPARED_SHARE = 0.8
"""Of the requests that were ranked again, where these are few."""
SCORE_TOLERANCE = 2e-5
"""The largest difference of two scores, relative to the largest score, in float32."""
SLOW_RUN = CROWDING
"""Measured / calibrated time of pre-infer from which the machine is slower than the plan allows for."""


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Latencies of the answered requests, and the number of requests without a full answer in time."""

    offered: int
    late: int
    """Requests without an untruncated answer within the deadline."""
    p50_ms: float
    p99_ms: float
    offered_p99_ms: float
    """The P99 over all offered requests. A request without an untruncated answer counts as infinite."""

    @property
    def late_share(self) -> float:
        """Late requests as a share of the offered ones."""
        return self.late / self.offered if self.offered else 0.0


@dataclass(frozen=True, slots=True)
class PredictionFigures:
    """How good the predictions of trigger and workers were."""

    device: Mapping[Stage, PredictionQuality] = field(default_factory=dict)
    """Of the run's last work of each stage, the mean of the workers."""
    not_at_risk: int = 0
    """Requests for which the trigger sent no job, since full inference would end in time."""
    misjudged: int = 0
    """Those of them that were then late, truncated or rejected."""
    computed: int = 0
    """Jobs that computed a prefix or its tail. The others found it in the cache."""
    needless: int = 0
    """Those whose request full inference would have answered in time, too."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The figures of one run over the schedule. Shares are of all offered requests."""

    ranked: int
    lost: int
    whole: LatencySummary
    warm: LatencySummary
    """Without the first COLD_SHARE of the schedule."""
    endings: Mapping[str, int]
    """The number of requests by path (ranked requests) or by status and reason (the others)."""
    from_dram: int
    send_lag_p99_ms: float
    device_seconds: float
    warm_up_seconds: float = 0.0
    """The part of `device_seconds` in which idle devices computed prefixes of likely users."""
    predictions: PredictionFigures = field(default_factory=lambda: PredictionFigures())

    @property
    def offered(self) -> int:
        return self.whole.offered

    @property
    def failed(self) -> int:
        """Requests that failed for another reason than the load."""
        reasons = (f"{Ended.FAILED}: {each}" for each in Reason if each is not Reason.OVERLOADED)
        return sum(self.endings.get(each, 0) for each in reasons)

    def share(self, count: int) -> float:
        """`count` as a share of the offered requests."""
        return count / self.offered if self.offered else 0.0


@dataclass(frozen=True, slots=True)
class ScoreComparison:
    """The scores of one run compared with those of another, for the impressions that both ranked untruncated."""

    compared: int
    skipped: int
    worst_error: float
    """The largest difference, relative to the largest score of its request."""
    different: int


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition that the demo must fulfil."""

    name: str
    passed: bool
    found: str
    depends_on_speed: bool = False
    """Whether a slow machine can be why it failed."""
    is_busy: bool = False
    """Whether other processes of the machine took too much of it."""

    @property
    def judged(self) -> bool:
        """False: the machine was too busy, and the result says nothing about the relay."""
        return not (self.depends_on_speed and self.is_busy)

    @property
    def failed(self) -> bool:
        """Whether it was judged, and not fulfilled."""
        return self.judged and not self.passed


def summarise(
    records: Sequence[ImpressionRecord],
    device_seconds: float,
    warm_up_seconds: float = 0.0,
    predictions: PredictionFigures | None = None,
) -> RunSummary:
    """The figures of one run."""
    # Records are numbered in the order of the schedule, so every run drops the same impressions.
    cold = max((record.number + 1 for record in records), default=0) * COLD_SHARE
    lags = [record.send_lag_us / 1000 for record in records]
    return RunSummary(
        ranked=sum(record.status == Ended.RANKED for record in records),
        lost=sum(record.status == LOST for record in records),
        whole=latency_summary(records),
        warm=latency_summary([record for record in records if record.number >= cold]),
        endings=Counter(ending(record) for record in records),
        from_dram=sum(record.prefix_source == PrefixSource.DRAM for record in records),
        send_lag_p99_ms=percentile(lags, 99),
        device_seconds=device_seconds,
        warm_up_seconds=warm_up_seconds,
        predictions=predictions or PredictionFigures(),
    )


def latency_summary(records: Sequence[ImpressionRecord]) -> LatencySummary:
    """The latencies and late requests of these records."""
    latencies = [record.latency_us / 1000 for record in records if record.latency_us is not None]
    late = sum(not in_time(record) for record in records)
    offered = [
        record.latency_us / 1000 if record.latency_us is not None and is_whole(record) else math.inf
        for record in records
    ]
    return LatencySummary(
        len(records), late, percentile(latencies, 50), percentile(latencies, 99), percentile(offered, 99)
    )


def compare_scores(ours: Iterable[ImpressionRecord], reference: Iterable[ImpressionRecord]) -> ScoreComparison:
    """Compares the scores of impressions that both runs ranked untruncated, with the same history version."""
    theirs = {record.number: record for record in reference}
    compared = skipped = different = 0
    worst = 0.0
    for record in ours:
        other = theirs.get(record.number)
        if other is None:
            continue
        scores, expected = record.score_array(), other.score_array()
        if scores is None or expected is None or not _comparable(record, other):
            skipped += 1
            continue
        compared += 1
        if scores.shape != expected.shape:
            different += 1
            continue
        largest = float(np.abs(expected).max(initial=0.0)) or 1.0
        error = float(np.abs(scores - expected).max(initial=0.0)) / largest
        worst = max(worst, error)
        different += error > SCORE_TOLERANCE
    return ScoreComparison(compared, skipped, worst, different)


def gates(relay: RunSummary, full: RunSummary, comparison: ScoreComparison, busy: bool = False) -> tuple[Gate, ...]:
    """The conditions that the demo must fulfil. Those that depend on the machine's speed are not judged if it was
    `busy`, or slower than when it was measured.
    """
    hbm = relay.endings.get(Path.HBM, 0)
    busy = busy or slowdown((relay, full)) >= SLOW_RUN
    ranked_again = comparison.compared + comparison.skipped
    least = max(1, min(LEAST_COMPARED, round(LEAST_COMPARED_SHARE * ranked_again)))
    failed = [run.failed for run in (relay, full)]
    undelivered = [run.endings.get(UNDELIVERED, 0) for run in (relay, full)]
    return (
        Gate("no request lost", relay.lost + full.lost == 0, f"{relay.lost} with the relay, {full.lost} without"),
        Gate("no request failed", not any(failed), f"{failed[0]} with the relay, {failed[1]} without"),
        Gate(
            "every request was delivered",
            not any(undelivered),
            f"{undelivered[0]} undelivered with the relay, {undelivered[1]} without",
            depends_on_speed=True,
            is_busy=busy,
        ),
        Gate(
            f"at least {LEAST_RANKED_SHARE:.0%} ranked",
            relay.share(relay.ranked) >= LEAST_RANKED_SHARE,
            f"{relay.share(relay.ranked):.1%}",
            depends_on_speed=True,
            is_busy=busy,
        ),
        Gate(
            f"at least {LEAST_HBM_SHARE:.0%} hit in HBM",
            relay.share(hbm) >= LEAST_HBM_SHARE,
            f"{relay.share(hbm):.1%}",
            depends_on_speed=True,
            is_busy=busy,
        ),
        Gate(
            "some prefixes came from DRAM",
            relay.from_dram > 0,
            f"{relay.from_dram} requests",
            depends_on_speed=True,
            is_busy=busy,
        ),
        Gate(
            f"at least {least} requests compared",
            comparison.compared >= least,
            str(comparison.compared),
            depends_on_speed=True,
            is_busy=busy,
        ),
        Gate(
            "cached scores equal full scores",
            comparison.different == 0,
            f"{comparison.different} differ, worst error {comparison.worst_error:.1e} of the largest score",
        ),
    )


def slowdown(runs: Iterable[RunSummary]) -> float:
    """Measured / calibrated time of pre-infer, the largest of the runs; 0: nothing was computed."""
    found = (run.predictions.device.get(Stage.PRE) for run in runs)
    return max((quality.slowdown for quality in found if quality is not None), default=0.0)


def slow_machine(runs: Sequence[RunSummary], shown: Sequence[Gate]) -> str:
    """What to do about a gate that depends on the machine's speed and was not passed, if the machine was slower than
    when it was measured; else nothing. A guest does not see that others use its host.
    """
    times = slowdown(runs)
    if times < SLOW_RUN or not any(not gate.passed and gate.depends_on_speed for gate in shown):
        return ""
    return (
        f"The machine was slower than when it was measured: pre-infer took {times:.2f} times its "
        "calibrated time. Other programs, or other guests of its host, may use it. Run the demo again when they do not."
    )


def verdict(relay: RunSummary, full: RunSummary) -> str:
    """The result in one sentence. 100 of 100 means all."""
    ours, theirs = (100 - math.ceil(100 * run.whole.late_share) for run in (relay, full))
    return f"With the relay {ours} of 100 requests were answered whole and in time, without it {theirs}."


def run_view(title: str, run: RunSummary, records: Sequence[ImpressionRecord]) -> RunView:
    """The run as the page shows it. Of many requests, a part that is spread evenly."""
    whole = sorted(record.latency_us / 1000 for record in records if record.latency_us is not None and is_whole(record))
    points = [(latency_ms, (place + 1) / len(records)) for place, latency_ms in enumerate(whole)]
    dots = [
        (record.number, record.latency_us / 1000, record.path or record.status)
        for record in sorted(records, key=lambda record: record.number)
        if record.latency_us is not None
    ]
    return RunView(
        title=title,
        offered=run.offered,
        ranked=run.ranked,
        late=run.whole.late,
        lost=run.lost,
        p50_ms=run.whole.p50_ms,
        p99_ms=run.whole.p99_ms,
        offered_p99_ms=run.whole.offered_p99_ms,
        from_dram=run.from_dram,
        device_s=run.device_seconds,
        endings=dict(run.endings),
        distribution=_spread(points, PLOTTED),
        dots=_spread(dots, PLOTTED),
    )


def gate_views(found: Iterable[Gate]) -> list[GateView]:
    """The gates as the page shows them."""
    return [GateView(gate.name, gate.found, gate.passed, gate.judged) for gate in found]


def _spread(values: Sequence[T], most: int) -> list[T]:
    """At most about `most` of the values, the first and the last included."""
    step = max(1, math.ceil(len(values) / most))
    return [*values[:-1:step], *values[-1:]]


def percentile(values: Sequence[float] | NDArray[np.float64], share: float) -> float:
    """The percentile; NaN without values."""
    return float(quantile(values, share / 100)) if len(values) else math.nan


def _comparable(record: ImpressionRecord, other: ImpressionRecord) -> bool:
    return (
        Path.TRUNCATED not in (record.path, other.path)
        and record.model_revision == other.model_revision
        and not (record.history_stale or other.history_stale)
        and (record.history_number, record.history_length) == (other.history_number, other.history_length)
    )
