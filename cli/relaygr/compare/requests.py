"""Reads requests, and the scores that a source gave for them, from JSON lines, Parquet or .npz (docs/checkpoints.md).

All forms hold the same: for each request the history (items, actions, times), the values of the user's features, the
candidates, the query time, and a score for each candidate and task. A file may hold requests, scores, or both. Features
and tasks have names, so that their order in the file does not matter; the features of a team's own ranker are `0`, `1`
and so on. The number of the source's batch is for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import require_regular
from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.npy import read_npz
from relaygr.worker.model.options import ContextualFeature
from relaygr.worker.model.rankers import RankerRecord

Int64Array = NDArray[np.int64]
Scores = NDArray[np.float64]

UNKNOWN = -1
"""The value of a feature that a request does not have."""
_FEATURE = "features/"
_SCORE = "scores/"
_INDEX = "__index_level_"
_LARGEST_ACTION = np.iinfo(np.uint16).max
_FIELDS = frozenset({"items", "actions", "timestamps_ms", "query_time_ms", "features", "candidates", "scores", "batch"})


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request in the model's order of features and tasks. `scores` [candidates, tasks]: those of the source."""

    behaviours: Behaviours
    features: Int64Array
    candidates: Int64Array
    query_time_ms: int
    scores: Scores


_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Read:
    """What a model reads of a request, and the names of its tasks."""

    actions: bool
    times: bool
    features: Sequence[ContextualFeature]
    tasks: Sequence[str]


def task_names(model: ModelConfig | RankerRecord) -> Sequence[str]:
    return model.shape.tasks if isinstance(model, RankerRecord) else [task.name for task in model.tasks]


def _read_by(model: ModelConfig | RankerRecord) -> _Read:
    if isinstance(model, RankerRecord):
        # Whether it reads times of behaviours only its code says.
        shape = model.shape
        return _Read(shape.num_actions > 0, model.rules.uses_query_time, model.description().features, shape.tasks)
    has_bias = model.relative_bias is not None and model.relative_bias.time_buckets > 0
    return _Read(
        bool(model.num_actions or (model.dlrm_inputs is not None and model.dlrm_inputs.action_weights)),
        bool(has_bias or model.num_times or model.readout_periods),
        model.contextual_features,
        task_names(model),
    )


def read_requests(requests: Path, scores: Path, model: ModelConfig | RankerRecord) -> tuple[Request, ...]:
    """The requests of a file with the scores of another file, or of the same one. Raises RelayError."""
    asked = _read(requests)
    given = asked if scores == requests else _read(scores)
    if len(asked) != len(given):
        raise RelayError(f"{requests} has {len(asked)} requests, {scores} has scores for {len(given)}.")
    if not asked:
        raise RelayError(f"{requests} contains no request.")
    found, wanted = [], _read_by(model)
    for number, (row, scored) in enumerate(zip(asked, given, strict=True), 1):
        try:
            found.append(_request(row, scored, wanted))
        # Values of wrong types and shapes raise whichever error occurs first.
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            text = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise RelayError(f"{requests}, request {number}: {text}.") from error
    return tuple(found)


def _request(row: _Row, scored: _Row, wanted: _Read) -> Request:
    items = _whole(row, "items")
    candidates = _whole(row, "candidates")
    if not candidates.size:
        raise ValueError("it has no candidates")
    actions = _whole(row, "actions", items.size, is_needed=wanted.actions)
    if actions.size and (actions.min() < 0 or actions.max() > _LARGEST_ACTION):
        raise ValueError(f"actions are codes from 0 to {_LARGEST_ACTION}")
    query_time_ms = int(_whole(row, "query_time_ms", 1, is_needed=wanted.times)[0])
    times = _whole(row, "timestamps_ms", items.size, is_needed=wanted.times)
    return Request(
        Behaviours(items, actions.astype(np.uint16), times),
        _features(row, wanted.features),
        candidates,
        query_time_ms,
        _scores(scored, candidates.size, wanted.tasks),
    )


def _whole(row: _Row, name: str, count: int | None = None, is_needed: bool = True) -> Int64Array:
    """One row of integers; zeros if it is missing and not needed."""
    if row.get(name) is None and not is_needed and count is not None:
        return np.zeros(count, np.int64)
    values = np.atleast_1d(np.asarray(row[name]))
    if not values.size:
        values = values.astype(np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"{name} holds {values.dtype} {list(values.shape)}, not one row of integers")
    if count is not None and values.size != count:
        raise ValueError(f"{name} has {values.size} numbers, not {count}")
    if values.size and values.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} holds {values.max()}, which is no int64")
    return values.astype(np.int64)


def _features(row: _Row, wanted: Sequence[ContextualFeature]) -> Int64Array:
    """The value of each contextual token. A feature with fewer values than tokens has unknown values at its end."""
    given = row.get("features") or {}
    if not isinstance(given, Mapping):
        raise TypeError("features is not a mapping of names to values")
    names = [feature.name for feature in wanted]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(f"the model has no feature {', '.join(unknown)}; it has {', '.join(names) or 'none'}")
    values: list[int] = []
    for feature in wanted:
        own = _whole(given, feature.name).tolist()
        if len(own) > feature.tokens:
            raise ValueError(f"feature {feature.name} has {len(own)} values, the model has {feature.tokens} tokens")
        values += own + [UNKNOWN] * (feature.tokens - len(own))
    return np.array(values, np.int64)


def _scores(row: _Row, count: int, tasks: Sequence[str]) -> Scores:
    given = row["scores"]
    if not isinstance(given, Mapping):
        raise TypeError("scores is not a mapping of tasks to numbers")
    columns = []
    for task in tasks:
        if task not in given:
            raise ValueError(f"it has no score for the task {task}; it has {', '.join(given) or 'none'}")
        column = np.asarray(given[task], np.float64)
        if column.shape != (count,):
            raise ValueError(f"{list(column.shape)} scores of {task} for {count} candidates")
        if not np.isfinite(column).all():
            raise ValueError(f"a score of {task} is not a number")
        columns.append(column)
    return np.stack(columns, axis=1)


def _read(path: Path) -> Sequence[_Row]:
    read = {".npz": _read_npz, ".parquet": _read_parquet}.get(path.suffix, _read_lines)
    try:
        return read(path)
    except (OSError, ValueError) as error:
        raise RelayError(f"{path} cannot be read as requests: {error}.") from error


def _read_lines(path: Path) -> Sequence[_Row]:
    rows: list[_Row] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is not an object")
            _check_names(set(row), f"line {number}")
            rows.append(row)
    return rows


def _check_names(names: set[str], where: str) -> None:
    if names - _FIELDS:
        raise ValueError(f"{where} has {', '.join(sorted(names - _FIELDS))}; known are {', '.join(sorted(_FIELDS))}")


def _read_parquet(path: Path) -> Sequence[_Row]:
    """A row for each request, a column for each field of JSON lines."""
    import pyarrow.parquet

    require_regular(path)
    try:
        table = pyarrow.parquet.ParquetFile(path).read()
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error
    # pandas writes an index that has gaps as a column of its own.
    table = table.drop_columns([name for name in table.column_names if name.startswith(_INDEX)])
    _check_names(set(table.column_names), "the file")
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        for name in ("features", "scores"):
            # Every row has the names of all rows.
            if isinstance(row.get(name), dict):
                row[name] = {own: value for own, value in row[name].items() if value is not None}
    return rows


def _read_npz(path: Path) -> Sequence[_Row]:
    """Histories and candidates are one after the other; `lengths` and `num_candidates` divide them."""
    arrays = read_npz(path)
    lengths, counts = (_lengths(arrays, name) for name in ("lengths", "num_candidates"))
    if lengths and counts and len(lengths) != len(counts):
        raise ValueError(f"it has {len(lengths)} lengths, and {len(counts)} numbers of candidates")
    number = max(len(lengths), len(counts))
    rows: list[dict[str, Any]] = [{} for _ in range(number)]
    for name, array in arrays.items():
        group, _, own = name.rpartition("/")
        if name in ("items", "actions", "timestamps_ms"):
            parts: Sequence[Any] = _split(name, array, lengths, "lengths")
        elif name == "candidates" or name.startswith(_SCORE):
            parts = _split(name, array, counts, "num_candidates")
        elif array.shape[:1] == (number,):
            parts = list(array)
        else:
            raise ValueError(f"{name} is {list(array.shape)}, and there are {number} requests")
        for row, part in zip(rows, parts, strict=True):
            (row.setdefault(group, {}) if f"{group}/" in (_FEATURE, _SCORE) else row)[own] = part
    _check_names({name for row in rows for name in row}, "the file")
    return rows


def _lengths(arrays: dict[str, NDArray[Any]], name: str) -> list[int]:
    """The lengths, taken out of the arrays."""
    array = arrays.pop(name, np.empty(0, np.int64))
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.size and array.min() < 0):
        raise ValueError(f"{name} is not one row of lengths")
    return [int(length) for length in array]


def _split(name: str, array: NDArray[Any], lengths: Sequence[int], by: str) -> list[NDArray[Any]]:
    if array.ndim != 1 or array.size != sum(lengths):
        raise ValueError(f"{name} is {list(array.shape)}, and the sum of {by} is {sum(lengths)}")
    return np.split(array, np.cumsum(lengths)[:-1]) if lengths else []
