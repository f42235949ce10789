"""Memory-mapped files of a fixed size, with all pages allocated.

On tmpfs a file with holes allocates memory when it is written, and a process that writes without free memory dies by
SIGBUS. So the whole file is allocated when it is mapped, and a lack of memory raises an error.

Mapping does not disturb other users of the file: a file of full size is not changed, a shorter file grows by zeros. The
bytes outlive the process; the mapping ends when nothing refers to `bytes` any more.
"""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import open_private


@dataclass(frozen=True, slots=True)
class MappedFile:
    """`bytes` uint8 [size] is the content; `inode` distinguishes the file from another one of the same name."""

    path: Path
    bytes: NDArray[np.uint8]
    inode: int


def map_file(path: Path, size_bytes: int) -> MappedFile:
    """Maps the first `size_bytes` of `path`, which is created if needed. Raises RelayError without memory for it."""
    try:
        file = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            _allocate(file, size_bytes)
            # Pages are mapped in advance, so that the first reload after a take-over causes no page faults.
            mapped = mmap.mmap(file, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            inode = os.fstat(file).st_ino
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise RelayError(_too_large(path, size_bytes)) from error
        raise RelayError(f"{path} cannot be mapped ({error.strerror}): check `worker.shared_path`.") from error
    return MappedFile(path, np.frombuffer(mapped, np.uint8), inode)


def allocated_bytes(path: Path) -> int:
    """Bytes that the file has allocated; 0 if it does not exist."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _allocate(file: int, size_bytes: int) -> None:
    before = os.fstat(file).st_size
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except OSError:
        # Gives back the memory of a partial allocation.
        if os.fstat(file).st_size != before:
            os.ftruncate(file, before)
        raise


def _too_large(path: Path, size_bytes: int) -> str:
    system = os.statvfs(path.parent)
    return (
        f"{path} needs {size_bytes / 2**30:.2f} GiB, but its file system has "
        f"{system.f_bavail * system.f_frsize / 2**30:.2f} GiB left: lower `worker.dram_bytes`, or enlarge the file "
        "system (`mount -o remount,size=...`; in a container `shm_size`)."
    )
