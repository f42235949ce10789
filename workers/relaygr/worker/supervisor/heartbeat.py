"""Heartbeats from a child to its supervisor: the message, the child's end of the socket, and the supervisor's reader.

A child sends one line of JSON a few times a second. The child sees that its supervisor is gone when the socket
closes.
"""

from __future__ import annotations

import enum
import json
import socket
from dataclasses import asdict, dataclass
from typing import Final

INTERVAL_S: Final = 0.25
LONGEST_LINE_BYTES: Final = 4096


class ChildPhase(enum.StrEnum):
    """The phase of a child process."""

    PREPARING = "preparing"
    """The child loads its model, or has just acquired the lock and takes over. It may send nothing for a long time."""
    STANDBY = "standby"
    """The child is ready to take over and waits for the lock."""
    ACTIVE = "active"
    """The child holds the lock."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One message. `port` serves the child's probes; `ready` and `detail` are the answer of its `/readyz`."""

    phase: ChildPhase
    port: int
    ready: bool
    detail: str

    def encode(self) -> bytes:
        """One line, with its line feed."""
        detail = self.detail[:500]
        return json.dumps(asdict(self) | {"detail": detail}).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Heartbeat | None:
        """None if the line is not a heartbeat."""
        try:
            fields = json.loads(line)
            return cls(ChildPhase(fields["phase"]), int(fields["port"]), bool(fields["ready"]), str(fields["detail"]))
        except (ValueError, KeyError, TypeError):
            return None


class HeartbeatReader:
    """Splits the received bytes into heartbeats."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Heartbeat | None:
        """The newest heartbeat that `data` completes, or None."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:LONGEST_LINE_BYTES]
        heartbeats = [heartbeat for heartbeat in map(Heartbeat.decode, lines) if heartbeat is not None]
        return heartbeats[-1] if heartbeats else None


class SupervisorLink:
    """The child's end of the socket. Belongs to the child's main thread; no call blocks."""

    def __init__(self, descriptor: int) -> None:
        """Takes over the inherited descriptor. Raises OSError if it is not a socket."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        # Processes that the child starts must not keep the socket open.
        self._socket.set_inheritable(False)

    def send(self, heartbeat: Heartbeat) -> None:
        """Drops the heartbeat if the socket's buffer is full: the supervisor has not read for minutes."""
        try:
            self._socket.send(heartbeat.encode())
        except OSError:
            return

    @property
    def is_closed(self) -> bool:
        """Whether the supervisor is gone."""
        try:
            return self._socket.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
