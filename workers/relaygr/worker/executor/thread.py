"""The device thread: runs the executor, sleeps when there is nothing to do, and has a watchdog.

On the CPU the poll thread runs the executor as well, if it is free: look-ups, refusals, jobs whose prefix is cached,
and device work that is predicted to take less than `SHORT_US`, because a change of threads would take longer. It reads
messages and works in turns. So the thread that receives the messages of a small model answers most of them, also when
there are too many: two threads would wait for each other's interpreter lock, and answer half as many. The device thread
does all other work, and everything that arrives while it computes.

A device that hangs would stop all work, while the poll thread keeps sending heartbeats and keeps the partitions. The
device thread makes progress every second, even when idle; without progress for `watchdog_s` it hangs in a piece of
work. A caller checks `is_stuck` a few times a second, and then the process exits. After a long gap between two checks
the caller was stopped itself, perhaps with the whole process, so the watchdog starts again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from relaygr.runtime.clock import Clock
from relaygr.worker.executor.executor import Executor

log = structlog.get_logger()

LONGEST_SLEEP_S = 1.0
SHORT_US = 1000
"""The longest predicted work of the poll thread. Waking the device thread takes a fraction of this time."""
TURN_US = 5000
"""The longest turn of the poll thread: about as long as it takes to refuse a batch of messages."""


class DeviceThread:
    """Owns the executor, which one thread at a time may run: the one that holds the lock."""

    def __init__(
        self,
        executor: Executor,
        bind_thread: Callable[[], None],
        clock: Clock,
        watchdog_s: float,
        on_death: Callable[[], None],
        *,
        shares: bool = False,
    ) -> None:
        """`bind_thread` makes the device the calling thread's device. `on_death` is called if the executor raises,
        which is a bug. `shares`: `run_short_work` runs the executor on the calling thread.
        """
        self._shares = shares
        self._running = threading.Lock()
        self._wakes_us = 0
        self._bind_thread = bind_thread
        self._executor = executor
        self._clock = clock
        self._watchdog_us = int(watchdog_s * 1e6)
        self._longest_sleep_us = int(min(LONGEST_SLEEP_S, watchdog_s / 4) * 1e6)
        self._asked_us = self._watched_since_us = clock.monotonic_us()
        self._on_death = on_death
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def silent_us(self) -> int:
        """Time since the thread made progress. At most a second or so while it is idle."""
        return self._clock.monotonic_us() - self._executor.last_progress_us

    def is_stuck(self) -> bool:
        """Whether the thread made no progress for `watchdog_s`. The caller checks a few times a second."""
        now_us = self._clock.monotonic_us()
        if now_us - self._asked_us > self._watchdog_us / 2:
            self._watched_since_us = now_us
        self._asked_us = now_us
        return now_us - max(self._executor.last_progress_us, self._watched_since_us) > self._watchdog_us

    def run_short_work(self) -> bool:
        """Runs what was given to the executor, or wakes the device thread for it. For one thread, the poll thread.

        Returns whether short work is left, for which the caller must soon call again, or set `work_arrived`. Passes on
        an exception of the executor, which is a bug.
        """
        executor = self._executor
        # With calls that other threads posted the device thread wakes up anyway, and they may take long.
        is_here = self._shares and not self._stopping and not executor.work_arrived.is_set()
        if not is_here or not self._running.acquire(blocking=False):
            executor.work_arrived.set()
            return False
        try:
            ends_us = self._clock.monotonic_us() + TURN_US
            idle_us = executor.step(SHORT_US)
            while (now_us := self._clock.monotonic_us()) < ends_us and idle_us == 0:
                idle_us = executor.step(SHORT_US)
        finally:
            self._running.release()
        if idle_us is not None and (idle_us < 0 or 0 < idle_us < self._wakes_us - now_us):
            executor.work_arrived.set()
        return idle_us == 0

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the piece of work that runs. Returns whether it ended in time."""
        self._stopping = True
        self._executor.work_arrived.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._bind_thread()
            while not self._stopping:
                with self._running:
                    self._executor.work_arrived.clear()
                    # Read before the step, so that it is no later than the next timer.
                    self._wakes_us = self._clock.monotonic_us()
                    idle_us = self._executor.step()
                    sleep_us = self._longest_sleep_us if idle_us is None else min(idle_us, self._longest_sleep_us)
                    self._wakes_us += sleep_us
                if sleep_us:
                    self._executor.work_arrived.wait(sleep_us / 1e6)
        except Exception:
            log.exception("the device thread failed")
            self._on_death()
