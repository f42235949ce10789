"""`relaygr train retrieval`: what is judged, a run that goes on, the command, and the file that is searched."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from relaygr.cli.app import app
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.training.comparison import CHOSEN, Queries, compare, target_scores, verdict
from relaygr.training.contrastive import Arm, Training, advance
from relaygr.training.domains import Domains, join_logs
from relaygr.training.options import RetrievalOptions
from relaygr.training.ranking import Estimate
from relaygr.training.retrieval import GraphSearch, save_retrieval
from relaygr.training.runs import Run
from relaygr.training.splits import Part
from tests.training.made_logs import write_inter
from tests.training.test_domains import SOURCE_LOG, TARGET_LOG

pytestmark = pytest.mark.slow  # They train.

OPTIONS = RetrievalOptions(intra_steps=3, inter_steps=4, cold_share=0.2)


@pytest.fixture
def domains() -> Domains:
    return join_logs(TARGET_LOG, SOURCE_LOG).with_cold(0.2, 0)


def places(domains: Domains, queries: Queries, scores: torch.Tensor) -> dict[int, list[float]]:
    """User -> the place of each held-out item, item by item."""
    held_out = domains.held_out(Part.TEST)
    found: dict[int, list[float]] = {}
    for user in queries.users.tolist():
        row = scores[queries.users.tolist().index(user)].tolist()
        own = domains.split.rows[held_out[domains.owners[held_out] == user]].tolist()
        others = [score for item, score in enumerate(row) if item not in own]
        found[user] = [
            sum(score > row[item] for score in others) if item < domains.num_target else math.inf for item in own
        ]
    return found


def test_full_ranking_is_that_of_each_held_out_item_among_all_others(domains: Domains) -> None:
    queries = Queries(domains, Part.TEST, 0)
    scores = torch.rand(len(queries.users), domains.num_target, generator=torch.Generator().manual_seed(0))
    expected = places(domains, queries, scores)
    hits = {user: np.mean([place < 10 for place in own]) for user, own in expected.items()}
    gains = {user: np.mean([(place < 10) / math.log2(place + 2) for place in own]) for user, own in expected.items()}
    found = queries.metrics(scores)
    for group, is_cold in (("warm", False), ("cold", True)):
        users = [user for user in expected if domains.is_cold[user] == is_cold]
        assert found[group]["full hit@10"] == pytest.approx(np.mean([hits[user] for user in users]))
        assert found[group][CHOSEN] == pytest.approx(np.mean([gains[user] for user in users]))
        assert found[group]["sampled hit@10"] >= found[group]["full hit@10"]


def test_equal_scores_are_in_the_middle(domains: Domains) -> None:
    queries = Queries(domains, Part.TEST, 0)
    assert queries.metrics(torch.zeros(len(queries.users), domains.num_target))["warm"]["full hit@10"] == 0


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.1, 0.3, "held"), (-0.3, -0.1, "not held"), (-0.1, 0.1, "undecided"), (math.nan, math.nan, "undecided")],
)
def test_a_direction_is_decided_if_the_interval_is_on_one_side_of_zero(low: float, high: float, said: str) -> None:
    gain, sure = (Estimate(0.0, *each, 5) for each in ((low, high), (0.1, 0.2)))
    assert verdict([gain]) == said
    assert verdict([gain, sure]) == ("held" if said == "held" else "undecided"), "all intervals must say it"


def compared(domains: Domains, folder: Path, seeds: int, stop_after: int | None = None) -> tuple[dict, int]:
    """The result without times, and the steps that were trained."""
    steps = 0

    def stepped() -> None:
        nonlocal steps
        steps += 1
        if steps == stop_after:
            raise KeyboardInterrupt

    found = compare(domains, [], OPTIONS, seeds, Run(folder), lambda name, count: None, stepped)
    return {arm: [groups["warm"], groups["cold"]] for arm, groups in found.arms.items()}, steps


def test_a_run_that_was_killed_goes_on_with_the_arm_that_it_was_in(tmp_path: Path) -> None:
    domains = join_logs(TARGET_LOG, SOURCE_LOG)
    whole, all_steps = compared(domains, tmp_path / "whole", 2)
    with pytest.raises(KeyboardInterrupt):
        compared(domains, tmp_path / "killed", 2, stop_after=all_steps // 2)
    again, steps = compared(domains, tmp_path / "killed", 2)
    assert again == whole and steps < all_steps * 0.7
    assert compared(domains, tmp_path / "whole", 2) == (whole, 0)
    assert 0 < compared(domains, tmp_path / "whole", 3)[1] < all_steps, "one more seed"


def train(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["train", "retrieval", *map(str, words)], catch_exceptions=False)


@pytest.fixture
def logs(tmp_path: Path) -> tuple[Path, Path]:
    target = write_inter(tmp_path / "target.inter", TARGET_LOG)
    return target, write_inter(tmp_path / "source.inter", SOURCE_LOG)


def test_the_command_compares_all_arms_and_ends_with_a_sentence(logs: tuple[Path, Path], tmp_path: Path) -> None:
    quick = ["--seeds", "2", "--intra-steps", "3", "--inter-steps", "4", "--out", tmp_path / "run"]
    done = train(*logs, *quick)
    assert done.exit_code == 0, done.output
    for arm in Arm:
        assert arm in done.output
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    last = done.output.strip().splitlines()[-1]
    assert last == metrics["sentence"] and last.startswith("Over 2 seeds") and last.endswith(".")
    shown = json.loads(train(*logs, *quick, "--json").stdout)
    assert shown["arms"] == metrics["arms"]
    assert {arm: len(found) for arm, found in shown["searched"].items()} == {
        "separated": 3, "joint": 9, "one domain": 3,
    }  # fmt: skip
    trained = {file.name for file in (tmp_path / "run" / "arms").iterdir()}
    for arm, found in shown["searched"].items():
        best = f"{arm}, {max(found, key=found.__getitem__)}, test, seed 1".replace(", ", "_").replace(" ", "-")
        assert f"{best}.json" in trained
    served = max(("separated", "joint"), key=lambda arm: max(shown["searched"][arm].values()))
    assert shown["served"] == served and f"retrieval.safetensors is the {served} arm's" in last
    GraphSearch(tmp_path / "run" / "retrieval.safetensors")


def test_one_log_twice_is_refused(logs: tuple[Path, Path], tmp_path: Path) -> None:
    done = train(logs[0], logs[0], "--out", tmp_path / "run")
    assert done.exit_code == 1 and "give the logs of two domains" in done.output


def test_logs_of_different_users_are_refused(logs: tuple[Path, Path], tmp_path: Path) -> None:
    strangers = replace(SOURCE_LOG, users=[f"v{user}" for user in range(30)])
    done = train(logs[0], write_inter(tmp_path / "other.inter", strangers), "--out", tmp_path / "run")
    assert done.exit_code == 1 and "0 common users" in done.output
    assert not (tmp_path / "run").exists()


def test_the_file_finds_what_the_training_ranked_best(domains: Domains, tmp_path: Path) -> None:
    training = Training(domains, OPTIONS, 5e-3, seed=0)
    advance(training, Arm.SEPARATED, 1.0, OPTIONS.steps, lambda: None)
    save_retrieval(tmp_path / "file", training)
    queries = Queries(domains, Part.TEST, 0)
    at = int(np.flatnonzero(~queries.is_cold)[0])
    user = queries.users[at]
    read = slice(domains.log.starts[user], domains.split.validation_ends[user])
    known = np.concatenate([np.unique(log.items) for log in (TARGET_LOG, SOURCE_LOG)])
    ids = known[domains.log.items[read]]
    history = Behaviours(ids.astype("<i8"), np.zeros(ids.size, "<u2"), np.zeros(ids.size, "<i8"))
    found = GraphSearch(tmp_path / "file").find(history, 10_000, domains.item_ids[domains.num_target :])
    best = target_scores(training, queries, Arm.SEPARATED)[at].argsort(descending=True)
    assert found.tolist() == domains.item_ids[best.numpy()].tolist()


def test_another_file_is_no_retrieval(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(RelayError, match="relaygr train retrieval"):
        GraphSearch(tmp_path / "file")
