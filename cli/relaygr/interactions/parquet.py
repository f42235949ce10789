"""Reads interaction logs of Parquet: one file, or a folder of files with the same columns.

* Columns are found by the names that CSV has (`relaygr.interactions.layouts`). Ids are integers, text, or floats that
  are whole. Times are timestamps, dates, texts of ISO 8601, or numbers, whose unit is found as in text.
* A folder is read in the order of one of text.
* A batch of rows is in memory at a time. A row without a user, an item, a time or a rating is a bad line, whose number
  is that of the row in its file, from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from relaygr.interactions.gather import (
    BadIdError,
    Columns,
    ItemIndex,
    Limits,
    Progress,
    Rows,
    UserIndex,
)
from relaygr.interactions.layouts import (
    Layout,
    LayoutKind,
    files_of,
    named_columns,
)
from relaygr.interactions.mapping import LARGEST_CODE, LARGEST_RATING, LARGEST_TIME, NO_MAP, LogMap, time_number
from relaygr.runtime.errors import RelayError

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH_ROWS: Final = 65_536
_MAGIC: Final = b"PAR1"
_SUFFIXES: Final = (".parquet", ".pq")
_DAY_MS: Final = 24 * 3600 * 1000
_NOT_A_ROW: Final = -1
_INFINITY: Final = float("inf")
_EXACT_FLOATS: Final = {"halffloat": 2**11, "float": 2**24}
"""Up to which number small floats have all whole numbers. Of larger floats the text shows it."""
_TICKS_A_MS: Final = {"ms": 1, "us": 1000, "ns": 1_000_000}


def require_pyarrow(what: str) -> None:
    """Raises RelayError that names the extra if pyarrow is not installed. `what` needs it."""
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise RelayError(f"{what} needs pyarrow, which is not installed: pip install 'relaygr[training]'.") from error


def is_parquet(path: Path) -> bool:
    """Whether this is a Parquet file, or a folder with such files."""
    if path.is_dir():
        return bool(parquet_files(path))
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False  # The reader of texts says what is wrong.


def parquet_files(path: Path) -> list[Path]:
    """The Parquet files of a folder, or the file itself, in the order of reading."""
    if not path.is_dir():
        return [path]
    return files_of(path, _SUFFIXES)


def recognise_parquet(path: Path, log_map: LogMap = NO_MAP) -> Layout:
    """The layout of a Parquet file or folder. Raises RelayError if columns are missing or of unknown types."""
    require_pyarrow(str(path))
    files = parquet_files(path)
    with _opened(files[0]) as file:
        layout = _layout(files[0], file.schema_arrow, log_map)
    named = {part.partition("=")[0] for each in files for part in each.relative_to(path).parts[:-1] if "=" in part}
    if not named:
        return layout
    return replace(
        layout, notes=(*layout.notes, f"columns in the names of folders are not used: {', '.join(sorted(named))[:200]}")
    )


def read_parquet(path: Path, layout: Layout, limits: Limits, on_progress: Progress | None = None) -> Rows:
    """The rows of all files. `on_progress` gets the number of bytes read so far. Raises RelayError."""
    rows = Rows(path, layout, limits)
    done_bytes = 0
    for each in parquet_files(path):
        with _opened(each) as file:
            reader = _FileReader(rows, file, each, is_one_of_several=path.is_dir())
            size_bytes = each.stat().st_size
            total = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(BATCH_ROWS, columns=reader.names):
                reader.take(batch)
                if on_progress is not None:
                    on_progress(done_bytes + size_bytes * reader.read // total)
        done_bytes += size_bytes
    return rows


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The open file. Raises RelayError if it is broken, now or while it is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Old timestamps of 96 bits would overflow in nanoseconds.
        with pq.ParquetFile(path, coerce_int96_timestamp_unit="ms") as file:
            yield file
    except FileNotFoundError as error:
        raise RelayError(f"{path} is gone: the folder was changed while it was read. Read it again.") from error
    except (OSError, pa.ArrowException) as error:
        raise RelayError(f"{path} is not a Parquet file that can be read: {error}. Write or copy it again.") from error


def _layout(path: Path, schema: Any, log_map: LogMap) -> Layout:
    """The layout of a file with this Arrow schema."""
    fields: Sequence[str] = schema.names
    found = named_columns(path, fields, log_map)
    time = found.time
    numbers = [("rating", found.rating), *(("flag", at) for at, _ in found.flags)]
    if not log_map.actions:
        numbers.append(("action", found.action))
    _check_types(path, schema, ("user", found.user), ("item", found.item), ("time", time), *numbers)
    return Layout(
        LayoutKind.PARQUET, "", False, len(fields), found.user, found.item, time, found.rating, found.flags,
        found.time_is_ms or (time is not None and _is_calendar(schema.types[time])),
        because=f"a Parquet file with {found.shown}", codes=found.action, map=log_map,
        notes=tuple(found.notes),
    )  # fmt: skip


def _check_types(path: Path, schema: Any, *columns: tuple[str, int | None]) -> None:
    """Raises RelayError for a column of a type that it cannot have."""
    import pyarrow.types as types

    for what, at in columns:
        if at is None:
            continue
        kind = schema.types[at]
        if types.is_dictionary(kind):
            kind = kind.value_type
        is_number = _is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
        is_text = _is_text(kind)
        if what in ("user", "item"):
            fits, wanted = is_number or is_text, "whole numbers or text"
        elif what == "time":
            fits, wanted = is_number or is_text or _is_calendar(kind), "timestamps, or numbers since the epoch"
        elif what == "action":
            fits, wanted = is_number, "whole numbers (give names a code: --actions NAME=CODE)"
        else:
            fits, wanted = is_number or types.is_boolean(kind), "numbers"
        if not fits:
            raise RelayError(f"{path}: the column {schema.names[at]} is {kind}, expected {wanted}.")


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    texts = (
        types.is_string, types.is_large_string, types.is_string_view,
        types.is_binary, types.is_large_binary, types.is_binary_view,
    )  # fmt: skip
    return any(check(kind) for check in texts)


def _is_integer(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_integer(kind))


def _is_calendar(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_timestamp(kind) or types.is_date(kind))


class _FileReader:
    """Converts the batches of one file."""

    def __init__(self, rows: Rows, file: Any, path: Path, is_one_of_several: bool) -> None:
        self.rows = rows
        self.read = 0
        self._file = path.name if is_one_of_several else ""
        self._layout = own = _layout(path, file.schema_arrow, rows.layout.map)
        wanted = rows.layout
        if own.time_is_ms != wanted.time_is_ms:
            raise RelayError(f"{path} has other columns than the first file of the folder: give one of them alone.")
        for what in ("time", "rating", "codes"):
            if (getattr(own, what) is None) != (getattr(wanted, what) is None):
                raise RelayError(f"{path} lacks a column that other files of the folder have, or has one more: {what}.")
        if [bit for _, bit in own.flags] != [bit for _, bit in wanted.flags]:
            raise RelayError(f"{path} has other flags than the first file of the folder: give one of them alone.")
        fields = file.schema_arrow.names
        columns = [own.user, own.item, own.time, own.rating, own.codes, *(column for column, _ in own.flags)]
        self.names = [fields[at] for at in dict.fromkeys(columns) if at is not None]
        self._fields = fields

    def take(self, batch: Any) -> None:
        """Adds the rows of a batch."""
        layout, count = self._layout, batch.num_rows
        self.rows.count(count)
        bad: dict[int, str] = {}

        def column(at: int) -> Any:
            return batch.column(self._fields[at])

        times = np.zeros(count) if layout.time is None else _times(column(layout.time), bad)
        actions = np.zeros(count, "<u2")
        if layout.rating is not None:
            ratings = _numbers("rating", column(layout.rating), LARGEST_RATING, bad)
            actions = np.rint(ratings * 2).astype("<u2")
        elif layout.codes is not None and layout.map.actions:
            actions = _mapped("action", column(layout.codes), layout.map.code, bad).astype("<u2")
        elif layout.codes is not None:
            codes = _numbers("action", column(layout.codes), LARGEST_CODE, bad)
            for at in np.flatnonzero(codes % 1).tolist():
                bad.setdefault(at, f"action is {codes[at]:g}, expected a whole number")
            actions = codes.astype("<u2")
        for at, bit in layout.flags:
            # A flag that is missing is not set, as in text.
            flags = _numbers(self._fields[at], column(at).cast("float64").fill_null(0.0), 1, bad)
            actions |= (flags != 0) * np.uint16(bit)
        # Ids are added last, so that rows that fail above add none.
        users = _mapped("user", column(layout.user), self._user, bad)
        items = _mapped("item", column(layout.item), self._item, bad)
        numbers: Sequence[int] = range(self.read + 1, self.read + count + 1)
        self.read += count
        chunk = Columns(numbers, users.astype(np.int32), items, times, actions, self._file)
        for at in sorted(bad):
            self.rows.reject(numbers[at], bad[at], self._file)
        self.rows.chunks.append(chunk.without(sorted(bad)) if bad else chunk)

    def _user(self, text: str) -> int:
        index: UserIndex = self.rows.users
        return index[text]

    def _item(self, text: str) -> int:
        index: ItemIndex = self.rows.items
        return index[text]


def _mapped(what: str, column: Any, number_of: Callable[[str], float], bad: dict[int, str]) -> NDArray[Any]:
    """The numbers of texts; each distinct one is looked up once. Rows that are bad already are not looked up."""
    import pyarrow as pa
    import pyarrow.types as types

    if types.is_string_view(column.type) or types.is_binary_view(column.type):  # They cannot be encoded.
        column = column.cast(pa.large_string() if types.is_string_view(column.type) else pa.large_binary())
    encoded = column.dictionary_encode()
    largest = _EXACT_FLOATS.get(str(encoded.dictionary.type), _INFINITY)
    codes = encoded.indices.fill_null(_NOT_A_ROW).to_numpy(zero_copy_only=False).astype(np.int64)
    values = encoded.dictionary
    for at in np.flatnonzero(codes == _NOT_A_ROW).tolist():
        bad.setdefault(at, f"the {what} is missing")
    codes[list(bad)] = _NOT_A_ROW
    used = np.unique(codes[codes != _NOT_A_ROW])
    numbers = np.zeros(len(values), np.float64 if what == "timestamp" else np.int64)
    reasons: dict[int, str] = {}
    for code, value in zip(used.tolist(), values.take(used).to_pylist(), strict=True):
        try:
            if largest < _INFINITY and abs(value) > largest:
                raise BadIdError(f"id {value:.0f} is a float, whose last digits may be lost: write whole numbers")
            numbers[code] = number_of(_text(value))
        except ValueError as error:
            reasons[code] = str(error)
    for at in np.flatnonzero(np.isin(codes, list(reasons))).tolist() if reasons else ():
        bad.setdefault(at, reasons[int(codes[at])])
    return np.where(codes == _NOT_A_ROW, 0, numbers[codes] if len(values) else 0)


def _text(value: object) -> str:
    """An id as text would have it: a whole float is 1193.0, which counts as 1193."""
    if value is None or value != value:  # NaN equals nothing.
        return ""
    if isinstance(value, Decimal):  # Exact, unlike a float.
        return str(int(value)) if value == value.to_integral_value() else f"{value:f}"
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _times(column: Any, bad: dict[int, str]) -> NDArray[np.float64]:
    """Times in the unit of the column; timestamps and dates in ms."""
    import pyarrow as pa
    import pyarrow.types as types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if _is_text(kind):
        return _mapped("timestamp", column, time_number, bad)
    if types.is_date(kind):
        column = column.cast(pa.date32()).cast(pa.int32()).cast(pa.int64())
        return _bounded("timestamp", column, LARGEST_TIME / _DAY_MS, bad) * _DAY_MS
    if not types.is_timestamp(kind):
        return _numbers("timestamp", column, LARGEST_TIME, bad)
    column = column.cast(pa.int64())
    if kind.unit == "s":
        return _bounded("timestamp", column, LARGEST_TIME / 1000, bad) * 1000
    # In integers: floats have no place for the nanoseconds of this century.
    import pyarrow.compute as pc

    return _bounded("timestamp", pc.divide(column, _TICKS_A_MS[kind.unit]), LARGEST_TIME, bad)


def _numbers(what: str, column: Any, maximum: float, bad: dict[int, str]) -> NDArray[np.float64]:
    """Numbers from 0 to a maximum, of any type."""
    import pyarrow as pa

    return _bounded(what, column.cast(pa.float64(), safe=False), maximum, bad)


def _bounded(what: str, column: Any, maximum: float, bad: dict[int, str]) -> NDArray[np.float64]:
    missing = column.is_null().to_numpy(zero_copy_only=False)
    values: NDArray[np.float64] = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float64)
    # In this form the comparison is false for NaN too.
    wrong = ~((values >= 0) & (values <= maximum))
    for at in np.flatnonzero(missing).tolist():
        bad.setdefault(at, f"the {what} is missing")
    for at in np.flatnonzero(wrong).tolist():
        bad.setdefault(at, f"{what} is {values[at]:g}, expected 0 to {maximum:.0f}")
    return np.where(wrong | missing, 0.0, values)
