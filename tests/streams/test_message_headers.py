"""Headers whose names are not UTF-8. Without `headers_of`, the second read of such headers crashed the process."""

from __future__ import annotations

from typing import cast

import pytest
import structlog
from confluent_kafka import Message, TopicPartition

from relaygr.kafka import message_headers
from relaygr.kafka.client_errors import LOG_INTERVAL_US, LimitedLog
from relaygr.kafka.clients import ProducerKind, make_assigned_consumer, make_producer
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.headers import DEAD_LETTER_REASON
from relaygr.schemas.topics import Topic
from tests.bad_header import write_bad_header
from tests.echo_worker import read_topic


class Unreadable:
    """A message with such headers, as confluent-kafka has it."""

    def headers(self) -> None:
        raise SystemError

    def set_headers(self, _: object) -> None: ...


def test_of_many_such_messages_few_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(message_headers, "_limited_log", LimitedLog(clock))
    with structlog.testing.capture_logs() as lines:
        for _ in range(400):
            assert headers_of(cast(Message, Unreadable())) is None
        clock.advance_us(LOG_INTERVAL_US)
        headers_of(cast(Message, Unreadable()))
    assert [line["left_out"] for line in lines] == [0, 399]


def test_a_header_name_that_is_not_utf8_leaves_a_message_without_headers(kafka_settings: KafkaSettings) -> None:
    topic = kafka_settings.topic(Topic.RANKING)
    producer = make_producer(kafka_settings, ProducerKind.DURABLE, "writer")
    producer.produce(topic, b"good", b"u", partition=0, headers=[("a", b"1")])
    assert producer.flush(10) == 0
    write_bad_header(kafka_settings, topic, 0, b"x")
    consumer = make_assigned_consumer(kafka_settings, "reader")
    consumer.assign([TopicPartition(topic, 0, 0)])
    good, message = consumer.poll(10), consumer.poll(10)
    assert good is not None and message is not None
    # The interpreter specializes a call that has run often.
    for _ in range(1000):
        assert list(headers_of(good) or ()) == [("a", b"1")]
    assert (headers_of(message), message.value()) == (None, b"x")
    assert list(headers_of(message) or ()) == []
    writer = KafkaSession(kafka_settings, "writer").dead_letters
    writer.write(message, "undecodable", "its headers cannot be read")
    assert writer.flush(10) == 0
    (letter,) = read_topic(kafka_settings, Topic.DEAD_LETTERS, 1)
    assert letter.value() == b"x"
    assert dict(letter.headers() or [])[DEAD_LETTER_REASON] == b"undecodable"
    consumer.close()
