"""What a pre-infer worker does with a job, by the time that it has. Pure: times are µs of one clock."""

from __future__ import annotations

import enum
import threading
from collections import deque
from typing import Final

FIRST_FACTOR: Final = 2.0
MOST_REMEMBERED: Final = 64
IDLE_US: Final = 1_000_000
"""A worker that was interrupted once may have no time for any job. Each time that none has ended for so long, it
forgets the slowest eighth.
"""
MOST_TRIES: Final = 2
"""So many times a job is offered to workers. A job that came back once has found none with time for it."""


class Verdict(enum.StrEnum):
    """What becomes of a job."""

    ACCEPT = "accepted"
    RELEASE = "released"
    """This worker has no time for it; another one may have."""
    PASS_ON = "passed_on"
    """No pre-infer worker has time for it; its owner may have."""
    REJECT = "rejected"
    """No pre-infer worker can end it in time."""


def decide(now_us: float, due_us: float, needed_us: float, wait_us: float, *, may_release: bool) -> Verdict:
    """`needed_us`: until the owner has the prefix, if this worker begins now; `wait_us`: for its other jobs."""
    if now_us + needed_us > due_us:
        return Verdict.REJECT
    if now_us + wait_us + needed_us <= due_us:
        return Verdict.ACCEPT
    return Verdict.RELEASE if may_release else Verdict.PASS_ON


class Slowness:
    """Thread-safe. How much longer than predicted device time the slowest of the last jobs took: other threads, the
    copy to DRAM and the write to the store are in it. Above capacity workers take jobs that have hardly more time than
    this says, and the more it says, the newer the jobs that they take.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ratios: deque[float] = deque(maxlen=MOST_REMEMBERED)
        self._changed_us = 0

    def observe(self, predicted_us: float, took_us: float, now_us: int) -> None:
        """A job whose prefix was computed took so long, from its receipt until the store had it."""
        if predicted_us > 0:
            with self._lock:
                self._ratios.append(took_us / predicted_us)
                self._changed_us = now_us

    def factor(self, now_us: int) -> float:
        """At least 1; `FIRST_FACTOR` if no job is remembered."""
        with self._lock:
            if now_us - self._changed_us > IDLE_US:
                for slowest in sorted(self._ratios)[len(self._ratios) * 7 // 8 :]:
                    self._ratios.remove(slowest)
                self._changed_us = now_us
            return max(1.0, *self._ratios) if self._ratios else FIRST_FACTOR
