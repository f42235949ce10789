"""Dead letters: a message that cannot be used is written to a topic with its reason, for operators.

The headers named in `relaygr.schemas.headers` hold reason, detail, and the origin: topic, partition, offset, and a
digest of the value. Kafka cannot erase single records, so a dead letter holds no byte of the message, unless
`dead_letter_bodies` is set. Then it has the original key and value, and as many of the original headers as fit; if the
topic refuses it as too large, it is written without them. A detail names fields and limits, never a user. A consumer
may continue at once. It finishes the offset on `on_done(True)`; on `on_done(False)` the message is delivered to it
again. The counter `relaygr_dead_letters_total{topic, reason}` counts acknowledged dead letters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from prometheus_client import Counter

from relaygr.kafka.client_errors import LimitedLog, cause_of, why_undelivered
from relaygr.kafka.clients import make_assigned_consumer, read_watermarks, require_broker
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import Clock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.digest import DIGEST_BYTES
from relaygr.schemas.headers import (
    DEAD_LETTER_DETAIL,
    DEAD_LETTER_REASON,
    DEAD_LETTERED_AT_US,
    MAX_HEADER_BYTES,
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    ORIGIN_TOPIC,
    ORIGIN_VALUE_BYTES,
    ORIGIN_VALUE_DIGEST,
    Headers,
)
from relaygr.schemas.topics import CATALOGUE, Topic

if TYPE_CHECKING:
    from relaygr.kafka.session import KafkaSession

OnDone = Callable[[bool], None]

LARGEST_KEY_BYTES: Final = 64 * 1024
KEPT_HEADERS: Final = 32
KEPT_HEADERS_BYTES: Final = 16 * 1024
# Upper bound on what the record, its batch and our own headers add.
_OVERHEAD_BYTES: Final = 8 * 1024
LARGEST_RECORD_BYTES: Final = CATALOGUE[Topic.DEAD_LETTERS].max_message_bytes - KEPT_HEADERS_BYTES - _OVERHEAD_BYTES
"""Bound on key and value together."""

_MOST_DIGITS: Final = 19
"""Those of the largest offset."""
_OURS: Final = frozenset(
    (
        DEAD_LETTER_REASON,
        DEAD_LETTER_DETAIL,
        ORIGIN_TOPIC,
        ORIGIN_PARTITION,
        ORIGIN_OFFSET,
        ORIGIN_VALUE_DIGEST,
        ORIGIN_VALUE_BYTES,
        DEAD_LETTERED_AT_US,
    )
)
_COUNTED: Final = Counter(
    "relaygr_dead_letters",
    "Messages written to the dead-letter topic, by their topic and the reason",
    ["topic", "reason"],
)


class DeadLetterWriter:
    """Writes the dead letters of a process: `KafkaSession.dead_letters`. Any thread may call it.

    The producer's client is made for the first dead letter, on another thread: most processes never write one. Each
    thread that writes calls `poll` often: `poll` and `flush` call `on_done`, also of letters that others wrote.
    """

    def __init__(self, session: KafkaSession, clock: Clock) -> None:
        kafka = session.kafka
        self._topic = kafka.topic(Topic.DEAD_LETTERS)
        self._clock = clock
        # Any number of bad messages may come while the topic cannot be written.
        self._limited_log = LimitedLog(clock)
        self._with_bodies = kafka.dead_letter_bodies
        self._producer = session.durable_producer(f"{session.name}-dead-letters")

    def write(self, message: Message, reason: str, detail: str, on_done: OnDone | None = None) -> None:
        """Writes `message` to the dead letters, whatever it contains.

        `reason` is one of a small set, because it is a metric label; `detail` is a sentence. `on_done` gets True when
        the cluster has acknowledged the dead letter, and False if it was not written; the caller then writes it again.
        """
        self._write(message, reason, detail, on_done, self._with_bodies)

    def _write(self, message: Message, reason: str, detail: str, on_done: OnDone | None, with_body: bool) -> None:
        origin = message.topic() or ""
        now_us = self._clock.wall_us()
        if with_body:
            key, value, remarks = _cut(message.key(), message.value())
            headers = dead_letter_headers(message, reason, "; ".join([*remarks, detail]), now_us)
        else:
            key, value = None, None
            headers = [*_digest_of(message.value()), *_origin_of(message, reason, detail, now_us)]

        def delivered(error: KafkaError | None, _message: Message | None) -> None:
            if error is None:
                _COUNTED.labels(topic=origin, reason=reason).inc()
            elif with_body and error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                remark = "the topic refuses the message as too large"
                self._write(message, reason, f"{remark}; {detail}", on_done, with_body=False)
                return
            else:
                self._not_written(origin, reason, why_undelivered(error))
            if on_done is not None:
                on_done(error is None)

        try:
            self._producer.produce(self._topic, value, key, delivered, headers)
        except (BufferError, KafkaException) as error:
            # The queue is full because the broker is away, or the message is too large for the topic.
            self._not_written(origin, reason, str(error))
            if on_done is not None:
                on_done(False)

    def _not_written(self, origin: str, reason: str, error: str) -> None:
        self._limited_log.error(
            "a dead letter was not written", (origin, reason), topic=origin, reason=reason, error=error
        )

    def poll(self, timeout_s: float = 0.0) -> int:
        """Serves delivery reports. Returns their number."""
        return self._producer.poll(timeout_s)

    def flush(self, timeout_s: float) -> int:
        """Waits for undelivered dead letters. Returns how many are left."""
        return self._producer.flush(timeout_s)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """What a dead letter says of a message."""

    written_at_ms: int
    topic: str
    partition: int
    offset: int
    """Of the message, like topic and partition."""
    reason: str
    detail: str
    key: str | None
    """None without `dead_letter_bodies`."""
    value_bytes: int | None
    """None for a message without a value."""


def read_dead_letters(kafka: KafkaSettings, last: int) -> tuple[list[DeadLetter], int]:
    """The newest dead letters, oldest first, and the number of those that the topic keeps. Raises RelayError."""
    topic = kafka.topic(Topic.DEAD_LETTERS)
    require_broker(kafka)
    consumer = make_assigned_consumer(kafka, "relaygr-dead-letters", options={"enable.partition.eof": True})
    try:
        partitions = consumer.list_topics(topic, timeout=kafka.connect_timeout_s).topics[topic]
        if partitions.error is not None:
            raise KafkaException(partitions.error)
        starts, kept = list[TopicPartition](), 0
        for partition in partitions.partitions:
            place = TopicPartition(topic, partition)
            low, high = read_watermarks(consumer, place, kafka.connect_timeout_s)
            kept += high - low
            if high > low:
                starts.append(TopicPartition(topic, partition, max(low, high - last)))
        consumer.assign(starts)
        found, ended = list[DeadLetter](), 0
        while ended < len(starts):
            message = consumer.poll(kafka.connect_timeout_s)
            if message is None:
                raise RelayError(f"Kafka at {kafka.bootstrap} does not answer any more: no dead letters were read.")
            if (error := message.error()) is None:
                found.append(_read(message))
                if len(found) > 2 * last:
                    found = _newest(found, last)
            elif error.code() == KafkaError._PARTITION_EOF:
                ended += 1
            else:
                raise KafkaException(error)
    except KafkaException as error:
        is_absent = error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
        cure = " Run `relaygr topics create`." if is_absent else ""
        raise RelayError(f"{topic} cannot be read: {cause_of(error.args[0])}.{cure}") from error
    finally:
        consumer.close()
    return _newest(found, last), kept


def _newest(found: list[DeadLetter], last: int) -> list[DeadLetter]:
    return sorted(found, key=lambda each: (each.written_at_ms, each.partition, each.offset))[-last:]


def _read(message: Message) -> DeadLetter:
    texts = {
        name: value if isinstance(value, str) else (value or b"").decode(errors="replace")
        for name, value in headers_of(message) or ()
    }

    def whole(name: str) -> int | None:
        text = texts.get(name, "")
        # Python refuses to read numbers of thousands of digits.
        return int(text) if len(text) <= _MOST_DIGITS and text.isdecimal() and text.isascii() else None

    key, value, size = message.key(), message.value(), whole(ORIGIN_VALUE_BYTES)
    partition, offset = whole(ORIGIN_PARTITION), whole(ORIGIN_OFFSET)
    return DeadLetter(
        (whole(DEAD_LETTERED_AT_US) or 0) // 1000,
        texts.get(ORIGIN_TOPIC, "unknown"),
        -1 if partition is None else partition,
        -1 if offset is None else offset,
        texts.get(DEAD_LETTER_REASON, "unknown"),
        texts.get(DEAD_LETTER_DETAIL, ""),
        None if key is None else key.decode(errors="replace"),
        size if value is None else len(value),
    )


def dead_letter_headers(message: Message, reason: str, detail: str, now_us: int) -> Headers:
    """The original headers up to the bounds, and then ours."""
    kept: Headers = []
    kept_bytes = 0
    for name, raw in headers_of(message) or ():
        value = raw.encode() if isinstance(raw, str) else raw or b""
        kept_bytes += len(name) + len(value)
        if len(kept) >= KEPT_HEADERS or kept_bytes > KEPT_HEADERS_BYTES:
            break
        if name not in _OURS:
            kept.append((name, value))
    return [*kept, *_origin_of(message, reason, detail, now_us)]


def _digest_of(value: bytes | None) -> Headers:
    """Identifies a value in the origin's log, or in a copy of it. No headers for a message without a value."""
    if value is None:
        return []
    digest = blake2b(value, digest_size=DIGEST_BYTES).hexdigest()
    return [(ORIGIN_VALUE_DIGEST, digest.encode()), (ORIGIN_VALUE_BYTES, str(len(value)).encode())]


def _origin_of(message: Message, reason: str, detail: str, now_us: int) -> Headers:
    return [
        (DEAD_LETTER_REASON, _bounded(reason)),
        (DEAD_LETTER_DETAIL, _bounded(detail)),
        (ORIGIN_TOPIC, _bounded(message.topic() or "")),
        (ORIGIN_PARTITION, str(message.partition()).encode()),
        (ORIGIN_OFFSET, str(message.offset()).encode()),
        (DEAD_LETTERED_AT_US, str(now_us).encode()),
    ]


def _cut(key: bytes | None, value: bytes | None) -> tuple[bytes | None, bytes | None, list[str]]:
    """Cuts key and value to the topic's bound. The texts describe the cuts."""
    remarks = []
    if key is not None and len(key) > LARGEST_KEY_BYTES:
        remarks.append(f"key cut from {len(key)} to {LARGEST_KEY_BYTES} bytes")
        key = key[:LARGEST_KEY_BYTES]
    left_bytes = LARGEST_RECORD_BYTES - len(key or b"")
    if value is not None and len(value) > left_bytes:
        remarks.append(f"value cut from {len(value)} to {left_bytes} bytes")
        value = value[:left_bytes]
    return key, value, remarks


def _bounded(text: str) -> bytes:
    """UTF-8 of at most MAX_HEADER_BYTES, cut between characters."""
    return text.encode(errors="replace")[:MAX_HEADER_BYTES].decode(errors="ignore").encode()
