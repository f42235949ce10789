"""Converts a state dict of the ranking model of NVIDIA's recsys-examples, with fused, native or inference layers.

    fused       `_linear_uvqk_weight [D, W]`, columns U, V, Q, K
    native      `_linear_uvqk.weight [W, D]`, columns U, V, Q, K of one head after the other
    inference   `_linear_uvqk.weight [W, D]`, columns U, V, Q, K

Embedding tables are in the data-parallel collection or in files. The source may have small MLPs after the tables. They
read only a row of a table, so the conversion applies them to the tables.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.runtime.errors import RelayError
from relaygr.worker.model.convert.mapping import AS_IS, TRANSPOSED, Takings, Transform
from relaygr.worker.model.convert.options import ConvertOptions, ProjectionLayout
from relaygr.worker.model.convert.parts import (
    ACTION,
    ITEM,
    Items,
    Tables,
    give_table,
    number_of_layers,
    order_of,
    per_head,
    take_norm,
    take_projection,
)
from relaygr.worker.model.options import ReadoutActivation

_BLOCK = "_hstu_block."
_LAYERS = "_attention_layers."
_EPS = 1e-5
_EXTRA = "_extra_state"


class NvidiaSource:
    """The names of one state dict, for any prefix."""

    def __init__(self, takings: Takings) -> None:
        anchor = next((name for name in takings.names() if f"{_BLOCK}{_LAYERS}" in name), None)
        if anchor is None:
            raise RelayError(f"This is not recsys-examples: no tensor's name contains {_BLOCK}{_LAYERS}.")
        root = anchor[: anchor.index(_BLOCK)]
        self.layers = f"{root}{_BLOCK}{_LAYERS}"
        preprocessor = f"{root}{_BLOCK}_preprocessor."
        self.item_mlp = f"{preprocessor}_item_mlp._mlp"
        self.contextual_mlp = f"{preprocessor}_contextual_mlp._mlp"
        self.positions = f"{preprocessor}_positional_encoder._position_embeddings_weight"
        self.task_mlp = f"{root}_mlp._mlp"


def convert_nvidia(takings: Takings, options: ConvertOptions) -> dict[str, Any]:
    """Uses the source's tensors; returns the fields of our configuration. Raises RelayError if an option is missing."""
    options.require("heads", "normalizer", "tasks", *(["contextual_mask"] if options.features else []))
    names = NvidiaSource(takings)
    for name in takings.names(_EXTRA):
        takings.unused(name, "state of the library that trained it")
    config = _layers(takings, names, options)
    d = int(config["embedding_dim"])
    config |= _inputs(takings, names, options, d)
    takings.take(names.positions, "positions.weight")
    config["num_positions"] = takings.shape(names.positions)[0] if takings.has(names.positions) else 0
    # The positional encoder also scales tokens; a model without it does not scale.
    config["embedding_scale"] = float(d) ** 0.5 if takings.has(names.positions) else 1.0
    return config | _readout(takings, names, options)


def _layers(takings: Takings, names: NvidiaSource, options: ConvertOptions) -> dict[str, Any]:
    heads = options.heads or 0
    layers = number_of_layers(takings, names.layers)
    first = f"{names.layers}0."
    if takings.has(f"{first}_linear_proj_weight"):
        values, d = takings.shape(f"{first}_linear_proj_weight")
        columns = takings.shape(f"{first}_linear_uvqk_weight")[1]
    else:
        d, values = takings.shape(f"{first}_linear_proj.weight")
        columns = takings.shape(f"{first}_linear_uvqk.weight")[0]
    hidden = per_head(values, heads, "The attention's result")
    attention = per_head(columns // 2 - values, heads, "The joint projection's Q")
    order = order_of(_projection(takings, first, options), heads, attention, hidden)
    has_bias = takings.has(f"{first}_linear_uvqk_bias") or takings.has(f"{first}_linear_uvqk.bias")
    for index in range(layers):
        source, target = f"{names.layers}{index}.", f"layers.{index}"
        take_norm(
            takings,
            f"{target}.input_norm",
            (f"{source}_input_layernorm_weight",),
            (f"{source}_input_layernorm_bias",),
            d,
        )
        weights = (f"{source}_linear_uvqk_weight", f"{source}_linear_uvqk.weight")
        take_projection(takings, target, weights, (f"{source}_linear_uvqk_bias", f"{source}_linear_uvqk.bias"), order)
        take_norm(
            takings,
            f"{target}.output_norm",
            (f"{source}_output_layernorm_weight", f"{source}_output_ln_dropout_mul.weight"),
            (f"{source}_output_layernorm_bias", f"{source}_output_ln_dropout_mul.bias"),
            values,
        )
        if takings.has(f"{source}_linear_proj.weight"):
            takings.take(f"{source}_linear_proj.weight", f"{target}.output.weight", TRANSPOSED)
        else:
            takings.take(f"{source}_linear_proj_weight", f"{target}.output.weight")
    return {
        "embedding_dim": d,
        "num_heads": heads,
        "hidden_dim": hidden,
        "attention_dim": attention,
        "num_layers": layers,
        "norm_eps": options.eps or _EPS,
        "activated": "uvqk",
        "output_form": "unorm",
        "projection_bias": has_bias,
        "target_group_size": options.target_group_size,
    }


def _projection(takings: Takings, layer: str, options: ConvertOptions) -> ProjectionLayout:
    """The order of the columns: from the option, or from names that only one kind of layer has."""
    if options.projection is None and not takings.has(f"{layer}_linear_uvqk_weight"):
        if takings.has(f"{layer}_output_ln_dropout_mul.weight"):
            return ProjectionLayout.PER_HEAD
        options.require("projection")
    return options.projection or ProjectionLayout.CONTIGUOUS


def _inputs(takings: Takings, names: NvidiaSource, options: ConvertOptions, d: int) -> dict[str, Any]:
    item_width = _input_width(takings, names.item_mlp, d)
    contextual_width = _input_width(takings, names.contextual_mlp, d)
    tables = Tables(takings, options, item_width)
    features = options.features
    action = tables.find(ACTION)
    besides = {feature.name for feature in features} | {options.tables.get(ACTION, ACTION)}
    item = tables.require(ITEM, tables.only(besides))
    through_item_mlp = _mlp(takings, names.item_mlp)
    items = Items(takings, options, item, through_item_mlp)
    described = []
    through = _mlp(takings, names.contextual_mlp)
    for index, feature in enumerate(features):
        table = tables.require(feature.name)
        table.require_width(feature.name, contextual_width)
        give_table(takings, table, f"features.{index}.weight", through)
        described.append(feature.model_dump() | {"cardinality": table.rows.shape[0]})
    config: dict[str, Any] = {
        "inputs": "added",
        "vocabulary_size": items.count,
        "contextual_features": described,
        "contextual_mask": options.contextual_mask,
    }
    if action is not None:
        give_table(takings, action, "actions.weight", through_item_mlp)
        config |= {"inputs": "interleaved", "num_actions": int(action.rows.shape[0])}
    for mlp in (names.item_mlp, names.contextual_mlp):
        for part in ("0.weight", "0.bias", "2.weight", "2.bias"):
            takings.unused(f"{mlp}.{part}", "computed into the tables")
    return config


def _input_width(takings: Takings, mlp: str, otherwise: int) -> int:
    return takings.shape(f"{mlp}.0.weight")[1] if takings.has(f"{mlp}.0.weight") else otherwise


def _mlp(takings: Takings, name: str) -> Transform:
    """The source's MLP after a table: linear, ReLU, linear. Without one, rows stay as they are."""
    if not takings.has(f"{name}.0.weight"):
        return AS_IS
    first, bias, second, last = (
        takings.peek(f"{name}.{part}").float() for part in ("0.weight", "0.bias", "2.weight", "2.bias")
    )
    return Transform("through its MLP", lambda x: F.linear(F.relu(F.linear(x.float(), first, bias)), second, last))


def _readout(takings: Takings, names: NvidiaSource, options: ConvertOptions) -> dict[str, Any]:
    prefix, suffix = f"{names.task_mlp}.", ".weight"
    found = [name for name in takings.names(suffix) if name.startswith(prefix)]
    places = sorted(int(name.removeprefix(prefix).removesuffix(suffix)) for name in found)
    widths = []
    for index, place in enumerate(places):
        weight, bias = f"{prefix}{place}.weight", f"{prefix}{place}.bias"
        takings.take(weight, f"readout.mlp.{index}.weight", TRANSPOSED)
        columns = takings.shape(weight)[0]
        if takings.has(bias):
            takings.take(bias, f"readout.mlp.{index}.bias")
        else:
            takings.give([], f"readout.mlp.{index}.bias", torch.zeros(columns), "zeros: the source has none")
        widths.append(columns)
    return {
        "readout_norm": "l2",
        "readout_hidden": widths[:-1],
        "readout_activation": options.activation or ReadoutActivation.RELU,
        "tasks": [task.model_dump() for task in options.tasks],
    }
