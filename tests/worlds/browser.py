"""A headless browser for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relaygr.bench import browser as headless
from relaygr.bench.browser import Browser as Browser
from tests.promised import unavailable


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """The test is skipped, or fails where a browser is promised, if there is none."""
    program = headless.find_browser()
    if program is None:
        unavailable("browser", f"none of {', '.join(headless.NAMES)} is installed")
    with headless.browser(program, folder) as tab:
        yield tab


def press(tab: Browser, key: str, code: int) -> None:
    """A key that is pressed and released. `code`: its Windows virtual-key code."""
    for kind in ("keyDown", "keyUp"):
        text = {"text": "\r" if key == "Enter" else key} if kind == "keyDown" and key != "Tab" else {}
        tab.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)
