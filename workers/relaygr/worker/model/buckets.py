"""Sizes rounded up to a few, so that forwards of nearly equal size can share one captured graph. Pure functions.

From LEAST on, each doubling has STEPS buckets of equal width: 16, 20, 24, 28, 32, 40, 48, ... A size above LEAST is
padded by less than one part in STEPS, and by a third of that over all sizes (`mean_padding`); what lies below LEAST is
padded to it, since a device computes so few rows in the same time.
"""

from __future__ import annotations

STEPS = 4
LEAST = 16


def bucket(size: int) -> int:
    """The smallest bucket that holds `size`. Raises ValueError below 0."""
    if size < 0:
        raise ValueError(f"a size of {size}")
    if size <= LEAST:
        return LEAST
    width = (1 << (size - 1).bit_length() - 1) // STEPS
    return -(-size // width) * width


def mean_padding(low: int, high: int) -> float:
    """What padding adds, as a share, when every size in [low, high] comes equally often."""
    sizes = range(low, high + 1)
    return sum(bucket(size) for size in sizes) / sum(sizes) - 1.0
