"""Reads the statuses on the workers topic from its beginning, on a thread of its own, into a view such as a `Fleet`.

Workers of another group may share the topics. A status names its group in a header; those of other groups are ignored
and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from relaygr.kafka.client_errors import ClientErrors, NoteError, cause_of, no_note
from relaygr.kafka.clients import learn_leaders, make_assigned_consumer
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import Clock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.codec import DecodeError, decode
from relaygr.schemas.headers import workers_group_of
from relaygr.schemas.messages import MAX_PARTITIONS, WorkerStatus
from relaygr.schemas.topics import Topic

log = structlog.get_logger()

_RETRY_S: Final = 1.0
_MAY_NOT_READ: Final = "Kafka refuses the workers topic: give this user the rights to read and to describe the topic"
_POLL_S: Final = 0.2
"""The longest delay of a stop."""


def status_of(message: Message) -> tuple[str, WorkerStatus | None]:
    """The worker id and the status of a message on the workers topic; None is a tombstone.

    Raises DecodeError and ValueError for a message that cannot be used.
    """
    worker_id = bytes(message.key() or b"").decode()
    value = message.value()
    status = decode(WorkerStatus, value) if value else None
    if status is not None and status.worker_id != worker_id:
        raise ValueError(f"the key is {worker_id[:128]!r}, but the status is of {status.worker_id!r}")
    if status is not None and any(partition >= MAX_PARTITIONS for partition in status.partitions):
        raise ValueError("a partition is out of bounds")
    return worker_id, status


class StatusView(Protocol):
    """A view that a `FleetReader` updates."""

    def apply(self, worker_id: str, status: WorkerStatus | None, now_us: int) -> None:
        """Takes the latest status of a worker; None is its tombstone. Raises ValueError for an unusable status."""


class FleetReader:
    """Updates a view, such as a `Fleet`, from the workers topic, on its own thread.

    A status that cannot be decoded or used is logged and reported to `on_bad`; the worker's earlier status then becomes
    stale. The status of a worker of another group is reported to `on_bad`, and the group is logged once. The Kafka
    client handles connection errors and reconnects; the fleet becomes stale meanwhile.

    librdkafka tells once that fetches are refused. It does not tell that they are allowed again if nothing was written
    meanwhile, nor, if the first fetch that is allowed ends at the end of the topic, that the next is refused. So a
    refused reader tries again with a new client, which tells either.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        fleet: StatusView,
        clock: Clock,
        client_id: str,
        on_bad: Callable[[], None] | None = None,
        note_error: NoteError = no_note,
    ) -> None:
        """No network until `start`."""
        self._note_error = note_error
        self._kafka = kafka
        self._fleet = fleet
        self._clock = clock
        self._client_id = client_id
        self._on_bad = on_bad
        self._stopping = threading.Event()
        self._caught_up = threading.Event()
        self._heard_us = 0
        self._end: int | None = None
        self._other_groups: set[str] = set()
        self._refusal: str | None = None
        self._is_client_refused = False
        self._errors = ClientErrors(client_id, self._note_refusal)
        """Of all clients, so that equal errors are logged at a limited rate."""
        self._thread = threading.Thread(target=self._run, name="fleet-reader", daemon=True)

    @property
    def heard_us(self) -> int:
        """Monotonic time of the last message from the topic; 0 before the first."""
        return self._heard_us

    @property
    def refusal(self) -> str | None:
        """The right that this user lacks, as a sentence; None while Kafka does not refuse the reader."""
        return self._refusal

    @property
    def caught_up(self) -> bool:
        """Whether the topic was read to its end, and may be read now."""
        return self._caught_up.is_set() and self._refusal is None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stops the thread. Returns when the thread has ended, or after `timeout_s`."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except RelayError as error:
                self._failed(str(error))
            except KafkaException as error:
                self._failed(cause_of(error.args[0]))
            self._stopping.wait(_RETRY_S)

    def _failed(self, cause: str) -> None:
        """The next client reads the topic again."""
        self._caught_up.clear()
        self._end = None
        log.error("the statuses of workers cannot be read yet", cause=cause)

    def _follow(self) -> None:
        """Returns when Kafka refuses the client."""
        self._is_client_refused = False
        # The client then reports the end of a topic without statuses.
        options = {"enable.partition.eof": True}
        consumer = make_assigned_consumer(self._kafka, self._client_id, self._errors, options)
        try:
            topic = self._kafka.topic(Topic.WORKERS)
            learn_leaders(consumer, (topic,))
            consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
            while not self._stopping.is_set() and not self._is_client_refused:
                message = consumer.poll(_POLL_S)
                if message is not None:
                    self._read(message)
                    if not self._caught_up.is_set() and self._is_at_the_end(consumer, message):
                        self._caught_up.set()
        finally:
            consumer.close()

    def _is_at_the_end(self, consumer: Consumer, message: Message) -> bool:
        """Whether the message is at or beyond the end that the topic had when its first message was read.

        The event of the end comes only from a fetch without data. With many workers the next status is there first.
        """
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        if message.error() is not None or topic is None or partition is None or offset is None:
            return False
        if self._end is None:
            known = consumer.get_watermark_offsets(TopicPartition(topic, partition), cached=True)
            self._end = known[1] if known is not None and known[1] >= 0 else None
        return self._end is not None and offset + 1 >= self._end

    def _read(self, message: Message) -> None:
        error: KafkaError | None = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                self._caught_up.set()
                self._refusal = None
            else:
                self._note_refusal(error)
            return
        self._heard_us = self._clock.monotonic_us()
        # In a large fleet the next status is there before the end is told.
        self._refusal = None
        group = workers_group_of(headers_of(message))
        if group is not None and group != self._kafka.workers_group:
            self._refuse_group(group)
            return
        try:
            self._fleet.apply(*status_of(message), self._clock.wall_us())
        except (DecodeError, ValueError) as bad:
            log.warning("worker status cannot be used", offset=message.offset(), error=str(bad)[:300])
            if self._on_bad is not None:
                self._on_bad()

    def _note_refusal(self, error: KafkaError) -> None:
        """Of a fetch, or of the client, whose metadata may lack the right to describe the topic."""
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            self._note_error(self._kafka.topic(Topic.WORKERS), error)
            if self._refusal is None:
                log.error("the statuses of workers cannot be read", cause=_MAY_NOT_READ)
            self._refusal, self._is_client_refused = _MAY_NOT_READ, True

    def _refuse_group(self, group: str) -> None:
        if group not in self._other_groups:
            self._other_groups.add(group)
            log.warning(
                "workers of another group use the same topics: their statuses are ignored",
                group=group,
                own_group=self._kafka.workers_group,
                advice="give each group a `topic_prefix` of its own",
            )
        if self._on_bad is not None:
            self._on_bad()
