"""A producer, messages and dead letters without Kafka, for the poll thread's side of a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_NOT_AVAILABLE, KafkaError, KafkaException

from relaygr.consumer.interface import Received, Token
from relaygr.schemas.headers import Headers


@dataclass(slots=True)
class Produced:
    topic: str
    value: bytes
    key: bytes
    partition: int
    headers: list[tuple[str, bytes]]
    on_delivery: Callable[[Any, Any], None]


@dataclass
class FakeProducer:
    """Keeps produced messages until `report`. The next `produce` raises `raises`."""

    sent: list[Produced] = field(default_factory=list)
    pending: list[Produced] = field(default_factory=list)
    raises: Exception | None = None

    def produce(self, topic, value=None, key=None, partition=-1, headers=None, on_delivery=None):
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error
        produced = Produced(topic, value, key, partition, list(headers or ()), on_delivery)
        self.sent.append(produced)
        self.pending.append(produced)

    def report(self, code: int | None = None) -> None:
        """The delivery reports of everything pending."""
        pending, self.pending = self.pending, []
        for produced in pending:
            produced.on_delivery(None if code is None else KafkaError(code), None)

    def poll(self, timeout: float = 0) -> int:
        return 0

    def flush(self, timeout: float = 0) -> int:
        return 0


def refused(code: int) -> KafkaException:
    """The error that `produce` raises."""
    return KafkaException(KafkaError(code))


class FakeDeadLetters:
    """Keeps letters until `report`."""

    def __init__(self) -> None:
        self.written: list[tuple[Any, str, str]] = []
        self.waiting: list[Callable[[bool], None]] = []

    def write(self, message, reason, detail, on_done=None):
        self.written.append((message, reason, detail))
        self.waiting.append(on_done)

    def poll(self, timeout_s: float = 0.0) -> int:
        return 0

    def report(self, ok: bool = True) -> None:
        waiting, self.waiting = self.waiting, []
        for on_done in waiting:
            on_done(ok)


@dataclass(frozen=True, slots=True)
class RawMessage:
    """The client's object, of which the handler reads the time stamp. Without one, messages have just been sent."""

    offset: int
    sent_wall_ms: int | None = 1 << 45

    def timestamp(self) -> tuple[int, int]:
        if self.sent_wall_ms is None:
            return TIMESTAMP_NOT_AVAILABLE, -1
        return TIMESTAMP_CREATE_TIME, self.sent_wall_ms


def received(
    topic: str,
    value: bytes | None,
    key: bytes | None,
    headers: Headers = (),
    partition: int = 0,
    offset: int = 0,
    received_us: int = 0,
    sent_wall_ms: int | None = 1 << 45,
) -> Received:
    """A message as the handler gets it from the consumer loop."""
    token = Token(topic, partition, offset, 0)
    return Received(
        topic, partition, offset, key, value, list(headers), received_us, 1, token, RawMessage(offset, sent_wall_ms)
    )
