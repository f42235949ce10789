"""Files that are replaced as a whole, and folders that one process uses at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replaces a file as a whole: a crash leaves the old or the new content. Raises OSError."""
    with partial_of(path).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    put_in_place(path)


def partial_of(path: Path) -> Path:
    """The temporary name of a file that is being written."""
    return path.with_name(f".{path.name}.partial")


def put_in_place(path: Path) -> None:
    """Gives the partial file its name, for good. The caller has synced its content. Raises OSError."""
    partial_of(path).replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_folder(folder: Path) -> int | None:
    """Locks a folder for this process. The lock ends when the returned descriptor is closed, or the process ends.

    None: another process has it. Raises OSError if there is no such folder.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
