"""One child process: started with a line to us, listened to, signalled, buried."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable, Sequence

from relaygr.worker.supervisor.beats import Beat, BeatReader

MakeCommand = Callable[[int, bool], Sequence[str]]
"""The command of a child: the descriptor of its line, and whether it is the first: none was ever ready before it."""

_RECEIVE_BYTES = 65536


class ChildProcess:
    """Belongs to the supervisor's thread. Only `wait` blocks."""

    def __init__(self, number: int, make_command: MakeCommand, *, is_first: bool) -> None:
        """Starts it. Raises OSError if the system has no process to give."""
        self.number = number
        self._reader = BeatReader()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # A group of its own: the terminal's Ctrl-C is for us, and children stop in order. And when we die, the
                # kernel wakes what is stopped in a group that is left without a parent: it sees that, and stops.
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
        self.line = ours
        self.line_is_closed = False
        """Its end is at hand: a process that lives keeps its line."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self) -> Beat | None:
        """The newest sign of life that has come in."""
        newest = None
        while True:
            try:
                data = self.line.recv(_RECEIVE_BYTES)
            except OSError:
                return newest
            if not data:
                self.line_is_closed = True
                return newest
            newest = self._reader.feed(data) or newest

    def exit_code(self) -> int | None:
        """None while it lives; negative for a signal."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Nothing happens if it is gone."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, which a stopped process dies of too."""
        self._process.kill()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, None if it lives on after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def bury(self) -> None:
        """After its end: gives its descriptor back."""
        self.line.close()
