"""K,V of the weights before a refresh, under the new weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from relaygr.bench.refresh.run import compare
from relaygr.runtime.errors import RelayError
from relaygr.training.models import RankerModel
from relaygr.training.options import Protocol
from relaygr.training.ranker import Size, initial_tensors, ranker_config
from relaygr.training.ranking import NDCG, judge
from relaygr.training.splits import Part, split_log
from relaygr.worker.model.checkpoint import save_checkpoint
from relaygr.worker.model.config import ModelConfig
from tests.training.made_logs import cyclic_log

pytestmark = pytest.mark.slow

SPLIT = split_log(cyclic_log(users=20, length=60), Protocol.TIME)
CONFIG = ranker_config(SPLIT, Size(dim=16, heads=2, layers=2, max_history=64))
USERS = np.arange(10)


def saved(folder: Path, seed: int, config: ModelConfig = CONFIG) -> Path:
    ids = {"items.ids": torch.from_numpy(SPLIT.item_ids.copy())}
    save_checkpoint(folder, config, {**initial_tensors(config, seed), **ids})
    return folder


def test_without_a_refresh_the_three_ways_agree_and_are_what_training_judges(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", 1)
    found = compare(SPLIT, folder, folder, USERS, lambda: None)
    expected = judge(SPLIT, RankerModel(SPLIT, CONFIG, initial_tensors(CONFIG, 1)), Part.TEST, USERS).summary()[NDCG]
    assert found.fresh == found.mixed == found.old
    assert found.fresh.mean == pytest.approx(expected.mean, abs=1e-6)
    assert (found.mean_error, found.overlap) == (0, 1)


def test_other_weights_have_scores_of_their_own_and_old_keys_and_values_change_them(tmp_path: Path) -> None:
    before, after = saved(tmp_path / "a", 1), saved(tmp_path / "b", 2)
    found = compare(SPLIT, before, after, USERS, lambda: None)
    assert found.fresh == compare(SPLIT, after, after, USERS, lambda: None).fresh
    assert found.old == compare(SPLIT, before, before, USERS, lambda: None).fresh
    assert found.mean_error > 0.01
    assert found.gained.mean == pytest.approx(found.fresh.mean - found.old.mean)
    assert found.lost.mean == pytest.approx(found.fresh.mean - found.mixed.mean)


def test_checkpoints_of_two_trainings_are_refused(tmp_path: Path) -> None:
    other = saved(tmp_path / "b", 1, ranker_config(SPLIT, Size(dim=16, heads=2, layers=1, max_history=64)))
    with pytest.raises(RelayError, match="two checkpoints of one training"):
        compare(SPLIT, saved(tmp_path / "a", 1), other, USERS, lambda: None)
