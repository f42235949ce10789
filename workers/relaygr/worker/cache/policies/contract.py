"""The contract of an eviction policy. Not thread-safe; every time is monotonic µs and passed in.

| call | when | costs |
|---|---|---|
| `add` | an entry became ready, or grew: counts as a touch | O(1) |
| `touch` | an entry was used | likewise |
| `evict` | an entry was evicted to make room; a policy may remember it | likewise |
| `remove` | an entry was removed for another reason; an unknown number changes nothing | likewise |
| `victims` | room is needed: yields all entries, the next to evict first | O(1) a step, amortised |
| `demote` | the entry's partition left, or a newer prefix of the user replaced it | O(1) |

The caller walks `victims` only when it is about to evict. It may stop at any step, and makes no other call during the
walk.

**Visits.** One impression uses its prefix several times within its lead time: the pre-infer job publishes or finds it,
then the ranking request finds it. If each use counted, a user who comes once would look like one who returns, and no
policy could tell a scan from a hot set. So all uses within `VISIT_US` of the first use of a visit belong to that visit.
The idea is the correlated reference period of LRU-K (O'Neil, O'Neil, Weikum, SIGMOD 1993).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from relaygr.schemas.record import record

VISIT_US: Final = 1_000_000
"""Longer than a lead time, shorter than the time between two impressions of a user."""


@record(frozen=True, slots=True)
class EntryWeight:
    """Figures by which a policy may rank an entry."""

    pages: int
    identity: int = 0
    """A hash of user and model: equal for the same prefix after it was evicted and computed again."""


class EvictionOrder(Protocol):
    """An order over entry numbers."""

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        """A new entry, or one whose weight changed."""

    def touch(self, entry_id: int, now_us: int) -> None:
        """The entry was used. Raises KeyError if it is not ordered."""

    def evict(self, entry_id: int) -> None:
        """The entry is evicted to make room."""

    def remove(self, entry_id: int) -> None:
        """The entry was removed. Does nothing if it was not ordered."""

    def victims(self) -> Iterator[int]:
        """All entries, each once, the next to evict first."""

    def __contains__(self, entry_id: int) -> bool:
        """Whether the entry is ordered."""

    def __len__(self) -> int:
        """How many entries are ordered."""


class EvictionPolicy(EvictionOrder, Protocol):
    """An order in which entries can be put first."""

    def demote(self, entry_id: int) -> None:
        """Puts the entry before all that are not demoted, until it is touched. Does nothing if it is not ordered."""
