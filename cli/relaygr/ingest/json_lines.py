"""Reads JSON lines: one object on each line, lines of bounded length, and a limit on bad lines.

Lines are numbered from 1; empty lines are skipped. A name that occurs twice in one object, NaN and Infinity are
errors, because JSON readers interpret them differently.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, Self

from relaygr.schemas.limits import MAX_BEHAVIOURS, MAX_MESSAGE_BYTES

MAX_LINE_BYTES: Final = 4 * MAX_MESSAGE_BYTES
"""Enough for a message of the largest size with its numbers as text."""
MAX_BRACKETS: Final = 4096
"""The most opening brackets on a line, those in texts included. Ours have a dozen. An empty list takes three bytes on
the line, 64 in memory, and 0.6 us."""
MAX_NAMES: Final = 2048
"""The most names of objects on a line. Ours have a hundred. Each name takes 3 us."""
MAX_LIST_TEXTS: Final = 4 * MAX_BEHAVIOURS
"""The most names and texts of an object with lists of texts: ids, times and events of the longest history."""
_NAME: Final = re.compile(rb'"\s*:')


class JsonLineError(ValueError):
    """The line is not one JSON object. The text gives the reason."""


class TooManyBadLines(Exception):  # noqa: N818 - it ends the reading and is not a fault of the program
    """There are more bad lines than allowed."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its number, its bytes, and the number of bytes read up to its end."""

    number: int
    content: bytes
    read_bytes: int

    def parse(self) -> dict[str, Any]:
        """The object on the line. Raises JsonLineError."""
        return parse_object(self._object_text(), MAX_LIST_TEXTS)

    def parse_log_object(self) -> dict[str, Any]:
        """The same, of an object with the fields of a log."""
        return parse_log_object(self._object_text(), MAX_LIST_TEXTS)

    def _object_text(self) -> bytes:
        if len(self.content) > MAX_LINE_BYTES:
            raise JsonLineError(f"the line is longer than {MAX_LINE_BYTES} bytes")
        return self.content.rstrip()


class WrittenFloat(float):
    """A number that was written with a signed exponent, such as 1.700e+09. Its `str` is the text that was written, so
    that a reader of ids and times sees whether digits were lost.
    """

    _text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number._text = text
        return number

    def __str__(self) -> str:
        return self._text


def parse_object(content: bytes, max_texts: int = MAX_NAMES) -> dict[str, Any]:
    """The JSON object in these bytes, with at most this many names and texts. Raises JsonLineError."""
    return _parsed(content, max_texts, _DECODER)


def parse_log_object(content: bytes, max_texts: int = MAX_NAMES) -> dict[str, Any]:
    """The same, of an object with the fields of a log: numbers with a signed exponent are `WrittenFloat`."""
    return _parsed(content, max_texts, _LOG_DECODER)


def _parsed(content: bytes, max_texts: int, decoder: json.JSONDecoder) -> dict[str, Any]:
    if content.count(b"[") + content.count(b"{") > MAX_BRACKETS:
        raise JsonLineError(f"not a message: more than {MAX_BRACKETS} objects and lists")
    if (quotes := content.count(b'"')) > 2 * max_texts:
        raise JsonLineError(f"not a message: more than {max_texts} names and texts")
    if quotes > 2 * MAX_NAMES and sum(1 for _ in _NAME.finditer(content)) > MAX_NAMES:
        raise JsonLineError(f"not a message: more than {MAX_NAMES} names")
    try:
        # Windows writes a mark at the beginning of UTF-8.
        parsed = decoder.decode(content.decode("utf-8-sig"))
    except RecursionError as error:
        raise JsonLineError("nested too deeply") from error
    except UnicodeDecodeError as error:
        raise JsonLineError("not UTF-8") from error
    except json.JSONDecodeError as error:
        raise JsonLineError(f"not JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise JsonLineError(str(error).partition(";")[0]) from error
    if not isinstance(parsed, dict):
        raise JsonLineError("not a JSON object")
    return parsed


class BadLines:
    """Reports and counts bad lines up to a limit."""

    def __init__(self, limit: int, report: Callable[[str], None]) -> None:
        self._limit = limit
        self._report = report
        self.count = 0

    def add(self, number: int, reason: str) -> None:
        """Raises TooManyBadLines beyond the limit."""
        self.count += 1
        self._report(f"line {number}: {reason}")
        if self.count > self._limit:
            raise TooManyBadLines


def read_lines(stream: BinaryIO) -> Iterator[Line]:
    """The lines of a stream. Only the beginning of a line that is too long is kept."""
    number = read_bytes = 0
    while content := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        read_bytes += len(content)
        ended = content.endswith(b"\n")
        while not ended and len(content) > MAX_LINE_BYTES:
            rest = stream.readline(MAX_LINE_BYTES)
            read_bytes += len(rest)
            ended = not rest or rest.endswith(b"\n")
        if content.strip():
            yield Line(number, content, read_bytes)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice[:80]} is given twice")
    return content


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def _as_written(text: str) -> float:
    return WrittenFloat(text) if "+" in text else float(text)


# Made once, which halves the time of a short line.
_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)
_LOG_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_as_written)
