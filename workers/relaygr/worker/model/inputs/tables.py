"""Looks up rows of embedding tables, on the device or in host memory.

A table keeps the type in which it is stored; its rows become float32. A table that is too large for the device stays in
host memory, where it is mapped from the checkpoint's file: the rows of a batch are gathered on the host and copied.
Both give the same rows, so scores do not depend on the place of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

DEVICE_TABLE_BYTES = 4 * 2**30
"""Default of the largest table on the device."""
_JOINED_BYTES = 64 * 2**20
"""The most memory for a joint copy of small tables."""
_TABLES = ("items.", "features.", "item_features.")

Int64Array = NDArray[np.int64]
Send = Callable[[torch.Tensor], torch.Tensor]
Tensors = Mapping[str, torch.Tensor]


def is_table(name: str) -> bool:
    """Whether a tensor of a checkpoint is an embedding table that grows with the number of items or users."""
    return name.startswith(_TABLES) and name.endswith(".weight")


class Table(Protocol):
    """Looks up rows."""

    def __call__(self, rows: torch.Tensor, on_host: Int64Array | None = None) -> torch.Tensor:
        """Rows int64 [n] on the device -> float32 [n, width]. `on_host`: the same numbers, if they are known there."""


class DeviceTable:
    """A table in the memory of the device; on the CPU, mapped from the checkpoint's file."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def __call__(self, rows: torch.Tensor, on_host: Int64Array | None = None) -> torch.Tensor:  # noqa: ARG002
        return F.embedding(rows, self._table).float()


class HostTable:
    """A table in host memory."""

    def __init__(self, table: torch.Tensor, send: Send) -> None:
        self._table = table
        self._send = send

    def __call__(self, rows: torch.Tensor, on_host: Int64Array | None = None) -> torch.Tensor:
        asked = rows.cpu() if on_host is None else torch.from_numpy(on_host)
        return self._send(F.embedding(asked, self._table)).float()


def _stay(host: torch.Tensor) -> torch.Tensor:
    return host


@dataclass(frozen=True, slots=True)
class Placement:
    """The tables that stay in host memory, and the copy of a host tensor to the device."""

    on_host: frozenset[str] = frozenset()
    send: Send = _stay

    def table(self, tensors: Tensors, name: str) -> Table:
        if name in self.on_host:
            return HostTable(tensors[name], self.send)
        return DeviceTable(tensors[name])


@dataclass(frozen=True, slots=True)
class TablePart:
    """One of several tables that are numbered one after the other. `then` is applied to its rows."""

    name: str
    then: Callable[[torch.Tensor], torch.Tensor] | None = None


def joined_tables(parts: Sequence[TablePart], tensors: Tensors, placement: Placement, width: int) -> Table:
    """Tables as one, with rows of `width`. Small tables are copied into one; large ones are looked up by themselves."""
    rows = sum(tensors[part.name].shape[0] for part in parts)
    if rows * width * 4 <= _JOINED_BYTES and not any(part.name in placement.on_host for part in parts):
        tables = [tensors[part.name].float() for part in parts]
        tables = [table if part.then is None else part.then(table) for part, table in zip(parts, tables, strict=True)]
        like = next(iter(tensors.values()))
        return DeviceTable(torch.cat(tables) if tables else torch.empty(0, width, device=like.device))
    return _Separate(parts, tensors, placement, width)


class _Separate:
    """Tables that are too large to be joined."""

    def __init__(self, parts: Sequence[TablePart], tensors: Tensors, placement: Placement, width: int) -> None:
        ends = np.cumsum([tensors[part.name].shape[0] for part in parts]).tolist()
        self._parts = [
            (start, end, placement.table(tensors, part.name), part.then)
            for part, start, end in zip(parts, [0, *ends[:-1]], ends, strict=True)
        ]
        self._send = placement.send
        self._width = width

    def __call__(self, rows: torch.Tensor, on_host: Int64Array | None = None) -> torch.Tensor:
        asked = rows.cpu().numpy() if on_host is None else on_host
        out = torch.empty(rows.shape[0], self._width, device=rows.device)
        for start, end, table, then in self._parts:
            at = np.flatnonzero((asked >= start) & (asked < end))
            if at.size:
                places = self._send(torch.from_numpy(at))
                found = table(rows[places] - start, asked[at] - start)
                out[places] = found if then is None else then(found)
        return out
