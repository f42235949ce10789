"""Reads interaction logs of Parquet as rows of texts, which `relaygr.ingest.reading` takes as lines.

* Columns are found by the names that CSV has (`relaygr.ingest.layouts`). Ids are integers, text, or floats that
  are whole. Timestamps and dates become ms; of a missing value the text is empty.
* A batch of rows is in memory at a time. The number of a row is that in its file, from 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np

from relaygr.ingest.gather import TAKEN_AS_UTC
from relaygr.ingest.layouts import Layout, LayoutKind, NamedColumns, named_columns, with_keys
from relaygr.ingest.log_map import LogMap
from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import open_regular

BATCH_ROWS: Final = 2048
"""Few, since each row has a copy of a text that the file has once: a small file may have long texts for all rows."""
PARQUET_SUFFIXES: Final = (".parquet", ".pq")
_MAGIC: Final = b"PAR1"
_BUFFER_BYTES: Final = 1 << 20
"""Of each column that is read."""
_INFINITY: Final = float("inf")
_EXACT_FLOATS: Final = {"halffloat": 2**11, "float": 2**24}
"""Up to which number small floats have all whole numbers. Of larger floats the text shows it."""


def require_pyarrow(what: str) -> None:
    """Raises RelayError that names the extra if pyarrow is not installed. `what` needs it."""
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise RelayError(f"{what} needs pyarrow, which is not installed: pip install 'relaygr[training]'.") from error


def is_parquet(file: Path) -> bool:
    try:
        with open_regular(file) as opened:
            return opened.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False  # The reader of texts says what is wrong.


def recognise_parquet(path: Path, log_map: LogMap) -> Layout:
    """The layout of a Parquet file. Raises RelayError if columns are missing or of unknown types."""
    require_pyarrow(str(path))
    with opened(path) as file:
        schema = file.schema_arrow
        found = named_columns(path, schema.names, log_map)
        _check_types(path, schema, found)
        if found.time is not None and _is_calendar(schema.types[found.time]):
            found = replace(found, time_is_ms=True)
        elif found.time is not None and _is_null(schema.types[found.time]):
            found = replace(found, time_is_ms=None)
        layout = with_keys(LayoutKind.PARQUET, found, log_map, f"a Parquet file with {found.shown}")
        if found.time is not None and _lacks_zone(schema.types[found.time]):
            layout = replace(layout, notes=(*layout.notes, TAKEN_AS_UTC))
        return layout


def count_rows(path: Path) -> int:
    """Raises RelayError if the file cannot be read."""
    require_pyarrow(str(path))
    with opened(path) as file:
        return int(file.metadata.num_rows)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows, as `LineBlock` has lines."""

    first_number: int
    rows: list[tuple[str, ...]]
    bytes_read: int
    """The share of the file's bytes up to the end of this block."""

    def numbered(self) -> tuple[range, list[tuple[str, ...]]]:
        return range(self.first_number, self.first_number + len(self.rows)), self.rows


def read_rows(path: Path, names: tuple[str, ...]) -> Iterator[RowBlock]:
    """The rows of a file, with the columns of these names. Raises RelayError if it cannot be read."""
    done = 0
    with opened(path) as file:
        size_bytes, total = path.stat().st_size, max(1, file.metadata.num_rows)
        for batch in file.iter_batches(BATCH_ROWS, columns=list(names)):
            first, done = done + 1, done + batch.num_rows
            rows = list(zip(*(_texts(batch.column(name)) for name in names), strict=True))
            yield RowBlock(first, rows, size_bytes * done // total)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The open file. Raises RelayError if it is broken, now or while it is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Old timestamps of 96 bits would overflow in nanoseconds. Without buffers the columns of a whole row group are
        # read at once, which may be those of the file.
        with pq.ParquetFile(
            path, buffer_size=_BUFFER_BYTES, pre_buffer=False, coerce_int96_timestamp_unit="ms"
        ) as file:
            yield file
    except FileNotFoundError as error:
        raise RelayError(f"{path} is gone: the folder was changed while it was read. Read it again.") from error
    # KeyError: a column that the schema has and the data has not. UnicodeDecodeError: of a name.
    except (OSError, pa.ArrowException, KeyError, UnicodeDecodeError) as error:
        raise RelayError(f"{path} is not a Parquet file that can be read: {error}. Write or copy it again.") from error


def _check_types(path: Path, schema: Any, found: NamedColumns) -> None:
    """Raises RelayError for a column of a type that it cannot have."""
    import pyarrow.types as types

    for at in found.used:
        kind = schema.types[at]
        if types.is_dictionary(kind):
            kind = kind.value_type
        if _is_null(kind):
            continue  # All its values are missing.
        fits = is_text(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
        if at == found.time:
            # Floats of 32 bits have lost two minutes of the seconds of this century.
            fits = (fits and not (types.is_float16(kind) or types.is_float32(kind))) or _is_calendar(kind)
            wanted = "timestamps, whole numbers, floats of 64 bits or text"
        elif at in dict(found.flags):
            fits, wanted = fits or types.is_boolean(kind), "true or false, or numbers"
        else:
            wanted = "numbers or text"
        if not fits:
            is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
            cure = " Write a row for each behaviour (UNNEST, EXPLODE)." if is_list else ""
            raise RelayError(f"{path}: the column {schema.names[at]} is {kind}, expected {wanted}.{cure}")


def is_text(kind: Any) -> bool:
    import pyarrow.types as types

    texts = (
        types.is_string, types.is_large_string, types.is_string_view,
        types.is_binary, types.is_large_binary, types.is_binary_view,
    )  # fmt: skip
    return any(check(kind) for check in texts)


def _is_null(kind: Any) -> bool:
    """Whether it is the type that writers give a column without any value."""
    import pyarrow.types as types

    return bool(types.is_null(kind))


def _is_calendar(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_timestamp(kind) or types.is_date(kind))


def _lacks_zone(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_timestamp(kind)) and kind.tz is None


def _texts(column: Any) -> list[str]:
    """The values of a column as CSV would have them."""
    import pyarrow as pa
    import pyarrow.types as types

    if types.is_dictionary(column.type):
        # Each text once, however long it is and however many rows have it. The place after the last is that of gaps.
        missing = len(column.dictionary)
        places = column.indices.cast(pa.int64()).fill_null(missing).to_numpy(zero_copy_only=False)
        used, at = np.unique(places, return_inverse=True)
        found = _texts(column.dictionary.take(pa.array(used[used < missing])))
        texts: list[str] = np.array([*found, ""], object)[at].tolist()
        return texts
    kind = column.type
    if types.is_floating(kind) or types.is_decimal(kind):
        exact = _EXACT_FLOATS.get(str(kind), _INFINITY)
        return [_number_text(value, exact) for value in column.to_numpy(zero_copy_only=False).tolist()]
    if _is_calendar(kind):
        # In integers: floats have no place for the nanoseconds of this century.
        column = column.cast(pa.timestamp("ms", getattr(kind, "tz", None)), safe=False).cast(pa.int64())
    elif types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif types.is_string_view(kind) or types.is_binary_view(kind):
        column = column.cast(pa.large_string() if types.is_string_view(kind) else pa.large_binary())
    if not is_text(column.type):
        column = column.cast(pa.large_string())
    values = column.cast(pa.large_binary()).fill_null(b"").to_numpy(zero_copy_only=False)
    return [value.decode("utf-8", "surrogateescape") for value in values]


def _number_text(value: float | Decimal | None, exact: float) -> str:
    """A float or decimal as text: a whole float is 1193.0, which counts as 1193 as an id."""
    if value is None or value != value:  # NaN equals nothing.
        return ""
    if isinstance(value, Decimal):  # Exact, unlike a float.
        return str(int(value)) if value == value.to_integral_value() else f"{value:f}"
    return str(value) if abs(value) <= exact else f"{value:.9e}"
