"""The exit codes of a worker process, for supervisors and operators."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """The exit code of `relaygr worker`."""

    DONE = 0
    FAILED = 1
    FENCED = 3
    """Another process took over the worker id: this process must not be started again."""
    STUCK = 4
    """The device made no progress."""
