"""Folders and files that only the user of this process can read and write.

In a folder that every user can write, such as /dev/shm, another user may have created a folder or a symbolic link under
the name that this process is about to use. So an existing folder or file is used only if it belongs to this user and is
no link.

    another user owns it                               refused: RelayError
    a folder that every user may write                 refused: RelayError
    a symbolic link, a special file or a hard link     refused: RelayError
    any other folder or file with more rights          used with mode 0700 (folder) or 0600 (file)
    the root of a mount that belongs to root           used unchanged: the administrator made it for this process

A user who may rename a folder above it can exchange it. So each folder above it must belong to this user or to root,
and if every user may write it, it must be sticky, or the root of a mount that belongs to root.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from relaygr.runtime.errors import RelayError

_FOLDER_MODE: Final = 0o700
_PARENT_MODE: Final = 0o755
_FILE_MODE: Final = 0o600
_ROOT_USER: Final = 0
_PROBE_BYTES: Final = 4096


def private_folder(path: Path, setting: str) -> None:
    """Creates the folder if needed, with its parents. `setting` names the setting that holds the path.

    Raises RelayError if the folder cannot be used, or if another user could control or exchange it.
    """
    try:
        _make_folders(path.parent)
        _check_above(path.parent, setting)
        _make_private(path, setting)
    except OSError as error:
        raise _unusable(path, setting, error) from error


def rewrite(file: int, text: str) -> None:
    """Replaces the content of an open file, such as a locked one that says who holds it. Raises OSError.

    The write comes first and the truncation last, so that a full file system cannot make either fail.
    """
    os.ftruncate(file, os.pwrite(file, text.encode(), 0))


def private_folders(base: Path, *names: str, setting: str) -> Path:
    """Creates `base/names...`, each part private, and returns it.

    `base` may belong to root, and every user may write `base` if it is sticky, as /dev/shm is. Raises RelayError if a
    part cannot be used, or if another user could control or exchange it.
    """
    path = base
    try:
        _make_folders(base.parent)
        base.mkdir(exist_ok=True, mode=_FOLDER_MODE)
        _check_above(base, setting)
        for name in names:
            path = path / name
            _make_private(path, setting)
    except OSError as error:
        raise _unusable(path, setting, error) from error
    return path


def open_private(path: Path, flags: int) -> int:
    """Opens a file of this user, which gets mode 0600. Raises OSError, and RelayError for a file of another user."""
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, _FILE_MODE)
    except OSError:
        # Says what is there, if that is the reason.
        make_private(path)
        raise
    try:
        found = os.fstat(file)
        _check_file(path, found)
        if found.st_mode & 0o077:
            os.fchmod(file, _FILE_MODE)
    except BaseException:
        os.close(file)
        raise
    return file


def map_private(path: Path, size_bytes: int, setting: str) -> mmap.mmap:
    """Maps such a file, and creates it if it is missing. `setting` names the setting that holds its folder.

    Raises RelayError for a file of another user, and without space for it.
    """
    try:
        file = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            # Allocated in full: a write to a hole would kill the process if memory or disk space has run out.
            os.posix_fallocate(file, 0, size_bytes)
            return mmap.mmap(file, size_bytes)
        finally:
            os.close(file)
    except OSError as error:
        raise RelayError(
            f"{path} cannot be used ({error.strerror}): set `{setting}` to a folder with free space that this user "
            "can write to."
        ) from error


def make_private(path: Path) -> None:
    """Does the same for a file that another library opens. Does not open the file: its closing would free locks on it.

    Does nothing if the file does not exist. Raises OSError, and RelayError for a file of another user.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    _check_file(path, found)
    if found.st_mode & 0o077:
        path.chmod(_FILE_MODE)


def write_private(path: Path, text: str) -> None:
    """Replaces the content of a file as `open_private` opens it. Raises OSError and RelayError."""
    with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT), "w", encoding="utf-8") as file:
        file.write(text)
        file.truncate()


def check_room(folder: Path, size_bytes: int = _PROBE_BYTES) -> None:
    """Writes and deletes a file of this size. Raises OSError if the folder is missing, read-only or full."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(size_bytes))


def _make_folders(path: Path) -> None:
    for each in (*reversed(path.parents), path):
        if not each.is_dir():
            each.mkdir(mode=_PARENT_MODE, exist_ok=True)


def _check_above(folder: Path, setting: str) -> None:
    """Checks a folder in which a private one is, and all folders above it, also those to which links lead."""
    trusted = (os.geteuid(), _ROOT_USER)
    for path in _ways_to(folder):
        found = path.stat()
        for each in (path.lstat(), found):
            if each.st_uid not in trusted:
                raise _exchangeable(path, _owner(each), setting)
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX and not _is_mount_of_root(path, found):
            raise _exchangeable(path, "may be written by every user", setting)


def _ways_to(folder: Path) -> Iterable[Path]:
    """The folder and those above it, by its name and by each link on the way."""
    found: dict[Path, None] = {}
    left = [folder.absolute(), folder.resolve()]
    while left:
        path = left.pop(0)
        for each in (path, *path.parents):
            if each not in found and each.is_symlink():
                left.append(each.parent / each.readlink())
            found[each] = None
    return found


def _make_private(path: Path, setting: str) -> None:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=_FOLDER_MODE)
    if path.is_symlink():
        raise _refused(path, "is a symbolic link", setting)
    # The checks are made on the open folder, which nobody can exchange for another one.
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        if _is_mount_of_root(path, found):
            return
        if found.st_uid != os.geteuid():
            raise _refused(path, _owner(found), setting)
        if found.st_mode & stat.S_IWOTH:
            raise _refused(path, "may be written by every user", setting)
        if found.st_mode & 0o077:
            os.fchmod(folder, _FOLDER_MODE)
    finally:
        os.close(folder)


def _check_file(path: Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise _refused(path, "is a symbolic link")
    if not stat.S_ISREG(found.st_mode):
        raise _refused(path, "is not a regular file")
    if found.st_uid != os.geteuid():
        raise _refused(path, _owner(found))
    if found.st_nlink > 1:
        raise _refused(path, "has a second name (a hard link)")


def _unusable(path: Path, setting: str, error: OSError) -> RelayError:
    return RelayError(
        f"The folder {path} cannot be used ({error.strerror}): set `{setting}` to a folder that this user may write."
    )


def _is_mount_of_root(path: Path, found: os.stat_result) -> bool:
    return found.st_uid == _ROOT_USER and path.is_mount()


def _owner(found: os.stat_result) -> str:
    return f"belongs to user {found.st_uid}, not to user {os.geteuid()} of this process"


def _exchangeable(path: Path, fault: str, setting: str) -> RelayError:
    return RelayError(
        f"{path} {fault}, so another user could exchange what is kept in it: set `{setting}` to a folder elsewhere."
    )


def _refused(path: Path, fault: str, setting: str | None = None) -> RelayError:
    other = f", or set `{setting}` to another folder" if setting is not None else ""
    return RelayError(f"{path} {fault}, so another user could read or change what is kept there: remove it{other}.")
