"""A supervisor and its children: which of them are killed, and their process ids, from its page `/children`."""

from __future__ import annotations

import enum
import json
import time
import urllib.request
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

POLL_S = 0.05


class Killed(enum.StrEnum):
    """The processes that get kill -9."""

    ACTIVE = "active"
    SUPERVISOR = "supervisor"
    """The supervisor alone: the pair goes on."""
    PAIR = "pair"
    """The supervisor and both processes, as when a container ends."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The process ids of an active worker and of its standby."""

    active: int
    standby: int


def children(port: int) -> dict[str, int]:
    """Phase -> process id."""
    return {child["phase"]: child["pid"] for child in child_pages(port)}


def child_pages(port: int) -> list[dict[str, Any]]:
    """The children with their phase, pid and probe port."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/children", timeout=5) as answer:
        return list(json.load(answer)["children"])


def await_pair(port: int, timeout_s: float, but_not: Collection[int] = ()) -> Pair:
    """Waits for an active worker and a standby that are not in `but_not`. Raises TimeoutError."""
    ends_s = time.monotonic() + timeout_s
    while time.monotonic() < ends_s:
        pids = children(port)
        if pids.keys() >= {"active", "standby"} and not set(pids.values()) & set(but_not):
            return Pair(pids["active"], pids["standby"])
        time.sleep(POLL_S)
    raise TimeoutError(f"no active worker with a standby within {timeout_s:g} s: {children(port)}")
