"""The records of CSV whose fields may be in quotes, and then have line breaks.

A record is one line, or several if a field in quotes goes on. Where quotes are not as RFC 4180 has them, it is unknown
whether the next line is a row or still text that some user wrote, such as a row of another user. So this is refused:

* a record of several lines that is broken, does not end, or is longer than `MAX_LINE_BYTES`;
* a broken line with an odd number of quotes;
* a backslash that might escape a quote (`\\"`), in a record of several lines or at the end of a field;
* a space before the quote that a field begins with, which some programs write, in a line with an odd number of quotes.

Any other broken line is a bad line, as is a last line whose quote does not end: a file that was cut off.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relaygr.ingest.layouts import MAX_LINE_BYTES, LineBlock
from relaygr.runtime.errors import RelayError

# The default of the library refuses fields above 128 KiB, though lines may be longer.
csv.field_size_limit(MAX_LINE_BYTES)
_BACKSLASH_QUOTE: Final = '\\"'
_SPACE_QUOTE: Final = ' "'
_CURE: Final = (
    "Write the log without columns of text, of which none is read; or as RFC 4180 has it: a field with a line break "
    "or a quote is in quotes, and a quote in it is written twice"
)


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Consecutive records: their fields, and the number of the first line of each."""

    numbers: Sequence[int]
    records: list[tuple[str, ...]]
    bytes_read: int
    lines_in_fields: int
    """Lines that begin no record, since a field goes on in them."""

    def numbered(self) -> tuple[Sequence[int], list[tuple[str, ...]]]:
        return self.numbers, self.records


def read_records(blocks: Iterable[LineBlock], path: Path, separator: str) -> Iterator[LineBlock | RecordBlock]:
    """The records of a file, from its lines. Lines without quotes, and broken ones, stay lines. Raises RelayError."""
    rest, number, bytes_read = "", 0, 0
    for block in blocks:
        bytes_read = block.bytes_read
        if not rest and '"' not in block.text:
            yield block
            continue
        records = _Records(path, separator, f"{rest}{block.text}\n", number if rest else block.first_number, bytes_read)
        yield from records.blocks
        rest, number = records.rest, records.rest_number
        if len(rest) > MAX_LINE_BYTES:
            raise _refused(path, number, f"a field in quotes is longer than {MAX_LINE_BYTES} bytes")
    if rest.count("\n") > 1:
        raise _refused(path, number, "a field in quotes does not end")
    if rest:
        yield LineBlock(number, rest.removesuffix("\n"), bytes_read)


class _Records:
    """The records of some whole lines."""

    def __init__(self, path: Path, separator: str, text: str, first_number: int, bytes_read: int) -> None:
        self.blocks: list[LineBlock | RecordBlock] = []
        self.rest, self.rest_number = "", 0
        """The lines of a last record that does not end in this text, and the number of the first one."""
        self._path, self._separator, self._first, self._bytes_read = path, separator, first_number, bytes_read
        self._has_backslashes = _BACKSLASH_QUOTE in text
        self._has_spaces = _SPACE_QUOTE in text
        # Only LF ends a line here; `splitlines` knows others.
        self._lines = list(io.StringIO(text, newline="\n"))
        self._numbers: list[int] = []
        self._records: list[tuple[str, ...]] = []
        self._inner = 0
        self._read()
        self._end_block()

    def _read(self) -> None:
        ended: list[bool] = []
        reader = csv.reader(itertools.chain(self._lines, _told(ended)), delimiter=self._separator, strict=True)
        start = 0
        while True:
            try:
                for fields in reader:
                    self._take(start, reader.line_num, fields)
                    start = reader.line_num
                return
            except csv.Error as error:
                if ended:
                    self.rest, self.rest_number = "".join(self._lines[start:]), self._first + start
                    return
                self._take_broken(start, reader.line_num, error)
                start = reader.line_num

    def _take(self, start: int, end: int, fields: list[str]) -> None:
        """A record of the lines from `start` to before `end`."""
        if end - start > 1:
            self._inner += end - start - 1
        elif not fields or self._lines[start].isspace():
            return
        if self._has_backslashes and (end - start > 1 or any(field.endswith("\\") for field in fields)):
            self._refuse_backslash(start, end)
        if self._has_spaces and any(field[:1] == " " and field.lstrip(" ")[:1] == '"' for field in fields):
            self._refuse_space(start, end)
        self._numbers.append(self._first + start)
        self._records.append(tuple(fields))

    def _take_broken(self, start: int, end: int, error: csv.Error) -> None:
        self._refuse_backslash(start, end)
        text = "".join(self._lines[start:end])
        if end - start > 1 or text.count('"') % 2:
            raise _refused(self._path, self._first + start, f"the quotes are broken ({error})")
        self._end_block()
        self.blocks.append(LineBlock(self._first + start, text.removesuffix("\n"), self._bytes_read))

    def _end_block(self) -> None:
        if self._numbers:
            self.blocks.append(RecordBlock(self._numbers, self._records, self._bytes_read, self._inner))
        self._numbers, self._records, self._inner = [], [], 0

    def _refuse_backslash(self, start: int, end: int) -> None:
        if any(_BACKSLASH_QUOTE in line for line in self._lines[start:end]):
            raise _refused(self._path, self._first + start, "a backslash stands before a quote, and may escape it")

    def _refuse_space(self, start: int, end: int) -> None:
        if "".join(self._lines[start:end]).count('"') % 2:
            raise _refused(self._path, self._first + start, "a space stands before a quote, and the field may go on")


def _told(ended: list[bool]) -> Iterator[str]:
    """No lines. Notes that they were asked for: all lines before them are read."""
    ended.append(True)
    yield from ()


def _refused(path: Path, number: int, what: str) -> RelayError:
    return RelayError(
        f"{path}: line {number}: {what}, so it is unknown which of the lines after it are rows, and which are text "
        f"that somebody wrote. {_CURE}."
    )
