"""How a worker process ends, in numbers that a supervisor and an operator act on."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """The exit code of `relaygr worker`."""

    DONE = 0
    FAILED = 1
    FENCED = 3
    """Another process took over its worker id: nobody may start this one again."""
    STUCK = 4
    """Its device made no progress."""
