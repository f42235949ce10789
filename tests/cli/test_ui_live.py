"""The live page over a real cluster: it reads the topics, and `relaygr ui` serves them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from functools import partial

import numpy as np
import pytest
from confluent_kafka import TopicPartition
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.kafka.clients import ProducerKind, make_admin, make_group_consumer, make_producer
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import Affinity, KafkaSettings
from relaygr.runtime.clock import SystemClock
from relaygr.schemas import encode
from relaygr.schemas.ended import Ended
from relaygr.schemas.headers import JOB_HEADER, WORKERS_GROUP, RankingHeaders
from relaygr.schemas.messages import Path, PreInferJob, RankingResult, RetrievalEvent, StageTimings
from relaygr.schemas.topics import Topic
from relaygr.ui import reader as reader_module
from relaygr.ui.live import LiveCluster
from relaygr.ui.model import LiveSnapshot
from relaygr.ui.settings import UiSettings
from tests.waiting import becomes
from tests.worlds.ui import worker_status

pytestmark = pytest.mark.slow

SETTINGS = UiSettings(scrape_workers=False)


class Traffic:
    """Writes impressions as gateway, trigger and worker would."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._producer = make_producer(kafka, ProducerKind.DURABLE, "test")
        self.number = 0

    def status(self, worker_id: str, group: str) -> None:
        status = worker_status(worker_id, SystemClock().wall_us(), (0, 1))
        self._send(Topic.WORKERS, worker_id.encode(), encode(status), [(WORKERS_GROUP, group.encode())])

    def request(self) -> None:
        """A ranking request that nobody answers."""
        headers = RankingHeaders("g.1.0.t", "g", "results", 0, SystemClock().wall_us() + 50_000)
        self._send(Topic.RANKING, b"ann", b"body", headers.encode())
        assert self._producer.flush(10) == 0

    def impression(self) -> None:
        self.number += 1
        name, now_us = f"g.1.{self.number}.t", SystemClock().wall_us()
        event = RetrievalEvent(name, "ann", now_us, now_us + 1000, 50, 3, 0)
        job = PreInferJob(name, "ann", now_us, now_us + 1000, 50, 3, 0, now_us + 100)
        headers = RankingHeaders(name, "g", "results", 0, now_us + 50_000)
        result = RankingResult(
            name, "worker-00", Ended.RANKED, now_us, now_us + 1000, now_us + 70_000, StageTimings(total_us=69_000),
            path=Path.HBM, num_tasks=1, scores=np.zeros(3, "<f4"), model_revision="m",
        )  # fmt: skip
        self._send(Topic.RETRIEVAL, b"ann", encode(event))
        jobs = self._kafka.jobs_topic
        self._send(jobs, b"ann", encode(job), [JOB_HEADER] if jobs is Topic.RANKING else None)
        self._send(Topic.RANKING, b"ann", b"body", headers.encode())
        self._send(Topic.RESULTS, name.encode(), encode(result))
        self._send(Topic.RESULTS, name.encode(), b"garbage")
        assert self._producer.flush(10) == 0

    def _send(self, topic: Topic, key: bytes, value: bytes, headers: object = None) -> None:
        self._producer.produce(self._kafka.topic(topic), value, key, headers=headers)  # type: ignore[arg-type]
        self._producer.poll(0)


def late_of(snapshot: LiveSnapshot) -> int:
    return snapshot.latency.late


def test_impressions_and_statuses_of_the_topics_are_shown(kafka_settings: KafkaSettings) -> None:
    traffic = Traffic(kafka_settings)
    traffic.status("worker-00", kafka_settings.workers_group)
    traffic.status("worker-99", "another.group")
    traffic.impression()
    with LiveCluster(KafkaSession(kafka_settings, "test"), SETTINGS) as live:
        assert becomes(lambda: bool(live.snapshot().workers)), "a status that was written before"
        assert becomes(lambda: late_of(live.snapshot()) >= 3, meanwhile=traffic.impression)
        assert becomes(lambda: live.snapshot().late[-1].decided_ms == 0.1), "its job may be read later"
        assert becomes(lambda: live.snapshot().lag is not None)
        # On a slow machine the status is stale by now.
        again = partial(traffic.status, "worker-00", kafka_settings.workers_group)
        assert becomes(lambda: live.snapshot().owners[:3] == [0, 0, -1], meanwhile=again)
        shown = live.snapshot()
    assert [worker.worker_id for worker in shown.workers] == ["worker-00"]
    # On a slow machine an impression's time is over before its result is read.
    assert "hbm" in {each.kind for each in shown.kinds if each.count} <= {"hbm", "unanswered"}
    assert (shown.late[-1].latency_ms, shown.late[-1].budget_ms) == (70, 50)
    assert shown.unreadable >= 3 and shown.problems[0].name == "late", "each takes 70 ms of 50"
    # No process of a group is there, which a real Kafka tells of a group that has committed nothing.
    assert {each.name for each in shown.problems[1:]} <= {"stuck"}
    assert live.has_ended and live.snapshot() is live.snapshot(), "the last figures stay"


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
def test_a_page_that_does_not_answer_is_named_without_the_secret_of_its_address(kafka_settings: KafkaSettings) -> None:
    address = "http://127.0.0.1:1/metrics?token=Hush3d"
    with LiveCluster(KafkaSession(kafka_settings, "test"), UiSettings(scrape_workers=False, scrape=(address,))) as live:
        assert becomes(lambda: any("No metrics come from" in each.text for each in live.snapshot().problems))
        shown = live.snapshot()
    assert any("http://127.0.0.1:1/metrics?***" in each.text for each in shown.problems) and "Hush3d" not in str(shown)


@pytest.mark.parametrize("broker", [pytest.param("kafka", marks=pytest.mark.kafka)], indirect=True)
def test_after_the_last_worker_the_page_says_that_nothing_is_ranked(kafka_settings: KafkaSettings) -> None:
    """The workers' group was ok for 10 to 20 s under a green "live", while 40 requests waited."""
    kafka, traffic = kafka_settings, Traffic(kafka_settings)
    worker = make_group_consumer(kafka, kafka.workers_group, "worker-00")
    worker.subscribe([kafka.topic(topic) for topic in kafka.worker_topics])

    def work() -> None:
        traffic.status("worker-00", kafka.workers_group)
        worker.poll(0.1)
        owned = [TopicPartition(each.topic, each.partition, 0) for each in worker.assignment()]
        if owned:
            worker.commit(offsets=owned, asynchronous=False)

    with LiveCluster(KafkaSession(kafka, "test"), SETTINGS) as live:

        def status() -> str | None:
            groups = {group.group: group for group in live.snapshot().lag or ()}
            return groups[kafka.workers_group].status if kafka.workers_group in groups else None

        assert becomes(lambda: status() == "ok" and live.snapshot().problems == [], meanwhile=work)
        worker.close()
        for _ in range(40):
            traffic.request()
        assert becomes(lambda: status() == "stop")
        assert becomes(lambda: any("No worker is ready" in problem.text for problem in live.snapshot().problems))


@pytest.mark.parametrize("broker", [pytest.param("kafka", marks=pytest.mark.kafka)], indirect=True)
def test_the_page_says_that_a_topic_has_gone(kafka_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "LOOK_S", 0.5)
    name = kafka_settings.topic(Topic.RESULTS)
    with LiveCluster(KafkaSession(kafka_settings, "test"), SETTINGS) as live:
        assert becomes(lambda: live.snapshot().lag is not None)
        admin = make_admin(kafka_settings, "test")
        admin.delete_topics([name])[name].result(10)
        assert becomes(lambda: any(f"has no topic {name}" in problem.text for problem in live.snapshot().problems))


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
def test_jobs_on_the_ranking_topic_are_counted_as_jobs(kafka_settings: KafkaSettings) -> None:
    kafka = kafka_settings.model_copy(update={"affinity": Affinity.ONE_TOPIC})
    traffic = Traffic(kafka)
    with LiveCluster(KafkaSession(kafka, "test"), SETTINGS) as live:
        assert becomes(lambda: late_of(live.snapshot()) >= 3, meanwhile=traffic.impression)
        assert becomes(lambda: live.snapshot().late[-1].decided_ms == 0.1), "its job may be read later"

        def counts() -> set[int]:
            return {
                sum(flow.series) for flow in live.snapshot().stages if flow.stage in (Topic.PREINFER, Topic.RANKING)
            }

        assert becomes(lambda: 0 not in counts(), meanwhile=traffic.impression)


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
def test_a_reader_that_falls_behind_goes_to_the_ends_of_the_topics(
    kafka_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "BATCH", 5)
    monkeypatch.setattr(reader_module, "BEHIND_S", 0.3)
    traffic = Traffic(kafka_settings)
    with LiveCluster(KafkaSession(kafka_settings, "test"), SETTINGS) as live:

        def burst() -> None:
            for _ in range(20):
                traffic.impression()

        assert becomes(lambda: live.snapshot().skipped > 0, meanwhile=burst)
        assert becomes(lambda: sum(sum(stage.series) for stage in live.snapshot().stages) > live.snapshot().skipped)


def options(kafka: KafkaSettings) -> list[str]:
    names = ("topic_prefix", "group_prefix", "partitions", "fetch_wait_max_ms")
    return ["--bootstrap", kafka.bootstrap, *(f"--set={name}={getattr(kafka, name)}" for name in names)]


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
def test_the_command_serves_the_page_until_it_is_stopped(kafka_settings: KafkaSettings) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RELAYGR_")}
    command = [sys.executable, "-m", "relaygr", "ui", "--port", "0", *options(kafka_settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=clean) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            address = line.rpartition(": ")[2].strip()
            with urllib.request.urlopen(f"{address}state", timeout=10) as answer:
                state = json.loads(answer.read())
            assert state["live"]["prefix"] == kafka_settings.topic_prefix
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def ui(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["ui", "--port", "0", *arguments])
    assert done.exit_code == 1
    return " ".join(done.output.split())


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
def test_a_topic_that_is_missing_is_said_with_a_remedy(kafka_settings: KafkaSettings) -> None:
    said = ui(*options(kafka_settings), "--set=topic_prefix=nobody")
    assert "has no topic nobody.retrieval" in said and "relaygr topics create" in said


def test_wrong_options_are_said_with_a_remedy() -> None:
    assert "cannot be reached" in ui("--bootstrap", "127.0.0.1:1", "--set", "connect_timeout_s=0.2")
    assert "write the address of a metrics page" in ui("--scrape", "trigger:9100")
    for token in ("short", "a token with spaces in it", "umlauts-äöü-äöü-äöü"):
        assert "at least 16 characters, all of them printable ASCII" in ui("--set", f"ui.token={token}")
