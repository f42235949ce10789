"""Loggers of modules that also run in programs of others, such as a gateway with a client.

There structlog writes to standard output, or as the program configures it. Either may raise: the reader of a pipe is
gone, a descriptor is closed. That must not end the thread that writes the line, so the line is lost.
"""

from __future__ import annotations

from contextlib import suppress

import structlog


class Logger:
    """structlog's logger of this name, whose calls do not raise."""

    def __init__(self, name: str) -> None:
        self._log = structlog.get_logger(name)

    def debug(self, event: str, **fields: object) -> None:
        self._write("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write("error", event, fields)

    def _write(self, method: str, event: str, fields: dict[str, object]) -> None:
        with suppress(Exception):
            getattr(self._log, method)(event, **fields)
