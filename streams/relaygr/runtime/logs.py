"""Logging of every process: structured lines on standard error, one place for ours and the libraries'.

JSON lines where standard error is no terminal, coloured text where it is. What aiokafka, faust and uvicorn
say through `logging` takes the same way. A message that repeats is limited: in an outage a client library
says the same thing thousands of times a second, and what is worth knowing is that it does, and how often.

`structlog.get_logger()` works before `configure_logging`, with structlog's own defaults.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, TextIO

import structlog

from relaygr.runtime.settings import LogFormat, LogSettings

MAX_TRACKED_MESSAGES = 1024
"""Distinct messages that are counted at a time; the one unseen for longest is forgotten."""
_WINDOW_US = 1_000_000


@dataclass(frozen=True, slots=True)
class RepeatDecision:
    """Whether a line is written, and how many like it were held back before it."""

    admitted: bool
    suppressed_before: int


class RepeatLimiter:
    """At most so many lines of one kind in each second. Pure; not thread-safe: a handler calls it under its lock."""

    def __init__(self, per_second: int, max_tracked: int = MAX_TRACKED_MESSAGES) -> None:
        self._per_second = per_second
        self._max_tracked = max_tracked
        self._windows: OrderedDict[tuple[str, str], _RepeatWindow] = OrderedDict()

    def admit(self, key: tuple[str, str], now_us: int) -> RepeatDecision:
        """Decides on one line of the kind `key` at `now_us` of a monotonic clock."""
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
        """Kinds that went quiet with lines held back, and how many; each is told once."""
        overdue = []
        for key, window in self._windows.items():
            if window.suppressed and now_us - window.started_us >= _WINDOW_US:
                overdue.append((key, window.suppressed))
                window.restart(now_us)
        return overdue


class _RepeatWindow:
    """One kind's current second."""

    __slots__ = ("admitted", "started_us", "suppressed")

    def __init__(self, started_us: int) -> None:
        self.restart(started_us)

    def restart(self, started_us: int) -> None:
        self.started_us = started_us
        self.admitted = 0
        self.suppressed = 0


class _LimitedHandler(logging.StreamHandler[TextIO]):
    """A stream handler that holds repeated messages back and says how many they were."""

    def __init__(self, stream: TextIO, per_second: int) -> None:
        super().__init__(stream)
        self._limiter = RepeatLimiter(per_second)
        self._swept_us = 0

    def emit(self, record: logging.LogRecord) -> None:
        now_us = time.monotonic_ns() // 1000
        if now_us - self._swept_us >= _WINDOW_US:
            self._swept_us = now_us
            for (name, message), count in self._limiter.take_overdue(now_us):
                self._say_suppressed(name, message, count)
        key = (record.name, _message(record))
        admission = self._limiter.admit(key, now_us)
        if admission.suppressed_before:
            self._say_suppressed(*key, admission.suppressed_before)
        if admission.admitted:
            super().emit(record)

    def _say_suppressed(self, name: str, message: str, count: int) -> None:
        text = f"suppressed {count} more of: {message}"
        super().emit(logging.LogRecord(name, logging.WARNING, "", 0, text, None, None))


def configure_logging(settings: LogSettings | None = None, stream: TextIO | None = None) -> None:
    """Sets up structlog and `logging` for this process; a second call replaces the first.

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
        render.append(structlog.dev.ConsoleRenderer(colors=stream.isatty()))
    handler = _LimitedHandler(stream, settings.repeats_per_second)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()], processors=render
        )
    )
    root = logging.getLogger()
    for old in [other for other in root.handlers if isinstance(other, _LimitedHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(settings.level.upper())


def _message(record: logging.LogRecord) -> str:
    """What makes two lines the same: a structlog event without its values, a `logging` text without its arguments."""
    message = record.msg
    return str(message.get("event", "")) if isinstance(message, dict) else str(message)
