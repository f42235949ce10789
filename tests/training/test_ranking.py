"""Metrics: equal to what other code computes from the written predictions, and not fooled by ties or unknown items."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from relaygr.runtime.errors import RelayError
from relaygr.training.baselines import popularity
from relaygr.training.options import Protocol
from relaygr.training.ranking import (
    AUC,
    HIT_RATE,
    LOG_LOSS,
    NDCG,
    TOP,
    candidates_of,
    chosen_users,
    estimate,
    judge,
    write_predictions,
)
from relaygr.training.splits import Part, Split, split_log
from tests.training.made_logs import cyclic_log
from tests.training.test_logs import log_of


@dataclass
class Given:
    """A model with given scores for every user."""

    scores: torch.Tensor

    def next_scores(self, user: int, part: Part, rows: torch.Tensor) -> torch.Tensor:
        return self.scores[rows]

    def liked_probabilities(self, user: int, part: Part) -> torch.Tensor | None:
        return None


SPLIT = split_log(cyclic_log(), Protocol.TIME)
USERS = range(len(SPLIT.users))


class RandomModel:
    """Random scores, different for each user."""

    def next_scores(self, user: int, part: Part, rows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(user).random(SPLIT.num_items).astype(np.float32))[rows]

    def liked_probabilities(self, user: int, part: Part) -> torch.Tensor | None:
        count = SPLIT.targets(user, part).stop - SPLIT.targets(user, part).start
        return torch.from_numpy(np.random.default_rng(user + 1).random(count).astype(np.float32))


def recomputed(line: dict) -> dict[str, float]:  # type: ignore[type-arg]
    """The metrics of one written prediction, by plain Python."""
    relevant = set(line["held_out"])
    gains = [1 / math.log2(place + 2) for place, item in enumerate(line["top"]) if item in relevant]
    ideal = sum(1 / math.log2(place + 2) for place in range(min(TOP, len(relevant))))
    pairs = list(zip(line["liked"], line["liked_probabilities"], strict=True))
    better = [(p > n) + 0.5 * (p == n) for liked, p in pairs if liked for other, n in pairs if not other]
    loss = -sum(math.log(p if liked else 1 - p) for liked, p in pairs) / len(pairs)
    return {
        NDCG: sum(gains) / ideal,
        HIT_RATE: float(bool(gains)),
        AUC: sum(better) / len(better) if better else math.nan,
        LOG_LOSS: loss,
    }


def test_other_code_computes_the_same_metrics_from_the_written_predictions(tmp_path: Path) -> None:
    judged = judge(SPLIT, RandomModel(), Part.TEST, USERS, keeps_predictions=True)
    write_predictions(tmp_path / "random.jsonl", judged.predictions)
    lines = [json.loads(line) for line in (tmp_path / "random.jsonl").read_text().splitlines()]
    assert len(lines) == len(SPLIT.users)
    for index, line in enumerate(lines):
        for name, value in recomputed(line).items():
            assert judged.values[name][index] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), (line, name)


def test_a_model_that_scores_all_items_equally_gets_the_metric_of_chance() -> None:
    """A held-out item that stands first among the candidates made such a model perfect elsewhere."""
    summary = judge(SPLIT, Given(torch.zeros(SPLIT.num_items)), Part.TEST, USERS).summary()
    held = np.mean([len(set(SPLIT.rows[SPLIT.targets(user, Part.TEST)])) for user in USERS])
    assert summary[NDCG].mean < 2 * held * TOP / SPLIT.num_items
    assert 0.05 < summary[HIT_RATE].mean < 0.8


def test_a_perfect_model_gets_one_and_scores_without_a_spread_above_zero_do_not_matter() -> None:
    class Perfect(RandomModel):
        def next_scores(self, user: int, part: Part, rows: torch.Tensor) -> torch.Tensor:
            scores = torch.full((SPLIT.num_items,), -1e9)
            scores[SPLIT.rows[SPLIT.targets(user, part)]] = -1e8
            return scores[rows]

    summary = judge(SPLIT, Perfect(), Part.TEST, USERS).summary()
    assert summary[NDCG].mean == pytest.approx(1.0) and summary[HIT_RATE].mean == 1.0


def test_scores_that_are_not_finite_are_refused_and_not_ranked() -> None:
    with pytest.raises(RelayError, match="not finite"):
        judge(SPLIT, Given(torch.full((SPLIT.num_items,), math.nan)), Part.TEST, USERS)


def test_a_held_out_item_outside_the_vocabulary_is_a_miss_and_not_left_out() -> None:
    split = split_log(log_of([20, 20], [*range(20), *range(18), 50, 51]), Protocol.TIME)
    scores = torch.arange(split.num_items, dtype=torch.float32)
    judged = judge(split, Given(scores), Part.TEST, [1])
    assert split.targets(1, Part.TEST) == slice(38, 40) and judged.values[NDCG].tolist() == [0.0]


def test_each_unknown_held_out_item_counts_in_the_ideal_ranking() -> None:
    """Of three held-out items one is in the vocabulary, and first of 22 candidates."""
    items = [*range(30), *range(5, 29), 50, 51, 52, 3, 53, 54]
    split = split_log(log_of([30, 30], items), Protocol.TIME)
    held = split.rows[split.targets(1, Part.TEST)].tolist()
    assert held == [3, split.num_items, split.num_items]
    scores = torch.zeros(split.num_items)
    scores[3] = 1e9
    found = judge(split, Given(scores), Part.TEST, [1]).values[NDCG][0]
    assert found == pytest.approx(1 / (1 + 1 / math.log2(3) + 1 / 2))


def test_items_of_the_history_are_no_candidates_unless_users_repeat_them() -> None:
    once: Split = split_log(log_of([20, 20], [*range(20), *range(5, 25)]), Protocol.TIME)
    candidates = candidates_of(once, 0, Part.TEST)
    in_history = set(once.rows[: once.history_end(0, Part.TEST)].tolist()) - {once.num_items}
    assert set(range(once.num_items)) - set(candidates.tolist()) == in_history
    assert candidates_of(SPLIT, 0, Part.TEST).tolist() == list(range(SPLIT.num_items))


def test_of_a_large_vocabulary_a_sample_is_ranked_with_all_that_is_held_out() -> None:
    split = split_log(log_of([30_000, 30_000]), Protocol.TIME)
    assert split.num_items == 48_000
    candidates = candidates_of(split, 0, Part.VALIDATION)
    assert candidates.size < 20_000 + 3_000
    log = log_of([37_500, 50], [*range(37_500), *range(50)])
    repeated = split_log(log, Protocol.TIME)
    held = repeated.rows[repeated.targets(1, Part.TEST)]
    candidates = candidates_of(repeated, 1, Part.TEST)
    assert candidates.size < repeated.num_items == 30_000
    assert set(held.tolist()) <= set(candidates.tolist())


def test_popularity_counts_the_training_part_only() -> None:
    counts = popularity(SPLIT).model.next_scores(0, Part.TEST, torch.arange(SPLIT.num_items))
    assert int(counts.sum()) == int(SPLIT.training_places().sum())


def test_an_interval_covers_what_is_known_and_leaves_out_what_is_not() -> None:
    found = estimate(np.array([1.0, 2.0, 3.0, np.nan]))
    assert (found.mean, found.users) == (2.0, 3)
    assert found.high - found.mean == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)  # Student's t of three.
    assert estimate(np.array([np.nan])).users == 0


def test_the_chosen_users_are_the_same_for_the_same_seed() -> None:
    assert chosen_users(SPLIT, Part.TEST, 0, 0).tolist() == list(USERS)
    some = chosen_users(SPLIT, Part.TEST, 10, 1)
    assert some.tolist() == chosen_users(SPLIT, Part.TEST, 10, 1).tolist() == sorted(set(some.tolist()))
    assert some.tolist() != chosen_users(SPLIT, Part.TEST, 10, 2).tolist()
