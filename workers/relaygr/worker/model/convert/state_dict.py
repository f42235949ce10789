"""Reads checkpoints of other implementations: tensors by name, and never code.

A source is one file, or a folder whose files are read together: `.pt`, `.pth`, `.bin`, `.ckpt` (torch, tensors only)
and `.safetensors`. The state dict may be nested one level down, as training loops save it (`_NESTED`).

A small file can claim large tensors: compressed, or with one stored value for all elements. Such a file is refused
before memory is taken for the tensors. Tensors that share memory may be `_MOST_SHARED` times as large as the file.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from relaygr.runtime.errors import RelayError

_TORCH_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt"})
_SAFETENSORS = ".safetensors"
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


def read_state_dict(source: Path, strip: str = "") -> StateDict:
    """All tensors of a file or folder. `strip` is removed from the beginning of names.

    Raises RelayError if the source is missing, contains more than tensors, or names a tensor twice.
    """
    tensors: dict[str, torch.Tensor] = {}
    others: list[str] = []
    for path in _files(source):
        for name, value in _read(path).items():
            short = name.removeprefix(strip)
            if short in tensors:
                raise RelayError(f"{source} names {short} twice, the second time in {path.name}.")
            if isinstance(value, torch.Tensor):
                tensors[short] = value.detach()
            else:
                others.append(short)
    if not tensors:
        raise RelayError(f"{source} holds no tensor.")
    return StateDict(tensors, tuple(others))


def _files(source: Path) -> list[Path]:
    if source.is_dir():
        files = sorted(path for path in source.iterdir() if path.suffix in _TORCH_SUFFIXES | {_SAFETENSORS})
    else:
        files = [source] if source.exists() else []
    if not files:
        known = ", ".join(sorted(_TORCH_SUFFIXES | {_SAFETENSORS}))
        raise RelayError(f"{source} does not exist, or is a folder without any of {known}.")
    return files


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == _SAFETENSORS:
            return dict(load_file(path))
        _check_archive(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first_line = str(error).partition("\n")[0]
        raise RelayError(
            f"{path} contains more than tensors, and only tensors are loaded ({first_line}): "
            "save its state dict as .safetensors."
        ) from error
    except (OSError, SafetensorError, zipfile.BadZipFile, *_UNREADABLE) as error:
        raise RelayError(f"{path} cannot be read as a state dict: {error}.") from error
    found = _unwrapped(_inner(loaded, path))
    _check_sizes(path, found)
    return found


def _check_archive(path: Path) -> None:
    """Raises RelayError for an archive whose content is larger than the file. torch does not compress."""
    if not zipfile.is_zipfile(path):
        # The format before torch 1.6: its tensors are read from the file as they are.
        return
    with zipfile.ZipFile(path) as archive:
        content_bytes = sum(member.file_size for member in archive.infolist())
    file_bytes = path.stat().st_size
    if content_bytes > file_bytes:
        raise RelayError(
            f"{path} is refused: it has {file_bytes:,} bytes, but claims to hold {content_bytes:,}. "
            "Save it with torch.save, which does not compress."
        )


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
