"""Interpreter settings of a process that answers within milliseconds."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Final

SWITCH_INTERVAL_S: Final = 0.0005
"""How long a computing thread keeps the interpreter lock while another thread waits for the lock.

Python's default of 5 ms is too long against deadlines of tens of milliseconds.
"""


def tune_interpreter() -> None:
    """Shortens the switch interval of threads, and excludes every object that exists now from garbage collection.

    Call it once, at the end of start-up. A full collection over a heap that contains torch stops every thread for tens
    of milliseconds.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Switches garbage collection off for the block, and excludes the objects made in it from later collections.

    Use it where many long-lived objects are made at once.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
