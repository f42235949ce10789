"""The link to the store: how long a fetch takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

GUESS_US_PER_BYTE: Final = 1 / 128
GUESS_FIXED_US: Final = 2_000.0
_NEWEST_WEIGHS: Final = 0.2


@dataclass(slots=True)
class Link:
    """The time of a fetch. It is measured at the start, by each fetch, and again if there was none for a while: a fetch
    that does not pay is not made.
    """

    us_per_byte: float = GUESS_US_PER_BYTE
    fastest_us_per_byte: float = math.inf
    measured_us: int = 0

    def measured(self, us_per_byte: float, now_us: int) -> None:
        """The link was measured by itself."""
        self.us_per_byte, self.measured_us = us_per_byte, now_us
        self.fastest_us_per_byte = min(self.fastest_us_per_byte, us_per_byte)

    def observe(self, size_bytes: int, took_us: float, now_us: int) -> None:
        """A fetch of so many bytes took so long."""
        newest = max(0.0, took_us - GUESS_FIXED_US) / size_bytes
        self.us_per_byte += _NEWEST_WEIGHS * (newest - self.us_per_byte)
        self.measured_us = now_us

    def fetch_us(self, size_bytes: int) -> float:
        """The expected time."""
        return GUESS_FIXED_US + size_bytes * self.us_per_byte

    def least_fetch_us(self, size_bytes: int) -> float:
        """The expected time when the link is as fast as it ever was."""
        return GUESS_FIXED_US + size_bytes * min(self.fastest_us_per_byte, self.us_per_byte)
