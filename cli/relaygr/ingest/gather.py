"""The rows of a log, from any layout, gathered and sorted into one history for each user.

`Rows` takes columns of ids, times and action codes; `Rows.finish` makes `Interactions` of them. What ids, times and
codes mean is in `relaygr.ingest.reading`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from relaygr.ingest.layouts import Layout
from relaygr.runtime.errors import RelayError
from relaygr.schemas.fields import FieldError, Text
from relaygr.schemas.messages import Behaviours
from relaygr.schemas.times import EARLIEST_MS, LATEST_MS, UNITS_MS, unit_of
from relaygr.training.logs import Ties, changes, order_in_time

_SECONDS_BELOW: Final = 1e11
_MILLISECONDS_BELOW: Final = 1e14
_MICROSECONDS_BELOW: Final = 1e17
_SHOWN_BAD_LINES: Final = 5
TAKEN_AS_UTC: Final = "times without a zone are taken as UTC"

_S = TypeVar("_S", bound=np.generic)
Progress = Callable[[int], None]


_PLAIN = re.compile(r"0|-?[1-9][0-9]*")
_FLOAT = re.compile(r"(0|-?[1-9][0-9]*)\.0+")
_ROUNDED = re.compile(r"-?[0-9](\.[0-9]+)?[eE]\+[0-9]+")
_GAP: Final = "nan"
"""As programs write the gaps of a column of floats. `NA` or `null` may be a user's name, so they are ids."""
_LIKE_GAPS: Final = ("None", "null", "NULL", "NA", "N/A", "<NA>", "\\N")
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


def item_number(text: str) -> int:
    """The number of an item id of a log. Raises BadIdError."""
    name = whole_id(text)
    try:
        _ITEM_ID.unpack(name)
    except FieldError as error:
        raise BadIdError(f"item id: {error}") from error
    if not _PLAIN.fullmatch(name):
        return hashed_item(name)
    number = int(name)
    if not -_INT64 <= number < _INT64:
        raise BadIdError(f"item id {name[:40]} does not fit into 64 bits with a sign: number the items anew")
    return number


def user_name(text: str) -> str:
    """The user id of a log. Raises BadIdError."""
    name = whole_id(text)
    try:
        _USER_ID.unpack(name)
    except FieldError as error:
        raise BadIdError(f"user id: {error}") from error
    return name


def whole_id(text: str, latin1: bool = False) -> str:
    """The id without surrounding white space, and without the fraction of a whole float. Raises BadIdError."""
    name = _cleaned(text, latin1)
    if found := _FLOAT.fullmatch(name):
        if len(found[1]) > _EXACT_DIGITS or abs(int(found[1])) > _LARGEST_EXACT:
            raise BadIdError(f"id {name[:40]} is a float, whose last digits may be lost: write whole numbers")
        return found[1]
    return name


class _Index(dict[str, int]):
    """Numbers of ids by their text. `index[text]` adds an id."""

    def __init__(self, latin1: bool, has_gaps: bool = False) -> None:
        """`has_gaps`: the text `nan` is a missing value, and no id."""
        super().__init__()
        self._latin1, self._has_gaps = latin1, has_gaps
        self.float_example = ""
        """An id that was written as a float; empty: none was."""

    def _other_form(self, text: str) -> str | None:
        """The form in which the id is kept; None: this one. Raises BadIdError if it is not an id."""
        name = whole_id(text, self._latin1)
        if self._has_gaps and name == _GAP:
            raise BadIdError(f"an id is missing: {name!r}")
        if _FLOAT.fullmatch(text.strip()):
            self.float_example = self.float_example or text.strip()
        return None if name == text else name


class UserIndex(_Index):
    """User id -> position in the order of first appearance. Raises BadIdError."""

    def __init__(self, latin1: bool, has_gaps: bool = False) -> None:
        super().__init__(latin1, has_gaps)
        self.names: list[str] = []

    def __missing__(self, text: str) -> int:
        if (other := self._other_form(text)) is not None:
            place = self[text] = self[other]
            return place
        name = user_name(text)
        place = self[name] = len(self.names)
        self.names.append(name)
        return place


class ItemIndex(_Index):
    """Item id -> number. Raises BadIdError, and RelayError if two ids get one number."""

    def __init__(self, latin1: bool, has_gaps: bool = False) -> None:
        super().__init__(latin1, has_gaps)
        self._hashed: dict[int, str] = {}

    @property
    def hashed_count(self) -> int:
        """The number of items whose id is hashed."""
        return len(self._hashed)

    def __missing__(self, text: str) -> int:
        if (other_form := self._other_form(text)) is not None:
            number = self[text] = self[other_form]
            return number
        name, number = text, item_number(text)
        other = self._hashed.get(number)
        if not _PLAIN.fullmatch(name):
            other = other or (str(number) if str(number) in self else None)
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
    if not name:
        raise BadIdError("an id is empty")
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
    """Facts about a file or folder that was read."""

    path: Path
    layout: Layout
    lines: int
    """Lines that are not empty, header and bad lines included. A row whose fields have line breaks is one."""
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

    @property
    def left_out(self) -> str:
        """What is said of the bad lines where they are not listed; empty without any."""
        if not self.bad_lines:
            return ""
        first = self.bad_lines[0]
        return f"{len(self.bad_lines)} lines are left out as bad; the first is line {first.number}: {first.reason}"


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

    def repeats(self) -> int:
        """The number of rows that equal an earlier row in all columns; 0 without times."""
        if not self.report.layout.has_times:
            return 0
        users, shown = np.repeat(np.arange(len(self.users)), np.diff(self.starts)), self.behaviours
        return repeats(users, shown.timestamps_ms, shown.items, shown.actions, order=np.arange(len(users)))

    def of(self, index: int) -> Behaviours:
        """The behaviours of user `index`, a view."""
        return self.behaviours[int(self.starts[index]) : int(self.starts[index + 1])]


@dataclass(frozen=True, slots=True)
class Columns:
    numbers: Sequence[int]
    """Of the lines."""
    users: NDArray[np.int32]
    items: NDArray[np.int64]
    times: NDArray[np.float64]
    actions: NDArray[np.uint16]
    file: str = ""
    """The name of the file, of a folder."""

    def without(self, places: list[int]) -> Columns:
        kept = np.delete(np.arange(len(self.users)), places)
        return replace(
            self,
            numbers=[self.numbers[at] for at in kept.tolist()],
            users=self.users[kept],
            items=self.items[kept],
            times=self.times[kept],
            actions=self.actions[kept],
        )


@dataclass(slots=True)
class Rows:
    """The columns that were read of a log so far, and its bad lines."""

    path: Path
    layout: Layout
    limits: Limits
    users: UserIndex = field(init=False)
    items: ItemIndex = field(init=False)
    chunks: list[Columns] = field(default_factory=list)
    bad_lines: list[BadLine] = field(default_factory=list)
    lines: int = 0
    files_without_rows: int = 0
    lines_in_fields: int = 0
    """Lines that are no row, since a field in quotes goes on in them."""
    lack_zones: bool = False
    """Whether times of ISO 8601 were seen that name no zone."""

    def __post_init__(self) -> None:
        of_ids = self.layout.latin1_ids, self.layout.has_gaps
        self.users, self.items = UserIndex(*of_ids), ItemIndex(*of_ids)

    def count(self, lines: int) -> None:
        """Counts lines that are read next. Raises RelayError if there are too many."""
        self.lines += lines
        if self.lines > self.limits.max_lines:
            raise RelayError(f"{self.path} has more than {self.limits.max_lines} lines: split it by user")

    def reject(self, number: int, reason: str, file: str = "") -> None:
        """Notes a bad line. Raises RelayError if there are too many."""
        reason = f"{file}: {reason}" if file else reason
        self.bad_lines.append(BadLine(number, reason))
        if len(self.bad_lines) > self.limits.max_bad_lines:
            shown = "; ".join(f"line {bad.number}: {bad.reason}" for bad in self.bad_lines[:_SHOWN_BAD_LINES])
            raise RelayError(
                f"{self.path}: more than {self.limits.max_bad_lines} bad lines, read as {self.layout.kind} "
                f"({self.layout.because}). The first: {shown}. Correct the file or raise --max-bad-lines"
            )

    def _without_wrong_units(self) -> tuple[str, float]:
        """Rejects lines with a time in another unit than most. Returns the unit and its milliseconds."""
        times = _joined([chunk.times for chunk in self.chunks], np.dtype(np.float64))
        if self.layout.time is None or not times.size:
            return "milliseconds", 1.0
        median = float(np.median(times))
        del times
        unit = "milliseconds" if self.layout.time_is_ms else _unit(median)
        factor_ms = UNITS_MS[unit]
        if unit_of(median) not in (None, unit):
            return unit, factor_ms  # The whole file is in another unit, which is no fault of a line.
        for index, chunk in enumerate(self.chunks):
            times_ms = chunk.times * factor_ms
            odd = np.flatnonzero((times_ms < EARLIEST_MS) | (times_ms >= LATEST_MS))
            wrong = [
                at
                for at in odd.tolist()
                # Of times that fit no unit, those that no message can carry.
                if unit_of(chunk.times[at]) not in (None, unit) or times_ms[at] >= _INT64
            ]
            for at in wrong:
                found = unit_of(chunk.times[at]) or "no time"
                self.reject(chunk.numbers[at], f"timestamp is {chunk.times[at]:.0f}, {found} among {unit}", chunk.file)
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
        # Without times the order of the lines is all there is.
        ties = self.layout.map.ties if self.layout.has_times else Ties.FILE
        order = order_in_time(self.users.names, users, times_ms, items, actions, ties=ties)
        same = repeats(users, times_ms, items, actions, order=order) if self.layout.has_times else 0
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
        distinct_items = np.unique(items)
        codes, counts_of_codes = np.unique(actions, return_counts=True)
        notes = list(self.layout.notes)
        if self.layout.time is not None and not self.layout.time_is_ms and items.size:
            notes.append(f"timestamps are taken as {unit}")
        if self.lack_zones:
            notes.append(TAKEN_AS_UTC)
        for index in (self.users, self.items):
            if named := [f"`{name}`" for name in _LIKE_GAPS if name in index]:
                notes.append(f"{', '.join(named)} is read as an id: leave its lines out if it means a missing value")
            if index.float_example:
                whole = index.float_example.partition(".")[0]
                notes.append(f"ids written as floats are read as whole numbers, {index.float_example} as {whole}")
        if self.files_without_rows:
            notes.append(f"{self.files_without_rows:,} files have no rows")
        if self.lines_in_fields:
            notes.append(f"{self.lines_in_fields:,} lines go on with a field in quotes, and are no rows")
        if same:
            notes.append(f"{same:,} rows repeat another one exactly, and count like any other")
        if self.items.hashed_count:
            notes.append(f"{self.items.hashed_count} item ids are not integers and are hashed to 63 bits")
        report = ReadReport(
            path=self.path,
            layout=self.layout,
            lines=self.lines,
            interactions=int(items.size),
            users=len(names),
            items=int(distinct_items.size),
            bad_lines=tuple(sorted(self.bad_lines, key=lambda bad: bad.number)),
            first_ms=int(times_ms.min()) if times_ms.size else None,
            last_ms=int(times_ms.max()) if times_ms.size else None,
            actions=dict(zip(codes.tolist(), counts_of_codes.tolist(), strict=True)),
            time_unit=unit,
            length_percentiles=percentiles,
            notes=tuple(notes),
        )
        return Interactions(names, starts, behaviours, dict(self.items), report)


def repeats(users: NDArray[Any], times: NDArray[Any], *others: NDArray[Any], order: NDArray[np.int64]) -> int:
    """The number of rows that equal an earlier row in all columns. `order` sorts them by user and time."""
    is_first = changes(users, times, order=order)
    tied = order[~is_first | np.append(~is_first[1:], False)]  # Only rows of one user and time can be equal.
    columns = (*others, times, users)
    return int(np.count_nonzero(~changes(*columns, order=tied[np.lexsort([column[tied] for column in columns])])))


def _joined(parts: list[NDArray[_S]], dtype: np.dtype[_S]) -> NDArray[_S]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _unit(median: float) -> str:
    """The unit of most times of a file."""
    bounds = ((_SECONDS_BELOW, "seconds"), (_MILLISECONDS_BELOW, "milliseconds"), (_MICROSECONDS_BELOW, "microseconds"))
    return next((unit for below, unit in bounds if median < below), "nanoseconds")
