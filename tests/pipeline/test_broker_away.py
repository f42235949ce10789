"""A real Kafka that is stopped and started again in mid-run: nothing crashes, and traffic resumes."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator

import pytest

from relaygr.client import Ended
from relaygr.cluster.admin import create_topics
from relaygr.devbroker.kafka import KafkaCluster
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess
from tests.waiting import until
from tests.worlds.own_broker import own_cluster
from tests.worlds.relay import (
    PARTITIONS,
    Relay,
    candidates_of,
    history_of,
    jobs_done,
    new_user,
    reading,
)

pytestmark = [pytest.mark.kafka, pytest.mark.outage]


@pytest.fixture(scope="module")
def kafka_server() -> Iterator[KafkaCluster]:
    with own_cluster(1) as cluster:
        yield cluster


def test_a_broker_that_is_killed_and_started_again_crashes_nothing(kafka_server, model, tmp_path):
    prefix = f"test-{uuid.uuid4().hex[:8]}"
    kafka = KafkaSettings(
        bootstrap=kafka_server.bootstrap, topic_prefix=prefix, group_prefix=prefix, partitions=PARTITIONS
    )
    create_topics(kafka)
    with Relay(kafka, tmp_path / "relay", model) as relay:
        worker, trigger = relay.start_worker(), relay.start_trigger()
        relay.await_ready(worker, trigger)
        with relay.client() as client:

            def rank(budget_ms: float = 5_000, user: str | None = None):
                user = user or new_user()
                return client.rank(user, candidates_of(), budget_ms=budget_ms, history=history_of(user, 50))

            # These offsets are finished but not committed when the broker stops, so their commit comes too late.
            assert {rank().status for _ in range(30)} == {Ended.RANKED}
            kafka_server.kill(1)
            # The client answers at its deadline, whatever the broker does.
            assert rank(500).status is Ended.TIMED_OUT
            reachable = "relaygr_consumer_broker_reachable"
            until(lambda: reading(worker).total(reachable) == 0, "the worker reports it")
            time.sleep(7)  # More than a session: the worker's membership is gone.
            assert worker.process.poll() is None and trigger.process.poll() is None
            kafka_server.start(1)
            until(lambda: rank(2_000).status is Ended.RANKED, "requests are ranked again", 60)
            until(lambda: reading(worker).total(reachable) == 1, "the worker reports it")
            relay.await_ready(worker, trigger)

            def relayed() -> bool:
                user = new_user()
                history = history_of(user, 100)
                client.publish_history(history)
                client.publish_retrieval(
                    user, ranking_budget_ms=5_000, expected_ranking_in_ms=1_000, expected_candidates=20,
                    expected_suffix=0, history_version=history.version(),
                )  # fmt: skip
                time.sleep(0.5)
                return jobs_done(worker).get("computed", 0) > 0

            until(relayed, "events make jobs again", 60)
            assert {rank().status for _ in range(20)} == {Ended.RANKED}
        assert relay.stop(worker) == 0
        assert relay.stop(trigger) == 0


def test_processes_whose_broker_is_frozen_say_so_and_end_soon_when_told(kafka_server, model, tmp_path):
    """A frozen broker keeps its connections open, so that only the missing answers show it."""
    prefix = f"test-{uuid.uuid4().hex[:8]}"
    kafka = KafkaSettings(
        bootstrap=kafka_server.bootstrap, topic_prefix=prefix, group_prefix=prefix, partitions=PARTITIONS
    )
    create_topics(kafka)
    with Relay(kafka, tmp_path / "relay", model, drain_s=2.0) as relay:
        lag = relay.processes.start("lag", ["lag", "serve"], "lag")
        children = [relay.start_worker(), relay.start_trigger(), lag]
        relay.await_ready(*children)
        kafka_server.freeze(1)
        for child in children:
            until(lambda child=child: not is_ready(child), f"{child.name} is not ready", 60)
        for child in children:
            child.process.terminate()
        assert [child.process.wait(timeout=25) for child in children] == [0, 0, 0]
        for child in children:
            relay.forget(child)


def is_ready(child: CommandProcess) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{child.port}/readyz", timeout=5) as answer:
            return answer.status == 200
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return False
