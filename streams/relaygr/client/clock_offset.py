"""Estimates the offset of each worker's wall clock from ours, from the times in the results.

As NTP does (RFC 5905): with a request sent at t1 and its answer received at t4 on our clock, received at
t2 and answered at t3 on the worker's,

    offset = ((t2 - t1) + (t3 - t4)) / 2        round trip = (t4 - t1) - (t3 - t2)

and the error is at most half the round trip. A queue or a pause makes the two directions unequal, so the
estimate is the sample with the shortest round trip among the last few. If the offset is positive,
the worker's clock is ahead. A sample of more than `KEPT_US` ago is dropped: a clock may have been set
since, and its worker may be gone.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from relaygr.schemas.record import record

SAMPLES_KEPT: Final = 16
KEPT_US: Final = 300_000_000
# A longer round trip or a larger offset comes from a wrong message, not from a wrong clock.
MAX_ROUND_TRIP_US: Final = 60_000_000
MAX_OFFSET_US: Final = 366 * 24 * 3600 * 1_000_000


@record(frozen=True, slots=True)
class ClockOffset:
    """A worker's wall clock minus ours, with its largest possible error."""

    offset_us: int
    error_us: int

    @property
    def least_us(self) -> int:
        """How far the clocks are apart at least. Only this is measured: a slow way looks like an offset."""
        return max(0, abs(self.offset_us) - self.error_us)


def measure(sent_us: int, received_us: int, answered_us: int, returned_us: int) -> ClockOffset | None:
    """One sample from t1, t2, t3, t4; None if they cannot be the times of one round trip."""
    round_trip_us = (returned_us - sent_us) - (answered_us - received_us)
    offset_us = ((received_us - sent_us) + (answered_us - returned_us)) // 2
    if answered_us < received_us or not 0 <= round_trip_us <= MAX_ROUND_TRIP_US or abs(offset_us) > MAX_OFFSET_US:
        return None
    return ClockOffset(offset_us, round_trip_us // 2)


class ClockOffsets:
    """Estimates for at most `max_workers` workers; the least recently seen is evicted. Not thread-safe."""

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._samples: dict[str, deque[tuple[int, ClockOffset]]] = {}
        """The last ones of each worker, with their times, in the order in which the workers were heard of last."""

    def add(self, worker_id: str, sample: ClockOffset, now_us: int) -> None:
        """Adds a sample of a worker. `now_us`: on the monotonic clock."""
        samples = self._samples.pop(worker_id, None)
        if samples is None:
            samples = deque(maxlen=SAMPLES_KEPT)
            if len(self._samples) >= self._max_workers:
                del self._samples[next(iter(self._samples))]
        samples.append((now_us, sample))
        self._samples[worker_id] = samples

    def all(self, now_us: int) -> dict[str, ClockOffset]:
        """The estimate of each worker that was heard of lately, by its id: its best sample, of equals the newest."""
        for worker_id, samples in list(self._samples.items()):
            while samples and now_us - samples[0][0] > KEPT_US:
                samples.popleft()
            if not samples:
                del self._samples[worker_id]
        return {
            worker_id: min((sample for _, sample in reversed(samples)), key=_error_us)
            for worker_id, samples in self._samples.items()
        }


def _error_us(sample: ClockOffset) -> int:
    return sample.error_us
