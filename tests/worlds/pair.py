"""The process ids of a supervisor's two processes, from its page `/children`."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from relaygr.processes import read_children

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Pair:
    """The process ids of an active worker and of its standby."""

    active: int
    standby: int


def children(port: int) -> dict[str, int]:
    """Phase -> process id."""
    return {phase: child["pid"] for phase, child in read_children(port).items()}


def await_pair(port: int, timeout_s: float, but_not: Collection[int] = ()) -> Pair:
    """Waits for an active worker and a standby that are not in `but_not`. Raises TimeoutError."""
    ends_s = time.monotonic() + timeout_s
    while time.monotonic() < ends_s:
        pids = children(port)
        if pids.keys() >= {"active", "standby"} and not set(pids.values()) & set(but_not):
            return Pair(pids["active"], pids["standby"])
        time.sleep(POLL_S)
    raise TimeoutError(f"no active worker with a standby within {timeout_s:g} s: {children(port)}")
