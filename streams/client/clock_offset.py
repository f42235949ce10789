"""How far each worker's wall clock is from ours, estimated from the times that results echo.

As NTP does (RFC 5905): with a request sent at t1 and its answer received at t4 on our clock, received at
t2 and answered at t3 on the worker's,

    offset = ((t2 - t1) + (t3 - t4)) / 2        round trip = (t4 - t1) - (t3 - t2)

and the error is at most half the round trip. The two hops are rarely equal (a queue, a pause), so of the
last few samples the one with the shortest round trip is taken. Positive: the worker's clock is ahead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

SAMPLES_KEPT: Final = 16
# A round trip of minutes, or an offset of a year, is a broken message and no clock.
MAX_ROUND_TRIP_US: Final = 60_000_000
MAX_OFFSET_US: Final = 366 * 24 * 3600 * 1_000_000


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A worker's wall clock minus ours, true to within `error_us`."""

    offset_us: int
    error_us: int


def measure(sent_us: int, received_us: int, answered_us: int, returned_us: int) -> ClockOffset | None:
    """One sample from t1, t2, t3, t4; None where they can not be the times of one round trip."""
    round_trip_us = (returned_us - sent_us) - (answered_us - received_us)
    offset_us = ((received_us - sent_us) + (answered_us - returned_us)) // 2
    if answered_us < received_us or not 0 <= round_trip_us <= MAX_ROUND_TRIP_US or abs(offset_us) > MAX_OFFSET_US:
        return None
    return ClockOffset(offset_us, round_trip_us // 2)


class ClockOffsets:
    """Estimates for up to `max_workers` workers; the one longest unheard makes room. Not thread-safe."""

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._samples: dict[str, deque[ClockOffset]] = {}

    def add(self, worker_id: str, sample: ClockOffset) -> str | None:
        """Takes a sample. The id of the worker that made room for it, if one did."""
        samples = self._samples.pop(worker_id, None)
        evicted = None
        if samples is None:
            samples = deque(maxlen=SAMPLES_KEPT)
            if len(self._samples) >= self._max_workers:
                evicted = next(iter(self._samples))
                del self._samples[evicted]
        samples.append(sample)
        # Last in the dict: the one heard from last.
        self._samples[worker_id] = samples
        return evicted

    def estimate(self, worker_id: str) -> ClockOffset | None:
        """The best sample of a worker; None for one that was not heard from."""
        samples = self._samples.get(worker_id)
        return min(samples, key=lambda sample: sample.error_us) if samples else None

    def all(self) -> dict[str, ClockOffset]:
        """The estimate of every worker."""
        return {worker_id: min(samples, key=lambda s: s.error_us) for worker_id, samples in self._samples.items()}
