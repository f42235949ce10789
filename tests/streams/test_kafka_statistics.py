"""What librdkafka counts becomes metrics: bounded, and of real clients."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from relaygr.kafka.clients import ProducerKind, make_assigned_consumer, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.kafka.statistics import MAX_BROKERS, MAX_CLIENTS, KafkaStatistics, figures_of, kafka_statistics
from relaygr.schemas.topics import Topic
from tests.waiting import until


def report(client: str, brokers: int = 1, *, type: str = "producer", **partition: int) -> dict[str, Any]:
    counts = {"txmsgs": 0, "msgs": 0, "msgq_cnt": 0, "xmit_msgq_cnt": 0} | partition
    connection = {
        "source": "learned", "rtt": {"p50": 2_000, "p99": 30_000}, "throttle": {"avg": 5}, "waitresp_cnt": 1,
        "outbuf_cnt": 2, "req_timeouts": 3, "disconnects": 4,
    }  # fmt: skip
    known = {f"b{number}": connection | {"nodeid": number} for number in range(brokers)}
    known |= {"bootstrap": connection | {"nodeid": -1, "source": "configured"}}
    known |= {"GroupCoordinator": connection | {"nodeid": 0, "source": "logical"}}
    topics = {"t": {"partitions": {"0": counts}}}
    return {"client_id": client, "type": type, "msg_cnt": 7, "msg_size": 700, "brokers": known, "topics": topics}


def test_messages_sent_again_are_those_sent_more_often_than_they_were_given() -> None:
    assert figures_of(report("a", txmsgs=12, msgs=10)).sent_again == 2
    assert figures_of(report("a", txmsgs=8, msgs=10, msgq_cnt=1, xmit_msgq_cnt=1)).sent_again == 0


def test_a_consumer_sends_nothing_again() -> None:
    assert figures_of(report("a", type="consumer", txmsgs=0, msgs=10)).sent_again == 0


def test_a_broker_is_counted_once_by_its_number_and_so_many_at_most() -> None:
    (broker,) = figures_of(report("a")).brokers
    assert (broker.broker, broker.rtt_p99_s, broker.throttle_s, broker.waiting_requests) == ("0", 0.03, 0.005, 3)
    assert len(figures_of(report("a", brokers=MAX_BROKERS + 9)).brokers) == MAX_BROKERS


def test_the_client_that_has_been_silent_for_longest_is_forgotten() -> None:
    registry = CollectorRegistry()
    statistics = KafkaStatistics(registry)
    for number in range(MAX_CLIENTS):
        statistics.read(json.dumps(report(f"c{number}")))
    statistics.read(json.dumps(report("c0")))
    statistics.read(json.dumps(report("new")))

    def messages(client: str) -> float | None:
        return registry.get_sample_value("relaygr_kafka_queue_messages", {"client": client, "type": "producer"})

    assert [messages(client) for client in ("c0", "c1", "new")] == [7, None, 7]


def test_a_report_of_another_form_is_dropped() -> None:
    statistics = KafkaStatistics(CollectorRegistry())
    statistics.read("no JSON")
    statistics.read('{"client_id": "a"}')
    assert not next(iter(statistics.collect())).samples


def test_an_interval_of_zero_asks_for_no_reports() -> None:
    assert kafka_statistics(CollectorRegistry()).options(0) == {}


@pytest.mark.slow
def test_a_producer_and_a_consumer_report_their_broker(kafka_settings: KafkaSettings) -> None:
    registry = CollectorRegistry()
    options = kafka_statistics(registry).options(50)
    client_id = f"statistics-{uuid.uuid4().hex[:6]}"
    producer = make_producer(kafka_settings, ProducerKind.LATENCY, client_id, options=options)
    consumer = make_assigned_consumer(kafka_settings, client_id, options=options)
    producer.produce(kafka_settings.topic(Topic.RANKING), b"value", b"key")
    assert producer.flush(30) == 0

    def reported() -> bool:
        producer.poll(0.05)
        consumer.poll(0.05)
        samples = [each for family in registry.collect() for each in family.samples]
        seen = {each.labels["type"] for each in samples if each.name == "relaygr_kafka_broker_rtt_seconds"}
        return seen == {"producer", "consumer"}

    consumer.list_topics(timeout=30)
    until(reported, "both clients have reported", 30)
    consumer.close()
