"""The figures of an engine benchmark: one CSV line for each point, with a description of the machine."""

from __future__ import annotations

import enum
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


class EngineStage(enum.StrEnum):
    """The stage of a request that was timed."""

    PRE_INFER = "pre_infer"
    APPEND = "append"
    HIT = "hit"
    RESTED_HIT = "rested_hit"
    """A hit after a pause, as in a worker that is not busy."""
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Point:
    """One size of one stage, for one variant of the engine. `new_tokens`: tokens computed into pages before ranking."""

    shape: str
    variant: str
    stage: EngineStage
    requests: int
    prefix_tokens: int
    new_tokens: int
    candidates: int


@dataclass(frozen=True, slots=True)
class Figure:
    """The times of one point over the rounds of one run."""

    measured_at: str
    machine: str
    torch: str
    threads: int
    backend: str
    shape: str
    variant: str
    stage: str
    requests: int
    prefix_tokens: int
    new_tokens: int
    candidates: int
    rounds: int
    median_us: float
    least_us: float
    gflops: float
    """Arithmetic of the point / its median time, in 1e9 operations a second."""
    share_of_peak: float
    """`gflops` / the rate of a large matrix product of the same element type, measured in the same run."""


class Times:
    """The times of each point, collected round by round."""

    def __init__(self) -> None:
        self._us: dict[Point, list[float]] = defaultdict(list)

    def add(self, point: Point, duration_us: float) -> None:
        self._us[point].append(duration_us)

    def points(self) -> list[Point]:
        """The points in the order of their first measurement: variant by variant."""
        return list(self._us)

    def of(self, point: Point) -> Sequence[float]:
        """The times of a point, in the order of the rounds; empty if it was not measured."""
        return self._us.get(point, ())

    def median_us(self, point: Point) -> float:
        return statistics.median(self._us[point])
