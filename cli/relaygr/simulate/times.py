"""Measured times of what a calibration does not cover: Kafka hops, the worker's own work, and the noise of forwards.

`learn` takes them from the records of `relaygr traffic`:

    hop       time from the gateway to the worker and back, beside the worker's own
    look_up   time of a worker from the receipt of a request to its device work, where nothing waits
    answer    time to write a result
    noise     measured device time of rankings and of pre-infer, over that of a latency model

A distribution is a tuple of its quantiles in equal steps from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relaygr.admission.latency import LatencyModel
from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import read_regular
from relaygr.runtime.quantiles import quantile
from relaygr.schemas.ended import Ended
from relaygr.schemas.messages import Path as RankingPath
from relaygr.traffic.records import ImpressionRecord

Quantiles = Annotated[tuple[Annotated[float, Field(ge=0, lt=1e12)], ...], Field(min_length=1, max_length=1001)]
_STEPS: Final = np.linspace(0.0, 1.0, 101)
LEAST_REQUESTS: Final = 50
_BLOCK: Final = 4096
_LARGEST_NOISE: Final = 20.0


class MeasuredTimes(BaseModel):
    """Times in µs. The defaults are assumptions: a broker in the same network, and a machine of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    origin: str = "assumed"
    """Where the times come from."""
    requests: int = 0
    """Requests that they were learnt from."""
    hop_us: Quantiles = tuple(float(each) for each in 1_000 * np.exp(0.4 * np.linspace(-2.3, 2.6, 101)))
    """One way: half of a request's time outside the worker."""
    look_up_us: float = 150.0
    answer_us: float = 150.0
    refuse_us: float = 60.0
    hit_noise: Quantiles = tuple(float(each) for each in np.exp(0.05 * np.linspace(-2.3, 2.6, 101)))
    pre_noise: Quantiles = tuple(float(each) for each in np.exp(0.05 * np.linspace(-2.3, 2.6, 101)))


@dataclass(frozen=True, slots=True)
class _Ranked:
    """A ranking of a measured run."""

    queue_us: float
    answer_us: float
    noise: float
    """Its device time over the expected one."""
    per_prefix: float
    """How many of it take as long as computing its prefix."""


class Draws:
    """Draws from a distribution, in blocks: a single draw of numpy takes as long as hundreds in a block."""

    def __init__(self, quantiles: Sequence[float], random: np.random.Generator) -> None:
        self._quantiles = np.asarray(quantiles, dtype=np.float64)
        self._places = np.linspace(0.0, 1.0, len(quantiles))
        self._random = random
        self._left: list[float] = []

    def next(self) -> float:
        if not self._left:
            self._left = np.interp(self._random.random(_BLOCK), self._places, self._quantiles).tolist()
        return self._left.pop()


def learn(
    requests: Iterable[ImpressionRecord], latency: LatencyModel, scored_tokens: int, origin: str
) -> MeasuredTimes:
    """The times of a run at a load at which few requests wait: with the relay on, or of full inference alone.

    `requests`: in the order of their times; `latency`: what forwards take in a simulation without noise;
    `scored_tokens`: suffix tokens and candidates of each request.

    Raises RelayError if the run has too few requests.
    """
    hops: list[float] = []
    prefixes: list[float] = []
    hits: list[_Ranked] = []
    others: list[_Ranked] = []
    for each in requests:
        timings = each.timings
        if each.status != Ended.RANKED or timings is None or each.latency_us is None:
            continue
        hops.append(max(0.0, each.latency_us - timings.total_us) / 2)
        is_hit = each.path == RankingPath.HBM
        if not is_hit and each.path != RankingPath.FULL:
            continue
        new_tokens = each.prefix_tokens - each.tokens_cached
        if not is_hit and timings.pre_infer_us:
            prefixes.append(timings.pre_infer_us / latency.append_us(each.tokens_cached, new_tokens))
        # A tail that was not appended was ranked with the suffix.
        tail_tokens = 0 if timings.pre_infer_us else new_tokens
        expected_us = latency.hit_us(each.prefix_tokens - tail_tokens, scored_tokens + tail_tokens)
        waited_us = timings.wait_us + (timings.history_wait_us or 0)
        staged_us = timings.queue_us + waited_us + timings.pre_infer_us + timings.rank_us
        ranked = _Ranked(
            timings.queue_us,
            max(0.0, timings.total_us - staged_us),
            timings.rank_us / expected_us,
            latency.pre_us(each.prefix_tokens) / expected_us,
        )
        (hits if is_hit else others).append(ranked)
    # Without the relay there are no hits.
    ranked_like = hits if len(hits) >= LEAST_REQUESTS else others
    if len(ranked_like) < LEAST_REQUESTS:
        raise RelayError(
            f"{origin} has {len(hits)} requests that were ranked on a prefix in HBM, and {LEAST_REQUESTS} are "
            "needed: record a longer run with the relay on."
        )
    return MeasuredTimes(
        origin=origin,
        requests=len(hops),
        hop_us=_quantiles(hops),
        # At a low load the shortest tenth of the requests waits for nothing.
        look_up_us=quantile([each.queue_us for each in ranked_like], 0.1),
        answer_us=float(np.median([each.answer_us for each in ranked_like])),
        hit_noise=_noise([each.noise for each in ranked_like]),
        # Full inference is rare where the relay works.
        pre_noise=_noise(prefixes if len(prefixes) >= LEAST_REQUESTS else _in_a_row(ranked_like)),
    )


def load_times(path: Path) -> MeasuredTimes:
    """Reads the file of `relaygr simulate learn`. Raises RelayError."""
    try:
        return MeasuredTimes.model_validate_json(read_regular(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise RelayError(f"{path} cannot be read ({error}): `relaygr simulate learn --out` writes it.") from error
    except ValidationError as error:
        raise RelayError(f"{path} is not a file of `relaygr simulate learn`: {error}") from error


def save_times(path: Path, times: MeasuredTimes) -> None:
    """Raises RelayError if the file cannot be written."""
    try:
        path.write_text(times.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RelayError(f"{path} cannot be written: {error.strerror}.") from error


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    found: NDArray[np.float64] = np.quantile(np.asarray(values, dtype=np.float64), _STEPS)
    return tuple(float(each) for each in found)


def _in_a_row(rankings: Sequence[_Ranked]) -> list[float]:
    """The mean noise of as many rankings in a row as take the time of a prefix: short disturbances even out in a longer
    computation, and slow phases of the machine do not.
    """
    count = round(float(np.median([each.per_prefix for each in rankings])))
    count = min(max(1, count), len(rankings) // 2)
    means = np.convolve([each.noise for each in rankings], np.full(count, 1 / count), mode="valid")
    return [float(each) for each in means]


def _noise(ratios: Sequence[float]) -> tuple[float, ...]:
    return _quantiles([min(ratio, _LARGEST_NOISE) for ratio in ratios])
