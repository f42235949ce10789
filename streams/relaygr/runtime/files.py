"""Files that are read or replaced as a whole, and folders that one process uses at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Final

from relaygr.runtime.errors import RelayError

LOST: Final = "lost+found"
"""The folder that file systems have at their root, and which only root may read."""


def open_regular(path: Path) -> BufferedReader:
    """Opens a file for reading, for a reader that must not wait.

    Raises OSError, also for a file that is not regular: a FIFO waits for its writer, and a device may have no end.
    """
    # Without O_NONBLOCK this call would wait.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_regular(path: Path) -> bytes:
    """The content of a file that `open_regular` opens. Raises OSError."""
    with open_regular(path) as file:
        return file.read()


def require_regular(path: Path) -> None:
    """For a file that a library opens by its name. Raises OSError if `open_regular` would."""
    open_regular(path).close()


def write_whole(path: Path, content: bytes) -> None:
    """Replaces a file as a whole: a crash leaves the old or the new content. Raises OSError.

    A link stays, and what it names is replaced. A device or a pipe, such as /dev/null, is written and stays. Of several
    processes that write one file, the last one's content stays.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    with _moved_to(path, path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")) as partial:
        partial.write_bytes(content)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The temporary name under which the caller writes a file. At the end the file gets its own name, for good; after
    an exception it is removed. Raises OSError.
    """
    with _moved_to(path, partial_of(path)) as partial:
        yield partial


@contextmanager
def _moved_to(path: Path, partial: Path) -> Iterator[Path]:
    with removed_on_failure(partial):
        yield partial
        _sync(partial)
        partial.replace(path)
        sync_folder(path.parent)


def remove_partials(folder: Path) -> None:
    """Removes the files that a process which was killed did not finish. Raises OSError."""
    for partial in folder.glob(".*.partial"):
        partial.unlink(missing_ok=True)


def has_files(folder: Path) -> bool:
    """Whether somebody has files in a folder. Those with a hidden name are nobody's, such as those of interrupted
    writes, and `lost+found` is the file system's. Raises OSError.
    """
    return any(not each.name.startswith(".") and each.name != LOST for each in folder.iterdir())


def files_below(
    folder: Path, is_left_out: Callable[[str], bool], above: frozenset[Path] = frozenset()
) -> Iterator[Path]:
    """What a folder and its subfolders hold that is no folder, in any order. Links to folders are followed, but not to
    one that they lie in (`above`). Files and folders with a name that `is_left_out` are not looked at. Raises OSError.
    """
    here = folder.resolve()
    above |= {here, *here.parents}
    for each in folder.iterdir():
        if is_left_out(each.name):
            continue
        if not each.is_dir():
            yield each
        elif each.resolve() not in above:
            yield from files_below(each, is_left_out, above)


def partial_of(path: Path) -> Path:
    """The temporary name of a file that is being written."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def removed_on_failure(partial: Path) -> Iterator[None]:
    """Removes a file that the block writes if the block fails, as on a full disk, whose space it would keep."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def put_in_place(path: Path) -> None:
    """Gives the partial file its name, for good. The caller has synced its content. Raises OSError."""
    partial_of(path).replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable. Raises OSError."""
    _sync(folder, os.O_DIRECTORY)


def _sync(path: Path, flags: int = 0) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked_folder(folder: Path, in_use: str) -> Iterator[None]:
    """Keeps other processes off a folder; a process that ends has no lock.

    Raises RelayError with the text `in_use` if another process has the folder, and OSError if there is none.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RelayError(in_use) from None
        yield
    finally:
        os.close(handle)
