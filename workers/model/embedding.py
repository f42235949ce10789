"""Token inputs: what a behaviour, a candidate or a user feature becomes before the first layer.

    row = item[id] + action[code] + position[place]        behaviours; candidates take a learned action row
    row = feature[value] + position[place]                 contextual tokens, first in the prefix

Positions count from the start, so that a prefix is good for any later request; all candidates stand at the place
after the last behaviour, and places beyond the table take its last row.

The first half (`Vocabulary`, `TokenRows`) is numpy, cheap, and callable from any thread; the second
(`TokenEmbedding`) runs on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

from workers.model.config import ModelConfig

IDS_TENSOR = "items.ids"

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows of the item table, and how many ids have none of their own."""

    rows: Int64Array
    unknown: int


class Vocabulary:
    """Item ids to rows of the item table. Ids that it does not hold share one learned row, the last."""

    def __init__(self, size: int, ids: Int64Array | None = None) -> None:
        """With no ids, row = id for ids 0 to size - 1. Raises ValueError unless ids are `size` rising numbers."""
        if ids is not None and (ids.shape != (size,) or bool((np.diff(ids) <= 0).any())):
            raise ValueError(f"item ids must be {size} strictly rising numbers")
        self._size = size
        self._ids = ids

    def rows(self, items: Int64Array) -> FoundRows:
        """The row of each id."""
        if self._ids is None:
            known = (items >= 0) & (items < self._size)
            places = items
        else:
            places = np.searchsorted(self._ids, items)
            np.minimum(places, self._size - 1, out=places)
            known = self._ids[places] == items
        rows = np.where(known, places, self._size).astype(np.int64, copy=False)
        return FoundRows(rows, int(items.size - np.count_nonzero(known)))


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Table rows of consecutive tokens, int64 of one length. Where there are no actions, `actions` is empty."""

    items: Int64Array
    actions: Int64Array

    def __getitem__(self, part: slice) -> TokenRows:
        return TokenRows(self.items[part], self.actions[part])


class ActionCodes:
    """Action codes to rows: 0 to n - 1 as they are, n for any other code, n + 1 for candidates."""

    def __init__(self, num_actions: int) -> None:
        self._num_actions = num_actions

    def of_behaviours(self, codes: NDArray[np.uint16]) -> Int64Array:
        return np.minimum(codes.astype(np.int64), self._num_actions)

    def of_candidates(self, count: int) -> Int64Array:
        return np.full(count, self._num_actions + 1, dtype=np.int64)


class NoActions(ActionCodes):
    """For models without actions."""

    def __init__(self) -> None:
        super().__init__(0)

    def of_behaviours(self, codes: NDArray[np.uint16]) -> Int64Array:  # noqa: ARG002 - not used by such a model
        return np.empty(0, np.int64)

    def of_candidates(self, count: int) -> Int64Array:  # noqa: ARG002
        return np.empty(0, np.int64)


class FeatureRows:
    """Values of contextual features to rows of the joint feature table, one table after the other.

    Each feature's table has a last row for values that it does not hold, and for features that are missing.
    """

    def __init__(self, cardinalities: tuple[int, ...]) -> None:
        self._cardinalities = np.asarray(cardinalities, dtype=np.int64)
        self._offsets = np.concatenate(([0], np.cumsum(self._cardinalities + 1)[:-1])).astype(np.int64)[
            : len(cardinalities)
        ]

    def rows(self, features: Int64Array) -> Int64Array:
        """int64 [contextual features]; values beyond the model's features are not used."""
        values = np.full(self._cardinalities.size, -1, dtype=np.int64)
        given = min(values.size, features.size)
        values[:given] = features[:given]
        known = (values >= 0) & (values < self._cardinalities)
        return self._offsets + np.where(known, values, self._cardinalities)


class TokenEmbedding:
    """Rows to vectors, on the device."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self._items = tensors["items.weight"]
        self._contextual = len(config.contextual_features)
        width = config.embedding_dim
        self._features = torch.cat(
            [self._items.new_empty((0, width))]
            + [tensors[f"features.{index}.weight"] for index in range(self._contextual)]
        )
        # A model without actions or positions has tables of no rows, and adds nothing.
        self._actions = tensors.get("actions.weight")
        self._positions = tensors.get("positions.weight")

    def prefix(self, features: Int64Array, tokens: TokenRows, start: int, end: int) -> torch.Tensor:
        """Vectors [end - start, D] of prefix tokens [start, end): features first, then behaviours."""
        c = self._contextual
        behaviours = self._behaviours(tokens[max(0, start - c) : max(0, end - c)])
        x = behaviours if start >= c else torch.cat((self._lookup(self._features, features[start:end]), behaviours))
        return self._placed(x, np.arange(start, end, dtype=np.int64))

    def scored(self, tokens: TokenRows, places: Int64Array) -> torch.Tensor:
        """Vectors [rows, D] of suffix behaviours and candidates at their places."""
        return self._placed(self._behaviours(tokens), places)

    def _behaviours(self, tokens: TokenRows) -> torch.Tensor:
        x = self._lookup(self._items, tokens.items)
        return x if self._actions is None else x.add_(self._lookup(self._actions, tokens.actions))

    def _placed(self, x: torch.Tensor, places: Int64Array) -> torch.Tensor:
        if self._positions is None:
            return x
        return x.add_(self._lookup(self._positions, np.minimum(places, self._positions.shape[0] - 1)))

    @staticmethod
    def _lookup(table: torch.Tensor, rows: Int64Array) -> torch.Tensor:
        return F.embedding(torch.from_numpy(rows).to(table.device, non_blocking=True), table)
