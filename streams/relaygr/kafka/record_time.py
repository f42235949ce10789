"""Whether the time stamp of a Kafka record can be the time at which it was written.

Any producer may set it: it can be absent (-1), 0, in seconds or nanoseconds, or of a clock that is ahead.
"""

from __future__ import annotations

from typing import Final

from relaygr.schemas.times import EARLIEST_MS

_AHEAD_MS: Final = 1_000
"""Synchronised clocks differ by less."""


def is_record_time(timestamp_ms: int, now_ms: int) -> bool:
    """Whether a record that exists at `now_ms` of our wall clock can have been written at `timestamp_ms`."""
    return EARLIEST_MS <= timestamp_ms <= now_ms + _AHEAD_MS
