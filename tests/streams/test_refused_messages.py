"""Messages that Kafka refuses: a resend ends where it cannot help, and one line names the cause."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from relaygr.client import DeliveryReport, Ended, RelayClient
from relaygr.devbroker import LocalBroker
from relaygr.kafka.client_errors import is_final
from relaygr.kafka.clients import make_admin
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.ended import Reason
from relaygr.schemas.topics import Topic
from tests.echo_worker import echo_worker
from tests.waiting import until
from tests.worlds.faulty_cluster import FaultyCluster, faulty_cluster

BUDGET_MS = 8_000
EVENT = {"ranking_budget_ms": 50, "expected_ranking_in_ms": 5, "expected_candidates": 1, "expected_suffix": 0}
FINAL = (
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.INVALID_RECORD,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.POLICY_VIOLATION,
)


@pytest.fixture
def cluster() -> Iterator[FaultyCluster]:
    with faulty_cluster() as started:
        yield started


@pytest.mark.parametrize("code", FINAL)
def test_a_request_that_kafka_would_refuse_again_ends_at_once(cluster: FaultyCluster, code: int) -> None:
    kafka = cluster.kafka
    with RelayClient(kafka, "gw-0", registry=CollectorRegistry()) as client, capture_logs() as logs:
        for _ in range(3):
            cluster.answer_produce(code)
            outcome = client.rank("ann", [1], budget_ms=BUDGET_MS)
            assert (outcome.status, outcome.reason) == (Ended.FAILED, Reason.REFUSED_BY_KAFKA)
        statistics = client.statistics()
        with echo_worker(kafka):
            assert client.rank("ann", [1], budget_ms=BUDGET_MS).status is Ended.RANKED
    assert (statistics.failed, statistics.retries, statistics.waiting, statistics.in_grace) == (3, 0, 0, 0)
    [line] = [each for each in logs if each["event"] == "kafka refuses messages"]
    assert line["topic"] == kafka.topic(Topic.RANKING) and line["cause"]
    if code == KafkaError.INVALID_TIMESTAMP:
        assert "set the clocks" in line["cause"]


def test_a_request_that_another_broker_may_take_is_sent_again(cluster: FaultyCluster) -> None:
    kafka = cluster.kafka
    with RelayClient(kafka, "gw-0", registry=CollectorRegistry()) as client, echo_worker(kafka):
        cluster.answer_produce(KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.KAFKA_STORAGE_ERROR)
        assert client.rank("ann", [1], budget_ms=BUDGET_MS).status is Ended.RANKED


def test_an_event_that_kafka_refuses_is_told_with_its_cause(cluster: FaultyCluster) -> None:
    kafka = cluster.kafka
    reports: list[DeliveryReport] = []
    with capture_logs() as logs, RelayClient(kafka, "gw-0", registry=CollectorRegistry()) as client:
        cluster.answer_produce(KafkaError.INVALID_TIMESTAMP, KafkaError.INVALID_TIMESTAMP)
        for _ in range(2):
            client.publish_retrieval("ann", on_delivery=reports.append, **EVENT)
            until(lambda: reports and reports[-1].error is not None, "the event is refused")
    assert all("set the clocks" in (report.error or "") for report in reports)
    [line] = [each for each in logs if each["event"] == "kafka refuses messages"]
    assert line["topic"] == kafka.topic(Topic.RETRIEVAL) and "set the clocks" in line["cause"]


@pytest.mark.kafka
@pytest.mark.slow
def test_a_real_broker_that_refuses_the_time_of_a_request_ends_it(real_broker: LocalBroker) -> None:
    """The broker takes no record that is older than 0 ms, as if the clock of this machine were behind."""
    kafka = real_broker.settings(KafkaSettings(topic_prefix="refused", partitions=2))
    real_broker.create_topics(kafka)
    entry = ConfigEntry("message.timestamp.before.max.ms", "0", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, kafka.topic(Topic.RANKING), incremental_configs=[entry])
    # The requests end with the client, so it needs a name.
    admin = make_admin(kafka, "test")
    for altered in admin.incremental_alter_configs([resource]).values():
        altered.result(30)

    def refused(client: RelayClient) -> bool:
        return client.rank("ann", [1], budget_ms=BUDGET_MS).reason is Reason.REFUSED_BY_KAFKA

    with RelayClient(kafka, "gw-0", registry=CollectorRegistry()) as client:
        # The leaders of new topics may be unknown at first, and a record of the same millisecond is taken.
        until(lambda: refused(client), "a request is refused")
        before = client.statistics().retries
        until(lambda: refused(client), "a request is refused")
        assert client.statistics().retries == before
    real_broker.delete_topics(kafka)


def test_what_a_broker_repeats_is_final_and_what_librdkafka_reports_is_not() -> None:
    assert all(is_final(KafkaError(code)) for code in FINAL)
    transient = (
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError._PURGE_QUEUE,
        KafkaError.UNKNOWN,
    )
    assert not any(is_final(KafkaError(code)) for code in transient)
