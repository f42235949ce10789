"""Times an engine's passes and copies over made inputs, each on its own and complete when its time is taken.

Calibration fits the latency model to these times, and `benchmarks/engine` reports them: one way of measuring for
both. Inputs are random, the same for the same engine; items, actions and times do not change what a pass costs.

The engine must be bound to an arena whose first pages, `prefixes` times the longest prefix, are free to be
overwritten: each prefix has pages of its own, so that a batch reads as much memory as one of different users.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.admission.latency import AppendPoint, RankPoint, ReloadPoint
from relaygr.schemas.messages import Behaviours
from relaygr.worker.cache.arena import copy_runs
from relaygr.worker.device import Device
from relaygr.worker.model.interface import Engine, PrefixChunk, PrefixInputs

SUFFIX_BEHAVIOURS = 16
_RELOAD_REPEATS = 5


def bind_own_arena(engine: Engine, prefixes: int = 1, longest_tokens: int | None = None) -> None:
    """Gives the engine an arena for so many prefixes of `longest_tokens` (none: the longest that it takes)."""
    tokens = longest_tokens or engine.layout.tokens(engine.limits.max_prefix_behaviours)
    pages = engine.geometry.pages_for(tokens) * prefixes
    engine.bind(engine.device.empty_bytes(pages, engine.geometry.page_bytes).zero_())


class EngineMeter:
    """Belongs to the device's thread."""

    def __init__(self, engine: Engine, timer_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._engine = engine
        self._timer_ns = timer_ns
        self._random = np.random.default_rng(0)
        # Where K,V depend on where the history ends nothing may follow the prefix but candidates.
        suffix = min(SUFFIX_BEHAVIOURS, engine.limits.max_suffix_behaviours) if engine.rules.grows else 0
        self._suffix = self._behaviours(suffix)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest prefix that the engine takes."""
        return self._engine.layout.tokens(self._engine.limits.max_prefix_behaviours)

    def pages_of(self, tokens: int, prefix: int = 0) -> NDArray[np.int32]:
        """The pages of one prefix of that length, where `prefixes` such lie one after the other."""
        count = self._engine.geometry.pages_for(tokens)
        return np.arange(prefix * count, (prefix + 1) * count, dtype=np.int32)

    def prefix(self, tokens: int, chunk_tokens: int, prefix: int = 0) -> list[AppendPoint]:
        """Computes a prefix in chunks (in one piece, where the model allows no other): a point a chunk."""
        inputs = self._inputs(tokens)
        step = chunk_tokens if self._engine.rules.chunks else inputs.tokens
        return [
            self._chunk(inputs, start, min(start + step, inputs.tokens), prefix)
            for start in range(0, inputs.tokens, step)
        ]

    def append(self, cached_tokens: int, new_tokens: int) -> AppendPoint:
        """The last `new_tokens` of a prefix whose beginning is in the pages, whatever it holds."""
        inputs = self._inputs(cached_tokens + new_tokens)
        return self._chunk(inputs, cached_tokens, inputs.tokens, 0)

    def rank(self, prefix_tokens: int, candidates: int, requests: int = 1) -> RankPoint:
        """Ranks a batch of requests, each on a prefix of its own that is in the pages, whatever it holds."""
        history = self._history(prefix_tokens)
        tokens = self._engine.layout.tokens(len(history))
        batch = [
            self._engine.rank_inputs(
                tokens,
                self.pages_of(tokens, request),
                self._suffix,
                self._random.integers(0, 1_000, candidates),
                prefix_timestamps_ms=history.timestamps_ms,
            )
            for request in range(requests)
        ]
        took_us = self._timed_pass(lambda: self._engine.rank(batch))
        return RankPoint(tokens, candidates + batch[0].suffix_tokens, took_us)

    def reloads(self, sizes_bytes: tuple[int, ...]) -> Iterator[ReloadPoint]:
        """Copies of whole pages, host to device, from places that are not neighbours: as after a while of use."""
        engine = self._engine
        page_bytes = engine.geometry.page_bytes
        # Three sizes at least, however large a page is: fewer cannot be fitted.
        counts = sorted({max(1, size // page_bytes) * factor for size in sizes_bytes for factor in (1, 2, 3)})
        most = counts[-1]
        source = engine.device.empty_host_bytes(most, page_bytes).zero_()
        target = engine.device.empty_bytes(most, page_bytes).zero_()
        places = self._random.permutation(most).astype(np.int32)
        for count in counts:
            runs = copy_runs(places[:count], np.arange(count, dtype=np.int32))

            def copy(runs: list = runs) -> None:  # type: ignore[type-arg]
                for run in runs:
                    pages = source[run.source : run.source + run.count]
                    target[run.target : run.target + run.count].copy_(pages, non_blocking=True)

            copy()
            took_us = statistics.median(self._timed(copy) for _ in range(_RELOAD_REPEATS))
            yield ReloadPoint(count * page_bytes, took_us)

    def _history(self, tokens: int) -> Behaviours:
        """As many behaviours as `tokens` prefix tokens hold."""
        layout = self._engine.layout
        return self._behaviours(max(0, tokens - layout.contextual_tokens) // layout.tokens_per_behaviour)

    def _inputs(self, tokens: int) -> PrefixInputs:
        features = np.zeros(self._engine.layout.contextual_tokens, np.int64)
        return self._engine.prefix_inputs(features, self._history(tokens))

    def _chunk(self, inputs: PrefixInputs, start: int, end: int, prefix: int) -> AppendPoint:
        chunk = PrefixChunk(inputs, start, end, self.pages_of(inputs.tokens, prefix))
        return AppendPoint(start, end - start, self._timed_pass(lambda: self._engine.pre_infer(chunk)))

    def _timed_pass(self, work: Callable[[], object]) -> float:
        """Of a forward, which the engine may have to see a few times before it runs as it will for good."""
        for _ in range(self._engine.passes_to_warm):
            work()
        return self._timed(work)

    def _timed(self, work: Callable[[], object]) -> float:
        self._engine.device.synchronize()
        start_ns = self._timer_ns()
        work()
        self._engine.device.synchronize()
        # A clock may be too coarse for an engine that does nothing; the fit wants positive times.
        return max(self._timer_ns() - start_ns, 1) / 1e3

    def _behaviours(self, count: int) -> Behaviours:
        return Behaviours(
            self._random.integers(0, 1_000, count),
            self._random.integers(0, 4, count).astype(np.uint16),
            np.arange(count, dtype=np.int64),
        )


def matrix_peak_gflops(dtype: torch.dtype, device: Device, size: int = 2048, repeats: int = 5) -> float:
    """The best rate, in 1e9 floating-point operations a second, of a large square matrix product here and now."""
    left, right = (torch.randn(size, size, device=device.torch_device).to(dtype) for _ in range(2))
    best_s = float("inf")
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        torch.mm(left, right)
        device.synchronize()
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * size**3 / best_s / 1e9
