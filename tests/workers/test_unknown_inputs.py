"""Action codes, feature values and users that a model or a worker does not know: counted in each result."""

from __future__ import annotations

import numpy as np
import pytest

from relaygr.schemas.messages import Behaviours, History, Path
from relaygr.worker.history.resolve import StoredHistory
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.inputs.known import KnownInputs
from relaygr.worker.model.options import ContextualFeature, DlrmInputs, InputForm
from tests.worlds.model import small_config
from tests.worlds.real_executor import RealExecutorWorld, behaviours_of

FEATURES = (ContextualFeature(name="country", cardinality=3), ContextualFeature(name="tags", cardinality=5, tokens=2))
DLRM = {"inputs": InputForm.DLRM, "num_actions": 0}


def dlrm(*weights: int) -> ModelConfig:
    return small_config(**DLRM, dlrm_inputs=DlrmInputs(table_dim=4, hidden=3, action_weights=weights))


@pytest.mark.parametrize(
    ("config", "codes", "unknown"),
    [
        (small_config(num_actions=6), [0, 5, 6, 8, 60_000], [False, False, True, True, True]),
        (small_config(num_actions=6, inputs=InputForm.INTERLEAVED), [5, 6], [False, True]),
        (small_config(num_actions=0), [0, 60_000], [False, False]),
        (small_config(num_actions=65_536), [0, 65_535], [False, False]),
        (dlrm(1, 2, 8), [0, 11, 4, 16, 65_535], [False, False, True, True, True]),
        (dlrm(6), [2, 4, 6, 1], [False, False, False, True]),
        (dlrm(), [0, 65_535], [False, False]),
    ],
    ids=["added", "interleaved", "no actions", "all codes", "bits", "a mask of two bits", "no bits"],
)
def test_a_code_without_a_row_of_its_own_is_unknown(config: ModelConfig, codes: list[int], unknown: list[bool]) -> None:
    assert KnownInputs.of(config).unknown_actions(np.array(codes, np.uint16)).tolist() == unknown


@pytest.mark.parametrize(
    ("features", "unknown"),
    [
        ([2, 4, 0], 0),
        ([], 3),
        ([2], 2),
        ([3, 4, 0], 1),
        ([10**6, 10**6, -1], 3),
        ([2, 4, 0, 0, 0], 2),
        ([9, 4, 0, 0], 2),
    ],
)
def test_missing_values_values_out_of_range_and_too_many_are_unknown(features: list[int], unknown: int) -> None:
    known = KnownInputs.of(small_config(contextual_features=FEATURES))
    assert known.unknown_features(np.array(features, np.int64)) == unknown


def test_a_model_without_features_ignores_those_of_a_history_and_says_so() -> None:
    known = KnownInputs.of(small_config())
    assert (known.unknown_features(np.empty(0, np.int64)), known.unknown_features(np.array([4, 2]))) == (0, 2)


def put(world: RealExecutorWorld, user_id: str, actions: list[int], features: list[int]) -> None:
    behaviours = behaviours_of(len(actions))
    behaviours = Behaviours(behaviours.items, np.array(actions, "<u2"), behaviours.timestamps_ms)
    history = History(user_id, 1, np.array(features, "<i8"), behaviours)
    world.histories[user_id] = StoredHistory(history, history.chain())


def counts(world: RealExecutorWorld, user_id: str, request_id: str, **request: object) -> tuple[object, ...]:
    work = world.rank(user_id, None, request_id, **request)
    assert work.prefix is not None
    return work.path, work.unknown_actions, work.prefix.unknown_features


def test_a_cached_prefix_is_counted_as_one_that_is_computed() -> None:
    """Most requests find their prefix cached: without these counts a wrong integration would show only at first."""
    world = RealExecutorWorld("contextual mask")
    put(world, "u", [0, 1, 4, 6, 60_000, 3], [8])
    assert counts(world, "u", "r1") == (Path.FULL, 3, 2)
    assert counts(world, "u", "r2") == (Path.HBM, 3, 2)


def test_the_codes_of_a_suffix_are_counted_once() -> None:
    world = RealExecutorWorld("plain")
    put(world, "u", [0, 4, 5], [])
    suffix = behaviours_of(5, start=3)
    suffix = Behaviours(suffix.items, np.array([9, 1, 9, 2, 3], "<u2"), suffix.timestamps_ms)
    assert counts(world, "u", "r1", suffix=suffix) == (Path.FULL, 4, 0)
    # The prefix grew by one behaviour, which is ranked as part of the suffix.
    put(world, "u", [0, 4, 5, 7], [])
    assert counts(world, "u", "r2", suffix=suffix) == (Path.HBM, 5, 0)


def test_a_folded_suffix_is_counted_once() -> None:
    world = RealExecutorWorld("positions from the end")
    put(world, "u", [0, 4, 5], [])
    suffix = behaviours_of(2, start=3)
    suffix = Behaviours(suffix.items, np.array([9, 1], "<u2"), suffix.timestamps_ms)
    assert counts(world, "u", "r1", suffix=suffix) == (Path.FULL, 3, 0)


def test_a_user_without_a_history_is_one_without_a_version() -> None:
    world = RealExecutorWorld("plain")
    work = world.rank("nobody", None)
    assert work.prefix is not None and work.prefix.version is None
    put(world, "new", [], [])
    work = world.rank("new", None, "r2")
    assert work.prefix is not None and work.prefix.version is not None


def test_items_of_a_prefix_are_counted_where_it_is_computed() -> None:
    """The metric counted only what requests looked up; the prefixes that jobs compute were not counted."""
    world = RealExecutorWorld("plain")
    history = History("u", 1, np.empty(0, "<i8"), Behaviours(np.arange(38, 48), np.zeros(10, "<u2"), np.arange(10)))
    world.histories["u"] = StoredHistory(history, history.chain())
    looked_up: list[int] = []
    world.executor._parts.metrics.unknown_items.inc = looked_up.append  # type: ignore[method-assign,assignment]
    world.job("u", history.version(), "r1")
    assert looked_up == [8]
    assert world.rank("u", history.version(), "r1").path is Path.HBM
    assert looked_up == [8]
