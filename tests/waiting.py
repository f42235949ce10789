"""Waits of tests for what another thread or process does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""No test waits so long but one that fails."""
FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.05


def becomes(
    is_so: Callable[[], object], within_s: float = PATIENCE_S, meanwhile: Callable[[], object] = lambda: None
) -> bool:
    """Whether it becomes so in time; `meanwhile` is called before each further look.

    It looks often at first, and then ever more rarely: looking takes time from those that are waited for.
    """
    ends_s, pause_s = time.monotonic() + within_s, FIRST_PAUSE_S
    while not is_so():
        if time.monotonic() > ends_s:
            return False
        meanwhile()
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, LONGEST_PAUSE_S)
    return True


def until(
    is_so: Callable[[], object],
    what: str,
    within_s: float = PATIENCE_S,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Fails with `what` if it does not become so."""
    assert becomes(is_so, within_s, meanwhile), f"not within {within_s:g} s: {what}"


def outcome(call: Callable[[], object]) -> object:
    """What the call returns or raises; a call that waits is a failure, and its thread ends with the process."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert found, "the call does not end"
    return found[0]
