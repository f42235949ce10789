"""`relaygr lag` at the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka import TopicPartition
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import ProducerKind, make_group_consumer, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.topics import Topic
from tests.waiting import until


@pytest.fixture
def kafka(embedded_broker: LocalBroker) -> Iterator[KafkaSettings]:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    kafka = embedded_broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=2))
    embedded_broker.create_topics(kafka)
    producer = make_producer(kafka, ProducerKind.DURABLE, "test")
    for _ in range(3):
        producer.produce(kafka.topic(Topic.RANKING), b"x", partition=0)
    assert producer.flush(10) == 0
    yield kafka
    embedded_broker.delete_topics(kafka)


def options(kafka: KafkaSettings) -> list[str]:
    settings = {
        "topic_prefix": kafka.topic_prefix,
        "group_prefix": kafka.group_prefix,
        "lag.interval_s": "0.1",
        "lag.window_polls": "3",
    }
    return ["--bootstrap", kafka.bootstrap, *(f"--set={key}={value}" for key, value in settings.items())]


def commit(kafka: KafkaSettings, offset: int) -> None:
    consumer = make_group_consumer(kafka, kafka.workers_group, "test")
    consumer.commit(offsets=[TopicPartition(kafka.topic(Topic.RANKING), 0, offset)], asynchronous=False)
    consumer.close()


def lag(kafka: KafkaSettings, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["lag", *arguments, *options(kafka)])
    return result.exit_code, result.output


@pytest.mark.kafka
def test_requests_that_wait_though_no_worker_ever_existed_are_a_stop(real_broker: LocalBroker) -> None:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    kafka = real_broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=2))
    real_broker.create_topics(kafka)
    try:
        producer = make_producer(kafka, ProducerKind.DURABLE, "test")
        producer.produce(kafka.topic(Topic.RANKING), b"x", partition=0)
        assert producer.flush(10) == 0
        exit_code, said = lag(kafka, "--judge")
        assert exit_code == 2, said
        assert f"{kafka.workers_group}  STOP" in said
        assert "The group has no member and no commit, and messages wait for it" in said
    finally:
        real_broker.delete_topics(kafka)


def test_a_group_that_keeps_up_exits_with_0(kafka: KafkaSettings) -> None:
    commit(kafka, 3)
    code, said = lag(kafka, "--all")
    assert code == 0, said
    assert kafka.workers_group in said
    assert "no commit" in said
    assert "does not describe groups" in said


def test_a_commit_beyond_the_end_exits_with_2_after_one_poll(kafka: KafkaSettings) -> None:
    """The group has the commit of a topic that was deleted: it was said to keep up."""
    commit(kafka, 65)
    code, said = lag(kafka)
    assert code == 2, said
    assert f"{kafka.workers_group}  BEYOND_END  3 messages behind" in said


@pytest.mark.slow
def test_a_group_that_does_not_move_exits_with_2_and_json_says_the_same(kafka: KafkaSettings) -> None:
    commit(kafka, 1)
    code, said = lag(kafka, "--judge", "--json")
    assert code == 2
    report = json.loads(said[said.index("{") :])
    assert (report["status"], report["exit_code"]) == ("stall", 2)
    [row] = [row for row in report["groups"][0]["partitions"] if row["lag"]]
    assert (row["topic"], row["lag"], row["time_lag"]["source"]) == (kafka.topic(Topic.RANKING), 2, "record")


def test_one_poll_shows_the_figures_and_that_they_are_not_judged_yet(kafka: KafkaSettings) -> None:
    commit(kafka, 1)
    code, said = lag(kafka)
    assert code == 4, said
    assert f"{kafka.workers_group}  JUDGING  2 messages behind" in said and "; 1 of " in said
    [row] = [line.split() for line in said.splitlines() if line.lstrip().startswith(kafka.topic(Topic.RANKING) + " ")]
    assert row[:5] == [kafka.topic(Topic.RANKING), "0", "1", "3", "2"] and "judging" in row


def test_nothing_to_measure_exits_with_3_and_a_sentence(kafka: KafkaSettings) -> None:
    code, said = lag(kafka)
    assert code == 3
    assert "has consumed yet, or no group matches --group" in said


@pytest.mark.slow
def test_a_cluster_that_is_away_exits_with_3_and_its_address() -> None:
    result = CliRunner().invoke(app, ["lag", "--bootstrap", "127.0.0.1:1", "--set=connect_timeout_s=0.5"])
    assert result.exit_code == 3
    assert "127.0.0.1:1" in result.output


def test_a_setting_that_is_none_exits_with_3_too(kafka: KafkaSettings) -> None:
    result = CliRunner().invoke(app, ["lag", "--set=lag.interval=1"])
    assert result.exit_code == 3
    assert "lag.interval" in result.output


@pytest.mark.slow
def test_serve_exports_lag_is_ready_while_it_measures_and_ends_on_sigterm(kafka: KafkaSettings) -> None:
    commit(kafka, 1)
    command = [sys.executable, "-m", "relaygr", "lag", "serve", "--port", "0", *options(kafka)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RELAYGR_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        wanted = "kafka_consumergroup_group_lag{"

        def is_exported() -> bool:
            with urllib.request.urlopen(address, timeout=5) as answer:
                return wanted in answer.read().decode()

        until(is_exported, "the lag is exported")
        with urllib.request.urlopen(address.replace("/metrics", "/readyz"), timeout=5) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(10)
