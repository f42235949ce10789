"""Turns tokens into the rows of the first layer, on the device, and lists the tensors that this needs.

    row = scale * content + position[place] + time[age]

    content       an item                                                     a contextual token
    added         item[id] + action[code]                                     feature[value]
    interleaved   item[id], action[code], item[id], ...                       feature[value]
    dlrm          MLP(item[id]) + MLP(item features) + MLP(action bits)       feature[value] W + b

The MLPs are swish-norm MLPs; each contextual token has its own W and b. Source of `dlrm`: Meta's
generative-recommenders, DLRM-v3. The form of the content is chosen once, at load.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

from relaygr.schemas.record import record
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.inputs.tables import DeviceTable, Placement, Table, TablePart, Tensors, joined_tables
from relaygr.worker.model.inputs.tokens import Column, Tokens
from relaygr.worker.model.layer_parts import RowFunction, swish_norm_mlp, swish_norm_mlp_shapes
from relaygr.worker.model.options import DlrmInputs, InputForm

ITEM_FEATURE_ROWS = "item_features.{}.rows"
"""int64: for each item, the row of the feature's table."""


def input_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of the inputs, except the optional `items.ids`."""
    d = config.embedding_dim
    width = config.dlrm_inputs.table_dim if config.dlrm_inputs is not None else d
    shapes: dict[str, tuple[int, ...]] = {"items.weight": (config.vocabulary_size + 1, width)}
    for index, feature in enumerate(config.contextual_features):
        shapes[f"features.{index}.weight"] = (feature.cardinality + 1, width)
    if config.num_actions:
        # Added actions have a last row for candidates. Interleaved actions are tokens, which candidates do not have.
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
    """The most float32 elements that the embedding of one token needs, its row included."""
    # The token; its row as stored and in float32, and rows that are added to it or written over it.
    elements = 2 * len(Column) + 4 * config.embedding_dim
    if config.dlrm_inputs is not None:
        inputs = config.dlrm_inputs
        bits = len(inputs.action_weights)
        # The table rows as stored, in float32 and joined; the linear map, norm and gate of an MLP; actions, and those
        # of candidates.
        elements += 3 * inputs.table_dim * (1 + len(inputs.item_features)) + 4 * inputs.hidden
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


Int64Array = NDArray[np.int64]


@record(frozen=True, slots=True)
class Batch:
    """Tokens [n, 5], on the host and on the device, and the indices of those that are not items (None: all are)."""

    tokens: Tokens
    sent: torch.Tensor
    others: Int64Array
    sent_others: torch.Tensor | None


class Content(Protocol):
    """Computes the content of tokens."""

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Tokens -> [n, D]."""


class ItemEmbeddings:
    """Rows of the item table, joined with the rows of the items' features: [rows, table_dim (1 + features)]."""

    def __init__(self, features: int, tensors: Tensors, placement: Placement) -> None:
        self._items = placement.table(tensors, "items.weight")
        self._features = [
            (
                tensors[ITEM_FEATURE_ROWS.format(index)],
                placement.table(tensors, f"item_features.{index}.weight"),
            )
            for index in range(features)
        ]

    def __call__(self, rows: torch.Tensor, on_host: Int64Array | None = None) -> torch.Tensor:
        """`on_host`: the same rows, if they are known on the host."""
        parts = [self._items(rows, on_host)]
        parts += [table(values[rows]) for values, table in self._features]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class ActionBits:
    """Rows of sets of bits: the embedding of each weight that shares a bit with the set, else zeros, side by side.

    The code -1 marks candidates, which take a learned row.
    """

    def __init__(self, inputs: DlrmInputs, tensors: Tensors) -> None:
        self._table = tensors["action_bits.weight"]
        self._candidates = tensors["action_bits.candidates"]
        self._weights = torch.tensor(inputs.action_weights, dtype=torch.int64, device=self._table.device)

    def __call__(self, codes: torch.Tensor) -> torch.Tensor:
        taken = ((codes[:, None] & self._weights) > 0).to(self._table.dtype)
        rows = (taken[:, :, None] * self._table).flatten(1)
        return torch.where((codes < 0)[:, None], self._candidates, rows)


class TableContent:
    """Content of the forms `added` and `interleaved`: table rows without an MLP."""

    def __init__(self, config: ModelConfig, tensors: Tensors, placement: Placement) -> None:
        self._items = placement.table(tensors, "items.weight")
        parts = [TablePart(f"features.{index}.weight") for index in _features_by_token(config)]
        if config.inputs is InputForm.INTERLEAVED:
            parts.append(TablePart("actions.weight"))
        self._others = joined_tables(parts, tensors, placement, config.embedding_dim)
        # The last row, zeros, is for tokens without an action.
        self._actions: DeviceTable | None = None
        if config.inputs is InputForm.ADDED and config.num_actions:
            self._actions = DeviceTable(F.pad(tensors["actions.weight"], (0, 0, 0, 1)))
            self._action_rows = tensors["actions.weight"].shape[0] + 1

    def __call__(self, batch: Batch) -> torch.Tensor:
        x = _with_others(batch, self._items, self._others)
        if self._actions is None:
            return x
        return x.add_(self._actions(batch.sent[:, Column.ACTION].remainder(self._action_rows)))


class DlrmContent:
    """Items and actions go through MLPs; each contextual token has a linear map."""

    def __init__(self, config: ModelConfig, inputs: DlrmInputs, tensors: Tensors, placement: Placement) -> None:
        self._items = ItemEmbeddings(len(inputs.item_features), tensors, placement)
        self._width = inputs.table_dim
        eps = inputs.norm_eps, config.swish_eps(inputs.norm_eps)
        self._content = swish_norm_mlp(tensors, "content", *eps)
        self._additional: RowFunction | None = None
        if inputs.item_features:
            self._additional = swish_norm_mlp(tensors, "additional", *eps)
        self._bits: ActionBits | None = None
        if inputs.action_weights:
            self._bits = ActionBits(inputs, tensors)
            self._action = swish_norm_mlp(tensors, "action_bits", *eps)
        parts = [
            TablePart(f"features.{index}.weight", partial(_mapped, weight, tensors["contextual.bias"][token]))
            for token, (index, weight) in enumerate(
                zip(_features_by_token(config), tensors.get("contextual.weight", ()), strict=True)
            )
        ]
        self._others = joined_tables(parts, tensors, placement, config.embedding_dim)

    def __call__(self, batch: Batch) -> torch.Tensor:
        def of_items(rows: torch.Tensor, on_host: Int64Array | None = None) -> torch.Tensor:
            read = self._items(rows, on_host)
            x = self._content(read[:, : self._width])
            if self._additional is not None:
                x = x + self._additional(read[:, self._width :])
            if self._bits is not None:
                x = x + self._action(self._bits(batch.sent[:, Column.ACTION]))
            return x

        return _with_others(batch, of_items, self._others)


def _mapped(weight: torch.Tensor, bias: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, rows, weight)


def build_content(config: ModelConfig, tensors: Tensors, placement: Placement) -> Content:
    """The content of a checkpoint. `checkpoint.py` has checked its tensors."""
    if config.dlrm_inputs is not None:
        return DlrmContent(config, config.dlrm_inputs, tensors, placement)
    return TableContent(config, tensors, placement)


def _features_by_token(config: ModelConfig) -> list[int]:
    """The contextual feature of each contextual token."""
    return [index for index, feature in enumerate(config.contextual_features) for _ in range(feature.tokens)]


def _with_others(batch: Batch, of_items: Table, table: Table) -> torch.Tensor:
    """Items by their rows; other tokens by rows of the table of everything else."""
    content, on_host = batch.sent[:, Column.CONTENT], batch.tokens[:, Column.CONTENT]
    others = batch.sent_others
    if others is None:
        return of_items(content, on_host)
    # For a token that is not an item, the first row of the item table is used and overwritten, which keeps the shapes.
    x = of_items(content.clamp(min=0), np.maximum(on_host, 0))
    x[others] = table(~content[others], ~on_host[batch.others])
    return x


class TokenEmbedding:
    """Computes the rows of tokens, on the device."""

    def __init__(self, config: ModelConfig, tensors: Tensors, placement: Placement | None = None) -> None:
        """`placement`: where the tables are; None: the tensors are on the CPU."""
        placement = Placement() if placement is None else placement
        self._content = build_content(config, tensors, placement)
        self._send = placement.send
        self._scale = config.embedding_scale
        self._tables = [
            (column, tensors[name])
            for column, name in ((Column.PLACE, "positions.weight"), (Column.AGE, "times.weight"))
            if name in tensors
        ]

    def __call__(self, tokens: Tokens, sent: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens [n, 5] -> rows [n, D]. `sent`: the same tokens, if they are already on the device."""
        others = np.flatnonzero(tokens[:, Column.CONTENT] < 0)
        if sent is None:
            sent = self._moved(tokens)
        x = self._content(Batch(tokens, sent, others, self._moved(others) if others.size else None))
        if self._scale != 1.0:
            x = x.mul_(self._scale)
        for column, table in self._tables:
            x = x.add_(F.embedding(sent[:, column], table))
        return x

    def _moved(self, array: Int64Array) -> torch.Tensor:
        return self._send(torch.from_numpy(np.ascontiguousarray(array)))
