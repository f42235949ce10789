"""Heartbeats from a child to its supervisor: the message, and the supervisor's reader.

A child sends one line of JSON a few times a second.
"""

from __future__ import annotations

import enum
import json
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
    STOPPING = "stopping"
    """The child has drained and ends. It may wait for the broker, and sends nothing more."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One message. `port` serves the child's probes; `ready` and `detail` are the answer of its `/readyz`. The other
    fields are the times since the poll thread and the device thread made progress, 0 unless the child is active.
    """

    phase: ChildPhase
    port: int
    ready: bool
    detail: str
    poll_silent_ms: int = 0
    device_silent_ms: int = 0

    def encode(self) -> bytes:
        """One line, with its line feed."""
        detail = self.detail[:500]
        return json.dumps(asdict(self) | {"detail": detail}).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Heartbeat | None:
        """None if the line is not a heartbeat."""
        try:
            fields = json.loads(line)
            return cls(
                ChildPhase(fields["phase"]),
                int(fields["port"]),
                bool(fields["ready"]),
                str(fields["detail"]),
                int(fields["poll_silent_ms"]),
                int(fields["device_silent_ms"]),
            )
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
