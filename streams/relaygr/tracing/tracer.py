"""Ids and sampling of spans, and the bounded queue of those that have ended. No I/O, and no opentelemetry."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Final, Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from relaygr.runtime.clock import Clock, SystemClock
from relaygr.schemas.trace_context import TraceContext
from relaygr.tracing.spans import Span

_HALF: Final = 64
_LAST: Final = (1 << _HALF) - 1


class Sampler(Protocol):
    """Decides at its head whether a trace is recorded."""

    def is_sampled(self, parent: TraceContext | None, trace_id: int, name: str) -> bool:
        """The decision for a span of this process. `parent`: the span in another process that it belongs to."""


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
        metrics: TracerMetrics,
        clock: Clock | None = None,
        on_close: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`on_close` gets the seconds that it may take."""
        self.clock = clock or SystemClock()
        self._sampler = sampler
        self._max_queue_spans = max_queue_spans
        self._metrics = metrics
        self._on_close = on_close
        self._ended: deque[Span] = deque()
        # Ids are not secret; the system's source would be a system call for each.
        self._random = random.Random()
        self.unrecorded = TraceContext(self._new_id() << _HALF | _LAST, self._new_id(), is_sampled=False)
        """The context of every trace that begins here and is not recorded. Most are not, and ids take time.

        A later process with a sampler by ratio of its own does not record it either.
        """

    def begin(self, name: str, parent: TraceContext | None, request_id: str) -> TraceContext:
        """The context of a new span. Without a parent it begins a trace of this impression, if that is recorded."""
        if parent is not None:
            return TraceContext(
                parent.trace_id, self._new_id(), self._sampler.is_sampled(parent, parent.trace_id, name)
            )
        trace_id = self._new_id() << _HALF | _shared_half(request_id)
        if not self._sampler.is_sampled(None, trace_id, name):
            return self.unrecorded
        return TraceContext(trace_id, self._new_id(), is_sampled=True)

    def within(self, context: TraceContext) -> TraceContext:
        """The context of a new span of the same trace."""
        return TraceContext(context.trace_id, self._new_id(), context.is_sampled)

    def end(self, *spans: Span) -> None:
        """Queues spans for the exporter. Drops and counts them if its queue is full. Never blocks."""
        if len(self._ended) + len(spans) > self._max_queue_spans:
            self._metrics.dropped.inc(len(spans))
        else:
            self._ended.extend(spans)

    @property
    def waiting(self) -> int:
        """Spans in the queue."""
        return len(self._ended)

    def take(self, most: int) -> list[Span]:
        """The oldest spans of the queue, for the exporter."""
        return [self._ended.popleft() for _ in range(min(most, len(self._ended)))]

    def close(self, timeout_s: float = 2.0) -> None:
        """Exports what is queued, for at most `timeout_s`."""
        self._on_close(timeout_s)

    def _new_id(self) -> int:
        return self._random.getrandbits(64) or 1


def _shared_half(request_id: str) -> int:
    """The last 8 bytes of the trace ids of an impression, from which a sampler by ratio decides."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest()) or 1


def exemplar_of(context: TraceContext) -> dict[str, str]:
    """The labels that join a sample of a histogram to its trace."""
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
