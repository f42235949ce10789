"""Ids and values to rows of tables, in numpy: cheap, and callable from any thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaygr.worker.model.options import ContextualFeature

IDS_TENSOR = "items.ids"

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows of the item table, and how many ids have none of their own."""

    rows: Int64Array
    unknown: int


class Vocabulary:
    """Item ids to rows of the item table. Ids that it does not hold share one row, the last."""

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


class FeatureRows:
    """Values of contextual features to rows of the joint feature table, one part a token after the other.

    A feature of several tokens takes as many values, each a token of its own. Each part has a last row for values
    that it does not hold, and for values that are missing.
    """

    def __init__(self, features: tuple[ContextualFeature, ...]) -> None:
        cardinalities = [feature.cardinality for feature in features for _ in range(feature.tokens)]
        self._cardinalities = np.asarray(cardinalities, dtype=np.int64)
        self._offsets = np.concatenate(([0], np.cumsum(self._cardinalities + 1)[:-1])).astype(np.int64)[
            : len(cardinalities)
        ]

    @property
    def total(self) -> int:
        """Rows of the joint table."""
        return int(np.sum(self._cardinalities + 1))

    def rows(self, features: Int64Array) -> Int64Array:
        """int64 [contextual tokens]; values beyond the model's features are not used."""
        values = np.full(self._cardinalities.size, -1, dtype=np.int64)
        given = min(values.size, features.size)
        values[:given] = features[:given]
        known = (values >= 0) & (values < self._cardinalities)
        return self._offsets + np.where(known, values, self._cardinalities)
