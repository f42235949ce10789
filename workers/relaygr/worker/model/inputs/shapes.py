"""Names and shapes of the inputs' tensors."""

from __future__ import annotations

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.inputs.tokens import Column
from relaygr.worker.model.mlp import swish_norm_mlp_shapes
from relaygr.worker.model.options import DlrmInputs, InputForm

ITEM_FEATURE_ROWS = "item_features.{}.rows"
"""int64: the row of the feature's table that each item has."""


def input_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the inputs of a configuration need, `items.ids` (optional) left out."""
    d = config.embedding_dim
    width = config.dlrm_inputs.table_dim if config.dlrm_inputs is not None else d
    shapes: dict[str, tuple[int, ...]] = {"items.weight": (config.vocabulary_size + 1, width)}
    for index, feature in enumerate(config.contextual_features):
        shapes[f"features.{index}.weight"] = (feature.cardinality + 1, width)
    if config.num_actions:
        # Added actions have a last row for candidates; interleaved ones are tokens, which candidates have none of.
        extra = 2 if config.inputs is InputForm.ADDED else 1
        shapes["actions.weight"] = (config.num_actions + extra, d)
    if config.dlrm_inputs is not None:
        shapes |= _dlrm_shapes(config, config.dlrm_inputs)
    if config.num_positions:
        shapes["positions.weight"] = (config.num_positions, d)
    if config.num_times:
        shapes["times.weight"] = (config.num_times, d)
    return shapes


def input_row_elements(config: ModelConfig) -> int:
    """float32 elements that one token's embedding needs at most, its own row included."""
    # The token itself; the row, and what is added to it or written over it.
    elements = 2 * len(Column) + 3 * config.embedding_dim
    if config.dlrm_inputs is not None:
        inputs = config.dlrm_inputs
        bits = len(inputs.action_weights)
        # What was looked up, joined; inside an MLP its linear map, norm and gate; actions, and those of candidates.
        elements += 2 * inputs.table_dim * (1 + len(inputs.item_features)) + 4 * inputs.hidden
        elements += 2 * config.embedding_dim + 2 * bits * (1 + inputs.action_dim)
    return elements


def _dlrm_shapes(config: ModelConfig, inputs: DlrmInputs) -> dict[str, tuple[int, ...]]:
    d, width, features = config.embedding_dim, inputs.table_dim, len(inputs.item_features)
    shapes: dict[str, tuple[int, ...]] = {}
    for index, feature in enumerate(inputs.item_features):
        shapes[ITEM_FEATURE_ROWS.format(index)] = (config.vocabulary_size + 1,)
        shapes[f"item_features.{index}.weight"] = (feature.cardinality + 1, width)
    if config.contextual_tokens:
        shapes["contextual.weight"] = (config.contextual_tokens, width, d)
        shapes["contextual.bias"] = (config.contextual_tokens, d)
    shapes |= swish_norm_mlp_shapes("content", width, inputs.hidden, d)
    if features:
        shapes |= swish_norm_mlp_shapes("additional", width * features, inputs.hidden, d)
    if inputs.action_weights:
        bits = len(inputs.action_weights)
        shapes["action_bits.weight"] = (bits, inputs.action_dim)
        shapes["action_bits.candidates"] = (bits * inputs.action_dim,)
        shapes |= swish_norm_mlp_shapes("action_bits", bits * inputs.action_dim, inputs.hidden, d)
    return shapes
