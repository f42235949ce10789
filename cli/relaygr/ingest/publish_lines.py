"""Sends the lines of a file at a limited rate, shows the progress, and reports bad lines and outcomes of requests."""

from __future__ import annotations

import json
import os
import queue
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from relaygr.client import MessageRefused, QueueFull, RankOutcome
from relaygr.console import plain_console
from relaygr.ingest.json_lines import BadLines, Line, TooManyBadLines, read_lines
from relaygr.runtime.errors import RelayError
from relaygr.schemas.json_messages import to_json
from relaygr.schemas.messages import RankingRequest

_STEP_S: Final = 0.02

T = TypeVar("T")

_console = plain_console(stderr=True)


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
    """Sends each line, at most `rate` a second. Bad lines are reported and skipped."""
    bad = BadLines(max_bad_lines, print_line)
    sent, stopped, started_s = 0, False, time.monotonic()
    slot_s = started_s
    with _progress(stream, show) as advance:
        for line in read_lines(stream):
            while (early_s := slot_s - time.monotonic()) > 0:
                idle(min(early_s, _STEP_S))
            try:
                send(line)
                sent += 1
                now_s = time.monotonic()
                # A delay of up to a second is caught up with; what the first line had to wait for is not a delay.
                slot_s = (now_s if sent == 1 else max(slot_s, now_s - 1)) + (1 / rate if rate else 0)
            except (ValueError, MessageRefused) as error:
                try:
                    bad.add(line.number, str(error).removeprefix(": "))
                except TooManyBadLines:
                    stopped = True
                    break
            advance(line.read_bytes)
    return SendReport(sent, bad.count, stopped, started_s)


def when_there_is_room(send: Callable[[], T], idle: Callable[[float], object]) -> T:
    """Retries while the queue is full. The queue empties as messages are delivered or expire."""
    while True:
        try:
            return send()
        except QueueFull:
            idle(_STEP_S)


def wait_until(condition: Callable[[], bool], timeout_s: float, idle: Callable[[float], object]) -> None:
    """Calls `idle` until the condition holds or `timeout_s` has passed."""
    ends_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < ends_s:
        idle(_STEP_S)


def print_line(text: str) -> None:
    """Prints a line on standard error, above the progress bar."""
    _console.print(text, soft_wrap=True)


@contextmanager
def opened(source: str) -> Iterator[BinaryIO]:
    """The file, or standard input for `-`. Raises RelayError if the file cannot be read."""
    if source == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = Path(source).open("rb")  # noqa: SIM115 - closed below; errors of the body must not be caught here
    except OSError as error:
        raise RelayError(
            f"{source} cannot be read: {error.strerror}. Give a file of JSON lines, or - for standard input"
        ) from error
    with stream:
        yield stream


@contextmanager
def _progress(stream: BinaryIO, show: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar over the bytes of a file; for a pipe, their number only."""
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


class Outcomes:
    """Prints and counts outcomes in a thread of its own. Limits the requests that are open or not printed yet.

    So it can print an outcome while the main thread waits for the next line of a pipe, and a slow reader of the
    outcomes slows the requests down.
    """

    def __init__(self, max_in_flight: int) -> None:
        self.counts: Counter[str] = Counter()
        self._max_in_flight = max_in_flight
        self._room = threading.Semaphore(max_in_flight)
        self._ended: queue.SimpleQueue[tuple[int, str, RankOutcome] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._print, name="relaygr-outcomes", daemon=True)

    def follow(self, line: int, request: RankingRequest, submit: Callable[[], Future[RankOutcome]]) -> None:
        """Waits until there is room for another request, and submits it. Its outcome will be printed."""
        self._room.acquire()
        try:
            future = when_there_is_room(submit, time.sleep)
        except BaseException:
            self._room.release()
            raise
        user_id = request.user_id
        # The client's thread must not wait for the reader, so it only hands the outcome over.
        future.add_done_callback(lambda done: self._ended.put((line, user_id, done.result())))

    def wait(self) -> None:
        """Waits until every outcome is printed and counted."""
        for _ in range(self._max_in_flight):
            self._room.acquire()

    def __enter__(self) -> Outcomes:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.put(None)
        self._thread.join()

    def _print(self) -> None:
        can_print = True
        while (ended := self._ended.get()) is not None:
            line, user_id, outcome = ended
            self.counts[outcome.status.value] += 1
            try:
                if can_print:
                    typer.echo(json.dumps({"line": line, "user_id": user_id, **to_json(outcome)}))
            except OSError as error:
                # The reader has exited, or its disk is full: further outcomes are counted only.
                can_print = False
                if not isinstance(error, BrokenPipeError):
                    print_line(f"outcomes are counted only: standard output cannot be written ({error.strerror})")
            self._room.release()
