"""Reads what several ranks wrote into one folder: distributed checkpoints of torch, and dumps of NVIDIA's dynamicemb.

A distributed checkpoint is a folder with `.metadata` and `*.distcp`. torch's reader joins the shards of each tensor, in
one process and without a process group. The index, `.metadata`, is a pickle that torch's reader would load with any
code in it. Here only the classes of the index are loaded; everything else in it becomes an `Inert` object. Only their
instances get a state, since a state given to a class would change that class in this process. Only tensors are read
from the shards.

A dump of dynamic embedding tables has two files for each table and rank: the keys (int64) and the rows (float32) in the
same order. The width of a row is not stored; it follows from the sizes of both files.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.utils import _ReaderView

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import read_regular, require_regular
from relaygr.worker.model.convert.pickles import Inert, InertUnpickler, check_claims

INDEX_FILE = ".metadata"
KEYS_SUFFIX = ".keys"
"""Follows the name of a dynamic table: the tensor of its keys."""
_DUMP = re.compile(r"(?P<table>.+)_emb_keys\.rank_(?P<rank>\d+)\.world_size_(?P<ranks>\d+)$")
_WITH_STATE: tuple[type, ...] = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.TensorProperties,
    metadata.ChunkStorageMetadata,
    metadata.StorageMeta,
    filesystem._StorageInfo,
)
_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    **{(kind.__module__, kind.__name__): kind for kind in (*_WITH_STATE, metadata._MEM_FORMAT_ENCODING)},
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): PurePosixPath,
}


_MAPPED_BYTES = 2**28


class TableMemory:
    """Memory for tables: a large one lies in a file without a name, so that a table may be larger than the memory."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: for the files; None: all tables in memory."""
        self._folder = folder

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Raises RelayError if the folder cannot hold the table."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if self._folder is None or size_bytes < _MAPPED_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # Reserved now: a write to a mapped page without room on the disk would end the process.
                os.posix_fallocate(file.fileno(), 0, size_bytes)
                mapped = np.memmap(file, np.uint8, mode="r+", shape=(size_bytes,))
        except OSError as error:
            raise RelayError(f"{self._folder} has no room for {size_bytes:,} bytes of a table: {error}.") from error
        return torch.from_numpy(mapped).view(dtype).view(tuple(shape))


class _IndexUnpickler(InertUnpickler):
    with_state = _WITH_STATE

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        return _ALLOWED.get((module, name), Inert)


class _Shard(_ReaderView):
    """A part of a file, as torch has it, but with the offset from the end that `io` defines."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        super().seek(self.len + offset if whence == os.SEEK_END else offset, 0 if whence == os.SEEK_END else whence)
        return self.tell()


class _Reader(filesystem.FileSystemReader):
    """Reads the shards that an index names, which was checked before."""

    def __init__(self, folder: Path, index: metadata.Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:  # noqa: ARG002 - torch passes the rank
        return self._index

    def _slice_file(self, file: Any, sinfo: filesystem._StorageInfo) -> Any:
        shard = _Shard(file, sinfo.offset, sinfo.length)
        check_claims(cast(BinaryIO, shard))
        return shard


def read_distributed(folder: Path, memory: TableMemory) -> dict[str, Any]:
    """Tensors by name; values that are not tensors are `Inert`. Raises RelayError for a broken or partial folder."""
    index = _read_index(folder)
    stored = {
        name: entry
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, metadata.TensorStorageMetadata)
    }
    try:
        _check(folder, index, stored)
    # An index may hold anything in place of sizes and types.
    except (AttributeError, TypeError, ValueError) as error:
        raise RelayError(f"{folder / INDEX_FILE} does not describe tensors: {_first_line(error)}.") from error
    # Elements without a shard would stay NaN, and a checkpoint with NaN is refused.
    tensors: dict[str, Any] = {
        name: memory.empty(entry.size, entry.properties.dtype).fill_(
            math.nan if entry.properties.dtype.is_floating_point else 0
        )
        for name, entry in stored.items()
    }
    try:
        with warnings.catch_warnings():
            # torch warns that there is no process group.
            warnings.simplefilter("ignore")
            load(tensors, storage_reader=_Reader(folder, index), no_dist=True)
    except (OSError, ValueError, RuntimeError, CheckpointException, pickle.UnpicklingError) as error:
        raise RelayError(f"{folder} cannot be read as a distributed checkpoint: {_first_line(error)}.") from error
    return tensors | {name: Inert() for name in index.state_dict_metadata if name not in tensors}


def read_dynamic_tables(folder: Path) -> dict[str, torch.Tensor]:
    """`embeddings.TABLE.weight` and `embeddings.TABLE.keys` of every dump below a folder.

    Raises RelayError if the files of a rank are missing, or the files of a table do not agree.
    """
    found: dict[tuple[Path, str], dict[int, Path]] = {}
    ranks_of: dict[tuple[Path, str], int] = {}
    for path in sorted(folder.rglob("*_emb_keys.rank_*")):
        if match := _DUMP.match(path.name):
            place = path.parent, match["table"]
            found.setdefault(place, {})[int(match["rank"])] = path
            ranks_of[place] = int(match["ranks"])
    tensors: dict[str, torch.Tensor] = {}
    for (parent, table), files in found.items():
        # The number of ranks is part of a file's name, and may be any number.
        if len(files) != ranks_of[parent, table] or set(files) != set(range(len(files))):
            raise RelayError(f"{parent} does not hold the files of all {ranks_of[parent, table]} ranks of {table}.")
        parts = [_read_dump(files[rank], table) for rank in sorted(files)]
        parts = [part for part in parts if part[0].size]
        if len({rows.shape[1] for _, rows in parts}) > 1:
            raise RelayError(f"{parent}: the ranks of {table} have rows of different widths.")
        if not parts:
            raise RelayError(f"{parent}: the table {table} is empty.")
        name = f"embeddings.{table}"
        if f"{name}.weight" in tensors:
            raise RelayError(f"{folder} has two tables {table}.")
        # One rank's files stay mapped.
        keys, rows = parts[0] if len(parts) == 1 else tuple(np.concatenate(each) for each in zip(*parts, strict=True))
        tensors[f"{name}.weight"], tensors[f"{name}{KEYS_SUFFIX}"] = _tensor(rows), _tensor(keys)
    return tensors


def _read_dump(keys_file: Path, table: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    rows_file = keys_file.with_name(keys_file.name.replace("_emb_keys.", "_emb_values."))
    try:
        require_regular(keys_file)
        require_regular(rows_file)
        if not keys_file.stat().st_size:
            return np.empty(0, np.int64), np.empty((0, 0), np.float32)
        keys = np.memmap(keys_file, np.int64, mode="c")
        values = np.memmap(rows_file, np.float32, mode="c")
    except (OSError, ValueError) as error:
        raise RelayError(f"{rows_file} cannot be read as the rows of {table}: {error}.") from error
    if values.size % keys.size:
        raise RelayError(f"{rows_file} has {values.size:,} numbers, which are not rows of {keys.size:,} keys.")
    return keys, values.reshape(keys.size, -1)


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array)


def _read_index(folder: Path) -> metadata.Metadata:
    path = folder / INDEX_FILE
    try:
        content = read_regular(path)
        index = _IndexUnpickler(io.BytesIO(content), len(content)).load()
    # A pickle that torch did not write raises whichever error occurs first.
    except Exception as error:
        raise RelayError(f"{path} cannot be read as the index of a distributed checkpoint: {error}.") from error
    if not isinstance(index, metadata.Metadata) or not (
        isinstance(index.state_dict_metadata, dict) and isinstance(index.storage_data, dict)
    ):
        raise RelayError(f"{path} is not the index of a distributed checkpoint of torch.")
    return index


def _check(folder: Path, index: metadata.Metadata, stored: dict[str, metadata.TensorStorageMetadata]) -> None:
    """Raises RelayError for shards outside the folder or missing, and for tensors larger than their files."""
    names = {info.relative_path for info in index.storage_data.values()}
    # Another object could show one name here, and torch another.
    if not all(type(name) is str for name in (*names, *index.state_dict_metadata)):
        raise TypeError("a name is not text")
    for name in sorted(names):
        if Path(name).name != name:
            raise RelayError(f"{folder} is refused: its index names {name}, which is not a file of this folder.")
        if not (folder / name).is_file():
            raise RelayError(f"{folder} lacks {name}: copy the files of all ranks.")
    wanted_bytes, file_bytes = 0, sum((folder / name).stat().st_size for name in names)
    if any(info.transform_descriptors for info in index.storage_data.values()):
        # torch would read what comes out, and not the bytes that were checked.
        raise RelayError(f"{folder} is refused: its shards are compressed or changed otherwise; save them as they are.")
    if sum(info.length for info in index.storage_data.values()) > file_bytes:
        raise RelayError(f"{folder} is refused: its index names the same part of a file many times.")
    for name, entry in stored.items():
        if not isinstance(entry.properties.dtype, torch.dtype) or min((0, *entry.size)) < 0:
            raise ValueError(f"{name} has no type, or a negative size")
        elements = math.prod(entry.size)
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != elements:
            raise RelayError(f"{folder} does not hold all of {name} {list(entry.size)}: shards are missing.")
        wanted_bytes += elements * entry.properties.dtype.itemsize
    if wanted_bytes > file_bytes:
        raise RelayError(
            f"{folder} is refused: its files have {file_bytes:,} bytes, but claim to hold {wanted_bytes:,}."
        )


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().partition("\n")[0]
