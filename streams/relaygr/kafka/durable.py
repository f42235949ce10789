"""A producer of durable messages that outlives its client of librdkafka.

    produce --> client --> delivery report --> `on_done`, in `poll`
       |           |              |
       `-----------+--------------`--> waiting, in order --> produced again by a later `poll`

* An idempotent client refuses every later message after a fatal error, and keeps the certificates and passwords that it
  read when it was made. So another client takes its place. It sends again what has no report from the one before: a
  message whose acknowledgement is lost with the old client is in the log twice.
* A broker that has just started can name a topic unknown for some 100 ms. Messages of the topic wait until it is known.
* A client is made on a thread of its own: with SASL/OAUTHBEARER that takes a second, or ten without a valid token.
* A message is sent again for `DURABLE_S`, and its last attempt may take as long once more. Then, or if Kafka would
  refuse it again (`is_final`), it gets its report with the error.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from relaygr.kafka.client_errors import cause_of, is_final
from relaygr.kafka.clients import DURABLE_S, LARGEST_QUEUE_BYTES, MOST_QUEUED, ProducerKind, fetch_metadata
from relaygr.runtime.errors import RelayError
from relaygr.runtime.loggers import Logger
from relaygr.schemas.headers import Headers

if TYPE_CHECKING:
    from relaygr.kafka.session import KafkaSession

OnReport = Callable[[KafkaError | None, Message | None], None]
"""Gets the error, or None for a delivered message; the client's message is None if no client has sent it."""

_RESEND_S: Final = 0.02
_REMAKE_S: Final = 1.0
"""The least time between two attempts to make a client."""
_LAST_REPORTS_S: Final = 2.0
"""How long a client that is replaced may wait for acknowledgements: each that is lost can put a message twice."""
_PURGE_S: Final = 1.0
_TURN_S: Final = 0.05

_log = Logger(__name__)


@dataclass(slots=True, eq=False)
class _Durable:
    """A message that has no report yet."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: Headers
    partition: int
    on_done: OnReport
    give_up_s: float
    number: int
    """Messages wait, and are produced again, in the order of their numbers."""
    cause: KafkaError | None = None
    """The error of the last attempt."""

    @property
    def size_bytes(self) -> int:
        return len(self.value or b"") + len(self.key or b"")


_Done = tuple[_Durable, KafkaError | None, Message | None]


class DurableProducer:
    """See the module docstring; `KafkaSession.durable_producer` makes one. It has no client before `make`, `connect` or
    the first message. Any thread may call every method; `poll` and `flush` call every `on_done`.
    """

    def __init__(self, session: KafkaSession, client_id: str) -> None:
        self._session = session
        self._client_id = client_id
        self._lock = threading.Lock()
        self._client: Producer | None = None
        self._made: Producer | None = None
        """Another client, which the next `poll` takes into use after the reports of the one before."""
        self._failed: Producer | None = None
        """The last client that had a fatal error."""
        self._is_wanted = False
        """Whether another client is to be made."""
        self._making: threading.Thread | None = None
        self._make_at_s = 0.0
        self._why_no_client: KafkaError | None = None
        self._queues: defaultdict[str, deque[_Durable]] = defaultdict(deque)
        """The messages that wait, in order, by topic: those of one topic do not wait for another one."""
        self._resend_at_s: dict[str, float] = {}
        """When a topic whose messages failed is tried again."""
        self._number = self._waiting = self._waiting_bytes = 0
        self._reported: deque[_Done] = deque()
        self._unreported = 0
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
        """Replaces the client, also one that is being made. Returns at once."""
        with self._lock:
            self._is_wanted = self._client is not None or self._made is not None or self._is_making

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
        give_up_s = time.monotonic() + DURABLE_S
        with self._lock:
            self._number += 1
            message = _Durable(topic, value, key, [*(headers or ())], partition, on_done, give_up_s, self._number)
            if self._queues[topic] or not self._send(message):
                if self._waiting >= MOST_QUEUED or self._waiting_bytes + message.size_bytes > LARGEST_QUEUE_BYTES:
                    raise BufferError("too many messages wait")
                self._queues[topic].append(message)
                self._count(message, 1)
            self._unreported += 1

    def poll(self, timeout_s: float = 0.0) -> int:
        """Calls `on_done` of messages with a report, and produces those that wait. Returns the number of reports."""
        client, fatal = self._client, None
        if client is not None:
            try:
                client.poll(timeout_s)
            except KafkaException as exception:
                fatal = exception.args[0]
        elif timeout_s:
            time.sleep(timeout_s)
        done: list[_Done] = []
        with self._lock:
            if fatal is not None:
                self._note_fatal(fatal, client)
            made = self._made
            self._take_reports(done)
            if made is not None:
                self._client, self._made = made, None
            if self._is_wanted and not self._closed:
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
        except KafkaException as exception:
            if is_final(exception.args[0]):
                raise
            self._note_fatal(exception.args[0], client)
            self._note_failure(message, exception.args[0])
            return False
        return True

    def _take_reports(self, done: list[_Done]) -> None:
        """Adds to `done`. Messages that are worth another attempt wait with the others."""
        again: list[_Durable] = []
        now_s = time.monotonic()
        for _ in range(len(self._reported)):
            message, error, report = self._reported.popleft()
            is_last = error is not None and (is_final(error) or error.code() == KafkaError._MSG_TIMED_OUT)
            if error is None or is_last or self._closed or now_s >= message.give_up_s:
                done.append((message, error, report))
            else:
                self._note_failure(message, error)
                again.append(message)
        for message in again:
            self._queues[message.topic].append(message)
            self._count(message, 1)
        for topic in {message.topic for message in again}:
            # The reports of a client that failed come in several polls, and on two threads.
            self._queues[topic] = deque(sorted(self._queues[topic], key=attrgetter("number")))

    def _send_waiting(self, done: list[_Done]) -> None:
        now_s = time.monotonic()
        why_no_client = self._why_no_client if self._client is None else None
        for topic, queue in self._queues.items():
            while queue:
                message, error = queue[0], None
                if now_s >= message.give_up_s or self._closed:
                    error = why_no_client or message.cause or KafkaError(KafkaError._MSG_TIMED_OUT)
                elif now_s < self._resend_at_s.get(topic, 0.0):
                    break
                else:
                    try:
                        if not self._send(message):
                            break
                    except BufferError:
                        break
                    except KafkaException as exception:
                        error = exception.args[0]
                queue.popleft()
                self._count(message, -1)
                if error is not None:
                    done.append((message, error, None))

    def _count(self, message: _Durable, sign: int) -> None:
        self._waiting += sign
        self._waiting_bytes += sign * message.size_bytes

    def _note_failure(self, message: _Durable, error: KafkaError) -> None:
        message.cause, self._resend_at_s[message.topic] = error, time.monotonic() + _RESEND_S

    def _note_fatal(self, error: KafkaError, client: Producer | None) -> None:
        if (error.fatal() or error.code() == KafkaError._FATAL) and client is not self._failed:
            _log.error("a producer failed, and another one is made", client_id=self._client_id, cause=cause_of(error))
            self._failed, self._is_wanted = client, True

    def _make_soon(self) -> None:
        """Makes a client on a thread of its own, unless one is being made or the last attempt was just now."""
        now_s = time.monotonic()
        if now_s < self._make_at_s or self._is_making:
            return
        self._make_at_s = now_s + _REMAKE_S
        self._is_wanted = False
        self._making = threading.Thread(target=self._make, name=f"{self._client_id}-connect", daemon=True)
        self._making.start()

    @property
    def _is_making(self) -> bool:
        return self._making is not None and self._making.is_alive()

    # -- without the lock --------------------------------------------------------------------------

    def _note_report(self, message: _Durable, error: KafkaError | None, report: Message) -> None:
        self._reported.append((message, error, report))

    def _make_client(self) -> Producer:
        return self._session.producer(ProducerKind.DURABLE, self._client_id)

    def _make(self) -> None:
        try:
            made = self._make_client()
        except RelayError as error:
            self._why_no_client = KafkaError(KafkaError._FAIL, str(error))
            _log.error("a producer cannot be made, so its messages wait", client_id=self._client_id, cause=str(error))
            with self._lock:
                self._is_wanted = self._client is not None
            return
        self._why_no_client = None
        with self._lock:
            # From now on messages wait, so that they follow those of the client before.
            before, self._client = self._client, None
        if before is not None:
            self._collect(before)
        self._made = made

    def _collect(self, client: Producer) -> None:
        """Takes the reports of all messages of a client, of those that wait for an acknowledgement last."""
        for limit_s, in_flight in ((_LAST_REPORTS_S, False), (_PURGE_S, True)):
            with contextlib.suppress(KafkaException):
                client.purge(in_flight=in_flight)
            ends_s = time.monotonic() + limit_s
            while len(client) and time.monotonic() < ends_s and (in_flight or not self._closed):
                with contextlib.suppress(KafkaException):
                    client.poll(_TURN_S)
