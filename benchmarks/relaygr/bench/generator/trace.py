"""The file format of a trace. Parquet, or CSV with a header; the name's end (`.parquet`, `.csv`) decides.

One row for each impression, in the order of `retrieval_us`:

| column | type | meaning |
|---|---|---|
| `retrieval_us` | int64 | time of the retrieval event, µs since the start of the trace |
| `ranking_us` | int64 | scheduled time of the ranking request, µs since the start; not before `retrieval_us` |
| `user_id` | string | the user, 1 to 256 bytes of UTF-8 |
| `history_length` | int32 | behaviours of the history; it never falls for one user |
| `suffix` | int32 | short-term behaviours of the ranking request |
| `candidates` | int32 | candidates of the ranking request |
| `part` | int32 | 0: warm-up, which no figure counts; 1 and above: measured |

`suffix`, `candidates` and `part` may be absent: 16, 128 and 1. Other columns are ignored. A Parquet file carries the
text `relaygr.made_by` in its metadata: how the trace was made, its seed included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import MAX_BEHAVIOURS, MAX_CANDIDATES, MAX_SUFFIX_BEHAVIOURS

WARM_UP = 0
MEASURED = 1
MAX_ROWS = 2_000_000
_MADE_BY = b"relaygr.made_by"
_LONGEST_USER_ID_BYTES = 256
_NEEDED = {"retrieval_us": pa.int64(), "ranking_us": pa.int64(), "user_id": pa.string(), "history_length": pa.int32()}
_OPTIONAL = {"suffix": 16, "candidates": 128, "part": MEASURED}


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The columns of a trace. Raises RelayError if they break the rules of the format."""

    retrieval_us: NDArray[np.int64]
    ranking_us: NDArray[np.int64]
    user_id: list[str]
    history_length: NDArray[np.int32]
    suffix: NDArray[np.int32]
    candidates: NDArray[np.int32]
    part: NDArray[np.int32]
    made_by: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self) <= MAX_ROWS:
            raise RelayError(f"a trace has 1 to {MAX_ROWS:,} rows, this one has {len(self):,}")
        for name, column, least, most in (
            ("retrieval_us", self.retrieval_us, 0, None),
            ("history_length", self.history_length, 1, MAX_BEHAVIOURS),
            ("suffix", self.suffix, 0, MAX_SUFFIX_BEHAVIOURS),
            ("candidates", self.candidates, 1, MAX_CANDIDATES),
            ("part", self.part, 0, None),
        ):
            wrong = (column < least) | (column > most) if most is not None else column < least
            self._refuse(wrong, f"{name} is not {least} to {most}" if most is not None else f"{name} is below {least}")
        self._refuse(np.diff(self.retrieval_us, prepend=0) < 0, "retrieval_us is before that of the row above")
        self._refuse(self.ranking_us < self.retrieval_us, "ranking_us is before retrieval_us")
        longest: dict[str, int] = {}
        for row, (user, length) in enumerate(zip(self.user_id, self.history_length.tolist(), strict=True)):
            if not 1 <= len(user.encode()) <= _LONGEST_USER_ID_BYTES:
                raise RelayError(f"row {row + 1}: user_id has not 1 to {_LONGEST_USER_ID_BYTES} bytes")
            if length < longest.get(user, 0):
                raise RelayError(f"row {row + 1}: the history of user {user!r} became shorter")
            longest[user] = length

    def __len__(self) -> int:
        return len(self.user_id)

    @property
    def seconds(self) -> float:
        """From the start to the last ranking request."""
        return float(self.ranking_us.max()) / 1e6

    def from_zero(self) -> Trace:
        """The trace with its first event at 0."""
        first_us = self.retrieval_us[0]
        return replace(self, retrieval_us=self.retrieval_us - first_us, ranking_us=self.ranking_us - first_us)

    def first(self, seconds: float) -> Trace:
        """The rows of its first seconds. Raises RelayError if there are none."""
        count = int(np.searchsorted(self.retrieval_us, round(seconds * 1e6)))
        columns = {each.name: getattr(self, each.name)[:count] for each in fields(self) if each.name != "made_by"}
        return replace(self, **columns)

    def _refuse(self, wrong: NDArray[np.bool_], why: str) -> None:
        if wrong.any():
            raise RelayError(f"row {int(np.argmax(wrong)) + 1}: {why}")


def write_trace(trace: Trace, path: Path) -> None:
    """Writes a trace. Raises RelayError for a name that ends in neither `.parquet` nor `.csv`."""
    columns: dict[str, Any] = {
        name: pa.array(getattr(trace, name), kind)
        for name, kind in (*_NEEDED.items(), *((n, pa.int32()) for n in _OPTIONAL))
    }
    table = pa.table(columns).replace_schema_metadata({_MADE_BY: trace.made_by.encode()})
    write_table(table, path)


def write_table(table: Any, path: Path) -> None:
    """Writes a table as Parquet or CSV. The file gets its name when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        if _is_csv(path):
            pa_csv.write_csv(table, partial)
        else:
            pa_parquet.write_table(table, partial, compression="zstd")
        partial.replace(path)
    except OSError as error:
        raise RelayError(f"{path} cannot be written: {error}") from error


def read_trace(path: Path) -> Trace:
    """Raises RelayError, with the file, the column and the row, for a file that is not a trace."""
    table = read_table(path)
    missing = [name for name in _NEEDED if name not in table.column_names]
    if missing:
        raise RelayError(f"{path}: columns missing: {', '.join(missing)}; present: {', '.join(table.column_names)}")
    twice = [name for name in (*_NEEDED, *_OPTIONAL) if table.column_names.count(name) > 1]
    if twice:
        raise RelayError(f"{path}: columns more than once: {', '.join(twice)}")
    try:
        columns: dict[str, Any] = {name: table.column(name).cast(kind) for name, kind in _NEEDED.items()}
        for name, default in _OPTIONAL.items():
            present = name in table.column_names
            columns[name] = (
                table.column(name).cast(pa.int32()) if present else pa.array(np.full(len(table), default, np.int32))
            )
    except pa.ArrowException as error:
        # Also ArrowNotImplementedError: a list is cast to no number.
        raise RelayError(f"{path}: a column has the wrong type: {error}") from error
    empty = [name for name, column in columns.items() if column.null_count]
    if empty:
        raise RelayError(f"{path}: empty values in {', '.join(empty)}")
    metadata: Mapping[bytes, bytes] = table.schema.metadata or {}
    users = columns.pop("user_id").to_pylist()
    arrays = {name: column.to_numpy() for name, column in columns.items()}
    try:
        return Trace(user_id=users, made_by=metadata.get(_MADE_BY, b"").decode(errors="replace"), **arrays)
    except RelayError as error:
        raise RelayError(f"{path}: {error}") from error


def read_table(path: Path) -> Any:
    """The table of a Parquet or CSV file. Raises RelayError."""
    try:
        if _is_csv(path):
            # Ids of digits are text, too.
            options = pa_csv.ConvertOptions(column_types={"user_id": pa.string()}, strings_can_be_null=False)
            return pa_csv.read_csv(path, convert_options=options)
        return pa_parquet.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise RelayError(f"{path} cannot be read: {error}") from error


def digest_of(path: Path) -> str:
    """Eight hexadecimal digits of the file's content. Raises RelayError."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()[:8]
    except OSError as error:
        raise RelayError(f"{path} cannot be read: {error}") from error


def _is_csv(path: Path) -> bool:
    if path.suffix not in (".csv", ".parquet"):
        raise RelayError(f"{path}: the name must end in .parquet or .csv")
    return path.suffix == ".csv"
