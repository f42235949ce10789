"""Yambda, the log of listens of Yandex Music (arXiv 2505.22238), as a log that `relaygr train` reads.

The user brings the Parquet files of the folder `flat/`: `multi_event.parquet` or `listens.parquet` of any size. Only
listens are written, 97 % of the events: the label of the data set is one of listens.

| published column | becomes |
|---|---|
| `uid`, `item_id` | `user_id`, `item_id` |
| `timestamp`: seconds in steps of 5 from a beginning that is not published | `timestamp`: since `BEGINNING` |
| `event_type`: listen, like, ...; not in `listens.parquet` | events that are no listen are left out |
| `played_ratio_pct`: null but for listens, above 100 for who went back | `rating`: 5 from 50 % on, else 1 |

The task `liked` of a ranker, a rating of at least 4, is then the label `listen_plus` of the data set.

A batch of rows is in memory at a time, the listens of a row group that is being written, and a number for each user.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from relaygr.ingest.gather import Limits
from relaygr.ingest.parquet import count_rows, is_text, opened, require_pyarrow
from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import whole_file
from relaygr.training.logs import mixed

LOG_FILE: Final = "log.parquet"
BEGINNING: Final = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
"""Made up: brokers and workers refuse times of 1970."""
EVENTS: Final = ("listen", "like", "dislike", "unlike", "undislike")
LISTEN_PLUS_PCT: Final = 50
RATING: Final = 5
"""Of a listen of at least `LISTEN_PLUS_PCT`."""
LOW_RATING: Final = 1
_STEP_S: Final = 5
_LONGEST_S: Final = 2 * 366 * 86_400
"""The data are of 301 days."""
_BATCH_ROWS: Final = 65_536
_GROUP_ROWS: Final = 1 << 20
_ROLES: Final = {"uid": "integer", "item_id": "integer", "timestamp": "integer", "played_ratio_pct": "number"}
_EVENT: Final = "event_type"
_ABOUT: Final = """\
Yambda, by Yandex (arXiv 2505.22238), from {files}: the listens of {share} of the users.
rating 5 (action code 10): at least half of the track was played; rating 1 (code 2): less.
Times are seconds after {beginning:%Y-%m-%d}, a beginning that was made up; they are in steps of 5 s.
"""


@dataclass(frozen=True, slots=True)
class Converted:
    """What was read and written."""

    path: Path
    rows: int
    listens: int
    listen_plus: int
    users: int
    median: int
    longest: int
    """Listens of a user."""


def convert(
    files: Sequence[Path],
    folder: Path,
    user_share: float = 1.0,
    began: Callable[[str, int], None] = lambda _name, _steps: None,
    reached: Callable[[int], None] = lambda _rows: None,
    *,
    batch_rows: int = _BATCH_ROWS,
) -> Converted:
    """Writes `LOG_FILE` of the listens of this share of the users, the same users of every file.

    `began` and `reached` get the number of all rows, and of those read so far. Raises RelayError for a file that
    differs from what was published.
    """
    require_pyarrow("Yambda")
    path = folder / LOG_FILE
    began("reading", _rows_of(files, path, user_share))
    rows, listen_plus, lengths = 0, 0, Counter[int]()

    def kept() -> Iterator[Any]:
        nonlocal rows, listen_plus
        for file in files:
            for listens, read in _read(file, user_share, batch_rows):
                users, counts = np.unique(listens["user_id"], return_counts=True)
                lengths.update(dict(zip(users.tolist(), counts.tolist(), strict=True)))
                listen_plus += int(np.count_nonzero(listens["rating"] == RATING))
                rows += read
                yield listens
                reached(rows)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            _write(partial, kept())
            if not lengths:
                raise RelayError(
                    f"None of the {rows:,} events is a listen of a chosen user: give other files, or a larger "
                    "--user-share."
                )
        share = "all" if user_share == 1 else f"{user_share:.2%}"
        about = _ABOUT.format(files=", ".join(file.name for file in files), share=share, beginning=BEGINNING)
        (folder / "SOURCE.txt").write_text(about, encoding="utf-8")
    except OSError as error:
        raise RelayError(f"{folder} cannot be written: {error}.") from error
    counts = np.fromiter(lengths.values(), np.int64, len(lengths))
    return Converted(
        path, rows, int(counts.sum()), listen_plus, counts.size, int(np.median(counts)), int(counts.max())
    )  # fmt: skip


def _rows_of(files: Sequence[Path], path: Path, user_share: float) -> int:
    """Raises RelayError for what is no file, if the log would be one of them, or more than a training reads."""
    if missing := [str(file) for file in files if not file.is_file()]:
        raise RelayError(f"{missing[0]} is no file: give multi_event.parquet or listens.parquet of Yambda.")
    if any(file.resolve() == path.resolve() for file in files):
        raise RelayError(f"{path} would be written over itself: give another --out.")
    rows, most = sum(map(count_rows, files)), Limits().max_lines
    if rows * user_share > most:
        raise RelayError(
            f"The files have {rows:,} events, and a log that is trained on has at most {most:,}: take a part of the "
            f"users by --user-share {0.9 * most / rows:.2g}, or less."
        )
    return rows


def _write(path: Path, listens: Iterator[dict[str, NDArray[Any]]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("user_id", pa.int64()),
            ("item_id", pa.int64()),
            ("timestamp", pa.timestamp("ms", "UTC")),
            ("rating", pa.int8()),
        ]
    )
    waiting: list[Any] = []
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        for each in listens:
            waiting.append(pa.record_batch([pa.array(each[field.name]).cast(field.type) for field in schema], schema))
            count += waiting[-1].num_rows
            if count >= _GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(waiting))
                waiting, count = [], 0
        writer.write_table(pa.Table.from_batches(waiting, schema))


def _read(path: Path, user_share: float, batch_rows: int) -> Iterator[tuple[dict[str, NDArray[Any]], int]]:
    """The listens of each batch of rows, as columns of the log, and the number of its rows."""
    done = 0
    with opened(path) as file:
        names = _columns(path, file.schema_arrow)
        for batch in file.iter_batches(batch_rows, columns=names):
            events = _listens(path, done, batch)
            done += batch.num_rows
            users = events["uid"]
            if user_share < 1:
                is_kept = mixed(users.astype(np.uint64)) < np.uint64(user_share * 2**64)
                events, users = {name: values[is_kept] for name, values in events.items()}, users[is_kept]
            begins_ms = int(BEGINNING.timestamp() * 1000)
            is_whole = events["played_ratio_pct"] >= LISTEN_PLUS_PCT
            yield (
                {
                    "user_id": users.astype(np.int64),
                    "item_id": events["item_id"].astype(np.int64),
                    "timestamp": events["timestamp"].astype(np.int64) * 1000 + begins_ms,
                    "rating": np.where(is_whole, RATING, LOW_RATING).astype(np.int8),
                },
                batch.num_rows,
            )


def _columns(path: Path, schema: Any) -> list[str]:
    """The names of the columns that are read. Raises RelayError if they are not the published ones."""
    import pyarrow.types as types

    if lacking := [name for name in _ROLES if name not in schema.names]:
        raise RelayError(
            f"{path} has no column {', '.join(lacking)}, only {', '.join(schema.names)[:200]}: give "
            "multi_event.parquet or listens.parquet of Yambda's folder `flat`. A log of your own needs no conversion "
            "(docs/publishing.md#logs)."
        )
    names = [*_ROLES, *([_EVENT] if _EVENT in schema.names else [])]
    for name in names:
        kind = schema.field(name).type
        kind = kind.value_type if name == _EVENT and types.is_dictionary(kind) else kind
        if types.is_list(kind) or types.is_large_list(kind):
            raise RelayError(
                f"{path} has lists in {name}: it is of Yambda's folder `sequential`. Give that of the folder `flat`."
            )
        wanted = _ROLES.get(name, "text")
        fits = {
            "integer": types.is_integer(kind),
            "number": types.is_integer(kind) or types.is_floating(kind),
            "text": is_text(kind),
        }
        if not fits[wanted]:
            raise RelayError(f"{path}: the column {name} is {kind}, and Yambda's is {wanted}: the file is another one.")
    return names


def _listens(path: Path, done: int, batch: Any) -> dict[str, NDArray[Any]]:
    """The columns of the listens of a batch before which `done` rows were read. Raises RelayError for a value that is
    not as published, with its row.
    """
    import pyarrow.compute as pc

    def require(is_right: NDArray[np.bool_], what: str) -> None:
        if not is_right.all():
            row = int(np.flatnonzero(~is_right)[0])
            raise RelayError(f"{path}: row {done + row + 1} {what}: the file is not Yambda's as it was published.")

    for name in ("uid", "item_id", "timestamp"):
        require(batch.column(name).is_valid().to_numpy(False), f"has no {name}")
    columns = {name: batch.column(name).to_numpy(False) for name in _ROLES}
    is_listen = np.ones(batch.num_rows, np.bool_)
    if _EVENT in batch.schema.names:
        events = batch.column(_EVENT).cast("large_string")
        known = pc.is_in(events, value_set=_event_names(events.type)).to_numpy(False)
        require(known, f"has another event than {', '.join(EVENTS)}")
        is_listen = pc.equal(events, EVENTS[0]).to_numpy(False)
    played = columns["played_ratio_pct"]
    require(~is_listen | (played >= 0), "is a listen without played_ratio_pct")
    times_s = columns["timestamp"]
    require(times_s % _STEP_S == 0, f"has a time that is no multiple of {_STEP_S} s")
    require((times_s >= 0) & (times_s < _LONGEST_S), "has a time that is not within two years of the beginning")
    return {name: values[is_listen] for name, values in columns.items()}


def _event_names(kind: Any) -> Any:
    import pyarrow as pa

    return pa.array(EVENTS, kind)
