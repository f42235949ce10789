"""The watch of a cluster for readiness: a frozen broker, a topic that grew, a missing right."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from relaygr.cluster.watch import SILENCE_S, ClusterWatch
from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.topics import Topic


class Cluster:
    """Answers for one topic."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.partitions = 12
        self.error: KafkaError | None = None
        self.frozen = False

    def list_topics(self, topic: str, timeout: float) -> Any:
        if self.frozen:
            self.clock.advance_us(int(timeout * 1e6))
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return SimpleNamespace(topics={topic: SimpleNamespace(error=self.error, partitions=range(self.partitions))})


def failed(watch: ClusterWatch) -> dict[str, str]:
    return {check.name: check.detail for check in watch.checks() if not check.ok}


def test_a_client_that_gets_no_answer_is_named_until_it_gets_one(capsys: pytest.CaptureFixture[str]) -> None:
    cluster, clock = Cluster(), ManualClock()
    cluster.clock = clock
    watch = ClusterWatch("jobs", cluster.list_topics, ["ranking"], 12, clock)
    assert failed(watch) == {"cluster": "Kafka has not answered yet"}
    watch.ask("ranking")
    # An idle client has answered its last question, however long ago that was.
    clock.advance_us(60_000_000)
    assert failed(watch) == {}
    cluster.frozen = True
    for _ in range(3):
        watch.ask("ranking")
    assert failed(watch) == {"cluster": f"Kafka has not answered jobs for {3 * SILENCE_S} s"}
    cluster.frozen = False
    watch.ask("ranking")
    assert failed(watch) == {}
    said = capsys.readouterr()
    assert (said.out + said.err).count("kafka does not answer") == 1
    assert (said.out + said.err).count("kafka answers again") == 1


def test_a_topic_of_any_count_is_only_counted() -> None:
    cluster = Cluster()
    watch = ClusterWatch("results", cluster.list_topics, ["ranking"], 12, ManualClock(), others=["results"])
    assert watch.partitions_of("results") is None
    for cluster.partitions in (12, 30):
        watch.ask("results")
        assert watch.partitions_of("results") == cluster.partitions
    cluster.partitions = 3
    watch.ask("results")
    assert watch.partitions_of("results") == 30, "a broker that has just started knows a part of them"
    cluster.error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    watch.ask("results")
    assert watch.partitions_of("results") == 30, "a broker that has just started knows no topic"
    assert failed(watch) == {}


def test_a_topic_that_grew_is_named_until_it_is_as_the_setting_says() -> None:
    cluster = Cluster()
    watch = ClusterWatch("jobs", cluster.list_topics, ["ranking", "preinfer"], 12, ManualClock())
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
    watch = ClusterWatch("jobs", cluster.list_topics, ["ranking"], 12, ManualClock())
    watch.ask("ranking")
    assert failed(watch)["topics"] == "This user may not describe ranking: grant it the right to describe the topic"


@pytest.mark.slow
def test_the_thread_asks_a_real_client(kafka_settings: KafkaSettings) -> None:
    producer = make_producer(kafka_settings, ProducerKind.LATENCY, "test")
    topic = kafka_settings.topic(Topic.RANKING)
    watch = ClusterWatch("test", producer.list_topics, [topic], kafka_settings.partitions + 1)
    watch.start()
    try:
        while "topics" not in failed(watch):
            time.sleep(0.01)
    finally:
        watch.stop()
    assert set(failed(watch)) == {"topics"}
