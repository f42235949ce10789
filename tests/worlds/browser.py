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
