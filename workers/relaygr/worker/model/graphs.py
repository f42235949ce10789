"""Runs the layers of a forward: as they are, or from captured graphs, one for each bucket of sizes.

A forward of a few hundred rows is a hundred short kernels, and starting them takes the host longer than running them
takes the device. A captured graph starts all of them at once, but on fixed memory and fixed sizes. So rows, segments
and pages are rounded up to buckets (`buckets.py`); each bucket's graph has its own input rows and its own description
of the segments, which are overwritten before it is replayed. Padding rows belong to no segment: attention skips them,
the matrix products compute them for nothing.

A graph is captured when its bucket is seen a second time, on the device's thread, between forwards; the LIMIT last used
are kept. Capturing takes as long as many forwards do, so once there are LIMIT, one is replaced no more often than every
PAUSE forwards, however many buckets take turns. A forward that must wait for its pages layer by layer runs without.
Where the device cannot capture, one warning says so, and all forwards run as they are.
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
LEAST = 16


def bucket(size: int) -> int:
    """The smallest bucket that holds `size`. Raises ValueError below 0."""
    if size < 0:
        raise ValueError(f"a size of {size}")
    if size <= LEAST:
        return LEAST
    width = (1 << (size - 1).bit_length() - 1) // STEPS
    return -(-size // width) * width


LIMIT = 32
"""Graphs kept; each holds its input rows and what describes its segments, and all share their scratch memory."""
PAUSE = 64
"""Forwards between two graphs that replace others."""
_REMEMBERED = 256
"""Buckets seen once that are remembered."""
_LEAST_PAGES = 4096
"""Room for page numbers: 16 KiB go to the device in no time, and fewer buckets mean more graphs that fit."""

Before = Sequence[Callable[[int], None]]
log = structlog.get_logger(__name__)


class LayerRunner(Protocol):
    """Takes embedded rows through attention and layers."""

    @property
    def name(self) -> str:
        """The attention's back end, and whether forwards run from graphs."""

    @property
    def passes_to_warm(self) -> int:
        """Forwards of a size after which the next of that size takes the time that they all take from then on."""

    def __call__(self, kv: PagedKv, segments: Sequence[Segment], x: torch.Tensor, before: Before) -> torch.Tensor:
        """Rows x [rows of all segments, D] after the last layer; valid until the next call. `before`: as `LayerStack`.

        Raises ValueError for a segment whose pages do not hold its tokens.
        """

    def scratch_bytes(self, own_bytes: int, rows: int, width: int) -> int:
        """Memory that forwards of at most so many rows of D = width take, if each by itself takes `own_bytes`."""


class DirectRunner:
    """Each forward as it is."""

    passes_to_warm = 0

    def __init__(self, stack: LayerStack, attention: AttentionBackend) -> None:
        self._stack = stack
        self._attention = attention

    @property
    def name(self) -> str:
        return self._attention.name

    def __call__(self, kv: PagedKv, segments: Sequence[Segment], x: torch.Tensor, before: Before) -> torch.Tensor:
        return self._stack(x, self._attention.begin(kv, segments), before)

    def scratch_bytes(self, own_bytes: int, rows: int, width: int) -> int:  # noqa: ARG002 - nothing beside it
        return own_bytes


class ReplaceablePass(AttentionPass, Protocol):
    """A pass whose description lies in memory that another forward's can take."""

    def replace(self, plan: PackedPlan) -> None:
        """Describes another forward of the same shape and capacity."""


@runtime_checkable
class GraphableAttention(AttentionBackend, Protocol):
    """A back end whose kernels take all that differs between forwards from the device's memory."""

    def arrays(self, kv: PagedKv, segments: Sequence[Segment]) -> SegmentArrays: ...

    def shape(self, arrays: SegmentArrays) -> PlanShape: ...

    def packed(self, kv: PagedKv, arrays: SegmentArrays, shape: PlanShape, capacity: Capacity) -> PackedPlan: ...

    def started(self, kv: PagedKv, plan: PackedPlan) -> ReplaceablePass: ...


def layer_runner(stack: LayerStack, attention: AttentionBackend, device: Device, graphs: bool) -> LayerRunner:
    """From graphs if they are asked for and the back end allows it; it is said if it does not."""
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
    """The layers over memory of their own."""

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
    """Forwards from graphs, where their bucket was seen before."""

    def __init__(
        self, stack: LayerStack, attention: GraphableAttention, device: Device, limit: int = LIMIT, pause: int = PAUSE
    ) -> None:
        self._stack = stack
        self._attention = attention
        self._direct = DirectRunner(stack, attention)
        self._device = device
        # Of its own: another model's graphs, which are tried in another thread, would write over the same memory.
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
        """Captured and kept."""
        return len(self._graphs)

    def __call__(self, kv: PagedKv, segments: Sequence[Segment], x: torch.Tensor, before: Before) -> torch.Tensor:
        if before or not self._works:
            return self._direct(kv, segments, x, before)
        if kv is not self._kv:
            # Graphs hold the addresses of the arena that they were captured on.
            self._graphs.clear()
            self._kv = kv
        self._since_capture += 1
        arrays = self._attention.arrays(kv, segments)
        own = arrays.capacity
        capacity = Capacity(bucket(own.rows), bucket(own.segments), bucket(max(own.pages, _LEAST_PAGES)))
        key = _Key(capacity, self._attention.shape(arrays))
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
