"""Publishes messages that get no answer: retrieval events, behaviours, histories and tombstones.

`EventPublisher` owns one durable producer (idempotent, `acks=all`, 30 s; `relaygr.kafka.durable`). Its owner calls
`poll` often, which serves delivery reports, and `close` at the end. `publish*` do not block: they raise QueueFull if
the producer's queue is full, and MessageRefused for a message that the producer cannot send.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Final
from weakref import WeakSet

from confluent_kafka import KafkaError, KafkaException, Message

from relaygr.client.metrics import GatewayMetrics, gateway_metrics
from relaygr.client.outcome import DeliveryReport, MessageRefused, MessageTooLarge, NotRunning, QueueFull
from relaygr.client.process import ProcessOfClient
from relaygr.kafka.client_errors import LimitedLog, why_undelivered
from relaygr.kafka.durable import DurableProducer
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.loggers import Logger
from relaygr.schemas import codec
from relaygr.schemas.codec import EncodeError
from relaygr.schemas.fields import FieldError
from relaygr.schemas.headers import Headers
from relaygr.schemas.messages import USER_ID_TEXT, BehaviourEvent, History, RetrievalEvent
from relaygr.schemas.topics import Topic
from relaygr.schemas.trace_context import TRACEPARENT

OnDelivery = Callable[[DeliveryReport], None]

_log = Logger(__name__)
# A callback may raise each time. structlog takes up to 0.1 s for a traceback, in the thread that reads the answers.
_raised = LimitedLog()


class EventPublisher:
    """Writes to the retrieval, history and behaviours topics. No I/O before `start`. Any thread may call `publish*`."""

    def __init__(
        self,
        kafka: KafkaSettings,
        client_id: str,
        metrics: GatewayMetrics | None = None,
        session: KafkaSession | None = None,
    ) -> None:
        """`session`: None: one of its own."""
        require_settings(kafka)
        self._kafka = kafka
        self._client_id = client_id
        self._session = session or KafkaSession(kafka, client_id)
        self._metrics = metrics or gateway_metrics()
        self._retrieval = kafka.topic(Topic.RETRIEVAL)
        self._history = kafka.topic(Topic.HISTORY)
        self._behaviours = kafka.topic(Topic.BEHAVIOURS)
        self._running: DurableProducer | None = None
        self._process = ProcessOfClient()

    def __len__(self) -> int:
        """Messages that the broker has not acknowledged, and reports that `poll` has not served."""
        return len(self._running) if self._running is not None else 0

    def make(self) -> None:
        """Makes the producer, which takes a second with SASL/OAUTHBEARER. Raises RelayError."""
        producer = self._session.durable_producer(self._client_id)
        producer.make()
        self._running = producer

    def start(self, topic: Topic = Topic.RETRIEVAL) -> None:
        """Connects, so that the first message on `topic` need not wait for the connection. Raises RelayError."""
        self._process.enter(self)
        _STARTED.add(self)
        if self._running is None:
            self.make()
        self._producer.connect(self._kafka.topic(topic), self._kafka.connect_timeout_s)

    def renew(self) -> None:
        """Makes a client that reads the files of `security` again, as a `RelayClient` does by itself. No message
        is lost.
        """
        self._producer.renew()

    def publish_retrieval(
        self, event: RetrievalEvent, on_delivery: OnDelivery | None = None, traceparent: bytes | None = None
    ) -> None:
        """Publishes a retrieval event, keyed by its user. Raises EncodeError, QueueFull, MessageRefused.

        `traceparent`: a header of W3C Trace Context, which the message carries.
        """
        headers: Headers | None = None if traceparent is None else [(TRACEPARENT, traceparent)]
        self._publish(self._retrieval, event.user_id, codec.encode(event), on_delivery, headers)

    def publish_history(self, history: History, on_delivery: OnDelivery | None = None) -> None:
        """Replaces a user's history. Raises EncodeError, QueueFull, MessageRefused."""
        self._publish(self._history, history.user_id, _encoded(history), on_delivery)

    def publish_behaviours(self, event: BehaviourEvent, on_delivery: OnDelivery | None = None) -> None:
        """Adds behaviours to a user's history. Raises EncodeError, QueueFull, MessageRefused."""
        self._publish(self._behaviours, event.user_id, _encoded(event), on_delivery)

    def tombstone(self, user_id: str, on_delivery: OnDelivery | None = None) -> None:
        """Deletes a user's history, also in the workers. Raises EncodeError, QueueFull, MessageRefused."""
        try:
            USER_ID_TEXT.pack(user_id)
        except FieldError as error:
            raise EncodeError(f"tombstone.user_id: {error}") from error
        self._publish(self._history, user_id, None, on_delivery)

    def poll(self, timeout_s: float = 0.0) -> int:
        """Runs the callbacks of the delivery reports. Returns their number."""
        return self._producer.poll(timeout_s)

    def close(self, timeout_s: float) -> int:
        """Waits at most `timeout_s` for all deliveries. Returns the number of messages that failed.

        The delivery reports of failed messages have an error.
        """
        if self._running is None or self._process.is_forked:
            return 0
        left = self._running.close(timeout_s)
        self._running = None
        if left:
            _log.warning("published messages were not acknowledged before close", messages=left)
        return left

    def warn_at_exit(self) -> None:
        """Names the messages that nobody waits for, because the program ends without `close`."""
        if self._running is not None and not self._process.is_forked and (left := len(self._running)):
            _log.error("published messages may be lost: call close() before the program ends", messages=left)

    @property
    def _producer(self) -> DurableProducer:
        self._process.require()
        if self._running is None:
            raise NotRunning("the publisher is not running: call start() first, and no method after close()")
        return self._running

    def _publish(
        self,
        topic: str,
        user_id: str,
        value: bytes | None,
        on_delivery: OnDelivery | None,
        headers: Headers | None = None,
    ) -> None:
        def report(error: KafkaError | None, message: Message | None) -> None:
            self._metrics.count_published(topic, error is None)
            if on_delivery is not None:
                notify(on_delivery, delivery_report(topic, error, message))

        producer = self._producer
        with client_errors(topic, producer):
            producer.produce(topic, value, user_id.encode(), report, headers)


_STARTED: Final[WeakSet[EventPublisher]] = WeakSet()


@atexit.register
def _warn_at_exit() -> None:
    for publisher in list(_STARTED):
        publisher.warn_at_exit()


def _encoded(message: History | BehaviourEvent) -> bytes:
    """Raises EncodeError, also for times in another unit: the workers would use seconds as times of 1970."""
    value = codec.encode(message)
    try:
        message.behaviours.check_unit(".behaviours")
    except FieldError as error:
        raise EncodeError(f"{type(message).__name__}{error}") from error
    return value


def require_settings(kafka: object) -> None:
    """Raises TypeError for the address of a broker, or anything else that is no settings."""
    if not isinstance(kafka, KafkaSettings):
        raise TypeError(
            f"kafka is {kafka!r}: give settings, such as load_settings(bootstrap='host:9092') of relaygr.settings, "
            "or KafkaSettings(bootstrap='host:9092')"
        )


def delivery_report(topic: str, error: KafkaError | None, message: Message | None) -> DeliveryReport:
    """Converts librdkafka's delivery report; of a message that reached no client if `message` is None."""
    return DeliveryReport(
        topic=topic,
        partition=message.partition() if message is not None else None,
        offset=message.offset() if message is not None and error is None else None,
        error=why_undelivered(error) if error is not None else None,
    )


def notify(callback: Callable[..., None], *args: object) -> None:
    """Runs a caller's callback, and logs what it raises: sys.exit() too, which would end the client's thread only."""
    try:
        callback(*args)
    except KeyboardInterrupt:
        raise  # Ctrl-C, in the thread of a caller.
    except BaseException as error:
        name = getattr(callback, "__qualname__", repr(callback))
        _raised.error("a callback raised", type(error).__name__, callback=name, exc_info=True)


@contextmanager
def client_errors(topic: str, producer: Sized) -> Iterator[None]:
    """Raises QueueFull, MessageTooLarge or MessageRefused for what `produce` raises."""
    try:
        yield
    except BufferError as error:
        raise QueueFull(
            f"{len(producer)} messages wait for the broker: send more slowly, or check that the broker is up"
        ) from error
    except KafkaException as error:
        code, cause = error.args[0].code(), error.args[0].str()
        kind = MessageTooLarge if code == KafkaError.MSG_SIZE_TOO_LARGE else MessageRefused
        raise kind(f"the message cannot be sent to {topic}: {cause}") from error
