"""A producer of durable messages that outlives its client of librdkafka.

    produce --> client --> delivery report --> `on_done`, in `poll`
       |           |              |
       `-----------+--------------`--> waiting, in order --> produced again by a later `poll`

* A fatal error makes a client of an idempotent producer unusable: it refuses every later message. A thread then makes
  another client. The messages of the old one that have no report are produced again, so one of them can be in the log
  twice.
* A client has read its certificates and passwords when it was made. `renew` replaces it by another one, in the same
  way. Messages that are under way get some time for their acknowledgement, so they are rarely in the log twice.
* A broker that has just started, or whose metadata are stale, can name a topic unknown for some 100 ms. Messages wait
  until it is known, and those of other topics do not wait for them.
* A client is made on a thread of its own: with SASL/OAUTHBEARER that takes a second, or ten without a valid token.
* A message is sent again for `DURABLE_S`, and its last attempt may take as long once more. Then, or if Kafka would
  refuse it again (`is_final`), it gets its report with the error.

A failed message is produced before the messages that wait, but after those that were sent meanwhile.

Any thread may call `produce`. Only the owner's thread calls `poll` and `flush`, which call every `on_done`. The owner
calls `poll` often.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from relaygr.kafka.client_errors import NoteError, cause_of, is_final, no_note
from relaygr.kafka.clients import (
    DURABLE_S,
    LARGEST_QUEUE_BYTES,
    MOST_QUEUED,
    ProducerKind,
    fetch_metadata,
    make_producer,
)
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.headers import Headers

OnReport = Callable[[KafkaError | None, Message | None], None]
"""Gets the error, or None for a delivered message; the client's message is None if no client has sent it."""

_RESEND_S: Final = 0.02
_REMAKE_S: Final = 1.0
"""The least time between two attempts to make a client."""
_PURGE_S: Final = 1.0
_LAST_REPORTS_S: Final = 2.0
"""How long a client that is replaced may wait for acknowledgements."""
_TURN_S: Final = 0.05

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Durable:
    """A message that has no report yet."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: Headers
    partition: int
    on_done: OnReport
    give_up_s: float

    @property
    def size_bytes(self) -> int:
        return len(self.value or b"") + len(self.key or b"")


@dataclass(slots=True)
class _Queue:
    """The messages of a topic that wait, in order."""

    messages: deque[_Durable] = field(default_factory=deque)
    resend_at_s: float = 0.0
    cause: KafkaError | None = None
    """Why they wait: the last error."""


_Done = tuple[_Durable, KafkaError | None, Message | None]


class DurableProducer:
    """See the module docstring. No client before `make`, `connect` or the first message."""

    def __init__(self, kafka: KafkaSettings, client_id: str, note_error: NoteError = no_note) -> None:
        self._kafka = kafka
        self._note_error = note_error
        self._client_id = client_id
        self._lock = threading.Lock()
        self._client: Producer | None = None
        self._made: Producer | None = None
        """A new client, which the next `poll` takes into use after the reports of the old one."""
        self._broken: Producer | None = None
        """A client after its fatal error, until its messages have their reports."""
        self._making: threading.Thread | None = None
        self._make_at_s = 0.0
        self._is_outdated = False
        """Whether another client is to be made, though there is one."""
        self._queues: defaultdict[str, _Queue] = defaultdict(_Queue)
        self._waiting = self._waiting_bytes = 0
        self._reported: deque[_Done] = deque()
        self._unreported = 0
        self._why_no_client: KafkaError | None = None
        self._closed = False

    def __len__(self) -> int:
        """Messages whose `on_done` was not called yet."""
        return self._unreported

    def make(self) -> None:
        """Makes the client now. Raises RelayError for settings that it cannot use."""
        if self._client is None:
            self._client = self._make_client()

    def connect(self, topic: str, timeout_s: float) -> None:
        """Fetches the metadata of `topic`, so that its first message need not wait for it. Raises RelayError."""
        self.make()
        assert self._client is not None
        fetch_metadata(self._client, topic, timeout_s)

    def renew(self) -> None:
        """Replaces the client, and one that is being made. Returns at once; any thread may call it."""
        with self._lock:
            self._is_outdated = self._client is not None or self._made is not None or self._is_making

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        on_done: OnReport,
        headers: Headers | None = None,
        partition: int = -1,
    ) -> None:
        """Never waits. Raises BufferError if too many messages wait, KafkaException if Kafka refuses the message."""
        message = _Durable(topic, value, key, [*(headers or ())], partition, on_done, time.monotonic() + DURABLE_S)
        with self._lock:
            if self._queues[topic].messages or not self._send(message):
                self._wait(message)
            self._unreported += 1

    def poll(self, timeout_s: float = 0.0) -> int:
        """Calls `on_done` of messages with a report, and produces those that wait. Returns the number of reports."""
        self._serve(timeout_s)
        done: list[_Done] = []
        with self._lock:
            made = self._made
            self._take_reports(done)
            if made is not None:
                self._client, self._made = made, None
            elif self._is_outdated and not self._closed:
                self._make_soon()
            self._send_waiting(done)
            self._unreported -= len(done)
        for message, error, report in done:
            message.on_done(error, report)
        return len(done)

    def flush(self, timeout_s: float) -> int:
        """Polls until every message has its report, for at most `timeout_s`. Returns how many have none."""
        ends_s = time.monotonic() + timeout_s
        while True:
            self.poll(max(0.0, min(_TURN_S, ends_s - time.monotonic())))
            if not self._unreported or time.monotonic() >= ends_s:
                return self._unreported

    def close(self, timeout_s: float) -> int:
        """Like `flush`; messages without a report then get one with an error, and no message is sent again."""
        left = self.flush(timeout_s)
        self._closed = True
        if left:
            if self._client is not None:
                self._client.purge()
            self.flush(_PURGE_S)
        return left

    # -- with the lock -----------------------------------------------------------------------------

    def _send(self, message: _Durable) -> bool:
        """Hands a message to the client. False: it has to wait. Raises BufferError and KafkaException."""
        client = self._client
        if client is None:
            if self._made is None:
                self._make_soon()
            return False
        try:
            client.produce(
                message.topic,
                value=message.value,
                key=message.key,
                headers=message.headers,
                partition=message.partition,
                on_delivery=partial(self._note_report, message),
            )
        except KafkaException as error:
            self._note_error(message.topic, error.args[0])
            if is_final(error.args[0]):
                raise
            self._note_fatal(error.args[0], client)
            self._send_later(message.topic, error.args[0])
            return False
        return True

    def _wait(self, message: _Durable) -> None:
        """Raises BufferError at the bounds of a client's own queue."""
        size_bytes = self._waiting_bytes + message.size_bytes
        if self._waiting >= MOST_QUEUED or size_bytes > LARGEST_QUEUE_BYTES:
            raise BufferError("too many messages wait")
        self._queues[message.topic].messages.append(message)
        self._waiting += 1
        self._waiting_bytes = size_bytes

    def _take_reports(self, done: list[_Done]) -> None:
        """Adds to `done`. Messages that are worth another attempt come before those that wait."""
        again: list[_Durable] = []
        now_s = time.monotonic()
        for _ in range(len(self._reported)):
            message, error, report = self._reported.popleft()
            self._note_error(message.topic, error)
            if error is None or self._closed or now_s >= message.give_up_s or _is_last(error):
                done.append((message, error, report))
            else:
                again.append(message)
                self._send_later(message.topic, error)
        for message in reversed(again):
            self._queues[message.topic].messages.appendleft(message)
        self._waiting += len(again)
        self._waiting_bytes += sum(message.size_bytes for message in again)

    def _send_waiting(self, done: list[_Done]) -> None:
        now_s = time.monotonic()
        for queue in self._queues.values():
            while queue.messages:
                message, error = queue.messages[0], None
                if now_s >= message.give_up_s or self._closed:
                    why_no_client = self._why_no_client if self._client is None else None
                    error = why_no_client or queue.cause or KafkaError(KafkaError._MSG_TIMED_OUT)
                elif now_s < queue.resend_at_s:
                    break
                else:
                    try:
                        if not self._send(message):
                            break
                    except BufferError:
                        break
                    except KafkaException as exception:
                        error = exception.args[0]
                queue.messages.popleft()
                self._waiting -= 1
                self._waiting_bytes -= message.size_bytes
                if error is not None:
                    done.append((message, error, None))

    def _send_later(self, topic: str, cause: KafkaError) -> None:
        queue = self._queues[topic]
        queue.cause, queue.resend_at_s = cause, time.monotonic() + _RESEND_S

    def _note_fatal(self, error: KafkaError, client: Producer) -> None:
        """After a fatal error the client is given up."""
        if (error.fatal() or error.code() == KafkaError._FATAL) and self._client is client:
            _log.error("a producer failed, and another one is made", client_id=self._client_id, cause=cause_of(error))
            self._client, self._broken = None, client
            self._make_soon()

    def _make_soon(self) -> None:
        """Makes a client on a thread of its own, unless one is being made or the last attempt was just now."""
        now_s = time.monotonic()
        if now_s < self._make_at_s or self._is_making:
            return
        self._make_at_s = now_s + _REMAKE_S
        self._is_outdated = False
        self._making = threading.Thread(target=self._make, name=f"{self._client_id}-connect", daemon=True)
        self._making.start()

    @property
    def _is_making(self) -> bool:
        return self._making is not None and self._making.is_alive()

    # -- without the lock --------------------------------------------------------------------------

    def _serve(self, timeout_s: float) -> None:
        """Takes the client's reports, or waits without a client."""
        client = self._client
        if client is None:
            if self._unreported and self._made is None:
                with self._lock:
                    self._make_soon()
            if timeout_s:
                time.sleep(timeout_s)
            return
        try:
            client.poll(timeout_s)
        except KafkaException as error:
            # The client raises a fatal error once.
            with self._lock:
                self._note_fatal(error.args[0], client)

    def _note_report(self, message: _Durable, error: KafkaError | None, report: Message) -> None:
        self._reported.append((message, error, report))

    def _make(self) -> None:
        self._collect_broken()
        try:
            made = self._make_client()
        except RelayError as error:
            self._why_no_client = KafkaError(KafkaError._FAIL, str(error))
            _log.error("a producer cannot be made, so its messages wait", client_id=self._client_id, cause=str(error))
            with self._lock:
                self._is_outdated = self._client is not None
            return
        with self._lock:
            # From now on messages wait, so that they follow those of the client before.
            before, self._client = self._client, None
        self._collect_broken()
        if before is not None:
            self._collect(before, _LAST_REPORTS_S)
        self._made = made

    def _collect_broken(self) -> None:
        if self._broken is not None:
            self._collect(self._broken, 0.0)
            self._broken = None

    def _make_client(self) -> Producer:
        return make_producer(self._kafka, ProducerKind.DURABLE, self._client_id)

    def _collect(self, client: Producer, timeout_s: float) -> None:
        """Takes the reports of all messages of a client, of those that wait for an acknowledgement last."""
        for limit_s, in_flight in ((timeout_s, False), (_PURGE_S, True)):
            with contextlib.suppress(KafkaException):
                client.purge(in_flight=in_flight)
            ends_s = time.monotonic() + limit_s
            while len(client) and time.monotonic() < ends_s and (in_flight or not self._closed):
                with contextlib.suppress(KafkaException):
                    client.poll(_TURN_S)


def _is_last(error: KafkaError) -> bool:
    """Whether no other attempt follows this report."""
    return is_final(error) or error.code() == KafkaError._MSG_TIMED_OUT
