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
from relaygr.worker.model.convert.distributed import KEYS_SUFFIX
from relaygr.worker.model.convert.mapping import AS_IS, TRANSPOSED, Takings, Transform, both
from relaygr.worker.model.convert.options import ConvertOptions, ProjectionLayout
from relaygr.worker.model.inputs.known import IDS_TENSOR
from relaygr.worker.model.npy import read_npy


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
_TABLE_TYPES = (np.dtype(np.float32), np.dtype(np.float16))
ITEM = "item"
ACTION = "action"


_BLOCK_ELEMENTS = 2**22
_LARGEST_ID = np.iinfo(np.int64).max
_MOST_SPARSE = 16
_ALWAYS_DENSE_ROWS = 2**20


@dataclass(frozen=True, slots=True)
class Table:
    """One table, and the name of the source's tensor that contains it ("" for a file).

    keys: the id of each row of a dynamic table, and the name of their tensor. None: rows are numbered from 0.
    """

    source: str
    rows: torch.Tensor
    keys: torch.Tensor | None = None
    keys_source: str = ""

    @property
    def sources(self) -> list[str]:
        return [name for name in (self.source, self.keys_source) if name]

    def require_width(self, name: str, width: int) -> None:
        """Raises RelayError for another width. That of a dynamic table follows from the size of its file."""
        if self.rows.shape[1] != width:
            hint = " A dump in bfloat16 or float16 seems half as wide: write it in float32." if self.keys_source else ""
            raise RelayError(f"The table for {name!r} has width {self.rows.shape[1]}, not {width}.{hint}")

    def dense(self, name: str) -> Table:
        """The same table with a row for each number up to the largest key; rows without a key are zeros.

        Raises RelayError if it would be much larger than the dynamic table.
        """
        if self.keys is None:
            return self
        # numpy has these operations for unsigned integers, too.
        keys = self.keys.numpy()
        least, most = int(keys.min()), int(keys.max())
        if least < 0 or most >= max(_MOST_SPARSE * self.rows.shape[0], _ALWAYS_DENSE_ROWS):
            raise RelayError(
                f"The dynamic table for {name!r} has {self.rows.shape[0]:,} keys from {least} to {most}, but values of "
                "a feature are numbered from 0: give --table with a dense table, and number the values when you send "
                "them."
            )
        rows = self.rows.new_zeros(most + 1, self.rows.shape[1])
        rows[torch.from_numpy(keys.astype(np.int64))] = self.rows
        return Table(self.source, rows, None, self.keys_source)


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
        table = self._find(name, otherwise)
        # Items are found by their ids, all else by number.
        return table if table is None or name == ITEM else table.dense(name)

    def _find(self, name: str, otherwise: str | None) -> Table | None:
        told = self._options.tables.get(name)
        if told is None:
            table = self._found.get(name)
            return self._found.get(otherwise) if table is None and otherwise is not None else table
        if told.endswith(".npy"):
            rows = _load(Path(told))
            if rows.dtype.kind == "V":
                raise RelayError(f"{told} contains {rows.dtype}, as numpy writes bfloat16: save it as float32.")
            # Tables of these types stay mapped, and keep their type.
            return Table("", torch.from_numpy(rows if rows.dtype in _TABLE_TYPES else rows.astype(np.float32)))
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
        if name == ITEM:
            table.require_width(name, self._width)
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
                keys = f"{name.removesuffix('.weight')}{KEYS_SUFFIX}"
                has_keys = self._takings.has(keys)
                found[last.removesuffix(".weight")] = Table(
                    name,
                    self._takings.peek(name),
                    self._takings.peek(keys) if has_keys else None,
                    keys if has_keys else "",
                )
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
    """The item table, in the order of its ids. `columns`: the transform of each row."""

    def __init__(self, takings: Takings, options: ConvertOptions, table: Table, columns: Transform = AS_IS) -> None:
        self._takings = takings
        self.count = int(table.rows.shape[0])
        self._order: torch.Tensor | None = None
        ids = self._ids(options, table)
        if ids is not None:
            origin = f"read from {options.items}" if table.keys is None else "the keys of its table"
            sources = [] if table.keys is None else [table.keys_source]
            self._order = torch.from_numpy(np.argsort(ids))
            takings.give(sources, IDS_TENSOR, torch.from_numpy(np.sort(ids).astype(np.int64)), origin)
        give_table(takings, table, "items.weight", columns, self._order)

    def _ids(self, options: ConvertOptions, table: Table) -> NDArray[Any] | None:
        """The id of each row; None: the number of the row."""
        if table.keys is not None and options.items is not None:
            raise RelayError("The source's item table has keys, which are the ids of its items: leave out --items.")
        if table.keys is not None:
            ids, origin = table.keys.numpy(), table.keys_source
        elif options.items is not None:
            ids, origin = _load(options.items), str(options.items)
        else:
            return None
        if ids.shape != (self.count,) or np.unique(ids).size != self.count or ids.dtype.kind not in "iu":
            raise RelayError(f"{origin} does not contain {self.count} distinct integers, one for each row of items.")
        if ids.size and int(ids.max()) > _LARGEST_ID:
            raise RelayError(
                f"{origin} contains the id {ids.max()}, but the largest item id of a message is {_LARGEST_ID}: number "
                "the items anew, in the pipeline and in messages too."
            )
        return ids

    def take_feature(self, values: Path, target: str, unknown: int) -> None:
        """Reads the row of a feature's table for each item. Items outside the vocabulary have the unknown row."""
        ordered = torch.from_numpy(item_values(values, self.count, unknown))
        without = int((ordered == unknown).sum())
        said = f"; {without:,} of {self.count:,} items have a value without a row" if without else ""
        if self._order is not None:
            ordered = ordered[self._order]
        last = torch.full((1,), unknown, dtype=torch.int64)
        self._takings.give([], target, torch.cat((ordered, last)), f"read from {values}{said}")


def item_values(path: Path, count: int, unknown: int) -> NDArray[np.int64]:
    """The value of a feature for each row of the item table; values without a row become `unknown`."""
    rows = _load(path)
    if rows.shape != (count,) or rows.dtype.kind not in "iu":
        raise RelayError(f"{path} does not contain {count} integers, one for each row of the item table.")
    return np.where((rows >= 0) & (rows < unknown), rows, unknown).astype(np.int64)


def find_table(takings: Takings, name: str, *, prefers_bag: bool = False) -> Table:
    """The only table of a name in torchrec's collections of embeddings or of bags. Raises RelayError without one."""
    kinds = ("embedding_bags", "embeddings") if prefers_bag else ("embeddings", "embedding_bags")
    for kind in kinds:
        found = takings.names(f"{kind}.{name}.weight")
        if len(found) > 1:
            raise RelayError(f"The source has several tables {name}: {', '.join(found)}.")
        if found:
            keys = f"{found[0].removesuffix('.weight')}{KEYS_SUFFIX}"
            has_keys = takings.has(keys)
            return Table(found[0], takings.peek(found[0]), takings.peek(keys) if has_keys else None, keys * has_keys)
    raise RelayError(f"The source has no embedding table {name}.")


def give_table(
    takings: Takings, table: Table, target: str, columns: Transform = AS_IS, order: torch.Tensor | None = None
) -> None:
    """Adds a table with a last row of zeros, for unknown values.

    `columns`: the transform of each row. `order`: the source's row of each row. Works in blocks, since a table may be
    larger than the memory.
    """
    count, block = table.rows.shape[0], max(1, _BLOCK_ELEMENTS // max(1, table.rows.shape[1]))
    like = columns.apply(table.rows[:1])
    made = takings.memory.empty((count + 1, like.shape[1]), like.dtype)
    for start in range(0, count, block):
        own = slice(start, min(start + block, count))
        made[own] = columns.apply(table.rows[own] if order is None else table.rows[order[own]])
    made[count] = 0
    parts = (("rows sorted by item id", order is not None), (columns.name, columns is not AS_IS))
    how = "; ".join([name for name, is_done in parts if is_done] + ["a row of zeros added, for unknown values"])
    takings.give(table.sources, target, made, how)


def _load(path: Path) -> NDArray[Any]:
    try:
        return read_npy(path)
    except (OSError, ValueError) as error:
        raise RelayError(f"{path} cannot be read as an .npy file: {error}.") from error
