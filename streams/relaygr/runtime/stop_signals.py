"""SIGTERM and Ctrl-C: a command whose main thread does nothing else waits for them (`StopSignals`), and for one that
works SIGTERM is made an exception, as Ctrl-C is (`exit_on_sigterm`).
"""

from __future__ import annotations

import os
import signal
from queue import Empty, SimpleQueue
from typing import Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_LOOK_S: Final = 0.5


def exit_on_sigterm() -> None:
    """From now on SIGTERM ends the process with an exception, so that context managers stop processes and remove
    folders. The main thread calls it.
    """
    signal.signal(signal.SIGTERM, _exit)


def exit_on_sigterm_if_first() -> None:
    """The kernel gives the first process of a container no SIGTERM for which it has no handler. Without this, a process
    that is stopped while it starts, or whose command has no handler, ends by SIGKILL at the end of the grace period.
    """
    if os.getpid() == 1:
        exit_on_sigterm()


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


class StopSignals:
    """Takes the signals from its creation on."""

    def __init__(self) -> None:
        """The main thread calls it."""
        # Not an event: a handler that sets one waits for ever if it interrupted `Event.wait` where that holds its lock.
        # The queue's `put` may be called in a handler.
        self._received: SimpleQueue[int] = SimpleQueue()
        for number in SIGNALS:
            signal.signal(number, lambda given, _: self._received.put(given))

    @property
    def came(self) -> bool:
        """Whether one of the signals has come and was not waited for."""
        return not self._received.empty()

    def wait(self) -> None:
        """Returns once one of the signals has come."""
        while True:
            # A signal that comes just before the main thread sleeps does not wake it: the handler runs after the sleep.
            try:
                self._received.get(timeout=_LOOK_S)
            except Empty:
                continue
            return
