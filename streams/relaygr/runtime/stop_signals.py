"""SIGTERM and Ctrl-C, for a command whose main thread does nothing but wait for them."""

from __future__ import annotations

import signal
from queue import SimpleQueue
from typing import Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Takes the signals from its creation on."""

    def __init__(self) -> None:
        """The main thread calls it."""
        # Not an event: a handler that sets one waits for ever if it interrupted `Event.wait` where that holds its lock.
        # The queue's `put` may be called in a handler.
        self._received: SimpleQueue[int] = SimpleQueue()
        for number in SIGNALS:
            signal.signal(number, lambda given, _: self._received.put(given))

    def wait(self) -> None:
        """Returns once one of the signals has come."""
        self._received.get()
