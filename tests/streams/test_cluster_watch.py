"""The watch of a cluster for readiness: a frozen broker, a topic that grew, a missing right."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.kafka.watch import SILENCE_S, ClusterWatch
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.topics import Topic


class Cluster:
    """Answers for one topic."""

    def __init__(self) -> None:
        self.partitions = 12
        self.error: KafkaError | None = None
        self.frozen = False

    def list_topics(self, topic: str, timeout: float) -> Any:
        if self.frozen:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return SimpleNamespace(topics={topic: SimpleNamespace(error=self.error, partitions=range(self.partitions))})


def failed(watch: ClusterWatch) -> dict[str, str]:
    return {check.name: check.detail for check in watch.checks() if not check.ok}


def test_a_cluster_that_stops_answering_is_away_until_it_answers_again() -> None:
    cluster, clock = Cluster(), ManualClock()
    watch = ClusterWatch(cluster.list_topics, ["ranking"], 12, clock)
    assert failed(watch) == {"cluster": "Kafka has not answered yet"}
    watch.ask("ranking")
    assert failed(watch) == {}
    cluster.frozen = True
    clock.advance_us(int(SILENCE_S * 1e6))
    watch.ask("ranking")
    assert failed(watch) == {"cluster": "Kafka answered 5.0 s ago"}
    cluster.frozen = False
    watch.ask("ranking")
    assert failed(watch) == {}


def test_a_topic_that_grew_is_named_until_it_is_as_the_setting_says() -> None:
    cluster = Cluster()
    watch = ClusterWatch(cluster.list_topics, ["ranking", "preinfer"], 12, ManualClock())
    watch.ask("preinfer")
    cluster.partitions = 24
    watch.ask("ranking")
    assert "ranking has 24 partitions, the setting `partitions` is 12" in failed(watch)["topics"]
    cluster.partitions = 12
    watch.ask("ranking")
    assert failed(watch) == {}


def test_a_missing_right_is_a_sentence() -> None:
    cluster = Cluster()
    cluster.error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    watch = ClusterWatch(cluster.list_topics, ["ranking"], 12, ManualClock())
    watch.ask("ranking")
    assert failed(watch)["topics"] == "This user may not describe ranking: grant it the right to describe the topic"


@pytest.mark.slow
def test_the_thread_asks_a_real_client(kafka_settings: KafkaSettings) -> None:
    producer = make_producer(kafka_settings, ProducerKind.LATENCY, "test")
    topic = kafka_settings.topic(Topic.RANKING)
    watch = ClusterWatch(producer.list_topics, [topic], kafka_settings.partitions + 1)
    watch.start()
    try:
        while "topics" not in failed(watch):
            time.sleep(0.01)
    finally:
        watch.stop()
    assert set(failed(watch)) == {"topics"}
