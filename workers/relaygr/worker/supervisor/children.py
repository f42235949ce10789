"""The supervisor's end of a child process: one that it started, or one that an earlier supervisor started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from relaygr.worker.supervisor.heartbeat import Heartbeat, HeartbeatReader
from relaygr.worker.supervisor.records import ChildRecord, delete_record, read_record

_RECEIVE_BYTES: Final = 65536

MakeCommand = Callable[[int, bool], Sequence[str]]
"""Makes the command of a child from its socket's descriptor, and from whether it is the first to get ready."""


class Child(ABC):
    """One child process and the connection to it. Only `wait` blocks."""

    def __init__(self, number: int, pid: int, connection: socket.socket | None) -> None:
        self.number = number
        self.pid = pid
        self.socket = connection
        """None: an adopted child that has not connected yet."""
        self.socket_is_closed = False
        """The process is about to end: a live process keeps its socket open."""
        self._reader = HeartbeatReader()

    def receive(self) -> Heartbeat | None:
        """The newest heartbeat that has arrived since the last call."""
        newest = None
        while self.socket is not None:
            try:
                data = self.socket.recv(_RECEIVE_BYTES)
            except OSError:
                break
            if not data:
                self.socket_is_closed = True
                break
            newest = self._reader.feed(data) or newest
        return newest

    def exit_code(self) -> int | None:
        """None while the process lives; negative for a signal."""
        return self.wait(0)

    def kill(self) -> None:
        """Sends SIGKILL, which ends a stopped process too."""
        self.send(signal.SIGKILL)

    @abstractmethod
    def send(self, number: signal.Signals) -> None:
        """Does nothing if the process is gone."""

    @abstractmethod
    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None if the process still lives after `timeout_s`."""

    def close(self) -> None:
        """Closes the connection. The process has ended."""
        if self.socket is not None:
            self.socket.close()


class StartedChild(Child):
    """A child of this process."""

    def __init__(self, number: int, make_command: MakeCommand, *, is_first: bool) -> None:
        """Starts the process. Raises OSError if the system cannot start one."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # Each child has a process group of its own, for two reasons. The terminal's Ctrl-C goes to the
                # supervisor alone, which stops the children in order. And when the supervisor dies, the kernel wakes
                # stopped processes in a group that is left without a parent: the child finds its socket closed.
                self._process = subprocess.Popen(
                    make_command(theirs.fileno(), is_first),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    process_group=0,
                )
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        super().__init__(number, self._process.pid, ours)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        if not timeout_s:
            return self._process.poll()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


class AdoptedChild(Child):
    """A child of an earlier supervisor of this worker id. A pidfd names the process: its id may be used again."""

    def __init__(self, number: int, folder: Path, record: ChildRecord) -> None:
        """Raises ProcessLookupError if the process of the record is gone."""
        self._pidfd = os.pidfd_open(record.pid)
        # Asked after the pidfd was opened: from now on no other process can be meant.
        if not record.is_alive:
            os.close(self._pidfd)
            raise ProcessLookupError(record.pid)
        super().__init__(number, record.pid, None)
        self._folder = folder
        self._record = record
        self._code: int | None = None

    def connect(self, connection: socket.socket) -> None:
        """The child has connected, perhaps again."""
        if self.socket is not None:
            self.socket.close()
        self.socket, self.socket_is_closed, self._reader = connection, False, HeartbeatReader()

    def fileno(self) -> int:
        """The pidfd, which is ready to read when the process has ended."""
        return self._pidfd

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def wait(self, timeout_s: float) -> int | None:
        if self._code is None:
            waits = select.poll()
            waits.register(self._pidfd, select.POLLIN)
            if not waits.poll(timeout_s * 1000):
                return None
            left = read_record(self._folder, self.pid)
            is_own = left is not None and left.started_ticks == self._record.started_ticks
            code = left.exit_code if left is not None and is_own else None
            self._code = code if code is not None else -signal.SIGKILL
            delete_record(self._folder, self.pid)
        return self._code

    def close(self) -> None:
        super().close()
        os.close(self._pidfd)
