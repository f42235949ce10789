"""What librdkafka counts becomes metrics: bounded, and of real clients."""

from __future__ import annotations

import json
import subprocess
import uuid
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest

from relaygr.devbroker import available_brokers
from relaygr.kafka.clients import ProducerKind, make_assigned_consumer, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.kafka.statistics import MAX_BROKERS, MAX_CLIENTS, KafkaStatistics, figures_of, kafka_statistics
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.topics import Topic
from tests.promised import unavailable
from tests.waiting import until


def report(client: str, brokers: int = 1, *, type: str = "producer", **partition: int) -> dict[str, Any]:
    counts = {"txmsgs": 0, "msgs": 0, "msgq_cnt": 0, "xmit_msgq_cnt": 0} | partition
    connection = {
        "source": "learned", "rtt": {"p50": 2_000, "p99": 30_000}, "throttle": {"max": 0},
        "req_timeouts": 3, "disconnects": 4,
    }  # fmt: skip
    known: dict[str, dict[str, Any]] = {f"b{number}": connection | {"nodeid": number} for number in range(brokers)}
    known |= {"bootstrap": connection | {"nodeid": -1, "source": "configured"}}
    known |= {"GroupCoordinator": connection | {"nodeid": 0, "source": "logical"}}
    topics = {"t": {"partitions": {"0": counts}}}
    return {"client_id": client, "type": type, "msg_cnt": 7, "brokers": known, "topics": topics}


def test_messages_sent_again_are_those_sent_more_often_than_they_were_given() -> None:
    assert figures_of(report("a", txmsgs=12, msgs=10)).sent_again == 2
    assert figures_of(report("a", txmsgs=8, msgs=10, msgq_cnt=1, xmit_msgq_cnt=1)).sent_again == 0


def test_a_consumer_sends_nothing_again() -> None:
    assert figures_of(report("a", type="consumer", txmsgs=0, msgs=10)).sent_again == 0


def test_a_broker_is_counted_once_by_its_number_and_so_many_at_most() -> None:
    (broker,) = figures_of(report("a")).brokers
    assert (broker.broker, broker.rtt_p99_s, broker.timeouts, broker.disconnects) == ("0", 0.03, 3, 4)
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


def test_a_client_that_is_closed_has_no_figures_after_some_reports() -> None:
    """The messages that waited in it stayed on the page."""
    registry, clock = CollectorRegistry(), ManualClock()
    statistics = KafkaStatistics(registry, clock)
    statistics.options(40_000)
    statistics.read(json.dumps(report("closed")))
    for _ in range(5):
        clock.advance_us(40_000_000)
        statistics.read(json.dumps(report("open")))
    labels = {"type": "producer", "broker": "0"}
    for name in ("relaygr_kafka_queue_messages", "relaygr_kafka_broker_disconnects_total"):
        samples = [sample.labels for family in registry.collect() for sample in family.samples if sample.name == name]
        assert [each["client"] for each in samples] == ["open"]
    assert registry.get_sample_value("relaygr_kafka_broker_rtt_seconds", labels | {"client": "open", "quantile": "0.5"})


def test_how_long_a_broker_holds_answers_back_stays_for_a_minute() -> None:
    """Of a client that is held back for seconds, a report may have no answer."""
    registry, clock = CollectorRegistry(), ManualClock()
    statistics = KafkaStatistics(registry, clock)

    def reported(throttle_ms: int) -> tuple[float | None, float]:
        figures = report("w", brokers=2)
        figures["brokers"]["b1"] = figures["brokers"]["b1"] | {"throttle": {"max": throttle_ms}}
        statistics.read(json.dumps(figures))
        clock.advance_us(20_000_000)
        labels = {"client": "w", "type": "producer", "broker": "1"}
        shown = registry.get_sample_value("relaygr_kafka_broker_throttle_seconds", labels)
        other = registry.get_sample_value("relaygr_kafka_broker_throttle_seconds", labels | {"broker": "0"})
        assert other == 0 and shown == statistics.longest_throttle_s
        return shown, statistics.longest_throttle_s

    assert [reported(ms)[0] for ms in (0, 2_700, 900, 0, 0, 0, 0)] == [0, 2.7, 2.7, 2.7, 0.9, 0, 0]


def test_a_second_scraper_of_the_page_sees_what_the_first_one_saw() -> None:
    registry, clock = CollectorRegistry(), ManualClock()
    statistics = KafkaStatistics(registry, clock)
    figures = report("w", txmsgs=12, msgs=10)
    figures["brokers"]["b0"] = figures["brokers"]["b0"] | {"throttle": {"max": 900}}
    statistics.read(json.dumps(figures))
    first, second = generate_latest(registry), generate_latest(registry)
    assert first == second and b" 0.9\n" in first


def test_requests_without_an_answer_are_said_once_with_their_client_and_broker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    statistics = KafkaStatistics(CollectorRegistry())
    for client, timeouts in (("a", 0), ("b", 0), ("a", 0), ("a", 2), ("b", 1), ("a", 2)):
        figures = report(client)
        figures["brokers"]["b0"]["req_timeouts"] = timeouts
        statistics.read(json.dumps(figures))
    said = capsys.readouterr()
    [line] = [each for each in (said.out + said.err).splitlines() if "had no answer in time" in each]
    assert "client_id" in line and "broker" in line


def test_a_quota_is_said_with_its_client_and_then_seldom() -> None:
    clock = ManualClock()
    statistics = KafkaStatistics(CollectorRegistry(), clock)
    with structlog.testing.capture_logs() as lines:
        for throttle_ms in (0, 350, 40, 0, 35):
            figures = report("w", type="consumer")
            figures["brokers"]["b0"]["throttle"] = {"max": throttle_ms}
            statistics.read(json.dumps(figures))
            clock.advance_us(4_000_000)
    said = [line for line in lines if "quota" in line["event"]]
    assert [(line["client_id"], line["type"], line["longest_s"]) for line in said] == [
        ("w", "consumer", 0.35),
        ("w", "consumer", 0.035),
    ]


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


@pytest.mark.kafka
@pytest.mark.parametrize("broker", ["kafka"], indirect=True)
def test_a_quota_of_kafka_shows_as_the_time_for_which_it_holds_answers_back(kafka_settings: KafkaSettings) -> None:
    home = available_brokers().kafka_home
    if home is None:
        unavailable("broker", "KAFKA_HOME is not set")
    client_id = f"held-back-{uuid.uuid4().hex[:6]}"
    command = [home / "bin/kafka-configs.sh", "--bootstrap-server", kafka_settings.bootstrap, "--alter"]
    command += ["--entity-type", "clients", "--entity-name", client_id]
    subprocess.run([*command, "--add-config", "producer_byte_rate=2048"], check=True, capture_output=True, timeout=120)
    statistics = kafka_statistics(CollectorRegistry())
    producer = make_producer(kafka_settings, ProducerKind.LATENCY, client_id, options=statistics.options(100))

    def held_back() -> bool:
        producer.produce(kafka_settings.topic(Topic.RANKING), b"v" * 16_384, b"key")
        producer.poll(0.1)
        return statistics.longest_throttle_s > 0.005

    until(held_back, "the broker holds answers back", 30)
    producer.purge()
    subprocess.run([*command, "--delete-config", "producer_byte_rate"], check=True, capture_output=True, timeout=120)
