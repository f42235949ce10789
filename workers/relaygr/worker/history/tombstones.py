"""Reads tombstones while the store cannot be written, so that look-ups and caches forget deleted users nevertheless."""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition

from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.topics import Topic
from relaygr.worker.history.batches import HistoryRecord
from relaygr.worker.history.decode import read_record
from relaygr.worker.history.store import HistoryStore


class TombstoneReader:
    """Stores nothing: when the store can be written again, the follower reads the same records."""

    def __init__(
        self, kafka: KafkaSettings, store: HistoryStore, on_tombstone: Callable[[int, HistoryRecord], None]
    ) -> None:
        """`on_tombstone` gets the partition and the tombstone."""
        self._topic = kafka.topic(Topic.HISTORY)
        self._partition_count = kafka.partitions
        self._store = store
        self._on_tombstone = on_tombstone
        self._read_to: dict[int, int] = {}
        self._partitions: frozenset[int] = frozenset()
        self._unread: set[int] = set()

    @property
    def is_at_end(self) -> bool:
        """Whether every partition was read to its end since `begin`."""
        return not self._unread

    def begin(self) -> None:
        """Reads with a new consumer from now on, from where the last one ended."""
        self._partitions, self._unread = frozenset(), set()

    def assign(self, consumer: Consumer, partitions: frozenset[int]) -> None:
        """Reads these partitions and no others."""
        if partitions != self._partitions:
            self._partitions, self._unread = partitions, set(partitions)
            consumer.assign([self._position(partition) for partition in sorted(partitions)])

    def receive(self, message: Message) -> None:
        """Takes a message of the history topic, or the end of one of its partitions."""
        error, partition, offset = message.error(), message.partition(), message.offset()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF and partition is not None:
                self._unread.discard(partition)
            return
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

    def _position(self, partition: int) -> TopicPartition:
        read_to = max(self._store.next_offset(partition) or 0, self._read_to.get(partition, 0))
        return TopicPartition(self._topic, partition, read_to or OFFSET_BEGINNING)
