"""Runs the layers of a forward: directly, or from captured graphs, one graph for each bucket of sizes.

A forward of a few hundred rows starts a hundred short kernels, and the host needs longer to start them than the device
to run them. A captured graph starts all of them at once, but on fixed memory and with fixed sizes. Therefore rows,
segments and pages are rounded up to buckets (`bucket`). The graph of a bucket has its own input rows and its own
description of the segments; both are overwritten before a replay. Padding rows belong to no segment: attention skips
them, and the results of their matrix products are ignored.

The device thread captures a graph when its bucket occurs a second time, between forwards, and keeps the LIMIT graphs
used last. A capture takes as long as many forwards, so a full set of graphs replaces at most one every PAUSE forwards.
A forward that waits for its pages layer by layer runs directly. If the device cannot capture, one warning is logged and
all forwards run directly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import structlog
import torch

from relaygr.worker.device import CapturedWork, Device, Recorder
from relaygr.worker.model.attention.interface import AttentionBackend, AttentionPass
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.layers import LayerStack
from relaygr.worker.model.triton.plan import Capacity, PackedPlan, PlanShape, SegmentArrays

STEPS = 4
"""Buckets of sizes in each doubling."""
LEAST = 16
"""The smallest bucket of rows and segments."""
LIMIT = 32
"""The most graphs that are kept. Each has its own input rows and segment description; all share scratch memory."""
PAUSE = 64
"""The fewest forwards between two captures that replace a graph."""
_REMEMBERED = 256
"""The most buckets that are recorded as seen once."""
_LEAST_PAGES = 4096
"""The smallest bucket of page numbers. Copying its 16 KiB costs little, and fewer buckets lead to more replays."""

_LEAST_TIMES = 16_384
"""The same for the key times of models with a bias by time: 128 KiB."""

Before = Sequence[Callable[[int], None]]
log = structlog.get_logger(__name__)


def bucket(size: int) -> int:
    """The smallest bucket that holds `size`. Raises ValueError below 0.

    Buckets are 16, 20, 24, 28, 32, 40, 48, ...: from LEAST on, each doubling has STEPS buckets of equal width. Padding
    adds less than one part in STEPS to a size above LEAST, and a third of that on average. Smaller sizes are padded to
    LEAST, because a device computes so few rows in the same time.
    """
    if size < 0:
        raise ValueError(f"a size of {size}")
    if size <= LEAST:
        return LEAST
    width = (1 << (size - 1).bit_length() - 1) // STEPS
    return -(-size // width) * width


class LayerRunner(Protocol):
    """Runs embedded rows through the layers with their attention."""

    @property
    def name(self) -> str:
        """The name of the attention back end, and of graphs if they are used."""

    @property
    def passes_to_warm(self) -> int:
        """Forwards of one size to run before timing that size: they capture its graph."""

    def __call__(self, kv: PagedKv, segments: Sequence[Segment], x: torch.Tensor, before: Before) -> torch.Tensor:
        """Rows x [rows of all segments, D] after the last layer; valid until the next call. `before`: see `LayerStack`.

        Raises ValueError if the pages of a segment do not hold its tokens.
        """

    def scratch_bytes(self, own_bytes: int, rows: int, width: int) -> int:
        """Memory for forwards of at most `rows` rows of D = `width`, if a direct forward takes `own_bytes`."""


class DirectRunner:
    """Runs each forward directly."""

    passes_to_warm = 0

    def __init__(self, stack: LayerStack, attention: AttentionBackend) -> None:
        self._stack = stack
        self._attention = attention

    @property
    def name(self) -> str:
        return self._attention.name

    def __call__(self, kv: PagedKv, segments: Sequence[Segment], x: torch.Tensor, before: Before) -> torch.Tensor:
        return self._stack(x, self._attention.begin(kv, segments), before)

    def scratch_bytes(self, own_bytes: int, rows: int, width: int) -> int:  # noqa: ARG002 - a direct forward needs no more
        return own_bytes


class ReplaceablePass(AttentionPass, Protocol):
    """A pass whose segment description can be overwritten with that of another forward."""

    def replace(self, plan: PackedPlan) -> None:
        """Overwrites the description with another forward of the same shape and capacity."""


@runtime_checkable
class GraphableAttention(AttentionBackend, Protocol):
    """A back end whose kernels read all that differs between two forwards from device memory."""

    def arrays(self, kv: PagedKv, segments: Sequence[Segment]) -> SegmentArrays: ...

    def shape(self, kv: PagedKv, arrays: SegmentArrays) -> PlanShape: ...

    def packed(self, kv: PagedKv, arrays: SegmentArrays, shape: PlanShape, capacity: Capacity) -> PackedPlan: ...

    def started(self, kv: PagedKv, plan: PackedPlan) -> ReplaceablePass: ...


def layer_runner(stack: LayerStack, attention: AttentionBackend, device: Device, graphs: bool) -> LayerRunner:
    """A runner with graphs if `graphs` is set and the back end can be captured; else a direct runner.

    Logs a warning if `graphs` is set and the back end cannot be captured.
    """
    if graphs and isinstance(attention, GraphableAttention):
        return GraphRunner(stack, attention, device)
    if graphs:
        log.warning("this back end cannot be captured", name=attention.name, device=device.name)
    return DirectRunner(stack, attention)


@dataclass(frozen=True, slots=True)
class _Key:
    capacity: Capacity
    shape: PlanShape


class _Graph:
    """A captured pass of the layers over its own memory."""

    def __init__(self, stack: LayerStack, rows: torch.Tensor, attention: ReplaceablePass, recorder: Recorder) -> None:
        self._rows = rows
        self._attention = attention
        self._out = rows

        def work() -> None:
            self._out = stack(self._rows, self._attention)

        self._replay: CapturedWork = recorder.capture(work)

    def __call__(self, x: torch.Tensor, plan: PackedPlan) -> torch.Tensor:
        self._attention.replace(plan)
        self._rows[: x.shape[0]] = x
        self._replay.run()
        return self._out[: x.shape[0]]


class GraphRunner:
    """Runs a forward from a graph if its bucket has occurred before, else directly."""

    def __init__(
        self, stack: LayerStack, attention: GraphableAttention, device: Device, limit: int = LIMIT, pause: int = PAUSE
    ) -> None:
        self._stack = stack
        self._attention = attention
        self._direct = DirectRunner(stack, attention)
        self._device = device
        # Each model has its own recorder: a model that loads in another thread would overwrite shared scratch memory.
        self._recorder = device.recorder()
        self._limit = limit
        self._pause = pause
        self._since_capture = pause
        self._graphs: OrderedDict[_Key, _Graph] = OrderedDict()
        self._seen: OrderedDict[_Key, None] = OrderedDict()
        self._kv: PagedKv | None = None
        self._works = True

    @property
    def name(self) -> str:
        return f"{self._attention.name} from graphs" if self._works else self._direct.name

    @property
    def passes_to_warm(self) -> int:
        return 2 if self._works else 0

    @property
    def graphs(self) -> int:
        """The number of graphs that are kept."""
        return len(self._graphs)

    def __call__(self, kv: PagedKv, segments: Sequence[Segment], x: torch.Tensor, before: Before) -> torch.Tensor:
        if before or not self._works:
            return self._direct(kv, segments, x, before)
        if kv is not self._kv:
            # A graph contains the addresses of the arena on which it was captured.
            self._graphs.clear()
            self._kv = kv
        self._since_capture += 1
        arrays = self._attention.arrays(kv, segments)
        own = arrays.capacity
        capacity = Capacity(
            bucket(own.rows),
            bucket(own.segments),
            bucket(max(own.pages, _LEAST_PAGES)),
            bucket(max(own.key_times, _LEAST_TIMES)) if own.key_times else 0,
        )
        key = _Key(capacity, self._attention.shape(kv, arrays))
        plan = self._attention.packed(kv, arrays, key.shape, capacity)
        graph = self._find(key)
        if graph is None and self._is_known(key) and self._may_capture():
            graph = self._capture(key, kv, plan, x)
        return self._direct(kv, segments, x, before) if graph is None else graph(x, plan)

    def scratch_bytes(self, own_bytes: int, rows: int, width: int) -> int:
        padded = own_bytes + own_bytes // STEPS
        return own_bytes + padded + 2 * self._limit * bucket(rows) * width * 4

    def _find(self, key: _Key) -> _Graph | None:
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    def _is_known(self, key: _Key) -> bool:
        known = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return known

    def _may_capture(self) -> bool:
        return len(self._graphs) < self._limit or self._since_capture > self._pause

    def _capture(self, key: _Key, kv: PagedKv, plan: PackedPlan, x: torch.Tensor) -> _Graph | None:
        rows = x.new_zeros((key.capacity.rows, x.shape[1]))
        rows[: x.shape[0]] = x
        try:
            graph = _Graph(self._stack, rows, self._attention.started(kv, plan), self._recorder)
        except RuntimeError as error:
            log.warning("forwards are not captured", device=self._device.name, error=str(error))
            self._works = False
            return None
        self._since_capture = 0
        self._graphs[key] = graph
        if len(self._graphs) > self._limit:
            self._graphs.popitem(last=False)
        return graph
