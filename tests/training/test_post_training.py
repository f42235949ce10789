"""`relaygr train post-train`: the arms, what is recommended, and what comes out."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from relaygr.cli.app import app
from relaygr.compare.running import Scorer
from relaygr.deployment import CURRENT
from relaygr.training.logs import Log
from relaygr.training.options import PostTrainingOptions, Protocol
from relaygr.training.post_training import (
    BEST,
    FINAL,
    Arm,
    ArmResult,
    Job,
    Validation,
    _compared,
    _Policy,
    post_train,
)
from relaygr.training.ranker import Size, initial_tensors, ranker_config
from relaygr.training.ranking import NDCG
from relaygr.training.runs import Run
from relaygr.training.splits import Part, split_log
from relaygr.training.trainer import supervised_losses
from relaygr.worker.device import open_device
from relaygr.worker.model.checkpoint import load_checkpoint
from tests.training.made_logs import QUICK, revision_of, with_test_behaviours, write_inter
from tests.training.test_runs import LOG, TOLERANCE, requests_of, trained

pytestmark = pytest.mark.slow  # They train.


def results(*ndcg: float) -> list[ArmResult]:
    validations = [Validation(5, 1.0, value) for value in (0.3, 0.2)]
    return [ArmResult(validations, 0, 10, 4, {kept: {NDCG: each} for kept in (BEST, FINAL)}, [each - 0.1, each + 0.1])
            for each in ndcg]  # fmt: skip


@pytest.mark.parametrize(
    ("gains", "recommended"),
    [([0.03, 0.04, 0.05], Arm.GROUP_RELATIVE), ([-0.05, 0.04, 0.05], Arm.SUPERVISED), ([0.04], Arm.SUPERVISED)],
    ids=["above zero", "holds zero", "one seed has no interval"],
)
def test_supervision_is_recommended_unless_group_relative_is_better(gains: list[float], recommended: Arm) -> None:
    found = {Arm.SUPERVISED: results(*[0.2] * len(gains)), Arm.WEIGHTED: results(*[0.2] * len(gains)),
             Arm.GROUP_RELATIVE: results(*[0.2 + gain for gain in gains])}  # fmt: skip
    compared = _compared({NDCG: 0.2}, np.array([0.1, 0.3]), found, Path("out"))
    assert compared.recommended is recommended
    assert compared.sentence().startswith(f"The {recommended} arm is recommended (out/seed-0/{recommended}/checkpoint)")
    assert compared.over_seeds.mean == pytest.approx(np.mean(gains))
    assert next(row for row in compared.rows if row.arm is Arm.GROUP_RELATIVE).without_spread == 0.4


@pytest.mark.parametrize(
    ("start", "end"),
    [(0.15, "Its NDCG@10 less that of the ranker that all began with is +0.0500 (+0.0500 to +0.0500)."),
     (0.25, "But its NDCG@10 less that of the ranker that all began with is -0.0500 (-0.0500 to -0.0500): keep that "
            "ranker.")],
)  # fmt: skip
def test_a_ranker_that_post_training_does_not_beat_is_kept(start: float, end: str) -> None:
    found = {arm: results(0.2, 0.2) for arm in Arm}
    compared = _compared({NDCG: start}, np.array([start - 0.1, start + 0.1]), found, Path("out"))
    assert compared.sentence().endswith(f"over 2 users. {end}")


SMALL = PostTrainingOptions(
    "start", 10, group=4, negatives=15, learning_rate=5e-4, kl_weight=0.01, validation_users=0, test_users=0
)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("start") / "run"
    trained(folder, options=replace(QUICK, epochs=2))
    return Run(folder)


def job_of(ranker: Run, log: Log = LOG, stop_after: int = -1) -> Job:
    """A negative `stop_after` is never reached; else the command is killed after so many steps and judged users."""
    steps = itertools.count(1)

    def stepped() -> None:
        if next(steps) == stop_after:
            raise KeyboardInterrupt

    checkpoint, split = load_checkpoint(ranker.checkpoint), split_log(log, Protocol.TIME)
    return Job(log, split, checkpoint, ranker.options(), SMALL, lambda name, steps: None, stepped)


def revisions(folder: Path) -> list[str]:
    return [revision_of(Run(folder / "seed-0" / arm)) for arm in Arm]


@pytest.fixture(scope="module")
def done(ranker: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("post") / "out"
    post_train(job_of(ranker), [], 1, folder)
    return folder


@pytest.mark.parametrize("stop_after", [2, 400])
def test_a_killed_command_goes_on_to_the_same_checkpoints(
    ranker: Run, done: Path, tmp_path: Path, stop_after: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        post_train(job_of(ranker, stop_after=stop_after), [], 1, tmp_path / "cut")
    post_train(job_of(ranker), [], 1, tmp_path / "cut")
    assert revisions(tmp_path / "cut") == revisions(done)
    assert len({*revisions(done), load_checkpoint(ranker.checkpoint).revision}) == 4, "each arm learns something else"


def test_other_test_behaviours_change_no_weights(ranker: Run, done: Path, tmp_path: Path) -> None:
    items = np.where(np.arange(len(LOG.items)) % 2, 10**6, LOG.items.min())
    changed = with_test_behaviours(LOG, split_log(LOG, Protocol.TIME), items)
    post_train(job_of(ranker, changed), [], 1, tmp_path / "changed")
    assert revisions(tmp_path / "changed") == revisions(done)
    one, other = (Run(folder).read_json("metrics.json") for folder in (done, tmp_path / "changed"))
    assert one["start"][NDCG] != other["start"][NDCG]


def test_requests_and_rewards_are_of_the_training_part(ranker: Run) -> None:
    """Each behaviour has an item of its own, so that an item says from which part it is."""
    log = replace(LOG, items=np.arange(len(LOG.items), dtype=np.int64))
    job = job_of(ranker, log)
    config = ranker_config(job.split, Size(dim=16, heads=1, layers=2, max_history=64))
    job = replace(job, checkpoint=replace(job.checkpoint, config=config, tensors=initial_tensors(config, 0)))
    known = set(job.split.item_ids.tolist())
    held_out = {
        item for part in Part for user in range(len(log.users)) for item in log.items[job.split.targets(user, part)]
    }
    assert not known & held_out
    for batch in itertools.islice(job.batches(0), 20):
        assert int(batch.inputs.candidates.max()) < len(known)


def test_at_the_start_the_group_relative_loss_is_zero_and_its_gradient_is_not(ranker: Run) -> None:
    """Advantages cancel out, ratios are 1, and nothing diverges from the start."""
    job = job_of(ranker)
    policy = _Policy(job, Arm.GROUP_RELATIVE)
    loss = policy.loss(next(job.batches(0)), 0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert policy.tensors["items.weight"].grad is not None and policy.tensors["items.weight"].grad.abs().max() > 1e-4
    assert 0 <= policy.without_spread < policy.groups


def test_requests_of_equal_rewards_weigh_as_without_weights(ranker: Run) -> None:
    job = job_of(ranker)
    tensors, batch = dict(job.checkpoint.tensors), next(job.batches(0))
    count = int(batch.is_target.sum())
    weights = torch.zeros(count).softmax(0)
    plain, weighted, one = (
        supervised_losses(job.checkpoint.config, tensors, batch, 0.0, each)
        for each in (None, weights, torch.eye(count)[0])
    )
    assert torch.allclose(plain, weighted, rtol=1e-5)
    assert not torch.allclose(plain[0], one[0], rtol=1e-3) and torch.equal(plain[1:], one[1:])


def test_full_and_cached_scores_of_the_worker_agree_for_what_comes_out(done: Path) -> None:
    requests = requests_of(LOG)
    for arm in Arm:
        scorer = Scorer(load_checkpoint(done / "seed-0" / arm / "checkpoint"), open_device("cpu"), requests)
        for full, cached in zip(scorer.full(requests).scores, scorer.cached(requests).scores, strict=True):
            assert np.abs(cached - full).max() <= TOLERANCE * np.abs(full).max()


def relaygr(*words: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)


def test_the_command_compares_the_arms_and_its_checkpoint_is_deployed(tmp_path: Path) -> None:
    log, run, out = write_inter(tmp_path / "made.inter", LOG), tmp_path / "run", tmp_path / "out"
    made = relaygr(
        "train", "ranker", log, "--out", run, "--dim", 16, "--epochs", 1, "--threads", 1, "--no-baselines",
        "--max-history", 64,
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    command = ["train", "post-train", run, "--out", out, "--steps", 5, "--seeds", 2, "--negatives", 15, "--group", 4]
    said = relaygr(*command)
    assert said.exit_code == 0, said.output
    last = said.output.strip().splitlines()[-1]
    found = json.loads((out / "metrics.json").read_text())
    assert last.startswith(f"The {found['recommended']} arm is recommended ({out}")
    assert " users. " in last and "less that of the ranker that all began with is " in last
    assert {row["arm"] for row in found["rows"]} == set(Arm)
    assert {"ndcg@10", "hr@10", "auc", "log_loss", "calibration_error"} == set(found["start"])
    assert (out / "post-training.png").stat().st_size > 5000
    other = relaygr(*command[:-1], 8)
    assert other.exit_code == 1 and "group is 4 there and 8 here" in other.output.replace("\n", " ")
    for arm in Arm:
        checkpoint = out / "seed-1" / arm / "checkpoint"
        assert "post-trained" in (checkpoint / "README.md").read_text()
        deployed = relaygr("model", "deploy", checkpoint, tmp_path / "deployed", "--calibrate-at-start")
        assert deployed.exit_code == 0, deployed.output
        assert load_checkpoint(tmp_path / "deployed" / CURRENT).revision == load_checkpoint(checkpoint).revision


def test_the_run_of_another_command_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"options": {"intra_steps": 150}}), encoding="utf-8")
    result = CliRunner().invoke(app, ["train", "post-train", str(tmp_path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "is no run of `relaygr train ranker` of this release" in " ".join(
        f"{result.output}{result.exception}".split()
    )
