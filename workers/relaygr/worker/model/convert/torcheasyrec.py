"""Converts a checkpoint of TorchEasyRec's DlrmHSTU: the tensors, and the `pipeline.config` that training saves.

The model is Meta's DLRM-v3 with other parts around it. Options that shapes do not contain are in `pipeline.config`
(protobuf's text format), with N: `max_seq_len`. A part that our model cannot express is refused by name:

    history and candidates        one table of items; a history reads the first columns of a candidate's (slice)
    contextual features           one token each, which see the whole history
    actions                       bits that are added to the item, never tokens of their own
    attention                     causal, with or without a window, over all layers the same rows

Features of an item beside its id are functions of the id here, so their rows are joined into the item table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import read_regular
from relaygr.worker.model.convert.mapping import AS_IS, TRANSPOSED, Takings, Transform, both
from relaygr.worker.model.convert.meta import (
    MLP_EPS,
    MetaSource,
    take_actions,
    take_encodings,
    take_layers,
    take_mlp,
    take_postprocessor,
)
from relaygr.worker.model.convert.options import ConvertOptions
from relaygr.worker.model.convert.parts import Items, Table, find_table, give_table, item_values

PIPELINE_FILE = "pipeline.config"
_ACTIVATIONS = {"nn.ReLU": "relu", "nn.SiLU": "silu", "nn.GELU": "gelu"}
_TASKS = {"binary_cross_entropy": "binary", "binary_focal_loss": "binary", "l2_loss": "regression"}
_SPACE = r"\s*(?:#[^\n]*(?:\n\s*|\Z))*"
"""Space and comments. A comment is matched to the end of its line: another end would make the time exponential."""
_TOKEN = re.compile(_SPACE + r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[\w.+-]+|[{}\[\]<>:,;])""")
_MOST_DEPTH = 64


class Message:
    """One message of protobuf's text format: values by name, in order."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._values: dict[str, list[str | Message]] = {}

    def add(self, name: str, value: str | Message) -> None:
        self._values.setdefault(name, []).append(value)

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def messages(self, name: str) -> list[Message]:
        return [value for value in self._values.get(name, ()) if isinstance(value, Message)]

    def find(self, name: str) -> Message | None:
        return next(iter(self.messages(name)), None)

    def message(self, name: str) -> Message:
        """Raises RelayError if it is missing."""
        found = self.find(name)
        if found is None:
            raise RelayError(f"{self._origin} has no {name}.")
        return found

    def texts(self, name: str) -> list[str]:
        return [value for value in self._values.get(name, ()) if isinstance(value, str)]

    def text(self, name: str, otherwise: str) -> str:
        return next(iter(reversed(self.texts(name))), otherwise)

    def number(self, name: str, otherwise: float) -> float:
        return self._number(name, self.text(name, str(otherwise)))

    def numbers(self, name: str) -> list[float]:
        return [self._number(name, text) for text in self.texts(name)]

    def flag(self, name: str, *, otherwise: bool) -> bool:
        return self.text(name, str(otherwise)).lower() in ("true", "1", "t")

    def _number(self, name: str, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise RelayError(f"{self._origin}: {name} is {text!r}, not a number.") from None


def read_pipeline(path: Path) -> Message:
    """Parses a `pipeline.config`. Raises RelayError if it is missing or not of this format."""
    try:
        text = read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise RelayError(f"{path} cannot be read as TorchEasyRec's pipeline.config: {error}.") from error
    tokens = _tokens(text, str(path))
    return _message(tokens, str(path), "", 0)


def _tokens(text: str, origin: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            if re.fullmatch(_SPACE, text[at:]):
                return
            line = text.count("\n", 0, at) + 1
            raise RelayError(f"{origin}, line {line}: this is not protobuf's text format.")
        yield match[1]
        at = match.end()


def _message(tokens: Iterator[str], origin: str, end: str, depth: int) -> Message:
    if depth > _MOST_DEPTH:
        raise RelayError(f"{origin} has messages in more than {_MOST_DEPTH} others.")
    made = Message(origin)
    for name in tokens:
        if name == end:
            return made
        if name in ",;":
            continue
        value = next(tokens, "")
        if value == ":":
            value = next(tokens, "")
        values = _list(tokens, origin) if value == "[" else [value]
        for each in values:
            if each in ("{", "<"):
                made.add(name, _message(tokens, origin, "}" if each == "{" else ">", depth + 1))
            elif each and (each[0] in "\"'" or re.fullmatch(r"[\w.+-]+", each)):
                made.add(name, each[1:-1] if each[0] in "\"'" else each)
            else:
                raise RelayError(f"{origin}: {name} has no value in protobuf's text format.")
    if end:
        raise RelayError(f"{origin} ends inside a message.")
    return made


def _list(tokens: Iterator[str], origin: str) -> list[str]:
    found: list[str] = []
    for each in tokens:
        if each == "]":
            return found
        if each in "{<":
            raise RelayError(f"{origin} has a list of messages, which is not read here.")
        if each != ",":
            found.append(each)
    raise RelayError(f"{origin} ends inside a list.")


@dataclass(frozen=True, slots=True)
class _Parts:
    """The messages that describe the model, and the features of its groups."""

    dlrm: Message
    stu: Message
    encoder: Message
    tower: Message
    contextual: list[str]
    history: list[str]
    candidate: list[str]
    tables: dict[str, str]
    """Feature -> name of its embedding table."""
    bits: list[int]
    """The bit of each kind of action: those of the actions, then those of the watch time."""
    notes: list[str]


def convert_torcheasyrec(takings: Takings, options: ConvertOptions) -> dict[str, Any]:
    """Uses the source's tensors; returns the fields of our configuration. Raises RelayError for parts without a
    counterpart, and if an option is missing.
    """
    options.require("pipeline")
    assert options.pipeline is not None
    parts, problems = _parts(read_pipeline(options.pipeline))
    tasks = _tasks(parts.tower, problems)
    if problems:
        raise RelayError(
            f"{options.pipeline} describes a model that cannot be converted: {'; '.join(dict.fromkeys(problems))}."
        )
    for sentence in dict.fromkeys(parts.notes):
        takings.note(sentence)
    names = MetaSource(takings)
    names.content, names.action_mlp = f"{names.content}._mlp", f"{names.action_mlp}._mlp"
    told = options.model_copy(update={"heads": int(parts.stu.number("num_heads", 0)) or None})
    told.require("heads", *(["item_features"] if len(parts.candidate) > 1 else []))
    if list(options.item_features) != parts.candidate[1:]:
        raise RelayError(
            f"Candidates have the features {', '.join(parts.candidate)}: name all but the first with --item-feature, "
            "in this order."
        )
    config = take_layers(takings, names, told) | _attention(parts)
    config |= _inputs(takings, names, options, parts)
    config |= _encodings(takings, names, parts, int(config["embedding_dim"]))
    config |= take_postprocessor(takings, names)
    return config | _readout(takings, names, parts, int(config["dlrm_inputs"]["table_dim"])) | {"tasks": tasks}


def _parts(pipeline: Message) -> tuple[_Parts, list[str]]:
    """The parts of the model, and a sentence for each that our model cannot express."""
    model = pipeline.message("model_config")
    dlrm = model.find("dlrm_hstu")
    if dlrm is None:
        kind = next((name for name in model.names if name != "feature_groups" and model.find(name)), "none")
        raise RelayError(f"Only TorchEasyRec's dlrm_hstu is converted; this pipeline's model is {kind}.")
    hstu = dlrm.message("hstu")
    stu, given = hstu.message("stu"), hstu.message("input_preprocessor")
    problems: list[str] = []
    preprocessor = given.find("contextual_preprocessor")
    if preprocessor is None:
        preprocessor = given.message("contextual_interleave_preprocessor")
        if preprocessor.flag("enable_interleaving", otherwise=True):
            problems.append("enable_interleaving makes tokens of actions, which are bits added to the item here")
    content = preprocessor.message("content_encoder")
    if content.find("slice_content_encoder") is None:
        problems.append(
            f"{content.names[0] if content.names else 'its content encoder'} gives history and candidates "
            "different contents of the same item"
        )
    for name in ("content_mlp", "action_mlp"):
        mlp = preprocessor.find(name)
        if mlp is not None and mlp.find("simple_mlp") is None:
            problems.append(f"parameterized_mlp in {name} makes the weights of every token from the user's features")
    if stu.number("sla_k1", 0) or stu.number("sla_k2", 0):
        problems.append("sla_k1 and sla_k2 ask for semi-local attention")
    if hstu.number("attn_truncation_split_layer", 0) and hstu.number("attn_truncation_tail_len", 0):
        problems.append("attn_truncation drops rows between layers")
    if hstu.text("name", ""):
        problems.append(f"name {hstu.text('name', '')!r} is one channel of several")
    groups = {group.text("group_name", ""): group for group in model.messages("feature_groups")}
    features = {name: groups[name].texts("feature_names") if name in groups else [] for name in _GROUPS}
    notes: list[str] = []
    tables = _tables(pipeline, [name for of_group in features.values() for name in of_group], problems, notes)
    encoder = preprocessor.find("action_encoder") or Message("")
    bits: list[int] = []
    for simple in encoder.messages("simple_action_encoder"):
        for name in ("action_weights", "watchtime_to_action_weights"):
            bits += [int(bit) for bit in simple.numbers(name)]
        for threshold, bit in zip(
            simple.texts("watchtime_to_action_thresholds"), simple.texts("watchtime_to_action_weights"), strict=False
        ):
            notes.append(f"Set the bit {bit} in the action's code if the watch time is at least {threshold}.")
    contextual, history, candidate = (features[name] for name in _GROUPS)
    if dlrm.flag("concat_contextual_features", otherwise=False) and len(contextual) > 1:
        problems.append("concat_contextual_features makes one token of several features")
    if stu.number("contextual_seq_len", -1) not in (-1, 0, len(contextual)):
        problems.append("contextual_seq_len is not the number of contextual features")
    if not history or not candidate:
        problems.append("the feature groups uih and candidate must name the item")
    elif [tables.get(name) for name in history] != [tables.get(name) for name in candidate[: len(history)]]:
        problems.append("uih and candidate look their features up in different tables, or in another order")
    tower = dlrm.message("fusion_mtl_tower")
    return _Parts(
        dlrm, stu, hstu.message("positional_encoder"), tower, contextual, history, candidate, tables, bits, notes
    ), problems


_GROUPS = ("contextual", "uih", "candidate")


def _tables(pipeline: Message, names: list[str], problems: list[str], notes: list[str]) -> dict[str, str]:
    """The table of each feature. Only features that are looked up by a number are expressed."""
    found: dict[str, tuple[str, Message]] = {}
    for entry in pipeline.messages("feature_configs"):
        for kind in entry.names:
            for feature in entry.messages(kind):
                if kind == "sequence_feature":
                    sequence = feature.text("sequence_name", "")
                    for inner in feature.messages("features"):
                        for inner_kind in inner.names:
                            for own in inner.messages(inner_kind):
                                found[f"{sequence}__{own.text('feature_name', '')}"] = inner_kind, own
                else:
                    found[feature.text("feature_name", "")] = kind, feature
    tables = {}
    for name in names:
        kind, feature = found.get(name, ("missing", pipeline))
        if kind not in ("id_feature", "sequence_id_feature"):
            problems.append(f"feature {name} is {kind}, not an id feature with an embedding table")
            continue
        if feature.find("zch") is not None:
            problems.append(f"feature {name} has zch, whose map of ids is not read")
        if feature.texts("hash_bucket_size"):
            notes.append(f"{name} is hashed before its table: send the numbers of its hash buckets.")
        if any(vocabulary in feature.names for vocabulary in ("vocab_list", "vocab_dict", "vocab_file")):
            notes.append(f"{name} has a vocabulary: send the numbers of its table's rows.")
        tables[name] = feature.text("embedding_name", "") or f"{name}_emb"
    return tables


def _tasks(tower: Message, problems: list[str]) -> list[dict[str, str]]:
    tasks = []
    for task in tower.messages("task_configs"):
        name = task.text("task_name", "")
        losses = {loss for each in task.messages("losses") for loss in each.names}
        kinds = {_TASKS.get(loss, "") for loss in losses}
        asked = ", ".join(sorted(losses)) or "no loss"
        if len(kinds) != 1 or "" in kinds or task.number("num_class", 1) != 1:
            problems.append(f"task {name} with {asked} is neither binary nor regression")
        tasks.append({"name": name, "kind": next(iter(kinds), "")})
    mlp = tower.find("mlp")
    if mlp is not None and mlp.flag("use_bn", otherwise=False):
        problems.append("fusion_mtl_tower has batch norms")
    if mlp is not None and mlp.text("activation", "nn.ReLU") not in _ACTIVATIONS:
        problems.append(f"fusion_mtl_tower has the activation {mlp.text('activation', '')!r}")
    return tasks


def _attention(parts: _Parts) -> dict[str, Any]:
    stu = parts.stu
    scaling = stu.number("scaling_seqlen", -1)
    return {
        "normalizer": scaling if scaling >= 0 else parts.dlrm.number("max_seq_len", 0),
        "attn_alpha": stu.number("attn_alpha", 0) or None,
        "max_attn_len": int(stu.number("max_attn_len", 0)),
        "contextual_mask": bool(parts.contextual) and stu.number("contextual_seq_len", -1) != 0,
    }


def _inputs(takings: Takings, names: MetaSource, options: ConvertOptions, parts: _Parts) -> dict[str, Any]:
    found = {name: find_table(takings, parts.tables[name]) for name in dict.fromkeys(parts.candidate)}
    bags = {name: find_table(takings, parts.tables[name], prefers_bag=True) for name in parts.contextual}
    read = takings.shape(f"{names.item_mlp}.0.weight")[1]
    content = takings.shape(f"{names.content}.0.weight")[1]
    of_context = takings.shape(names.contextual_weight)[1] if bags else 0
    width = max(read, of_context)
    if content > read:
        raise RelayError(f"The history's MLP reads {content} columns, the candidates' {read}.")
    item = found[parts.candidate[0]]
    rows = [item.rows]
    for name in parts.candidate[1:]:
        rows.append(_rows_of_items(found[name].dense(name), name, options, item.rows.shape[0]))
        takings.unused(found[name].source, "its rows are joined to those of the items")
    joined = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
    if joined.shape[1] != read:
        raise RelayError(f"The tables of the candidates' features have width {joined.shape[1]}, not {read}.")
    items = Items(takings, options, replace(item, rows=joined), _widened(read, width))
    described = []
    for index, (name, table) in enumerate(bags.items()):
        dense = table.dense(name)
        give_table(takings, dense, f"features.{index}.weight", _widened(of_context, width))
        described.append({"name": name, "cardinality": dense.rows.shape[0]})
    if bags:
        takings.take(names.contextual_weight, "contextual.weight", _longer(of_context, width))
        takings.take(names.contextual_bias, "contextual.bias", Transform("one row for each token", lambda x: x[:, 0]))
    take_mlp(takings, names.content, "content", both(TRANSPOSED, _longer(content, width)))
    return {
        "inputs": "dlrm",
        "dlrm_inputs": {
            "table_dim": width,
            "hidden": takings.shape(f"{names.content}.0.weight")[0],
            "norm_eps": MLP_EPS,
            **take_actions(takings, names, lambda: _bits(parts)),
        },
        "vocabulary_size": items.count,
        "contextual_features": described,
    }


def _bits(parts: _Parts) -> list[int]:
    if not parts.bits:
        raise RelayError(
            "No tensor holds the bits of the actions, and pipeline.config does not name them: add action_weights to "
            "its simple_action_encoder."
        )
    return parts.bits


def _rows_of_items(table: Table, name: str, options: ConvertOptions, count: int) -> torch.Tensor:
    """The rows of a feature for each item; zeros for values without a row."""
    if name not in options.item_values:
        raise RelayError(
            f"The values of {name} are missing: give --item-values {name}=FILE.npy, one for each row of items."
        )
    values = torch.from_numpy(item_values(Path(options.item_values[name]), count, table.rows.shape[0]))
    return F.pad(table.rows, (0, 0, 0, 1))[values]


def _widened(columns: int, width: int) -> Transform:
    if columns == width:
        return AS_IS
    return Transform(f"columns of zeros up to {width}", lambda x: F.pad(x, (0, width - columns)))


def _longer(rows: int, width: int) -> Transform:
    """Rows of zeros, for columns of a table that have no effect."""
    if rows == width:
        return AS_IS
    return Transform(f"rows of zeros up to {width}", lambda x: F.pad(x, (0, 0, 0, width - rows)))


def _encodings(takings: Takings, names: MetaSource, parts: _Parts, d: int) -> dict[str, Any]:
    encoder = parts.encoder
    if encoder.flag("use_time_encoding", otherwise=False):
        return take_encodings(takings, names, d) | {
            "time_encoding": encoder.text("time_bucket_fn", "sqrt"),
            "time_unit_seconds": encoder.number("time_bucket_increments", 60.0),
        }
    takings.take(names.positions, "positions.weight")
    return {"num_positions": takings.shape(names.positions)[0], "embedding_scale": float(d) ** 0.5}


def _readout(takings: Takings, names: MetaSource, parts: _Parts, width: int) -> dict[str, Any]:
    read = takings.shape(f"{names.item_mlp}.0.weight")[1]
    take_mlp(takings, names.item_mlp, "readout.item", both(TRANSPOSED, _longer(read, width)))
    mlp, prefix = parts.tower.find("mlp"), f"{names.root}_multitask_module."
    layers = (
        [] if mlp is None else [f"{prefix}tower_mlp.mlp.{k}.perceptron" for k in range(len(mlp.texts("hidden_units")))]
    )
    has_norm = mlp is not None and mlp.flag("use_ln", otherwise=False)
    for index, layer in enumerate([*(f"{layer}.0" for layer in layers), f"{prefix}linear"]):
        takings.take(f"{layer}.weight", f"readout.mlp.{index}.weight", TRANSPOSED)
        if takings.has(f"{layer}.bias"):
            takings.take(f"{layer}.bias", f"readout.mlp.{index}.bias")
        else:
            zeros = torch.zeros(takings.shape(f"{layer}.weight")[0])
            takings.give([], f"readout.mlp.{index}.bias", zeros, "zeros: the source has none")
    if has_norm:
        for index, layer in enumerate(layers):
            for kind in ("weight", "bias"):
                takings.take(f"{layer}.1.{kind}", f"readout.mlp.{index}.norm.{kind}")
    return {
        "readout": "item_product",
        "readout_hidden": [takings.shape(f"{layer}.0.weight")[0] for layer in layers],
        "readout_activation": _ACTIVATIONS[mlp.text("activation", "nn.ReLU")] if mlp is not None else "silu",
        "readout_hidden_norm": has_norm,
        "readout_item_hidden": takings.shape(f"{names.item_mlp}.0.weight")[0],
        "readout_mlp_eps": MLP_EPS,
    }
