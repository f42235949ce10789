"""From tokens to rows: each form of the inputs agrees with its formula, written in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.checkpoint import random_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.inputs.embedding import TokenEmbedding
from relaygr.worker.model.inputs.lookup import TokenLookup
from relaygr.worker.model.inputs.tables import Placement, is_table
from relaygr.worker.model.inputs.tokens import Tokens
from relaygr.worker.model.options import ContextualFeature, DlrmInputs, InputForm, ItemFeature, TimeEncoding
from tests.worlds.model import small_config
from tests.worlds.vectors import Floats, norm, sigmoid

FEATURES = (ContextualFeature(name="country", cardinality=3), ContextualFeature(name="tags", cardinality=5, tokens=2))
VALUES = np.array([1, 4, 0])
HISTORY = Behaviours(np.array([7, 50, 9]), np.array([2, 0, 5], np.uint16), np.array([1_000, 61_999, 120_000]))
CANDIDATES = np.array([3, 99])
NOW_MS = 3_720_500


def rows_of(config: ModelConfig) -> tuple[Floats, dict[str, NDArray[Any]]]:
    """Rows of the prefix and the candidates, and the model's tensors."""
    checkpoint = random_checkpoint(config, 0)
    lookup = TokenLookup(config, checkpoint.vocabulary())
    prefix = lookup.prefix(VALUES, HISTORY, NOW_MS).tokens
    scored = lookup.scored(prefix.shape[0], Behaviours.empty(), CANDIDATES, NOW_MS).tokens
    rows = TokenEmbedding(config, checkpoint.tensors)(np.concatenate((prefix, scored)))
    return rows.numpy(), {name: tensor.numpy() for name, tensor in checkpoint.tensors.items()}


def test_added_actions() -> None:
    rows, w = rows_of(small_config(contextual_features=FEATURES, num_positions=5))
    items, actions, places = w["items.weight"], w["actions.weight"], w["positions.weight"]
    expected = [w["features.0.weight"][1], w["features.1.weight"][4], w["features.1.weight"][0]]
    expected += [items[7] + actions[2], items[40] + actions[0], items[9] + actions[4]]
    expected += [items[3] + actions[5], items[40] + actions[5]]
    np.testing.assert_allclose(rows, np.stack(expected) + places[[0, 1, 2, 3, 4, 4, 4, 4]], rtol=1e-6)


def test_interleaved_actions_with_a_scale() -> None:
    config = small_config(
        contextual_features=FEATURES, inputs=InputForm.INTERLEAVED, num_positions=50, embedding_scale=4.0
    )
    rows, w = rows_of(config)
    items, actions, places = w["items.weight"], w["actions.weight"], w["positions.weight"]
    expected = [w["features.0.weight"][1], w["features.1.weight"][4], w["features.1.weight"][0]]
    expected += [items[7], actions[2], items[40], actions[0], items[9], actions[4], items[3], items[40]]
    np.testing.assert_allclose(rows, 4 * np.stack(expected) + places[[*range(9), 9, 9]], rtol=1e-6)


def test_items_alone() -> None:
    rows, w = rows_of(small_config(num_actions=0, num_positions=0))
    np.testing.assert_array_equal(rows, w["items.weight"][[7, 40, 9, 3, 40]])


@pytest.mark.parametrize("with_features", [False, True])
def test_dlrm(with_features: bool) -> None:
    inputs = DlrmInputs(
        table_dim=4,
        hidden=3,
        action_weights=(1, 2, 4),
        action_dim=2,
        item_features=(ItemFeature(name="maker", cardinality=6), ItemFeature(name="shop", cardinality=2))
        if with_features
        else (),
    )
    config = small_config(
        contextual_features=FEATURES,
        inputs=InputForm.DLRM,
        dlrm_inputs=inputs,
        num_actions=0,
        num_positions=0,
        time_encoding=TimeEncoding.SQRT,
        num_times=6,
        embedding_scale=3.0,
    )
    rows, w = rows_of(config)

    def mlp(name: str, x: Floats) -> Floats:
        y = x @ w[f"{name}.0.weight"] + w[f"{name}.0.bias"]
        y = y * sigmoid(norm(y, w[f"{name}.inner_norm.weight"], w[f"{name}.inner_norm.bias"], 1e-5))
        y = y @ w[f"{name}.1.weight"] + w[f"{name}.1.bias"]
        return norm(y, w[f"{name}.outer_norm.weight"], w[f"{name}.outer_norm.bias"], 1e-5)

    items = np.array([7, 40, 9, 3, 40])
    content = mlp("content", w["items.weight"][items])
    if with_features:
        own = [w[f"item_features.{k}.weight"][w[f"item_features.{k}.rows"][items]] for k in range(2)]
        content = content + mlp("additional", np.concatenate(own, 1))
    table, none = w["action_bits.weight"], np.zeros(2)
    bits = [[none, table[1], none], [none, none, none], [table[0], none, table[2]]]
    actions = [np.concatenate(row) for row in bits] + [w["action_bits.candidates"]] * 2
    content = content + mlp("action_bits", np.stack(actions))
    values = (w["features.0.weight"][1], w["features.1.weight"][4], w["features.1.weight"][0])
    context = [value @ w["contextual.weight"][k] + w["contextual.bias"][k] for k, value in enumerate(values)]
    # All but the candidates are an hour old, which is 7 in roots of minutes, and beyond the table.
    ages = w["times.weight"][[5] * 6 + [0] * 2]
    expected = 3 * np.concatenate((np.stack(context), content)) + ages
    np.testing.assert_allclose(rows, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", [InputForm.ADDED, InputForm.INTERLEAVED])
def test_a_slice_of_tokens_gives_that_slice_of_rows(form: InputForm) -> None:
    config = small_config(contextual_features=FEATURES, inputs=form)
    checkpoint = random_checkpoint(config, 0)
    tokens: Tokens = TokenLookup(config, checkpoint.vocabulary()).prefix(VALUES, HISTORY, NOW_MS).tokens
    embed = TokenEmbedding(config, checkpoint.tensors)
    cut = [embed(tokens[start : start + 2]) for start in range(0, tokens.shape[0], 2)]
    assert torch.equal(torch.cat(cut), embed(tokens))


@pytest.mark.parametrize("form", [InputForm.ADDED, InputForm.INTERLEAVED, InputForm.DLRM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_in_host_memory_give_the_rows_of_tables_on_the_device(form: InputForm, dtype: torch.dtype) -> None:
    """Also those of types with fewer bits, whose rows become float32."""
    features = (ItemFeature(name="maker", cardinality=6),)
    dlrm = {
        "dlrm_inputs": DlrmInputs(table_dim=4, hidden=3, item_features=features, action_weights=(1, 2)),
        "num_actions": 0,
    }
    config = small_config(contextual_features=FEATURES, inputs=form, **(dlrm if form is InputForm.DLRM else {}))
    tensors = dict(random_checkpoint(config, 0).tensors)
    tables = frozenset(name for name in tensors if is_table(name))
    tensors |= {name: tensors[name].to(dtype) for name in tables}
    assert len(tables) == (4 if form is InputForm.DLRM else 3)
    checkpoint = random_checkpoint(config, 0)
    lookup = TokenLookup(config, checkpoint.vocabulary())
    prefix = lookup.prefix(VALUES, HISTORY, NOW_MS).tokens
    sent: list[torch.Size] = []

    def send(host: torch.Tensor) -> torch.Tensor:
        sent.append(host.shape)
        return host

    on_device = TokenEmbedding(config, tensors)(prefix)
    on_host = TokenEmbedding(config, tensors, Placement(tables, send))(prefix)
    assert on_device.dtype is torch.float32
    assert sent
    np.testing.assert_allclose(on_host, on_device, rtol=1e-6, atol=1e-6)
