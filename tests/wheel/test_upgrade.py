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
from relaygr.schemas.codec import SCHEMA_VERSION, DecodeReason, encode
from relaygr.schemas.ended import Reason
from relaygr.schemas.messages import BehaviourEvent
from relaygr.schemas.partitioner import partition_for
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
from tests.wheel.wheel_world import Environment
from tests.worlds.pair import await_pair
from tests.worlds.relay import (
    DeadLetters,
    RawGateway,
    Relay,
    candidates_of,
    history_of,
    jobs_done,
    make_model,
    reading,
)
from tests.worlds.steady_traffic import Traffic
from tests.worlds.toy_rankers import checked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("broker", ["embedded"], indirect=True),
]

USERS = {f"user-{number:02d}": 100 + number for number in range(8)}
INTERVAL_S = 0.1
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
            until(
                lambda: all(jobs_of(worker) > jobs for worker, jobs in zip(workers, before, strict=True)),
                "both workers get jobs of the trigger that is left",
            )

            other = start_gateway(relay, then)
            relay.await_ready(other.process)
            traffic.through(gateway, other)
            stage.passes({"worker-00", "worker-01"}, other)
            assert_equal(stage.scores(other), stage.scores(gateway))
            for each in (gateway, other):
                assert all(waits_in_vain(each, list(histories.lengths)[:4]))

            assert_a_later_schema_version_is_refused_by_name(relay, {"worker-00", "worker-01"})

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
        # Only what was refused by name, and once more what the killed worker had read and not committed.
        assert len(USERS) <= sum(relay.ends(Topic.DEAD_LETTERS).values()) <= 2 * len(USERS)
        for process in relay.processes.running:
            assert relay.stop(process) == 0
    assert_no_traceback_is_logged(tmp_path / "relay")


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
            relay.client, users, lambda user: history_of(user, 100), candidates_of(), INTERVAL_S, BUDGET_MS
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
    assert_no_traceback_is_logged(tmp_path / "relay")


def knows_all_owners(relay: Relay, trigger: CommandProcess) -> bool:
    """Whether the trigger understands the workers' statuses."""
    assert reading(trigger).total("relaygr_trigger_bad_statuses_total") == 0
    return reading(trigger).total("relaygr_trigger_fleet_owned_partitions") == relay.kafka.partitions


def assert_a_later_schema_version_is_refused_by_name(relay: Relay, workers: set[str]) -> None:
    """By the workers of both versions: to the caller, and in a dead letter."""
    gateway, letters = RawGateway(relay.kafka), DeadLetters(relay.kafka)
    name = relay.kafka.topic(Topic.RANKING)
    refused = set()
    for user in USERS:
        headers = gateway.headers()
        wire = bytes((SCHEMA_VERSION + 1,)) + encode(gateway.request(headers, user))[1:]
        place = partition_for(user.encode(), relay.kafka.partitions)
        gateway.send(Topic.RANKING, wire, user.encode(), headers.encode(), place)
        answer = gateway.answer(headers)
        assert (answer.outcome, answer.reason) == (Ended.FAILED, Reason.UNDECODABLE)
        assert answer.detail is not None and f"schema version byte is {SCHEMA_VERSION + 1}" in answer.detail
        assert letters.of(wire, name)["dead_letter_reason"] == DecodeReason.UNSUPPORTED_VERSION
        refused.add(answer.worker_id)
    assert refused == workers
    letters.close()
    gateway.close()


def assert_equal(scores: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE * np.abs(expected).max(), rtol=0)


def test_a_process_of_the_other_version_does_not_take_the_id_of_a_worker_that_runs(
    kafka_settings: KafkaSettings, tmp_path: Path, versions: tuple[Version, Version]
) -> None:
    first, then = versions
    with Relay(kafka_settings, tmp_path / "relay", make_model(tmp_path / "model"), drain_s=0.1) as relay:
        with first.starts():
            worker = relay.start_worker()
        relay.await_ready(worker)
        with then.starts():
            other = relay.start_worker()
        assert other.process.wait(PAIR_S) == 1
        assert f"worker-00 runs already on this machine, as process {worker.process.pid}" in other.log_tail()
        relay.forget(other)
        assert relay.stop(worker) == 0


def test_the_earlier_version_refuses_what_it_does_not_know_in_a_sentence(
    kafka_settings: KafkaSettings, tmp_path: Path, earlier: Environment
) -> None:
    """A rollback takes new settings and models of new kinds back first."""
    ranker = checked(tmp_path / "ranker")
    model = make_model(tmp_path / "model")
    with Relay(kafka_settings, tmp_path / "relay", model) as relay, Version("earlier", earlier).starts():
        for setting, sentence in (
            ("worker.ranker_modules=[a]", "worker.ranker_modules (--set) is not a setting"),
            (f"worker.model={ranker}", "config.json is not a model configuration"),
        ):
            worker = relay.start_worker("worker-00", setting)
            assert worker.process.wait(PAIR_S) != 0
            assert sentence in worker.log_tail()
            relay.forget(worker)


def jobs_of(worker: CommandProcess) -> float:
    """Number of jobs after which a prefix was ready."""
    done = jobs_done(worker)
    return sum(done.get(outcome, 0) for outcome in ("computed", "already_cached", "reloaded"))


def assert_no_traceback_is_logged(folder: Path) -> None:
    """By no process: nothing of the other version was a surprise."""
    lines = [line for log in folder.glob("*.log") for line in log.read_text(encoding="utf-8").splitlines()]
    assert [line for line in lines if "Traceback" in line] == []
