"""Logging of every process: structured lines on standard error, for our own loggers and those of libraries.

Lines are coloured text on a terminal, broken between words, and JSON elsewhere. The loggers of faust and uvicorn write
to the same handler. The handler limits repeated messages: during an outage a client library logs the same message
thousands of times a second, so the handler writes a few of them and the number of the others.

No thread waits for the reader of a pipe, a socket or a terminal: a thread of its own writes the lines there. If the
reader does not keep up, lines are dropped, counted, and their number is written once there is room. A file is written
at once. The end of the interpreter waits a bounded time for lines on their way; before `os._exit` call `close_logs`.

`structlog.get_logger()` works before `configure_logging`, with structlog's own defaults.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import select
import stat
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import MutableMapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TextIO, cast

import structlog
from prometheus_client import Counter

from relaygr.runtime.metrics import require_metrics_folder
from relaygr.runtime.printable import printable
from relaygr.runtime.settings import LogFormat, LogSettings

MAX_TRACKED_MESSAGES = 1024
"""How many distinct messages are counted at a time. The least recently seen message is dropped first."""
MAX_WAITING_LINES = 4096
"""Lines that wait for the reader of standard error. Further ones are dropped."""
CLOSE_S = 1.0
_WINDOW_US = 1_000_000
_LAYOUT = "\n\t"
_WORD = re.compile(r"( *)([^ ]+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_INDENT = "    "

# Here, since each process of ours imports this module, and its first metric is the next line.
require_metrics_folder()
_DROPPED = Counter(
    "relaygr_log_lines_dropped_total", "Lines of the log dropped because the reader of standard error was too slow"
)


@dataclass(frozen=True, slots=True)
class RepeatDecision:
    """Whether a line is written, and how many equal lines were suppressed before it."""

    admitted: bool
    suppressed_before: int


class RepeatLimiter:
    """Admits at most `per_second` lines of one kind a second. Pure; a handler calls it under its lock."""

    def __init__(self, per_second: int, max_tracked: int = MAX_TRACKED_MESSAGES) -> None:
        self._per_second = per_second
        self._max_tracked = max_tracked
        self._windows: OrderedDict[tuple[str, str], _RepeatWindow] = OrderedDict()

    def admit(self, key: tuple[str, str], now_us: int) -> RepeatDecision:
        """Decides whether one line of the kind `key` is written at `now_us`, a monotonic time."""
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _RepeatWindow(now_us)
            if len(self._windows) > self._max_tracked:
                self._windows.popitem(last=False)
        self._windows.move_to_end(key)
        suppressed = 0
        if now_us - window.started_us >= _WINDOW_US:
            suppressed = window.suppressed
            window.restart(now_us)
        if window.admitted < self._per_second:
            window.admitted += 1
            return RepeatDecision(True, suppressed)
        window.suppressed += 1
        return RepeatDecision(False, 0)

    def take_overdue(self, now_us: int) -> list[tuple[tuple[str, str], int]]:
        """Kinds with no admitted line for a second, and their numbers of suppressed lines. Returns each kind once."""
        overdue = []
        for key, window in self._windows.items():
            if window.suppressed and now_us - window.started_us >= _WINDOW_US:
                overdue.append((key, window.suppressed))
                window.restart(now_us)
        return overdue


class _RepeatWindow:
    """The current second of one kind of line."""

    __slots__ = ("admitted", "started_us", "suppressed")

    def __init__(self, started_us: int) -> None:
        self.restart(started_us)

    def restart(self, started_us: int) -> None:
        self.started_us = started_us
        self.admitted = 0
        self.suppressed = 0


class _QueuedStream(io.TextIOBase):
    """Writes to a file descriptor on a thread of its own, which may wait for the reader. `write` never blocks."""

    def __init__(self, descriptor: int) -> None:
        # Written without the Python file, whose lock the interpreter needs at its end.
        self._descriptor = os.dup(descriptor)
        # Not a `Queue`: a signal handler may log while the same thread puts a line.
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        if self._lines.qsize() >= MAX_WAITING_LINES:
            self._dropped += 1
            _DROPPED.inc()
        else:
            self._lines.put(text.encode(errors="backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Nothing to do: also after `close`, when threads that are still alive may log."""

    @property
    def is_written(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        """Waits up to `CLOSE_S` for the lines on their way."""
        if not self.closed:
            self._lines.put(None)
            self._thread.join(CLOSE_S)
        super().close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            if self._dropped and self._lines.qsize() < MAX_WAITING_LINES // 2:
                dropped, self._dropped = self._dropped, 0
                structlog.get_logger().warning("lines of the log were dropped: its reader was too slow", lines=dropped)
        os.close(self._descriptor)

    def _write(self, line: bytes) -> None:
        # The reader has ended, or a disk is full: nobody could be told.
        with contextlib.suppress(OSError):
            while line:
                try:
                    line = line[os.write(self._descriptor, line) :]
                except BlockingIOError:
                    # Another process that has the same pipe may have made it non-blocking.
                    room = select.poll()
                    room.register(self._descriptor, select.POLLOUT)
                    room.poll()


def _may_wait(stream: TextIO) -> bool:
    """Whether a write may have to wait for a reader."""
    try:
        return not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):
        return False


class _LimitedHandler(logging.StreamHandler[TextIO]):
    """A stream handler that suppresses repeated messages and writes how many it suppressed."""

    def __init__(self, stream: TextIO, per_second: int) -> None:
        super().__init__(cast(TextIO, _QueuedStream(stream.fileno())) if _may_wait(stream) else stream)
        self._limiter = RepeatLimiter(per_second)
        self._swept_us = 0

    def emit(self, record: logging.LogRecord) -> None:
        now_us = time.monotonic_ns() // 1000
        if now_us - self._swept_us >= _WINDOW_US:
            self._swept_us = now_us
            for (name, message), count in self._limiter.take_overdue(now_us):
                self._write_suppressed(name, message, count)
        key = (record.name, _message(record))
        decision = self._limiter.admit(key, now_us)
        if decision.suppressed_before:
            self._write_suppressed(*key, decision.suppressed_before)
        if decision.admitted:
            super().emit(record)

    @property
    def is_written(self) -> bool:
        """After `close`: whether no line is left."""
        return not isinstance(self.stream, _QueuedStream) or self.stream.is_written

    def close(self) -> None:
        if isinstance(self.stream, _QueuedStream):
            self.stream.close()
        super().close()

    def _write_suppressed(self, name: str, message: str, count: int) -> None:
        text = f"suppressed {count} more of: {message}"
        super().emit(logging.LogRecord(name, logging.WARNING, "", 0, text, None, None))


def configure_logging(settings: LogSettings | None = None, stream: TextIO | None = None) -> None:
    """Configures structlog and `logging` for this process. A second call replaces the first.

    `stream` is standard error by default.
    """
    settings = settings or LogSettings()
    stream = stream or sys.stderr
    as_json = settings.format is LogFormat.JSON or (settings.format is LogFormat.AUTO and not stream.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    render: list[Any] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if as_json:
        render += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    else:
        render += [
            _printable_values,
            structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=_plain_traceback),
        ]
        if stream.isatty():
            render.append(lambda _logger, _method, text: broken_between_words(text, _columns(stream)))
    handler = _LimitedHandler(stream, settings.repeats_per_second)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()], processors=render
        )
    )
    root = logging.getLogger()
    for old in [other for other in root.handlers if isinstance(other, _LimitedHandler)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(settings.level.upper())


def _printable_values(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A terminal obeys escape sequences, and a value may be of a message of others."""
    return {name: printable(value, _LAYOUT) if isinstance(value, str) else value for name, value in event.items()}


def _plain_traceback(stream: TextIO, exc_info: Any) -> None:
    """structlog's own formatter prints every local variable, users' data among them, and takes seconds for it."""
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write(printable(text.getvalue(), _LAYOUT))


def _columns(stream: TextIO) -> int:
    """The width of the terminal; 0: not known."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:
        return 0


def broken_between_words(text: str, columns: int) -> str:
    """Breaks the first line of a coloured text as a terminal of this width (0: any) would, but between words.

    What follows is a traceback, which has lines of its own.
    """
    line, newline, rest = text.partition("\n")
    broken, width = "", 0
    for gap, word in _WORD.findall(line):
        size = len(_COLOUR.sub("", word))
        if columns and width and width + len(gap) + size > columns:
            broken, width = f"{broken}\n{_INDENT}{word}", len(_INDENT) + size
        else:
            broken, width = broken + gap + word, width + len(gap) + size
    return broken + newline + rest


def close_logs() -> bool:
    """Waits a bounded time for lines on their way. Returns whether all are written: if not, nobody reads them."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, _LimitedHandler)]
    for handler in handlers:
        handler.close()
    return all(handler.is_written for handler in handlers)


def _message(record: logging.LogRecord) -> str:
    """The part of a line that is compared: a structlog event without values, a `logging` text without arguments."""
    message = record.msg
    return str(message.get("event", "")) if isinstance(message, dict) else str(message)
