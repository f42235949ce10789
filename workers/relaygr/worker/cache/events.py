"""What happens in the cache, told to one listener: enough to trace it, with no tensors.

Events are told after the cache's lock is left, so two threads may tell theirs in another order than
they happened; `sequence` gives that order. `at_us` is monotonic.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from relaygr.schemas.digest import DigestChain


class EventKind(enum.StrEnum):
    """The operation."""

    ACQUIRE = "acquire"
    """A ranking's look-up."""
    PREPARE = "prepare"
    """A pre-infer job's look-up."""
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
    at_us: int
    kind: EventKind
    user_id: str
    namespace: bytes
    chain: DigestChain
    """Of the history that the prefix covers; its length is in behaviours."""
    outcome: str


class CacheListener(Protocol):
    """Must be quick, and must not raise."""

    def on_event(self, event: CacheEvent) -> None:
        """One event."""
