"""Work that waits for a version of its user's history, in a bounded place. Not thread-safe."""

from __future__ import annotations

from typing import Generic, TypeVar

W = TypeVar("W")


class ParkingLot(Generic[W]):
    """At most `capacity` pieces of work, found by user."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_user: dict[str, list[W]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def park(self, user_id: str, work: W) -> bool:
        """False if the place is full."""
        if self._count >= self._capacity:
            return False
        self._by_user.setdefault(user_id, []).append(work)
        self._count += 1
        return True

    def take_all(self, user_id: str) -> list[W]:
        """Everything parked for the user, in order of arrival."""
        parked = self._by_user.pop(user_id, [])
        self._count -= len(parked)
        return parked

    def take(self, user_id: str, work: W) -> bool:
        """Takes one piece out; False if it has been taken already."""
        parked = self._by_user.get(user_id, [])
        if work not in parked:
            return False
        parked.remove(work)
        self._count -= 1
        if not parked:
            del self._by_user[user_id]
        return True
