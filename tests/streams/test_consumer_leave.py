"""A static member that has ended leaves its group at once, on a real Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer

from relaygr.consumer.leave import leave
from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import make_group_consumer
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from tests.waiting import until
from tests.worlds.relay import own_topics

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

SESSION_S = 30.0
"""Longer than each wait of these tests."""


@pytest.fixture(scope="module")
def kafka(real_broker: LocalBroker) -> Iterator[KafkaSettings]:
    with own_topics(real_broker) as settings:
        yield settings.model_copy(update={"session_timeout_ms": int(SESSION_S * 1000)})


@contextmanager
def member(kafka: KafkaSettings, instance_id: str) -> Iterator[Consumer]:
    consumer = make_group_consumer(kafka, kafka.workers_group, instance_id, instance_id)
    consumer.subscribe([kafka.topic(Topic.RANKING)])
    try:
        yield consumer
    finally:
        consumer.close()


def await_partitions(count: int, *members: Consumer, timeout_s: float = 20.0) -> None:
    """Waits until each member owns this many partitions."""
    until(
        lambda: all(len(member.assignment()) == count for member in members),
        f"each owns {count} partitions",
        timeout_s,
        meanwhile=lambda: [member.poll(0.05) for member in members],
    )


def test_a_member_that_has_closed_leaves_and_the_others_own_its_partitions_at_once(kafka: KafkaSettings) -> None:
    with member(kafka, "worker-00") as stays:
        with member(kafka, "worker-01") as goes:
            await_partitions(kafka.partitions // 2, stays, goes)
        for _ in range(20):
            stays.poll(0.05)
        assert len(stays.assignment()) == kafka.partitions // 2, "a closed static member keeps its partitions"
        assert leave(kafka, kafka.workers_group, "worker-01")
        await_partitions(kafka.partitions, stays)
        assert not leave(kafka, kafka.workers_group, "worker-01")
        stays.poll(0.05)
        assert len(stays.assignment()) == kafka.partitions
    assert leave(kafka, kafka.workers_group, "worker-00")


def test_a_group_that_does_not_exist_has_no_member(kafka: KafkaSettings) -> None:
    assert not leave(kafka, f"{kafka.workers_group}.none", "worker-00")


def test_a_broker_that_does_not_answer_is_told_with_what_happens_next(kafka: KafkaSettings) -> None:
    away = kafka.model_copy(update={"bootstrap": "127.0.0.1:1"})
    with pytest.raises(RelayError, match=r"worker-00 did not leave .*Its partitions move .* 30000 ms after"):
        leave(away, kafka.workers_group, "worker-00", timeout_s=2.0)
