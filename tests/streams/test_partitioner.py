"""Every producer sends a key to the partition of `partition_for`."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import KafkaError, Message

from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic

# murmur2 of Apache Kafka's own Utils, from its unit tests (signed 32 bits).
JAVA_HASHES = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
USERS = [f"user-{number}".encode() for number in range(100)] + ["пользователь-1".encode(), "用户".encode(), b"x"]


@pytest.mark.parametrize(("key", "java_hash"), JAVA_HASHES.items())
@pytest.mark.parametrize("count", [1, 7, 12, 48, 2**31 - 1])
def test_a_partition_is_javas_positive_murmur2_modulo_the_count(key: bytes, java_hash: int, count: int) -> None:
    assert partition_for(key, count) == (java_hash & 0x7FFFFFFF) % count


def test_a_count_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="partition"):
        partition_for(b"user", 0)


def test_librdkafkas_producer_agrees(kafka_settings: KafkaSettings) -> None:
    producer = make_producer(kafka_settings, ProducerKind.DURABLE, "test")
    landed: dict[bytes, int | None] = {}

    def delivered(error: KafkaError | None, message: Message) -> None:
        assert error is None
        landed[message.key() or b""] = message.partition()

    for user in USERS:
        producer.produce(kafka_settings.topic(Topic.RETRIEVAL), b"", user, on_delivery=delivered)
    assert producer.flush(10) == 0
    assert landed == {user: partition_for(user, kafka_settings.partitions) for user in USERS}


def test_aiokafkas_producer_agrees(kafka_settings: KafkaSettings) -> None:
    async def produce() -> dict[bytes, int]:
        async with AIOKafkaProducer(bootstrap_servers=kafka_settings.bootstrap.split(",")) as producer:
            topic = kafka_settings.topic(Topic.PREINFER)
            return {user: (await producer.send_and_wait(topic, b"v", key=user)).partition for user in USERS}

    landed = asyncio.run(asyncio.wait_for(produce(), 30))
    assert landed == {user: partition_for(user, kafka_settings.partitions) for user in USERS}
