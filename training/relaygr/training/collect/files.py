"""Writes collected rows as Parquet files, and removes deleted users from them.

A file is written under a temporary name, synced, and renamed, so it is there as a whole or not at all, and its name
says what was read. A small file is joined with the one after it: the joined file comes first, the others go after, and
`folder.Parts` leaves them out meanwhile. So a folder that is followed for weeks does not fill with small files.

A deletion is noted first; then each file with rows of the user is replaced by one without them; then the file with the
tombstone's offset is written. A process that dies in between reads the tombstone again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import lock_folder, partial_of, put_in_place, sync_folder
from relaygr.training.collect.deletions import KEPT_MS, Deletion, Deletions
from relaygr.training.collect.folder import (
    MANIFEST,
    METADATA_KEY,
    Kind,
    Manifest,
    Origin,
    Part,
    is_collected,
    parts_of,
    read_manifest,
    write_manifest,
)
from relaygr.training.collect.records import LogRows
from relaygr.worker.history.records import NO_POSITION

SCHEMA: Final = pa.schema(
    [
        pa.field("user", pa.string(), nullable=False),
        pa.field("position", pa.int64()),
        pa.field("item", pa.int64(), nullable=False),
        pa.field("action", pa.int32(), nullable=False),
        pa.field("time_ms", pa.int64(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("recorded_at_ms", pa.int64(), nullable=False),
    ]
)
ROW_GROUP_ROWS: Final = 131_072
_DAY_MS: Final = 24 * 3600 * 1000
_MARGIN_MS: Final = 2 * 3600 * 1000
_SMALL_ROWS: Final = 16_384
_JOINED_SHARE: Final = 4
"""A file is joined with a new one that has at least a quarter of its rows, so each row is written a few times only."""


class CollectedFolder:
    """A folder that this process writes. Use `opened`."""

    def __init__(self, path: Path, manifest: Manifest, file_rows: int) -> None:
        self.path = path
        self.manifest = manifest
        self.deletions = Deletions.read(path)
        self._file_rows = file_rows
        parts = parts_of(path)
        self._parts: dict[tuple[Kind, int], list[Part]] = {}
        for part in parts.live:
            self._parts.setdefault((part.kind, part.partition), []).append(part)
        for leftover in parts.leftover:
            (path / leftover.name).unlink()
        for partial in path.glob(".*.partial"):
            partial.unlink()

    def next_offset(self, kind: Kind, partition: int) -> int:
        """The offset to go on from."""
        parts = self._parts.get((kind, partition))
        return max(parts[-1].last + 1 if parts else 0, self.manifest.begins(kind)[partition])

    def has_read(self, partition: int, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these records of the behaviours' topic are in the folder's files."""
        found = np.zeros(len(offsets), bool)
        for part in self._parts.get((Kind.BEHAVIOURS, partition), ()):
            found |= (offsets >= part.first) & (offsets <= part.last)
        return found

    def take_snapshots_below(self, partition: int, offset: int) -> None:
        """Notes that snapshots of workers below this offset may carry what the topics have lost."""
        if offset <= self.manifest.past_to[partition]:
            return
        self.manifest = self.manifest.with_past_to(partition, offset)
        with self._writing():
            write_manifest(self.path, self.manifest)

    def begins_at(self, places: Mapping[tuple[Kind, int], int]) -> None:
        """Notes that logs have lost all records before these offsets, which need not be said again."""
        for (kind, partition), offset in places.items():
            self.manifest = self.manifest.with_begin(kind, partition, offset)
        with self._writing():
            write_manifest(self.path, self.manifest)

    def mark_current(self, at_ms: int) -> None:
        """Notes that all tombstones from before this time are applied."""
        self.manifest = replace(self.manifest, current_at_ms=at_ms)
        with self._writing():
            write_manifest(self.path, self.manifest)

    def write(self, kind: Kind, partition: int, rows: LogRows, deleted: Mapping[str, Deletion]) -> int:
        """Writes a file of these rows but for those of users who are deleted. Returns the number of rows left out.

        Rows of records that were read again, without new ones, are joined with the last file.
        Raises RelayError if it cannot be written.
        """
        table = _table(rows)
        kept = _without(table, kind, deleted)
        left_out: int = table.num_rows - kept.num_rows
        part = Part(kind, partition, rows.first, rows.read_to - 1)
        parts = self._parts.setdefault((kind, partition), [])
        with self._writing():
            joined: list[Part] = []
            while len(joined) < len(parts) and (
                part.first > part.last or self._is_joined(parts[-1 - len(joined)], part, kept.num_rows)
            ):
                before = parts[-1 - len(joined)]
                kept = pa.concat_tables([_read(self.path / before.name), kept])
                part = Part(kind, partition, before.first, max(before.last, part.last))
                joined.append(before)
            self._put(part, kept)
            for before in joined:
                parts.remove(before)
                if before != part:
                    (self.path / before.name).unlink()
            parts.append(part)
            sync_folder(self.path)
        return left_out

    def delete(self, partition: int, deleted: Mapping[str, Deletion], now_ms: int) -> int:
        """Removes users from the files of a partition. Returns the number of rows removed. Raises RelayError."""
        removed = 0
        with self._writing():
            self.deletions.save(now_ms)
            for kind in Kind:
                for part in self._parts.get((kind, partition), ()):
                    removed += self._delete_from(part, deleted)
        return removed

    def _delete_from(self, part: Part, deleted: Mapping[str, Deletion]) -> int:
        path = self.path / part.name
        users = pa.array(list(deleted), pa.string())
        # Only the column of the users is read of a file that has none of them.
        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(ROW_GROUP_ROWS, columns=["user"])
            if not any(pc.any(pc.is_in(batch.column(0), value_set=users)).as_py() for batch in batches):
                return 0
        table = _read(path)
        kept = _without(table, part.kind, deleted)
        if kept.num_rows < table.num_rows:
            self._put(part, kept)
        return int(table.num_rows - kept.num_rows)

    def _is_joined(self, before: Part, part: Part, rows: int) -> bool:
        if before.last + 1 != part.first:
            return False  # Records between them were lost.
        before_rows = int(pq.read_metadata(self.path / before.name).num_rows)
        is_small: bool = before_rows <= max(_SMALL_ROWS, _JOINED_SHARE * rows)
        return is_small and before_rows + rows <= self._file_rows

    def _put(self, part: Part, table: Any) -> None:
        path = self.path / part.name
        with partial_of(path).open("wb") as file:
            schema = SCHEMA.with_metadata({METADATA_KEY: part.kind.value})
            pq.write_table(table.cast(SCHEMA).replace_schema_metadata(schema.metadata), file, ROW_GROUP_ROWS)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise RelayError(
                f"{self.path} cannot be written ({error}): free space, or repair it, and run the command again. It "
                "goes on after the last file."
            ) from error


@contextmanager
def opened(path: Path, manifest: Manifest, file_rows: int) -> Iterator[CollectedFolder]:
    """Opens the folder, or makes it with this manifest.

    Raises RelayError if it is of other logs, in use, or holds something else.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(path)
    except OSError as error:
        raise RelayError(f"{path} cannot be used ({error.strerror}): give a folder that you may write.") from error
    if lock is None:
        raise RelayError(f"{path} is in use: another `relaygr train collect` writes it.")
    try:
        try:
            folder = CollectedFolder(path, _agreed(path, manifest), file_rows)
        except OSError as error:
            raise RelayError(
                f"{path} cannot be used ({error.strerror}): free space, or give a folder that you may write."
            ) from error
        yield folder
    finally:
        os.close(lock)


def _agreed(path: Path, wanted: Manifest) -> Manifest:
    if not is_collected(path):
        if any(not each.name.startswith(".") for each in path.iterdir()):
            raise RelayError(f"{path} has other files, and no {MANIFEST}: give an empty or a new folder.")
        write_manifest(path, wanted)
        return wanted
    found = read_manifest(path)
    if found.origin != wanted.origin:
        raise RelayError(f"{path} was collected from {_differences(found.origin, wanted.origin)}: give another folder.")
    # A new manifest is of this moment.
    age_ms = wanted.current_at_ms - found.current_at_ms
    if age_ms > KEPT_MS - _MARGIN_MS:
        raise RelayError(
            f"{path} was read to the end {age_ms // _DAY_MS} days ago, and Kafka keeps tombstones for "
            f"{KEPT_MS // _DAY_MS}: users that were deleted since may stay in it. Remove it and collect into a new "
            "folder, which snapshots give the past."
        )
    if wanted.has_ratings and not found.has_ratings:
        found = replace(found, has_ratings=True)
        write_manifest(path, found)
    return found


def _differences(found: Origin, wanted: Origin) -> str:
    if (found.history_topic, found.behaviours_topic) != (wanted.history_topic, wanted.behaviours_topic):
        return f"{found.behaviours_topic} and {found.history_topic}, not {wanted.behaviours_topic}"
    if found.partitions != wanted.partitions:
        return f"topics of {found.partitions} partitions, which now have {wanted.partitions}"
    if found.cluster_id != wanted.cluster_id:
        return f"the cluster {found.cluster_id}, not {wanted.cluster_id}"
    return f"{found.history_topic} and {found.behaviours_topic} before they were deleted and created again"


def _table(rows: LogRows) -> Any:
    positions = np.frombuffer(rows.positions, np.int64)
    numbers = pa.array(np.frombuffer(rows.user_numbers, np.int32))
    users = pa.DictionaryArray.from_arrays(numbers, pa.array(list(rows.users), pa.string()))
    return pa.table(
        {
            "user": users.dictionary_decode(),
            "position": pa.array(positions, mask=positions == NO_POSITION),
            "item": np.frombuffer(rows.items, np.int64),
            "action": np.frombuffer(rows.actions, np.int32),
            "time_ms": np.frombuffer(rows.times_ms, np.int64),
            "offset": np.frombuffer(rows.offsets, np.int64),
            "recorded_at_ms": np.frombuffer(rows.recorded_at_ms, np.int64),
        }
    ).cast(SCHEMA)


def _read(path: Path) -> Any:
    with pq.ParquetFile(path) as file:
        return file.read().cast(SCHEMA)


def _without(table: Any, kind: Kind, deleted: Mapping[str, Deletion]) -> Any:
    """The rows that no deletion concerns."""
    if not deleted or not table.num_rows:
        return table
    users = table.column("user").combine_chunks().dictionary_encode()
    found = [deleted.get(user) for user in users.dictionary.to_pylist()]
    if kind is Kind.HISTORIES:
        limits = np.array([-1 if each is None else each.below - 1 for each in found], np.int64)
        values = table.column("offset").to_numpy()
    else:
        limits = np.array([-1 if each is None else each.until_ms for each in found], np.int64)
        values = table.column("recorded_at_ms").to_numpy()
    return table.filter(pa.array(values > limits[users.indices.to_numpy()]))
