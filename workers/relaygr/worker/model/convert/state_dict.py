"""Reads checkpoints of other implementations: tensors by name, and never code.

A source is one file, or a folder whose files are read together: `.pt`, `.pth`, `.bin`, `.ckpt` (torch, tensors only)
and `.safetensors`. The state dict may be nested one level down, as training loops save it (`_NESTED`).
"""

from __future__ import annotations

import pickle
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
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first_line = str(error).partition("\n")[0]
        raise RelayError(
            f"{path} contains more than tensors, and only tensors are loaded ({first_line}): "
            "save its state dict as .safetensors."
        ) from error
    except (OSError, SafetensorError, *_UNREADABLE) as error:
        raise RelayError(f"{path} cannot be read as a state dict: {error}.") from error
    return _unwrapped(_inner(loaded, path))


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
