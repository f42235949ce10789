"""Who holds a static member id: asked in a child process, which may end without harm."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer

from relaygr.consumer.membership import holder_of
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.topics import Topic

GROUP = "members"


@pytest.mark.kafka
def test_the_member_that_holds_the_id_is_named(real_broker: LocalBroker) -> None:
    settings = real_broker.settings(KafkaSettings(topic_prefix="test-membership", group_prefix="test-membership"))
    real_broker.create_topics(settings)
    consumer = Consumer({"bootstrap.servers": settings.bootstrap, "group.id": GROUP, "group.instance.id": "worker-00"})
    try:
        consumer.subscribe([settings.topic(Topic.RANKING)])
        while not consumer.assignment():
            consumer.poll(0.1)
        assert holder_of(settings, GROUP, "worker-00", 10.0) == consumer.memberid()
        assert holder_of(settings, GROUP, "worker-01", 10.0) is None
    finally:
        consumer.close()
        real_broker.delete_topics(settings)


@pytest.mark.slow
def test_without_an_answer_the_holder_is_unknown() -> None:
    assert holder_of(KafkaSettings(bootstrap="127.0.0.1:1"), GROUP, "worker-00", 0.5) is None
