"""The whole relay on each ranker that others wrote: ahead, on both tiers, reloaded, and killed under traffic."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest

from relaygr.client import Ended, LostRequest, RankOutcome, RelayClient
from relaygr.devbroker import LocalBroker
from relaygr.processes import CommandProcess, read_children, read_metrics
from relaygr.schemas.messages import History, Path, RankingResult
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.rankers import read_ranker
from tests.waiting import becomes, until
from tests.worlds.other_rankers import PAGE_TOKENS, SUFFIX, USERS, Other, Written, behaviours_of
from tests.worlds.pair import await_pair, children
from tests.worlds.relay import PARTITIONS, Relay, jobs_done, new_user, own_topics, reading
from tests.worlds.steady_traffic import Steady

pytestmark = [pytest.mark.kafka, pytest.mark.outage]

BUDGET_MS = 20_000
STANDBY_TIMEOUT_S = 90.0
TOLERANCE = 2e-5


def owns_half(worker: CommandProcess) -> bool:
    return reading(worker).total("relaygr_consumer_owned_partitions") == PARTITIONS / 2


class World:
    """A worker with a standby, one without, a trigger, and a client. The workers' model is a link."""

    def __init__(self, relay: Relay, written: Written) -> None:
        self.relay, self.written = relay, written
        self.pair = relay.start_worker("worker-00", command=["worker", "--standby"])
        self.workers = [self.pair, relay.start_worker("worker-01")]
        relay.await_ready(*self.workers, relay.start_trigger("trigger.policy=always"))
        until(lambda: all(map(owns_half, self.workers)), "each has its partitions")
        self.lost: list[LostRequest] = []
        self.client: RelayClient = relay.client(on_lost=self.lost.append)
        self.users = [new_user() for _ in range(USERS)]
        self.revisions = [read_ranker(model).revision for model in written.models]

    def history(self, number: int) -> History:
        behaviours = behaviours_of(self.written.items[number, :-SUFFIX])
        return History(self.users[number], len(behaviours), np.empty(0, np.int64), behaviours)

    def announce(self, number: int) -> str:
        """The event of a request, for which the trigger has the prefix computed. Returns the request's id."""
        history = self.history(number)
        return self.client.publish_retrieval(
            history.user_id,
            history_version=history.version(),
            ranking_budget_ms=BUDGET_MS,
            expected_ranking_in_ms=1_000,
            expected_candidates=self.written.candidates.size,
            expected_suffix=SUFFIX,
        ).request_id

    def prepared(self, number: int) -> str:
        """The id of a request whose prefix a job has computed. On a busy machine a job may come too late."""
        before = self.computed()
        for _ in range(6):
            request_id = self.announce(number)
            if becomes(lambda: self.computed() > before, 15):
                break
        else:
            pytest.fail("no job was computed")
        return request_id

    def submit(self, number: int, **fields: str) -> Future[RankOutcome]:
        history = self.history(number)
        suffix = behaviours_of(self.written.items[number, -SUFFIX:], len(history.behaviours))
        return self.client.submit_rank(
            history.user_id, self.written.candidates, budget_ms=BUDGET_MS, history_version=history.version(),
            suffix=suffix, **fields,
        )  # fmt: skip

    def scored(self, number: int, asked: Future[RankOutcome]) -> RankingResult:
        """The result, which has the scores of full inference by the model that it names."""
        outcome = asked.result(BUDGET_MS / 1e3 + 30)
        assert outcome.status is Ended.RANKED, outcome
        result = outcome.result
        assert result is not None and result.scores is not None
        wanted = self.written.scores[self.revisions.index(result.model_revision), number]
        assert np.abs(result.scores.ravel() - wanted).max() <= TOLERANCE * np.abs(wanted).max()
        return result

    def has_reloaded(self) -> bool:
        ports = [self.workers[1].port, *(child["port"] for child in read_children(self.pair.port).values())]
        return all(read_metrics(port).total("relaygr_model_reloads_total", outcome="swapped") == 1 for port in ports)

    def computed(self) -> float:
        return jobs_done(*self.workers).get("computed", 0)


class Visits(Steady):
    """Requests of the users in turn, some announced."""

    def __init__(self, world: World) -> None:
        super().__init__(0.03)
        self.world = world
        self.sent: list[tuple[int, Future[RankOutcome]]] = []

    def send(self, number: int) -> None:
        user = number % USERS
        fields = {} if number % 5 else {"request_id": self.world.announce(user)}
        self.sent.append((user, self.world.submit(user, **fields)))


@pytest.fixture(params=list(Other))
def other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Other:
    chosen: Other = request.param
    for name, value in chosen.environment().items():
        monkeypatch.setenv(name, value)
    return chosen


@pytest.fixture
def world(other: Other, real_broker: LocalBroker, tmp_path: FilePath) -> Iterator[World]:
    written = Written.of(other, tmp_path)
    (tmp_path / "current").symlink_to(written.models[0])
    settings: dict[str, Any] = {
        "ranker_modules": (other.module,),
        "kv_dtype": KvDtype.FLOAT32,
        "page_tokens": PAGE_TOKENS,
        "model_poll_s": 0.5,
    }
    with ExitStack() as stack:
        kafka = stack.enter_context(own_topics(real_broker))
        relay = stack.enter_context(Relay(kafka, tmp_path / "relay", tmp_path / "current", **settings))
        world = World(relay, written)
        stack.enter_context(world.client)
        yield world


def test_on_the_ranker_of_others_nothing_is_lost_and_every_score_is_that_of_full_inference(
    world: World, tmp_path: FilePath
) -> None:
    for number in range(USERS):
        world.client.publish_history(world.history(number))
        request_id = world.prepared(number)
        ahead = world.scored(number, world.submit(number, request_id=request_id))
        assert ahead.path is Path.HBM and ahead.tokens_cached == ahead.prefix_tokens > 0, ahead
    again = Counter(world.scored(number, world.submit(number)).path for number in range(USERS))
    assert again[Path.DRAM] > 0, again

    before = await_pair(world.pair.port, STANDBY_TIMEOUT_S)
    with Visits(world) as visits:
        until(lambda: len(visits.sent) > USERS, "requests for the first model")
        (tmp_path / "next").symlink_to(world.written.models[1])
        (tmp_path / "next").replace(tmp_path / "current")
        until(world.has_reloaded, "both workers and the standby have the second model")
        reloaded = len(visits.sent)
        until(lambda: len(visits.sent) > reloaded + 2 * USERS, "requests for the second model")
        os.kill(before.active, signal.SIGKILL)
        killed = len(visits.sent)
        until(lambda: children(world.pair.port).get("active") == before.standby, "the standby is active")
        until(lambda: len(visits.sent) > killed + 4 * USERS, "more traffic")
    results = [world.scored(user, asked) for user, asked in visits.sent]
    assert world.lost == []
    assert results[0].model_revision == world.revisions[0]
    assert {each.model_revision for each in results[reloaded:]} == {world.revisions[1]}
    assert {each.worker_id for each in results[killed:]} == {"worker-00", "worker-01"}
    assert reading(world.pair).by_label("relaygr_arena_prefixes_total", "outcome")["restored"] > 0
    assert Path.DRAM in {each.path for each in results[killed:]}
