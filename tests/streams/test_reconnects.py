"""Clients whose port accepts connections and closes them: each waits longer from failure to failure."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from confluent_kafka import TopicPartition
from prometheus_client import CollectorRegistry

from relaygr.client import RelayClient
from relaygr.devbroker.embedded import MockCluster
from relaygr.kafka.clients import ProducerKind, make_assigned_consumer, make_group_consumer, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.topics import Topic
from tests.worlds.closing_port import ClosingPort

FIRST_S, COUNTED_S = 3.0, 3.0


def lost(serve: Callable[[KafkaSettings], Callable[[], object]]) -> int:
    """The connections of a client in `COUNTED_S`, some seconds after its broker was lost. `serve` gives its poll."""
    cluster = MockCluster()
    kafka = KafkaSettings(bootstrap=cluster.bootstrap, partitions=1, fetch_wait_max_ms=5)
    cluster.create_topics({kafka.topic(topic): 1 for topic in Topic})
    poll = serve(kafka)
    cluster.close()
    with ClosingPort(int(kafka.bootstrap.rpartition(":")[2])) as port:
        poll_for(FIRST_S, poll)
        before = port.closed
        assert before > 0
        poll_for(COUNTED_S, poll)
        return port.closed - before


def poll_for(seconds: float, poll: Callable[[], object]) -> None:
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        poll()
        time.sleep(0.01)


@pytest.mark.slow
def test_a_gateway_backs_off_from_a_port_that_accepts_and_closes() -> None:
    """It made 190 connections a second, for ever."""
    clients: list[RelayClient] = []

    def serve(kafka: KafkaSettings) -> Callable[[], object]:
        client = RelayClient(kafka, "gw-0", registry=CollectorRegistry())
        client.start()
        clients.append(client)
        return lambda: None

    count = lost(serve)
    clients[0].close(0.1)
    assert count < 50 * COUNTED_S


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["durable", "assigned", "group"])
def test_each_kind_of_client_backs_off(kind: str) -> None:
    """Each made 37 to 78 connections a second, for ever."""

    def serve(kafka: KafkaSettings) -> Callable[[], object]:
        if kind == "durable":
            producer = make_producer(kafka, ProducerKind.DURABLE, "test")
            producer.produce(kafka.topic(Topic.RETRIEVAL), b"v")
            producer.flush(10)
            return lambda: producer.poll(0)
        if kind == "assigned":
            consumer = make_assigned_consumer(kafka, "test")
            consumer.assign([TopicPartition(kafka.topic(Topic.RANKING), 0, 0)])
        else:
            consumer = make_group_consumer(kafka, "group", "test")
            consumer.subscribe([kafka.topic(Topic.RANKING)])
        consumer.poll(1)
        return lambda: consumer.poll(0)

    assert lost(serve) < (30 if kind == "group" else 8) * COUNTED_S
