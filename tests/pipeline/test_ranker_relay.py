"""A team's own ranker in a worker: computed ahead, ranked, appended, reloaded; and one that raises, kills and hangs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path as FilePath

import numpy as np
import pytest

from relaygr.client import Ended, RankOutcome, RelayClient
from relaygr.devbroker import LocalBroker
from relaygr.processes import CommandProcess
from relaygr.schemas.ended import Reason
from relaygr.schemas.messages import Behaviours, History, Path, RankingResult
from relaygr.worker.calibration import Calibration, describe, save_calibration
from relaygr.worker.kv import KvDtype
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.engine import load_engine
from relaygr.worker.model.inference import FullRequest, full_inference
from tests.leftovers import owned_by_a_fixture
from tests.waiting import until
from tests.worlds.relay import COEFFICIENTS, Relay, computed_ahead, new_user, own_topics
from tests.worlds.toy_rankers import ITEMS, MODULE, checked

pytestmark = pytest.mark.slow

ROOT = FilePath(__file__).parents[2]
BAD_ITEM = 999
CANDIDATES = np.array([3, 40, 11, 59, 22], np.int64)
BUDGET_MS = 10_000
LONGEST_BUDGET_MS = 55_000


def model_of(folder: FilePath, seed: int) -> FilePath:
    """A checked folder with a calibration of its own."""
    checked(folder, "FailsForSomeItems", seed=seed)
    engine = load_engine(folder, "cpu", KvDtype.FLOAT32, 16, 1, ranker_modules=[MODULE])
    made = Calibration(describe(engine), datetime.now(UTC).isoformat(), COEFFICIENTS, (), (), (), ())
    save_calibration(made, folder / "calibration.json")
    return folder


def history_of(user_id: str, length: int) -> History:
    behaviours = Behaviours(
        np.arange(length, dtype=np.int64) * 17 % ITEMS,
        np.zeros(length, np.uint16),
        1_700_000_000_000 + np.arange(length, dtype=np.int64) * 60_000,
    )
    return History(user_id, length, np.empty(0, np.int64), behaviours)


def expected(model: FilePath, length: int) -> np.ndarray:
    """Full inference in this process."""
    engine = load_engine(model, "cpu", KvDtype.FLOAT32, 16, ranker_modules=[MODULE])
    arena = bind_own_arena(engine)
    asked = FullRequest(np.empty(0, np.int64), history_of("u", length).behaviours, CANDIDATES, 0)
    return full_inference(engine, asked, np.arange(arena.shape[0], dtype=np.int32)).outputs.scores.ravel()


class World:
    """A worker, a trigger and a client. The worker's model is a link."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.worker = relay.start_worker()
        self.trigger = relay.start_trigger()
        relay.await_ready(self.worker, self.trigger)
        self.client: RelayClient = relay.client()
        self.client.start()

    def rank(self, user_id: str, length: int, candidates: np.ndarray = CANDIDATES, **fields: str) -> RankOutcome:
        version = history_of(user_id, length).version()
        return self.client.rank(user_id, candidates, budget_ms=BUDGET_MS, history_version=version, **fields)

    def ranked(self, user_id: str, length: int, **fields: str) -> RankingResult:
        outcome = self.rank(user_id, length, **fields)
        assert outcome.status is Ended.RANKED, outcome
        assert outcome.result is not None
        return outcome.result

    def pre_inferred(self, user_id: str, length: int) -> str:
        """The id of a request whose prefix was computed ahead."""
        return computed_ahead(
            self.client,
            self.worker,
            history_of(user_id, length),
            ranking_budget_ms=BUDGET_MS,
            expected_ranking_in_ms=1_000,
            expected_candidates=CANDIDATES.size,
            expected_suffix=0,
        )

    def restarted(self) -> CommandProcess:
        self.relay.kill(self.worker)
        self.worker = self.relay.start_worker()
        self.relay.await_ready(self.worker)
        return self.worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> FilePath:
    folder = tmp_path_factory.mktemp("ranker")
    for seed in (1, 2):
        model_of(folder / f"model-{seed}", seed)
    (folder / "current").symlink_to(folder / "model-1")
    return folder


@pytest.fixture(scope="module")
def bad_items() -> Iterator[None]:
    """Processes find the toy rankers, which fail for BAD_ITEM and the two after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RELAYGR_TEST_BAD_ITEM", str(BAD_ITEM))
        yield


@pytest.fixture(scope="module")
def world(any_broker: LocalBroker, folder: FilePath, bad_items: None) -> Iterator[World]:
    settings = {"ranker_modules": (MODULE,), "kv_dtype": KvDtype.FLOAT32, "page_tokens": 16, "model_poll_s": 0.5}
    with (
        own_topics(any_broker) as kafka,
        Relay(kafka, folder / "relay", folder / "current", **settings) as relay,
    ):
        world = World(relay)
        with owned_by_a_fixture(relay.process_ids):
            yield world
        world.client.close()


def assert_scores(result: RankingResult, wanted: np.ndarray) -> None:
    assert result.scores is not None
    assert np.abs(result.scores.ravel() - wanted).max() <= 2e-5 * np.ptp(wanted)


def test_a_prefix_that_was_computed_ahead_and_one_that_grew_give_the_scores_of_full_inference(
    world: World, folder: FilePath
) -> None:
    user = new_user()
    request_id = world.pre_inferred(user, 60)
    hit = world.ranked(user, 60, request_id=request_id)
    assert (hit.path, hit.tokens_cached) == (Path.HBM, 60)
    assert_scores(hit, expected(folder / "current", 60))
    world.client.publish_history(history_of(user, 75))
    grown = world.ranked(user, 75)
    assert grown.tokens_cached >= 60
    assert_scores(grown, expected(folder / "current", 75))


def test_a_request_for_which_the_ranker_raises_fails_alone(world: World, folder: FilePath) -> None:
    user = new_user()
    world.client.publish_history(history_of(user, 30))
    with_bad = world.rank(user, 30, np.append(CANDIDATES, BAD_ITEM))
    assert with_bad.status is Ended.FAILED
    assert_scores(world.ranked(user, 30), expected(folder / "current", 30))


def test_new_weights_are_taken_while_it_serves_and_a_restart_keeps_them(world: World, folder: FilePath) -> None:
    user = new_user()
    before, after = (expected(folder / f"model-{seed}", 50) for seed in (1, 2))
    assert np.abs(before - after).max() > 0.1
    world.client.publish_history(history_of(user, 50))
    first = world.ranked(user, 50)
    assert_scores(first, before)
    (folder / "next").symlink_to(folder / "model-2")
    (folder / "next").replace(folder / "current")
    until(lambda: world.ranked(user, 50).model_revision != first.model_revision, "the new revision", 60)
    assert_scores(world.ranked(user, 50), after)
    world.restarted()
    assert_scores(world.ranked(user, 50), after)


@pytest.fixture
def pair(any_broker: LocalBroker, folder: FilePath, tmp_path: FilePath, bad_items: None) -> Iterator[Relay]:
    """A worker with a standby."""
    settings = {"ranker_modules": (MODULE,), "kv_dtype": KvDtype.FLOAT32, "page_tokens": 16, "watchdog_s": 2.0}
    with own_topics(any_broker) as kafka, Relay(kafka, tmp_path, folder / "model-1", **settings) as relay:
        relay.await_ready(relay.start_worker(command=["worker", "--standby"]))
        yield relay


@pytest.mark.parametrize("item", [BAD_ITEM + 1, BAD_ITEM + 2], ids=["kills", "hangs"])
def test_a_request_that_ends_two_processes_is_answered_and_the_others_are_ranked(
    pair: Relay, folder: FilePath, item: int
) -> None:
    wanted = expected(folder / "model-1", 40)
    with pair.client() as client:

        def asked(candidates: np.ndarray) -> Future[RankOutcome]:
            history = history_of(new_user(), 40)
            return client.submit_rank(history.user_id, candidates, budget_ms=LONGEST_BUDGET_MS, history=history)

        before, bad, after = asked(CANDIDATES), asked(np.append(CANDIDATES, item)), asked(CANDIDATES)
        failed = bad.result()
        assert (failed.status, failed.reason) == (Ended.FAILED, Reason.DEVICE_ERROR), failed
        assert failed.result is not None and "2 processes ended" in (failed.result.detail or "")
        for each in (before, after, asked(CANDIDATES)):
            outcome = each.result()
            assert outcome.result is not None, outcome
            assert_scores(outcome.result, wanted)
