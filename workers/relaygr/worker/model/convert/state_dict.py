"""Reads checkpoints of other implementations: tensors by name, and never code.

A source is one file, or a folder whose files are read together: `.pt`, `.pth`, `.bin`, `.ckpt` and names that end with
`_ep` and a number (torch), and `.safetensors`. A distributed checkpoint (`distributed.py`) may be the folder itself, or
its folder `sparse` or `model`. NVIDIA saves a folder with `torch_module`, which has one file for each rank, and
`dynamicemb_module`, which has its dynamic tables. The state dict may be nested one level down, as training loops save
it (`_NESTED`); what is beside it is listed and not read. Objects of other classes than tensors are `Inert`.

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
from relaygr.runtime.files import open_regular, require_regular
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
_AVERAGED = "n_averaged"
"""The number of averaged models, which torch's `AveragedModel` keeps beside the weights that it wraps."""
"""The prefix of every name that data-parallel wrappers add."""
_COMPILED = "_orig_mod."
"""What `torch.compile` adds to names, wherever the compiled module is in the model."""
_DEEPEST = 5
"""Levels below a value in which its tensors are listed: an optimizer has them at the third."""
_LONGEST_KEY = 100
_MOST_SHARED = 4
_UNREADABLE = (RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError, AssertionError)
"""The errors of torch's reader for a file that torch did not write."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A tensor beside or below those of the state dict."""

    name: str
    shape: tuple[int, ...]
    is_other_weights: bool
    """Whether it belongs to another set of the same weights, such as their moving average."""


@dataclass(frozen=True, slots=True)
class StateDict:
    """Tensors by name, and the names of values that are not tensors."""

    tensors: Mapping[str, torch.Tensor]
    others: tuple[str, ...] = ()
    unread: tuple[Unread, ...] = ()
    memory: TableMemory = field(default_factory=TableMemory)
    """For tables that are made of these tensors."""


def read_state_dict(source: Path, strip: str = "", memory: TableMemory | None = None) -> StateDict:
    """All tensors of a file or folder. `strip` is removed from the beginning of names, and `_orig_mod.` everywhere.

    Raises RelayError if the source is missing or broken, or names a tensor twice.
    """
    memory = TableMemory() if memory is None else memory
    strip = strip.replace(_COMPILED, "")
    tensors = _dynamic_tables(source)
    beside = _Beside()
    for path in _files(source, needs_one=not tensors):
        found = _read(path, memory)
        pairs = _unwrapped(found.inner)
        for name, value in pairs:
            short = name.removeprefix(_SPARSE).removeprefix(strip)
            if not isinstance(value, torch.Tensor):
                beside.add(short, value)
            elif short in tensors:
                raise RelayError(f"{source} names {short} twice, the second time in {path.name}.")
            else:
                tensors[short] = value.detach()
        weights = frozenset(name for name, value in pairs if isinstance(value, torch.Tensor))
        for name, value in found.beside.items():
            beside.add(name, value, weights)
    if not tensors:
        raise RelayError(f"{source} holds no tensor.")
    return StateDict(tensors, tuple(beside.others), tuple(beside.unread), memory)


class _Beside:
    """What a source has beside the tensors of its state dict. Each tensor is listed once, however often it is named."""

    def __init__(self) -> None:
        self.others: list[str] = []
        self.unread: list[Unread] = []
        self._seen: dict[int, object] = {}

    def add(self, name: str, value: object, weights: frozenset[str] = frozenset()) -> None:
        """Lists the tensors in a value; without any, the value.

        `weights`: names of the state dict's tensors. Other tensors of such names may be the better weights.
        """
        before = len(self.unread)
        self._walk(name, value, weights, 0)
        if len(self.unread) == before:
            self.others.append(name)

    def _walk(self, name: str, value: object, weights: frozenset[str], depth: int, is_weights: bool = False) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, torch.Tensor):
            self.unread.append(Unread(name, tuple(value.shape), is_weights))
        elif not isinstance(value, (Mapping, list, tuple)) or depth == _DEEPEST:
            return
        self._seen[id(value)] = value
        if isinstance(value, Mapping):
            named = _unwrapped(value)
            tensors = [str(key) for key, part in named if isinstance(part, torch.Tensor)]
            # Averages of other libraries have a prefix of one part, such as `ema_model`.
            is_weights = any(key in weights or key.partition(".")[2] in weights for key in tensors)
            for number, (key, part) in enumerate(value.items()):
                below = key[:_LONGEST_KEY] if isinstance(key, str) else number
                self._walk(f"{name}.{below}", part, weights, depth + 1, is_weights)
        elif isinstance(value, (list, tuple)):
            for number, part in enumerate(value):
                self._walk(f"{name}.{number}", part, weights, depth + 1)


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
    first = _read(files[0], memory).inner
    for path in files[1:]:
        for name, tensor in _read(path, memory).inner.items():
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


@dataclass(frozen=True, slots=True)
class _Found:
    """The content of a file: its state dict, and what is beside that."""

    inner: Mapping[str, Any]
    beside: Mapping[str, Any] = field(default_factory=dict)


def _read(path: Path, memory: TableMemory) -> _Found:
    if path.is_dir():
        return _Found(read_distributed(path, memory))
    try:
        if path.suffix == _SAFETENSORS:
            require_regular(path)
            return _Found(load_file(path))
        with open_regular(path) as file:
            claims = check_claims(file)
        loaded = _load_tensors(path, claims.is_archive)
    except pickle.UnpicklingError as error:
        first_line = str(error).strip().rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        raise RelayError(
            f"{path} contains more than tensors, and only tensors are loaded ({first_line}): "
            "save its state dict as .safetensors."
        ) from error
    except (OSError, SafetensorError, zipfile.BadZipFile, *_UNREADABLE) as error:
        raise RelayError(f"{path} cannot be read as a state dict: {error}.") from error
    found = _inner(loaded)
    if found is None:
        held = claims.made_by if isinstance(loaded, Inert) else type(loaded).__name__
        raise RelayError(f"{path} is not a state dict: it holds {held}, not names and tensors.")
    _check_sizes(path, found.inner)
    return found


def _load_tensors(path: Path, is_mapped: bool) -> Any:
    """The object in a file, with `Inert` for objects of classes that are not loaded.

    An archive is mapped: a table is read when it is converted. The format before torch 1.6 cannot be mapped.
    """
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


def _inner(loaded: Any) -> _Found | None:
    """The state dict inside an object that a training loop saved; None: there is none."""
    if not isinstance(loaded, Mapping):
        return None
    for key in _NESTED:
        if isinstance(loaded.get(key), Mapping):
            beside = {str(name): value for name, value in loaded.items() if name != key}
            return _Found(dict(loaded[key]), beside)
    return _Found(dict(loaded)) if all(isinstance(name, str) for name in loaded) else None


def _unwrapped(found: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Names without what `torch.compile` and data-parallel wrappers add to them, which may make two names one."""
    pairs = [(name.replace(_COMPILED, "") if isinstance(name, str) else name, value) for name, value in found.items()]
    wrapped = [(name, value) for name, value in pairs if name != _AVERAGED]
    if wrapped and all(isinstance(name, str) and name.startswith(_WRAPPER) for name, _ in wrapped):
        return [(name.removeprefix(_WRAPPER), value) for name, value in wrapped]
    return pairs
