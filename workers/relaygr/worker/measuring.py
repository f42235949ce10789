"""Measures the durations of an engine's forwards and copies, one at a time, on generated inputs.

Calibration fits the latency model to these durations, and `benchmarks/engine` reports them. Inputs are random but the
same for the same engine. Items are of the model's vocabulary: unknown ones would all read one row of its table, which
takes less time. Actions and timestamps do not change the duration of a forward.

The engine must be bound to an arena whose first pages, `prefixes` times the longest prefix, may be overwritten. Each
prefix has pages of its own, so that a batch reads as much memory as a batch of different users.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.admission.fit import AppendPoint, RankPoint, ReloadPoint
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker.cache.arena import copy_runs
from relaygr.worker.device import Device
from relaygr.worker.model.interface import Engine, PrefixChunk, PrefixInputs
from relaygr.worker.model.layer_parts import onednn_product

SUFFIX_BEHAVIOURS = 16
_RELOAD_REPEATS = 5
_REST_S = 0.005
_PRODUCT_ROWS = (512, 1024, 2048, 4096, 8192)
_LONG_PRODUCT_S = 0.1
_PRODUCTS = 6
_DISPLACED_BYTES = 128 << 20
"""Read between two requests: several times a core's own caches, and a part of the shared one."""


def bind_own_arena(engine: Engine, prefixes: int = 1, longest_tokens: int | None = None) -> torch.Tensor:
    """Binds the engine to a new arena for `prefixes` prefixes of `longest_tokens`, by default the longest possible.

    Returns the arena, uint8 [pages, page_bytes]. Raises RelayError without memory for it.
    """
    tokens = longest_tokens or engine.layout.tokens(engine.limits.max_prefix_behaviours)
    pages = engine.geometry.pages_for(tokens) * prefixes
    wanted, free = pages * engine.geometry.page_bytes, engine.device.memory().free_bytes
    if wanted > free:
        raise RelayError(
            f"{prefixes} prefixes of {tokens} tokens need {wanted / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB are "
            "free: free memory, or raise the limit of the container."
        )
    arena = engine.device.empty_bytes(pages, engine.geometry.page_bytes).zero_()
    engine.bind(arena)
    return arena


def rest_between_requests(device: Device) -> Callable[[], None]:
    """A call that leaves the processor as a worker's next request finds it: with other data in its caches.

    Between two requests a worker reads messages, and the broker and other workers use the same cores. Code, weights and
    K,V are then no longer in the caches where a loop of passes has them, or a pause on an idle machine leaves them. A
    hit took 1.15 times as long as in a loop, and an append of 8 tokens 1.3 to 1.6 times.
    """
    # An accelerator's own caches stay as they are.
    others = torch.ones(_DISPLACED_BYTES // 8 if device.is_cpu else 0, dtype=torch.int64)

    def rest() -> None:
        others.sum()
        time.sleep(_REST_S)

    return rest


class EngineMeter:
    """Belongs to the device thread."""

    def __init__(
        self,
        engine: Engine,
        timer_ns: Callable[[], int] = time.perf_counter_ns,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        """`rest` is called before each prefix, append and ranking."""
        self._engine = engine
        self._timer_ns = timer_ns
        self._rest = rest
        self._random = np.random.default_rng(0)
        # If K,V depend on the end of the history, only candidates may follow the prefix.
        suffix = min(SUFFIX_BEHAVIOURS, engine.limits.max_suffix_behaviours) if engine.rules.grows else 0
        self._suffix = self._behaviours(suffix)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest prefix that the engine accepts."""
        return self._engine.layout.tokens(self._engine.limits.max_prefix_behaviours)

    def pages_of(self, tokens: int, prefix: int = 0) -> NDArray[np.int32]:
        """The pages of prefix number `prefix`, if prefixes of that length follow each other in the arena."""
        count = self._engine.geometry.pages_for(tokens)
        return np.arange(prefix * count, (prefix + 1) * count, dtype=np.int32)

    def prefix(self, tokens: int, chunk_tokens: int, prefix: int = 0) -> list[AppendPoint]:
        """Computes a prefix in chunks, or in one if the model allows no chunks. Returns a point for each."""
        inputs = self._inputs(tokens)
        step = chunk_tokens if self._engine.rules.chunks else inputs.tokens
        return [
            self._chunk(inputs, start, min(start + step, inputs.tokens), prefix, rests=start == 0)
            for start in range(0, inputs.tokens, step)
        ]

    def append(self, cached_tokens: int, new_tokens: int) -> AppendPoint:
        """Appends `new_tokens` to a cached prefix. The content of the cached pages does not matter."""
        inputs = self._inputs(cached_tokens + new_tokens)
        return self._chunk(inputs, cached_tokens, inputs.tokens, 0)

    def rank(self, prefix_tokens: int, candidates: int, requests: int = 1) -> RankPoint:
        """Ranks a batch of requests, each on its own cached prefix. The content of the pages does not matter."""
        history = self._history(prefix_tokens)
        tokens = self._engine.layout.tokens(len(history))
        batch = [
            self._engine.rank_inputs(
                tokens,
                self.pages_of(tokens, request),
                self._suffix,
                self._engine.known_items(candidates, self._random),
                prefix_timestamps_ms=history.timestamps_ms,
            )
            for request in range(requests)
        ]
        took_us = self._timed_pass(lambda: self._engine.rank(batch))
        suffix_tokens = len(self._suffix) * self._engine.layout.tokens_per_behaviour
        return RankPoint(tokens, candidates + suffix_tokens, took_us)

    def reloads(self, sizes_bytes: tuple[int, ...]) -> Iterator[ReloadPoint]:
        """Copies pages that are scattered over host memory, as in a used cache, to the device."""
        engine = self._engine
        page_bytes = engine.geometry.page_bytes
        # At least three sizes, however large a page is: the fit needs three.
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
        """The behaviours of a prefix of `tokens` tokens."""
        layout = self._engine.layout
        return self._behaviours(max(0, tokens - layout.contextual_tokens) // layout.tokens_per_behaviour)

    def _inputs(self, tokens: int) -> PrefixInputs:
        features = np.zeros(self._engine.layout.contextual_tokens, np.int64)
        return self._engine.prefix_inputs(features, self._history(tokens))

    def _chunk(self, inputs: PrefixInputs, start: int, end: int, prefix: int, *, rests: bool = True) -> AppendPoint:
        chunk = PrefixChunk(inputs, start, end, self.pages_of(inputs.tokens, prefix))
        return AppendPoint(start, end - start, self._timed_pass(lambda: self._engine.pre_infer(chunk), rests=rests))

    def _timed_pass(self, work: Callable[[], object], *, rests: bool = True) -> float:
        """The duration of a forward in µs, after the warm-up passes that the engine needs."""
        for _ in range(self._engine.passes_to_warm):
            work()
        if rests:
            self._rest()
        return self._timed(work)

    def _timed(self, work: Callable[[], object]) -> float:
        self._engine.device.synchronize()
        start_ns = self._timer_ns()
        work()
        self._engine.device.synchronize()
        # The clock may be too coarse for an engine that does nothing, and the fit needs positive durations.
        return max(self._timer_ns() - start_ns, 1) / 1e3

    def _behaviours(self, count: int) -> Behaviours:
        return Behaviours(
            self._engine.known_items(count, self._random),
            self._random.integers(0, 4, count).astype(np.uint16),
            np.arange(count, dtype=np.int64),
        )


def matrix_peak_gflops(dtype: torch.dtype, device: Device) -> float:
    """The best measured rate of a square matrix product, in 1e9 floating-point operations a second.

    The products grow until one takes long: a CPU without instructions for bfloat16 needs half a minute for 2,048 rows.
    On a CPU, the best of torch's product and oneDNN's: an engine uses one of them.
    """
    best = 0.0
    for rows in _PRODUCT_ROWS:
        best_s = _best_product_s(dtype, device, rows)
        best = max(best, 2 * rows**3 / best_s / 1e9)
        if best_s > _LONG_PRODUCT_S:
            break
    return best


def _best_product_s(dtype: torch.dtype, device: Device, size: int) -> float:
    left, right = (torch.randn(size, size, device=device.torch_device).to(dtype) for _ in range(2))
    products: list[Callable[[], object]] = [lambda: torch.mm(left, right)]
    if device.is_cpu and dtype is torch.float32 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        products.append(lambda: onednn_product(left, right))
    best_s = float("inf")
    for product in products:
        for _ in range(_PRODUCTS):
            start_s = time.perf_counter()
            product()
            device.synchronize()
            best_s = min(best_s, time.perf_counter() - start_s)
    return best_s
