"""A file of a fixed size in memory, all of whose pages exist before the first is touched.

On tmpfs a file with holes takes its memory when it is written, and a process that writes where none is left
dies by SIGBUS. So the whole is allocated when the file is mapped, and too little room is an error with a text.

Mapping is harmless to whoever else uses the file: one that is there in full is left as it is, a shorter one grows
by zeros. The bytes outlive the process; the mapping ends when nothing refers to `bytes` any more.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError

_TMPFS: Final = Path("/dev/shm")


def memory_folder() -> Path:
    """A folder that this user may write. Not on tmpfs, what lies there is written to a disk as well."""
    in_memory = _TMPFS.is_dir() and os.access(_TMPFS, os.W_OK)
    return _TMPFS if in_memory else Path(tempfile.gettempdir())


@dataclass(frozen=True, slots=True)
class MappedFile:
    """`bytes` uint8 [size] is the file itself; `inode` tells it from another file of the same name."""

    path: Path
    bytes: NDArray[np.uint8]
    inode: int


def map_file(path: Path, size_bytes: int) -> MappedFile:
    """Maps the first `size_bytes` of `path`, made if it is not there. Raises RelayError if there is no room for it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _allocate(file, size_bytes)
            # Filled in ahead: the first reload after a take-over should not stop at every page.
            mapped = mmap.mmap(file, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            inode = os.fstat(file).st_ino
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise RelayError(_too_large(path, size_bytes)) from error
        raise RelayError(f"{path} can not be mapped ({error.strerror}): check `worker.shared_path`.") from error
    return MappedFile(path, np.frombuffer(mapped, np.uint8), inode)


def allocated_bytes(path: Path) -> int:
    """Memory that the file takes already; 0 if it is not there."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _allocate(file: int, size_bytes: int) -> None:
    before = os.fstat(file).st_size
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except OSError:
        # What was taken on the way would be missing elsewhere.
        if os.fstat(file).st_size != before:
            os.ftruncate(file, before)
        raise


def _too_large(path: Path, size_bytes: int) -> str:
    system = os.statvfs(path.parent)
    return (
        f"{path} needs {size_bytes / 2**30:.2f} GiB, but its file system has "
        f"{system.f_bavail * system.f_frsize / 2**30:.2f} GiB left: lower `worker.dram_bytes`, or give it more room "
        "(`mount -o remount,size=...`; in a container `shm_size`)."
    )
