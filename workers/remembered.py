"""A bounded memory of ids: the newest are kept."""

from __future__ import annotations


class Remembered:
    """The last `capacity` ids that were added. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self._capacity = capacity
        self._ids: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, identity: str) -> bool:
        return identity in self._ids

    def add(self, identity: str) -> None:
        """Remembers the id as the newest, and forgets the oldest beyond the capacity."""
        self._ids.pop(identity, None)
        self._ids[identity] = None
        if len(self._ids) > self._capacity:
            del self._ids[next(iter(self._ids))]
