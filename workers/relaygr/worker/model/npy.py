"""Reads numpy's files of other programs. What a header claims takes no memory, and errors are ValueErrors."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from relaygr.runtime.files import require_regular

MOST_UNPACKED_BYTES: Final = 2**30
"""The largest content of an .npz file that is larger than the file. Zeros take a thousandth of their size."""

R = TypeVar("R")


def read_npy(path: Path) -> NDArray[Any]:
    """The array of an .npy file, mapped. Raises OSError, or ValueError for another file."""
    loaded = _in_a_sentence(lambda: _map_npy(path))
    if not isinstance(loaded, np.ndarray):
        raise ValueError("it is an archive, not one array")
    return loaded


def _map_npy(path: Path) -> Any:
    require_regular(path)
    return np.load(path, mmap_mode="c", allow_pickle=False)


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file. Raises OSError, or ValueError for another file, or one that claims too much."""
    return _in_a_sentence(lambda: _read_npz(path))


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    require_regular(path)
    if not zipfile.is_zipfile(path):
        raise ValueError("it is not an .npz file, or is truncated")
    file_bytes = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        claimed_bytes = sum(member.file_size for member in archive.infolist())
        if claimed_bytes > max(file_bytes, MOST_UNPACKED_BYTES):
            raise ValueError(f"it has {file_bytes:,} bytes, but claims to hold {claimed_bytes:,}: use np.savez")
        arrays: dict[str, NDArray[Any]] = {}
        for member in archive.infolist():
            # numpy would read a member that is no array as a whole, however large it is when it is unpacked.
            with archive.open(member) as file:
                arrays[member.filename.removesuffix(".npy")] = np.lib.format.read_array(file, allow_pickle=False)
    return arrays


def _in_a_sentence(read: Callable[[], R]) -> R:
    try:
        return read()
    except OSError:
        raise
    # A header that numpy did not write raises whichever error occurs first, as MemoryError for a thousand brackets.
    except Exception as error:
        text = str(error).strip().partition("\n")[0][:200]
        raise ValueError(text or "a malformed header") from error
