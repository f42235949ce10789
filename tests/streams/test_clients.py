"""Client factories: their settings hold on real brokers, and an error names the reason why a cluster is not reached."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer, TopicPartition
from pydantic import SecretStr

from relaygr.kafka.client_errors import LOG_INTERVAL_US, ClientErrors, LimitedLog
from relaygr.kafka.clients import (
    ProducerKind,
    make_admin,
    make_assigned_consumer,
    make_group_consumer,
    make_producer,
    require_broker,
)
from relaygr.kafka.settings import Affinity, KafkaSettings, SaslMechanism, Security, SecurityProtocol
from relaygr.runtime.clock import ManualClock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from tests.waiting import until


@contextmanager
def closed_port() -> Iterator[int]:
    """A port that refuses connections: bound, so that no other process can listen on it, but not listening."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        yield door.getsockname()[1]


@contextmanager
def server(answer: bytes | None) -> Iterator[int]:
    """A server that accepts connections, sends `answer` and closes; None: it sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(0.1)
        over = threading.Event()
        open_doors: list[socket.socket] = []

        def serve() -> None:
            while not over.is_set():
                try:
                    connection, _ = door.accept()
                except TimeoutError:
                    continue
                if answer is None:
                    open_doors.append(connection)
                    continue
                with connection, suppress(OSError):
                    connection.recv(1000)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield door.getsockname()[1]
        finally:
            over.set()
            thread.join()
            for connection in open_doors:
                connection.close()


def refusal(kafka: KafkaSettings) -> str:
    with pytest.raises(RelayError) as error:
        require_broker(kafka)
    return str(error.value)


@pytest.mark.slow
def test_a_closed_port_is_reported_with_address_and_cause() -> None:
    with closed_port() as port:
        text = refusal(KafkaSettings(bootstrap=f"127.0.0.1:{port}"))
    assert f"Kafka at 127.0.0.1:{port} cannot be reached: Connection refused" in text
    assert "`bootstrap`" in text
    assert KafkaSettings().connect_timeout_s < 5, "users are told within five seconds"


@pytest.mark.slow
def test_a_port_that_says_nothing_is_given_up_at_the_connect_timeout() -> None:
    with server(answer=None) as port:
        text = refusal(KafkaSettings(bootstrap=f"127.0.0.1:{port}", connect_timeout_s=1.0))
    assert "no answer within" in text


@pytest.mark.slow
def test_a_port_that_is_not_kafkas_says_so() -> None:
    with server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        text = refusal(KafkaSettings(bootstrap=f"127.0.0.1:{port}", connect_timeout_s=1.0))
    assert "does not speak Kafka's protocol, or speaks it inside TLS" in text
    assert "`security`: its protocol is PLAINTEXT" in text


@pytest.mark.slow
def test_plaintext_to_a_tls_port_says_that_security_is_wrong() -> None:
    alert = b"\x15\x03\x01\x00\x02\x02\x46"
    with server(alert) as port:
        text = refusal(KafkaSettings(bootstrap=f"127.0.0.1:{port}", connect_timeout_s=1.0))
    assert "`security`: its protocol is PLAINTEXT" in text


@pytest.mark.slow
def test_tls_to_a_plaintext_broker_is_told_with_its_cause(broker_port: int) -> None:
    kafka = KafkaSettings(
        bootstrap=f"127.0.0.1:{broker_port}",
        connect_timeout_s=2,
        security=Security(protocol=SecurityProtocol.SSL),
    )
    text = refusal(kafka)
    assert "SSL" in text
    assert "`security`: its protocol is SSL" in text


@pytest.mark.slow
def test_a_connection_that_is_cut_under_tls_says_that_security_may_be_wrong() -> None:
    """A plaintext broker's refusal may show as an SSL error or as a connection reset."""
    kafka = KafkaSettings(
        bootstrap="127.0.0.1:9", connect_timeout_s=0.3, security=Security(protocol=SecurityProtocol.SSL)
    )
    assert "`security`: its protocol is SSL" in refusal(kafka)


@pytest.mark.slow
def test_sasl_to_a_broker_without_it_says_that_security_is_wrong(broker_port: int) -> None:
    kafka = KafkaSettings(
        bootstrap=f"127.0.0.1:{broker_port}",
        connect_timeout_s=300,  # Longer than a test may take: it is told at once.
        security=Security(
            protocol=SecurityProtocol.SASL_PLAINTEXT,
            sasl_mechanism=SaslMechanism.PLAIN,
            sasl_username="gateway",
            sasl_password=SecretStr("secret"),
        ),
    )
    text = refusal(kafka)
    assert "SASL" in text
    assert "`security`" in text
    assert "secret" not in text


@pytest.fixture
def broker_port(kafka_settings: KafkaSettings) -> int:
    return int(kafka_settings.bootstrap.rpartition(":")[2])


def test_a_broker_that_is_there_answers_with_its_metadata(kafka_settings: KafkaSettings) -> None:
    assert kafka_settings.topic(Topic.HISTORY) in require_broker(kafka_settings).topics


@pytest.mark.slow
@pytest.mark.parametrize("kind", ProducerKind)
def test_each_producer_delivers_the_largest_message_with_headers(
    kafka_settings: KafkaSettings, kind: ProducerKind
) -> None:
    topic = kafka_settings.topic(Topic.RANKING)
    # The first message also includes the time for metadata and for the warm-up of the broker.
    producer = make_producer(kafka_settings, kind, "test", options={"message.timeout.ms": 20_000})
    reports: list[KafkaError | None] = []
    value = bytes(4 * 1024 * 1024)
    producer.produce(topic, value, b"user", 3, headers=[("a", b"\xff\x00")], on_delivery=lambda e, _: reports.append(e))
    assert producer.flush(25) == 0
    assert reports == [None]
    consumer = make_assigned_consumer(kafka_settings, "test")
    consumer.assign([TopicPartition(topic, 3, 0)])
    message = consumer.poll(20)
    consumer.close()
    assert message is not None
    assert message.error() is None
    assert (message.key(), message.headers()) == (b"user", [("a", b"\xff\x00")])
    assert message.value() == value


def test_a_tombstone_arrives_as_one(kafka_settings: KafkaSettings) -> None:
    topic = kafka_settings.topic(Topic.HISTORY)
    producer = make_producer(kafka_settings, ProducerKind.DURABLE, "test")
    producer.produce(topic, None, b"user", 0)
    assert producer.flush(20) == 0
    consumer = make_assigned_consumer(kafka_settings, "test")
    consumer.assign([TopicPartition(topic, 0, 0)])
    message = consumer.poll(20)
    consumer.close()
    # A message without a value is false: compare with None.
    assert message is not None
    assert (message.key(), message.value()) == (b"user", None)


@pytest.mark.kafka
def test_the_consumer_protocol_is_a_setting(real_broker: Any) -> None:
    kafka = real_broker.settings(
        KafkaSettings(
            topic_prefix="test-848", group_prefix="test-848", partitions=2, affinity=Affinity.CONSUMER_PROTOCOL
        )
    )
    real_broker.create_topics(kafka)
    consumer = make_group_consumer(kafka, kafka.workers_group, "w-0", instance_id="w-0")
    consumer.subscribe([kafka.topic(Topic.RANKING), kafka.topic(Topic.PREINFER)])
    until(lambda: len(consumer.assignment()) == 4, "four are assigned", meanwhile=lambda: consumer.poll(0.05))
    consumer.close()
    real_broker.delete_topics(kafka)


def test_an_assigned_consumer_joins_no_group(kafka_settings: KafkaSettings) -> None:
    topic = kafka_settings.topic(Topic.RESULTS)
    consumer = make_assigned_consumer(kafka_settings, "test")
    consumer.assign([TopicPartition(topic, 0, 0)])
    consumer.poll(0.2)
    assert consumer.memberid() in (None, "")
    consumer.close()


@pytest.mark.parametrize("name", ["partition.assignment.strategy", "group.remote.assignor"])
def test_an_assignor_that_splits_owners_is_refused(name: str) -> None:
    with pytest.raises(RelayError, match="leave it at range"):
        make_group_consumer(KafkaSettings(), "group", "test", options={name: "cooperative-sticky"})


def test_one_topic_makes_the_workers_sticky_and_no_other_group() -> None:
    kafka = KafkaSettings(affinity=Affinity.ONE_TOPIC)
    name = "partition.assignment.strategy"
    make_group_consumer(kafka, kafka.workers_group, "w", options={name: "cooperative-sticky"}).close()
    make_group_consumer(kafka, kafka.trigger_group, "t", options={name: "range"}).close()
    with pytest.raises(RelayError, match="leave it at cooperative-sticky"):
        make_group_consumer(kafka, kafka.workers_group, "w", options={name: "range"})


def test_a_session_may_be_longer_than_a_rebalance_waits_by_default() -> None:
    with closed_port() as port:
        kafka = KafkaSettings(bootstrap=f"127.0.0.1:{port}", session_timeout_ms=45_000)
        make_group_consumer(kafka, "group", "test").close()


def test_building_a_client_needs_no_broker() -> None:
    with closed_port() as port:
        kafka = KafkaSettings(bootstrap=f"127.0.0.1:{port}")
        assert isinstance(make_producer(kafka, ProducerKind.LATENCY, "test"), Producer)
        make_group_consumer(kafka, "group", "test").close()
        make_assigned_consumer(kafka, "test").close()
        make_admin(kafka, "test")


def test_a_clients_errors_reach_the_caller_and_are_logged_at_a_bearable_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[dict[str, Any]] = []

    class Log:
        def warning(self, event: str, **values: Any) -> None:
            lines.append(values)

    monkeypatch.setattr("relaygr.kafka.client_errors._log", Log())
    clock = ManualClock()
    seen: list[KafkaError] = []
    errors = ClientErrors("worker-1", seen.append, LimitedLog(clock))
    refused = KafkaError(KafkaError._TRANSPORT, "1.2.3.4:9/1: Connect to ipv4#1.2.3.4:9 failed: Connection refused")
    for _ in range(40):
        errors(refused)
    errors(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    clock.advance_us(LOG_INTERVAL_US)
    errors(refused)
    assert len(seen) == 42
    assert [(line["cause"], line["left_out"]) for line in lines] == [
        ("Connection refused", 0),
        ("Connection refused", 39),
    ]
    assert errors.cause == "Connection refused"
