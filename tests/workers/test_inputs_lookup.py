"""From behaviours and candidates to tokens: content, place and age of each."""

from __future__ import annotations

import numpy as np
import pytest

from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.inputs.encodings import FromEnd, FromStart, age_rows
from relaygr.worker.model.inputs.known import Vocabulary
from relaygr.worker.model.inputs.lookup import FeatureRows, TokenLookup
from relaygr.worker.model.inputs.tokens import Column
from relaygr.worker.model.options import ContextualFeature, DlrmInputs, InputForm, PositionOrigin, TimeEncoding
from tests.worlds.model import small_config

FEATURES = (ContextualFeature(name="country", cardinality=3), ContextualFeature(name="tags", cardinality=5, tokens=2))
HISTORY = Behaviours(np.array([7, 50, 9]), np.array([2, 0, 9], np.uint16), np.array([1_000, 61_999, 120_000]))
NOTHING = np.empty(0, np.int64)
NOW_MS = 3_720_500


def lookup(**changes: object) -> TokenLookup:
    config = small_config(**({"contextual_features": FEATURES} | changes))
    return TokenLookup(config, Vocabulary(config.vocabulary_size))


def dlrm(**changes: object) -> dict[str, object]:
    inputs = DlrmInputs(table_dim=4, hidden=3, action_weights=(1, 2, 4))
    return {"inputs": InputForm.DLRM, "dlrm_inputs": inputs, "num_actions": 0} | changes


def test_added_actions_are_rows_of_their_table_and_candidates_have_their_own() -> None:
    found = lookup()
    prefix = found.prefix(np.array([1, 4]), HISTORY, NOW_MS)
    # Of 4 actions, row 4 is for unknown ones and row 5 for candidates; of 40 items, row 40 is for unknown ones.
    assert prefix.tokens[:, Column.CONTENT].tolist() == [~1, ~(4 + 4), ~(4 + 6 + 5), 7, 40, 9]
    assert prefix.tokens[:, Column.ACTION].tolist() == [-1, -1, -1, 2, 0, 4]
    assert prefix.unknown_items == 1
    scored = found.scored(6, HISTORY[:1], np.array([3, 99]), NOW_MS)
    assert scored.tokens[:, Column.CONTENT].tolist() == [7, 3, 40]
    assert scored.tokens[:, Column.ACTION].tolist() == [2, 5, 5]


def test_a_model_may_know_every_action_code_that_there_is() -> None:
    history = Behaviours(np.array([7, 7]), np.array([0, 65_535], np.uint16), np.array([0, 0]))
    for inputs in (InputForm.ADDED, InputForm.INTERLEAVED):
        tokens = lookup(num_actions=65_536, inputs=inputs, contextual_features=()).prefix(NOTHING, history, 0).tokens
        if inputs is InputForm.ADDED:
            assert tokens[:, Column.ACTION].tolist() == [0, 65_535]
        else:
            assert tokens[1::2, Column.CONTENT].tolist() == [~0, ~65_535]


def test_interleaved_actions_are_tokens_and_candidates_are_items_alone() -> None:
    found = lookup(inputs=InputForm.INTERLEAVED)
    first_action = (3 + 1) + 2 * (5 + 1)
    prefix = found.prefix(NOTHING, HISTORY, NOW_MS).tokens
    assert prefix.shape[0] == 3 + 2 * 3
    assert prefix[3:, Column.CONTENT].tolist() == [7, ~(first_action + 2), 40, ~first_action, 9, ~(first_action + 4)]
    assert prefix[3:, Column.TIME].tolist() == [1, 1, 61, 61, 120, 120]
    scored = found.scored(9, HISTORY[:2], np.array([3]), NOW_MS).tokens
    assert scored[:, Column.CONTENT].tolist() == [7, ~(first_action + 2), 40, ~first_action, 3]
    assert scored[:, Column.PLACE].tolist() == [9, 10, 11, 12, 13]
    assert (prefix[:, Column.ACTION] == -1).all()


def test_sets_of_bits_are_kept_and_candidates_have_none() -> None:
    found = lookup(**dlrm())
    assert found.prefix(NOTHING, HISTORY, NOW_MS).tokens[3:, Column.ACTION].tolist() == [2, 0, 9]
    assert found.scored(6, Behaviours.empty(), np.array([1, 2]), NOW_MS).tokens[:, Column.ACTION].tolist() == [-1, -1]


def test_places_from_the_start_end_in_the_tables_last_row() -> None:
    places = FromStart(5)
    assert places.of_prefix(7).tolist() == [0, 1, 2, 3, 4, 4, 4]
    assert places.of_scored(2, 1, 3).tolist() == [2, 3, 3, 3]
    assert places.of_scored(2, 4, 2).tolist() == [2, 3, 4, 4, 4, 4]


def test_places_from_the_end_count_back_behind_the_contextual_ones() -> None:
    places = FromEnd(6, contextual_tokens=2)
    # Six tokens end at place 6: behaviours stand 4, 3, 2 and 1 before it, and the contextual rows come first.
    assert places.of_prefix(6).tolist() == [0, 1, 5, 5, 4, 3]
    assert places.of_scored(6, 0, 3).tolist() == [2, 2, 2]
    assert FromEnd(6, 0).of_prefix(3).tolist() == [3, 2, 1]
    with pytest.raises(ValueError, match="count from the history's end"):
        places.of_scored(6, 1, 3)


@pytest.mark.parametrize(
    ("encoding", "ages"), [(TimeEncoding.SQRT, [0, 1, 1, 2, 7, 9]), (TimeEncoding.LOG, [0, 0, 0, 1, 4, 9])]
)
def test_ages_are_bucketed_in_units_before_the_query(encoding: TimeEncoding, ages: list[int]) -> None:
    before = np.array([0, 60, 120, 60 * 4, 60 * 56, 10**9])
    assert age_rows(1_000_000_000 - before, 1_000_000_000, encoding, 60.0, 10).tolist() == ages


def test_a_token_after_the_query_has_the_age_of_the_query() -> None:
    assert age_rows(np.array([500]), 100, TimeEncoding.SQRT, 60.0, 10).tolist() == [0]


def test_milliseconds_become_whole_seconds_and_the_query_has_its_own() -> None:
    changes = {"time_encoding": TimeEncoding.SQRT, "num_times": 100, "position_origin": PositionOrigin.END}
    found = lookup(**changes)
    prefix = found.prefix(NOTHING, HISTORY, NOW_MS).tokens
    assert prefix[:, Column.TIME].tolist() == [0, 0, 0, 1, 61, 120]
    # 3720 seconds: 62 minutes before, 61 and 60; sqrt of each is 7.
    assert prefix[:, Column.AGE].tolist() == [7, 7, 7, 7, 7, 7]
    scored = found.scored(6, Behaviours.empty(), np.array([1]), NOW_MS).tokens
    assert scored[:, [Column.TIME, Column.AGE]].tolist() == [[3720, 0]]
    later = found.prefix(NOTHING, HISTORY, NOW_MS + 7 * 60_000).tokens
    assert later[:, Column.AGE].tolist() == [8, 8, 8, 8, 8, 8]


def test_a_model_without_positions_and_times_leaves_their_columns_alone() -> None:
    tokens = lookup(num_positions=0).prefix(NOTHING, HISTORY, NOW_MS).tokens
    assert not tokens[:, [Column.PLACE, Column.AGE]].any()


def test_a_feature_of_several_tokens_takes_as_many_values() -> None:
    rows = FeatureRows(FEATURES)
    assert rows.total == 4 + 2 * 6
    assert rows.rows(np.array([2, 0, 4, 8])).tolist() == [2, 4, 4 + 6 + 4]
    assert rows.rows(np.array([2, 0])).tolist() == [2, 4, 4 + 6 + 5]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"inputs": InputForm.INTERLEAVED, "num_actions": 0}, "interleaved needs num_actions"),
        ({"inputs": InputForm.DLRM}, "dlrm_inputs is required with the inputs dlrm"),
        (dlrm(num_actions=3), "leave num_actions at 0"),
        ({"readout": "item_product", "inputs": "interleaved", "num_actions": 5}, "inputs added and dlrm"),
        ({"num_times": 3}, "set both or neither"),
        ({"time_encoding": TimeEncoding.LOG}, "set both or neither"),
        ({"position_origin": PositionOrigin.END, "num_positions": 0}, "needs num_positions"),
        (
            {"position_origin": PositionOrigin.END, "num_positions": 2, "contextual_features": FEATURES},
            "a row of num_positions for each contextual token",
        ),
        (
            {"contextual_features": (ContextualFeature(name="a", cardinality=2, tokens=64), *FEATURES)},
            "take 67 tokens",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        small_config(**changes)


def test_a_prefix_has_two_tokens_a_behaviour_where_actions_are_interleaved() -> None:
    config: ModelConfig = small_config(inputs=InputForm.INTERLEAVED, contextual_features=FEATURES)
    assert config.layout().tokens(5) == 3 + 10
    assert small_config(contextual_features=FEATURES).layout().tokens(5) == 3 + 5
