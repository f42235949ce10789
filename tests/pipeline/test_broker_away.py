"""A real Kafka that is stopped and started again in mid-run: nothing crashes, and traffic resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka import KafkaException

from relaygr.client import RankStatus
from relaygr.devbroker.kafka import _PROPERTIES
from relaygr.devbroker.local import free_ports
from relaygr.kafka.admin import create_topics
from relaygr.kafka.client_errors import ClientErrors
from relaygr.kafka.clients import make_admin
from relaygr.kafka.settings import KafkaSettings
from tests.promised import unavailable
from tests.worlds.relay import (
    PARTITIONS,
    Relay,
    candidates_of,
    history_of,
    jobs_done,
    new_user,
    reading,
    wait_until,
)

pytestmark = [pytest.mark.kafka, pytest.mark.outage, pytest.mark.timeout(240)]

CLUSTER_ID = "4L6g3nShT-eMCtK--X86sw"


class Restartable:
    """One Kafka broker that keeps its port and its data over a restart."""

    def __init__(self, home: Path, folder: Path) -> None:
        port, controller_port = free_ports(2)
        self.bootstrap = f"127.0.0.1:{port}"
        self._home, self._folder = home, folder
        self._config = folder / "server.properties"
        properties = _PROPERTIES | {
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller_port}",
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://127.0.0.1:{controller_port}",
            "log.dirs": str(folder / "data"),
        }
        self._config.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        self._environment = {**os.environ, "LOG_DIR": str(folder / "logs")}
        self._process: subprocess.Popen[bytes] | None = None
        format_data = ["format", "--standalone", "-t", CLUSTER_ID, "-c", str(self._config)]
        self._run(home / "bin/kafka-storage.sh", *format_data).wait(60)

    def _run(self, *command: str | Path) -> subprocess.Popen[bytes]:
        with (self._folder / "broker.log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )

    def start(self) -> None:
        self._process = self._run(self._home / "bin/kafka-server-start.sh", self._config)
        admin = make_admin(KafkaSettings(bootstrap=self.bootstrap), "restart", ClientErrors("restart", quiet=True))

        def answers() -> bool:
            with suppress(KafkaException):
                return bool(admin.list_topics(timeout=0.5).brokers)
            return False

        wait_until("Kafka answers", answers, 60)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def kafka_server(tmp_path: Path) -> Iterator[Restartable]:
    home = os.environ.get("KAFKA_HOME")
    if not home:
        unavailable("broker", "KAFKA_HOME is not set")
    server = Restartable(Path(home), tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.stop()


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
            assert {rank().status for _ in range(30)} == {RankStatus.RANKED}
            kafka_server.stop()
            # The client answers at its deadline, whatever the broker does.
            assert rank(500).status is RankStatus.TIMED_OUT
            reachable = "relaygr_consumer_broker_reachable"
            wait_until("the worker reports it", lambda: reading(worker).total(reachable) == 0)
            time.sleep(7)  # More than a session: the worker's membership is gone.
            assert worker.process.poll() is None and trigger.process.poll() is None
            kafka_server.start()
            wait_until("requests are ranked again", lambda: rank(2_000).status is RankStatus.RANKED, 60)
            wait_until("the worker reports it", lambda: reading(worker).total(reachable) == 1)
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

            wait_until("events make jobs again", relayed, 60)
            assert {rank().status for _ in range(20)} == {RankStatus.RANKED}
        assert relay.stop(worker) == 0
        assert relay.stop(trigger) == 0


def test_a_worker_told_to_stop_while_the_broker_is_away_ends_soon(kafka_server, model, tmp_path):
    prefix = f"test-{uuid.uuid4().hex[:8]}"
    kafka = KafkaSettings(
        bootstrap=kafka_server.bootstrap, topic_prefix=prefix, group_prefix=prefix, partitions=PARTITIONS
    )
    create_topics(kafka)
    with Relay(kafka, tmp_path / "relay", model, drain_s=2.0) as relay:
        worker = relay.start_worker()
        relay.await_ready(worker)
        kafka_server.stop()
        time.sleep(1)
        worker.process.terminate()
        assert worker.process.wait(timeout=25) == 0
        relay.forget(worker)
