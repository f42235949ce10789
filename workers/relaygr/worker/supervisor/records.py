"""The state of supervision that outlives a supervisor, in the shared folder of the worker id.

    supervisor          held (flock) by the supervisor, so that an id has one; its content is the process id
    supervisor.socket   the supervisor listens here for children of an earlier supervisor; mode 0600
    child-PID           the record of a child: when it started, its phase, and how it ended

A child writes its own record. The supervisor deletes the record of a child whose end it saw, so the records that a
new supervisor finds are those of children that nobody supervises. Only a child's parent can wait for its exit code;
another supervisor reads the code from the record. A child that was killed leaves no code.

A process id may have been used again. Together with the time at which the process started, it names one process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import removed_on_failure
from relaygr.runtime.private_files import open_private, rewrite, write_private
from relaygr.runtime.private_sockets import address_of, listen_private, peer_of
from relaygr.worker.exits import Exit
from relaygr.worker.supervisor.heartbeat import ChildPhase

_CHILD: Final = "child-"
_LOCK: Final = "supervisor"
_SOCKET: Final = "supervisor.socket"
_BACKLOG: Final = 8


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """A process in the kernel's view: the letter of its state (R runs, S sleeps, T is stopped, Z is dead), the time of
    its start after the boot, and the processor time of all its threads. Both times are in clock ticks.
    """

    state: str
    started_ticks: int
    cpu_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessStat | None:
        """None if there is no such process."""
        try:
            # The command's name comes first, in brackets, and may hold anything.
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            return None
        return cls(fields[0], int(fields[19]), int(fields[11]) + int(fields[12]))


@dataclass(frozen=True, slots=True)
class ChildRecord:
    """One child. `exit_code` None: it lives, or was killed."""

    pid: int
    started_ticks: int
    phase: ChildPhase = ChildPhase.PREPARING
    exit_code: int | None = None

    @property
    def is_alive(self) -> bool:
        """Whether this very process lives."""
        found = ProcessStat.of(self.pid)
        return found is not None and found.started_ticks == self.started_ticks and found.state not in "ZX"


class OwnRecord:
    """The record of the process itself, written by it. A full file system loses changes, but stops no worker."""

    def __init__(self, folder: Path) -> None:
        own = ProcessStat.of(os.getpid())
        self._path = folder / f"{_CHILD}{os.getpid()}"
        self._record = ChildRecord(os.getpid(), own.started_ticks if own is not None else 0)
        self._write()

    def note(self, phase: ChildPhase) -> None:
        """The process is in this phase. A record that was removed is written again."""
        if phase is not self._record.phase or not self._path.exists():
            self._record = replace(self._record, phase=phase)
            self._write()

    def note_exit(self, code: Exit) -> None:
        """The process is about to end."""
        self._record = replace(self._record, exit_code=int(code))
        self._write()

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        with contextlib.suppress(OSError), removed_on_failure(fresh):
            write_private(fresh, json.dumps(asdict(self._record)))
            fresh.replace(self._path)


def read_record(folder: Path, pid: int) -> ChildRecord | None:
    """None without a readable record."""
    try:
        fields = json.loads((folder / f"{_CHILD}{pid}").read_text(encoding="utf-8"))
        phase, code = ChildPhase(fields["phase"]), fields["exit_code"]
        return ChildRecord(pid, int(fields["started_ticks"]), phase, None if code is None else int(code))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def delete_record(folder: Path, pid: int) -> None:
    """Deletes the record of a child that has ended, if there is one."""
    for name in (f"{_CHILD}{pid}", f"{_CHILD}{pid}.new"):
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def read_records(folder: Path) -> list[ChildRecord]:
    """The records of all children, in the order of their start."""
    names = (path.name.removeprefix(_CHILD) for path in folder.glob(f"{_CHILD}*"))
    records = (read_record(folder, int(name)) for name in names if name.isdecimal())
    return sorted((record for record in records if record is not None), key=lambda record: record.started_ticks)


class SupervisorEndpoint:
    """The one supervisor of a worker id: its lock, and the socket to which children connect."""

    def __init__(self, folder: Path, worker_id: str) -> None:
        """Raises RelayError if the id has a supervisor, or if the folder cannot be written."""
        self._folder = folder
        self._worker_id = worker_id
        self._lock, self.socket = self._open()

    def put_back(self) -> bool:
        """Makes lock and socket again if they were removed from the folder. Whether it did: the socket is a new one."""
        try:
            if os.path.samestat(os.fstat(self._lock), (self._folder / _LOCK).stat()):
                return False
        except OSError:
            if not self._folder.is_dir():
                # The active child makes it again.
                return False
        try:
            lock, listener = self._open()
        except (OSError, RelayError):
            return False
        self.close()
        self._lock, self.socket = lock, listener
        return True

    def _open(self) -> tuple[int, socket.socket]:
        folder = self._folder
        try:
            lock = open_private(folder / _LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise RelayError(f"{folder} cannot be written ({error.strerror}): check `worker.shared_path`.") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(lock)
            raise RelayError(
                f"{self._worker_id} has a supervisor on this machine already, process {holder}: stop that process, or "
                "set another `worker.worker_id`."
            ) from None
        with contextlib.suppress(OSError):
            rewrite(lock, f"{os.getpid()}\n")
        try:
            listener = listen_private(folder / _SOCKET, _BACKLOG)
        except OSError as error:
            os.close(lock)
            raise RelayError(
                f"{folder} cannot hold a socket ({error.strerror}): check `worker.shared_path`."
            ) from error
        listener.setblocking(False)
        return lock, listener

    def accept(self) -> tuple[socket.socket, int] | None:
        """The next connection and the process id of its other end, which the kernel vouches for; None without one.

        Refuses other users.
        """
        try:
            connection, _ = self.socket.accept()
        except OSError:
            return None
        peer = peer_of(connection)
        if peer.uid != os.geteuid():
            connection.close()
            return None
        connection.setblocking(False)
        return connection, peer.pid

    def close(self) -> None:
        """Children find nobody at the socket from now on, and another supervisor may start."""
        self.socket.close()
        os.close(self._lock)


def connect(folder: Path) -> socket.socket | None:
    """A connection to the supervisor of this worker id; None while there is none. Never blocks."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        with address_of(folder / _SOCKET) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        return None
    return connection
