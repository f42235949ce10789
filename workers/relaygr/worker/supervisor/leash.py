"""The child's end of the line to its supervisor: signs of life go out, and its end means that nobody watches."""

from __future__ import annotations

import socket

from relaygr.worker.supervisor.beats import Beat


class Leash:
    """Belongs to the child's main thread. No call blocks."""

    def __init__(self, descriptor: int) -> None:
        """Takes over the inherited descriptor. Raises OSError if it is no socket."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        # What the child starts must not keep the line open.
        self._socket.set_inheritable(False)

    def tell(self, beat: Beat) -> None:
        """A supervisor that reads nothing for minutes misses some."""
        try:
            self._socket.send(beat.encode())
        except OSError:
            return

    @property
    def is_cut(self) -> bool:
        """Whether the supervisor is gone."""
        try:
            return self._socket.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
