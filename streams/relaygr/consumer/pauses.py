"""The partitions whose delivery is paused: those that callers paused, those with too many unfinished messages, and all
at the end. The poll thread owns it.
"""

from __future__ import annotations

from collections.abc import Collection

from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as KafkaPartition
from prometheus_client import Gauge

from relaygr.consumer.watermark import TopicPartition, WatermarkTracker

_PAUSED = Gauge("relaygr_consumer_paused_partitions", "Partitions paused now", ["loop"])


class Pauses:
    """The wanted pauses, and those that the client has."""

    def __init__(self, loop: str, tracker: WatermarkTracker, max_span: int) -> None:
        self._loop = loop
        self._tracker = tracker
        self._max_span = max_span
        self.asked: set[TopicPartition] = set()
        """The partitions that callers paused."""
        self._full: set[TopicPartition] = set()
        self.paused: set[TopicPartition] = set()
        """The pauses of the client. Replaced as a whole: other threads read it."""

    def note_message(self, partition: TopicPartition) -> None:
        """A message of the partition was begun."""
        if self._tracker.is_full(partition):
            self._full.add(partition)

    def apply(self, client: Consumer, *, is_reading: bool) -> None:
        """Pauses and resumes; all partitions are paused unless the loop `is_reading`. Raises KafkaException."""
        self._full = {tp for tp in self._full if self._tracker.span(tp) * 2 > self._max_span}
        wanted = self.asked | self._full
        if wanted == self.paused and is_reading:
            return
        owned = self._tracker.owned()
        wanted = wanted & owned if is_reading else set(owned)
        if pause := wanted - self.paused:
            client.pause([KafkaPartition(*tp) for tp in pause])
        if resume := self.paused - wanted:
            client.resume([KafkaPartition(*tp) for tp in resume])
        self.paused = wanted
        self.show()

    def forget(self, partitions: Collection[TopicPartition]) -> None:
        """The client does not pause these: they were assigned now, or are gone."""
        self.paused = self.paused.difference(partitions)
        self.show()

    def show(self) -> None:
        _PAUSED.labels(self._loop).set(len(self.paused))
