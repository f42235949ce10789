"""Estimates the offset of each worker's wall clock from ours, from the times in the results.

As NTP does (RFC 5905): with a request sent at t1 and its answer received at t4 on our clock, received at
t2 and answered at t3 on the worker's,

    offset = ((t2 - t1) + (t3 - t4)) / 2        round trip = (t4 - t1) - (t3 - t2)

and the error is at most half the round trip. A queue or a pause makes the two directions unequal, so the
estimate is the sample with the shortest round trip among the last few. If the offset is positive,
the worker's clock is ahead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from relaygr.schemas.record import record

SAMPLES_KEPT: Final = 16
# A longer round trip or a larger offset comes from a wrong message, not from a wrong clock.
MAX_ROUND_TRIP_US: Final = 60_000_000
MAX_OFFSET_US: Final = 366 * 24 * 3600 * 1_000_000


@record(frozen=True, slots=True)
class ClockOffset:
    """A worker's wall clock minus ours, with its largest possible error."""

    offset_us: int
    error_us: int


def measure(sent_us: int, received_us: int, answered_us: int, returned_us: int) -> ClockOffset | None:
    """One sample from t1, t2, t3, t4; None if they cannot be the times of one round trip."""
    round_trip_us = (returned_us - sent_us) - (answered_us - received_us)
    offset_us = ((received_us - sent_us) + (answered_us - returned_us)) // 2
    if answered_us < received_us or not 0 <= round_trip_us <= MAX_ROUND_TRIP_US or abs(offset_us) > MAX_OFFSET_US:
        return None
    return ClockOffset(offset_us, round_trip_us // 2)


@record(frozen=True, slots=True)
class Change:
    """The effect of a sample: the worker's new estimate if it changed, and the evicted worker, if any."""

    estimate: ClockOffset | None = None
    evicted: str | None = None


@dataclass(slots=True)
class _Worker:
    samples: deque[ClockOffset]
    best: ClockOffset


class ClockOffsets:
    """Estimates for at most `max_workers` workers; the least recently seen is evicted. Not thread-safe."""

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._workers: dict[str, _Worker] = {}

    def add(self, worker_id: str, sample: ClockOffset) -> Change:
        """Adds a sample of a worker."""
        worker = self._workers.pop(worker_id, None)
        evicted = None
        if worker is None:
            if len(self._workers) >= self._max_workers:
                evicted = next(iter(self._workers))
                del self._workers[evicted]
            self._workers[worker_id] = _Worker(deque((sample,), maxlen=SAMPLES_KEPT), sample)
            return Change(sample, evicted)
        # The dict is ordered by the last sample of each worker.
        self._workers[worker_id] = worker
        worker.samples.append(sample)
        before = worker.best
        if sample.error_us <= before.error_us:
            worker.best = sample
        elif before not in worker.samples:
            worker.best = min(worker.samples, key=_error_us)
        return Change(worker.best if worker.best != before else None)

    def all(self) -> dict[str, ClockOffset]:
        """The estimate of each worker, by its id: its best recent sample."""
        return {worker_id: worker.best for worker_id, worker in self._workers.items()}


def _error_us(sample: ClockOffset) -> int:
    return sample.error_us
