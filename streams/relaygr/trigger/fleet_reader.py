"""Reads the statuses on the workers topic from its beginning, on a thread of its own, into a view such as a `Fleet`.

Workers of another group may share the topics. A status names its group in a header; those of other groups are ignored
and counted. So are those of more workers than can be real.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import structlog
from confluent_kafka import KafkaError, KafkaException, Message

from relaygr.admission.worker_table import NoRoomError
from relaygr.kafka.client_errors import LimitedLog, cause_of
from relaygr.kafka.log_reader import Batch, Log, LogReader
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.session import KafkaSession
from relaygr.runtime.clock import Clock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.codec import DecodeError, decode
from relaygr.schemas.headers import workers_group_of
from relaygr.schemas.messages import MAX_PARTITIONS, WorkerStatus
from relaygr.schemas.topics import Topic
from relaygr.trigger.fleet import MAX_WORKERS

log = structlog.get_logger()

_RETRY_S: Final = 1.0
_MAY_NOT_READ: Final = "Kafka refuses the workers topic: give this user the rights to read and to describe the topic"
_POLL_S: Final = 0.2
"""The longest delay of a stop."""
BATCH: Final = 500
MAX_KNOWN: Final = 2 * MAX_WORKERS
NEW_BURST_BYTES: Final = 2 << 20
NEW_BYTES_PER_S: Final = 512 << 10
"""Of workers that are not known, and of claims that are much larger than before. A status has some 500 bytes, and 3 for
each partition; 1 MiB is decoded in 0.2 s."""
GROWTH_BYTES: Final = 1024
"""So much larger than before may the status of a known worker be: it then has 340 more partitions, or first reports of
measured times."""
MAX_NAMED_GROUPS: Final = 8
"""Other groups that are logged by name."""


class StatusView(Protocol):
    """A view that the statuses update."""

    def apply(self, worker_id: str, status: WorkerStatus | None, now_us: int) -> None:
        """Takes the latest status of a worker; None is its tombstone. Raises ValueError for an unusable status."""


class StatusIntake:
    """Decodes the messages of the workers topic for a view. Not thread-safe.

    Statuses of workers that the view does not know yet are decoded at a bounded rate; those beyond it are refused. So
    many made-up workers do not keep the reader from the statuses of known ones. Nor do many that are known by small
    statuses: one that is more than `GROWTH_BYTES` larger than the largest before counts as that of an unknown worker,
    and a worker of whom a status was decoded in vain is not known any more.
    """

    def __init__(self, apply: Callable[[str, WorkerStatus | None, int], None]) -> None:
        """`apply`: of a `StatusView`."""
        self._apply = apply
        self._known: OrderedDict[str, int] = OrderedDict()
        """With the bytes of the worker's largest status. The one that was heard of longest ago comes first."""
        self._room_bytes = float(NEW_BURST_BYTES)
        self._filled_us = 0

    def take(self, message: Message, now_us: int) -> None:
        """Raises DecodeError and ValueError for a message that cannot be used. `now_us`: wall time."""
        worker_id = bytes(message.key() or b"").decode()
        value = message.value()
        largest = self._known.get(worker_id)
        if value and (largest is None or len(value) > largest + GROWTH_BYTES):
            self._spend(len(value), now_us)
        # Not known, unless the view takes the status.
        self._known.pop(worker_id, None)
        status = _status_of(worker_id, value) if value else None
        self._apply(worker_id, status, now_us)
        if value:
            self._known[worker_id] = max(len(value), largest or 0)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _spend(self, size_bytes: int, now_us: int) -> None:
        passed_us = min(60_000_000, max(0, now_us - self._filled_us))
        self._filled_us = now_us
        self._room_bytes = min(NEW_BURST_BYTES, self._room_bytes + passed_us * NEW_BYTES_PER_S / 1e6)
        if self._room_bytes < size_bytes:
            raise NoRoomError(
                "too many workers that are not known write statuses, or known ones claim much more than before"
            )
        self._room_bytes -= size_bytes


def _status_of(worker_id: str, value: bytes) -> WorkerStatus:
    """Raises DecodeError and ValueError for a value that is no status of this worker."""
    status = decode(WorkerStatus, value)
    if status.worker_id != worker_id:
        raise ValueError(f"the key is {worker_id[:128]!r}, but the status is of {status.worker_id!r}")
    if any(partition >= MAX_PARTITIONS for partition in status.partitions):
        raise ValueError("a partition is out of bounds")
    if status.pre_infer is not None and status.partitions:
        # Such a claim would have no bound: nobody compares it with those of others.
        raise ValueError("a pre-infer worker has no partitions")
    return status


class FleetReader:
    """Updates a view, such as a `Fleet`, from the workers topic, on its own thread.

    A status that cannot be decoded or used is reported to `on_bad`, and logged at a limited rate; the worker's earlier
    status then becomes stale. The status of a worker of another group is reported to `on_bad`, and the group is logged
    once; of more than `MAX_NAMED_GROUPS` groups only that there are more. The Kafka client handles connection errors
    and reconnects; the fleet becomes stale meanwhile.

    librdkafka tells once that fetches are refused. It does not tell that they are allowed again if nothing was written
    meanwhile, nor, if the first fetch that is allowed ends at the end of the topic, that the next is refused. So a
    refused reader tries again with a new client, which tells either.
    """

    def __init__(
        self,
        session: KafkaSession,
        fleet: StatusView,
        clock: Clock,
        client_id: str,
        on_bad: Callable[[], None] | None = None,
    ) -> None:
        """No network until `start`."""
        self._topic = session.kafka.topic(Topic.WORKERS)
        self._own_group = session.kafka.workers_group
        self._reader = LogReader(session, client_id, (self._topic,))
        self._intake = StatusIntake(fleet.apply)
        self._clock = clock
        self._on_bad = on_bad
        self._stopping = threading.Event()
        self._is_caught_up = False
        self._heard_us = 0
        self._other_groups: set[str] = set()
        """Those that were logged."""
        self._limited_log = LimitedLog(clock)
        self._refusal: str | None = None
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
        return self._is_caught_up and self._refusal is None

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
        self._is_caught_up = False
        log.error("the statuses of workers cannot be read yet", cause=cause)

    def _follow(self) -> None:
        """Returns when Kafka refuses the client."""
        with self._reader as reader:
            statuses = Log(self._topic, 0)
            reader.read(statuses)
            is_allowed = True
            while is_allowed and not self._stopping.is_set():
                is_allowed = self._take(reader.batch(_POLL_S, BATCH), statuses)

    def _take(self, batch: Batch, statuses: Log) -> bool:
        """Returns whether Kafka still lets the client read."""
        for message in _latest(batch.records):
            self._read(message)
        # In a large fleet the next status is there before the end is told.
        if batch.records or statuses.caught_up:
            self._refusal = None
        if statuses.caught_up:
            self._is_caught_up = True
        # Of a fetch, or of the client, whose metadata may lack the right to describe the topic.
        if all(each.error.code() != KafkaError.TOPIC_AUTHORIZATION_FAILED for each in batch.failures):
            return True
        if self._refusal is None:
            log.error("the statuses of workers cannot be read", cause=_MAY_NOT_READ)
        self._refusal = _MAY_NOT_READ
        return False

    def _read(self, message: Message) -> None:
        self._heard_us = self._clock.monotonic_us()
        group = workers_group_of(headers_of(message))
        if group is not None and group != self._own_group:
            self._refuse_group(group)
            return
        try:
            self._intake.take(message, self._clock.wall_us())
        except (DecodeError, ValueError) as bad:
            self._limited_log.warning(
                "worker status cannot be used", type(bad).__name__, offset=message.offset(), error=str(bad)[:300]
            )
            if self._on_bad is not None:
                self._on_bad()

    def _refuse_group(self, group: str) -> None:
        if self._on_bad is not None:
            self._on_bad()
        if group in self._other_groups or len(self._other_groups) > MAX_NAMED_GROUPS:
            return
        # The one beyond the bound is remembered, too: it stands for all others.
        self._other_groups.add(group)
        named = len(self._other_groups) <= MAX_NAMED_GROUPS
        log.warning(
            "workers of another group use the same topics: their statuses are ignored",
            group=(group if group.isprintable() else ascii(group)) if named else "further ones, which are not logged",
            own_group=self._own_group,
            advice="give each group a `topic_prefix` of its own",
        )


def _latest(messages: Sequence[Message]) -> list[Message]:
    """The last status of each worker. While the reader is behind, no earlier one need be decoded."""
    found: dict[tuple[str | bytes | None, str | None], Message] = {}
    for message in messages:
        place = message.key(), workers_group_of(headers_of(message))
        found.pop(place, None)
        found[place] = message
    return [*found.values()]
