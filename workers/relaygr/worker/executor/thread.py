"""The device thread: runs the executor, sleeps when there is nothing to do, and has a watchdog.

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


class DeviceThread:
    """Owns the executor."""

    def __init__(
        self,
        executor: Executor,
        bind_thread: Callable[[], None],
        clock: Clock,
        watchdog_s: float,
        on_death: Callable[[], None],
    ) -> None:
        """`bind_thread` makes the device the calling thread's device. `on_death` is called if the executor raises,
        which is a bug.
        """
        self._bind_thread = bind_thread
        self._executor = executor
        self._clock = clock
        self._watchdog_us = int(watchdog_s * 1e6)
        self._longest_sleep_s = min(LONGEST_SLEEP_S, watchdog_s / 4)
        self._asked_us = self._watched_since_us = clock.monotonic_us()
        self._on_death = on_death
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_stuck(self) -> bool:
        """Whether the thread made no progress for `watchdog_s`. The caller checks a few times a second."""
        now_us = self._clock.monotonic_us()
        if now_us - self._asked_us > self._watchdog_us / 2:
            self._watched_since_us = now_us
        self._asked_us = now_us
        return now_us - max(self._executor.last_progress_us, self._watched_since_us) > self._watchdog_us

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the piece of work that runs. Returns whether it ended in time."""
        self._stopping = True
        self._executor.mail_arrived.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._bind_thread()
            while not self._stopping:
                self._executor.mail_arrived.clear()
                idle_us = self._executor.step()
                if idle_us != 0:
                    longest_s = self._longest_sleep_s
                    self._executor.mail_arrived.wait(longest_s if idle_us is None else min(idle_us / 1e6, longest_s))
        except Exception:
            log.exception("the device thread failed")
            self._on_death()
