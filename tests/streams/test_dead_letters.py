"""Dead letters contain the raw message, the reason and the origin."""

from __future__ import annotations

from hashlib import blake2b

import psutil
import pytest
import structlog
from confluent_kafka import Message, TopicPartition
from prometheus_client import REGISTRY

from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import make_assigned_consumer
from relaygr.kafka.dead_letters import (
    KEPT_HEADERS,
    KEPT_HEADERS_BYTES,
    LARGEST_KEY_BYTES,
    LARGEST_RECORD_BYTES,
    dead_letter_headers,
    read_dead_letters,
)
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.headers import (
    DEAD_LETTER_DETAIL,
    DEAD_LETTER_REASON,
    DEAD_LETTERED_AT_US,
    MAX_HEADER_BYTES,
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    ORIGIN_TOPIC,
    ORIGIN_VALUE_BYTES,
    ORIGIN_VALUE_DIGEST,
)
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import CATALOGUE, Topic
from tests.worlds.relay import own_topics

NOW_US = 1_700_000_000_000_000


@pytest.fixture(scope="module")
def broker(embedded_broker: LocalBroker) -> LocalBroker:
    """The tests of whole relays write dead letters to a real Kafka."""
    return embedded_broker


def message(
    value: bytes | None = b"\xc1 not a message",
    key: bytes | None = b"user-1",
    headers: list[tuple[str, str | bytes | None]] | None = None,
    topic: str = "relaygr.ranking",
) -> Message:
    return Message(topic=topic, partition=7, offset=1234, key=key, value=value, headers=headers)


def read_back(kafka: KafkaSettings, key: bytes) -> Message:
    consumer = make_assigned_consumer(kafka, "test")
    consumer.assign([TopicPartition(kafka.topic(Topic.DEAD_LETTERS), partition_for(key, kafka.partitions), 0)])
    found = consumer.poll(20)
    consumer.close()
    assert found is not None
    assert found.error() is None
    return found


def counted(topic: str, reason: str) -> float:
    return REGISTRY.get_sample_value("relaygr_dead_letters_total", {"topic": topic, "reason": reason}) or 0.0


def test_a_writer_without_dead_letters_has_no_threads() -> None:
    """A worker had two such producers, with three threads each."""
    before = psutil.Process().num_threads()
    writer = KafkaSession(KafkaSettings(bootstrap="127.0.0.1:1"), "worker-1").dead_letters
    assert (writer.poll(), writer.flush(1)) == (0, 0)
    assert psutil.Process().num_threads() <= before


def test_a_dead_letter_is_the_raw_message_with_its_origin(kafka_settings: KafkaSettings) -> None:
    writer = KafkaSession(kafka_settings, "worker-1", clock=ManualClock(wall_us=NOW_US)).dead_letters
    topic = kafka_settings.topic(Topic.RANKING)
    done: list[bool] = []
    writer.write(message(headers=[("trace", b"1")], topic=topic), "malformed", "the body is no map", done.append)
    assert writer.flush(20) == 0
    assert done == [True]
    assert counted(topic, "malformed") == 1
    found = read_back(kafka_settings, b"user-1")
    assert (found.key(), found.value()) == (b"user-1", b"\xc1 not a message")
    assert found.headers() == [
        ("trace", b"1"),
        (DEAD_LETTER_REASON, b"malformed"),
        (DEAD_LETTER_DETAIL, b"the body is no map"),
        (ORIGIN_TOPIC, topic.encode()),
        (ORIGIN_PARTITION, b"7"),
        (ORIGIN_OFFSET, b"1234"),
        (DEAD_LETTERED_AT_US, str(NOW_US).encode()),
    ]


def test_dead_letters_of_one_message_that_came_twice_name_one_origin(kafka_settings: KafkaSettings) -> None:
    """As a consumer writes them that ended before its commit."""
    topic = kafka_settings.topic(Topic.RANKING)
    for worker_id in ("worker-1", "worker-2"):
        writer = KafkaSession(kafka_settings, worker_id).dead_letters
        writer.write(message(topic=topic), "malformed", "the body is no map")
        assert writer.flush(20) == 0
    letters, kept = read_dead_letters(kafka_settings, 10)
    assert kept == 2 and [(each.topic, each.partition, each.offset) for each in letters] == [(topic, 7, 1234)] * 2


def test_without_the_setting_a_dead_letter_holds_coordinates_and_a_digest_and_no_byte_of_the_message(
    kafka_settings: KafkaSettings,
) -> None:
    assert not KafkaSettings().dead_letter_bodies
    kafka = kafka_settings.model_copy(update={"dead_letter_bodies": False})
    writer = KafkaSession(kafka, "worker-1", clock=ManualClock(wall_us=NOW_US)).dead_letters
    topic, value = kafka.topic(Topic.RANKING), b"secret behaviours"
    writer.write(message(value, b"secret-user", [("trace", b"secret trace")], topic), "malformed", "the body is no map")
    assert writer.flush(20) == 0
    consumer = make_assigned_consumer(kafka, "test")
    letters = kafka.topic(Topic.DEAD_LETTERS)
    consumer.assign([TopicPartition(letters, partition, 0) for partition in range(kafka.partitions)])
    found = consumer.poll(20)
    consumer.close()
    assert found is not None
    assert (found.key(), found.value()) == (None, None)
    assert found.headers() == [
        (ORIGIN_VALUE_DIGEST, blake2b(value, digest_size=16).hexdigest().encode()),
        (ORIGIN_VALUE_BYTES, b"17"),
        (DEAD_LETTER_REASON, b"malformed"),
        (DEAD_LETTER_DETAIL, b"the body is no map"),
        (ORIGIN_TOPIC, topic.encode()),
        (ORIGIN_PARTITION, b"7"),
        (ORIGIN_OFFSET, b"1234"),
        (DEAD_LETTERED_AT_US, str(NOW_US).encode()),
    ]


def test_a_message_too_large_for_the_topic_is_cut_and_says_so(kafka_settings: KafkaSettings) -> None:
    writer = KafkaSession(kafka_settings, "worker-1").dead_letters
    done: list[bool] = []
    headers: list[tuple[str, str | bytes | None]] = [(f"h{number}", b"x" * 400) for number in range(KEPT_HEADERS)]
    size = CATALOGUE[Topic.DEAD_LETTERS].max_message_bytes + 1
    writer.write(message(bytes(size), headers=headers), "too_large", "é" * 400, done.append)
    assert writer.flush(25) == 0
    assert done == [True]
    found = read_back(kafka_settings, b"user-1")
    assert found.value() == bytes(LARGEST_RECORD_BYTES - len(b"user-1"))
    detail = dict(found.headers() or [])[DEAD_LETTER_DETAIL]
    assert isinstance(detail, bytes)
    assert detail.decode().startswith(f"value cut from {size} to {LARGEST_RECORD_BYTES - 6} bytes; é")


@pytest.mark.kafka
def test_a_dead_letter_that_is_too_large_for_the_topic_of_this_cluster_is_written_without_the_message(
    real_broker: LocalBroker,
) -> None:
    """It was written again each second, for ever, and its message was never finished."""
    limits = {Topic.DEAD_LETTERS: {"max.message.bytes": 20_000}}
    with own_topics(real_broker, topic_settings=limits) as kafka:
        writer = KafkaSession(kafka, "worker-1").dead_letters
        done: list[bool] = []
        writer.write(message(bytes(50_000)), "malformed", "the body is no map", done.append)
        assert writer.flush(20) == 0
        (letter,), _ = read_dead_letters(kafka, 10)
    assert done == [True]
    assert (letter.key, letter.offset, letter.value_bytes) == (None, 1234, 50_000)
    assert letter.detail == "the topic refuses the message as too large; the body is no map"


def test_a_key_too_long_is_cut_and_says_so(kafka_settings: KafkaSettings) -> None:
    writer = KafkaSession(kafka_settings, "worker-1").dead_letters
    writer.write(message(key=b"k" * (LARGEST_KEY_BYTES + 1)), "malformed", "")
    assert writer.flush(20) == 0
    found = read_back(kafka_settings, b"k" * LARGEST_KEY_BYTES)
    assert found.key() == b"k" * LARGEST_KEY_BYTES
    detail = dict(found.headers() or [])[DEAD_LETTER_DETAIL]
    assert f"key cut from {LARGEST_KEY_BYTES + 1}".encode() in (detail or b"")  # type: ignore[operator]


def test_a_message_without_key_and_value_is_kept_too(kafka_settings: KafkaSettings) -> None:
    writer = KafkaSession(kafka_settings, "worker-1").dead_letters
    done: list[bool] = []
    writer.write(message(None, None), "empty", "no body", done.append)
    assert writer.flush(20) == 0
    assert done == [True]


def test_a_dead_letter_that_can_not_be_written_says_so_and_is_not_counted() -> None:
    writer = KafkaSession(KafkaSettings(bootstrap="127.0.0.1:1", dead_letter_bodies=True), "worker-1").dead_letters
    done: list[bool] = []
    with structlog.testing.capture_logs() as lines:
        # Fills the producer's queue, which is not drained.
        for _ in range(20):
            writer.write(message(bytes(4 * 1024 * 1024), topic="nowhere"), "malformed", "", done.append)
        writer.write(message(bytes(4 * 1024 * 1024), topic="nowhere"), "too_large", "", done.append)
    assert len(done) > 4
    assert not any(done)
    assert counted("nowhere", "malformed") == 0
    said = [line["reason"] for line in lines if line["event"] == "a dead letter was not written"]
    # Again after ten seconds, if that takes so long.
    assert set(said) == {"malformed", "too_large"} and len(said) < len(done)


def test_original_headers_are_kept_within_bounds() -> None:
    many: list[tuple[str, str | bytes | None]] = [(f"h{number}", b"") for number in range(KEPT_HEADERS + 5)]
    assert [name for name, _ in dead_letter_headers(message(headers=many), "r", "d", 0)][
        KEPT_HEADERS
    ] == DEAD_LETTER_REASON
    large: list[tuple[str, str | bytes | None]] = [("a", b"1"), ("b", bytes(KEPT_HEADERS_BYTES)), ("c", b"3")]
    assert dead_letter_headers(message(headers=large), "r", "d", 0)[1][0] == DEAD_LETTER_REASON


def test_the_reason_of_an_earlier_dead_letter_is_replaced() -> None:
    earlier: list[tuple[str, str | bytes | None]] = [(DEAD_LETTER_REASON, b"old"), (ORIGIN_OFFSET, b"1")]
    headers = dead_letter_headers(message(headers=earlier), "new", "d", 0)
    assert [value for name, value in headers if name == DEAD_LETTER_REASON] == [b"new"]
    assert [value for name, value in headers if name == ORIGIN_OFFSET] == [b"1234"]


@pytest.mark.parametrize("character", ["a", "é", "用", "🙂"])
def test_a_long_detail_is_cut_between_characters(character: str) -> None:
    detail = dict(dead_letter_headers(message(), "r", character * 1000, 0))[DEAD_LETTER_DETAIL]
    assert MAX_HEADER_BYTES - 4 < len(detail) <= MAX_HEADER_BYTES
    assert set(detail.decode()) == {character}
