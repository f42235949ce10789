"""What a child tells its supervisor: one line of JSON, a few times a second, as long as it is well."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass
from typing import Final

INTERVAL_S: Final = 0.25
LONGEST_LINE_BYTES: Final = 4096


class Phase(enum.StrEnum):
    """Where a child is in its life."""

    PREPARING = "preparing"
    """Loads its model, or has just got the lock and takes over: it may be silent for long."""
    STANDBY = "standby"
    """Ready to take over: waits for the lock."""
    ACTIVE = "active"
    """It holds the lock."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life. `port` serves the child's probes; `ready` and `detail` are its `/readyz`."""

    phase: Phase
    port: int
    ready: bool
    detail: str

    def encode(self) -> bytes:
        """One line, its end included."""
        detail = self.detail[:500]
        return json.dumps(asdict(self) | {"detail": detail}).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Beat | None:
        """None for what is no beat."""
        try:
            told = json.loads(line)
            return cls(Phase(told["phase"]), int(told["port"]), bool(told["ready"]), str(told["detail"]))
        except (ValueError, KeyError, TypeError):
            return None


class BeatReader:
    """Cuts what comes over the line into beats."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Beat | None:
        """The newest beat in `data`, if one is complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:LONGEST_LINE_BYTES]
        beats = [beat for beat in map(Beat.decode, lines) if beat is not None]
        return beats[-1] if beats else None
