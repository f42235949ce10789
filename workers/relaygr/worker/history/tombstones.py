"""Reads tombstones while the store cannot be written, so that look-ups and caches forget deleted users nevertheless."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from confluent_kafka import Message

from relaygr.kafka.clients import READ_COMMITTED
from relaygr.kafka.log_reader import Log, LogReader
from relaygr.kafka.session import KafkaSession
from relaygr.schemas.topics import Topic
from relaygr.worker.history.batches import HistoryRecord
from relaygr.worker.history.decode import read_record
from relaygr.worker.history.store import HistoryStore


class TombstoneReader:
    """Stores nothing: when the store can be written again, the follower reads the same records.

    So it may read those of a new log, from its beginning.
    """

    def __init__(
        self,
        session: KafkaSession,
        store: HistoryStore,
        client_id: str,
        on_tombstone: Callable[[int, HistoryRecord], None],
    ) -> None:
        """`on_tombstone` gets the partition and the tombstone."""
        self._topic = session.kafka.topic(Topic.HISTORY)
        self._partition_count = session.kafka.partitions
        self._store = store
        self._on_tombstone = on_tombstone
        self._reader = LogReader(session, client_id, (self._topic,), READ_COMMITTED)
        self._logs: dict[int, Log] = {}
        self._read_to: dict[int, int] = {}

    @property
    def caught_up(self) -> bool:
        """Whether every partition was read to its end with the present client."""
        return all(log.caught_up for log in self._logs.values())

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Has a client meanwhile, which reads from where the last one ended. Raises RelayError."""
        self._logs.clear()
        with self._reader:
            yield

    def turn(self, partitions: frozenset[int], timeout_s: float) -> None:
        """Reads these partitions and no others: what has arrived, or arrives in this time."""
        self._reader.leave(*(self._logs.pop(each) for each in self._logs.keys() - partitions))
        gained = {each: Log(self._topic, each, self._start(each)) for each in sorted(partitions - self._logs.keys())}
        self._logs |= gained
        if gained:
            self._reader.read(*gained.values())
        for message in self._reader.batch(timeout_s).records:
            self._take(message)

    def _take(self, message: Message) -> None:
        partition, offset = message.partition(), message.offset()
        assert partition is not None and offset is not None
        self._read_to[partition] = offset + 1
        if message.value() is None:
            record = read_record(message.key(), None, partition, self._partition_count, offset)
            if isinstance(record, HistoryRecord):
                self._on_tombstone(partition, record)

    def reset(self, *partitions: int) -> None:
        """Reads these partitions from their stored offsets again; without any: all."""
        for partition in partitions or tuple(self._read_to):
            self._read_to.pop(partition, None)

    def _start(self, partition: int) -> int:
        return max(self._store.next_offset(partition) or 0, self._read_to.get(partition, 0))
