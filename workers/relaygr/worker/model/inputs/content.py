"""Tokens to vectors, on the device: what a token is, before it is told where and when it stands.

    added         item[id] + action[code]                                     contextual tokens: feature[value]
    interleaved   item[id], action[code], item[id], ...                       contextual tokens: feature[value]
    dlrm          MLP(item[id]) + MLP(item features) + MLP(action bits)       contextual tokens: feature[value] W + b

swish-norm MLPs, one W and b a contextual token. Source of `dlrm`: Meta's generative-recommenders, DLRM-v3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.inputs.tokens import Column
from relaygr.worker.model.mlp import Rows, swish_norm_mlp
from relaygr.worker.model.options import DlrmInputs, InputForm

Tensors = Mapping[str, torch.Tensor]


class Content(Protocol):
    """What tokens are."""

    def __call__(self, tokens: torch.Tensor, others: torch.Tensor | None) -> torch.Tensor:
        """Tokens int64 [n, 5] -> [n, D]. others: places of those that are no items, None if all are."""


class ItemEmbeddings:
    """Rows of the item table, joined with those of the item's features: [rows, table_dim (1 + features)]."""

    def __init__(self, features: int, tensors: Tensors) -> None:
        self._items = tensors["items.weight"]
        self._features = [
            (tensors[f"item_features.{index}.rows"], tensors[f"item_features.{index}.weight"])
            for index in range(features)
        ]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        parts = [F.embedding(rows, self._items)]
        parts += [F.embedding(values[rows], table) for values, table in self._features]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class ActionBits:
    """Sets of bits to rows: the embedding of each weight that shares a bit with the set, else zeros, side by side.

    -1 stands for candidates, which take a learned row.
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
    """Added and interleaved actions: rows of tables are vectors as they are."""

    def __init__(self, config: ModelConfig, tensors: Tensors) -> None:
        self._items = tensors["items.weight"]
        tables = [tensors[f"features.{index}.weight"] for index in _features_by_token(config)]
        if config.inputs is InputForm.INTERLEAVED:
            tables.append(tensors["actions.weight"])
        self._others = _joined(tables, self._items.new_empty((0, config.embedding_dim)))
        # A model without added actions has a table of no rows. A last row of zeros is for tokens without an action.
        self._actions: torch.Tensor | None = None
        if config.inputs is InputForm.ADDED and config.num_actions:
            self._actions = F.pad(tensors["actions.weight"], (0, 0, 0, 1))

    def __call__(self, tokens: torch.Tensor, others: torch.Tensor | None) -> torch.Tensor:
        content, actions = tokens[:, Column.CONTENT], tokens[:, Column.ACTION]
        x = _with_others(content, others, lambda rows: F.embedding(rows, self._items), self._others)
        if self._actions is None:
            return x
        return x.add_(F.embedding(actions.remainder(self._actions.shape[0]), self._actions))


class DlrmContent:
    """Items and actions through MLPs; contextual tokens through a linear map each, done once at load."""

    def __init__(self, config: ModelConfig, inputs: DlrmInputs, tensors: Tensors) -> None:
        self._items = ItemEmbeddings(len(inputs.item_features), tensors)
        self._width = inputs.table_dim
        eps = inputs.norm_eps, config.swish_eps(inputs.norm_eps)
        self._content = swish_norm_mlp(tensors, "content", *eps)
        self._additional: Rows | None = None
        if inputs.item_features:
            self._additional = swish_norm_mlp(tensors, "additional", *eps)
        self._bits: ActionBits | None = None
        if inputs.action_weights:
            self._bits = ActionBits(inputs, tensors)
            self._action = swish_norm_mlp(tensors, "action_bits", *eps)
        mapped = [
            torch.addmm(tensors["contextual.bias"][token], tensors[f"features.{index}.weight"], weight)
            for token, (index, weight) in enumerate(
                zip(_features_by_token(config), tensors.get("contextual.weight", ()), strict=True)
            )
        ]
        self._others = _joined(mapped, tensors["items.weight"].new_empty((0, config.embedding_dim)))

    def __call__(self, tokens: torch.Tensor, others: torch.Tensor | None) -> torch.Tensor:
        content, actions = tokens[:, Column.CONTENT], tokens[:, Column.ACTION]

        def of_items(rows: torch.Tensor) -> torch.Tensor:
            read = self._items(rows)
            x = self._content(read[:, : self._width])
            if self._additional is not None:
                x = x + self._additional(read[:, self._width :])
            if self._bits is not None:
                x = x + self._action(self._bits(actions))
            return x

        return _with_others(content, others, of_items, self._others)


def build_content(config: ModelConfig, tensors: Tensors) -> Content:
    """The content of a checkpoint whose tensors were checked (`checkpoint.py`)."""
    if config.dlrm_inputs is not None:
        return DlrmContent(config, config.dlrm_inputs, tensors)
    return TableContent(config, tensors)


def _features_by_token(config: ModelConfig) -> list[int]:
    """The contextual feature of each contextual token."""
    return [index for index, feature in enumerate(config.contextual_features) for _ in range(feature.tokens)]


def _joined(tables: list[torch.Tensor], empty: torch.Tensor) -> torch.Tensor:
    return torch.cat(tables) if tables else empty


def _with_others(
    content: torch.Tensor, others: torch.Tensor | None, of_items: Rows, table: torch.Tensor
) -> torch.Tensor:
    """Items by their rows; the rows at `others` from the table of all else."""
    if others is None:
        return of_items(content)
    # Where a token is no item, any item's row is computed and written over: shapes stay what they are.
    x = of_items(content.clamp(min=0))
    x[others] = F.embedding(~content[others], table)
    return x
