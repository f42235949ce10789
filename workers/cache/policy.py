"""In which order ready entries are evicted.

A policy knows entries by number and orders them; whether one may go (pins, leases) is for its caller,
which walks `victims` and skips what is held. Every call but the walk is O(1). Single-threaded, no
clock of its own. `demote` puts an entry before all others (its partition left, or a newer prefix of the
user replaced it); a touch takes that back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EntryWeight:
    """What a policy may weigh an entry by."""

    pages: int
    tokens: int


class EvictionPolicy(Protocol):
    """An order over entry numbers."""

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:
        """A new entry, or one whose weight changed: counts as a touch."""

    def touch(self, entry_id: int, now_us: int) -> None:
        """The entry was used."""

    def demote(self, entry_id: int) -> None:
        """Evict this one before all that are not demoted."""

    def remove(self, entry_id: int) -> None:
        """The entry is gone."""

    def victims(self, now_us: int) -> Iterator[int]:
        """All entries, the first to go first. The caller changes nothing while it walks."""

    def __len__(self) -> int:
        """How many entries are ordered."""


class Lru:
    """Least recently used first. Source: any textbook; two linked hash maps."""

    def __init__(self) -> None:
        self._demoted: OrderedDict[int, None] = OrderedDict()
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:  # noqa: ARG002
        self._demoted.pop(entry_id, None)
        self._order[entry_id] = None
        self._order.move_to_end(entry_id)

    def touch(self, entry_id: int, now_us: int) -> None:  # noqa: ARG002
        if self._demoted.pop(entry_id, self) is not self:
            self._order[entry_id] = None
        self._order.move_to_end(entry_id)

    def demote(self, entry_id: int) -> None:
        if entry_id in self._order:
            del self._order[entry_id]
            self._demoted[entry_id] = None

    def remove(self, entry_id: int) -> None:
        self._demoted.pop(entry_id, None)
        self._order.pop(entry_id, None)

    def victims(self, now_us: int) -> Iterator[int]:  # noqa: ARG002
        yield from self._demoted
        yield from self._order

    def __len__(self) -> int:
        return len(self._demoted) + len(self._order)


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {"lru": Lru}


def make_policy(name: str) -> EvictionPolicy:
    """The policy of that name. Raises ValueError that lists the known ones."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise ValueError(f"unknown eviction policy {name!r}: one of {', '.join(sorted(POLICIES))}") from None
