"""The items of a model that RecBole trained, in the order of its numbers.

RecBole numbers the items of its `.inter` file from 1 in the order of their first appearance, in the lines that its
filters leave. pandas reads the file for it: fields in quotes, and texts such as `NA` that mean a missing value. What
else its configuration may change is refused, and the items must be given as RecBole has them.
"""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from relaygr.ingest.gather import BadIdError, ItemIndex
from relaygr.runtime.errors import RelayError
from relaygr.worker.model.convert.recbole import RecBoleConfig

_MISSING: Final = {
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null",
}  # fmt: skip
"""What pandas reads as no value; `None` since version 2."""
_INTERVAL: Final = re.compile(r"([\[(])([^,]*),([^,]*)([\])])")
_PADDING: Final = "[PAD]"
_INSTEAD: Final = "give --items, a file of its items (docs/rankers.md)"

Bools = NDArray[np.bool_]


def read_items(path: Path) -> list[str]:
    """The items of a file that was written from RecBole's own list, padding first. Raises RelayError."""
    try:
        items = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RelayError(f"{path} cannot be read: {error}.") from error
    if items[0] != _PADDING:
        raise RelayError(f"{path} is no list of RecBole's items: its first line is not {_PADDING}.")
    return items[1:-1] if items[-1] == "" else items[1:]


def items_of_log(path: Path, config: RecBoleConfig) -> list[str]:
    """The items of RecBole's numbers 1, 2, ... Raises RelayError if the file cannot be read, or does not tell."""
    _refuse(path, config)
    try:
        log = _read(path, config)
    except (OSError, ValueError, LookupError, TypeError, csv.Error) as error:
        raise RelayError(f"{path} cannot be read as the .inter file of the checkpoint: {error}.") from error
    kept = np.ones(len(log.items), np.bool_)
    for field, interval in (config.val_interval or {}).items():
        kept &= _within(log.values[field], _intervals(interval))
    of_users, of_items = (
        None if each is None else _intervals(each)
        for each in (config.user_inter_num_interval, config.item_inter_num_interval)
    )
    while True:
        left = kept & _often(log.users, kept, of_users) & _often(log.items, kept, of_items)
        if left.sum() == kept.sum():
            break
        kept = left
    numbers, first = np.unique(log.items[kept], return_index=True)
    return [log.names[number] for number in numbers[np.argsort(first)]]


def item_numbers(items: Sequence[str]) -> NDArray[np.int64]:
    """The ids of items in messages. Raises RelayError if two have the same."""
    index = ItemIndex(latin1=False)
    try:
        numbers = np.array([index[item] for item in items], np.int64)
    except BadIdError as error:
        raise RelayError(f"An item of the checkpoint cannot be in a message: {error}.") from error
    _, first = np.unique(numbers, return_index=True)
    twice = np.setdiff1d(np.arange(len(numbers)), first)
    if twice.size:
        raise RelayError(f"Two items of the checkpoint have one id in messages, such as {items[twice[0]]!r}.")
    return numbers


def _refuse(path: Path, config: RecBoleConfig) -> None:
    """Raises RelayError for settings of RecBole with which the `.inter` file alone does not tell the numbers."""
    asked = {
        "benchmark_filename": config.benchmark_filename,
        "alias_of_item_id": config.alias_of_item_id,
        # It sorts by time, and lines of equal time in an order of its own.
        "rm_dup_inter": config.rm_dup_inter,
    }
    for name, value in asked.items():
        if value:
            raise RelayError(f"RecBole numbered the items with {name}, which is not done here: {_INSTEAD}.")
    if "item_inter_num_interval" not in config.model_fields_set:
        raise RelayError(f"The checkpoint is of a RecBole before 1.0, which had other filters: {_INSTEAD}.")
    for kind in ("user", "item"):
        beside = path.with_suffix(f".{kind}")
        if (config.load_col is None or kind in config.load_col) and beside.exists():
            raise RelayError(f"RecBole read {beside.name}, too, which is not done here: {_INSTEAD}.")


@dataclass(frozen=True, slots=True)
class _Log:
    users: NDArray[np.int64]
    items: NDArray[np.int64]
    """Of each line: its place in `names`."""
    names: list[str]
    values: Mapping[str, NDArray[np.float64]]
    """Columns by which lines are filtered."""


def _read(path: Path, config: RecBoleConfig) -> _Log:
    """The lines with a user and an item. Raises OSError, ValueError, LookupError, TypeError and
    csv.Error.
    """
    limits = tuple(config.val_interval or ())
    wanted = {config.user_field: "token", config.item_field: "token", **dict.fromkeys(limits, "float")}
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    of_users, of_items, values = array("q"), array("q"), array("d")
    with path.open(encoding=config.encoding or "utf-8", newline="") as file:
        lines = csv.reader(file, delimiter=config.field_separator)
        header = next(lines, [])
        for name, kind in wanted.items():
            if f"{name}:{kind}" not in header:
                raise ValueError(f"it has no column {name}:{kind}")
        user_at, item_at, *others = (header.index(f"{name}:{kind}") for name, kind in wanted.items())
        for line in lines:
            line += [""] * (len(header) - len(line))
            user, item = line[user_at], line[item_at]
            if user not in _MISSING and item not in _MISSING:
                of_users.append(users.setdefault(user, len(users)))
                of_items.append(items.setdefault(item, len(items)))
                values.extend(math.nan if line[at] in _MISSING else float(line[at]) for at in others)
    table = np.array(values, np.float64).reshape(-1, len(limits)) if limits else np.empty((0, 0))
    numbers = np.array(of_users, np.int64), np.array(of_items, np.int64)
    return _Log(*numbers, list(items), dict(zip(limits, table.T, strict=True)))


def _intervals(text: Any) -> list[tuple[str, float, float, str]]:
    """Such as `[5,inf)`, or several with `;` between them. Raises RelayError."""
    parts = [_INTERVAL.fullmatch(each.strip()) for each in str(text).split(";")]
    try:
        return [(each[1], float(each[2]), float(each[3]), each[4]) for each in parts]  # type: ignore[index]
    except (TypeError, ValueError) as error:
        raise RelayError(f"The checkpoint filters by {text!r}, which is no interval such as [5,inf).") from error


def _within(values: NDArray[Any], intervals: Sequence[tuple[str, float, float, str]]) -> Bools:
    found = np.zeros(len(values), np.bool_)
    for left, low, high, right in intervals:
        above = values >= low if left == "[" else values > low
        found |= above & (values <= high if right == "]" else values < high)
    return found


def _often(column: NDArray[np.int64], kept: Bools, intervals: Sequence[tuple[str, float, float, str]] | None) -> Bools:
    """Whether the number of lines that are kept of each line's user or item is in the intervals."""
    if intervals is None:
        return np.ones(len(column), np.bool_)
    return _within(np.bincount(column[kept], minlength=column.max(initial=0) + 1), intervals)[column]
