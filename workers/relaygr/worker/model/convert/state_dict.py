"""Reads checkpoints of other implementations: tensors by name, and never code.

A source is one file, or a folder whose files are read together: `.pt`, `.pth`, `.bin`, `.ckpt` and names that end with
`_ep` and a number (torch), and `.safetensors`. A distributed checkpoint (`distributed.py`) may be the folder itself, or
its folder `sparse` or `model`. NVIDIA saves a folder with `torch_module`, which has one file for each rank, and
`dynamicemb_module`, which has its dynamic tables. The state dict may be nested one level down, as training loops save
it (`_NESTED`). Objects of other classes than tensors are not loaded: they are read as `Inert`, and listed by name.

A small file can claim large tensors: compressed, or with one stored value for all elements; and its pickle can make
other large objects (`pickles.py`). Such a file is refused before memory is taken for them. Tensors that share memory
may be `_MOST_SHARED` times as large as the file.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from relaygr.runtime.errors import RelayError
from relaygr.worker.model.convert.distributed import (
    INDEX_FILE,
    TableMemory,
    read_distributed,
    read_dynamic_tables,
)
from relaygr.worker.model.convert.pickles import Inert, check_claims

_TORCH_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt"})
_SAFETENSORS = ".safetensors"
_EPOCH = re.compile(r"_ep\d+$")
"""The end of the names that the research code gives its files."""
_DISTRIBUTED = ("", "sparse", "model")
"""Folders of a distributed checkpoint inside a source: of torch itself, of Meta's DLRM-v3, of TorchEasyRec."""
_SPARSE = "sparse_dict."
"""The prefix of the names of Meta's sparse tensors."""
_RANK = re.compile(r"model\.\d+\.pth")
_DYNAMIC = ("dynamicemb_module", "dynamicemb")
"""Folders of dynamic tables: of NVIDIA's recsys-examples, of TorchEasyRec."""
_NESTED = ("state_dict", "model_state_dict", "dense_dict", "model")
_WRAPPER = "module."
"""The prefix of every name that data-parallel wrappers add."""
_MOST_SHARED = 4
_UNREADABLE = (RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError, AssertionError)
"""The errors of torch's reader for a file that torch did not write."""


@dataclass(frozen=True, slots=True)
class StateDict:
    """Tensors by name, and the names of values that are not tensors."""

    tensors: Mapping[str, torch.Tensor]
    others: tuple[str, ...] = ()
    memory: TableMemory = field(default_factory=TableMemory)
    """For tables that are made of these tensors."""


def read_state_dict(source: Path, strip: str = "", memory: TableMemory | None = None) -> StateDict:
    """All tensors of a file or folder. `strip` is removed from the beginning of names.

    Raises RelayError if the source is missing or broken, or names a tensor twice.
    """
    memory = TableMemory() if memory is None else memory
    tensors = _dynamic_tables(source)
    others: list[str] = []
    for path in _files(source, needs_one=not tensors):
        for name, value in _read(path, memory).items():
            short = name.removeprefix(_SPARSE).removeprefix(strip)
            if short in tensors:
                raise RelayError(f"{source} names {short} twice, the second time in {path.name}.")
            if isinstance(value, torch.Tensor):
                tensors[short] = value.detach()
            else:
                others.append(short)
    if not tensors:
        raise RelayError(f"{source} holds no tensor.")
    return StateDict(tensors, tuple(others), memory)


def _files(source: Path, *, needs_one: bool) -> list[Path]:
    """Files, and folders of distributed checkpoints."""
    files = [source] if source.exists() else []
    if source.is_dir():
        files = sorted(path for path in source.iterdir() if path.is_file() and _is_state_dict(path))
        files += _ranks(source / "torch_module")
        files += [source / name for name in _DISTRIBUTED if (source / name / INDEX_FILE).is_file()]
    if not files and needs_one:
        known = ", ".join(sorted(_TORCH_SUFFIXES | {_SAFETENSORS}))
        raise RelayError(
            f"{source} does not exist, or is a folder without any of {known}, *_epNUMBER or {INDEX_FILE} with *.distcp."
        )
    return files


def _ranks(folder: Path) -> list[Path]:
    """The file of the first rank. Raises RelayError if the ranks hold different weights, as tensor parallelism does."""
    files = sorted(path for path in folder.glob("model.*.pth") if _RANK.fullmatch(path.name))
    if not files:
        return []
    memory = TableMemory()
    first = _read(files[0], memory)
    for path in files[1:]:
        for name, tensor in _read(path, memory).items():
            own = first.get(name)
            if isinstance(tensor, torch.Tensor) and not (isinstance(own, torch.Tensor) and torch.equal(own, tensor)):
                raise RelayError(
                    f"{path} and {files[0].name} differ in {name}: the model was trained with tensor parallelism. "
                    "Save it from one rank."
                )
    return files[:1]


def _dynamic_tables(source: Path) -> dict[str, torch.Tensor]:
    tables: dict[str, torch.Tensor] = {}
    for name in _DYNAMIC:
        tables |= read_dynamic_tables(source / name)
    return tables


def _is_state_dict(path: Path) -> bool:
    return path.suffix in _TORCH_SUFFIXES | {_SAFETENSORS} or _EPOCH.search(path.name) is not None


def _read(path: Path, memory: TableMemory) -> dict[str, Any]:
    if path.is_dir():
        return _unwrapped(read_distributed(path, memory))
    try:
        if path.suffix == _SAFETENSORS:
            return dict(load_file(path))
        with path.open("rb") as file:
            check_claims(file)
        loaded = _load_tensors(path)
    except pickle.UnpicklingError as error:
        first_line = str(error).strip().rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        raise RelayError(
            f"{path} contains more than tensors, and only tensors are loaded ({first_line}): "
            "save its state dict as .safetensors."
        ) from error
    except (OSError, SafetensorError, zipfile.BadZipFile, *_UNREADABLE) as error:
        raise RelayError(f"{path} cannot be read as a state dict: {error}.") from error
    found = _unwrapped(_inner(loaded, path))
    _check_sizes(path, found)
    return found


def _load_tensors(path: Path) -> Any:
    """The object in a file, with `Inert` for objects of classes that are not loaded."""
    # Mapped: a table is read when it is converted. The format before torch 1.6 cannot be mapped.
    is_mapped = zipfile.is_zipfile(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError:
        if not is_mapped:
            raise
        # Optimizers and libraries of the training loop leave objects of their own beside the state dict.
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if not unknown:
            raise
        with torch.serialization.safe_globals([(Inert, name) for name in unknown]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)


def _check_sizes(path: Path, found: Mapping[str, Any]) -> None:
    """Raises RelayError for tensors whose elements do not lie in the file one by one."""
    total_bytes, file_bytes = 0, path.stat().st_size
    for name, tensor in found.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise RelayError(f"{path} is refused: {name} is not a plain tensor; save it as a dense one.")
        size_bytes = tensor.numel() * tensor.element_size()
        total_bytes += size_bytes
        if size_bytes > tensor.untyped_storage().nbytes():
            raise RelayError(
                f"{path} is refused: {name} has {tensor.numel():,} elements, but fewer are stored. Save it with "
                "`contiguous()`."
            )
    if total_bytes > _MOST_SHARED * file_bytes:
        raise RelayError(
            f"{path} is refused: it has {file_bytes:,} bytes, but its tensors take {total_bytes:,} because they share "
            "memory. Save each with `clone()`."
        )


def _inner(loaded: Any, path: Path) -> dict[str, Any]:
    """The state dict inside an object that a training loop saved."""
    if isinstance(loaded, Mapping):
        for key in _NESTED:
            if isinstance(loaded.get(key), Mapping):
                return dict(loaded[key])
        if all(isinstance(name, str) for name in loaded):
            return dict(loaded)
    raise RelayError(f"{path} is not a state dict: it holds {type(loaded).__name__}, not names and tensors.")


def _unwrapped(found: dict[str, Any]) -> dict[str, Any]:
    if found and all(name.startswith(_WRAPPER) for name in found):
        return {name.removeprefix(_WRAPPER): value for name, value in found.items()}
    return found
