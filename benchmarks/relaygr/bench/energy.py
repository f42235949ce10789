"""The energy that the processors of the machine used, from the counters of Linux (RAPL)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


def read_energy_uj(folder: Path = POWERCAP) -> dict[Path, int]:
    """The counter of each processor package, in µJ. Empty where there is none or it cannot be read: virtual machines
    have none, and many systems let only root read them.
    """
    try:
        return {path: int((path / "energy_uj").read_text()) for path in sorted(folder.glob("intel-rapl:[0-9]"))}
    except (OSError, ValueError):
        return {}


def used_j(before: Mapping[Path, int], after: Mapping[Path, int]) -> float:
    """The energy between two readings. A counter that began again counts from its range. NaN without counters."""
    if not before or before.keys() != after.keys():
        return math.nan
    total_uj = 0
    for path, first in before.items():
        used = after[path] - first
        total_uj += used if used >= 0 else used + int((path / "max_energy_range_uj").read_text())
    return total_uj / 1e6
