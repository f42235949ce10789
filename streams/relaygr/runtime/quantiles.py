"""Quantiles and percentiles: the least value that this share of the values does not exceed, so always one of them.

numpy calls this rule `inverted_cdf`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

_ROUNDING: Final = 1e-9
"""0.07 of 100 values are 7, and not a little more."""
T = TypeVar("T", int, float)


def quantile(values: Iterable[T], share: float) -> T:
    """The quantile of the values. Needs at least one."""
    return quantile_of_sorted(sorted(values), share)


def quantile_of_sorted(ordered: Sequence[T], share: float) -> T:
    """The quantile of values in ascending order. Needs at least one."""
    return ordered[max(0, math.ceil(share * len(ordered) - _ROUNDING) - 1)]


def quantile_of_counts(counts: Mapping[int, int], share: float) -> int | None:
    """The quantile of numbers that occurred so many times each; None if none did."""
    left = share * sum(counts.values()) - _ROUNDING
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0 < counts[value]:
            return value
    return None
