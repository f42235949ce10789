"""Who may write a worker's shared folder: one process at a time, and how many were before it.

* The lock is flock's, so the kernel frees it when its holder is dead, however it died. A process that is only
  stopped keeps it: nobody can take over from a process that may wake up and write.
* Each holder counts: `arena_epoch` is one more than its predecessor's, and is stored before `acquire` returns.
  What is written to the folder says under which epoch it was.
* `is_held` says whether this process may write: it has the lock, and nobody has put other files in the place
  of its own. It costs microseconds, so that writers ask each time.
* The lock belongs to the open file, which a forked child shares. A holder forks nothing that outlives it;
  programs started the usual way (`subprocess`) do not inherit it.

One `ArenaLock` per process and folder. `acquire` may wait in any thread; the rest may be called from all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from relaygr.runtime.errors import RelayError

# How late a free lock is noticed. Waiting costs a system call each time.
_POLL_S: Final = 0.002
_FENCED_NAME: Final = "fenced"


class ArenaLock:
    """The writer's lock of one folder, which is made if it is not there."""

    def __init__(self, folder: Path) -> None:
        """Takes nothing yet. Raises RelayError if the folder cannot be made or written."""
        self._path = folder / "lock"
        self._epoch_path = folder / "epoch"
        self._file: int | None = None
        self._arena_epoch = 0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(self._open())
        except OSError as error:
            raise RelayError(
                f"The folder {folder} can not be used ({error.strerror}): set `worker.shared_path` to a folder that "
                "this user may write, on tmpfs such as /dev/shm, or leave it out."
            ) from error

    @property
    def arena_epoch(self) -> int:
        """This holder's number, 1 for the first; 0 before the lock is held."""
        return self._arena_epoch

    def acquire(self, cancel: threading.Event | None = None, timeout_s: float | None = None) -> int | None:
        """Waits for the lock, and counts this holder. None if `cancel` was set, or the time passed, before.

        Raises ValueError if this object holds it already.
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
        """The new arena_epoch; None while another holds the lock. Raises ValueError if this object does."""
        if self._file is not None:
            raise ValueError("the lock is held already")
        file = self._lock()
        if file is None:
            return None
        try:
            epoch = self._stored_epoch() + 1
            self._store_epoch(epoch)
            # Shortened last, so that a full file system has nothing to give.
            os.ftruncate(file, os.pwrite(file, f"{os.getpid()}\n".encode("ascii"), 0))
        except BaseException:
            os.close(file)
            raise
        self._file, self._arena_epoch = file, epoch
        return epoch

    @contextlib.contextmanager
    def unclaimed(self) -> Iterator[bool]:
        """Within it, True: nobody holds the lock, and nobody can get it; no holder is counted. False: held."""
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

    def holder(self) -> str:
        """The process id that last took the lock, for messages; empty if none did."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return self._path.read_text(encoding="ascii").strip()
        return ""

    def release(self) -> None:
        """Gives the lock up. Safe to call again."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)

    def _lock(self) -> int | None:
        """The locked file, or None. A file that was replaced while it was being locked is not the lock."""
        file = self._open()
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
            # Renamed into place: a process that dies here leaves the old number or the new one.
            fresh.write_text(text, encoding="ascii")
            fresh.replace(self._epoch_path)
        except OSError:
            # A full file system may not prevent a take-over. The file is there, and never gets shorter.
            with self._epoch_path.open("r+", encoding="ascii") as file:
                file.write(text)

    def _stored_epoch(self) -> int:
        """The last holder's number; 0 if none is known, after which nothing of before can follow directly."""
        try:
            return max(0, int(self._epoch_path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            return 0


def note_fenced(folder: Path, lock: ArenaLock) -> None:
    """Does nothing without the lock. A folder that cannot be written leaves no note."""
    if lock.is_held():
        with contextlib.suppress(OSError):
            (folder / _FENCED_NAME).write_text(f"{lock.arena_epoch}\n", encoding="ascii")


def predecessor_was_fenced(folder: Path, lock: ArenaLock) -> bool:
    """Whether the holder directly before this one left its note."""
    try:
        return int((folder / _FENCED_NAME).read_text(encoding="ascii")) == lock.arena_epoch - 1
    except (OSError, ValueError):
        return False
