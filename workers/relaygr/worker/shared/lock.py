"""The writer's lock of a shared folder: one process may write at a time.

* The lock is flock's: the kernel frees it when its holder is dead, whatever the cause. A stopped process keeps the
  lock, since it may wake up and write.
* `arena_epoch` counts the holders. It is stored before `acquire` returns, and data in the folder carries the epoch of
  its writer.
* `is_held` is true if this process may write: it holds the lock, and the lock file was not replaced. The check
  takes microseconds, so writers repeat it at each write.
* The lock belongs to the open file, which a forked child shares. A holder forks no process that outlives it; programs
  started by `subprocess` do not inherit the lock.
* A holder that was fenced leaves a note before it ends (`note_fenced`). Its death frees the lock; without the note, a
  waiting standby would join under the same id and fence the new owner. The note names the holder's epoch, so it
  applies to the next holder only, and not to a process that is started by hand later.
* Something may empty the folder of a running worker, as systemd-logind does (RemoveIPC). The holder puts the lock file
  back (`put_back`), and a standby makes none: it would take the lock of a new file beside the holder of the old one.

There is one `ArenaLock` for each process and folder. `acquire` may wait in any thread; all threads may call the other
methods.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import open_private, private_folder, private_folders, rewrite, write_private

if TYPE_CHECKING:
    # The settings are slow to import, and the lock does not need them.
    from relaygr.worker.settings import WorkerConfig

# Interval between two attempts to get the lock. Each attempt costs a system call.
_POLL_S: Final = 0.002
PUT_BACK_S: Final = 10.0
"""A holder that is not dead puts the lock file back within this time: a supervisor kills one that hangs earlier."""
_SETTING: Final = "worker.shared_path"
_LOCK: Final = "lock"
_FENCED_NAME: Final = "fenced"
_TMPFS: Final = Path("/dev/shm")


class ArenaLock:
    """The writer's lock of one folder, which is created if it does not exist."""

    def __init__(self, folder: Path, *, is_standby: bool = False) -> None:
        """Does not acquire the lock. `is_standby`: there is a holder, to whom the lock file is left.

        Raises RelayError if the folder cannot be written, or others could control it.
        """
        self._path = folder / _LOCK
        self._epoch_path = folder / "epoch"
        self._is_standby = is_standby
        self._missing_since_s: float | None = None
        self._file: int | None = None
        self._arena_epoch = 0
        try:
            private_folder(folder, _SETTING)
            if not is_standby:
                os.close(self._open())
        except OSError as error:
            raise RelayError(
                f"The folder {folder} cannot be used ({error.strerror}): set `worker.shared_path` to a folder that "
                "this user may write, on a tmpfs such as /dev/shm, or remove the setting."
            ) from error

    @property
    def arena_epoch(self) -> int:
        """The number of this holder, from 1; 0 before the lock is acquired."""
        return self._arena_epoch

    def acquire(self, cancel: threading.Event | None = None, timeout_s: float | None = None) -> int | None:
        """Waits for the lock and returns the new arena_epoch; None if `cancel` was set or the time has passed.

        Raises ValueError if this object already holds the lock.
        """
        waits = cancel if cancel is not None else threading.Event()
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not waits.is_set():
            epoch = self.try_acquire()
            if epoch is not None:
                return epoch
            if ends_s is not None and time.monotonic() >= ends_s:
                return None
            waits.wait(_POLL_S)
        return None

    def try_acquire(self) -> int | None:
        """The new arena_epoch; None if another process holds the lock.

        Raises ValueError if this object holds the lock, RelayError if a new folder has no space for its first files.
        """
        if self._file is not None:
            raise ValueError("this object already holds the lock")
        file = self._lock()
        if file is None:
            return None
        try:
            epoch = self._stored_epoch() + 1
            self._store_epoch(epoch)
            rewrite(file, f"{os.getpid()}\n")
        except OSError as error:
            os.close(file)
            raise RelayError(
                f"The folder {self._path.parent} cannot be written ({error.strerror}): free space on its file system, "
                "or set `worker.shared_path` to another folder."
            ) from error
        except BaseException:
            os.close(file)
            raise
        self._file, self._arena_epoch = file, epoch
        return epoch

    @contextlib.contextmanager
    def unclaimed(self) -> Iterator[bool]:
        """Inside the context: True, and no process can acquire the lock; or False, because a process holds the lock."""
        file = self._lock()
        try:
            yield file is not None
        finally:
            if file is not None:
                os.close(file)

    def is_held(self) -> bool:
        """Whether this process may write."""
        file = self._file
        if file is None:
            return False
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))  # noqa: PTH116 - asked at each write
        except OSError:
            return False

    def put_back(self) -> bool:
        """Whether this process, which held the lock, holds it again, with a new lock file in place of a removed one.

        False if it never held the lock, or if another process has been the holder since. The folder must be there
        again. Only one thread calls this. Raises OSError and RelayError.
        """
        held = self._file
        if held is None or self._stored_epoch() not in (0, self._arena_epoch):
            return False
        file = self._lock() if self._path.exists() else self._make_locked()
        if file is None:
            return False
        try:
            self._store_epoch(self._arena_epoch)
            rewrite(file, f"{os.getpid()}\n")
            # Other threads use the number of the open file meanwhile.
            os.dup2(file, held, inheritable=False)
        finally:
            os.close(file)
        return self.is_held()

    def holder(self) -> str:
        """The id of the process that last acquired the lock, for messages; empty if there was none."""
        return holder_of(self._path.parent)

    def release(self) -> None:
        """Releases the lock. Safe to call again."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _open(self) -> int:
        """Raises FileNotFoundError without the folder, and for a standby without the file."""
        if not self._is_standby:
            return open_private(self._path, os.O_RDWR | os.O_CREAT)
        if self._missing_since_s is None or time.monotonic() - self._missing_since_s < PUT_BACK_S:
            return open_private(self._path, os.O_RDWR)
        # Its holder is dead, too.
        private_folder(self._path.parent, _SETTING)
        return open_private(self._path, os.O_RDWR | os.O_CREAT)

    def _make_locked(self) -> int:
        """A new lock file, which is locked before it has its name, so that no other process locks it first."""
        fresh = self._path.with_suffix(".new")
        file = open_private(fresh, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fresh.replace(self._path)
        except BaseException:
            os.close(file)
            raise
        return file

    def _lock(self) -> int | None:
        """The locked file; None if another process has the lock, or if the file was removed or replaced meanwhile."""
        try:
            file = self._open()
        except FileNotFoundError:
            self._missing_since_s = self._missing_since_s or time.monotonic()
            return None
        self._missing_since_s = None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), self._path.stat()):
                return file
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        return None

    def _store_epoch(self, epoch: int) -> None:
        text = f"{epoch}\n"
        fresh = self._epoch_path.with_suffix(".new")
        try:
            # Renamed into place: after a death at any moment the file holds the old number or the new one.
            write_private(fresh, text)
            fresh.replace(self._epoch_path)
        except OSError:
            if not self._epoch_path.exists():
                raise
            # A full file system must not prevent a take-over: the number never gets shorter.
            with self._epoch_path.open("r+", encoding="ascii") as file:
                file.write(text)

    def _stored_epoch(self) -> int:
        """The last holder's number; 0 if it is unknown, so that no data counts as a direct predecessor's."""
        try:
            return max(0, int(self._epoch_path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            return 0


def holder_of(folder: Path) -> str:
    """The id of the process that last acquired the lock of a folder; empty if there was none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (folder / _LOCK).read_text(encoding="ascii").strip()
    return ""


def note_fenced(folder: Path, lock: ArenaLock) -> None:
    """Leaves a note that this holder was fenced. Does nothing without the lock or if the write fails."""
    if lock.is_held():
        with contextlib.suppress(OSError):
            write_private(folder / _FENCED_NAME, f"{lock.arena_epoch}\n")


def predecessor_was_fenced(folder: Path, lock: ArenaLock) -> bool:
    """Whether the previous holder of the lock left a note."""
    try:
        return int((folder / _FENCED_NAME).read_text(encoding="ascii")) == lock.arena_epoch - 1
    except (OSError, ValueError):
        return False


def memory_folder() -> Path:
    """A writable folder on tmpfs if the system has one; otherwise the temporary folder, which may lie on a disk.

    Raises RelayError without either.
    """
    if _TMPFS.is_dir() and os.access(_TMPFS, os.W_OK):
        return _TMPFS
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise RelayError(
            f"Neither {_TMPFS} nor a temporary folder can be written: set `worker.shared_path` to a folder in memory."
        ) from error


def worker_folder(shared_path: Path | None, group: str, worker_id: str) -> tuple[Path, tuple[str, ...]]:
    """The shared folder of a worker id: a folder that may belong to others, and the private folders in it."""
    if shared_path is not None:
        return shared_path, (group, worker_id)
    return memory_folder(), (f"relaygr-{_user()}", group, worker_id)


def shared_folder(config: WorkerConfig) -> Path:
    """The shared folder of this worker id, which is created if needed.

    Raises RelayError if it cannot be created, or if another user could control a part of its path.
    """
    base, own = worker_folder(config.worker.shared_path, config.kafka.workers_group, config.worker.worker_id)
    return private_folders(base, *own, setting=_SETTING)


def _user() -> str:
    """The user's name, or its number: the user of a container may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
