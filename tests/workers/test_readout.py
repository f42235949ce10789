"""From rows to scores: each form of the read-out agrees with its formula, written in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relaygr.worker.model.checkpoint import random_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.inputs.tokens import Column, no_tokens
from relaygr.worker.model.options import (
    DlrmInputs,
    InputForm,
    ItemFeature,
    ReadoutActivation,
    ReadoutForm,
    ReadoutNorm,
    TimePeriod,
)
from relaygr.worker.model.readout import Readout
from tests.worlds.model import small_config
from tests.worlds.vectors import Floats, norm, sigmoid, silu

TODAY = 1_700_000_123
ROWS = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)


def scores_of(config: ModelConfig) -> tuple[Floats, dict[str, NDArray[Any]]]:
    """Scores of five candidates, items 3 to 7, and the model's tensors."""
    checkpoint = random_checkpoint(config, 0)
    tokens = no_tokens(5)
    tokens[:, Column.CONTENT] = np.arange(3, 8)
    tokens[:, Column.TIME] = TODAY + 40_000 * np.arange(5)
    scores = Readout(config, checkpoint.tensors)(torch.from_numpy(ROWS), torch.from_numpy(tokens))
    return scores.numpy(), {name: tensor.numpy() for name, tensor in checkpoint.tensors.items()}


def answered(logits: Floats) -> Floats:
    """The first task is binary, the second a regression."""
    return np.stack((sigmoid(logits[:, 0]), logits[:, 1]), 1)


def linear(w: dict[str, NDArray[Any]], name: str, x: Floats) -> Floats:
    return np.asarray(x @ w[f"{name}.weight"].astype(float) + w[f"{name}.bias"])


@pytest.mark.parametrize(
    ("activation", "function"),
    [(ReadoutActivation.SILU, silu), (ReadoutActivation.RELU, lambda x: np.maximum(x, 0))],
)
def test_l2_norm_and_an_mlp(activation: ReadoutActivation, function: Any) -> None:
    config = small_config(readout_norm=ReadoutNorm.L2, readout_hidden=(7, 5), readout_activation=activation)
    scores, w = scores_of(config)
    x = ROWS / np.linalg.norm(ROWS, axis=1, keepdims=True)
    for index in range(2):
        x = function(linear(w, f"readout.mlp.{index}", x))
    np.testing.assert_allclose(scores, answered(linear(w, "readout.mlp.2", x)), rtol=2e-5, atol=1e-6)


def test_layer_norm_with_an_epsilon_of_its_own() -> None:
    config = small_config(readout_norm_eps=0.5, readout_hidden=())
    scores, w = scores_of(config)
    x = norm(ROWS.astype(float), w["readout.norm.weight"], w["readout.norm.bias"], 0.5)
    np.testing.assert_allclose(scores, answered(linear(w, "readout.mlp.0", x)), rtol=2e-5, atol=1e-6)


def test_where_the_query_stands_in_the_day_and_the_week() -> None:
    periods = (TimePeriod(unit_seconds=3600, units=24), TimePeriod(unit_seconds=86_400, units=7))
    scores, w = scores_of(small_config(readout_periods=periods, readout_hidden=()))
    times = (TODAY + 40_000 * np.arange(5)).astype(np.float32)
    circles = []
    for seconds, units in ((3600, 24), (86_400, 7)):
        angle = (times // np.float32(seconds)).astype(float) % units / units * 2 * 3.14
        circles += [np.cos(angle), np.sin(angle)]
    x = linear(w, "readout.periods", np.concatenate((ROWS, np.stack(circles, 1)), 1))
    x = norm(x, w["readout.norm.weight"], w["readout.norm.bias"], 1e-6)
    np.testing.assert_allclose(scores, answered(linear(w, "readout.mlp.0", x)), rtol=2e-5, atol=1e-5)


def test_the_row_times_the_candidates_item_and_its_features() -> None:
    inputs = DlrmInputs(table_dim=4, hidden=3, item_features=(ItemFeature(name="maker", cardinality=6),))
    config = small_config(
        inputs=InputForm.DLRM,
        dlrm_inputs=inputs,
        num_actions=0,
        readout=ReadoutForm.ITEM_PRODUCT,
        readout_item_hidden=9,
        readout_activation=ReadoutActivation.SWISH_NORM,
        readout_mlp_eps=1e-3,
    )
    scores, w = scores_of(config)

    def swish(name: str, x: Floats) -> Floats:
        return np.asarray(x * sigmoid(norm(x, w[f"{name}.weight"], w[f"{name}.bias"], 1e-3)))

    items = np.arange(3, 8)
    own = np.concatenate((w["items.weight"][items], w["item_features.0.weight"][w["item_features.0.rows"][items]]), 1)
    hidden = swish("readout.item.inner_norm", linear(w, "readout.item.0", own))
    item_rows = linear(w, "readout.item.1", hidden)
    item_rows = norm(item_rows, w["readout.item.outer_norm.weight"], w["readout.item.outer_norm.bias"], 1e-3)
    x = norm(ROWS.astype(float), w["readout.norm.weight"], w["readout.norm.bias"], 1e-6) * item_rows
    x = swish("readout.mlp.0.norm", linear(w, "readout.mlp.0", x))
    np.testing.assert_allclose(scores, answered(linear(w, "readout.mlp.1", x)), rtol=2e-5, atol=1e-5)


def test_the_row_times_the_embedding_of_the_candidate_both_of_length_one() -> None:
    config = small_config(readout=ReadoutForm.ITEM_PRODUCT, readout_norm=ReadoutNorm.L2, readout_hidden=())
    scores, w = scores_of(config)
    own = w["items.weight"][3:8].astype(float)
    rows = ROWS / np.linalg.norm(ROWS, axis=1, keepdims=True)
    product = rows * own / np.linalg.norm(own, axis=1, keepdims=True)
    np.testing.assert_allclose(scores, answered(linear(w, "readout.mlp.0", product)), rtol=2e-5, atol=1e-6)
