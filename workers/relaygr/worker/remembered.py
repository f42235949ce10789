"""A bounded memory of ids: the newest are kept."""

from __future__ import annotations

from collections import OrderedDict


class Remembered:
    """The last `capacity` ids that were added. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self._capacity = capacity
        # A plain dict whose oldest are deleted is searched past all their places for the next one.
        self._ids: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, identity: str) -> bool:
        return identity in self._ids

    def add(self, identity: str) -> None:
        """Remembers the id as the newest, and forgets the oldest beyond the capacity."""
        self._ids[identity] = None
        self._ids.move_to_end(identity)
        if len(self._ids) > self._capacity:
            self._ids.popitem(last=False)
