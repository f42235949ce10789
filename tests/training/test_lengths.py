"""What a longer history is worth: one set of users and candidates, only the served history differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relaygr.runtime.errors import RelayError
from relaygr.training.lengths import Asked, LengthPoint, deadline_loss, evaluate_lengths, lengths_up_to
from relaygr.training.models import CascadeModel, RankerModel, RetrievalModel
from relaygr.training.options import Protocol
from relaygr.training.pipeline import Progress, train_ranker
from relaygr.training.ranking import NDCG, Estimate, Judged, judge
from relaygr.training.runs import Run
from relaygr.training.splits import Part, split_log
from relaygr.worker.model.checkpoint import load_checkpoint
from tests.training.made_logs import QUICK, Recorder, cyclic_log

pytestmark = pytest.mark.slow  # They train.

LOG = cyclic_log(users=20, length=60)
SPLIT = split_log(LOG, Protocol.TIME)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    found = Run(tmp_path_factory.mktemp("lengths") / "run")
    progress = Progress(Recorder(), lambda name, steps: None, lambda: None)
    train_ranker(LOG, [], replace(QUICK, epochs=2), found, progress, with_baselines=False)
    return found


def test_the_lengths_double_and_the_last_one_is_that_of_the_longest_history() -> None:
    assert (lengths_up_to(3), lengths_up_to(16)) == ([3], [16])
    assert lengths_up_to(17) == [16, 17]
    assert lengths_up_to(200) == [16, 32, 64, 128, 200]
    assert lengths_up_to(1024) == [16, 32, 64, 128, 256, 512, 1024]


def test_each_point_has_the_same_users_and_the_last_one_serves_all(run: Run) -> None:
    asked = Asked(min_behaviours=40, candidates=20, deadlines_ms=(1e-9, 1e9))
    worth = evaluate_lengths(SPLIT, run, asked, lambda name, steps: None, lambda: None)
    users = np.flatnonzero(LOG.lengths >= 40)
    assert worth.users == users.size > 3
    longest = int((SPLIT.validation_ends - SPLIT.starts[:-1]).max())
    assert [point.length for point in worth.points] == [16, 32, longest]
    assert {point.metrics[NDCG].users for point in worth.points} == {users.size}
    assert worth.points[0].whole == users.size and worth.points[-1].whole >= 1
    last = worth.points[-1]
    assert last.against_whole == Estimate(0.0, 0.0, 0.0, users.size)
    checkpoint = load_checkpoint(run.checkpoint)
    parts = [kind(SPLIT, checkpoint.config, dict(checkpoint.tensors)) for kind in (RetrievalModel, RankerModel)]
    assert last.metrics == judge(SPLIT, CascadeModel(*parts), Part.TEST, users).summary()
    assert last.retrieval == judge(SPLIT, parts[0], Part.TEST, users).summary()[NDCG] != worth.points[0].retrieval
    assert worth.points[0].metrics != last.metrics
    assert all(0 < point.hit_ms < point.full_ms for point in worth.points)
    none, all_fit = worth.deadlines
    assert none.loss is None and (none.truncated, none.relayed) == (0, 0)
    assert all_fit.loss == last.against_whole and all_fit.truncated == all_fit.relayed == longest


def test_of_a_log_split_at_one_time_those_who_did_not_come_later_are_not_judged(run: Run) -> None:
    split = split_log(LOG, Protocol.GLOBAL_TIME)
    assert split.item_ids.tolist() == SPLIT.item_ids.tolist(), "the checkpoint has the rows of the other split"
    worth = evaluate_lengths(split, run, Asked(min_behaviours=30), lambda name, steps: None, lambda: None)
    judged = split.judged_users(Part.TEST)
    assert worth.users == judged.size and 0 < judged.size < np.count_nonzero(LOG.lengths >= 30)


def test_without_a_user_who_is_long_enough_the_longest_is_named(run: Run) -> None:
    with pytest.raises(RelayError, match=f"the longest has {LOG.lengths.max()}"):
        evaluate_lengths(SPLIT, run, Asked(min_behaviours=500), lambda name, steps: None, lambda: None)


def test_a_deadline_between_two_lengths_loses_the_difference_of_the_same_users() -> None:
    ndcg = {16: [0.1, 0.2, 0.3], 32: [0.1, 0.4, 0.3], 64: [0.4, 0.5, 0.3]}
    judged = {length: Judged(np.arange(3), {NDCG: np.array(values)}) for length, values in ndcg.items()}
    unused = Estimate(0, 0, 0, 3)
    times = {16: (2.0, 1.0), 32: (4.0, 1.5), 64: (8.0, 2.0)}
    points = [LengthPoint(length, 3, {}, unused, unused, *times[length]) for length in ndcg]
    found = deadline_loss(5.0, points, judged)
    assert (found.truncated, found.relayed) == (32, 64)
    assert found.loss is not None and found.loss.mean == pytest.approx((0.3 + 0.1 + 0.0) / 3)
    assert deadline_loss(1.2, points, judged).loss is None


def test_a_run_refuses_another_log(run: Run) -> None:
    run.require_log(LOG)
    with pytest.raises(RelayError, match="not the one"):
        run.require_log(cyclic_log(seed=9))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match="folder of a run"):
        Run(tmp_path).options()
