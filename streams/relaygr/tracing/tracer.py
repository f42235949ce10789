"""Ids and sampling of spans, and the bounded queue of those that have ended. No I/O, and no opentelemetry.

The exporter's thread converts queued spans to those of OpenTelemetry. With OpenTelemetry's span processor the thread
that serves a request would convert them, which takes three times as long as all else of a span; a stop would wait 30 s
for a collector that is away; and dropped spans would not be counted.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final
from zlib import crc32

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from relaygr.runtime.clock import Clock, SystemClock
from relaygr.schemas.trace_context import TraceContext
from relaygr.tracing.spans import Span

_HALF: Final = 64
_LAST_HALF: Final = (1 << _HALF) - 1
_PREFIX_SHIFT: Final = 32
EXPORT_THREAD: Final = "span-export"


@dataclass(frozen=True, slots=True)
class Sampler:
    """Decides at its head whether a trace is recorded, as OpenTelemetry's samplers of the same rate do."""

    bound: int
    """A trace is recorded if the last 8 bytes of its id are below this."""
    follows_parent: bool = True
    """A trace that another process began is recorded if that process records it."""

    def is_sampled(self, parent: TraceContext | None, trace_id: int) -> bool:
        """The decision for a span of this process. `parent`: the span in another process that it belongs to."""
        if parent is not None and self.follows_parent:
            return parent.is_sampled
        return trace_id & _LAST_HALF < self.bound


class TracerMetrics:
    """What became of the spans of this process."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        spans = Counter(
            "relaygr_tracing_spans_total",
            "Spans by outcome: exported, dropped (the queue was full) or failed (the collector did not take them)",
            ["outcome"],
            registry=registry,
        )
        self.exported = spans.labels("exported")
        self.dropped = spans.labels("dropped")
        self.failed = spans.labels("failed")


class Tracer:
    """The spans of one process. Any thread may call any method but `take` and `close`."""

    def __init__(
        self,
        sampler: Sampler,
        max_queue_spans: int,
        batch_spans: int,
        metrics: TracerMetrics,
        clock: Clock | None = None,
    ) -> None:
        """The exporter takes up to `batch_spans` at once."""
        self.on_close: Callable[[float], object] = lambda _: None
        """Set by the exporter; gets the seconds that it may take."""
        self.clock = clock or SystemClock()
        self._sampler = sampler
        self._max_queue_spans = max_queue_spans
        self._metrics = metrics
        self._ended: deque[Span] = deque()
        self._batch_spans = batch_spans
        self.batch_is_ready = threading.Event()
        """Set when a batch is queued."""
        # Ids are not secret; the system's source would be a system call for each.
        self._random = random.Random()
        self._last_prefix = (sampler.bound - 1) >> _PREFIX_SHIFT
        """No trace whose prefix is above this is recorded."""

    def begin(self, request_id: str) -> TraceContext | None:
        """The context of the first span of a new trace of this impression; None if the trace is not recorded.

        Most traces are not recorded. They are recognised without an id or a context.
        """
        prefix = crc32(request_id.encode())
        if prefix > self._last_prefix:
            return None
        trace_id = self._new_id() << _HALF | _shared_half(prefix, request_id)
        if not self._sampler.is_sampled(None, trace_id):
            return None
        return TraceContext(trace_id, self._new_id(), is_sampled=True)

    def follow(self, parent: TraceContext) -> TraceContext:
        """The context of a new span of a trace that began in another process."""
        return TraceContext(parent.trace_id, self._new_id(), self._sampler.is_sampled(parent, parent.trace_id))

    def within(self, context: TraceContext) -> TraceContext:
        """The context of a new span of the same trace."""
        return TraceContext(context.trace_id, self._new_id(), context.is_sampled)

    def end(self, *spans: Span) -> None:
        """Queues spans for the exporter. Drops and counts them if its queue is full. Never blocks."""
        if len(self._ended) + len(spans) > self._max_queue_spans:
            self._metrics.dropped.inc(len(spans))
        else:
            self._ended.extend(spans)
            if len(self._ended) >= self._batch_spans:
                self.batch_is_ready.set()

    def take_batch(self) -> list[Span]:
        """The oldest spans of the queue, for the exporter."""
        return [self._ended.popleft() for _ in range(min(self._batch_spans, len(self._ended)))]

    def close(self, timeout_s: float = 2.0) -> None:
        """Exports what is queued, for at most `timeout_s`."""
        self.on_close(timeout_s)

    def _new_id(self) -> int:
        return self._random.getrandbits(64) or 1


def _shared_half(prefix: int, request_id: str) -> int:
    """The last 8 bytes of the trace ids of an impression, from which a sampler by ratio decides.

    A checksum is their first half, because it takes a fraction of a digest's time, and is all that most messages need.
    """
    rest = blake2b(request_id.encode(), digest_size=_PREFIX_SHIFT // 8).digest()
    return prefix << _PREFIX_SHIFT | int.from_bytes(rest) or 1


def exemplar_of(context: TraceContext) -> dict[str, str]:
    """The labels that join a sample of a histogram to its trace."""
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
