"""The risk that full inference would end too late, as the worker that would run it judges it.

    at risk    outside + ratio × margin × max(T_full, T_pre + T_hit) > ranking budget

* `outside`: P99 of the time of recent ranking requests that is not device work: the way from the gateway to the
  worker, the queue, the worker's own code, and the reply margin. The worker measures it as one sum for each request,
  and once more for those that full inference served: short work overtakes them, so under load they wait far longer.
  The larger one counts, since full inference that would have waited for too long was cut and is not measured.
* T_pre + T_hit is the time by which the worker plans full inference; T_full is corrected by the measured ones.
* `ratio`: P98 of measured / predicted device time of full inference, by length bucket, from the worker.
* `margin`: the trigger's correction by length bucket, from the outcomes of its own decisions (`RiskFeedback`).

The worker fills a `FullPathObserver`, whose report is a part of its status. The report names recent requests that full
inference truncated, rejected or answered late. The trigger remembers the requests that it decided as `not_at_risk`, so
it knows which of those it misjudged. The report also counts the prefixes that jobs computed, and those that they
computed needlessly, because full inference would have ended in time. A prefix that a job found or reloaded took no
device time, so it is not counted.

Both quantiles are rarely exceeded together, and one alone seldom by far. The margin corrects the rest: it rises soon
after misjudged requests, and falls in small steps only after a time without a rise.

Pure: no clock, no I/O. A bucket is the bit length of the number of prefix tokens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from relaygr.admission.latency import LatencyModel, length_bucket
from relaygr.runtime.quantiles import quantile, quantile_of_sorted
from relaygr.schemas.messages import LENGTH_BUCKETS, MAX_MISSED_IDS, FullPathReport

QUANTILE: Final = 0.99
"""Of the time outside. With 0.95 and a target of 1 %, requests that were not at risk alone used up a limit of 1 % late
ones. A needless job takes no extra device time if its request comes, since the request would compute the prefix."""
RATIO_QUANTILE: Final = 0.98
"""Of 64 runs the second largest: a single outlier does not put all at risk."""
USUAL_QUANTILE: Final = 0.95
"""Of the time by which full inference begins later than a request on a prepared prefix. It serves more than one request
in a hundred, so P99 of all requests would be that of full inference, and the difference 0."""
LEAST_RATIO: Final = 0.5
MOST_RATIO: Final = 8.0
LEAST_MARGIN: Final = 0.7
MOST_MARGIN: Final = 4.0
NO_FACTORS: Final[tuple[float, ...]] = (1.0,) * LENGTH_BUCKETS

HORIZON_US: Final = 10_000_000
"""Age above which an observation no longer counts, if there are enough younger ones."""
OLDEST_US: Final = 120_000_000
"""Age above which no run counts for the ratio. While a length is at risk, no new run of it is measured."""
LEAST_SAMPLES: Final = 16
LEAST_OUTSIDE: Final = 128
"""If fewer times outside are young, older ones count, too, up to `OLDEST_US`: in the few requests of a low rate the
rare one that waited for another's full inference would mostly be missing, and P99 would be the time without a queue."""
MISSED_FOR_US: Final = 2_000_000
"""How long a report names a missed request. Several statuses name it, since one may get lost."""


def full_path_us(latency: LatencyModel, prefix_tokens: int, scored_tokens: int) -> float:
    """Predicted device time of full inference: the later of the measured formula and of the worker's own plan."""
    full_us = latency.full_us(prefix_tokens, scored_tokens)
    planned_us = latency.append_us(0, prefix_tokens) + latency.hit_us(prefix_tokens, scored_tokens)
    return full_us if full_us > planned_us else planned_us


def risky_us(
    latency: LatencyModel, ratios: Sequence[float], margins: Sequence[float], prefix_tokens: int, scored_tokens: int
) -> float:
    """Device time that full inference exceeds rarely. `ratios` and `margins`: by bucket.

    It never falls with the length: a bucket counts with its longest prefix for all longer prefixes.
    """
    own = length_bucket(prefix_tokens)
    largest = ratios[own] * margins[own]
    worst_us = largest * full_path_us(latency, prefix_tokens, scored_tokens)
    for bucket in range(own - 1, -1, -1):
        # A shorter prefix takes longer only if its factor is larger than those of all longer ones.
        factor = ratios[bucket] * margins[bucket]
        if factor > largest:
            largest, longest = factor, (1 << bucket) - 1
            worst_us = max(worst_us, factor * full_path_us(latency, longest, scored_tokens))
    return worst_us


def factors_of(ratios: Sequence[float]) -> tuple[float, ...]:
    """The ratios of a report within their bounds, one for each bucket. Absent or unknown (0) ones are 1."""
    bounded = [min(max(ratio, LEAST_RATIO), MOST_RATIO) if ratio > 0 else 1.0 for ratio in ratios[:LENGTH_BUCKETS]]
    return (*bounded, *NO_FACTORS[len(bounded) :])


# -- the worker ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of full inference, measured."""

    ended_us: int
    prefix_tokens: int
    scored_tokens: int
    device_us: float


class FullPathObserver:
    """Observes how full inference ends at one worker. One thread writes; one thread calls `report`.

    Every answer is added to a deque, which costs no call in Python.
    """

    def __init__(self, window: int = 512, runs_per_bucket: int = 64) -> None:
        self.outside: deque[tuple[int, float]] = deque(maxlen=window)
        """The time of each answer, and its time outside device work; of requests that did not wait for a prefix."""
        self.outside_full: deque[tuple[int, float]] = deque(maxlen=window)
        """Those of `outside` that full inference served."""
        self._runs: tuple[deque[_Run], ...] = tuple(deque(maxlen=runs_per_bucket) for _ in range(LENGTH_BUCKETS))
        self.prepared: deque[tuple[int, int, float]] = deque(maxlen=4096)
        """Of each request whose prefix a job computed: prefix tokens, scored tokens, and the time in µs that it had
        left when its device work began."""
        self._missed: deque[tuple[int, str]] = deque(maxlen=MAX_MISSED_IDS)
        self._prepared_counts = [0] * LENGTH_BUCKETS
        self._needless_counts = [0] * LENGTH_BUCKETS

    def ran(self, prefix_tokens: int, scored_tokens: int, device_us: float, now_us: int) -> None:
        """Full inference over this many tokens took `device_us` of device time."""
        self._runs[length_bucket(prefix_tokens)].append(_Run(now_us, prefix_tokens, scored_tokens, device_us))

    def missed(self, request_id: str, now_us: int) -> None:
        """A request without a pre-infer job was truncated, rejected or late."""
        self._missed.append((now_us, request_id))

    def report(self, latency: LatencyModel, now_us: int) -> FullPathReport:
        """The report, with predictions of the latency model that the same status carries."""
        outside, full_outside = self._outside(now_us), self._full_outside(now_us)
        later_us = 0.0
        if full_outside:
            # Full inference would have begun later than the request on its prepared prefix.
            usual_us = _time_outside_us(outside, USUAL_QUANTILE)
            later_us = max(0.0, _time_outside_us(full_outside, USUAL_QUANTILE) - usual_us)
        while self.prepared:
            prefix_tokens, scored_tokens, left_us = self.prepared.popleft()
            bucket = length_bucket(prefix_tokens)
            self._prepared_counts[bucket] += 1
            if later_us + full_path_us(latency, prefix_tokens, scored_tokens) <= left_us:
                self._needless_counts[bucket] += 1
        return FullPathReport(
            outside_us=round(_time_outside_us(outside, QUANTILE)),
            ratios=self._ratios(latency, now_us),
            prepared=tuple(self._prepared_counts),
            needless=tuple(self._needless_counts),
            missed=tuple(name for at_us, name in self._missed.copy() if now_us - at_us <= MISSED_FOR_US),
            full_outside_us=round(_time_outside_us(full_outside, QUANTILE)) if full_outside else None,
        )

    def _outside(self, now_us: int) -> list[float]:
        """The times outside that count, in ascending order; none before the first answer."""
        observed, oldest_us = self.outside.copy(), now_us - HORIZON_US
        recent = [outside_us for at_us, outside_us in observed if at_us >= oldest_us]
        if len(recent) < LEAST_OUTSIDE:
            recent = [outside_us for at_us, outside_us in observed if now_us - at_us <= OLDEST_US][-LEAST_OUTSIDE:]
        if len(recent) < LEAST_SAMPLES:
            recent = [outside_us for _, outside_us in observed][-LEAST_SAMPLES:]
        return sorted(recent)

    def _full_outside(self, now_us: int) -> list[float]:
        """Those of full inference; none if few were measured lately: an old wait would keep all at risk, and then no
        new one is measured.
        """
        oldest_us = now_us - HORIZON_US
        recent = [outside_us for at_us, outside_us in self.outside_full.copy() if at_us >= oldest_us]
        return sorted(recent) if len(recent) >= LEAST_SAMPLES else []

    def _ratios(self, latency: LatencyModel, now_us: int) -> tuple[float, ...]:
        """By bucket. A bucket with few runs takes the quantile over all runs, and 0 (unknown) if these are few, too."""
        oldest_us = now_us - OLDEST_US
        by_bucket = [[_ratio(run, latency) for run in runs.copy() if run.ended_us >= oldest_us] for runs in self._runs]
        pooled = [ratio for ratios in by_bucket for ratio in ratios]
        common = quantile(pooled, RATIO_QUANTILE) if len(pooled) >= LEAST_SAMPLES else 0.0
        return tuple(quantile(each, RATIO_QUANTILE) if len(each) >= LEAST_SAMPLES else common for each in by_bucket)


def _time_outside_us(ordered: Sequence[float], share: float) -> float:
    return max(0.0, quantile_of_sorted(ordered, share)) if ordered else 0.0


def _ratio(run: _Run, latency: LatencyModel) -> float:
    predicted_us = full_path_us(latency, run.prefix_tokens, run.scored_tokens)
    return run.device_us / predicted_us if predicted_us > 0 else 0.0


# -- the trigger -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RiskTargets:
    """What the feedback aims at. A missed request counts more: the margin falls only while few are missed."""

    missed_share: float = 0.003
    """Largest share of the `not_at_risk` requests that are truncated, rejected or late."""
    needless_share: float = 0.1
    """Largest share of the requests with a computed prefix that full inference would have answered in time."""


@dataclass(slots=True)
class _BucketCounts:
    """The evidence of one bucket since its last change. Old evidence is halved."""

    judged: float = 0.0
    missed: float = 0.0
    prepared: float = 0.0
    needless: float = 0.0


RAISE: Final = 1.1
RAISE_FAR: Final = 1.25
"""The rise if more than four times the allowed share was missed."""
LOWER: Final = 1.05
SETTLE_US: Final = 2_000_000
"""After a change, outcomes of decisions from before it still arrive for this long. They do not count."""
CALM_US: Final = 30_000_000
"""The margin falls only this long after its last rise."""
KNOWN_BAD_US: Final = 300_000_000
"""How long the margin does not fall to a value that led to a rise."""
LEAST_MISSED: Final = 2
"""One missed request is no evidence of a wrong margin."""
LEAST_PREPARED: Final = 20
EVIDENCE: Final = 3.0
"""The margin falls after so many decisions divided by `missed_share`, those for a job too, since a length may have no
others; at the latest after half of `_MOST_COUNTED`."""
_MOST_COUNTED: Final = 4000
MOST_REMEMBERED: Final = 65_536
MOST_WORKERS: Final = 4096


class RiskFeedback:
    """The margins of one trigger, by length bucket, from the outcomes of its decisions. Not thread-safe.

    The evidence since the last change of a bucket decides:

    * The margin rises by 10 % if at least two requests, and more than `missed_share` of the judged ones, were missed;
      by 25 % if that is far more.
    * It falls by 5 % if of enough decisions (`EVIDENCE`) at most half of `missed_share` were missed, and more than
      `needless_share` of at least 20 prepared requests were needless; but for 30 s after a rise it stays, and for
      5 minutes it does not fall to the value from which it rose.
    """

    def __init__(self, targets: RiskTargets) -> None:
        self._targets = targets
        self._margins = [1.0] * LENGTH_BUCKETS
        self._counts = [_BucketCounts() for _ in range(LENGTH_BUCKETS)]
        self._changed_us: list[int | None] = [None] * LENGTH_BUCKETS
        self._raised: list[tuple[int, float] | None] = [None] * LENGTH_BUCKETS
        """When the margin rose last, and from which value."""
        self._judged: OrderedDict[str, int] = OrderedDict()
        self._totals: OrderedDict[str, tuple[tuple[int, ...], tuple[int, ...]]] = OrderedDict()

    @property
    def margins(self) -> Sequence[float]:
        """The margin of each bucket."""
        return self._margins

    def judged(self, request_id: str, prefix_tokens: int, now_us: int) -> None:
        """The request was decided as not at risk."""
        bucket = length_bucket(prefix_tokens)
        self._judged[request_id] = bucket
        if len(self._judged) > MOST_REMEMBERED:
            self._judged.popitem(last=False)
        if self._counts_now(bucket, now_us):
            self._counts[bucket].judged += 1

    def take(self, worker_id: str, report: FullPathReport, now_us: int) -> list[int]:
        """Takes a worker's report, and changes the margins. Returns the bucket of each request that was misjudged."""
        misjudged = [bucket for name in report.missed if (bucket := self._judged.pop(name, None)) is not None]
        for bucket in misjudged:
            if self._counts_now(bucket, now_us):
                self._counts[bucket].missed += 1
        before = self._totals.pop(worker_id, None)
        self._totals[worker_id] = report.prepared, report.needless
        if len(self._totals) > MOST_WORKERS:
            self._totals.popitem(last=False)
        if before is not None:
            self._count_prepared(before, report, now_us)
        for bucket in range(LENGTH_BUCKETS):
            if self._counts_now(bucket, now_us):
                self._adjust(bucket, now_us)
        return misjudged

    def _count_prepared(
        self, before: tuple[tuple[int, ...], tuple[int, ...]], report: FullPathReport, now_us: int
    ) -> None:
        """Adds the increase of the worker's totals. Totals that fell are those of a restarted worker."""
        totals = zip(before[0], before[1], report.prepared, report.needless, strict=False)
        for bucket, (prepared0, needless0, prepared1, needless1) in enumerate(totals):
            restarted = prepared1 < prepared0 or needless1 < needless0
            if bucket < LENGTH_BUCKETS and self._counts_now(bucket, now_us) and not restarted:
                self._counts[bucket].prepared += prepared1 - prepared0
                self._counts[bucket].needless += needless1 - needless0

    def _counts_now(self, bucket: int, now_us: int) -> bool:
        changed_us = self._changed_us[bucket]
        return changed_us is None or now_us - changed_us >= SETTLE_US

    def _adjust(self, bucket: int, now_us: int) -> None:
        counts, targets, margin = self._counts[bucket], self._targets, self._margins[bucket]
        allowed, decisions = targets.missed_share * counts.judged, counts.judged + counts.prepared
        if counts.missed >= LEAST_MISSED and counts.missed > allowed:
            self._raised[bucket] = now_us, margin
            rise = RAISE_FAR if counts.missed > 4 * allowed else RAISE
            self._change(bucket, min(MOST_MARGIN, margin * rise), now_us)
        elif (
            counts.prepared >= LEAST_PREPARED
            and (targets.missed_share * decisions >= EVIDENCE or decisions >= _MOST_COUNTED / 2)
            and counts.needless > targets.needless_share * counts.prepared
            and counts.missed <= allowed / 2
            and self._may_fall(bucket, margin / LOWER, now_us)
        ):
            self._change(bucket, max(LEAST_MARGIN, margin / LOWER), now_us)
        else:
            self._forget_old(counts)

    def _may_fall(self, bucket: int, margin: float, now_us: int) -> bool:
        raised = self._raised[bucket]
        if raised is None:
            return True
        raised_us, known_bad = raised
        return now_us - raised_us >= (CALM_US if margin > known_bad else KNOWN_BAD_US)

    def _change(self, bucket: int, margin: float, now_us: int) -> None:
        self._margins[bucket] = margin
        self._changed_us[bucket] = now_us
        self._counts[bucket] = _BucketCounts()

    @staticmethod
    def _forget_old(counts: _BucketCounts) -> None:
        if counts.judged > _MOST_COUNTED:
            counts.judged /= 2
            counts.missed /= 2
        if counts.prepared > _MOST_COUNTED:
            counts.prepared /= 2
            counts.needless /= 2
