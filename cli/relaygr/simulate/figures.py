"""The figures of a simulation, each with its sampling error and the number of samples.

An error is half of the 95 % confidence interval, by the jackknife over the simulated parts: each part has its own users
and its own seed. With one part there is none. The busiest part of a large fleet is always simulated. It stands for
itself, and the random parts for all others: a stratified sample.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from relaygr.schemas.ended import UNRANKED, Reason, in_simulation
from relaygr.schemas.messages import Path

ENDINGS: Final = (
    *(path.value for path in Path),
    *(reason.row.in_simulation for reason in Reason if reason.row.in_simulation),
    *(in_simulation(end) for end in UNRANKED),
)
"""How a ranking request ended: its path, or the end of one without scores."""
CODE: Final = {ending: code for code, ending in enumerate(ENDINGS)}
RANKED: Final = [CODE[path] for path in Path]
_WHOLE: Final = [CODE[path] for path in Path if path is not Path.TRUNCATED]
_HITS: Final = [CODE[Path.HBM]]
_NOT_READY: Final = [CODE[each] for each in (Path.PENDING, Path.FULL, Path.TRUNCATED)]
NO_LATENCY: Final = -1
HIGHEST_LOAD: Final = 0.8
"""The highest load of a worker at which a simulation is in range: beyond, small errors of the times become large ones
of the latency."""
_TWO_SIDED: Final = 0.975
"""The quantile of Student's t at the upper end of a 95 % confidence interval."""


@dataclass(frozen=True, slots=True)
class Requests:
    """The ends of requests, one place for each. `latencies_us`: from the scheduled ranking request to the answer."""

    latencies_us: NDArray[np.int64]
    endings: NDArray[np.uint8]

    def __len__(self) -> int:
        return int(self.endings.size)

    def in_time(self, budget_us: int) -> NDArray[np.bool_]:
        """Whether each got an answer over its whole history within the time limit."""
        is_whole: NDArray[np.bool_] = np.isin(self.endings, _WHOLE)
        return is_whole & (self.latencies_us <= budget_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOutcome:
    """What one part of the fleet did in one simulation, after its cold beginning."""

    requests: Requests
    found: Mapping[str, int]
    """Prefixes by where an impression's first look-up found them: hbm, dram or nowhere."""
    jobs: Mapping[str, int]
    device_s: float
    thread_s: float = 0.0
    """Time in which device threads were busy. On a CPU that is `device_s` and the workers' own time."""
    worker_s: float
    """Counted seconds of all workers together."""
    impressions: int
    """Simulated impressions, those of the cold beginning included."""
    took_s: float
    """CPU time of the simulation."""
    asked: int = 0
    """Requests with a pre-infer job."""
    ready: int = 0
    """Those that found their prefix in HBM."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, and half of its 95 % confidence interval; None if it is not known."""

    value: float
    error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one system under one load. Shares are of all requests; latencies are of ranked requests."""

    requests: int
    parts: int
    """Simulations behind the sampling errors."""
    p50_ms: Estimate
    p99_ms: Estimate
    hit_p99_ms: Estimate
    """Of requests that found their prefix in HBM."""
    ready_share: Estimate
    """Requests that found their prefix in HBM, of those with a pre-infer job."""
    answer_ms: Estimate
    """Mean time of an answer. A request without scores counts with the time limit."""
    prefix_share: Estimate
    """The part of the time of ranked requests that belongs to those whose prefix was not ready."""
    late_share: Estimate
    """Requests without an answer over the whole history within the time limit."""
    mix: dict[str, Estimate]
    """The share of each of `ENDINGS`."""
    found_hbm: Estimate
    """Share of the impressions whose first look-up found a prefix, or its beginning, in HBM."""
    found_dram: Estimate
    device_s_per_1000: Estimate
    """Device seconds per 1,000 ranked requests."""
    device_load: Estimate
    """Device time per second and worker."""
    thread_load: Estimate
    """Busy time of the device thread per second and worker."""
    highest_share: float = 1.0
    """Expected impressions of a worker of the busiest part, as a multiple of the mean worker's."""
    impressions: int
    took_s: float
    jobs: dict[str, int] = field(default_factory=dict)

    @property
    def impressions_per_s(self) -> float:
        """Simulated impressions a second of CPU time."""
        return self.impressions / self.took_s if self.took_s else 0.0

    @property
    def is_in_range(self) -> bool:
        """Whether the device threads are busy for at most `HIGHEST_LOAD` of the time."""
        return self.thread_load.value <= HIGHEST_LOAD


_Weighted = Sequence[tuple[float, PartOutcome]]
"""Outcomes, each with the number of parts that it stands for."""


@dataclass(frozen=True, slots=True)
class _Stratum:
    """Simulated parts that stand for `size` parts of the fleet together."""

    size: float
    parts: Sequence[PartOutcome]

    def weighted(self) -> _Weighted:
        return [(self.size / len(self.parts), part) for part in self.parts]

    def without(self, place: int) -> _Stratum:
        return _Stratum(self.size, [*self.parts[:place], *self.parts[place + 1 :]])


def figures_of(
    parts: Sequence[PartOutcome], budget_ms: float, scale: float = 1.0, busiest: Sequence[PartOutcome] = ()
) -> Figures:
    """The figures of these parts together. `scale`: parts of the whole fleet; `busiest`: simulations of the busiest of
    them, which is not among `parts`.

    Raises ValueError without a part.
    """
    if not parts:
        raise ValueError("nothing was simulated")
    budget_us = round(budget_ms * 1000)
    strata = [_Stratum(1.0, busiest), _Stratum(scale - 1, parts)] if busiest else [_Stratum(scale, parts)]
    parts = [*busiest, *parts]

    def estimate(statistic: Callable[[_Weighted], float]) -> Estimate:
        return _jackknife(strata, statistic)

    def found(where: str) -> Estimate:
        return estimate(lambda some: _share(some, lambda each: each.found.get(where, 0), _looked_up))

    jobs: Counter[str] = Counter()
    for part in parts:
        jobs.update(part.jobs)
    return Figures(
        requests=sum(len(part.requests) for part in parts),
        parts=len(parts),
        p50_ms=estimate(lambda some: _percentile_ms(some, 0.50)),
        p99_ms=estimate(lambda some: _percentile_ms(some, 0.99)),
        hit_p99_ms=estimate(lambda some: _percentile_ms(some, 0.99, _HITS)),
        ready_share=estimate(lambda some: _share(some, lambda each: each.ready, lambda each: each.asked)),
        answer_ms=estimate(lambda some: _share(some, lambda each: _answer_ms(each, budget_ms), _count)),
        prefix_share=estimate(
            lambda some: _share(some, lambda each: _time_us(each, _NOT_READY), lambda each: _time_us(each, RANKED))
        ),
        late_share=estimate(
            lambda some: 1 - _share(some, lambda each: int(each.requests.in_time(budget_us).sum()), _count)
        ),
        mix={
            ending: estimate(lambda some, code=code: _share(some, lambda each: _with_code(each, code), _count))  # type: ignore[misc]
            for ending, code in CODE.items()
        },
        found_hbm=found("hbm"),
        found_dram=found("dram"),
        device_s_per_1000=estimate(lambda some: 1000 * _share(some, _device_s, _ranked)),
        device_load=estimate(lambda some: _share(some, _device_s, lambda each: each.worker_s)),
        thread_load=estimate(lambda some: _share(some, lambda each: each.thread_s, lambda each: each.worker_s)),
        impressions=sum(part.impressions for part in parts),
        took_s=sum(part.took_s for part in parts),
        jobs=dict(jobs),
    )


def _weighted(strata: Sequence[_Stratum]) -> _Weighted:
    return [each for stratum in strata for each in stratum.weighted()]


def _jackknife(strata: Sequence[_Stratum], statistic: Callable[[_Weighted], float]) -> Estimate:
    """Leaves out one part at a time. A stratum of one part tells no spread, so there is no error."""
    value = statistic(_weighted(strata))
    variances: list[tuple[float, int]] = []
    """Of each stratum, with its degrees of freedom."""
    for number, stratum in enumerate(strata):
        count = len(stratum.parts)
        changed = ([*strata[:number], stratum.without(place), *strata[number + 1 :]] for place in range(count))
        without = np.array([statistic(_weighted(each)) for each in changed] if count > 1 else [math.nan])
        if not np.isfinite(without).all():
            return Estimate(value)
        variances.append(((count - 1) / count * float(np.square(without - without.mean()).sum()), count - 1))
    variance = sum(each for each, _ in variances)
    if not variance:
        return Estimate(value, 0.0)
    # The degrees of freedom of the sum, by Welch and Satterthwaite.
    freedom = variance**2 / sum(each**2 / own for each, own in variances)
    return Estimate(value, float(stdtrit(freedom, _TWO_SIDED)) * math.sqrt(variance))


def _percentile_ms(parts: _Weighted, share: float, codes: Sequence[int] = RANKED) -> float:
    """The latency that this share of the requests with these ends does not exceed. A refusal is fast, and would make an
    overloaded fleet look fast.
    """
    latencies = np.concatenate([part.requests.latencies_us for _, part in parts])
    weights = np.concatenate([np.full(len(part.requests), weight) for weight, part in parts])
    is_counted = np.isin(np.concatenate([part.requests.endings for _, part in parts]), codes)
    return weighted_quantile(latencies[is_counted], weights[is_counted], share) / 1000


def weighted_quantile(values: NDArray[np.int64], weights: NDArray[np.float64], share: float) -> float:
    """`relaygr.runtime.quantiles` of values that have weights; NaN without values."""
    if not values.size:
        return math.nan
    order = np.argsort(values)
    reached = weights[order].cumsum()
    place = int(reached.searchsorted((share - 1e-9) * reached[-1]))
    return float(values[order][min(place, values.size - 1)])


def _share(parts: _Weighted, counted: Callable[[PartOutcome], float], of: Callable[[PartOutcome], float]) -> float:
    total = sum(weight * of(part) for weight, part in parts)
    return sum(weight * counted(part) for weight, part in parts) / total if total else math.nan


def _count(part: PartOutcome) -> int:
    return len(part.requests)


def _with_code(part: PartOutcome, code: int) -> int:
    return int((part.requests.endings == code).sum())


def _time_us(part: PartOutcome, codes: Sequence[int]) -> int:
    """The latencies of the requests with these ends, in sum."""
    return int(part.requests.latencies_us[np.isin(part.requests.endings, codes)].sum())


def _answer_ms(part: PartOutcome, budget_ms: float) -> float:
    return _time_us(part, RANKED) / 1000 + budget_ms * (_count(part) - _ranked(part))


def _ranked(part: PartOutcome) -> int:
    return int(np.isin(part.requests.endings, RANKED).sum())


def _looked_up(part: PartOutcome) -> int:
    return sum(part.found.values())


def _device_s(part: PartOutcome) -> float:
    return part.device_s
