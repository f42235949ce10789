"""Reads a whole interaction log, of text or Parquet, into one history for each user.

* A behaviour is (item, action code, time in ms). The code of a rating is twice its stars, rounded. The code of a
  KuaiRand behaviour is a sum of bits (`layouts.KUAIRAND_BITS`). A column of actions has codes, or event names that a
  `LogMap` gives codes. Without any of these the code is 0.
* Times may be whole or decimal numbers, or texts of ISO 8601, which count as milliseconds (in UTC, unless they name a
  zone). The unit follows from the median: seconds below 1e11 (until the year 5138), milliseconds below 1e14,
  microseconds below 1e17, else nanoseconds. Columns such as `time_ms` are milliseconds. A line whose time would fit
  another unit is a bad line. A file wholly before 1990 or after tomorrow is refused.
* Several files are one log, as are those of a folder (in the order of names, numbers in them by their value, without
  names that begin with `.` or `_`, and without `lost+found`; if it has Parquet files, only these; a file without rows
  may have any columns). The behaviours of a user are ordered by time;
  those of equal time by a hash of the row, or as in the files (`LogMap.ties`). Without a column of times the order of
  the lines is that of the behaviours. Rows that repeat another one exactly count like any other, and a note says how
  many they are.
* User ids stay text. An item id that is a plain decimal integer of 64 bits stays that number. Any other item id, `007`
  included, becomes the first 63 bits of its blake2b hash, which is the same in every run and every file. If two ids get
  the same number, reading stops with RelayError.
* Programs that write a column with gaps as floats write ids such as `1193.0`, which is read as `1193`, and `nan` for
  the gaps. A line with a missing id is bad, as is one with a float whose last digits may be lost, or with an integer of
  more than 64 bits, which no message can carry. `NA` and `null` are ids, and a note names them.
* A bad line is skipped and reported with its number and the reason. After more than `Limits.max_bad_lines` of them
  reading stops with RelayError. Nothing is published then, because the whole file is read first.
* Reading takes about 70 bytes of memory a line at the peak, and the distinct ids.
  `Limits.max_lines` bounds the memory: with 100 million lines MovieLens-32M and KuaiRand-1K fit; KuaiRand-27K (322
  million lines) has to be split by user.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relaygr.ingest.gather import (
    BadIdError,
    Columns,
    Interactions,
    ItemIndex,
    Limits,
    Progress,
    Rows,
)
from relaygr.ingest.json_lines import JsonLineError
from relaygr.ingest.layouts import (
    FLAG_VALUES,
    LateFieldError,
    Layout,
    LayoutKind,
    Line,
    LineBlock,
    files_of,
    read_blocks,
    recognise_text,
)
from relaygr.ingest.log_map import (
    LARGEST_RATING,
    LARGEST_TIME,
    NO_MAP,
    LogMap,
    lacks_zone,
    lost_digits,
    rating_code,
    time_number,
)
from relaygr.ingest.parquet import PARQUET_SUFFIXES, RowBlock, count_rows, is_parquet, read_rows, recognise_parquet
from relaygr.ingest.quoted import RecordBlock, read_records
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.training.logs import Ties, order_in_time

_SINGLY: Final = 16


def read_interactions(
    path: Path, limits: Limits | None = None, on_progress: Progress | None = None, log_map: LogMap = NO_MAP
) -> Interactions:
    """All interactions of a file or folder. `on_progress` gets the number of bytes read so far.

    Raises RelayError if the layout is unknown, a file is not readable, or a limit is exceeded.
    """
    path, limits = Path(path), limits or Limits()
    rows, done_bytes = Rows(path, recognise(path, log_map), limits), 0
    for each in log_files(path):
        if path.is_dir() and not _has_rows(each):
            rows.files_without_rows += 1
            continue
        layout = recognise(each, log_map)
        reader = _Reader(each, layout, rows, each.name if path.is_dir() else "")
        for block in _blocks_of(each, layout):
            reader.take(block)
            if on_progress is not None:
                on_progress(done_bytes + block.bytes_read)
        done_bytes += each.stat().st_size
    return rows.finish()


def _blocks_of(path: Path, layout: Layout) -> Iterable[LineBlock | RecordBlock | RowBlock]:
    if layout.kind is LayoutKind.PARQUET:
        return read_rows(path, layout.keys)
    lines = read_blocks(path)
    return read_records(lines, path, layout.separator) if layout.quoted else lines


def recognise(path: Path, log_map: LogMap = NO_MAP) -> Layout:
    """The layout of a file or folder. Raises RelayError, with the first line of a text, if it is unknown."""
    files = log_files(path)
    first = next((each for each in files if _has_rows(each)), files[0])
    layout = (recognise_parquet if is_parquet(first) else recognise_text)(first, log_map)
    named = {part.partition("=")[0] for each in files for part in each.relative_to(path).parts[:-1] if "=" in part}
    if not named:
        return layout
    return replace(
        layout, notes=(*layout.notes, f"columns in the names of folders are not used: {', '.join(sorted(named))[:200]}")
    )


def log_files(path: Path) -> list[Path]:
    """The files of a folder, only those of Parquet if there are any, or the file itself, in the order of reading.

    Raises RelayError if a folder cannot be read, or is of a table whose log says which of its files count.
    """
    files = files_of(path) if path.is_dir() else []
    return [each for each in files if each.suffix.lower() in PARQUET_SUFFIXES] or files or [path]


def _has_rows(path: Path) -> bool:
    """Spark and Dask write a file for each partition: an empty one has no bytes, or no rows and columns of no type."""
    try:
        return count_rows(path) > 0 if is_parquet(path) else path.stat().st_size > 0
    except OSError:
        return True  # The reader says what is wrong.


def log_bytes(path: Path) -> int:
    """The bytes of a log on disk; 0 if it is not there."""
    return sum(each.stat().st_size for each in log_files(path) if each.is_file())


class _LogLineError(ValueError):
    """The reason why a line is not an interaction."""


_MUST_AGREE: Final = {
    "kind": "format",
    "time": "column of times",
    "rating": "column of ratings",
    "codes": "column of actions",
    "flags": "flags",
    "time_is_ms": "unit of times",
}
"""Of the layouts of a folder's files."""


class _Reader:
    """Converts the blocks of one file."""

    def __init__(self, path: Path, layout: Layout, rows: Rows, file: str) -> None:
        """`file`: the name of one of several files. Raises RelayError if it has other columns than the first one."""
        self.layout, self.rows, self._path, self._file = layout, rows, path, file
        self.header_seen = False
        first = rows.layout
        for what, said in _MUST_AGREE.items():
            own, wanted = (getattr(each, what) for each in (layout, first))
            if what == "time_is_ms" and None in (own, wanted):
                continue
            # Columns may have other places.
            if own != wanted and (what in ("kind", "flags", "time_is_ms") or None in (own, wanted)):
                raise RelayError(f"{path} differs from the first file of the folder in its {said}: give each alone.")

    def take(self, block: LineBlock | RecordBlock | RowBlock) -> None:
        numbers, lines = block.numbered()
        if isinstance(block, RecordBlock):
            self.rows.lines_in_fields += block.lines_in_fields
        self.rows.count(len(lines))
        if self.layout.has_header and not self.header_seen and lines:
            self.header_seen = True
            numbers, lines = numbers[1:], lines[1:]
        self._take(numbers, lines)

    def _take(self, numbers: Sequence[int], lines: Sequence[Line]) -> None:
        """Converts all lines at once. If that fails, converts each half, down to single lines."""
        if not lines:
            return
        try:
            self.rows.chunks.append(self._convert(numbers, lines))
            return
        except (ValueError, KeyError, csv.Error, OverflowError):
            pass
        if len(lines) > _SINGLY:
            middle = len(lines) // 2
            self._take(numbers[:middle], lines[:middle])
            self._take(numbers[middle:], lines[middle:])
            return
        for number, line in zip(numbers, lines, strict=True):
            try:
                self._explain(line)
                self.rows.chunks.append(self._convert([number], [line]))
            except LateFieldError as error:
                raise RelayError(
                    f"{self._path}: line {number}: {error}, so it would not be read. Write it in every line, or in "
                    "none."
                ) from error
            except (_LogLineError, BadIdError, JsonLineError, csv.Error) as error:
                self.rows.reject(number, str(error), self._file)

    def _convert(self, numbers: Sequence[int], lines: Sequence[Line]) -> Columns:
        """The lines as columns. Raises one of several errors if a line is bad. `_explain` finds the line and reason."""
        layout = self.layout
        columns = layout.columns(lines)
        count = len(lines)
        times = np.zeros(count)
        if layout.time is not None:
            times = _times(columns[layout.time])
            self.rows.lack_zones = self.rows.lack_zones or lacks_zone(columns[layout.time][0])
        actions = np.zeros(count, "<u2")
        if layout.rating is not None:
            ratings = np.fromiter(map(float, columns[layout.rating]), "f8", count)
            if not bool(((ratings >= 0) & (ratings <= LARGEST_RATING)).all()):
                raise _LogLineError
            actions = np.rint(ratings * 2).astype("<u2")
        elif layout.codes is not None:
            actions = np.fromiter(map(layout.map.code, columns[layout.codes]), "<u2", count)
        for column, bit in layout.flags:
            flags = np.fromiter(map(FLAG_VALUES.__getitem__, columns[column]), np.bool_, count)
            actions |= flags * np.uint16(bit)
        # Ids are added last, so that lines that fail above add none.
        items = np.fromiter(map(self.rows.items.__getitem__, columns[layout.item]), "<i8", count)
        users = np.fromiter(map(self.rows.users.__getitem__, columns[layout.user]), np.int32, count)
        return Columns(numbers, users, items, times, actions, file=self._file)

    def _explain(self, line: Line) -> None:
        """Raises _LogLineError or csv.Error with the reason if the fields of the line are wrong."""
        layout = self.layout
        fields = layout.split(line)
        if len(fields) != layout.column_count:
            raise _LogLineError(f"{len(fields)} fields, expected {layout.column_count}")
        try:
            if layout.time is not None:
                time_number(fields[layout.time])
            if layout.codes is not None:
                layout.map.code(fields[layout.codes])
            if layout.rating is not None:
                rating_code(fields[layout.rating])
        except ValueError as error:
            raise _LogLineError(str(error)) from error
        for column, _ in layout.flags:
            if fields[column] not in FLAG_VALUES:
                raise _LogLineError(f"flag is {fields[column][:40]!r}, expected 0 or 1")


def _times(texts: Sequence[str]) -> NDArray[np.float64]:
    """Raises ValueError."""
    try:
        times = np.fromiter(map(float, texts), "f8", len(texts))
    except ValueError:
        return np.fromiter(map(time_number, texts), "f8", len(texts))
    # In this form the comparison is false for NaN too.
    if not bool(((times >= 0) & (times <= LARGEST_TIME)).all()):
        raise ValueError
    # The whole text is searched first, which takes little time.
    if "+" in "".join(texts) and any(map(lost_digits, texts)):
        raise ValueError
    return times


def joined(parts: Sequence[Interactions]) -> Interactions:
    """Several logs as one, with the report of the first. Equal times are ordered as in each; the files in this order.

    Raises RelayError if two items get the same number, or if the logs differ in having times or in what codes mean.
    """
    if len(parts) == 1:
        return parts[0]
    layout = parts[0].report.layout
    for part in parts[1:]:
        other = part.report.layout
        if other.has_times != layout.has_times:
            raise RelayError("some of the files have no times: they have no place in the order of the others")
        if other.codes_are != layout.codes_are:
            raise RelayError(
                f"{parts[0].report.path} and {part.report.path} are no one log: the action codes of the first are "
                f"{layout.codes_are}, those of the other are {other.codes_are}, and one code would mean two things. "
                "Give each alone, or give both a column of actions."
            )
    # Names that are not UTF-8 are here only if their log reads them as latin-1.
    items = ItemIndex(latin1=True)
    for name in (name for part in parts for name in part.item_numbers):
        items[name]  # Adds it, and compares it with the others.
    places = {user: place for place, user in enumerate(dict.fromkeys(user for part in parts for user in part.users))}
    owners = np.concatenate(
        [np.repeat([places[user] for user in part.users], np.diff(part.starts)) for part in parts]
    ).astype(np.int64)
    behaviours = sum((part.behaviours for part in parts), Behaviours.empty())
    order = order_in_time(
        list(places), owners, behaviours.timestamps_ms, behaviours.items, behaviours.actions,
        ties=layout.map.ties if layout.has_times else Ties.FILE,
    )  # fmt: skip
    counts = np.bincount(owners, minlength=len(places))
    behaviours = Behaviours(behaviours.items[order], behaviours.actions[order], behaviours.timestamps_ms[order])
    return Interactions(
        list(places), np.concatenate(([0], np.cumsum(counts))).astype(np.int64), behaviours, dict(items),
        parts[0].report,
    )  # fmt: skip
