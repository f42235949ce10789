"""Leases: request ids that hold an entry from its pre-infer to its ranking, each until a time.

A request holds one entry at most. What is not ended by then is leaked, and handed back by `expired`.
Single-threaded; the caller passes the time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from relaygr.worker.cache.entries import CacheEntry


@dataclass(frozen=True, slots=True)
class Lease:
    """One request's hold."""

    request_id: str
    entry: CacheEntry
    until_us: int


class LeaseTable:
    """Leases by request, and by the time they end. At most `limit` at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_request: dict[str, Lease] = {}
        self._by_end: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._by_request)

    def get(self, request_id: str) -> Lease | None:
        return self._by_request.get(request_id)

    def put(self, lease: Lease) -> bool:
        """Adds or moves a lease; False when the book is full."""
        if lease.request_id not in self._by_request and len(self._by_request) >= self._limit:
            return False
        self._by_request[lease.request_id] = lease
        heapq.heappush(self._by_end, (lease.until_us, lease.request_id))
        # Ended and moved leases leave their times behind; rebuilt before they outweigh the rest.
        if len(self._by_end) > 2 * len(self._by_request) + 64:
            self._by_end = [(kept.until_us, request_id) for request_id, kept in self._by_request.items()]
            heapq.heapify(self._by_end)
        return True

    def take(self, request_id: str) -> Lease | None:
        """Removes the request's lease."""
        return self._by_request.pop(request_id, None)

    def expired(self, now_us: int) -> list[Lease]:
        """Removes and returns all that ended by `now_us`."""
        ended = []
        while self._by_end and self._by_end[0][0] <= now_us:
            until_us, request_id = heapq.heappop(self._by_end)
            lease = self._by_request.get(request_id)
            if lease is not None and lease.until_us == until_us:
                ended.append(self._by_request.pop(request_id))
        return ended

    def all(self) -> list[Lease]:
        return list(self._by_request.values())
