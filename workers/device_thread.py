"""The device thread: runs the executor, sleeps when there is nothing to do, and is watched.

A device that makes no progress for `watchdog_s` with work queued is a black hole: the poll thread would
go on heartbeating, and keep the partitions. `is_stuck` says so, and the process exits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from streams.clock import Clock
from workers.executor import Executor
from workers.work import JobWork, RankingWork

log = structlog.get_logger()

LONGEST_SLEEP_S = 1.0


class DeviceThread:
    """Owns the executor. `take_*` and `call` return at once, from any thread."""

    def __init__(
        self,
        executor: Executor,
        bind_thread: Callable[[], None],
        clock: Clock,
        watchdog_s: float,
        on_death: Callable[[], None],
    ) -> None:
        """`bind_thread` makes the device the calling thread's; `on_death` is called if the executor lets an
        exception out, which is a bug.
        """
        self._bind_thread = bind_thread
        self._executor = executor
        self._clock = clock
        self._watchdog_us = int(watchdog_s * 1e6)
        self._on_death = on_death
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take_ranking(self, work: RankingWork) -> None:
        """Hands a ranking request over."""
        self.call(lambda: self._executor.submit_ranking(work))

    def take_job(self, work: JobWork) -> None:
        """Hands a pre-infer job over."""
        self.call(lambda: self._executor.submit_job(work))

    def call(self, function: Callable[[], None]) -> None:
        """Runs `function` on the device thread, before its next piece of work."""
        self._executor.post(function)

    def is_stuck(self) -> bool:
        """Whether there is work and the device has not moved for `watchdog_s`."""
        waiting = self._executor.has_mail or self._executor.has_device_work
        return waiting and self._clock.monotonic_us() - self._executor.last_progress_us > self._watchdog_us

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the piece of work that runs; whether it ended in time."""
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
                    seconds = LONGEST_SLEEP_S if idle_us is None else min(idle_us / 1e6, LONGEST_SLEEP_S)
                    self._executor.mail_arrived.wait(seconds)
        except Exception:
            log.exception("the device thread failed")
            self._on_death()
