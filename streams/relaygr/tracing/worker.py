"""The spans of a worker: of each pre-infer job and of each ranking request, with their stages.

A span is made when its job or request has ended, from the times that were kept meanwhile. A ranking links to the job of
its impression, if this worker has processed the job.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from relaygr.schemas.headers import RankingHeaders, RawHeaders, traceparent_of
from relaygr.schemas.trace_context import TraceContext
from relaygr.tracing.spans import Attributes, MessagePlace, Operation, Span, SpanKind, message_span
from relaygr.tracing.stages import StageSpan
from relaygr.tracing.tracer import Tracer, exemplar_of

REMEMBERED_JOBS: Final = 4096


class RankingTrace:
    """A ranking request of a recorded trace, until its result is delivered."""

    def __init__(
        self, tracer: Tracer, parent: TraceContext, own: TraceContext, job: TraceContext | None, request_id: str
    ) -> None:
        self._tracer = tracer
        self._parent = parent
        self._own = own
        self._job = job
        self._request_id = request_id
        self._reply = tracer.within(own)
        self._reply_us = 0
        self.header = self._reply.encode()
        """The header `traceparent` of the result."""
        self.exemplar = exemplar_of(own)

    def answered(
        self,
        place: MessagePlace,
        received_us: int,
        reply_us: int,
        ended_us: int,
        stages: Sequence[StageSpan],
        ahead_us: int,
        attributes: Attributes,
        error: str | None,
    ) -> None:
        """The result was handed to the producer. Times are monotonic; the wall clock is `ahead_us` ahead of them.

        `reply_us`: when the writing of the result began.
        """
        self._reply_us = reply_us + ahead_us
        own = message_span(
            Operation.PROCESS,
            place,
            self._request_id,
            self._own,
            self._parent,
            received_us + ahead_us,
            ended_us + ahead_us,
            more=attributes,
            link=self._job,
            error=error,
        )
        self._tracer.end(own, *_stage_spans(self._tracer, self._own, stages, ahead_us))

    def delivered(self, place: MessagePlace, error: str | None) -> None:
        """The broker has acknowledged the result, or it was given up."""
        now_us = self._tracer.clock.wall_us()
        self._tracer.end(
            message_span(
                Operation.SEND, place, self._request_id, self._reply, self._own, self._reply_us, now_us, error=error
            )
        )


class WorkerTraces:
    """The traces of one worker. Any thread may call any method."""

    def __init__(self, tracer: Tracer) -> None:
        self.clock = tracer.clock
        self._tracer = tracer
        self._jobs: OrderedDict[str, TraceContext] = OrderedDict()
        self._lock = threading.Lock()

    def ranking(self, reply: RankingHeaders) -> RankingTrace | None:
        """The trace of a request that is answered now; None if it is not recorded."""
        parent = TraceContext.parse(reply.traceparent)
        if parent is None:
            return None  # Only a client begins traces.
        own = self._tracer.follow(parent)
        if not own.is_sampled:
            return None
        with self._lock:
            job = self._jobs.pop(reply.request_id, None)
        return RankingTrace(self._tracer, parent, own, job, reply.request_id)

    def job(self, headers: RawHeaders, request_id: str) -> JobTrace | None:
        """The trace of a job that ends now; None if it is not recorded."""
        parent = TraceContext.parse(traceparent_of(headers))
        if parent is None:
            return None
        own = self._tracer.follow(parent)
        return JobTrace(self, self._tracer, parent, own, request_id) if own.is_sampled else None

    def remember(self, request_id: str, job: TraceContext) -> None:
        """The ranking request of this impression will link to this job."""
        with self._lock:
            self._jobs[request_id] = job
            if len(self._jobs) > REMEMBERED_JOBS:
                self._jobs.popitem(last=False)


@dataclass(frozen=True, slots=True)
class JobTrace:
    """A pre-infer job of a recorded trace."""

    traces: WorkerTraces
    tracer: Tracer
    parent: TraceContext
    own: TraceContext
    request_id: str

    def ended(
        self,
        place: MessagePlace,
        received_us: int,
        ended_us: int,
        stages: Sequence[StageSpan],
        ahead_us: int,
        outcome: str,
        error: str | None,
    ) -> None:
        """The job has ended. Times are monotonic; the wall clock is `ahead_us` ahead of them."""
        self.traces.remember(self.request_id, self.own)
        span = message_span(
            Operation.PROCESS,
            place,
            self.request_id,
            self.own,
            self.parent,
            received_us + ahead_us,
            ended_us + ahead_us,
            more={"relaygr.job.outcome": outcome},
            error=error,
        )
        self.tracer.end(span, *_stage_spans(self.tracer, self.own, stages, ahead_us))


def _stage_spans(tracer: Tracer, parent: TraceContext, stages: Sequence[StageSpan], ahead_us: int) -> Sequence[Span]:
    return [
        Span(
            f"relaygr.{stage.stage}",
            SpanKind.INTERNAL,
            tracer.within(parent),
            parent,
            stage.start_us + ahead_us,
            stage.end_us + ahead_us,
            {} if stage.device_us is None else {"relaygr.device_us": stage.device_us},
        )
        for stage in stages
    ]
