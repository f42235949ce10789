"""Corrects the predictions of a calibrated latency model by measured times. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import field

from relaygr.admission.latency import LatencyModel, Stage, length_bucket
from relaygr.runtime.quantiles import quantile, quantile_of_sorted
from relaygr.schemas.messages import LENGTH_BUCKETS
from relaygr.schemas.record import record

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
