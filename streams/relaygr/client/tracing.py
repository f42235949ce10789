"""The spans of a gateway: of each message that it sends or receives, and of each ranking as its caller sees it.

A span's parent is the `traceparent` that the caller gives, else the current span of the caller's own OpenTelemetry.
Without a parent a trace begins here; most of these traces are not recorded, and then the client makes no span and no
header. If a trace of the caller is not recorded, its messages still carry the header, and the client makes no span.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final, Generic, TypeVar

from opentelemetry.context import get_current
from opentelemetry.trace import get_current_span

from relaygr.client.outcome import DeliveryReport, RankOutcome
from relaygr.schemas.headers import ResultHeaders
from relaygr.schemas.messages import RankingRequest, RetrievalEvent
from relaygr.schemas.record import record
from relaygr.schemas.trace_context import TraceContext
from relaygr.tracing.spans import MessagePlace, Operation, Span, SpanKind, message_span
from relaygr.tracing.tracer import Tracer, exemplar_of

REMEMBERED_RETRIEVALS: Final = 4096


@record(frozen=True, slots=True)
class SendTrace:
    """The span of one message on its way to the broker."""

    tracer: Tracer
    request_id: str
    own: TraceContext
    parent: TraceContext | None
    start_us: int
    topic: str

    def reported(self, report: DeliveryReport) -> None:
        """The broker has acknowledged or refused the message."""
        self.tracer.end(
            message_span(
                Operation.SEND,
                MessagePlace(self.topic, report.partition, report.offset),
                self.request_id,
                self.own,
                self.parent,
                self.start_us,
                self.tracer.clock.wall_us(),
                error="not_delivered" if report.error is not None else None,
            )
        )


@record(frozen=True, slots=True)
class RankTrace:
    """A ranking request of a recorded trace."""

    own: TraceContext
    parent: TraceContext | None
    retrieval: TraceContext | None
    send: SendTrace

    @property
    def exemplar(self) -> dict[str, str]:
        """Joins the latency of the request to its trace."""
        return exemplar_of(self.own)

    def told(self, outcome: RankOutcome, start_us: int) -> None:
        """The caller got this outcome. `start_us`: when it called, by the wall clock."""
        attributes: dict[str, str | int | bool] = {
            "messaging.message.conversation_id": outcome.request_id,
            "relaygr.outcome": outcome.status.value,
        }
        result = outcome.result
        if outcome.reason is not None:
            attributes["relaygr.reason"] = str(outcome.reason)
        if result is not None:
            attributes["relaygr.worker_id"] = result.worker_id
            if result.path is not None:
                attributes["relaygr.path"] = str(result.path)
        is_ranked = result is not None and result.path is not None
        span = Span(
            "relaygr.rank",
            SpanKind.INTERNAL,
            self.own,
            self.parent,
            start_us,
            start_us + outcome.latency_us,
            attributes,
            self.retrieval,
            None if is_ranked else outcome.status.value,
        )
        self.send.tracer.end(span)


T = TypeVar("T", SendTrace, RankTrace)


@record(frozen=True, slots=True)
class Begun(Generic[T]):
    """The trace of a message that is sent now."""

    header: bytes
    """The header `traceparent` of the message."""
    trace: T | None
    """None if the trace is not recorded."""


class ClientTraces:
    """The traces of one client. Any thread may call any method."""

    def __init__(self, tracer: Tracer, retrieval_topic: str, ranking_topic: str, results_topic: str) -> None:
        self.tracer = tracer
        self._retrieval_topic = retrieval_topic
        self._ranking_topic = ranking_topic
        self._results_topic = results_topic
        self._retrievals: OrderedDict[str, TraceContext] = OrderedDict()
        self._lock = threading.Lock()

    def retrieval(self, event: RetrievalEvent, given: TraceContext | None) -> Begun[SendTrace] | None:
        """The event is published now. `given`: the caller's own span. None: no trace, and no header."""
        parent = given or _current_span()
        own = self._own(parent, event.request_id)
        if own is None:
            return None
        if not own.is_sampled:
            return Begun(own.encode(), None)
        with self._lock:
            self._retrievals[event.request_id] = own
            if len(self._retrievals) > REMEMBERED_RETRIEVALS:
                self._retrievals.popitem(last=False)
        now_us = self.tracer.clock.wall_us()
        send = SendTrace(self.tracer, event.request_id, own, parent, now_us, self._retrieval_topic)
        return Begun(own.encode(), send)

    def rank(self, request: RankingRequest, given: TraceContext | None) -> Begun[RankTrace] | None:
        """The request is sent now. `given`: the caller's own span. None: no trace, and no header."""
        parent = given or _current_span()
        own = self._own(parent, request.request_id)
        if own is None:
            return None
        if not own.is_sampled:
            return Begun(own.encode(), None)
        with self._lock:
            retrieval = self._retrievals.pop(request.request_id, None)
        send = SendTrace(
            self.tracer,
            request.request_id,
            self.tracer.within(own),
            own,
            self.tracer.clock.wall_us(),
            self._ranking_topic,
        )
        return Begun(send.own.encode(), RankTrace(own, parent, retrieval, send))

    def _own(self, parent: TraceContext | None, request_id: str) -> TraceContext | None:
        return self.tracer.begin(request_id) if parent is None else self.tracer.follow(parent)

    def received(self, headers: ResultHeaders, place: MessagePlace, began_us: int) -> None:
        """A result of a recorded trace was read; `began_us` is when its handling began."""
        parent = TraceContext.parse(headers.traceparent)
        if parent is not None:
            own = self.tracer.within(parent)
            now_us = self.tracer.clock.wall_us()
            self.tracer.end(message_span(Operation.RECEIVE, place, headers.request_id, own, parent, began_us, now_us))


def _current_span() -> TraceContext | None:
    """The span of the calling program, if it uses OpenTelemetry itself."""
    context = get_current()
    if not context:
        return None  # The usual case of a program without OpenTelemetry, in a third of the time.
    found = get_current_span(context).get_span_context()
    return TraceContext(found.trace_id, found.span_id, found.trace_flags.sampled) if found.is_valid else None
