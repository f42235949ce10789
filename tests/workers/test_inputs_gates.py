"""Features that a model hides from short sequences are hidden before the key is computed, so that the key differs."""

from __future__ import annotations

import numpy as np

from relaygr.schemas.messages import Behaviours, History
from relaygr.worker.executor.resolver import Deletions, PrefixResolver, Scored
from relaygr.worker.executor.waits import FailedWaits
from relaygr.worker.executor.work import ResolvedPrefix
from relaygr.worker.history.resolve import StoredHistory, resolve
from relaygr.worker.model.inputs.lookup import FeatureGates
from relaygr.worker.model.options import ContextualFeature
from tests.worlds.model import make_world, random_behaviours, small_config

FEATURES = (
    ContextualFeature(name="user_id", cardinality=9, min_tokens=6),
    ContextualFeature(name="tags", cardinality=9, tokens=2, min_tokens=3),
    ContextualFeature(name="country", cardinality=9),
)
VALUES = np.array([1, 2, 3, 4])


class NoHistories:
    """Histories come with the message."""

    def get(self, user_id: str) -> StoredHistory | None:
        return None

    def is_loading(self, partition: int) -> bool:
        return False


def span_of(behaviours: Behaviours, scored: Scored) -> ResolvedPrefix:
    engine = make_world(small_config(contextual_features=FEATURES)).engine
    history = History("u", 1, VALUES.astype("<i8"), behaviours)
    resolved = resolve(None, None, history, loading=False)
    return PrefixResolver(NoHistories(), engine, 64, Deletions(1), FailedWaits(1)).prefix("u", resolved, 0, scored)


def test_a_feature_is_hidden_below_its_tokens_and_counts_from_them_on() -> None:
    gates = FeatureGates(FEATURES)
    assert gates.shown(VALUES, 0, 2).tolist() == [-1, -1, -1, 4]
    assert gates.shown(VALUES, 1, 2).tolist() == [-1, 2, 3, 4]
    assert gates.shown(VALUES, 5, 0).tolist() == [-1, 2, 3, 4]
    assert gates.shown(VALUES, 5, 1) is VALUES
    assert VALUES.tolist() == [1, 2, 3, 4]


def test_a_user_with_fewer_or_more_values_than_the_model_takes() -> None:
    gates = FeatureGates(FEATURES)
    assert gates.shown(VALUES[:1], 0, 2).tolist() == [-1]
    assert gates.shown(np.arange(6), 0, 2).tolist() == [-1, -1, -1, 3, 4, 5]
    assert FeatureGates(()).shown(VALUES, 0, 0) is VALUES


def test_a_prefix_that_shows_less_has_another_key() -> None:
    behaviours = random_behaviours(np.random.default_rng(0), 3)
    few, expected, many = (span_of(behaviours, Scored(0, count)) for count in (2, 3, 500))
    assert few.features.tolist() == [-1, 2, 3, 4]
    assert few.key.chain.seed != many.key.chain.seed
    assert many.features.tolist() == [1, 2, 3, 4]
    assert expected.key.chain.digest == many.key.chain.digest


def test_the_suffix_counts_as_behaviours() -> None:
    behaviours = random_behaviours(np.random.default_rng(0), 3)
    assert span_of(behaviours, Scored(1, 2)).features.tolist() == [1, 2, 3, 4]
