"""The items, action codes and feature values that a model knows. It needs no torch: publishers check with it, too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import read_regular, require_regular, write_whole
from relaygr.schemas.record import record
from relaygr.worker.model.config import WEIGHTS_FILE, ModelConfig
from relaygr.worker.model.options import ContextualFeature

IDS_TENSOR = "items.ids"
ACTIONS_FILE = "actions.json"
"""Beside the weights: the action code of each event name in the log that the model was trained on."""
_LARGEST_CODE = int(np.iinfo(np.uint16).max)

Int64Array = NDArray[np.int64]
Codes = NDArray[np.uint16]


def read_action_names(model: Path) -> dict[str, int]:
    """Event name -> action code, as a checkpoint folder keeps them; empty: it keeps none. Raises RelayError."""
    path = model / ACTIONS_FILE
    try:
        return {str(name): int(code) for name, code in json.loads(read_regular(path)).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RelayError(f"{path} is no object of event names and codes ({error}): correct or remove it.") from error


def write_action_names(model: Path, names: Mapping[str, int]) -> None:
    write_whole(model / ACTIONS_FILE, (json.dumps(dict(names), indent=1) + "\n").encode())


def _ids(model: Path) -> Int64Array | None:
    """The id of each row of the item table; None: the number of the row."""
    weights = model / WEIGHTS_FILE
    if not weights.exists():
        return None
    try:
        require_regular(weights)
        with safe_open(weights, framework="np") as tensors:
            if IDS_TENSOR in tensors.keys():  # noqa: SIM118 - not a mapping
                return np.asarray(tensors.get_tensor(IDS_TENSOR), np.int64)
    except (OSError, SafetensorError) as error:
        raise RelayError(f"{weights} cannot be read: {error}.") from error
    return None


@record(frozen=True, slots=True)
class FoundRows:
    """Rows of the item table, and the number of ids that are not in the vocabulary."""

    rows: Int64Array
    unknown: int


class Vocabulary:
    """Maps item ids to rows of the item table. All unknown ids share the last row."""

    def __init__(self, size: int, ids: Int64Array | None = None) -> None:
        """Without ids, row = id for ids 0 to size - 1. Raises ValueError unless ids are `size` ascending numbers."""
        if ids is not None and (ids.shape != (size,) or bool((ids[1:] <= ids[:-1]).any())):
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

    def sample(self, count: int, random: np.random.Generator) -> Int64Array:
        """Random known ids; some may be equal."""
        rows = random.integers(0, self._size, count)
        return rows if self._ids is None else self._ids[rows]


def read_vocabulary(model: Path, config: ModelConfig) -> Vocabulary:
    """The vocabulary of the model in a checkpoint folder."""
    return Vocabulary(config.vocabulary_size, _ids(model))


class KnownInputs:
    """Finds the action codes and feature values that a model has no row of its own for.

    A code is a row of the action table, or with the form `dlrm` a set of bits, each of which some action must have. A
    model without actions reads none, so it knows all.
    """

    def __init__(
        self, features: Sequence[ContextualFeature], num_actions: int, action_weights: Sequence[int] | None = None
    ) -> None:
        """`action_weights`: the bits that actions have, if a code is a set of bits; empty: any."""
        self._unknown_bits: int | None = None
        self._codes = num_actions or _LARGEST_CODE + 1
        if action_weights is not None:
            known_bits = int(np.bitwise_or.reduce(action_weights)) if action_weights else _LARGEST_CODE
            self._unknown_bits = _LARGEST_CODE & ~known_bits
        self._cardinalities = np.array(
            [feature.cardinality for feature in features for _ in range(feature.tokens)], np.int64
        )

    @classmethod
    def of(cls, config: ModelConfig) -> KnownInputs:
        """Of a model of our own layers."""
        weights = config.dlrm_inputs.action_weights if config.dlrm_inputs is not None else None
        return cls(config.contextual_features, config.num_actions, weights)

    def unknown_actions(self, codes: Codes) -> NDArray[np.bool_]:
        """Whether each code is unknown."""
        unknown: NDArray[np.bool_] = codes >= self._codes
        if self._unknown_bits is not None:
            unknown = (codes & np.uint16(self._unknown_bits)) != 0
        return unknown

    def known_actions(self) -> str:
        """The known codes, for people."""
        if self._unknown_bits is not None:
            return f"sums of the bits in {_LARGEST_CODE & ~self._unknown_bits}"
        return f"0 to {self._codes - 1}"

    @property
    def features(self) -> int:
        """The number of feature values that a history should have."""
        return int(self._cardinalities.size)

    def unknown_features(self, features: Int64Array) -> int:
        """The number of values that are missing, out of range, or more than the model has."""
        size = self._cardinalities.size
        if not size and not features.size:
            return 0
        given = features[:size]
        known = np.count_nonzero((given >= 0) & (given < self._cardinalities[: given.size]))
        return max(size, features.size) - int(known)
