"""A killed and restarted worker: its prefixes are in DRAM, and torn prefixes are never served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from relaygr.client import Ended, RankOutcome, RelayClient
from relaygr.cluster.topic_identity import identify_topics
from relaygr.consumer.finished import FinishedOffsets
from relaygr.devbroker import LocalBroker
from relaygr.processes import CommandProcess
from relaygr.schemas.messages import Path as ServedBy
from relaygr.schemas.messages import PrefixSource, RankingResult
from relaygr.schemas.topics import Topic
from tests.leftovers import owned_by_a_fixture
from tests.waiting import until
from tests.worlds.relay import (
    Relay,
    candidates_of,
    history_of,
    make_model,
    new_user,
    reading,
)

pytestmark = pytest.mark.outage

LENGTH = 300
BUDGET_MS = 20_000
START_BUDGET_MS = 60_000
"""A worker may take long to start on a busy machine."""
TOLERANCE = 2e-5


@dataclass(frozen=True)
class NextHolder:
    """Acts as the worker's successor, to read the finished offsets."""

    arena_epoch: int

    def is_held(self) -> bool:
        return True


class Life:
    """A worker that is killed and restarted, and a gateway that stays."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.worker = self.start()
        self.client: RelayClient = relay.client()
        self.client.start()

    def start(self, *settings: str) -> CommandProcess:
        worker = self.relay.start_worker("worker-00", *settings)
        self.relay.await_ready(worker)
        return worker

    def restart(self, *settings: str, after_death: Callable[[], None] = lambda: None) -> None:
        """Sends kill -9, damages files if asked to, and starts the worker again."""
        self.relay.kill(self.worker)
        after_death()
        self.worker = self.start(*settings)

    def rank(self, user: str, seed: int) -> RankingResult:
        version = history_of(user, LENGTH, seed).version()
        outcome = self.client.rank(user, candidates_of(), history_version=version, budget_ms=BUDGET_MS)
        assert outcome.status is Ended.RANKED, outcome
        assert outcome.result is not None
        return outcome.result

    def spilled(self, *users: str) -> dict[str, RankingResult]:
        """Ranks each user for the first time. Waits until the prefixes are in DRAM too and all work is done."""
        before = self.spills()
        results = {}
        for seed, user in enumerate(users):
            self.client.publish_history(history_of(user, LENGTH, seed))
            results[user] = self.rank(user, seed)
            assert results[user].path is ServedBy.FULL
        until(lambda: self.spills() >= before + len(users), "their prefixes are in DRAM")
        self.await_noted()
        return results

    def await_noted(self) -> None:
        """Waits until every request is finished, with its delivery report, and recorded as finished."""
        ends = self.relay.ends(Topic.RANKING)
        kafka, epoch = self.relay.kafka, int((self.folder / "epoch").read_text())
        topics = [kafka.topic(Topic.PREINFER), kafka.topic(Topic.RANKING)]
        identity = identify_topics(kafka, topics, "test-finished", 10)

        def noted() -> bool:
            log = FinishedOffsets(self.folder / "finished", identity, kafka.partitions, NextHolder(epoch + 1))
            log.begin()
            found = {tp.partition: each.finished for tp, each in log.predecessor().items() if tp.topic == topics[1]}
            return all(found.get(partition, 0) >= end for partition, end in ends.items())

        until(noted, "all requests noted as finished")

    def spills(self) -> float:
        return reading(self.worker).by_label("relaygr_cache_spills_ended_total", "outcome").get("published", 0)

    def counted(self, name: str, label: str) -> dict[str, float]:
        counts = reading(self.worker).by_label(name, label)
        return {value: count for value, count in counts.items() if count}

    @property
    def folder(self) -> Path:
        [lock] = (self.relay.folder / "shared").rglob("lock")
        return lock.parent

    def file(self, prefix: str) -> Path:
        [path] = self.folder.glob(f"{prefix}-*")
        return path


def assert_same_scores(one: RankingResult, other: RankingResult) -> None:
    assert one.scores is not None and other.scores is not None
    assert np.ptp(other.scores) > 0
    assert np.abs(one.scores - other.scores).max() <= TOLERANCE * np.abs(other.scores).max()


@pytest.fixture(scope="module")
def broker(embedded_broker: LocalBroker) -> LocalBroker:
    """The files of a worker do not depend on the broker. A real Kafka is in the tests of the standby."""
    return embedded_broker


@pytest.fixture(scope="module")
def life(relay: Relay) -> Iterator[Life]:
    life = Life(relay)
    with owned_by_a_fixture(relay.process_ids):
        yield life
    life.client.close()


def test_the_first_request_after_a_kill_is_served_from_dram_with_the_same_scores(life: Life) -> None:
    users = [new_user() for _ in range(3)]
    before = life.spilled(*users)
    life.restart()
    assert life.counted("relaygr_arena_prefixes_total", "outcome")["restored"] >= 3
    assert life.counted("relaygr_worker_ranked_total", "path") == {}, "a finished request was processed again"
    for seed, user in enumerate(users):
        after = life.rank(user, seed)
        assert (after.path, after.prefix_source) == (ServedBy.DRAM, PrefixSource.DRAM)
        assert_same_scores(after, before[user])
    # And a second time, from the arena that the second process wrote to.
    life.await_noted()
    life.restart()
    after = life.rank(users[0], 0)
    assert after.path is ServedBy.DRAM
    assert_same_scores(after, before[users[0]])


def test_a_planned_restart_keeps_the_prefixes_too(life: Life) -> None:
    user = new_user()
    before = life.spilled(user)
    assert life.relay.stop(life.worker) == 0
    life.worker = life.start()
    after = life.rank(user, 0)
    assert after.path is ServedBy.DRAM
    assert_same_scores(after, before[user])


def test_flipped_bytes_are_detected_at_the_first_reload_and_never_served(life: Life) -> None:
    user, other = new_user(), new_user()
    before = life.spilled(user, other)

    def flip() -> None:
        pages = np.memmap(life.file("dram"), np.uint8, "r+")
        pages[100::1000] ^= 0x40
        pages.flush()

    life.restart(after_death=flip)
    for seed, each in enumerate((user, other)):
        after = life.rank(each, seed)
        assert after.path is ServedBy.FULL
        assert_same_scores(after, before[each])
    assert life.counted("relaygr_arena_pages_verified_total", "outcome")["torn"] == 2


def test_another_models_prefixes_are_not_served_and_freed(life: Life, tmp_path_factory: pytest.TempPathFactory) -> None:
    user = new_user()
    before = life.spilled(user)
    other = make_model(tmp_path_factory.mktemp("other") / "model", seed=8)
    life.restart(f"worker.model={other}", f"worker.calibration={other / 'calibration.json'}")
    assert life.counted("relaygr_arena_prefixes_total", "outcome")["other_model"] >= 1
    after = life.rank(user, 0)
    assert after.path is ServedBy.FULL
    earlier = before[user].scores
    assert after.scores is not None and earlier is not None
    assert np.abs(after.scores - earlier).max() > TOLERANCE


def known(client: RelayClient, prefix: str, count: int, length: int) -> list[str]:
    """Users whose histories the worker has stored."""
    users = [new_user(prefix) for _ in range(count)]
    for seed, user in enumerate(users):
        client.publish_history(history_of(user, length, seed))
    for seed, user in enumerate(users):
        outcome = client.rank(
            user, candidates_of(), history_version=history_of(user, length, seed).version(), budget_ms=BUDGET_MS
        )
        assert outcome.result is not None and outcome.result.prefix_tokens == length + 1
    return users


def asked_without_a_version(client: RelayClient, users: list[str]) -> list[Future[RankOutcome]]:
    return [client.submit_rank(user, candidates_of(), budget_ms=START_BUDGET_MS) for user in users]


def histories_used(answers: list[Future[RankOutcome]]) -> list[int]:
    results = [answer.result(2 * START_BUDGET_MS / 1000).result for answer in answers]
    return [-1 if result is None else result.prefix_tokens for result in results]


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_requests_that_waited_for_a_start_are_ranked_with_the_histories_in_the_workers_store(
    life: Life, ends: str
) -> None:
    """Half of them were ranked on nothing: the worker had its partitions before it had looked into its store."""
    users = known(life.client, "returning", 40, 57)
    if ends == "kill":
        life.relay.kill(life.worker)
    else:
        assert life.relay.stop(life.worker) == 0
    answers = asked_without_a_version(life.client, users)
    life.worker = life.start()
    answers += asked_without_a_version(life.client, users[:10])
    assert histories_used(answers) == [58] * 50


def test_requests_of_moved_partitions_wait_for_the_histories_that_their_new_owner_reads(life: Life) -> None:
    users = known(life.client, "moving", 24, 61)
    life.relay.stop(life.worker)
    answers = asked_without_a_version(life.client, users)
    life.worker = life.relay.start_worker("worker-00", store="an-empty-store")
    life.relay.await_ready(life.worker)
    other = life.relay.start_worker("worker-01")
    until(lambda: not answers.extend(asked_without_a_version(life.client, users)) and owned(other), "partitions moved")
    life.relay.await_ready(other)
    answers += asked_without_a_version(life.client, users)
    found = histories_used(answers)
    assert found == [62] * len(found)
    assert reading(other).total("relaygr_worker_ranked_total") > 0
    life.relay.stop(other)
    life.restart()


def owned(worker: CommandProcess) -> float:
    with suppress(OSError):
        return reading(worker).total("relaygr_consumer_owned_partitions")
    return 0.0
