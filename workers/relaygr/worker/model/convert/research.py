"""Converts a state dict of the research model, HSTU of "Actions Speak Louder than Words" (arXiv 2402.17152).

Norms have no weights, SiLU is applied to U, V, Q and K, alpha is 1, and a bias by position and time is added to q.k.
The research model retrieves with a dot product and has no task MLP. A further file in the source's folder may contain
one under our own names (`readout.mlp.0.weight`, ...).
"""

from __future__ import annotations

import itertools
from typing import Any

from relaygr.runtime.errors import RelayError
from relaygr.worker.model.convert.mapping import TRANSPOSED, Takings
from relaygr.worker.model.convert.options import ConvertOptions
from relaygr.worker.model.convert.parts import ITEM, Items, Table, Tables, number_of_layers, per_head

_LAYERS = "_attention_layers."
_EPS = 1e-6
_ITEMS = "_embedding_module._item_emb.weight"
_POSITIONS = "_input_features_preproc._pos_emb.weight"
ATTENTION_MASK = "_attn_mask"


def convert_research(takings: Takings, options: ConvertOptions) -> dict[str, Any]:
    """Uses the source's tensors; returns the fields of our configuration. Raises RelayError if an option is missing."""
    options.require("heads", "normalizer", "tasks")
    anchor = next((name for name in takings.names("._uvqk") if _LAYERS in name), None)
    if anchor is None:
        raise RelayError(f"This is not the research model: no tensor is named {_LAYERS}0._uvqk.")
    root = anchor[: anchor.index(_LAYERS)]
    config = _layers(takings, f"{root}{_LAYERS}", options)
    d = int(config["embedding_dim"])
    for name in takings.names(ATTENTION_MASK):
        places = takings.shape(name)[0]
        if options.normalizer != places:
            told = f"--normalizer {options.normalizer:g}"
            raise RelayError(f"{told}: the source divides by {places}, the rows of {name}.")
        takings.unused(name, "a causal mask")
    config |= _inputs(takings, options, d)
    return config | _readout(takings, options)


def _layers(takings: Takings, prefix: str, options: ConvertOptions) -> dict[str, Any]:
    heads = options.heads or 0
    layers = number_of_layers(takings, prefix)
    d, columns = takings.shape(f"{prefix}0._uvqk")
    rows = takings.shape(f"{prefix}0._o.weight")[1]
    # U and V are half of the projection or less; [U, A, U * norm(A)] has three blocks of their width.
    concatenated = rows % 3 == 0 and _is_concatenated(columns, rows, heads, options)
    values = rows // 3 if concatenated else rows
    for index in range(layers):
        source, target = f"{prefix}{index}.", f"layers.{index}"
        takings.take(f"{source}_uvqk", f"{target}.projection.weight")
        takings.take(f"{source}_o.weight", f"{target}.output.weight", TRANSPOSED)
        takings.take(f"{source}_o.bias", f"{target}.output.bias")
        takings.take_first(
            (f"{source}_rel_attn_bias._pos_w", f"{source}_rel_attn_bias._w"), f"{target}.relative_bias.positions"
        )
        takings.take(f"{source}_rel_attn_bias._ts_w", f"{target}.relative_bias.times")
    return {
        "embedding_dim": d,
        "num_heads": heads,
        "hidden_dim": per_head(values, heads, "The attention's result"),
        "attention_dim": per_head(columns // 2 - values, heads, "The joint projection's Q"),
        "num_layers": layers,
        "norm_eps": options.eps or _EPS,
        "attn_alpha": options.alpha or 1.0,
        "activated": "uvqk",
        "output_form": "u_na_unorm" if concatenated else "unorm",
        "norm_affine": False,
        "projection_bias": False,
        "output_bias": True,
        "relative_bias": _relative_bias(takings, f"{prefix}0._rel_attn_bias.", options),
    }


def _is_concatenated(columns: int, rows: int, heads: int, options: ConvertOptions) -> bool:
    """Whether the output projection reads three blocks. Raises RelayError if shapes fit both and no option decides."""
    one_block = columns // 2 - rows
    if one_block <= 0 or one_block % heads:
        return True
    three_blocks = columns // 2 - rows // 3
    if three_blocks % heads:
        return False
    options.require("concatenated")
    return bool(options.concatenated)


def _relative_bias(takings: Takings, prefix: str, options: ConvertOptions) -> dict[str, Any] | None:
    name = next((f"{prefix}{last}" for last in ("_pos_w", "_w") if takings.has(f"{prefix}{last}")), None)
    if name is None:
        return None
    buckets = takings.shape(f"{prefix}_ts_w")[0] - 1 if takings.has(f"{prefix}_ts_w") else 0
    positions = (takings.shape(name)[0] + 1) // 2
    return {"positions": positions, "time_buckets": buckets, "log_base": options.log_base}


def _inputs(takings: Takings, options: ConvertOptions, d: int) -> dict[str, Any]:
    tables = Tables(takings, options, d)
    item = next((name for name in takings.names(_ITEMS)), None)
    table = Table(item, takings.peek(item)) if item is not None and ITEM not in options.tables else tables.require(ITEM)
    items = Items(takings, options, table)
    positions = next((name for name in takings.names(_POSITIONS)), None)
    config: dict[str, Any] = {"vocabulary_size": items.count}
    if positions is not None:
        takings.take(positions, "positions.weight")
        config |= {"num_positions": takings.shape(positions)[0], "embedding_scale": float(d) ** 0.5}
    return config


def _readout(takings: Takings, options: ConvertOptions) -> dict[str, Any]:
    hidden = [
        takings.shape(f"readout.mlp.{index}.weight")[1]
        for index in itertools.takewhile(lambda at: takings.has(f"readout.mlp.{at + 1}.weight"), itertools.count())
    ]
    return {
        "readout_norm": "layer" if takings.has("readout.norm.weight") else "l2",
        "readout_hidden": hidden,
        "readout_activation": options.activation or "silu",
        "tasks": [task.model_dump() for task in options.tasks],
    }
