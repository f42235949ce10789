"""What happens in the cache, told to one listener: enough to trace it, with no tensors.

Events are told after the cache's lock is left, so two threads may tell theirs in another order than
they happened; `sequence` gives that order.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol


class EventKind(enum.StrEnum):
    """The operation."""

    ACQUIRE = "acquire"
    RESERVE = "reserve"
    PUBLISH = "publish"
    ABORT = "abort"
    RELOAD = "reload"
    RELOADED = "reloaded"
    SPILL = "spill"
    SPILLED = "spilled"
    LEASE = "lease"
    INVALIDATE = "invalidate"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One operation, the prefix it was about, and how it ended (a value of the enum it answers with)."""

    sequence: int
    kind: EventKind
    user_id: str
    namespace: bytes
    digest: bytes
    behaviours: int
    outcome: str


class CacheListener(Protocol):
    """Must be quick, and must not raise."""

    def on_event(self, event: CacheEvent) -> None:
        """One event."""
