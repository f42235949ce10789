"""Planned stops of one of two workers, on a real Kafka: for good, and for a restart."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from relaygr.client import Ended
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess
from tests.waiting import until
from tests.worlds.relay import Relay, candidates_of, history_of, own_topics, reading
from tests.worlds.steady_traffic import Traffic

pytestmark = [pytest.mark.kafka, pytest.mark.outage]

USERS = [f"user-{number:02d}" for number in range(30)]
SESSION_S = 300.0
"""The other worker would own the partitions only after this time: no test waits so long."""
BUDGET_MS = 60_000


@pytest.fixture(scope="module")
def kafka(real_broker: LocalBroker) -> Iterator[KafkaSettings]:
    with own_topics(real_broker) as settings:
        yield settings.model_copy(update={"session_timeout_ms": int(SESSION_S * 1000)})


@pytest.fixture
def relay(kafka: KafkaSettings, model: Path, tmp_path: Path) -> Iterator[Relay]:
    own = kafka.model_copy(update={"group_prefix": f"{kafka.group_prefix}.{uuid.uuid4().hex[:6]}"})
    with Relay(own, tmp_path, model) as relay:
        yield relay


def owned(worker: CommandProcess) -> float:
    return reading(worker).total("relaygr_consumer_owned_partitions")


def pair(relay: Relay, *options: str) -> tuple[CommandProcess, CommandProcess]:
    """A worker that stays, and one with these options that goes."""
    stays = relay.start_worker("worker-00")
    goes = relay.start_worker("worker-01", command=["worker", *options])
    relay.await_ready(stays, goes)
    half = relay.kafka.partitions / 2
    until(lambda: (owned(stays), owned(goes)) == (half, half), "both own partitions")
    return stays, goes


def traffic_of(relay: Relay) -> Traffic:
    return Traffic(relay.client, USERS, lambda user: history_of(user, 50), candidates_of(), 0.02, BUDGET_MS)


def test_a_worker_that_leaves_on_stop_costs_less_than_its_session(relay: Relay):
    """The requests for the stopped worker wait for the other one, and not for the end of the session."""
    stays, goes = pair(relay, "--leave-on-stop")
    with traffic_of(relay) as traffic:
        time.sleep(1)
        assert relay.stop(goes) == 0
        until(lambda: owned(stays) == relay.kafka.partitions, "the other worker owns all partitions")
        time.sleep(1)
        asked = traffic.stop()
    assert {each.outcome.status for each in asked} == {Ended.RANKED}


def test_a_worker_that_is_stopped_keeps_its_partitions_until_it_is_told_to_leave(relay: Relay):
    stays, goes = pair(relay)
    half = owned(stays)
    assert relay.stop(goes) == 0
    time.sleep(3)
    assert owned(stays) == half, "orchestrators send SIGTERM for a restart too"
    told = relay.processes.start("leave", ["worker", "leave", "worker-01"], "worker")
    assert told.process.wait(60) == 0, told.log_tail()
    relay.forget(told)
    until(lambda: owned(stays) == relay.kafka.partitions, "the other worker owns all partitions")
    again = relay.processes.start("again", ["worker", "leave", "worker-01"], "worker")
    assert again.process.wait(60) == 1
    assert "is not a member of the group" in again.log_tail()
    relay.forget(again)
