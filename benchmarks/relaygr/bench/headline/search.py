"""The two searches, as pure functions of the results of runs. They need few runs, and can resume after an interruption.

All rates lie on one lattice (start times a power of two, then repeated geometric means), and all lengths on multiples
of a page, so that searches of different seeds and systems ask for the same runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Passes = Callable[[float], bool]


@dataclass(frozen=True, slots=True)
class Found:
    """The highest value that passed and the lowest that failed. None: none did, within the bounds of the search."""

    passed: float | None
    failed: float | None


def highest_rate(passes: Passes, start: float, resolution: float, lowest: float, highest: float) -> Found:
    """The highest rate that passes: doubled or halved from `start`, then bisected until the two ends are at most the
    factor `resolution` apart.
    """
    if resolution <= 1 or not lowest <= start <= highest:
        raise ValueError("resolution must be above 1, and start within the bounds")
    passed: float | None = None
    failed: float | None = None
    rate = start
    while passed is None or failed is None:
        if passes(rate):
            passed = rate
            rate = snapped(rate * 2)
            if rate > highest:
                return Found(passed, None)
        else:
            failed = rate
            rate = snapped(rate / 2)
            if passed is None and rate < lowest:
                return Found(None, failed)
        if passed is not None and failed is not None:
            break
    while failed / passed > resolution:
        middle = snapped((passed * failed) ** 0.5)
        if not passed < middle < failed:
            break
        if passes(middle):
            passed = middle
        else:
            failed = middle
    return Found(passed, failed)


def longest_history(passes: Passes, shortest: int, longest: int, page: int, steps: int) -> Found:
    """The longest history that passes, a multiple of `page` from `shortest` to `longest`, by at most `steps` bisections
    between the two ends.
    """
    low, high = max(1, round(shortest / page)), round(longest / page)
    if high < low:
        raise ValueError("the longest history is shorter than the shortest")
    if not passes(low * page):
        return Found(None, low * page)
    if passes(high * page):
        return Found(high * page, None)
    for _ in range(steps):
        if high - low <= 1:
            break
        # Times grow with the square of the length, so the geometric mean halves what is left to know.
        middle = min(max(round((low * high) ** 0.5), low + 1), high - 1)
        if passes(middle * page):
            low = middle
        else:
            high = middle
    return Found(low * page, high * page)


def snapped(rate: float) -> float:
    """Three digits, so that a rate is the same in a file as in the search."""
    return float(f"{rate:.3g}")
