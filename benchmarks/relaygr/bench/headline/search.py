"""The search of both figures, as a pure function of the results of runs. It needs few runs, and can resume after an
interruption.

All searches of a figure choose from one list of values, so that those of different seeds and systems ask for the same
runs. A search that starts at the answer needs two.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Passes = Callable[[float], bool]


@dataclass(frozen=True, slots=True)
class Found:
    """The highest value that passed and the lowest that failed. None: none did."""

    passed: float | None
    failed: float | None


def values_around(
    base: float, resolution: float, lowest: float, highest: float, snap: Callable[[float], float]
) -> list[float]:
    """`base` times each power of `resolution`, from `lowest` to `highest`, rising. `snap` rounds a value."""
    if resolution <= 1 or not 0 < lowest <= base <= highest:
        raise ValueError("resolution must be above 1, and the base within the bounds")
    down, up = (math.floor(math.log(ratio) / math.log(resolution)) for ratio in (base / lowest, highest / base))
    return sorted({snap(base * resolution**power) for power in range(-down, up + 1)})


def highest_passing(passes: Passes, values: Sequence[float], start: float) -> Found:
    """The highest of the rising `values` that passes. The search begins with the last value that is not above `start`,
    goes on by one, one, two, three, five and more places until one passed and a higher one failed, and bisects what
    lies between. Most starts are a place or two away from the answer, where shorter strides than doubled ones need
    fewer runs.
    """
    place, stride, next_stride = max(0, bisect.bisect_right(values, start) - 1), 1, 1
    passed: int | None = None
    failed: int | None = None
    while passed is None or failed is None:
        if passes(values[place]):
            passed, following = place, min(place + stride, len(values) - 1)
        else:
            failed, following = place, max(place - stride, 0)
        if following == place:
            break
        place, stride, next_stride = following, next_stride, stride + next_stride
    while passed is not None and failed is not None and failed - passed > 1:
        middle = (passed + failed) // 2
        if passes(values[middle]):
            passed = middle
        else:
            failed = middle
    return Found(None if passed is None else values[passed], None if failed is None else values[failed])


def has_ended(passed: Mapping[float, bool], values: Sequence[float]) -> bool:
    """Whether a search of these rising values with these results asks for no further one: a value passed and the next
    one failed, or all failed down to the lowest, or all passed up to the highest. True for results at other values,
    such as those of another version, about which nothing can be said.
    """
    if not passed.keys() <= set(values) or not passed.get(values[0], True) or passed.get(values[-1], False):
        return True
    return any(passed.get(low, False) and not passed.get(high, True) for low, high in itertools.pairwise(values))


def snapped(rate: float) -> float:
    """Three digits, so that a rate is the same in a file as in the search."""
    return float(f"{rate:.3g}")
