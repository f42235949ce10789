"""Units of times since the epoch: a time in a wrong unit is off by a factor of 1,000, and so tells its unit."""

from __future__ import annotations

from typing import Final

EARLIEST_MS: Final = 631_152_000_000
"""1990-01-01. Logs of behaviours begin later."""
LATEST_MS: Final = 4_102_444_800_000
"""2100-01-01."""
UNITS_MS: Final = {"seconds": 1000.0, "milliseconds": 1.0, "microseconds": 1e-3, "nanoseconds": 1e-6}
"""Milliseconds of one unit."""


def unit_of(time: float) -> str | None:
    """The unit in which this is a time from 1990 to 2100; None: there is none. No two units fit."""
    return next((unit for unit, factor in UNITS_MS.items() if EARLIEST_MS <= time * factor < LATEST_MS), None)


def in_ms(time: int) -> int:
    """A time in ms; unchanged if its unit is not known."""
    return int(time * UNITS_MS[unit_of(time) or "milliseconds"])


def wrong_unit(time: int, right: str) -> str | None:
    """What is wrong with a time that is in another unit than `right`; None: nothing that is known."""
    unit = unit_of(time)
    if time < 0:
        return f"{time} is before 1970: give the time in {right} since the epoch"
    return None if unit in (None, right) else f"{time} is a time in {unit}: give it in {right} since the epoch"
