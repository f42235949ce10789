"""Embedding tables of a source: where they are, and how item ids and item features go with their rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.worker.model.convert.options import ConvertOptions
from relaygr.worker.model.convert.takings import AS_IS, WITH_UNKNOWN, Takings, Transform, both
from relaygr.worker.model.inputs.vocabulary import IDS_TENSOR

_COLLECTION = "embeddings."
_JOINT_SUFFIX = "_weights"
ITEM = "item"
ACTION = "action"


@dataclass(frozen=True, slots=True)
class Table:
    """One table, and the name of the source's tensor that it is in ("" for a file)."""

    source: str
    rows: torch.Tensor


class Tables:
    """Finds tables by `--table NAME=...`, or by their names in the source's embedding collection."""

    def __init__(self, takings: Takings, options: ConvertOptions, width: int) -> None:
        self._takings = takings
        self._options = options
        self._width = width
        self._found = self._collected()

    @property
    def names(self) -> list[str]:
        """Names in the source's embedding collection."""
        return list(self._found)

    def find(self, name: str, otherwise: str | None = None) -> Table | None:
        """The table called so, or told so by an option; `otherwise`: a name to try when there is neither."""
        told = self._options.tables.get(name)
        if told is None:
            table = self._found.get(name)
            return self._found.get(otherwise) if table is None and otherwise is not None else table
        if told.endswith(".npy"):
            return Table("", torch.from_numpy(_load(Path(told)).astype(np.float32)))
        if told in self._found:
            return self._found[told]
        if self._takings.has(told):
            return Table(told, self._takings.peek(told))
        known = ", ".join(self._found) or "none"
        raise RelayError(f"--table {name}={told}: the source has no such table or tensor; its tables are {known}.")

    def require(self, name: str, otherwise: str | None = None) -> Table:
        """Raises RelayError that says how to name the table."""
        table = self.find(name, otherwise)
        if table is None:
            known = ", ".join(self._found) or "none"
            raise RelayError(
                f"The source has no embedding table for {name!r} (its tables are: {known}): "
                f"say --table {name}=TABLE, a tensor's name or an .npy file."
            )
        if table.rows.ndim != 2:
            raise RelayError(f"The table for {name!r} is {list(table.rows.shape)}, not [rows, width].")
        return table

    def only(self, besides: set[str]) -> str | None:
        """The one collected table that is not among these, if there is exactly one."""
        others = [name for name in self._found if name not in besides]
        return others[0] if len(others) == 1 else None

    def _collected(self) -> dict[str, Table]:
        found: dict[str, Table] = {}
        for name in self._takings.names():
            _, collection, last = name.rpartition(_COLLECTION)
            if not collection:
                continue
            if last.endswith(".weight"):
                found[last.removesuffix(".weight")] = Table(name, self._takings.peek(name))
            elif last.endswith(_JOINT_SUFFIX):
                found |= self._split(name, last.removesuffix(_JOINT_SUFFIX).split("/"))
        return found

    def _split(self, source: str, names: list[str]) -> dict[str, Table]:
        """Tables that lie one after the other in one flat tensor."""
        rows = self._takings.peek(source).reshape(-1, self._width)
        told = self._options.table_rows
        lacking = [name for name in names[:-1] if name not in told]
        if lacking:
            raise RelayError(
                f"{source} holds {len(names)} tables one after the other: "
                f"say how many rows each has with --table-rows {lacking[0]}=ROWS."
            )
        starts = np.cumsum([0] + [told[name] for name in names[:-1]])
        if starts[-1] >= rows.shape[0]:
            raise RelayError(f"{source} has {rows.shape[0]} rows in all, fewer than --table-rows says.")
        ends = [*starts[1:], rows.shape[0]]
        parts = zip(names, starts, ends, strict=True)
        return {name: Table(source, rows[int(start) : int(end)]) for name, start, end in parts}


class Items:
    """The item table, in the order of its ids."""

    def __init__(self, takings: Takings, options: ConvertOptions, table: Table) -> None:
        self._takings = takings
        self.count = int(table.rows.shape[0])
        self._order: torch.Tensor | None = None
        sort: Transform = AS_IS
        if options.items is not None:
            ids = _load(options.items)
            if ids.shape != (self.count,) or np.unique(ids).size != self.count or ids.dtype.kind not in "iu":
                raise RelayError(f"{options.items} is not {self.count} distinct whole numbers, one a row of items.")
            self._order = torch.from_numpy(np.argsort(ids))
            takings.give([], IDS_TENSOR, torch.from_numpy(np.sort(ids).astype(np.int64)), f"read from {options.items}")
            sort = Transform("rows sorted by item id", lambda x: x[self._order])
        give_table(takings, table, "items.weight", both(sort, WITH_UNKNOWN))

    def take_feature(self, values: Path, target: str, unknown: int) -> None:
        """Which row of a feature's table each item has; items that the vocabulary lacks have the unknown one."""
        rows = _load(values)
        if rows.shape != (self.count,) or rows.dtype.kind not in "iu":
            raise RelayError(f"{values} is not {self.count} whole numbers, one a row of the item table.")
        known = np.where((rows >= 0) & (rows < unknown), rows, unknown).astype(np.int64)
        ordered = torch.from_numpy(known)
        if self._order is not None:
            ordered = ordered[self._order]
        last = torch.full((1,), unknown, dtype=torch.int64)
        self._takings.give([], target, torch.cat((ordered, last)), f"read from {values}")


def give_table(takings: Takings, table: Table, target: str, transform: Transform = WITH_UNKNOWN) -> None:
    """A table as ours, with a last row for what it does not hold."""
    sources = [table.source] if table.source else []
    takings.give(sources, target, transform.apply(table.rows), transform.name)


def _load(path: Path) -> NDArray[Any]:
    try:
        loaded: NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise RelayError(f"{path} cannot be read as an .npy file: {error}.") from error
    return loaded
