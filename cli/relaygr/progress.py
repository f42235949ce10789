"""How commands show that they work: one bar at a time on standard error, which goes when its work has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from relaygr.console import plain_console


class Bars:
    """The bars of a command, one after the other."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, visible=False)

    def began(self, name: str, steps: int) -> None:
        """A new piece of work. `steps`: 0 if their number is not known."""
        self._progress.reset(self._task, description=name, total=steps or None, visible=True)

    def total(self, steps: int) -> None:
        self._progress.update(self._task, total=steps or None, visible=True)

    def stepped(self) -> None:
        self._progress.advance(self._task)

    def reached(self, done: float) -> None:
        self._progress.update(self._task, completed=done)

    def share(self, share: float, text: str) -> None:
        """The share of the work that is done, if it began with one step or a known number of them."""
        self._progress.update(self._task, completed=share, description=text)


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[Bars]:
    """`console`: None for standard error."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console or plain_console(stderr=True), transient=True) as progress:
        yield Bars(progress)
