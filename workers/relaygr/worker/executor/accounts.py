"""What a worker counts and remembers of its work: memory held, recent requests, deleted users, prefixes of jobs.

Each is bounded. All belong to the device thread, unless a class says more.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from relaygr.worker.executor.work import HoldsMemory, JobWork, RankingWork, ResolvedPrefix

WORK_BYTES: Final = 2048
"""Memory of the objects of one piece of work."""
BYTES_PER_TOKEN: Final = 48
"""Memory of a looked-up token (5 numbers of 8 bytes) and of its time."""


class HeldMemory:
    """The memory that pieces of work keep alive, at most `max_bytes`: messages, histories and looked-up rows. A history
    counts once, even if several pieces of work share it. Work that is alone may exceed the bound.

    One poll thread at a time calls `post`, the device thread all else. Any thread may read `outstanding_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.prefix_bytes = 0
        # Two counters, since each is written by one thread only.
        self._posted_bytes = 0
        self._ended_bytes = 0

    @property
    def outstanding_bytes(self) -> int:
        """The messages of all work that has not ended, those in the mailbox included, and the prefixes."""
        return self.prefix_bytes + self._posted_bytes - self._ended_bytes

    def post(self, work: JobWork | RankingWork, rows: int = 0) -> bool:
        """Counts the work's message, and the rows of its candidates. False, without counting, if there is no room."""
        size_bytes = 2 * len(work.received.value or b"") + WORK_BYTES + BYTES_PER_TOKEN * rows
        outstanding_bytes = self.outstanding_bytes
        if outstanding_bytes > 0 and outstanding_bytes + size_bytes > self.max_bytes:
            return False
        work.held_bytes = size_bytes
        self._posted_bytes += size_bytes
        return True

    def keep(self, work: HoldsMemory, prefix: ResolvedPrefix | None) -> bool:
        """The work holds this prefix from now on, in place of its previous one. False if there is no room for it."""
        before, work.held_prefix = work.held_prefix, None
        if before is not None:
            before.holders -= 1
            if before.holders == 0 and before.held_in is not None:
                before.held_in.prefix_bytes -= before.held_bytes
        if prefix is None:
            return True
        if prefix.holders == 0:
            outstanding_bytes = self.outstanding_bytes
            if outstanding_bytes + prefix.held_bytes > self.max_bytes and outstanding_bytes > work.held_bytes:
                return False
            prefix.held_in = self
            self.prefix_bytes += prefix.held_bytes
        prefix.holders += 1
        work.held_prefix = prefix
        return True

    def end(self, work: HoldsMemory) -> None:
        """The work holds nothing any more."""
        self.keep(work, None)
        self._ended_bytes += work.held_bytes
        work.held_bytes = 0


class RecentIds(OrderedDict[tuple[str, str], int]):
    """The requests of the last `kept_us`, at most `capacity`, each by its user and its id, with the time of `add`.

    It is an ordered dict, so that `in` costs no call in Python. A plain dict would search past the places of all
    deleted entries to find its oldest one.
    """

    def __init__(self, capacity: int, kept_us: int) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        super().__init__()
        self._capacity = capacity
        self._kept_us = kept_us

    def add(self, identity: tuple[str, str], now_us: int) -> None:
        """Adds the id as the newest, and drops those that are too old or beyond the capacity."""
        self[identity] = now_us
        self.move_to_end(identity)
        while len(self) > self._capacity or self[next(iter(self))] < now_us - self._kept_us:
            self.popitem(last=False)


class Deletions:
    """The users that were deleted lately, so that work which resolved a prefix before does not cache it.

    It remembers the newest `capacity` of them. Whatever was resolved before an older deletion counts as deleted, too:
    it is computed for its own request alone, which is always right.
    """

    def __init__(self, capacity: int) -> None:
        self.count = 0
        """All deletions so far."""
        self._capacity = capacity
        self._last: OrderedDict[str, int] = OrderedDict()
        """Which deletion was the last of each user."""
        self._dropped = 0
        """The newest deletion that is no longer in `_last`."""

    def add(self, user_id: str) -> None:
        """The user was deleted."""
        self.count += 1
        self._last[user_id] = self.count
        self._last.move_to_end(user_id)
        if len(self._last) > self._capacity:
            self._dropped = self._last.popitem(last=False)[1]

    def cover(self, prefix: ResolvedPrefix) -> bool:
        """Whether the user of this prefix was deleted after it was resolved."""
        return self._last.get(prefix.key.user_id, self._dropped) > prefix.deletions


class JobPrefixes:
    """The prefix that each user's last job resolved, for the request of its impression, which names the same history:
    the newest, at most `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._total_bytes = 0
        self._kept: OrderedDict[str, tuple[str, ResolvedPrefix]] = OrderedDict()

    def keep(self, impression: tuple[str, str], prefix: ResolvedPrefix) -> None:
        """Keeps the prefix of a job, in the place of an earlier one of its user."""
        user_id, request_id = impression
        self.forget(user_id)
        self._kept[user_id] = request_id, prefix
        self._total_bytes += prefix.held_bytes + WORK_BYTES
        while self._total_bytes > self._max_bytes:
            self.forget(next(iter(self._kept)))

    def take(self, impression: tuple[str, str]) -> ResolvedPrefix | None:
        """The prefix that the job of this impression resolved, which is then no longer kept."""
        user_id, request_id = impression
        kept = self._kept.get(user_id)
        if kept is None or kept[0] != request_id:
            return None
        self.forget(user_id)
        return kept[1]

    def forget(self, user_id: str) -> None:
        """Drops the user's prefix, if there is one."""
        kept = self._kept.pop(user_id, None)
        if kept is not None:
            self._total_bytes -= kept[1].held_bytes + WORK_BYTES
