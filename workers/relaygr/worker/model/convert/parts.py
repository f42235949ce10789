"""Conversion steps that several sources share: layers, embedding tables, item ids and item features."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.worker.model.convert.mapping import AS_IS, TRANSPOSED, WITH_UNKNOWN, Takings, Transform, both
from relaygr.worker.model.convert.options import ConvertOptions, ProjectionLayout
from relaygr.worker.model.inputs.lookup import IDS_TENSOR


def number_of_layers(takings: Takings, prefix: str) -> int:
    """The number of layers PREFIX0., PREFIX1., ... Raises RelayError if there is none or a number is missing."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    found = {int(match[1]) for name in takings.names() if (match := pattern.match(name))}
    if not found:
        raise RelayError(f"The source has no layers: no tensor's name begins with {prefix}0.")
    if found != set(range(len(found))):
        raise RelayError(f"The source's layers {sorted(found)} are not numbered from 0 without a gap.")
    return len(found)


def contiguous_columns(heads: int, attention_dim: int, hidden_dim: int) -> Transform:
    """Reorders columns (the last dimension) from [U V Q K of head 0, U V Q K of head 1, ...] to blocks U, V, Q, K."""
    sizes = (hidden_dim, hidden_dim, attention_dim, attention_dim)
    width = sum(sizes)
    columns = torch.arange(heads * width).view(heads, width)
    order = torch.cat([part.flatten() for part in torch.split(columns, list(sizes), dim=1)])
    return Transform("heads put together, U then V, Q and K", lambda x: x[..., order])


def take_norm(takings: Takings, target: str, weights: tuple[str, ...], biases: tuple[str, ...], width: int) -> None:
    """Uses a norm's weight and bias, or ones and zeros if the source has neither."""
    if not any(takings.has(name) for name in (*weights, *biases)):
        takings.give([], f"{target}.weight", torch.ones(width), "ones: the source's norm has no weight")
        takings.give([], f"{target}.bias", torch.zeros(width), "zeros: the source's norm has no bias")
        return
    takings.take_first(weights, f"{target}.weight")
    takings.take_first(biases, f"{target}.bias")


def take_projection(
    takings: Takings, layer: str, weights: tuple[str, str], biases: tuple[str, ...], columns: Transform
) -> None:
    """Uses the joint projection. weights: its name as [in, out], its name as [out, in]; columns: the new order."""
    rows_first, columns_first = weights
    target = f"{layer}.projection"
    if takings.has(columns_first) and not takings.has(rows_first):
        takings.take(columns_first, f"{target}.weight", both(TRANSPOSED, columns))
    else:
        takings.take(rows_first, f"{target}.weight", columns)
    takings.take_first(biases, f"{target}.bias", columns)


def order_of(layout: ProjectionLayout, heads: int, attention_dim: int, hidden_dim: int) -> Transform:
    """The transform of a projection's columns to our order."""
    if layout is ProjectionLayout.CONTIGUOUS:
        return AS_IS
    return contiguous_columns(heads, attention_dim, hidden_dim)


def per_head(width: int, heads: int, what: str) -> int:
    """The width of one head. Raises RelayError if `heads` does not divide `width`."""
    if width <= 0 or width % heads:
        raise RelayError(f"{what} has width {width}, which {heads} heads do not divide: check --heads.")
    return width // heads


_COLLECTION = "embeddings."
_JOINT_SUFFIX = "_weights"
ITEM = "item"
ACTION = "action"


@dataclass(frozen=True, slots=True)
class Table:
    """One table, and the name of the source's tensor that contains it ("" for a file)."""

    source: str
    rows: torch.Tensor


class Tables:
    """Finds embedding tables by `--table NAME=...`, or by their names in the source's embedding collection."""

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
        """The table that `--table` names, else the source's table `name`, else its table `otherwise`; or None."""
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
        """Like `find`, but without a table raises RelayError with the option that names it."""
        table = self.find(name, otherwise)
        if table is None:
            known = ", ".join(self._found) or "none"
            raise RelayError(
                f"The source has no embedding table for {name!r} (its tables are: {known}): "
                f"give --table {name}=TABLE, a tensor's name or an .npy file."
            )
        if table.rows.ndim != 2:
            raise RelayError(f"The table for {name!r} is {list(table.rows.shape)}, not [rows, width].")
        return table

    def only(self, besides: set[str]) -> str | None:
        """The only collected table that is not in `besides`; None if there is no such table, or several."""
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
        """Tables that are stored one after the other in one flat tensor."""
        rows = self._takings.peek(source).reshape(-1, self._width)
        told = self._options.table_rows
        lacking = [name for name in names[:-1] if name not in told]
        if lacking:
            raise RelayError(
                f"{source} contains {len(names)} tables one after the other: "
                f"give the number of rows of each with --table-rows {lacking[0]}=ROWS."
            )
        starts = np.cumsum([0] + [told[name] for name in names[:-1]])
        if starts[-1] >= rows.shape[0]:
            raise RelayError(f"{source} has {rows.shape[0]} rows in total, fewer than --table-rows gives.")
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
                raise RelayError(
                    f"{options.items} does not contain {self.count} distinct integers, one for each row of items."
                )
            self._order = torch.from_numpy(np.argsort(ids))
            takings.give([], IDS_TENSOR, torch.from_numpy(np.sort(ids).astype(np.int64)), f"read from {options.items}")
            sort = Transform("rows sorted by item id", lambda x: x[self._order])
        give_table(takings, table, "items.weight", both(sort, WITH_UNKNOWN))

    def take_feature(self, values: Path, target: str, unknown: int) -> None:
        """Reads the row of a feature's table for each item. Items outside the vocabulary have the unknown row."""
        rows = _load(values)
        if rows.shape != (self.count,) or rows.dtype.kind not in "iu":
            raise RelayError(f"{values} does not contain {self.count} integers, one for each row of the item table.")
        known = np.where((rows >= 0) & (rows < unknown), rows, unknown).astype(np.int64)
        ordered = torch.from_numpy(known)
        if self._order is not None:
            ordered = ordered[self._order]
        last = torch.full((1,), unknown, dtype=torch.int64)
        self._takings.give([], target, torch.cat((ordered, last)), f"read from {values}")


def give_table(takings: Takings, table: Table, target: str, transform: Transform = WITH_UNKNOWN) -> None:
    """Adds a table, with a last row for unknown values."""
    sources = [table.source] if table.source else []
    takings.give(sources, target, transform.apply(table.rows), transform.name)


def _load(path: Path) -> NDArray[Any]:
    try:
        # Mapped: memory is taken only for what the file holds, whatever shape its header claims.
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(loaded, np.ndarray):
            raise ValueError("it is an archive")
        return loaded
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise RelayError(f"{path} cannot be read as an .npy file: {error}.") from error
