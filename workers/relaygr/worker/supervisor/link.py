"""A child's connection to its supervisor, and its time without one.

When the supervisor dies, the socket closes. The child goes on, and connects to the next supervisor as soon as one
listens in the shared folder. Without a supervisor nobody would replace the child, stop it, or notice that it hangs. So
it stops by itself after `worker.orphan_s`. A standby stops a little earlier than an active process, so that it does
not take over. A supervisor that refuses the child, since it found no record of it, counts as none.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

import structlog

from relaygr.runtime.clock import Clock, SystemClock
from relaygr.worker.exits import Exit
from relaygr.worker.supervisor.heartbeat import ChildPhase, Heartbeat
from relaygr.worker.supervisor.records import OwnRecord, connect

log = structlog.get_logger()

STANDBY_EARLIER_S: Final = 1.0
REFUSED_WITHIN_S: Final = 1.0
"""A supervisor that closes a new connection this soon has refused the child."""


class SupervisorLink:
    """Belongs to the child's main thread; no call blocks."""

    def __init__(self, descriptor: int, folder: Path, orphan_s: float = 0.0, clock: Clock | None = None) -> None:
        """Takes over the inherited descriptor. `folder`: the shared folder of the worker id.

        Raises OSError if the descriptor is not a socket.
        """
        self._socket: socket.socket | None = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        # Processes that the child starts must not keep the socket open.
        self._socket.set_inheritable(False)
        self._folder = folder
        self._orphan_s = orphan_s
        self._clock = clock if clock is not None else SystemClock()
        self._connected_us = 0
        self._lost_us: int | None = None
        """When the last supervisor that kept the child was lost."""
        self._phase = ChildPhase.PREPARING
        self._record = OwnRecord(folder)

    def send(self, heartbeat: Heartbeat) -> None:
        """Drops the heartbeat without a supervisor, or if the socket's buffer is full: it has not read for minutes."""
        self._phase = heartbeat.phase
        self._record.note(heartbeat.phase)
        if not self._has_supervisor():
            self._socket = connect(self._folder)
            self._connected_us = self._clock.monotonic_us()
        if self._socket is not None:
            try:
                self._socket.send(heartbeat.encode())
            except OSError:
                return

    def note_exit(self, code: Exit) -> None:
        """Records how the process ends, for a supervisor that is not its parent."""
        self._record.note_exit(code)

    @property
    def is_orphaned(self) -> bool:
        """Whether the process has been without a supervisor for too long."""
        if self._has_supervisor():
            return False
        bound_s = self._orphan_s - (STANDBY_EARLIER_S if self._phase is ChildPhase.STANDBY else 0.0)
        return self._clock.monotonic_us() - (self._lost_us or 0) >= bound_s * 1e6

    def close(self) -> None:
        """Closes the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _has_supervisor(self) -> bool:
        if self._socket is not None and _has_hung_up(self._socket):
            self.close()
            now_us = self._clock.monotonic_us()
            if self._lost_us is None or now_us - self._connected_us >= REFUSED_WITHIN_S * 1e6:
                log.warning("the supervisor is gone: waits for the next one", orphan_s=self._orphan_s)
                self._lost_us = now_us
        return self._socket is not None


def _has_hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
