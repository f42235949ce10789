"""Converts a state dict of Meta's DLRM-v3: `DlrmHSTU` of generative-recommenders with its embedding collection.

Sizes come from shapes. Heads, N, and the names of tasks and contextual features are options. Linear layers are
[out, in] in the source and [in, out] here; the order U, V, Q, K is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from relaygr.runtime.errors import RelayError
from relaygr.worker.model.convert.mapping import AS_IS, FLATTENED, TRANSPOSED, Takings, Transform
from relaygr.worker.model.convert.options import ConvertOptions
from relaygr.worker.model.convert.parts import ITEM, Items, Tables, give_table, number_of_layers, per_head
from relaygr.worker.model.inputs.embedding import ITEM_FEATURE_ROWS

_TRANSDUCER = "_hstu_transducer."
_LAYERS = "_stu_module._stu_layers."
_SECONDS_PER_TIME_UNIT = 60.0
MLP_EPS = 1e-5
_READOUT_EPS = 1e-5
_LAYER_EPS = 1e-6


class MetaSource:
    """The names of one state dict, for any prefix."""

    def __init__(self, takings: Takings) -> None:
        anchor = next((name for name in takings.names() if _TRANSDUCER in name), None)
        if anchor is None:
            raise RelayError(f"This is not DLRM-v3: no tensor's name contains {_TRANSDUCER}.")
        root = anchor[: anchor.index(_TRANSDUCER)]
        self.root = root
        self.item_mlp = f"{root}_item_embedding_mlp"
        self.task_mlp = f"{root}_multitask_module._prediction_module"
        transducer = f"{root}{_TRANSDUCER}"
        self.layers = f"{transducer}{_LAYERS}"
        preprocessor = f"{transducer}_input_preprocessor."
        self.content = f"{preprocessor}_content_embedding_mlp"
        self.additional = f"{preprocessor}_additional_embedding_mlp"
        self.contextual_weight = f"{preprocessor}_batched_contextual_linear_weights"
        self.contextual_bias = f"{preprocessor}_batched_contextual_linear_bias"
        self.action_mlp = f"{preprocessor}_action_embedding_mlp"
        encoder = f"{preprocessor}_action_encoder."
        self.action_table = f"{encoder}_action_embedding_table"
        self.action_candidates = f"{encoder}_target_action_embedding_table"
        self.action_weights = f"{encoder}_combined_action_weights"
        encoder = f"{transducer}_positional_encoder."
        self.positions = f"{encoder}_position_embeddings_weight"
        self.times = f"{encoder}_timestamp_embeddings_weight"
        postprocessor = f"{transducer}_output_postprocessor."
        self.readout_norm = f"{postprocessor}_layer_norm"
        self.periods = f"{postprocessor}_time_feature_combiner"
        self.period_units = f"{postprocessor}_period_units"
        self.units_per_period = f"{postprocessor}_units_per_period"


def convert_meta(takings: Takings, options: ConvertOptions) -> dict[str, Any]:
    """Uses the source's tensors; returns the fields of our configuration. Raises RelayError if an option is missing."""
    names = MetaSource(takings)
    # A model without contextual features may still have their linear maps, for 0 tokens.
    has_context = takings.has(names.contextual_weight) and takings.shape(names.contextual_weight)[0] > 0
    width, additional = _item_mlp_widths(takings, names)
    options.require(
        "heads",
        "normalizer",
        "tasks",
        *(["features", "hide_below"] if has_context else []),
        *(["item_features"] if additional else []),
    )
    if len(options.item_features) != additional:
        raise RelayError(f"The item MLP reads {additional} features beside the item: name as many with --item-feature.")
    kinds = [task.kind for task in options.tasks]
    if kinds != sorted(kinds):
        raise RelayError("The source has its binary tasks first: give --task in the source's order.")
    config = take_layers(takings, names, options)
    config |= _inputs(takings, names, options, width)
    config |= take_encodings(takings, names, int(config["embedding_dim"]))
    config |= _readout(takings, names, options)
    return config


def _item_mlp_widths(takings: Takings, names: MetaSource) -> tuple[int, int]:
    """(width of an embedding table, features of an item beside its id)."""
    width = takings.shape(f"{names.content}.0.weight")[1]
    all_features = takings.shape(f"{names.item_mlp}.0.weight")[1]
    return width, all_features // width - 1


def take_layers(takings: Takings, names: MetaSource, options: ConvertOptions) -> dict[str, Any]:
    heads = options.heads or 0
    layers = number_of_layers(takings, names.layers)
    rows, d = takings.shape(f"{names.layers}0._output_weight")
    values = rows // 3
    columns = takings.shape(f"{names.layers}0._uvqk_weight")[1]
    norm = takings.shape(f"{names.layers}0._output_norm_weight")[0]
    if norm not in (heads, values):
        raise RelayError(f"--heads {heads}: the norms of the source have one weight for each of {norm} heads.")
    for index in range(layers):
        source, target = f"{names.layers}{index}.", f"layers.{index}"
        for ours, theirs in (
            ("input_norm.weight", "_input_norm_weight"),
            ("input_norm.bias", "_input_norm_bias"),
            ("projection.weight", "_uvqk_weight"),
            ("projection.bias", "_uvqk_beta"),
            ("output_norm.weight", "_output_norm_weight"),
            ("output_norm.bias", "_output_norm_bias"),
            ("output.weight", "_output_weight"),
        ):
            takings.take(f"{source}{theirs}", f"{target}.{ours}")
    return {
        "embedding_dim": d,
        "num_heads": heads,
        "hidden_dim": per_head(values, heads, "The attention's result"),
        "attention_dim": per_head(columns // 2 - values, heads, "The joint projection's Q"),
        "num_layers": layers,
        "norm_eps": options.eps or _LAYER_EPS,
        "group_norm": norm == heads and norm != values,
    }


def _inputs(takings: Takings, names: MetaSource, options: ConvertOptions, width: int) -> dict[str, Any]:
    tables = Tables(takings, options, width)
    features = options.features
    besides = {feature.name for feature in features} | set(options.item_features)
    items = Items(takings, options, tables.require(ITEM, tables.only(besides)))
    described = []
    for index, feature in enumerate(features):
        table = tables.require(feature.name)
        give_table(takings, table, f"features.{index}.weight")
        described.append(feature.model_dump() | {"cardinality": table.rows.shape[0]})
    item_features = []
    for index, name in enumerate(options.item_features):
        table = tables.require(name)
        target = ITEM_FEATURE_ROWS.format(index)
        if name not in options.item_values and not takings.has(target):
            raise RelayError(
                f"The values of {name} are missing: give --item-values {name}=FILE.npy, one for each row of items."
            )
        rows = int(table.rows.shape[0])
        give_table(takings, table, f"item_features.{index}.weight")
        if name in options.item_values:
            items.take_feature(Path(options.item_values[name]), target, rows)
        item_features.append({"name": name, "cardinality": rows})
    if features:
        tokens, told = takings.shape(names.contextual_weight)[0], sum(feature.tokens for feature in features)
        if tokens != told:
            raise RelayError(f"The source has {tokens} contextual tokens, --feature names {told}: write NAME=TOKENS.")
        takings.take(names.contextual_weight, "contextual.weight")
        takings.take(names.contextual_bias, "contextual.bias")
    else:
        for name in (names.contextual_weight, names.contextual_bias):
            takings.unused(name, "it maps contextual features, and there are none")
    take_mlp(takings, names.content, "content")
    if options.item_features:
        take_mlp(takings, names.additional, "additional")
    else:
        for part in ("0", "1", "2", "3"):
            for kind in ("weight", "bias"):
                takings.unused(f"{names.additional}.{part}.{kind}", "it reads features that items do not have")
    inputs = {
        "table_dim": width,
        "hidden": takings.shape(f"{names.content}.0.weight")[0],
        "norm_eps": MLP_EPS,
        "item_features": item_features,
        **take_actions(takings, names, lambda: _told_bits(options)),
    }
    return {
        "inputs": "dlrm",
        "dlrm_inputs": inputs,
        "vocabulary_size": items.count,
        "contextual_features": described,
        "contextual_mask": options.contextual_mask,
    }


def _told_bits(options: ConvertOptions) -> Sequence[int]:
    options.require("action_weights")
    return options.action_weights


def take_actions(takings: Takings, names: MetaSource, told_bits: Callable[[], Sequence[int]]) -> dict[str, Any]:
    """`told_bits`: the bit of each kind of action, for a source without a tensor of them. It may raise RelayError."""
    if not takings.has(names.action_table):
        return {}
    if takings.has(names.action_weights):
        weights = [int(weight) for weight in takings.peek(names.action_weights)]
        takings.unused(names.action_weights, "the bits of actions are in the configuration")
    else:
        weights = list(told_bits())
    takings.take(names.action_table, "action_bits.weight")
    takings.take(names.action_candidates, "action_bits.candidates", FLATTENED)
    take_mlp(takings, names.action_mlp, "action_bits")
    return {"action_weights": weights, "action_dim": takings.shape(names.action_table)[1]}


def take_encodings(takings: Takings, names: MetaSource, width: int) -> dict[str, Any]:
    if not takings.has(names.positions):
        return {}
    takings.take(names.positions, "positions.weight")
    takings.take(names.times, "times.weight")
    return {
        "num_positions": takings.shape(names.positions)[0],
        "position_origin": "end",
        "num_times": takings.shape(names.times)[0],
        "time_encoding": "sqrt",
        "time_unit_seconds": _SECONDS_PER_TIME_UNIT,
        "embedding_scale": float(width) ** 0.5,
    }


def take_postprocessor(takings: Takings, names: MetaSource) -> dict[str, Any]:
    """The norm of the candidates' rows, with the phases of the query time if the source joins them."""
    has_norm = takings.has(f"{names.readout_norm}.weight")
    if has_norm:
        takings.take(f"{names.readout_norm}.weight", "readout.norm.weight")
        takings.take(f"{names.readout_norm}.bias", "readout.norm.bias")
    periods: list[dict[str, float]] = []
    if takings.has(f"{names.periods}.weight"):
        takings.take(f"{names.periods}.weight", "readout.periods.weight", TRANSPOSED)
        takings.take(f"{names.periods}.bias", "readout.periods.bias")
        units = zip(_numbers(takings, names.period_units), _numbers(takings, names.units_per_period), strict=True)
        periods = [{"unit_seconds": seconds, "units": count} for seconds, count in units]
    return {
        "readout_norm": "layer" if has_norm else "l2",
        "readout_norm_eps": _READOUT_EPS,
        "readout_periods": periods,
    }


def _readout(takings: Takings, names: MetaSource, options: ConvertOptions) -> dict[str, Any]:
    config = take_postprocessor(takings, names)
    take_mlp(takings, names.item_mlp, "readout.item")
    for ours, theirs, transform in (
        ("0", "0", TRANSPOSED),
        ("0.norm", "1", AS_IS),
        ("1", "2", TRANSPOSED),
    ):
        takings.take(f"{names.task_mlp}.{theirs}.weight", f"readout.mlp.{ours}.weight", transform)
        takings.take(f"{names.task_mlp}.{theirs}.bias", f"readout.mlp.{ours}.bias")
    return config | {
        "readout": "item_product",
        "readout_hidden": [takings.shape(f"{names.task_mlp}.0.weight")[0]],
        "readout_activation": "swish_norm",
        "readout_item_hidden": takings.shape(f"{names.item_mlp}.0.weight")[0],
        "readout_mlp_eps": MLP_EPS,
        "tasks": [task.model_dump() for task in options.tasks],
    }


def _numbers(takings: Takings, name: str) -> list[float]:
    numbers: list[float] = takings.peek(name).to(torch.float64).flatten().tolist()
    takings.unused(name, "the periods are in the configuration")
    return numbers


def take_mlp(takings: Takings, source: str, target: str, first: Transform = TRANSPOSED) -> None:
    """Linear, swish-norm, linear, LayerNorm. `first`: the transform of the first weight."""
    for ours, theirs, transform in (
        ("0", "0", first),
        ("inner_norm", "1", AS_IS),
        ("1", "2", TRANSPOSED),
        ("outer_norm", "3", AS_IS),
    ):
        takings.take(f"{source}.{theirs}.weight", f"{target}.{ours}.weight", transform)
        takings.take(f"{source}.{theirs}.bias", f"{target}.{ours}.bias")
