"""librdkafka's mock cluster with errors on demand."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from confluent_kafka import TopicPartition

from relaygr.devbroker.embedded import FETCH_WAIT_MAX_MS, SESSION_TIMEOUT_MS, MockCluster
from relaygr.kafka.clients import make_assigned_consumer
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.topics import Topic

PRODUCE = 0
PARTITIONS = 2


class FaultyCluster:
    """A cluster of one broker that answers as a test tells it."""

    def __init__(self, cluster: MockCluster, kafka: KafkaSettings) -> None:
        self.kafka = kafka
        self._cluster = cluster
        self._push = cluster._library.rd_kafka_mock_push_request_errors_array
        self._push.argtypes = [ctypes.c_void_p, ctypes.c_int16, ctypes.c_size_t, ctypes.c_void_p]
        self._push.restype = None
        self._of_topic = cluster._library.rd_kafka_mock_topic_set_error
        self._of_topic.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
        self._of_topic.restype = None

    def answer_produce(self, *codes: int) -> None:
        """The errors of the next produce requests; 0 is none."""
        self._push(self._cluster._cluster, PRODUCE, len(codes), (ctypes.c_int * len(codes))(*codes))

    def set_topic_error(self, topic: Topic, code: int) -> None:
        """The error of the topic in all metadata from now on; 0 is none."""
        self._of_topic(self._cluster._cluster, self.kafka.topic(topic).encode(), code)

    def values(self, topic: Topic, least: int) -> list[bytes | None]:
        """All values on a topic, once there are `least`; those of each partition in order.

        A batch that was answered with an error may have been stored, so a value can be there twice.
        """
        consumer = make_assigned_consumer(self.kafka, "test")
        count = self.kafka.catalogue[topic].partition_count(PARTITIONS)
        places = [TopicPartition(self.kafka.topic(topic), partition, 0) for partition in range(count)]
        consumer.assign(places)
        found: list[bytes | None] = []
        while len(found) < least or len(found) < sum(consumer.get_watermark_offsets(place)[1] for place in places):
            message = consumer.poll(20)
            assert message is not None, f"{least} messages were awaited, and these came: {found}"
            assert message.error() is None
            found.append(message.value())
        consumer.close()
        return found


@contextlib.contextmanager
def faulty_cluster() -> Iterator[FaultyCluster]:
    """A cluster with every topic."""
    cluster = MockCluster()
    try:
        kafka = KafkaSettings(
            bootstrap=cluster.bootstrap,
            partitions=PARTITIONS,
            fetch_wait_max_ms=FETCH_WAIT_MAX_MS,
            session_timeout_ms=SESSION_TIMEOUT_MS,
        )
        specs = kafka.catalogue.items()
        cluster.create_topics({kafka.topic(topic): spec.partition_count(PARTITIONS) for topic, spec in specs})
        yield FaultyCluster(cluster, kafka)
    finally:
        cluster.close()
