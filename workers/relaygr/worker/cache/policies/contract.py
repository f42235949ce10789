"""What the cache's books ask of a policy. Single-threaded; every time is monotonic µs, passed in.

| call | when | costs |
|---|---|---|
| `add` | an entry became ready, or grew: counts as a touch | O(1), `cost` O(log n) |
| `touch` | it was used | likewise |
| `evict` | it went for room; policies with a memory keep what they want of it | likewise |
| `remove` | it is gone for another reason; an unknown number changes nothing | likewise |
| `victims` | room is needed: all entries, the first to go first | O(1) a step, amortised; `cost` O(log n) |
| `expired` | from time to time: those that no longer deserve their place | O(1) a step |
| `demote` | its partition left, or a newer prefix of the user replaced it | O(1), `cost` O(log n) |

A walk over `victims` may move entries inside the policy (second chances), so it is begun only by who is
about to evict, and left at any step. The caller makes no other call while it walks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EntryWeight:
    """What a policy may weigh an entry by."""

    pages: int
    tokens: int
    saved_us: float = 0.0
    """Predicted device time that a hit saves."""
    identity: int = 0
    """The same for the same prefix after it was evicted: a hash of user and model."""


class EvictionOrder(Protocol):
    """An order over entry numbers."""

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        """A new entry, or one whose weight changed."""

    def touch(self, entry_id: int, now_us: int) -> None:
        """The entry was used. Raises KeyError for one that is not ordered."""

    def evict(self, entry_id: int) -> None:
        """The entry goes, to make room."""

    def remove(self, entry_id: int) -> None:
        """The entry is gone; nothing if it was not ordered."""

    def victims(self, now_us: int) -> Iterator[int]:
        """All entries, each once, the first to go first."""

    def expired(self, now_us: int) -> Iterator[int]:
        """Those whose time is over, longest first."""

    def __contains__(self, entry_id: int) -> bool:
        """Whether the entry is ordered."""

    def __len__(self) -> int:
        """How many entries are ordered."""


class EvictionPolicy(EvictionOrder, Protocol):
    """An order in which some entries can be put first."""

    def demote(self, entry_id: int) -> None:
        """Evict this one before all that are not demoted; a touch takes that back. Nothing if it is not ordered."""
