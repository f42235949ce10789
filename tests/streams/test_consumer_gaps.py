"""A consumer loop on logs whose offsets do not all hold a message, and on topics that are deleted and created again."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, Producer, TopicPartition

from relaygr.consumer.settings import ConsumerSettings
from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import ProducerKind, make_admin, make_assigned_consumer, make_producer
from relaygr.kafka.settings import KafkaSettings
from tests.streams.test_consumer_loop import Member, Stage, staged
from tests.waiting import until

pytestmark = pytest.mark.kafka

QUICK_STALL = ConsumerSettings(stall_s=0.3)


class Logs(Stage):
    """A stage that knows the ends of its logs and can delete messages and topics."""

    def __init__(self, kafka: KafkaSettings, broker: LocalBroker) -> None:
        super().__init__(kafka)
        self._broker = broker

    @property
    def places(self) -> list[TopicPartition]:
        return [TopicPartition(topic, part) for topic in self.topics for part in range(self.kafka.partitions)]

    def end(self) -> int:
        """The sum of the ends of all logs."""
        consumer = make_assigned_consumer(self.kafka, "test-ends")
        ends = sum(consumer.get_watermark_offsets(place, timeout=10)[1] for place in self.places)
        consumer.close()
        return ends

    def delete_messages(self) -> None:
        to_the_end = [TopicPartition(place.topic, place.partition, OFFSET_END) for place in self.places]
        admin = make_admin(self.kafka, "test-admin")
        for deleted in admin.delete_records(to_the_end).values():
            deleted.result(10)

    def delete_topics(self) -> None:
        self._broker.delete_topics(self.kafka)

    def create_topics(self) -> None:
        self._broker.create_topics(self.kafka)
        self.producer = make_producer(self.kafka, ProducerKind.DURABLE, "test")
        self.sent = 0


@pytest.fixture
def logs(real_broker: LocalBroker) -> Iterator[Logs]:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    kafka = real_broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=4))
    real_broker.create_topics(kafka)
    with _staged(Logs(kafka, real_broker)) as found:
        yield found
    real_broker.delete_topics(kafka)


@contextmanager
def _staged(found: Logs) -> Iterator[Logs]:
    with staged(found.kafka) as stage:
        stage.members = found.members
        yield found


def looks(member: Member) -> list[bool]:
    """Whether the member was stalled, after each look of its loop for unread messages."""
    health, seen = member.loop._health, []
    look = health._look_for_unread

    def watched(*arguments: Any) -> None:
        look(*arguments)
        seen.append(member.loop.status().stalled)

    health._look_for_unread = watched  # type: ignore[method-assign, assignment]
    return seen


def never_stalls(member: Member) -> bool:
    seen = looks(member)
    until(lambda: len(seen) >= 3, "the loop looked for unread messages")
    return not any(seen)


@pytest.mark.parametrize("waits", [True, False], ids=["the deletion was seen", "created again at once"])
def test_topics_that_are_made_anew_are_read_from_their_beginning_and_committed(logs: Logs, waits: bool) -> None:
    """The worker skipped what it took for finished, and committed the old offset beyond the end of the new log."""
    a = logs.join("a")
    sent = logs.send(10)
    until(lambda: len(a.work) == sent and logs.committed() == sent, "all done and committed")
    logs.delete_topics()
    if waits:
        until(lambda: not a.loop.status().partitions, "the group took the partitions")
    logs.create_topics()
    a.work.clear()
    assert (sent := logs.send(4)) < 10 * len(logs.places)
    until(lambda: len(set(a.work)) == sent, "every message of the new logs is read")
    until(lambda: logs.committed() == sent, "and committed, not the old offset")
    sent = logs.send(10)
    until(lambda: len(set(a.work)) == sent and logs.committed() == sent, "and what follows")
    assert max(Counter(a.work).values()) == 1


def test_a_new_log_that_is_longer_than_the_old_one_is_read_from_its_beginning_once_its_id_is_known(logs: Logs) -> None:
    a = logs.join("a")
    sent = logs.send(2)
    until(lambda: len(a.work) == sent and logs.committed() == sent, "all done and committed")
    logs.delete_topics()
    logs.create_topics()
    a.work.clear()
    sent = logs.send(10)
    a.loop.read_anew(logs.topics)
    until(lambda: len(set(a.work)) == sent and logs.committed() == sent, "every message is read and committed")


def _aborts(producer: Producer, send: Callable[[], None]) -> None:
    send()
    assert producer.flush(10) == 0
    producer.abort_transaction(10)


def _commits(producer: Producer, send: Callable[[], None]) -> None:
    send()
    producer.commit_transaction(10)


@pytest.mark.parametrize("ending", [_commits, _aborts])
def test_the_markers_of_transactions_are_neither_unread_nor_uncommitted(
    logs: Logs, ending: Callable[[Producer, Callable[[], None]], None]
) -> None:
    config = {"bootstrap.servers": logs.kafka.bootstrap, "transactional.id": uuid.uuid4().hex}
    producer = Producer(config)
    producer.init_transactions(30)
    a = logs.join("a", settings=QUICK_STALL)
    until(lambda: len(a.partitions) == 4, "assigned")

    def send() -> None:
        for place in logs.places:
            producer.produce(place.topic, b"x", partition=place.partition)

    for _ in range(3):
        producer.begin_transaction()
        ending(producer, send)
    until(lambda: len(a.work) == 3 * len(logs.places), "all delivered")
    assert logs.end() == 6 * len(logs.places)
    until(lambda: logs.committed() == logs.end(), "committed up to the end")
    assert never_stalls(a)


def test_messages_that_retention_deleted_beyond_the_commit_are_not_waited_for(logs: Logs) -> None:
    """The worker was not ready for ever, and no restart helped."""
    a = logs.join("a")
    sent = logs.send(3)
    until(lambda: len(a.work) == sent, "all done")
    a.stop()
    sent = logs.send(5)
    logs.delete_messages()
    b = logs.join("b", settings=QUICK_STALL)
    until(lambda: b.loop.status().assigned, "assigned")
    assert never_stalls(b)
    until(lambda: logs.committed() == sent, "the commit is at the end of the log")
    logs.send(1)
    until(lambda: len(b.work) == len(logs.places), "and new messages are read")
