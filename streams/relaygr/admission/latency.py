"""The latency model: predicted device times of a worker, for the decisions of trigger, scheduler and cache.

    T_full(n, m)    = a0 + a1 (n+m) + a2 (n+m)²       full inference
    T_pre(n)        = b0 + b1 n + b2 n²               pre-infer of a whole prefix
    T_append(n, k)  = b0 + b1 k + b2 k (2n+k) + b3 n  k new tokens on n cached ones; T_append(0, k) = T_pre(k)
    T_hit(n, m)     = c0 + c1 m + c2 m (n+m) + c3 n   ranking on a cached prefix
    T_batch         = sum of T_hit - (requests-1) s   one ranking pass of several requests
    T_reload(bytes) = d0 + d1 bytes                   a copy from DRAM to HBM

n: prefix tokens, m: suffix tokens + candidates, k: new prefix tokens; all times in µs of device time.
The linear terms are the projections, the quadratic terms the attention: each of k new rows attends to n + k/2 keys on
average (hence k (2n+k) / 2), each of the m rows of a ranking to n + m keys. b3 and c3 are the cost of reading the K,V
of the cached tokens, which does not depend on the number of rows. Splitting a prefix into appends costs b0 and this
reading for each additional chunk: T_append(0, x) + T_append(x, y) = T_append(0, x+y) + b0 + b3 x. The requests of a
batch share the calls and the reading of the weights: each but the first saves s, which does not depend on its length,
so batches pay for short work. Each worker measures s, and its status does not carry s. Without a measurement s is c0.
Background: RelayGR, arXiv 2601.01712 (at-risk test and pre-infer budget), and `docs/trigger.md`.

Every coefficient is at least 0, so each time is monotone in each of its arguments. The fits guarantee this, and
`LatencyModel` refuses other coefficients. `Corrector` adapts the model to a device whose speed drifts.

Pure: numpy only, no clock, no I/O.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import field, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relaygr.runtime.quantiles import quantile, quantile_of_sorted
from relaygr.schemas.messages import LENGTH_BUCKETS, LatencyCoefficients
from relaygr.schemas.record import record


def length_bucket(prefix_tokens: int) -> int:
    """The bucket of prefixes of this length: the bit length of their number of tokens."""
    bits = prefix_tokens.bit_length()
    return bits if bits < LENGTH_BUCKETS else LENGTH_BUCKETS - 1


TAIL_PART: Final = 1 / 2
"""A tail stays in the suffix while it lengthens a ranking pass by at most this part of the fixed cost of an append."""
MIN_POINTS = 3
"""The least number of distinct measurements of a fit."""


class Stage(enum.StrEnum):
    """A kind of device work with its own coefficients. Appends and pre-infer share PRE."""

    FULL = "full"
    PRE = "pre"
    HIT = "hit"
    RELOAD = "reload"


_STAGES: Final = tuple(Stage)
"""Iterating the class takes longer, and every ranking request scales a model."""


@record(frozen=True, slots=True)
class RankPoint:
    """One measured ranking pass, full or on a cached prefix."""

    prefix_tokens: int
    scored_tokens: int
    """Suffix tokens + candidates."""
    duration_us: float


@record(frozen=True, slots=True)
class AppendPoint:
    """One measured pass of pre-infer: `new_tokens` on `cached_tokens` (0: a prefix from its start)."""

    cached_tokens: int
    new_tokens: int
    duration_us: float


@record(frozen=True, slots=True)
class BatchPoint:
    """One measured ranking pass of several requests of one size, and that of one such request alone."""

    prefix_tokens: int
    scored_tokens: int
    """Of each request."""
    requests: int
    duration_us: float
    alone_us: float

    @property
    def saved_us(self) -> float:
        """What each request but the first saves; below 0 if the batch is slower."""
        return (self.requests * self.alone_us - self.duration_us) / (self.requests - 1)


@record(frozen=True, slots=True)
class ReloadPoint:
    """One measured copy from DRAM to HBM."""

    size_bytes: int
    duration_us: float


@record(frozen=True, slots=True)
class LatencyModel:
    """Predicted device times in µs. Raises ValueError for a coefficient that is negative or not finite."""

    coefficients: LatencyCoefficients
    shared_us: float | None = None
    """s: what each request of a batch but the first saves; None: not measured."""

    def __post_init__(self) -> None:
        if self.shared_us is not None and not (math.isfinite(self.shared_us) and self.shared_us >= 0):
            raise ValueError(f"shared_us is {self.shared_us}; it must be finite and at least 0")
        values = self._values()
        # A sum is finite only if every value is: one test for all of them, since each observation makes a model.
        if min(values) >= 0 and math.isfinite(sum(values)):
            return
        for each in fields(self.coefficients):
            value = getattr(self.coefficients, each.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"latency coefficient {each.name} is {value}; it must be finite and at least 0")

    def _values(self) -> tuple[float, ...]:
        c = self.coefficients
        return (c.a0, c.a1, c.a2, c.b0, c.b1, c.b2, c.c0, c.c1, c.c2, c.d0, c.d1, c.c3, c.b3)

    def full_us(self, prefix_tokens: int, scored_tokens: int) -> float:
        """Full inference over prefix, suffix and candidates."""
        c = self.coefficients
        tokens = prefix_tokens + scored_tokens
        return c.a0 + c.a1 * tokens + c.a2 * tokens * tokens

    def pre_us(self, prefix_tokens: int) -> float:
        """Pre-infer of a whole prefix in one chunk."""
        return self.append_us(0, prefix_tokens)

    def append_us(self, cached_tokens: int, new_tokens: int) -> float:
        """Pre-infer of `new_tokens` after `cached_tokens` whose K,V is cached."""
        c = self.coefficients
        attended = c.b2 * new_tokens * (2 * cached_tokens + new_tokens)
        return c.b0 + c.b1 * new_tokens + attended + c.b3 * cached_tokens

    def cut_us(self, cached_tokens: int) -> float:
        """What it costs to cut a prefix after `cached_tokens`: a further chunk, which reads their K,V again."""
        return self.coefficients.b0 + self.coefficients.b3 * cached_tokens

    def hit_us(self, prefix_tokens: int, scored_tokens: int) -> float:
        """Ranking on a prefix that is ready in HBM."""
        c = self.coefficients
        attended = c.c2 * scored_tokens * (prefix_tokens + scored_tokens)
        return c.c0 + c.c1 * scored_tokens + attended + c.c3 * prefix_tokens

    def tail_stays_in_suffix(self, cached_tokens: int, tail_tokens: int, scored_tokens: int) -> bool:
        """Whether a tail that is not cached is better ranked with the suffix, now and at later visits, than appended.

        Each visit until the append ranks the tail again, and the tail grows. To wait saves the fixed cost of an append,
        since a longer one takes the place of two: its cost by tokens is paid in any case. If the tail grows by equal
        steps, the mean cost of a visit is least if the tail is appended at the m-th visit, where it lengthens a pass by
        2 / (m + 1) of that fixed cost. m is not known here; `TAIL_PART` is right for three.
        """
        prefix_tokens = cached_tokens + tail_tokens
        longer_us = self.hit_us(cached_tokens, scored_tokens + tail_tokens) - self.hit_us(prefix_tokens, scored_tokens)
        return longer_us <= TAIL_PART * self.cut_us(cached_tokens)

    def further_us(self, prefix_tokens: int, scored_tokens: int) -> float:
        """What a request adds to a batch that has at least one other."""
        shared_us = self.coefficients.c0 if self.shared_us is None else self.shared_us
        return max(0.0, self.hit_us(prefix_tokens, scored_tokens) - shared_us)

    def batch_us(self, sizes: Sequence[tuple[int, int]]) -> float:
        """One ranking pass of requests of these sizes: prefix tokens, and suffix tokens + candidates."""
        if not sizes:
            return 0.0
        return self.hit_us(*sizes[0]) + sum(self.further_us(*size) for size in sizes[1:])

    def reload_us(self, size_bytes: int) -> float:
        """A copy of `size_bytes` from DRAM to HBM."""
        return self.coefficients.d0 + self.coefficients.d1 * size_bytes

    def longest_append(self, cached_tokens: int, budget_us: float, limit_tokens: int) -> int | None:
        """The most new tokens, at most `limit_tokens`, that fit into `budget_us`; None if the fixed cost exceeds it."""
        c = self.coefficients
        spare_us = budget_us - (c.b0 + c.b3 * cached_tokens)
        if limit_tokens < 0 or spare_us < 0:
            return None
        # The root of b2 k² + (b1 + 2 b2 n) k = spare, in the numerically stable form. Called for every chunk.
        linear = c.b1 + 2 * c.b2 * cached_tokens
        steepness = linear + math.sqrt(linear * linear + 4 * c.b2 * spare_us)
        tokens = limit_tokens if steepness <= 0 else int(min(2 * spare_us / steepness, limit_tokens))
        # `append_us`, written out, against the rounding of the root.
        b0, b1, b2, read_us, twice = c.b0, c.b1, c.b2, c.b3 * cached_tokens, 2 * cached_tokens
        while tokens < limit_tokens:
            more = tokens + 1
            if b0 + b1 * more + b2 * more * (twice + more) + read_us > budget_us:
                break
            tokens = more
        while tokens > 0 and b0 + b1 * tokens + b2 * tokens * (twice + tokens) + read_us > budget_us:
            tokens -= 1
        return tokens

    def scaled(self, factors: dict[Stage, float], extra_us: dict[Stage, float] | None = None) -> LatencyModel:
        """The model with each stage's times multiplied by its factor (absent: 1), plus its extra (absent: 0)."""
        extra_us = extra_us or {}
        return self.scaled_by(
            [factors.get(stage, 1.0) for stage in _STAGES], [extra_us.get(stage, 0.0) for stage in _STAGES]
        )

    def scaled_by(self, factors: Sequence[float], extra_us: Sequence[float]) -> LatencyModel:
        """`scaled`, with the factor and the extra of each stage in the order of `Stage`."""
        c = self.coefficients
        full, pre, hit, reload = factors
        more_full, more_pre, more_hit, more_reload = extra_us
        return LatencyModel(
            LatencyCoefficients(
                c.a0 * full + more_full, c.a1 * full, c.a2 * full, c.b0 * pre + more_pre, c.b1 * pre, c.b2 * pre,
                c.c0 * hit + more_hit, c.c1 * hit, c.c2 * hit, c.d0 * reload + more_reload, c.d1 * reload, c.c3 * hit,
                c.b3 * pre,
            ),
            # The extra is one of each pass, so the requests of a batch share it, too.
            None if self.shared_us is None else self.shared_us * hit + more_hit,
        )  # fmt: skip


def fit(
    full: Sequence[RankPoint],
    append: Sequence[AppendPoint],
    hit: Sequence[RankPoint],
    reload: Sequence[ReloadPoint],
) -> LatencyModel:
    """The model that fits a calibration run. Raises ValueError in the same cases as `fit_full`."""
    a0, a1, a2 = fit_full(full)
    b0, b1, b2, b3 = fit_append(append)
    c0, c1, c2, c3 = fit_hit(hit)
    d0, d1 = fit_reload(reload)
    return LatencyModel(LatencyCoefficients(a0, a1, a2, b0, b1, b2, c0, c1, c2, d0, d1, c3, b3))


def fit_full(points: Sequence[RankPoint]) -> tuple[float, float, float]:
    """(a0, a1, a2) of T_full. Raises ValueError for too few points or durations that are not positive."""
    totals = [float(point.prefix_tokens + point.scored_tokens) for point in points]
    a0, a1, a2 = _fit([(1.0, n, n * n) for n in totals], [point.duration_us for point in points])
    return a0, a1, a2


def fit_append(points: Sequence[AppendPoint]) -> tuple[float, float, float, float]:
    """(b0, b1, b2, b3), shared by T_pre and T_append. Raises ValueError in the same cases as `fit_full`."""
    sizes = [(float(point.cached_tokens), float(point.new_tokens)) for point in points]
    rows = [(1.0, k, k * (2 * n + k), n) for n, k in sizes]
    b0, b1, b2, b3 = _fit(rows, [point.duration_us for point in points])
    return b0, b1, b2, b3


def fit_hit(points: Sequence[RankPoint]) -> tuple[float, float, float, float]:
    """(c0, c1, c2, c3) of T_hit. Raises ValueError in the same cases as `fit_full`."""
    sizes = [(float(point.prefix_tokens), float(point.scored_tokens)) for point in points]
    rows = [(1.0, m, m * (n + m), n) for n, m in sizes]
    c0, c1, c2, c3 = _fit(rows, [point.duration_us for point in points])
    return c0, c1, c2, c3


def fit_shared(points: Sequence[BatchPoint]) -> float | None:
    """s of T_batch: the median over the points, at least 0; None without points."""
    return max(0.0, statistics.median(point.saved_us for point in points)) if points else None


def fit_reload(points: Sequence[ReloadPoint]) -> tuple[float, float]:
    """(d0, d1) of T_reload. Raises ValueError in the same cases as `fit_full`."""
    rows = [(1.0, float(point.size_bytes)) for point in points]
    d0, d1 = _fit(rows, [point.duration_us for point in points])
    return d0, d1


def _fit(rows: Sequence[tuple[float, ...]], durations_us: Sequence[float]) -> list[float]:
    """Coefficients >= 0 with the least sum of squared *relative* errors.

    The errors are relative because durations span orders of magnitude, and short prefixes matter as much as long ones.
    """
    if len(set(rows)) < MIN_POINTS:
        raise ValueError(f"{len(set(rows))} distinct sizes were measured; a fit needs at least {MIN_POINTS}")
    if not all(math.isfinite(duration) and duration > 0 for duration in durations_us):
        raise ValueError("a measured duration is not a positive number")
    durations = np.asarray(durations_us, dtype=np.float64)
    weighted = np.asarray(rows, dtype=np.float64) / durations[:, None]
    return [float(value) for value in non_negative_least_squares(weighted, np.ones_like(durations))]


def non_negative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x >= 0 [columns] that minimises |matrix x - target|², for a matrix [rows, columns] of few columns.

    Tries every set of non-zero columns. The optimum is the plain least-squares solution on its own set of columns, so
    the best non-negative solution among all 2^columns sets is exact.
    """
    columns = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    unit = matrix / scale
    best: NDArray[np.float64] = np.zeros(columns)
    best_error = float(target @ target)
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            part, *_ = np.linalg.lstsq(unit[:, chosen], target, rcond=None)
            if (part < 0).any():
                continue
            error = float(np.square(unit[:, chosen] @ part - target).sum())
            if error < best_error:
                best, best_error = np.zeros(columns), error
                best[list(chosen)] = part
    solution: NDArray[np.float64] = best / scale
    return solution


class _Correction:
    """Measured = length ratio x (factor x calibrated + extra), for one stage.

    The length ratio is that of the bucket of the prefix's length: a formula of few terms is off by tens of per cent at
    some lengths. It begins at 1, and follows measured / predicted of its bucket. `extra_us` does not depend on the size
    of the work. It is known only where sizes differ; otherwise it is 0. A moving regression of measured / calibrated on
    1 / calibrated gives it and the factor.
    """

    __slots__ = (
        "_counts", "_covariance", "_inverse", "_variance", "extra_us", "factor", "length_ratios", "ratio", "recent"
    )  # fmt: skip

    def __init__(self) -> None:
        self.recent: deque[tuple[float, float]] = deque(maxlen=RECENT_MEASUREMENTS)
        """Measured / calibrated, and predicted / measured, of the last measurements."""
        self.ratio = 1.0
        """The moving average of measured / calibrated."""
        self.extra_us = 0.0
        self.factor = 1.0
        """Measured / calibrated without the extra."""
        self.length_ratios = [1.0] * LENGTH_BUCKETS
        self._counts = [0] * LENGTH_BUCKETS
        self._inverse: float | None = None
        self._variance = self._covariance = 0.0

    def counts(self) -> list[int]:
        """The measurements of each length bucket."""
        return self._counts.copy()

    def observe(
        self, calibrated_us: float, measured_us: float, weight: float, max_factor: float, bucket: int | None
    ) -> None:
        inverse = 1 / calibrated_us
        if self._inverse is None:
            self._inverse = inverse
        expected = self.factor + self.extra_us * inverse
        predicted = expected if bucket is None else expected * self.length_ratios[bucket]
        measured = measured_us * inverse
        self.recent.append((measured, predicted / max(measured, _LEAST_RATIO)))
        if bucket is not None:
            self._observe_length(bucket, measured / max(expected, _LEAST_RATIO), weight)
        ratio = min(max(measured, expected / 2), expected * 2)
        off_inverse, off_ratio = inverse - self._inverse, ratio - self.ratio
        self._inverse += weight * off_inverse
        self.ratio = min(max(self.ratio + weight * off_ratio, 1 / max_factor), max_factor)
        self._variance = (1 - weight) * (self._variance + weight * off_inverse * off_inverse)
        self._covariance = (1 - weight) * (self._covariance + weight * off_inverse * off_ratio)
        # Sizes that differ by a few per cent say nothing about the extra.
        slope = self._covariance / (self._variance + (_SAME_SIZE * self._inverse) ** 2)
        self.extra_us = min(max(slope, 0.0), (self.ratio - 1 / max_factor) / self._inverse)
        self.factor = self.ratio - self.extra_us * self._inverse

    def _observe_length(self, bucket: int, found: float, weight: float) -> None:
        """`found`: measured / predicted without the ratio of this bucket."""
        before = self.length_ratios[bucket]
        self._counts[bucket] += 1
        clipped = min(max(found, before / 2), before * 2)
        # The first measurements count more than the later ones, and yet less than the 1 that the ratio begins with.
        share = max(weight, 1 / (self._counts[bucket] + _LENGTH_PRIOR))
        self.length_ratios[bucket] = min(
            max(before + share * (clipped - before), 1 / MOST_LENGTH_RATIO), MOST_LENGTH_RATIO
        )


@record(frozen=True, slots=True)
class PredictionQuality:
    """How one stage's last measured times compare with the calibration and with the predictions of that moment."""

    slowdown: float
    """The median of measured / calibrated: what the worker around the engine, and the machine's other work, add."""
    ratio_p10: float
    """Predicted / measured: the 10th percentile."""
    ratio_p50: float
    ratio_p90: float
    count: int = field(default=0, kw_only=True)
    """The number of measurements behind these figures."""

    @property
    def is_off(self) -> bool:
        """Whether predictions are wrong by half or more in the median, although the correction has had its time."""
        return self.count >= RECENT_MEASUREMENTS // 4 and not 1 / OFF_RATIO <= self.ratio_p50 <= OFF_RATIO


OFF_RATIO = 1.5
MOST_LENGTH_RATIO = 2.0
"""A larger error of one length is not that of the formula."""
_LENGTH_PRIOR = 8
"""As many measurements weigh as much as the calibration."""
RECENT_MEASUREMENTS = 512
"""The measurements of each stage that `Corrector.quality` looks at."""
_LEAST_RATIO = 1e-6
_SAME_SIZE = 0.1
"""Work whose calibrated times differ by less than this share counts as of one size."""


@record(frozen=True, slots=True)
class PassTime:
    """Predicted device time of a ranking pass, µs."""

    alone_us: float
    further_us: float
    """What it adds to a batch that has another request."""


class Corrector:
    """Corrects a calibrated model on-line, from measured and calibrated times: for each stage a factor, a constant, and
    a ratio for each bucket of prefix lengths.

    The constant is the cost of each piece of work whatever its size. Each observation is clipped to half or double the
    present prediction, so that one stall changes the correction only a little. The average ratio stays within
    [1/max_factor, max_factor]. The device thread owns the corrector; any thread may read `model`.
    """

    def __init__(self, calibrated: LatencyModel, weight: float = 0.05, max_factor: float = 8.0) -> None:
        """`weight` of one observation, in (0, 1]; `max_factor` is above 1. Raises ValueError for other values."""
        if not 0 < weight <= 1 or not max_factor > 1:
            raise ValueError(f"weight {weight} must be in (0, 1] and max_factor {max_factor} above 1")
        self._weight = weight
        self._max_factor = max_factor
        self.recalibrate(calibrated)

    def recalibrate(self, calibrated: LatencyModel) -> None:
        """Replaces the calibration and drops all corrections."""
        self.calibrated = calibrated
        self._corrections = {stage: _Correction() for stage in Stage}
        self._model: LatencyModel | None = calibrated
        self._at: dict[int, LatencyModel] = {}

    def model_at(self, prefix_tokens: int) -> LatencyModel:
        """The corrected model for prefixes of this length. Any thread may call it."""
        bucket, known = length_bucket(prefix_tokens), self._at
        model = known.get(bucket)
        if model is None:
            corrections = [(each, each.length_ratios[bucket]) for each in self._corrections.values()]
            factors = [correction.factor * ratio for correction, ratio in corrections]
            extra_us = [correction.extra_us * ratio for correction, ratio in corrections]
            # An observation on the device thread begins a new dictionary, so an old model does not stay in it.
            model = known[bucket] = self.calibrated.scaled_by(factors, extra_us)
        return model

    def cut_us(self, cached_tokens: int) -> float:
        """`cut_us` of `model`, which would have to be made for it."""
        correction, c = self._corrections[Stage.PRE], self.calibrated.coefficients
        return c.b0 * correction.factor + correction.extra_us + c.b3 * correction.factor * cached_tokens

    def pass_time(self, prefix_tokens: int, scored_tokens: int) -> PassTime:
        """The corrected time of a ranking pass, as `model_at` has it. A model would last until the next observation
        only, and its making takes longer than this.
        """
        correction, calibrated = self._corrections[Stage.HIT], self.calibrated
        ratio = correction.length_ratios[length_bucket(prefix_tokens)]
        factor, extra_us = correction.factor * ratio, correction.extra_us * ratio
        return PassTime(
            factor * calibrated.hit_us(prefix_tokens, scored_tokens) + extra_us,
            factor * calibrated.further_us(prefix_tokens, scored_tokens),
        )

    def length_ratios(self, stage: Stage) -> tuple[float, ...]:
        """Measured / predicted of `model` by length bucket; 0 without a measurement. Any thread may call it."""
        correction = self._corrections[stage]
        return tuple(
            ratio if count else 0.0
            for ratio, count in zip(correction.length_ratios.copy(), correction.counts(), strict=True)
        )

    @property
    def model(self) -> LatencyModel:
        """The corrected model, on average over all lengths."""
        model = self._model
        if model is None:
            corrections = self._corrections.values()
            # The local variable is returned, because an observation on the device thread may reset the attribute.
            model = self._model = self.calibrated.scaled_by(
                [each.factor for each in corrections], [each.extra_us for each in corrections]
            )
        return model

    def factor(self, stage: Stage) -> float:
        """The average of measured / calibrated of one stage."""
        return self._corrections[stage].ratio

    def quality(self, stage: Stage) -> PredictionQuality | None:
        """None before the first measurement. Any thread may call it."""
        recent = self._corrections[stage].recent.copy()
        if not recent:
            return None
        slowdowns, ratios = zip(*recent, strict=True)
        ordered = sorted(ratios)
        p10, p50, p90 = (quantile_of_sorted(ordered, share) for share in (0.1, 0.5, 0.9))
        return PredictionQuality(quantile(slowdowns, 0.5), p10, p50, p90, count=len(recent))

    def observe(self, stage: Stage, calibrated_us: float, measured_us: float, prefix_tokens: int | None = None) -> None:
        """Takes the measured time of finished work, and the time that `calibrated` (not `model`) predicts for it.

        `prefix_tokens`: the length of its prefix; None for work on several.
        """
        if not (calibrated_us > 0 and math.isfinite(calibrated_us) and measured_us >= 0 and math.isfinite(measured_us)):
            return
        bucket = None if prefix_tokens is None else length_bucket(prefix_tokens)
        self._corrections[stage].observe(calibrated_us, measured_us, self._weight, self._max_factor, bucket)
        self._model = None
        self._at = {}
