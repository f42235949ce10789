"""Lag in seconds: for how long the next message of a group has been waiting.

Two ways, and each figure says which:

* `interpolated`: the end of the log was polled again and again; the time at which it passed the committed
  offset lies between two polls. Needs no read, and no clock but ours. Its error is below one poll interval.
* `record`: the timestamp of the message at the committed offset, read once, against our wall clock. Its
  error is the difference between our clock and the producer's.

Pure.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass


class TimeLagSource(enum.StrEnum):
    """Where a figure in seconds comes from."""

    CAUGHT_UP = "caught_up"
    INTERPOLATED = "interpolated"
    RECORD = "record"


@dataclass(frozen=True, slots=True)
class TimeLag:
    """Seconds behind."""

    seconds: float
    source: TimeLagSource


class EndOffsets:
    """The end of one log at the last polls, at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._polls: deque[tuple[int, int]] = deque(maxlen=capacity)

    def add(self, polled_at_us: int, end: int) -> None:
        """One poll, monotonic. A log that went back was made anew: what was known of it is dropped."""
        if self._polls and end < self._polls[-1][1]:
            self._polls.clear()
        if len(self._polls) >= 2 and self._polls[-1][1] == self._polls[-2][1] == end:
            # The end stands still: only when it began to, and when it was last so, matter.
            self._polls.pop()
        self._polls.append((polled_at_us, end))

    def time_lag(self, committed: int) -> TimeLag | None:
        """Seconds since the log's end passed `committed`, as of the last poll.

        None if that was before the first poll that is still known: then only a record can tell.
        """
        if not self._polls:
            return None
        now_us, end = self._polls[-1]
        if committed >= end:
            return TimeLag(0.0, TimeLagSource.CAUGHT_UP)
        before: tuple[int, int] | None = None
        for polled_at_us, offset in self._polls:
            if offset > committed:
                break
            before = (polled_at_us, offset)
        else:
            raise AssertionError("the last end is beyond the commit")
        if before is None:
            return None
        # The message at `committed` is the (committed - before + 1)-th of those that arrived in between.
        share = (committed - before[1] + 1) / (offset - before[1])
        arrived_us = before[0] + share * (polled_at_us - before[0])
        return TimeLag(max(0.0, (now_us - arrived_us) / 1e6), TimeLagSource.INTERPOLATED)


def record_time_lag(wall_us: int, timestamp_ms: int) -> TimeLag:
    """Seconds since a record's timestamp."""
    return TimeLag(max(0.0, (wall_us - timestamp_ms * 1000) / 1e6), TimeLagSource.RECORD)
