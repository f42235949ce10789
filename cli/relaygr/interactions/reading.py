"""Reads a whole interaction log into one history for each user.

* A behaviour is (item, action code, time in ms). The code of a rating is twice its stars, rounded. The code of a
  KuaiRand behaviour is a sum of bits (`layouts.KUAIRAND_BITS`). Without rating and flags the code is 0.
* Times may be whole or decimal numbers. The unit follows from the median: seconds below 1e11 (until the year 5138),
  milliseconds below 1e14, microseconds below 1e17, else nanoseconds. KuaiRand's times are milliseconds. A line whose
  time would fit another unit is a bad line. A file wholly before 1990 or after tomorrow is refused.
* Several files are one log. The behaviours of a user are ordered by time; behaviours of equal time stay in the order of
  the files.
* User ids stay text. An item id that is a plain decimal integer of 64 bits stays that number. Any other item id, `007`
  included, becomes the first 63 bits of its blake2b hash, which is the same in every run and every file. If two ids get
  the same number, reading stops with RelayError.
* Programs that write a column with gaps as floats write ids such as `1193.0`, which is read as `1193`, and `nan` or
  `NA` for the gaps. A line with a missing id is bad, as is one with a float whose last digits may be lost, or with an
  integer of more than 64 bits, which no message can carry.
* A bad line is skipped and reported with its number and the reason. After more than `Limits.max_bad_lines` of them
  reading stops with RelayError. Nothing is published then, because the whole file is read first.
* Reading takes about 70 bytes of memory a line at the peak, and the distinct ids. `Limits.max_lines` bounds the memory:
  with 100 million lines MovieLens-32M and KuaiRand-1K fit; KuaiRand-27K (322 million lines) has to be split by user.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from relaygr.interactions.layouts import Layout, LineBlock, read_blocks, recognise
from relaygr.runtime.errors import RelayError
from relaygr.schemas.fields import FieldError, Text
from relaygr.schemas.messages import Behaviours
from relaygr.schemas.times import EARLIEST_MS, LATEST_MS, UNITS_MS, unit_of

LARGEST_TIME: Final = 4e18
"""Larger times are no nanoseconds of this century."""
LARGEST_RATING: Final = 32_767
_SECONDS_BELOW: Final = 1e11
_MILLISECONDS_BELOW: Final = 1e14
_MICROSECONDS_BELOW: Final = 1e17
_FLAG: Final = {"0": False, "1": True, "0.0": False, "1.0": True, "": False}
_SHOWN_BAD_LINES: Final = 5
_SINGLY: Final = 16

_S = TypeVar("_S", bound=np.generic)
Progress = Callable[[int], None]


_PLAIN = re.compile(r"0|-?[1-9][0-9]*")
_FLOAT = re.compile(r"(0|-?[1-9][0-9]*)\.0+")
_ROUNDED = re.compile(r"-?[0-9](\.[0-9]+)?[eE]\+[0-9]+")
_MISSING: Final = frozenset({"nan", "NaN", "None", "null", "NULL", "NA", "N/A", "<NA>", "\\N"})
"""Missing values as pandas, JSON, SQL, R and MySQL write them."""
_LARGEST_EXACT: Final = 2**53
_EXACT_DIGITS: Final = 17
_USER_ID = Text(256)
_ITEM_ID = Text(4096)
_INT64: Final = 2**63


class BadIdError(ValueError):
    """A text that cannot be an id, with the reason."""


def hashed_item(text: str) -> int:
    """The number of an item id that is not a 64-bit integer: 0 to 2**63 - 1."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class _Index(dict[str, int]):
    """Numbers of ids by their text. `index[text]` adds an id."""

    def __init__(self, latin1: bool) -> None:
        super().__init__()
        self._latin1 = latin1
        self.float_example = ""
        """An id that was written as a float; empty: none was."""

    def _other_form(self, text: str) -> str | None:
        """The form in which the id is kept; None: this one. Raises BadIdError if it is not an id."""
        name = _cleaned(text, self._latin1)
        if found := _FLOAT.fullmatch(name):
            if len(found[1]) > _EXACT_DIGITS or abs(int(found[1])) > _LARGEST_EXACT:
                raise BadIdError(f"id {name[:40]} is a float, whose last digits may be lost: write whole numbers")
            self.float_example = self.float_example or name
            name = found[1]
        return None if name == text else name


class UserIndex(_Index):
    """User id -> position in the order of first appearance. Raises BadIdError."""

    def __init__(self, latin1: bool) -> None:
        super().__init__(latin1)
        self.names: list[str] = []

    def __missing__(self, text: str) -> int:
        if (other := self._other_form(text)) is not None:
            place = self[text] = self[other]
            return place
        name = text
        try:
            _USER_ID.unpack(name)
        except FieldError as error:
            raise BadIdError(f"user id: {error}") from error
        place = self[name] = len(self.names)
        self.names.append(name)
        return place


class ItemIndex(_Index):
    """Item id -> number. Raises BadIdError, and RelayError if two ids get one number."""

    def __init__(self, latin1: bool) -> None:
        super().__init__(latin1)
        self._hashed: dict[int, str] = {}

    @property
    def hashed_count(self) -> int:
        """The number of items whose id is hashed."""
        return len(self._hashed)

    def __missing__(self, text: str) -> int:
        if (other_form := self._other_form(text)) is not None:
            number = self[text] = self[other_form]
            return number
        name = text
        try:
            _ITEM_ID.unpack(name)
        except FieldError as error:
            raise BadIdError(f"item id: {error}") from error
        if _PLAIN.fullmatch(name):
            number = int(name)
            if not -_INT64 <= number < _INT64:
                raise BadIdError(f"item id {name[:40]} does not fit into 64 bits with a sign: number the items anew")
            other = self._hashed.get(number)
        else:
            number = hashed_item(name)
            other = self._hashed.get(number) or (str(number) if str(number) in self else None)
            self._hashed[number] = name
        if other is not None:
            raise RelayError(f"items {other!r} and {name!r} have the same number {number}: rename one of them")
        self[name] = number
        return number


def _cleaned(text: str, latin1: bool) -> str:
    """The id without surrounding white space. Raises BadIdError if it is not text."""
    name = text.strip()
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            if not latin1:
                raise BadIdError("an id is not UTF-8") from error
            name = name.encode("utf-8", "surrogateescape").decode("latin-1")
    if not name or name in _MISSING:
        raise BadIdError(f"an id is missing: {name!r}" if name else "an id is empty")
    if _ROUNDED.fullmatch(name):
        raise BadIdError(f"id {name[:40]} is a float, whose last digits may be lost: write whole numbers")
    return name


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest number of lines, and of bad lines."""

    max_bad_lines: int = 100
    max_lines: int = 100_000_000


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not an interaction. Lines count from 1, the header included."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReadReport:
    """Facts about a file that was read."""

    layout: Layout
    lines: int
    """Lines that are not empty, header and bad lines included."""
    interactions: int
    users: int
    items: int
    bad_lines: tuple[BadLine, ...]
    first_ms: int | None
    last_ms: int | None
    actions: dict[int, int]
    """Action code -> behaviours."""
    time_unit: str
    """Of the times in the file."""
    length_percentiles: dict[int, int]
    """Percentile (50, 90, 99, 100) -> behaviours of a user; empty without users."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Interactions:
    """One history for each user, oldest behaviour first."""

    users: list[str]
    """In the order of first appearance."""
    starts: NDArray[np.int64]
    """`behaviours[starts[i]:starts[i+1]]` are those of user i; shape [users + 1]."""
    behaviours: Behaviours
    item_numbers: dict[str, int]
    """Item id in the file -> item id in messages."""
    report: ReadReport

    def until(self, cut_ms: int) -> Interactions:
        """The behaviours up to this time, and the users who have some."""
        kept = self.behaviours.timestamps_ms <= cut_ms
        lengths = np.diff(np.concatenate(([0], np.cumsum(kept)))[self.starts])
        users = [user for user, length in zip(self.users, lengths.tolist(), strict=True) if length]
        starts = np.concatenate(([0], np.cumsum(lengths[lengths > 0]))).astype(np.int64)
        shown = self.behaviours
        behaviours = Behaviours(shown.items[kept], shown.actions[kept], shown.timestamps_ms[kept])
        return replace(self, users=users, starts=starts, behaviours=behaviours)

    def of(self, index: int) -> Behaviours:
        """The behaviours of user `index`, a view."""
        return self.behaviours[int(self.starts[index]) : int(self.starts[index + 1])]


@dataclass(frozen=True, slots=True)
class _Columns:
    numbers: Sequence[int]
    """Of the lines."""
    users: NDArray[np.int32]
    items: NDArray[np.int64]
    times: NDArray[np.float64]
    actions: NDArray[np.uint16]

    def without(self, places: list[int]) -> _Columns:
        kept = np.delete(np.arange(len(self.users)), places)
        numbers = [self.numbers[at] for at in kept.tolist()]
        return _Columns(numbers, self.users[kept], self.items[kept], self.times[kept], self.actions[kept])


def read_interactions(path: Path, limits: Limits | None = None, on_progress: Progress | None = None) -> Interactions:
    """All interactions of the file. `on_progress` gets the number of bytes read so far.

    Raises RelayError if the layout is unknown, the file is not readable, or a limit is exceeded.
    """
    path = Path(path)
    layout = recognise(path)
    reader = _Reader(path, layout, limits or Limits())
    for block in read_blocks(path):
        reader.take(block)
        if on_progress is not None:
            on_progress(block.bytes_read)
    return reader.finish()


class _LogLineError(ValueError):
    """The reason why a line is not an interaction."""


@dataclass(slots=True)
class _Reader:
    path: Path
    layout: Layout
    limits: Limits
    users: UserIndex = field(init=False)
    items: ItemIndex = field(init=False)
    chunks: list[_Columns] = field(default_factory=list)
    bad_lines: list[BadLine] = field(default_factory=list)
    lines: int = 0
    header_seen: bool = False

    def __post_init__(self) -> None:
        self.users = UserIndex(self.layout.latin1_ids)
        self.items = ItemIndex(self.layout.latin1_ids)

    def take(self, block: LineBlock) -> None:
        lines = block.lines()
        numbers: Sequence[int] = range(block.first_number, block.first_number + len(lines))
        if not all(lines) or any(map(str.isspace, lines)):
            kept = [(number, line) for number, line in zip(numbers, lines, strict=True) if line.strip()]
            numbers, lines = [number for number, _ in kept], [line for _, line in kept]
        self.lines += len(lines)
        if self.lines > self.limits.max_lines:
            raise RelayError(f"{self.path} has more than {self.limits.max_lines} lines: split it by user")
        if self.layout.has_header and not self.header_seen and lines:
            self.header_seen = True
            numbers, lines = numbers[1:], lines[1:]
        self._take(numbers, lines)

    def _take(self, numbers: Sequence[int], lines: list[str]) -> None:
        """Converts all lines at once. If that fails, converts each half, down to single lines."""
        if not lines:
            return
        try:
            self.chunks.append(self._convert(numbers, lines))
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
                self.chunks.append(self._convert([number], [line]))
            except (_LogLineError, BadIdError, csv.Error) as error:
                self._reject(number, str(error))

    def _convert(self, numbers: Sequence[int], lines: list[str]) -> _Columns:
        """The lines as columns. Raises one of several errors if a line is bad. `_explain` finds the line and reason."""
        layout = self.layout
        columns = layout.columns(lines)
        count = len(lines)
        times = np.zeros(count) if layout.time is None else np.fromiter(map(float, columns[layout.time]), "f8", count)
        # In this form the comparison is false for NaN too.
        if not bool(((times >= 0) & (times <= LARGEST_TIME)).all()):
            raise _LogLineError
        actions = np.zeros(count, "<u2")
        if layout.rating is not None:
            ratings = np.fromiter(map(float, columns[layout.rating]), "f8", count)
            if not bool(((ratings >= 0) & (ratings <= LARGEST_RATING)).all()):
                raise _LogLineError
            actions = np.rint(ratings * 2).astype("<u2")
        for column, bit in layout.flags:
            flags = np.fromiter(map(_FLAG.__getitem__, columns[column]), np.bool_, count)
            actions |= flags * np.uint16(bit)
        # Ids are added last, so that lines that fail above add none.
        items = np.fromiter(map(self.items.__getitem__, columns[layout.item]), "<i8", count)
        users = np.fromiter(map(self.users.__getitem__, columns[layout.user]), np.int32, count)
        return _Columns(numbers, users, items, times, actions)

    def _explain(self, line: str) -> None:
        """Raises _LogLineError or csv.Error with the reason if the fields of the line are wrong."""
        layout = self.layout
        fields = layout.split(line)
        if len(fields) != layout.column_count:
            raise _LogLineError(f"{len(fields)} fields, expected {layout.column_count}")
        if layout.time is not None:
            _number("timestamp", fields[layout.time], LARGEST_TIME)
        if layout.rating is not None:
            _number("rating", fields[layout.rating], LARGEST_RATING)
        for column, _ in layout.flags:
            if fields[column] not in _FLAG:
                raise _LogLineError(f"flag is {fields[column][:40]!r}, expected 0 or 1")

    def _reject(self, number: int, reason: str) -> None:
        self.bad_lines.append(BadLine(number, reason))
        if len(self.bad_lines) > self.limits.max_bad_lines:
            shown = "; ".join(f"line {bad.number}: {bad.reason}" for bad in self.bad_lines[:_SHOWN_BAD_LINES])
            raise RelayError(
                f"{self.path}: more than {self.limits.max_bad_lines} bad lines, read as {self.layout.kind} "
                f"({self.layout.because}). The first: {shown}. Correct the file or raise --max-bad-lines"
            )

    def _without_wrong_units(self) -> tuple[str, float]:
        """Rejects lines with a time in another unit than most. Returns the unit and its milliseconds."""
        if self.layout.time is None or not self.chunks:
            return "milliseconds", 1.0
        median = float(np.median(np.concatenate([chunk.times for chunk in self.chunks])))
        unit = "milliseconds" if self.layout.time_is_ms else _unit(median)
        factor_ms = UNITS_MS[unit]
        if unit_of(median) not in (None, unit):
            return unit, factor_ms  # The whole file is in another unit, which is no fault of a line.
        for index, chunk in enumerate(self.chunks):
            times_ms = chunk.times * factor_ms
            odd = np.flatnonzero((times_ms < EARLIEST_MS) | (times_ms >= LATEST_MS))
            wrong = [at for at in odd.tolist() if unit_of(chunk.times[at]) not in (None, unit)]
            for at in wrong:
                found = unit_of(chunk.times[at])
                self._reject(chunk.numbers[at], f"timestamp is {chunk.times[at]:.0f}, {found} among {unit}")
            if wrong:
                self.chunks[index] = chunk.without(wrong)
        return unit, factor_ms

    def finish(self) -> Interactions:
        unit, factor_ms = self._without_wrong_units()
        chunks, self.chunks = self.chunks, []
        users = _joined([chunk.users for chunk in chunks], np.dtype(np.int32))
        items = _joined([chunk.items for chunk in chunks], np.dtype(np.int64))
        raw_times = _joined([chunk.times for chunk in chunks], np.dtype(np.float64))
        actions = _joined([chunk.actions for chunk in chunks], np.dtype(np.uint16))
        del chunks
        times_ms = np.rint(raw_times * factor_ms).astype("<i8")
        del raw_times
        # Both sorts are stable, so equal times stay in the order of the file.
        order = np.lexsort((times_ms, users))
        counts = np.bincount(users, minlength=len(self.users.names))
        del users
        # An id that occurs only in bad lines has no behaviours.
        names = [name for name, count in zip(self.users.names, counts, strict=True) if count]
        counts = counts[counts > 0]
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        behaviours = Behaviours(items[order], actions[order], times_ms[order])
        percentiles = (
            {p: int(np.percentile(counts, p, method="inverted_cdf")) for p in (50, 90, 99, 100)} if counts.size else {}
        )
        distinct = np.unique(items)
        codes, counts_of_codes = np.unique(actions, return_counts=True)
        notes = list(self.layout.notes)
        if self.layout.time is not None and not self.layout.time_is_ms and items.size:
            notes.append(f"timestamps are taken as {unit}")
        for index in (self.users, self.items):
            if index.float_example:
                whole = index.float_example.partition(".")[0]
                notes.append(f"ids written as floats are read as whole numbers, {index.float_example} as {whole}")
        if self.items.hashed_count:
            notes.append(f"{self.items.hashed_count} item ids are not integers and are hashed to 63 bits")
        report = ReadReport(
            layout=self.layout,
            lines=self.lines,
            interactions=int(items.size),
            users=len(names),
            items=int(distinct.size),
            bad_lines=tuple(sorted(self.bad_lines, key=lambda bad: bad.number)),
            first_ms=int(times_ms.min()) if times_ms.size else None,
            last_ms=int(times_ms.max()) if times_ms.size else None,
            actions=dict(zip(codes.tolist(), counts_of_codes.tolist(), strict=True)),
            time_unit=unit,
            length_percentiles=percentiles,
            notes=tuple(notes),
        )
        return Interactions(names, starts, behaviours, dict(self.items), report)


def _number(what: str, text: str, maximum: float) -> None:
    try:
        value = float(text)
    except ValueError as error:
        raise _LogLineError(f"{what} is {text[:40]!r}, expected a number") from error
    if not 0 <= value <= maximum:
        raise _LogLineError(f"{what} is {text[:40]!r}, expected 0 to {maximum:.0f}")


def _joined(parts: list[NDArray[_S]], dtype: np.dtype[_S]) -> NDArray[_S]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _unit(median: float) -> str:
    """The unit of most times of a file."""
    bounds = ((_SECONDS_BELOW, "seconds"), (_MILLISECONDS_BELOW, "milliseconds"), (_MICROSECONDS_BELOW, "microseconds"))
    return next((unit for below, unit in bounds if median < below), "nanoseconds")


def joined(parts: Sequence[Interactions]) -> Interactions:
    """Several logs as one, in this order where times are equal. The report is that of the first log.

    Raises RelayError if two items get the same number, or if only some of the logs have times.
    """
    if len(parts) == 1:
        return parts[0]
    if len({part.report.layout.time is None for part in parts}) > 1:
        raise RelayError("some of the files have no times: they have no place in the order of the others")
    # Names that are not UTF-8 are here only if their log reads them as latin-1.
    items = ItemIndex(latin1=True)
    for name in (name for part in parts for name in part.item_numbers):
        items[name]  # Adds it, and compares it with the others.
    places = {user: place for place, user in enumerate(dict.fromkeys(user for part in parts for user in part.users))}
    owners = np.concatenate(
        [np.repeat([places[user] for user in part.users], np.diff(part.starts)) for part in parts]
    ).astype(np.int64)
    behaviours = sum((part.behaviours for part in parts), Behaviours.empty())
    order = np.lexsort((behaviours.timestamps_ms, owners))
    counts = np.bincount(owners, minlength=len(places))
    behaviours = Behaviours(behaviours.items[order], behaviours.actions[order], behaviours.timestamps_ms[order])
    return Interactions(
        list(places), np.concatenate(([0], np.cumsum(counts))).astype(np.int64), behaviours, dict(items),
        parts[0].report,
    )  # fmt: skip
