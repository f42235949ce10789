"""The spans of a trigger: of each event with its decision, and of each job that it sends."""

from __future__ import annotations

from confluent_kafka import KafkaError, Message

from relaygr.admission.policy import DecisionReason
from relaygr.kafka.message_headers import headers_of
from relaygr.schemas.headers import Headers, traceparent_of
from relaygr.schemas.record import record
from relaygr.schemas.trace_context import TRACEPARENT, TraceContext
from relaygr.tracing.spans import MessagePlace, Operation, message_span
from relaygr.tracing.tracer import Tracer, exemplar_of


@record(frozen=True, slots=True)
class EventTrace:
    """One event on which a decision was taken. Its trace need not be recorded."""

    tracer: Tracer
    request_id: str
    place: MessagePlace
    jobs_topic: str
    began_us: int
    parent: TraceContext
    own: TraceContext
    job: TraceContext
    """The span that sends the job."""

    @property
    def headers(self) -> Headers:
        """The headers of the job."""
        return [(TRACEPARENT, self.job.encode())]

    @property
    def exemplar(self) -> dict[str, str] | None:
        """Joins the age of the event to its trace."""
        return exemplar_of(self.own) if self.own.is_sampled else None

    def decided(self, reason: DecisionReason) -> None:
        """The decision was applied."""
        if self.own.is_sampled:
            self.tracer.end(
                message_span(
                    Operation.PROCESS,
                    self.place,
                    self.request_id,
                    self.own,
                    self.parent,
                    self.began_us,
                    self.tracer.clock.wall_us(),
                    more={"relaygr.decision": reason.value},
                )
            )

    def job_reported(self, error: KafkaError | None, message: Message) -> None:
        """The broker has acknowledged or refused the job."""
        if self.own.is_sampled:
            self.tracer.end(
                message_span(
                    Operation.SEND,
                    MessagePlace(self.jobs_topic, message.partition(), message.offset() if error is None else None),
                    self.request_id,
                    self.job,
                    self.own,
                    self.began_us,
                    self.tracer.clock.wall_us(),
                    error="not_delivered" if error is not None else None,
                )
            )


class TriggerTraces:
    """The traces of one trigger."""

    def __init__(self, tracer: Tracer, events_topic: str, jobs_topic: str) -> None:
        self.tracer = tracer
        self._events_topic = events_topic
        self._jobs_topic = jobs_topic

    def event(self, message: Message, request_id: str, began_us: int) -> EventTrace | None:
        """The trace of an event whose handling began at `began_us`; None without one: only a client begins traces."""
        parent = TraceContext.parse(traceparent_of(headers_of(message)))
        if parent is None:
            return None
        own = self.tracer.follow(parent)
        place = MessagePlace(self._events_topic, message.partition(), message.offset())
        return EventTrace(
            self.tracer, request_id, place, self._jobs_topic, began_us, parent, own, self.tracer.within(own)
        )
