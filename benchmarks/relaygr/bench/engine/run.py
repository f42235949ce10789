"""Measures variants of one model: in each round every variant runs every size in turn."""

from __future__ import annotations

import enum
import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from relaygr.bench.engine.shapes import SHAPES, append_flops, rank_flops
from relaygr.bench.engine.simple import simple_engine
from relaygr.bench.rows import now
from relaygr.worker.device import Device
from relaygr.worker.kv import KvDtype
from relaygr.worker.measuring import EngineMeter, bind_own_arena, matrix_peak_gflops, rest_between_requests
from relaygr.worker.model.attention.spec import torch_dtype
from relaygr.worker.model.checkpoint import Checkpoint, random_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.description import description_of
from relaygr.worker.model.engine import build_engine
from relaygr.worker.model.interface import Engine
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.score_error import ScoreError, made_users, measure_engine_error

PAGE_TOKENS = 64
CHUNK_TOKENS = 2048
"""Tokens of a chunk of pre-infer: the worker's default limit."""


@dataclass(frozen=True, slots=True)
class EngineVariant:
    """One way to run the same weights. The first variant of a run is the base of comparison."""

    compute_dtype: ComputeDtype
    kv_dtype: KvDtype
    graphs: bool = False
    """Run from captured graphs, if the back end can be captured."""
    simple: bool = False
    """As a team's own ranker in the simple form (`simple.py`)."""

    @property
    def name(self) -> str:
        forms = (", graphs" if self.graphs else "") + (", simple form" if self.simple else "")
        return f"{self.compute_dtype}, K,V {self.kv_dtype}{forms}"

    @property
    def matrix_dtype(self) -> torch.dtype:
        """The type of the matrix products, and of the product that measures the peak: float32 for int8."""
        return torch_dtype(self.compute_dtype.of_rows)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The measured sizes. Appends and batches are measured on the longest prefix."""

    prefixes: tuple[int, ...]
    candidates: tuple[int, ...]
    appends: tuple[int, ...]
    batches: tuple[int, ...]


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


def _engine_of(variant: EngineVariant, checkpoint: Checkpoint, device: Device) -> Engine:
    if variant.simple:
        return simple_engine(checkpoint, device, PAGE_TOKENS)
    return build_engine(checkpoint, device, variant.kv_dtype, PAGE_TOKENS, variant.compute_dtype, variant.graphs)


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


class SideBySide:
    """Engines of one shape on one device, one for each variant."""

    def __init__(self, shape: str, variants: Sequence[EngineVariant], sizes: Sizes, device: Device) -> None:
        self._shape = shape
        self._sizes = sizes
        self._device = device
        longest = max(sizes.prefixes) + max(sizes.appends, default=0)
        self.config: ModelConfig = SHAPES[shape].config(longest, max(sizes.candidates))
        checkpoint = random_checkpoint(self.config, seed=0)
        self._meters: dict[EngineVariant, EngineMeter] = {}
        self._rested: dict[EngineVariant, EngineMeter] = {}
        self._engines: dict[str, Engine] = {}
        rest = rest_between_requests(device)
        for variant in variants:
            engine = _engine_of(variant, checkpoint, device)
            bind_own_arena(engine, max((1, *sizes.batches)), longest)
            self._meters[variant] = EngineMeter(engine)
            self._rested[variant] = EngineMeter(engine, rest=rest)
            self._engines[variant.name] = engine
        self.times = Times()
        self._peaks: dict[torch.dtype, list[float]] = {variant.matrix_dtype: [] for variant in variants}

    def run(self, rounds: int, on_step: Callable[[str], None]) -> None:
        """Measures `rounds` rounds, after one round of warm-up."""
        for number in range(rounds + 1):
            for dtype, rates in self._peaks.items():
                rates.append(matrix_peak_gflops(dtype, self._device))
            for variant, meter in self._meters.items():
                on_step(f"round {number} of {rounds}, {variant.name}")
                for point, duration_us in self._round(variant, meter):
                    if number:
                        self.times.add(point, duration_us)

    def _round(self, variant: EngineVariant, meter: EngineMeter) -> Iterator[tuple[Point, float]]:
        def point(stage: EngineStage, prefix: int, new: int = 0, candidates: int = 0, requests: int = 1) -> Point:
            return Point(self._shape, variant.name, stage, requests, prefix, new, candidates)

        for tokens in self._sizes.prefixes:
            computed_us = sum(chunk.duration_us for chunk in meter.prefix(tokens, CHUNK_TOKENS))
            yield point(EngineStage.PRE_INFER, tokens, tokens), computed_us
            for count in self._sizes.candidates:
                hit_us = meter.rank(tokens, count).duration_us
                yield point(EngineStage.HIT, tokens, 0, count), hit_us
                yield point(EngineStage.FULL, tokens, tokens, count), computed_us + hit_us
                rested_us = self._rested[variant].rank(tokens, count).duration_us
                yield point(EngineStage.RESTED_HIT, tokens, 0, count), rested_us
        longest = max(self._sizes.prefixes)
        for new in self._sizes.appends:
            yield point(EngineStage.APPEND, longest, new), meter.append(longest, new).duration_us
        for requests in self._sizes.batches:
            for count in self._sizes.candidates:
                yield (
                    point(EngineStage.HIT, longest, 0, count, requests),
                    meter.rank(longest, count, requests).duration_us,
                )

    def errors(self) -> dict[str, ScoreError]:
        """The score error of each variant against the first, on generated users. Binds the engines to new arenas."""
        (_, exact), *others = self._engines.items()
        items = np.arange(self.config.vocabulary_size, dtype=np.int64)
        users, candidates = made_users(description_of(self.config), items)
        return {name: measure_engine_error(engine, exact, users, candidates) for name, engine in others}

    def figures(self) -> list[Figure]:
        """One figure for each point, in order."""
        peaks = {variant.name: statistics.median(self._peaks[variant.matrix_dtype]) for variant in self._meters}
        measured_at = now()
        return [self._figure(point, peaks, measured_at) for point in self.times.points()]

    def _figure(self, point: Point, peaks: Mapping[str, float], measured_at: str) -> Figure:
        times = self.times.of(point)
        median_us = statistics.median(times)
        gflops = self._flops(point) / median_us / 1e3
        return Figure(
            measured_at=measured_at,
            machine=f"{self._device.description}, Python {platform.python_version()}, {os.cpu_count()} cores",
            torch=str(torch.__version__),
            threads=torch.get_num_threads(),
            backend=self._engines[point.variant].backend,
            shape=point.shape,
            variant=point.variant,
            stage=point.stage,
            requests=point.requests,
            prefix_tokens=point.prefix_tokens,
            new_tokens=point.new_tokens,
            candidates=point.candidates,
            rounds=len(times),
            median_us=round(median_us, 1),
            least_us=round(min(times), 1),
            gflops=round(gflops, 1),
            share_of_peak=round(gflops / peaks[point.variant], 3),
        )

    def _flops(self, point: Point) -> float:
        config = self.config
        match point.stage:
            case EngineStage.PRE_INFER:
                return append_flops(config, 0, point.prefix_tokens)
            case EngineStage.APPEND:
                return append_flops(config, point.prefix_tokens, point.new_tokens)
            case EngineStage.HIT | EngineStage.RESTED_HIT:
                return point.requests * rank_flops(config, point.prefix_tokens, point.candidates)
            case EngineStage.FULL:
                return append_flops(config, 0, point.prefix_tokens) + rank_flops(
                    config, point.prefix_tokens, point.candidates
                )
