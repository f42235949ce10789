"""Workers for pre-infer, as real processes with a real store: they prepare prefixes that owners load, and what they do
not prepare the owners serve as ever.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ByteSize

from relaygr.client import Ended, RankOutcome, RelayClient
from relaygr.cluster.admin import create_topics
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess, is_ready
from relaygr.schemas.messages import History, PrefixSource, RetrievalEvent
from relaygr.worker.model.checkpoint import random_checkpoint
from relaygr.worker.pool.settings import PoolSettings
from relaygr.worker.settings import WorkerSettings
from tests.waiting import until
from tests.worlds.own_broker import own_broker
from tests.worlds.pool import Mooncake, mooncake
from tests.worlds.relay import (
    COEFFICIENTS,
    Relay,
    candidates_of,
    history_of,
    jobs_done,
    model_config,
    new_user,
    reading,
    save_model,
)

pytestmark = [pytest.mark.outage, pytest.mark.timeout(600)]

LENGTH = 1000
LEAD_S = 4.0
SLOTS = WorkerSettings().pre_infer_slots
SLOW_DEVICE = replace(COEFFICIENTS, b1=500)
"""The calibration says that a prefix takes half a second, so that fetching pays on a busy machine, too."""
ON_KAFKA = pytest.mark.parametrize("broker", [pytest.param("kafka", marks=pytest.mark.kafka)], indirect=True)
"""The embedded cluster has no share groups: there one worker gets all jobs, which two tests try."""
POOL = "scenarios={default: {pre_infer: pool}}"


@dataclass
class World:
    """A relay whose trigger sends its jobs to pre-infer workers while there are any."""

    relay: Relay
    stores: Mooncake
    client: RelayClient
    owner: CommandProcess
    trigger: CommandProcess

    def start_pre_infer(self, name: str) -> CommandProcess:
        worker = self.relay.start_worker(name, command=("worker", "--role", "pre-infer"))
        self.relay.await_ready(worker)
        until(lambda: self.is_open, "the trigger knows it")
        return worker

    def publish(self, count: int) -> list[History]:
        users = [history_of(new_user("prepared"), LENGTH, seed) for seed in range(count)]
        for user in users:
            self.client.publish_history(user)
        return users

    def begin(self, user: History, lead_s: float = LEAD_S) -> RetrievalEvent:
        """Announces an impression."""
        return self.client.publish_retrieval(
            user.user_id, expected_candidates=20, expected_suffix=0, ranking_budget_ms=20_000,
            expected_ranking_in_ms=int(lead_s * 1000), history_version=user.version(),
        )  # fmt: skip

    def rank(self, user: History, event: RetrievalEvent) -> RankOutcome:
        return self.client.rank(
            user.user_id, candidates_of(), history_version=user.version(), budget_ms=20_000, request_id=event.request_id
        )

    def rank_when_due(self, user: History, event: RetrievalEvent, outcomes: dict[str, RankOutcome]) -> None:
        time.sleep(max(0.0, event.expected_ranking_at_us / 1e6 - time.time()))
        outcomes[user.user_id] = self.rank(user, event)

    def assert_as_full(self, user: History, outcome: RankOutcome) -> None:
        """The scores are those of full inference."""
        full = self.client.rank(user.user_id, candidates_of(), history=user, budget_ms=20_000).result
        assert full is not None and outcome.result is not None
        np.testing.assert_allclose(outcome.result.scores, full.scores, rtol=0, atol=2e-5 * np.abs(full.scores).max())

    def await_quiet(self, *workers: CommandProcess) -> None:
        """Until no job is under way. One that no worker can end in time ends there."""
        until(
            lambda: self.told() + sum(jobs(worker, "rejected") for worker in workers) == self.to_pool(),
            "nothing is under way",
        )

    def told(self) -> float:
        """Jobs that reached their owner."""
        return sum(jobs_done(self.owner).values())

    @property
    def is_open(self) -> bool:
        return reading(self.trigger).total("relaygr_trigger_pool_open") == 1

    def to_pool(self) -> float:
        return reading(self.trigger).total("relaygr_trigger_jobs_to_pool_total")


@contextmanager
def running(kafka: KafkaSettings, folder: Path) -> Iterator[World]:
    """Without pre-infer workers yet."""
    config = model_config()
    model = save_model(folder / "model", config, random_checkpoint(config, 7).tensors, SLOW_DEVICE)
    secret = folder / "secret"
    secret.write_bytes(b"0123456789abcdef")
    # Else the master forgets a holder that is stopped, and for good.
    with mooncake(folder / "mooncake", forgets_s=120) as stores:
        pool = PoolSettings(store=stores.url, secret_file=secret)
        memory = {"hbm_bytes": ByteSize(16 << 20), "dram_bytes": ByteSize(32 << 20)}
        with Relay(kafka, folder / "relay", model, pool=pool, **memory) as relay, relay.client() as client:
            owner, trigger = relay.start_worker("worker-00"), relay.start_trigger(POOL)
            relay.await_ready(owner, trigger)
            until(lambda: reading(owner).total("relaygr_pool_away") == 0, "the pool is there")
            yield World(relay, stores, client, owner, trigger)


@pytest.fixture
def world(kafka_settings: KafkaSettings, tmp_path: Path) -> Iterator[World]:
    with running(kafka_settings, tmp_path) as world:
        yield world


def jobs(worker: CommandProcess, event: str) -> float:
    return reading(worker).total("relaygr_preinfer_pool_jobs_total", event=event)


def loaded(world: World) -> float:
    return reading(world.owner).total("relaygr_pool_fetches_total", outcome="loaded")


def warm(world: World, *workers: CommandProcess) -> None:
    """Until each is a member of the group, and has a job behind it."""

    def has_each() -> bool:
        for user in world.publish(2):
            world.begin(user, 20.0)
        time.sleep(0.5)
        return all(jobs(worker, "prepared") > 0 for worker in workers)

    until(has_each, "every worker has jobs")


def assert_ranked(outcomes: Iterable[RankOutcome]) -> None:
    assert {outcome.status for outcome in outcomes} == {Ended.RANKED}


def test_an_owner_ranks_on_prefixes_that_a_pre_infer_worker_computed(world: World) -> None:
    worker = world.start_pre_infer("pre-infer-00")
    warm(world, worker)
    world.await_quiet(worker)
    sent, there = world.to_pool(), loaded(world)
    users = world.publish(6)
    events = [world.begin(user, 20.0) for user in users]
    until(lambda: loaded(world) >= there + len(users), "the owner has them")
    assert world.to_pool() == sent + len(users)
    for user, event in zip(users, events, strict=True):
        outcome = world.rank(user, event)
        assert outcome.status is Ended.RANKED and outcome.result is not None, outcome
        assert outcome.result.prefix_source is PrefixSource.DRAM
        world.assert_as_full(user, outcome)
    assert world.relay.stop(worker) == 0
    # Its last status says that it stops.
    until(lambda: not world.is_open, "the trigger knows")
    sent = world.to_pool()
    (user,) = world.publish(1)
    event = world.begin(user, 2.0)
    until(lambda: jobs_done(world.owner).get("computed", 0) > 0, "the owner has computed it")
    assert_ranked([world.rank(user, event)])
    assert world.to_pool() == sent


@ON_KAFKA
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_pre_infer_worker_that_dies_or_hangs_takes_only_the_jobs_in_its_slots_along(
    world: World, number: signal.Signals
) -> None:
    first, second = world.start_pre_infer("pre-infer-00"), world.start_pre_infer("pre-infer-01")
    warm(world, first, second)
    world.await_quiet(first, second)
    rejected = jobs(second, "rejected")
    users, outcomes, told, sent = world.publish(24), dict[str, RankOutcome](), world.told(), world.to_pool()
    with ThreadPoolExecutor(len(users)) as requests:
        for at, user in enumerate(users):
            if at == len(users) // 2:
                first.process.send_signal(number)
            requests.submit(world.rank_when_due, user, world.begin(user), outcomes)
            time.sleep(0.1)
    assert len(outcomes) == len(users)
    assert_ranked(outcomes.values())
    for user in users:
        world.assert_as_full(user, outcomes[user.user_id])
    # The session and the locks of the dead one have not ended. The status of the other one says what it refused.
    finished = jobs(second, "rejected") - rejected
    missing = world.to_pool() - sent - (world.told() - told) - finished
    assert missing <= SLOTS, (world.to_pool() - sent, world.told() - told, finished)
    before = jobs(second, "prepared")
    for user in world.publish(4):
        world.begin(user, 20.0)
    until(lambda: jobs(second, "prepared") >= before + 4, "the other one goes on")
    world.relay.kill(first)


@pytest.mark.parametrize(
    ("broker", "number"),
    [
        pytest.param("kafka", signal.SIGKILL, marks=pytest.mark.kafka),
        pytest.param("kafka", signal.SIGSTOP, marks=pytest.mark.kafka),
        ("embedded", signal.SIGSTOP),
    ],
    indirect=["broker"],
)
def test_while_the_store_is_dead_or_hangs_owners_compute_and_afterwards_the_pool_does(
    world: World, number: signal.Signals
) -> None:
    worker, outcomes = world.start_pre_infer("pre-infer-00"), dict[str, RankOutcome]()
    warm(world, worker)
    # A master that hangs would keep the first call of every process.
    for process in world.stores.processes if number is signal.SIGKILL else world.stores.processes[-1:]:
        process.send_signal(number)
    events = list[tuple[History, RetrievalEvent]]()

    def is_closed() -> bool:
        (user,) = world.publish(1)
        events.append((user, world.begin(user, 2.0)))
        time.sleep(0.2)
        return not world.is_open

    until(is_closed, "jobs go to the owner")
    sent, computed = world.to_pool(), jobs_done(world.owner).get("computed", 0)

    def has_computed() -> bool:
        """On a busy machine a job may come after its impression."""
        (user,) = world.publish(1)
        events.append((user, world.begin(user, 2.0)))
        time.sleep(0.2)
        return jobs_done(world.owner).get("computed", 0) >= computed + 4

    until(has_computed, "the owner computes")
    assert world.to_pool() == sent
    for user, event in events:
        world.rank_when_due(user, event, outcomes)
    assert_ranked(outcomes.values())
    if number is signal.SIGKILL:
        world.stores.start_master()
        world.stores.start_holder()
    else:
        world.stores.processes[-1].send_signal(signal.SIGCONT)
    until(lambda: world.is_open, "jobs go to the pool again", 120)
    before = jobs(worker, "prepared")

    def is_prepared() -> bool:
        for user in world.publish(1):
            world.begin(user)
        time.sleep(0.5)
        return jobs(worker, "prepared") > before

    until(is_prepared, "it prepares again")


@ON_KAFKA
def test_a_deleted_user_leaves_nothing_in_the_store(world: World) -> None:
    worker = world.start_pre_infer("pre-infer-00")
    warm(world, worker)
    world.await_quiet(worker)
    (user,) = world.publish(1)
    written = reading(worker).total("relaygr_pool_objects_written_total", outcome="stored")
    world.begin(user)
    until(
        lambda: reading(worker).total("relaygr_pool_objects_written_total", outcome="stored") > written,
        "it is written",
    )
    # The owner's deletions are not what is asked for.
    world.relay.kill(world.owner)
    world.client.tombstone(user.user_id)
    until(lambda: reading(worker).total("relaygr_pool_objects_removed_total", reason="deletion") > 0, "deleted")


@pytest.mark.kafka
def test_while_kafka_cannot_keep_the_share_group_owners_compute_and_the_pre_infer_worker_is_not_ready(
    tmp_path: Path,
) -> None:
    """One broker, and an internal topic that wants two: Kafka gives the group's members no partition."""
    with own_broker({}, {"share.coordinator.state.topic.replication.factor": "2"}) as broker:
        kafka = KafkaSettings(bootstrap=broker.bootstrap, partitions=4)
        create_topics(kafka)
        with running(kafka, tmp_path) as world:
            worker = world.relay.start_worker("pre-infer-00", command=("worker", "--role", "pre-infer"))
            until(lambda: "no partition of its share group" in worker.log.read_text(), "the worker says it")
            assert not is_ready(worker.port)
            for user in world.publish(5):
                world.begin(user, 20.0)
            until(lambda: jobs_done(world.owner).get("computed", 0) >= 5, "the owner computes")
            assert world.to_pool() == 0


def test_without_a_pool_the_role_is_refused_at_once(module_kafka: KafkaSettings, model: Path, tmp_path: Path) -> None:
    with Relay(module_kafka, tmp_path / "relay", model) as relay:
        worker = relay.start_worker("pre-infer-00", command=("worker", "--role", "pre-infer"))
        assert worker.process.wait(60) == 1
        assert "set worker.pool.store" in worker.log.read_text()
        relay.forget(worker)
