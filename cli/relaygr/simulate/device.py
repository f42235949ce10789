"""What a simulation replaces around the product's executor: the device with its engine, the histories, and the link
between the tiers.

A piece of work takes the time of a latency model (the calibration's, if no other is given), times a factor drawn from
the measured noise. On a CPU a call returns when its work is done. An accelerator computes chunks while the host goes
on, and an event completes with them. A forward with a chunk and requests takes the sum of both without one fixed part.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from relaygr.admission.latency import LatencyModel
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.digest import DigestChain, digest_chain, extend_chain
from relaygr.schemas.messages import Behaviours, History, HistoryVersion
from relaygr.schemas.record import record
from relaygr.simulate.times import Draws
from relaygr.worker.cache.copies import CopyForecast, CopyLimits, CopyPriority, CopyQueue, QueuedCopy
from relaygr.worker.history.resolve import StoredHistory
from relaygr.worker.kv import DramGeometry, KvGeometry, PrefixLayout
from relaygr.worker.model.config import PrefixRules
from relaygr.worker.model.interface import EngineLimits, RankOutputs

EPOCH_US: Final = 1_700_000_000_000_000
"""The wall clock at the beginning of a simulation."""


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """What a simulation knows of a model and its device."""

    geometry: DramGeometry
    layout: PrefixLayout
    limits: EngineLimits
    rules: PrefixRules
    latency: LatencyModel
    """The calibrated times, by which the worker decides."""
    is_cpu: bool
    device: LatencyModel | None = None
    """What forwards take, before the noise; None: the calibrated times."""

    @property
    def device_latency(self) -> LatencyModel:
        return self.latency if self.device is None else self.device


class SimulatedEvent:
    """Completes at a time."""

    __slots__ = ("_at_us", "_clock")

    def __init__(self, clock: ManualClock, at_us: int) -> None:
        self._clock, self._at_us = clock, at_us

    def done(self) -> bool:
        return self._clock.now_us >= self._at_us

    def wait(self) -> None:
        self._clock.now_us = max(self._clock.now_us, self._at_us)


class SimulatedDevice:
    """A device and its one stream."""

    name = "simulated"

    def __init__(self, clock: ManualClock, is_cpu: bool) -> None:
        self.is_cpu = is_cpu
        self._clock = clock
        self._busy_until_us = 0

    def run(self, duration_us: float) -> None:
        """Enqueues work."""
        self._busy_until_us = max(self._busy_until_us, self._clock.now_us) + round(duration_us)
        if self.is_cpu:
            self.settle()

    def current_stream(self) -> SimulatedDevice:
        return self

    def record(self) -> SimulatedEvent:
        return SimulatedEvent(self._clock, self._busy_until_us)

    def settle(self) -> None:
        """Waits for all work."""
        self._clock.now_us = max(self._clock.now_us, self._busy_until_us)


@record(frozen=True, slots=True)
class SimulatedPrefix:
    """In the place of `PrefixInputs`."""

    tokens: int
    unknown_items: int = 0


@record(frozen=True, slots=True)
class SimulatedRequest:
    """In the place of `RankInputs`."""

    prefix_tokens: int
    scored_tokens: int
    candidates: int
    unknown_items: int = 0


@record(frozen=True, slots=True)
class _Chunk:
    """What an engine needs of a `PrefixChunk`."""

    start: int
    end: int


class SimulatedEngine:
    """An `Engine` whose forwards take time and compute nothing."""

    revision = "simulated"

    def __init__(self, model: SimulatedModel, device: SimulatedDevice, hits: Draws, prefixes: Draws) -> None:
        self.namespace = b"simulated"
        self.geometry: KvGeometry = model.geometry.kv
        self.layout, self.limits, self.rules = model.layout, model.limits, model.rules
        self.device = device
        self._latency = model.device_latency
        self._hits, self._prefixes = hits, prefixes
        self._outputs = RankOutputs(np.zeros((1, 1), np.float32))

    def with_new_weights(self) -> SimulatedEngine:
        """The same with weights whose K,V are others."""
        engine = copy.copy(self)
        engine.namespace = self.namespace + b"+"
        return engine

    def shown_features(self, features: NDArray[np.int64], behaviours: int, candidates: int) -> NDArray[np.int64]:  # noqa: ARG002
        return features

    def unknown_actions(self, behaviours: Behaviours) -> int:  # noqa: ARG002
        return 0

    def unknown_features(self, features: NDArray[np.int64]) -> int:  # noqa: ARG002
        return 0

    def prefix_inputs(
        self,
        features: NDArray[np.int64],  # noqa: ARG002
        behaviours: Behaviours,
        query_time_ms: int = 0,  # noqa: ARG002
    ) -> SimulatedPrefix:
        return SimulatedPrefix(self.layout.tokens(len(behaviours)))

    def rank_inputs(
        self,
        prefix_tokens: int,
        pages: NDArray[np.int32],  # noqa: ARG002
        suffix: Behaviours,
        candidates: NDArray[np.int64],
        query_time_ms: int = 0,  # noqa: ARG002
        prefix_timestamps_ms: NDArray[np.int64] | None = None,  # noqa: ARG002
    ) -> SimulatedRequest:
        suffix_tokens = self.layout.tokens_per_behaviour * len(suffix)
        return SimulatedRequest(prefix_tokens, suffix_tokens + int(candidates.size), int(candidates.size))

    def pre_infer(self, chunk: _Chunk) -> None:
        self.device.run(self._chunk_us(chunk))

    def rank(self, batch: Sequence[SimulatedRequest]) -> list[RankOutputs]:
        self.device.run(self._batch_us(batch))
        self.device.settle()
        return [self._outputs] * len(batch)

    def forward(self, chunks: Sequence[_Chunk], requests: Sequence[SimulatedRequest]) -> list[RankOutputs]:
        total_us = sum(self._chunk_us(chunk) for chunk in chunks) + self._batch_us(requests)
        self.device.run(max(0.0, total_us - min(self._latency.coefficients.b0, self._latency.coefficients.c0)))
        self.device.settle()
        return [self._outputs] * len(requests)

    def _chunk_us(self, chunk: _Chunk) -> float:
        return self._latency.append_us(chunk.start, chunk.end - chunk.start) * self._prefixes.next()

    def _batch_us(self, batch: Sequence[SimulatedRequest]) -> float:
        sizes = [(request.prefix_tokens, request.scored_tokens) for request in batch]
        return self._latency.batch_us(sizes) * self._hits.next()


class SharedHistories:
    """The histories of all users. Each is the beginning of one common sequence, since a cache compares only histories
    of the same user. The arrays of a sequence repeat one number, so it takes no memory.
    """

    def __init__(self, longest: int) -> None:
        self.lengths: dict[str, int] = {}
        """The present length of each user's history. Every worker has read it in time."""
        self.features = np.empty(0, "<i8")
        self.longest = longest
        self._whole = behaviours_of(longest)
        self._chain = digest_chain(self.features, self._whole)
        self._known: dict[int, tuple[Behaviours, DigestChain, HistoryVersion]] = {}

    def version(self, length: int) -> HistoryVersion:
        return self._of(length)[2]

    def get(self, user_id: str) -> StoredHistory | None:
        length = self.lengths.get(user_id)
        if length is None:
            return None
        behaviours, chain, _ = self._of(length)
        return StoredHistory(History(user_id, length, self.features, behaviours), chain)

    def _of(self, length: int) -> tuple[Behaviours, DigestChain, HistoryVersion]:
        known = self._known.get(length)
        if known is None:
            behaviours = self._whole[:length]
            begun = DigestChain(self._chain.seed, self._chain.packed, length)
            chain = extend_chain(begun, behaviours)
            known = self._known[length] = behaviours, chain, HistoryVersion(length, length, chain.digest)
        return known


def behaviours_of(length: int) -> Behaviours:
    """Behaviours that are all the same."""
    zero_i8, zero_u2 = np.zeros((), "<i8"), np.zeros((), "<u2")
    return Behaviours(
        np.broadcast_to(zero_i8, length), np.broadcast_to(zero_u2, length), np.broadcast_to(zero_i8, length)
    )


class LinkCopy(QueuedCopy, Protocol):
    """The part of a `CopyRequest` that the link needs."""

    @property
    def on_done(self) -> Callable[[bool], None]: ...


class SimulatedLink:
    """A `Mover`: the link between the tiers of one worker. Copies have the order of the real queue, and no bytes.

    Copies cross the link one after the other, and begin at the time of the worker's thread. `advance` ends the copies
    that are complete by its time.
    """

    def __init__(self, page_bytes: int, latency: LatencyModel, clock: ManualClock) -> None:
        self._page_bytes, self._latency, self._clock = page_bytes, latency, clock
        self._queue: CopyQueue[LinkCopy] = CopyQueue(page_bytes, CopyLimits())
        self._under_way: deque[tuple[float, LinkCopy]] = deque()
        """(end, request) of the copies under way, in order of their ends."""
        self._free_us = 0.0
        self._now_us = clock.now_us

    def submit(self, request: LinkCopy) -> bool:
        self.advance(self._clock.now_us)
        if not self._queue.push(request):
            return False
        self._start()
        return True

    def forecast(self, size_bytes: int, priority: CopyPriority) -> CopyForecast:
        ahead = self._queue.forecast(size_bytes, priority, self._now_us)
        return CopyForecast(ahead.wait_us, self._latency.reload_us(size_bytes))

    def advance(self, now_us: int) -> None:
        """Advances the clock to `now_us`. Each copy that ends before ends at its own time."""
        while self._under_way and self._under_way[0][0] <= now_us:
            self._end_first()
        if now_us > self._now_us:
            self._now_us = now_us

    @property
    def next_end_us(self) -> int | None:
        """When the next copy ends; None if none is under way."""
        return math.ceil(self._under_way[0][0]) if self._under_way else None

    def close(self) -> None:
        for request in self._queue.drain():
            request.on_done(False)
        while self._under_way:
            self._end_first()

    def _start(self) -> None:
        while (request := self._queue.start(self._now_us)) is not None:
            begins_us = max(self._free_us, float(self._now_us))
            self._free_us = begins_us + self._latency.reload_us(request.size_bytes(self._page_bytes))
            self._under_way.append((self._free_us, request))

    def _end_first(self) -> None:
        ends_us, request = self._under_way.popleft()
        self._now_us = max(self._now_us, int(ends_us))
        self._queue.end(request, self._now_us, True)
        self._start()
        request.on_done(True)
