"""Spans, and the attributes of OpenTelemetry's conventions for messaging. No attribute names a user."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import field

from relaygr.schemas.record import record
from relaygr.schemas.trace_context import TraceContext

Attributes = Mapping[str, str | int | bool]


class SpanKind(enum.Enum):
    """Which side of a message the span is on."""

    INTERNAL = "internal"
    PRODUCER = "producer"
    CONSUMER = "consumer"


class Operation(enum.StrEnum):
    """What is done with a message."""

    SEND = "send"
    RECEIVE = "receive"
    PROCESS = "process"


@record(frozen=True, slots=True)
class Span:
    """One span that has ended. Times are µs since the epoch, by the clock of this machine."""

    name: str
    kind: SpanKind
    context: TraceContext
    parent: TraceContext | None
    start_us: int
    end_us: int
    attributes: Attributes = field(default_factory=dict)
    link: TraceContext | None = None
    error: str | None = None
    """What failed, one word; None: nothing."""


@record(frozen=True, slots=True)
class MessagePlace:
    """A message in its topic. Partition and offset are None while they are not known."""

    topic: str
    partition: int | None = None
    offset: int | None = None


def _message_attributes(operation: Operation, place: MessagePlace, request_id: str) -> dict[str, str | int | bool]:
    found: dict[str, str | int | bool] = {
        "messaging.system": "kafka",
        "messaging.operation.name": operation.value,
        "messaging.operation.type": operation.value,
        "messaging.destination.name": place.topic,
        "messaging.message.conversation_id": request_id,
    }
    if place.partition is not None and place.partition >= 0:
        found["messaging.destination.partition.id"] = str(place.partition)
    if place.offset is not None and place.offset >= 0:
        found["messaging.kafka.offset"] = place.offset
    return found


def message_span(
    operation: Operation,
    place: MessagePlace,
    request_id: str,
    context: TraceContext,
    parent: TraceContext | None,
    start_us: int,
    end_us: int,
    *,
    more: Attributes | None = None,
    link: TraceContext | None = None,
    error: str | None = None,
) -> Span:
    """The span of one operation on a message, with `more` attributes."""
    return Span(
        f"{operation} {place.topic}",
        SpanKind.PRODUCER if operation is Operation.SEND else SpanKind.CONSUMER,
        context,
        parent,
        start_us,
        max(start_us, end_us),
        {**_message_attributes(operation, place, request_id), **(more or {})},
        link,
        error,
    )
