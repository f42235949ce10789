"""Upgrades and rollbacks: processes of this version and of an earlier one on the same topics, under traffic.

`earlier_commit` names the earlier version.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from relaygr.client import Ended, RelayClient
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess
from relaygr.schemas.messages import BehaviourEvent
from relaygr.schemas.topics import Topic
from tests.waiting import until
from tests.wheel.upgrade_world import (
    BUDGET_MS,
    Gateway,
    Impressions,
    Version,
    all_owned,
    lengths_of,
    scores_of,
    start_gateway,
    waits_in_vain,
    workers_of,
)
from tests.worlds.pair import await_pair
from tests.worlds.relay import Relay, candidates_of, history_of, jobs_done, make_model, reading
from tests.worlds.steady_traffic import Traffic

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("broker", ["embedded"], indirect=True),
]

USERS = {f"user-{number:02d}": 100 + number for number in range(12)}
INTERVAL_S = 0.05
STAGE_S = 2.0
TOLERANCE = 2e-5
PAIR_S = 90.0


class Histories:
    """The users' published histories."""

    def __init__(self, client: RelayClient) -> None:
        self._client = client
        self.lengths = dict(USERS)
        for seed, (user, length) in enumerate(USERS.items()):
            client.publish_history(history_of(user, length, seed))

    def delete(self, user: str) -> None:
        """And no behaviours of the user are published any more."""
        del self.lengths[user]
        self._client.tombstone(user)

    def grow(self) -> None:
        """Each by two behaviours."""
        for seed, user in enumerate(USERS):
            if (length := self.lengths.get(user)) is not None:
                new = history_of(user, length + 2, seed).behaviours[length:]
                self._client.publish_behaviours(BehaviourEvent(user, new, length))
                self.lengths[user] += 2


class Stage:
    """The relay between two changes."""

    def __init__(self, relay: Relay, histories: Histories, traffic: Impressions) -> None:
        self._relay = relay
        self._histories = histories
        self._traffic = traffic
        self._query_time_ms = int(time.time() * 1000)

    def scores(self, gateway: Gateway) -> np.ndarray:
        """The scores of all users."""
        return scores_of(gateway, self._histories.lengths, self._query_time_ms)

    def passes(self, workers: set[str], gateway: Gateway) -> None:
        """Fails unless all that was sent since the last stage is ranked, and these workers rank what is published."""
        workers_of(self._traffic.take())
        self._histories.grow()
        until(lambda: lengths_of(gateway, self._histories.lengths) == self._histories.lengths, "the histories grew")
        time.sleep(STAGE_S)
        assert workers_of(self._traffic.take()) == workers


def test_both_versions_serve_each_other_under_traffic_and_nothing_is_lost(
    kafka_settings: KafkaSettings, tmp_path: Path, versions: tuple[Version, Version]
) -> None:
    first, then = versions
    model = make_model(tmp_path / "model")
    with Relay(kafka_settings, tmp_path / "relay", model) as relay, relay.client() as client:
        histories = Histories(client)
        with first.starts():
            workers = [relay.start_worker("worker-00")]
            trigger = relay.start_trigger()
        gateway = start_gateway(relay, first)
        relay.await_ready(*workers, trigger, gateway.process)
        with Impressions(list(USERS), INTERVAL_S, gateway) as traffic:
            stage = Stage(relay, histories, traffic)
            stage.passes({"worker-00"}, gateway)

            with then.starts():
                workers.append(relay.start_worker("worker-01"))
            relay.await_ready(*workers)
            until(lambda: all_owned(relay, *workers), "workers of both versions own partitions")
            stage.passes({"worker-00", "worker-01"}, gateway)
            assert all(jobs_of(worker) for worker in workers)

            # Two triggers share the events for a while.
            with then.starts():
                second = relay.start_trigger("trigger.instance_id=trigger-01")
            relay.await_ready(second)
            until(lambda: all(knows_all_owners(relay, each) for each in (trigger, second)), "both know the workers")
            stage.passes({"worker-00", "worker-01"}, gateway)
            assert relay.stop(trigger) == 0
            before = [jobs_of(worker) for worker in workers]
            stage.passes({"worker-00", "worker-01"}, gateway)
            assert all(jobs_of(worker) > jobs for worker, jobs in zip(workers, before, strict=True))

            other = start_gateway(relay, then)
            relay.await_ready(other.process)
            traffic.through(gateway, other)
            stage.passes({"worker-00", "worker-01"}, other)
            assert_equal(stage.scores(other), stage.scores(gateway))
            for each in (gateway, other):
                assert all(waits_in_vain(each, list(histories.lengths)[:4]))

            # The other version goes on with the files of a worker that died.
            histories.delete("user-00")
            until(lambda: lengths_of(other, ["user-00"]) == {"user-00": 0}, "the user is deleted")
            scores = stage.scores(other)
            relay.kill(workers[0])
            with then.starts():
                workers[0] = relay.start_worker("worker-00")
            relay.await_ready(*workers)
            until(lambda: all_owned(relay, *workers), "both workers own partitions")
            assert_equal(stage.scores(other), scores)
            stage.passes({"worker-00", "worker-01"}, other)
            assert lengths_of(other, ["user-00"]) == {"user-00": 0}
            traffic.through(other)
            workers_of(traffic.take())
            assert relay.stop(gateway.process) == 0
        workers_of(traffic.take())
        relay.await_all_committed(Topic.RANKING, Topic.PREINFER)
        assert relay.ends(Topic.DEAD_LETTERS) == {}
        for process in relay.processes.running:
            assert relay.stop(process) == 0
    assert_no_error_is_logged(tmp_path / "relay")


def test_a_worker_with_a_standby_changes_its_version_in_place(
    kafka_settings: KafkaSettings, tmp_path: Path, versions: tuple[Version, Version]
) -> None:
    """Files of the other version replace those of the running processes. The supervisor goes on in its own version,
    and starts children in the other one. Then a supervisor of the other version adopts children of both.
    """
    first, then = versions
    runs = Version("installation", first.installed.copy(tmp_path / "installation"))
    standby = ("worker", "--standby")
    users = [f"user-{number:02d}" for number in range(30)]
    with Relay(kafka_settings, tmp_path / "relay", make_model(tmp_path / "model")) as relay:
        with runs.starts():
            supervisor = relay.start_worker(command=standby)
        relay.await_ready(supervisor)
        before = await_pair(supervisor.port, PAIR_S)
        with Traffic(
            relay.client, users, lambda user: history_of(user, 100), candidates_of(), 0.05, BUDGET_MS
        ) as traffic:
            time.sleep(1)
            runs.installed.replace(then.installed)
            os.kill(before.active, signal.SIGTERM)
            mixed = await_pair(supervisor.port, PAIR_S, but_not=[before.active])
            assert mixed.active == before.standby
            relay.kill(supervisor)
            with runs.starts():
                supervisor = relay.start_worker(command=standby)
            relay.await_ready(supervisor)
            assert await_pair(supervisor.port, PAIR_S) == mixed
            os.kill(mixed.active, signal.SIGTERM)
            after = await_pair(supervisor.port, PAIR_S, but_not=[mixed.active])
            assert after.active == mixed.standby
            time.sleep(1)
            asked = traffic.stop()
            assert {each.outcome.status for each in asked} == {Ended.RANKED}
            assert traffic.lost == []
        assert relay.stop(supervisor) == 0
    assert_no_error_is_logged(tmp_path / "relay")


def knows_all_owners(relay: Relay, trigger: CommandProcess) -> bool:
    """Whether the trigger understands the workers' statuses."""
    assert reading(trigger).total("relaygr_trigger_bad_statuses_total") == 0
    return reading(trigger).total("relaygr_trigger_fleet_owned_partitions") == relay.kafka.partitions


def assert_equal(scores: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE * np.abs(expected).max(), rtol=0)


def jobs_of(worker: CommandProcess) -> float:
    """Number of jobs after which a prefix was ready."""
    done = jobs_done(worker)
    return sum(done.get(outcome, 0) for outcome in ("computed", "already_cached", "reloaded"))


def assert_no_error_is_logged(folder: Path) -> None:
    lines = [line for log in folder.glob("*.log") for line in log.read_text(encoding="utf-8").splitlines()]
    assert [line for line in lines if "Traceback" in line or '"level": "error"' in line or "[error" in line] == []
