"""Sending what the lines of a file hold: opened, paced, shown, and the bad ones reported."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from relaygr.client import MessageRefused, QueueFull
from relaygr.publishing.json_lines import BadLines, Line, TooManyBadLines, read_lines
from relaygr.runtime.errors import RelayError

_STEP_S: Final = 0.02

T = TypeVar("T")

_console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class SendReport:
    """How many lines of one file were sent."""

    sent: int
    bad: int
    stopped: bool
    started_s: float
    """On the monotonic clock."""


def send_lines(
    stream: BinaryIO,
    send: Callable[[Line], None],
    rate: float | None,
    max_bad_lines: int,
    idle: Callable[[float], object],
    show: bool,
) -> SendReport:
    """Sends what the lines hold, at most `rate` a second; bad lines are reported and left out."""
    bad = BadLines(max_bad_lines, say)
    sent, stopped, started_s = 0, False, time.monotonic()
    slot_s = started_s
    with _progress(stream, show) as advance:
        for line in read_lines(stream):
            while (early_s := slot_s - time.monotonic()) > 0:
                idle(min(early_s, _STEP_S))
            try:
                send(line)
                sent += 1
                slot_s = max(slot_s, time.monotonic() - 1) + (1 / rate if rate else 0)
            except (ValueError, MessageRefused) as error:
                try:
                    bad.add(line.number, str(error).removeprefix(": "))
                except TooManyBadLines:
                    stopped = True
                    break
            advance(line.read_bytes)
    return SendReport(sent, bad.count, stopped, started_s)


def when_there_is_room(send: Callable[[], T], idle: Callable[[float], object]) -> T:
    """Tries until the queue takes it: it empties as messages are delivered or given up."""
    while True:
        try:
            return send()
        except QueueFull:
            idle(_STEP_S)


def wait_until(condition: Callable[[], bool], timeout_s: float, idle: Callable[[float], object]) -> None:
    """Idles until the condition holds or time runs out."""
    ends_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < ends_s:
        idle(_STEP_S)


def say(text: str) -> None:
    """Says something to the person at the terminal, above the progress bar."""
    _console.print(text, markup=False, soft_wrap=True)


@contextmanager
def opened(source: str) -> Iterator[BinaryIO]:
    """The file, or standard input for `-`. Raises RelayError if it can not be read."""
    if source == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = Path(source).open("rb")  # noqa: SIM115 - closed below; what the body raises is not ours
    except OSError as error:
        raise RelayError(f"{source} can not be read: {error.strerror}") from error
    with stream:
        yield stream


@contextmanager
def _progress(stream: BinaryIO, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar over the bytes of a file, or only their number for a pipe."""
    if not show:
        yield lambda _read_bytes: None
        return
    columns = (TextColumn("publishing"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console) as progress:
        task = progress.add_task("publishing", total=_size_bytes(stream))
        yield lambda read_bytes: progress.update(task, completed=read_bytes)


def _size_bytes(stream: BinaryIO) -> int | None:
    status = os.fstat(stream.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else None
