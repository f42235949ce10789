"""The Python interpreter of a process whose answers have deadlines of milliseconds."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Final

SWITCH_INTERVAL_S: Final = 0.0005
"""A thread that computes gives the interpreter to one that waits after so long; the default of 5 ms is a deadline."""


def tune_interpreter() -> None:
    """Once, when a process has started: its threads take shorter turns, and what start-up left is collected no more.

    A full collection over a heap with torch in it stops every thread for tens of milliseconds.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """For much that is made at once and stays: no collection looks at it, neither meanwhile nor later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
