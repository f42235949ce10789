"""Waits of tests for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""No test waits so long but one that fails."""


def becomes(is_so: Callable[[], object], within_s: float = PATIENCE_S, pause_s: float = 0.005) -> bool:
    """Whether it becomes so in time."""
    ends_s = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > ends_s:
            return False
        time.sleep(pause_s)
    return True


def until(is_so: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
    """Fails with `what` if it does not become so."""
    assert becomes(is_so, within_s), f"not within {within_s:g} s: {what}"
