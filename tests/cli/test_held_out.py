"""The test part of a training run as traffic: what is played, what is retrieved, and what the lists were worth."""

from __future__ import annotations

import math
import shutil
import uuid
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaygr.client import Ended, RankOutcome
from relaygr.demo.quality import compare_quality
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import BehaviourEvent, History, RankingResult, StageTimings
from relaygr.schemas.messages import Path as RankingPath
from relaygr.traffic.held_out import FoundCandidates, HeldOutPopulation, retrieval_text, search_of
from relaygr.traffic.player import Player
from relaygr.traffic.population import population_of
from relaygr.traffic.records import ImpressionRecord
from relaygr.traffic.schedule import HISTORY_LEAD_US, impressions
from relaygr.traffic.settings import TrafficSettings
from relaygr.training.options import Protocol
from relaygr.training.pipeline import Progress, train_ranker
from relaygr.training.retrieval import BaselineSearch, ItemSearch, found_shares
from relaygr.training.runs import Run
from relaygr.training.splits import Part, split_log
from tests.training.made_logs import QUICK, Recorder, cyclic_log, write_inter

pytestmark = pytest.mark.slow  # They train.

LOG = cyclic_log(users=30, length=60)
# In the order of their ids, as in a log that is read from a file.
LOG = replace(LOG, users=sorted(LOG.users))
USERS = 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    log = write_inter(folder / "log.inter", LOG)
    progress = Progress(Recorder(), lambda name, steps: None, lambda: None)
    options = replace(QUICK, epochs=12, learning_rate=5e-3)
    train_ranker(LOG, [log], options, Run(folder / "ranker"), progress)
    return folder / "ranker"


@pytest.fixture
def settings(run: Path) -> TrafficSettings:
    return TrafficSettings(held_out=run, users=USERS, suffix=0, candidates=20, rate_per_s=50)


@pytest.fixture
def population(settings: TrafficSettings) -> HeldOutPopulation:
    found = population_of(settings)
    assert isinstance(found, HeldOutPopulation)
    return found


def test_the_users_are_those_with_the_most_behaviours(population: HeldOutPopulation) -> None:
    lengths = [population.sequence_length(user) for user in range(population.size)]
    assert lengths == sorted(LOG.lengths.tolist(), reverse=True)[:USERS]


def test_each_test_behaviour_is_one_impression_after_the_history_before_it(
    settings: TrafficSettings, population: HeldOutPopulation
) -> None:
    played = list(impressions(settings, population))
    for user in range(population.size):
        own = [each for each in played if each.user == user]
        first, end = population.first_length(user), population.sequence_length(user)
        assert first == end - end // 10, "the last tenth is the test part"
        assert [each.history_length for each in own] == list(range(first, end))
        assert [each.next_item for each in own] == population.sequence(user).items[first:].tolist()
    assert [each.number for each in played] == list(range(len(played)))


def test_of_a_log_split_at_one_time_those_who_come_after_it_are_played() -> None:
    split = split_log(LOG, Protocol.GLOBAL_TIME)
    own = TrafficSettings(users=len(LOG.users), suffix=0)
    played = HeldOutPopulation(split, LOG.times_ms, own)
    names = [played.user_id(index) for index in range(played.size)]
    assert sorted(names) == [LOG.users[user] for user in split.judged_users(Part.TEST)]
    assert 0 < played.size < len(LOG.users)
    assert all(0 < played.first_length(index) < played.sequence_length(index) for index in range(played.size))


def test_a_user_comes_back_after_the_behaviour_before_was_published(
    settings: TrafficSettings, population: HeldOutPopulation
) -> None:
    shown_us: Counter[int] = Counter()
    times = [each.retrieval_us for each in impressions(settings, population)]
    assert times == sorted(times)
    for each in impressions(settings, population):
        assert each.retrieval_us >= shown_us[each.user]
        shown_us[each.user] = each.ranking_us + settings.budget_ms * 1000 + HISTORY_LEAD_US


def test_a_duration_ends_the_run_earlier(settings: TrafficSettings, population: HeldOutPopulation) -> None:
    short = settings.model_copy(update={"duration_s": 0.3})
    played = list(impressions(short, population))
    assert 0 < len(played) < len(list(impressions(settings, population)))
    assert played == list(impressions(settings, population))[: len(played)]


def test_retrieval_finds_most_of_the_next_items(
    run: Path, settings: TrafficSettings, population: HeldOutPopulation
) -> None:
    source = FoundCandidates(run, settings, population)
    played = list(impressions(settings, population))
    found = 0
    for each in played:
        source.begin(each)
        candidates = source.of(each)
        assert len(set(candidates.tolist())) == settings.candidates
        assert np.isin(candidates, population.items).all()
        found += each.next_item in candidates
    assert found > 0.6 * len(played), "by chance it would be a third"


@pytest.mark.parametrize("name", ["ials", "item neighbours"])
def test_the_retrieval_that_found_most_in_validation_finds_the_candidates(
    run: Path, settings: TrafficSettings, population: HeldOutPopulation, tmp_path: Path, name: str
) -> None:
    """A baseline is fitted again with the parameters of the run."""
    shutil.copytree(run.parent, tmp_path / "data")
    copied = Run(tmp_path / "data" / "ranker")
    metrics = copied.read_json("metrics.json")
    shares = metrics["found_shares"]
    assert set(shares) == {"retrieval", "ials", "item neighbours"} and max(shares.values()) <= 1
    assert next(iter(found_shares(copied))) == max(shares, key=shares.__getitem__)
    copied.write_json("metrics.json", {**metrics, "found_shares": {**shares, name: 1.1}})
    search = search_of(copied.folder, None)
    assert isinstance(search, BaselineSearch)
    said = retrieval_text(copied.folder, None)
    assert said.startswith(f"{name}: 128 candidates have 110%") and "others the ranker's own" in said
    played = list(impressions(settings, population))
    found = 0
    for each in played:
        history = population.sequence(each.user)[: each.history_length]
        candidates = search.find(history, settings.candidates, history.items[:0])
        assert len(set(candidates.tolist())) == settings.candidates
        found += each.next_item in candidates
    assert found > 0.6 * len(played), "by chance it would be a third"


def test_retrieval_reads_nothing_after_the_history(
    run: Path, settings: TrafficSettings, population: HeldOutPopulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = next(iter(impressions(settings, population)))
    before = FoundCandidates(run, settings, population).of(each)
    whole = population.sequence(each.user)
    monkeypatch.setattr(population, "sequence", lambda user: whole[: each.history_length])
    assert np.array_equal(FoundCandidates(run, settings, population).of(each), before)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"suffix": 4}, "traffic.suffix=0"),
        ({"new_share": 0.1}, "leave out traffic.new_share"),
        ({"start_again": True}, "leave out traffic.start_again"),
        ({"interactions": Path("x.csv")}, "leave out traffic.interactions"),
        ({"held_out": Path("/nowhere")}, "relaygr train ranker"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: TrafficSettings, changed: dict[str, object], said: str) -> None:
    with pytest.raises(RelayError, match=said):
        population_of(settings.model_copy(update=changed))


def test_a_user_who_has_seen_every_item_gets_candidates_again(
    run: Path, settings: TrafficSettings, population: HeldOutPopulation
) -> None:
    search = ItemSearch(run / "checkpoint")
    found = search.find(population.sequence(0), 5, population.items)
    assert len(set(found.tolist())) == 5
    assert len(search.find(population.sequence(0), 1000, population.items[:50])) == population.items.size - 50


def test_a_moved_run_finds_the_log_beside_it(run: Path, settings: TrafficSettings, tmp_path: Path) -> None:
    shutil.copytree(run.parent, tmp_path / "moved")
    moved = tmp_path / "moved" / "ranker"
    assert Run(moved).log_paths() == [tmp_path / "moved" / "log.inter"]
    write_inter(tmp_path / "moved" / "log.inter", cyclic_log(users=30, length=60, seed=9))
    with pytest.raises(RelayError, match="is not the one"):
        population_of(settings.model_copy(update={"held_out": moved}))


def test_of_a_long_history_the_newest_behaviours_are_published(
    settings: TrafficSettings, population: HeldOutPopulation
) -> None:
    short = population_of(settings.model_copy(update={"history_max": 7}))
    for user in range(population.size):
        assert short.first_length(user) == 7
        whole, first = population.sequence(user), population.first_length(user)
        assert np.array_equal(short.sequence(user).items, whole.items[first - 7 :])


class Answering:
    """A client that ranks each request by the item ids, the largest first, with a second task that says otherwise."""

    def __init__(self, on_late: Any, on_lost: Any) -> None:
        self.published: dict[str, int] = {}

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def new_request_id(self) -> str:
        return uuid.uuid4().hex

    def publish_history(self, history: History) -> None:
        self.published[history.user_id] = len(history.behaviours)

    def publish_behaviours(self, event: BehaviourEvent) -> None:
        assert event.position == self.published[event.user_id], "nothing is left out, and nothing is sent twice"
        self.published[event.user_id] += len(event.behaviours)

    def publish_retrieval(self, user_id: str, **_: Any) -> None:
        pass

    def submit_rank(self, user_id: str, candidates: np.ndarray, **fields: Any) -> Future[RankOutcome]:
        scores = np.stack((candidates, -candidates), axis=1).astype("<f4").ravel()
        if "history_version" in fields:
            assert len(fields["suffix"]) == 0 and fields["history_version"].length == self.published[user_id]
        result = RankingResult(
            fields.get("request_id") or "warm-up", "w", Ended.RANKED, 1, 1, 1, StageTimings(), path=RankingPath.HBM,
            num_tasks=2, scores=scores,
        )  # fmt: skip
        done: Future[RankOutcome] = Future()
        done.set_result(RankOutcome(result.request_id, Ended.RANKED, 10, result))
        return done

    def drain(self, timeout_s: float) -> bool:
        return True


def test_the_player_publishes_each_behaviour_and_records_the_rank_of_what_the_user_chose(
    settings: TrafficSettings, population: HeldOutPopulation
) -> None:
    fast = settings.model_copy(update={"settle_s": 0.0, "lead_median_ms": 1.0, "budget_ms": 1, "rate_per_s": 1000.0})
    client, records = Answering(None, None), list[ImpressionRecord]()
    Player(lambda **_: client, fast, population, records.append).play()  # type: ignore[arg-type,return-value]
    ends = {population.user_id(user): population.sequence_length(user) for user in range(population.size)}
    assert client.published == ends, "what follows the last impression is published, too"
    played = {each.number: each for each in impressions(fast, population)}
    assert len(records) == len(played)
    source = FoundCandidates(settings.held_out or Path(), settings, population)
    for one in records:
        candidates, chosen = source.of(played[one.number]), played[one.number].next_item
        assert one.next_retrieved is (chosen in candidates)
        assert one.next_rank == ((candidates > chosen).sum() if one.next_retrieved else None)
        assert one.next_place == (candidates.tolist().index(chosen) if one.next_retrieved else None)


def record(number: int, user: str, rank: int | None, **changed: object) -> ImpressionRecord:
    fields = {
        "number": number, "request_id": f"r{number}", "user_id": user, "status": Ended.RANKED.value,
        "latency_us": 1000, "send_lag_us": 0, "late": False, "path": "hbm", "next_retrieved": rank is not None,
        "next_rank": rank, **changed,
    }  # fmt: skip
    return ImpressionRecord(**fields)  # type: ignore[arg-type]


def test_the_quality_of_two_runs_is_compared_by_test_behaviour() -> None:
    relay = [record(0, "a", 0), record(1, "a", 1), record(2, "b", None), record(3, "b", 12), record(4, "b", 0)]
    full = [
        record(0, "a", 1, path="truncated"),
        record(1, "a", 1),
        record(2, "b", None),
        record(3, "b", 0, late=True),
        record(4, "b", None, status="expired", next_retrieved=None),
    ]
    found = compare_quality(relay, full)
    second = 1 / math.log2(3)
    assert found.retrieved_share == 0.8
    assert (found.served.behaviours, found.served.users) == (5, 2)
    assert found.served.relay.mean == pytest.approx((1 + second + 0 + 0 + 1) / 5)
    assert found.served.full.mean == pytest.approx((second + second) / 5), "late and expired answers served nothing"
    assert found.both.behaviours == 3
    assert (found.served.retrieval.mean, found.both.retrieval.mean) == (0, 0), "no place is known"
    assert found.both.difference.mean == pytest.approx((1 - second) / 3)
    assert found.on_part.behaviours == 1 and found.on_part.difference.mean == pytest.approx(1 - second)


def test_the_order_of_retrieval_needs_no_answer() -> None:
    relay = [record(0, "a", 5, next_place=0), record(1, "b", 0, next_place=1, late=True), record(2, "b", None)]
    found = compare_quality(relay, relay)
    assert found.served.retrieval.mean == pytest.approx((1 + 1 / math.log2(3)) / 3)
    assert found.both.retrieval.mean == pytest.approx(1 / 2), "of those in time"


def test_requests_that_different_models_answered_are_left_out() -> None:
    """Else a checkpoint that is deployed in the middle of a run counts as the work of the relay."""
    relay = [
        record(number, f"u{number}", 0 if number < 5 else 5, model_revision="ab"[number // 5]) for number in range(10)
    ]
    full = [record(number, f"u{number}", 0, model_revision="a") for number in range(10)]
    found = compare_quality(relay, full)
    assert (found.other_model, found.served.behaviours, found.served.difference.mean) == (5, 5, 0)


def test_the_interval_treats_users_as_the_sample() -> None:
    """A hundred equal behaviours of two users are two observations, not two hundred."""
    one = [record(number, f"u{number // 100}", 0 if number < 100 else 1) for number in range(200)]
    other = [record(number, f"u{number // 100}", 1) for number in range(200)]
    difference = compare_quality(one, other).served.difference
    assert difference.low < 0 < difference.high
