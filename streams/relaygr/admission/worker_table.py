"""The workers that are known by their statuses: a bounded table.

Anyone who may write statuses can make up workers. While the table is full, a new worker takes the place of the one that
was heard of longest ago, if that one is silent; if it still writes, the new one is refused. So made-up workers do not
displace real ones, and no step takes longer with more workers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol, TypeVar


class Dated(Protocol):
    """What is known of a worker."""

    @property
    def written_at_us(self) -> int:
        """Wall time of its last status."""


V = TypeVar("V", bound=Dated)


class NoRoomError(ValueError):
    """There is no room for another worker, since those that are known still write."""


class WorkerTable(OrderedDict[str, V]):
    """By worker id, in the order in which they were last heard of. One thread changes it; any may read."""

    def __init__(self, most: int, stale_us: int) -> None:
        """`stale_us`: the age of a status above which its worker counts as silent."""
        super().__init__()
        self._most = most
        self._stale_us = stale_us

    def make_room(self, worker_id: str, now_us: int) -> tuple[str, V] | None:
        """Removes and returns the silent worker whose place this one takes, if it takes one. Raises NoRoomError."""
        if worker_id in self or len(self) < self._most:
            return None
        if now_us - self[next(iter(self))].written_at_us <= self._stale_us:
            raise NoRoomError(f"{self._most} workers are known, and all of them still write")
        return self.popitem(last=False)

    def put(self, worker_id: str, value: V) -> None:
        """Sets what is known of a worker that was just heard of. Call `make_room` before."""
        self[worker_id] = value
        self.move_to_end(worker_id)
