"""Figures of the latest answers: waits in the queue, whether scores are finite numbers, and times of delivery."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Final

from relaygr.runtime.quantiles import quantile

_FEWEST_DELIVERIES: Final = 32
_DELIVERY_MEMORY_US: Final = 2_000_000
JUDGED_ANSWERS: Final = 64
"""The latest answers of a model, by which it is judged."""
DIVERGED_ANSWERS: Final = 8
"""So many of them without finite scores are the fault of the whole model."""


class QueueWaits:
    """The P99 of the latest waits of ranking requests. One thread writes; any thread reads."""

    def __init__(self, window: int = 512) -> None:
        self._waits_us: deque[int] = deque(maxlen=window)

    def observe(self, wait_us: int) -> None:
        self._waits_us.append(wait_us)

    def p99_us(self) -> int:
        """0 before the first wait."""
        waits = self._waits_us.copy()
        return quantile(waits, 0.99) if waits else 0


class FiniteScores:
    """Whether the scores of the serving model are finite numbers. The device thread writes; any thread reads.

    A few rows of a healthy model's table may be broken. Requests that read them fail, and others must not.
    """

    def __init__(self) -> None:
        self._latest: deque[bool] = deque(maxlen=JUDGED_ANSWERS)

    def begin(self) -> None:
        """Another model serves."""
        self._latest.clear()

    def note(self, *, are_finite: bool) -> None:
        """The model scored a request."""
        self._latest.append(are_finite)

    @property
    def is_diverged(self) -> bool:
        """Whether too many of the latest answers were not finite."""
        return self._latest.copy().count(False) >= DIVERGED_ANSWERS

    @property
    def is_proven(self) -> bool:
        """Whether the model has scored enough requests, and has not diverged."""
        return len(self._latest) == JUDGED_ANSWERS and not self.is_diverged


class DeliveryTimes:
    """How long results lately took from `produce` to the broker's acknowledgement. The poll thread owns it.

    A broker or a machine that is busy delays results by much more than the reply margin. The median follows it and
    ignores single stalls.
    """

    def __init__(self) -> None:
        self._latest: deque[tuple[int, int]] = deque()
        self._in_order: list[int] = []
        """The times of `_latest`, sorted: a tick must not sort them again for one new delivery."""
        self._noticed_us = 0
        self.median_us = 0
        """0 without enough results in the last two seconds."""

    def delivered(self, produced_us: int, now_us: int) -> None:
        """A report was noticed now. The delivery was after the reports that were noticed before."""
        took_us = max(0, self._noticed_us - produced_us)
        self._latest.append((now_us, took_us))
        insort(self._in_order, took_us)

    def update(self, now_us: int) -> None:
        """All reports of this time were noticed."""
        self._noticed_us, latest, in_order = now_us, self._latest, self._in_order
        while latest and (len(latest) > 2 * _FEWEST_DELIVERIES or now_us - latest[0][0] > _DELIVERY_MEMORY_US):
            del in_order[bisect_left(in_order, latest.popleft()[1])]
        self.median_us = in_order[len(in_order) // 2] if len(in_order) >= _FEWEST_DELIVERIES else 0
