"""Fits the latency model to the measurements of a calibration run. Pure: numpy only, no clock, no I/O.

No coefficient is below 0, so each predicted time is monotone in each of its arguments.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relaygr.admission.latency import LatencyModel
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.schemas.record import record

MIN_POINTS = 3
"""The least number of distinct measurements of a fit."""


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
