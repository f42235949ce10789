"""Longest unused first, and nothing unused stays longer than its time to live, whether room is needed or not.

The order is that of LRU; what differs is that pages of users who left become free, and that a bound can be
named on how long a prefix stays. A held entry (pinned, leased) outlives its time until it is let go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from relaygr.worker.cache.policies.contract import EntryWeight


class Ttl:
    """An `EvictionOrder`. Raises ValueError for a time to live that is not positive."""

    def __init__(self, ttl_us: int) -> None:
        if ttl_us <= 0:
            raise ValueError(f"a time to live must be positive, not {ttl_us} µs")
        self._ttl_us = ttl_us
        self._used_us: OrderedDict[int, int] = OrderedDict()

    def add(self, entry_id: int, weight: EntryWeight, now_us: int) -> None:  # noqa: ARG002
        self._used_us[entry_id] = now_us
        self._used_us.move_to_end(entry_id)

    def touch(self, entry_id: int, now_us: int) -> None:
        self._used_us.move_to_end(entry_id)
        self._used_us[entry_id] = now_us

    def evict(self, entry_id: int) -> None:
        self.remove(entry_id)

    def remove(self, entry_id: int) -> None:
        self._used_us.pop(entry_id, None)

    def victims(self, now_us: int) -> Iterator[int]:  # noqa: ARG002
        return iter(self._used_us)

    def expired(self, now_us: int) -> Iterator[int]:
        for entry_id, used_us in self._used_us.items():
            if used_us + self._ttl_us > now_us:
                return
            yield entry_id

    def __contains__(self, entry_id: int) -> bool:
        return entry_id in self._used_us

    def __len__(self) -> int:
        return len(self._used_us)
