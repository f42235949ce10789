"""Copies between the tiers, as the books ask for them and a mover does them. No bytes, no threads here.

Also the two decisions about copies: whether a reload is worth its time, and whether spills may go on.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from relaygr.worker.cache.arrival import LayerArrival
from relaygr.worker.cache.pages import PageArray
from relaygr.worker.cache.tiers import Tier

# A launch costs microseconds of the host: a long prefix is reloaded in groups of layers instead of one by one.
_MOST_LAUNCHES = 2048


class CopyPriority(enum.IntEnum):
    """Lower goes first."""

    RELOAD = 0
    SPILL = 1


@dataclass(slots=True, eq=False)
class Deadline:
    """When a copy is needed, monotonic. Who joins it while it waits may need it earlier."""

    at_us: int

    def bring_forward(self, at_us: int) -> None:
        self.at_us = min(self.at_us, at_us)


@dataclass(frozen=True, slots=True, eq=False)
class CopyRequest:
    """Pages to copy, `source_pages[i]` of one tier to `target_pages[i]` of the other; all or nothing.

    `on_done(ok)` is called once, from any thread, never under a lock of the mover. The pages stay as
    they are until then. With an `arrival` (reloads only) the copy goes layer by layer, or by `layer_groups`,
    and tells it of each.
    """

    source: Tier
    target: Tier
    source_pages: PageArray
    target_pages: PageArray
    priority: CopyPriority
    deadline: Deadline
    on_done: Callable[[bool], None]
    arrival: LayerArrival | None = None

    def size_bytes(self, page_bytes: int) -> int:
        return int(self.source_pages.size) * page_bytes


@dataclass(frozen=True, slots=True)
class CopyForecast:
    """How long a copy would wait and take, as things are."""

    wait_us: float
    copy_us: float


class Mover(Protocol):
    """Does copies. Bounded: refuses instead of blocking."""

    def submit(self, request: CopyRequest) -> bool:
        """Queues a copy; False, with `on_done` never called, when the queue is full or closed."""

    def forecast(self, size_bytes: int, priority: CopyPriority) -> CopyForecast:
        """What a copy of that size would meet if it were submitted now."""

    def close(self) -> None:
        """Ends copies under way, fails those that wait, and joins its threads. Safe to call again."""


class NoMover:
    """For a cache of one tier: refuses every copy."""

    def submit(self, request: CopyRequest) -> bool:  # noqa: ARG002
        return False

    def forecast(self, size_bytes: int, priority: CopyPriority) -> CopyForecast:  # noqa: ARG002
        return CopyForecast(0.0, 0.0)

    def close(self) -> None:
        return


def layer_groups(num_layers: int, pages: int) -> int:
    """In how many groups of layers so many pages are copied, where a copy goes layer by layer."""
    return min(num_layers, max(1, _MOST_LAUNCHES // max(1, pages)))


def reload_pays(forecast: CopyForecast, saved_us: float, groups: int = 1, rank_us: float = 0.0) -> bool:
    """Whether `wait + copy < T_full - T_hit`: else full inference is as fast. Equal is not worth a copy.

    Of a copy in `groups` of layers, beside a ranking that takes `rank_us` by itself, only that counts which the ranking
    waits for: the first group, and what each other one takes longer than its share of the ranking.
    """
    exposed_us = forecast.copy_us / groups + (1 - 1 / groups) * max(0.0, forecast.copy_us - rank_us)
    return forecast.wait_us + exposed_us < saved_us


class SpillGate:
    """Lets spills through while copies are quick: an average of the predicted wait, with hysteresis.

    Closes above `close_above_us`, opens below `open_below_us`. Raises ValueError unless
    0 < open_below_us <= close_above_us and 0 < weight <= 1.
    """

    def __init__(self, open_below_us: float, close_above_us: float, weight: float = 0.2) -> None:
        if not 0 < open_below_us <= close_above_us:
            raise ValueError(f"a gate can not close at {close_above_us} µs and open at {open_below_us} µs")
        if not 0 < weight <= 1:
            raise ValueError(f"the newest wait can not weigh {weight}")
        self._open_below_us = open_below_us
        self._close_above_us = close_above_us
        self._weight = weight
        self._average_us = 0.0
        self._is_open = True

    def admits(self, wait_us: float) -> bool:
        """Takes in the wait that a spill would meet now, and says whether it may go."""
        self._average_us += self._weight * (wait_us - self._average_us)
        if self._average_us > self._close_above_us:
            self._is_open = False
        elif self._average_us < self._open_below_us:
            self._is_open = True
        return self._is_open
