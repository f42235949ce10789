"""The files of the history store, and the compaction that erases deleted records from them (docs/histories.md).

    worker                      held (flock) by the processes of one worker; its content is the worker's id
    data.mdb, lock.mdb          number 0, deleted by the first compaction
    1/data.mdb, 1/lock.mdb      number 1, deleted by the second compaction
    2.new/                      number 2, incomplete

Several processes may map the files. One compacts: it holds a lock (flock) on the folder, copies in slices and notes the
records that it changes meanwhile. The last step is one write transaction on the old files, which stores the number of
the new ones; a write by another process in between makes the compaction start again. Each transaction first looks for
that number. A process that finds one renames `2.new` to `2`, opens `2` and deletes the files before it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lmdb

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import sync_folder
from relaygr.runtime.private_files import make_private, open_private, private_folder, rewrite

REMEDY: Final = (
    "Stop the workers that use it and delete the folder, but not its subfolder pool-deletions: a worker reads the "
    "topic again"
)
ORIGIN: Final = b"origin"
LAYOUT_KEY: Final = b"layout"
REMOVED_AT: Final = b"removed_at_ms"
"""The wall-clock time of the oldest removal whose bytes may still be in the files; ms since the epoch."""
_NEWER: Final = b"newer"
_COUNTED: Final = b"counted"
_FILES: Final = ("data.mdb", "lock.mdb")
_OWNER: Final = "worker"
_OWNER_BYTES: Final = 200
_MAX_READERS: Final = 512
# A slice takes a few milliseconds, in which the device thread may wait for the interpreter.
_SLICE_BYTES: Final = 1024 * 1024
_SLICE_RECORDS: Final = 256


class DamagedPartError(lmdb.CorruptedError):
    """A part of a history is missing, or is not as it was stored. The files are whole otherwise."""

    def __init__(self, partition: int) -> None:
        super().__init__(f"a history of partition {partition} is not as it was stored")
        self.partition = partition


class DamagedError(RelayError, lmdb.CorruptedError):
    """The files lack what they must have, as a copy does that was made while they were written."""

    def __init__(self, folder: Path, error: lmdb.CorruptedError) -> None:
        super().__init__(f"the history store in {folder} is damaged ({error}). {REMEDY}")
        self.partition = error.partition if isinstance(error, DamagedPartError) else None
        """The partition to which the damage is confined; None: unknown."""


@dataclass(frozen=True, slots=True)
class Files:
    """One LMDB environment and its databases."""

    folder: Path
    """The folder of the store; the files may lie in a subfolder."""
    number: int
    place: Path
    """The folder of the files."""
    max_bytes: int
    env: Any
    meta: Any
    partitions: Any
    users: Any
    records: Any
    deleted: Any

    @property
    def tables(self) -> tuple[Any, Any, Any]:
        """What a compaction copies record by record."""
        return self.users, self.records, self.deleted

    @classmethod
    def open_newest(cls, folder: Path, max_bytes: int) -> Files:
        """Opens the newest files of a private folder, or creates the first ones, and deletes older ones.

        Raises RelayError for files that are not a store, are damaged, or are larger than `max_bytes`.
        """
        while True:
            number = _newest(folder)
            try:
                files = cls._open(folder, number, _place(folder, number), max_bytes)
            except RelayError:
                if _newest(folder) == number:
                    raise
                continue  # Another process has moved on and deleted these files.
            try:
                with files.env.begin() as txn:
                    newer = files.newer(txn)
            except lmdb.CorruptedError as error:
                files.close()
                raise DamagedError(folder, error) from error
            if newer is None and _newest(folder) == number:
                _delete_before(folder, number)
                return files
            files.close()
            if newer is not None:
                _move_on(folder, newer)

    @classmethod
    def _open(cls, folder: Path, number: int, place: Path, max_bytes: int, *, sync: bool = True) -> Files:
        try:
            for name in _FILES:
                make_private(place / name)
            env = lmdb.open(
                str(place),
                map_size=max_bytes - max_bytes % 65536,
                mode=0o600,
                max_dbs=6,
                max_readers=_MAX_READERS,
                # A commit survives a crash of the process at once, a crash of the machine soon after; never in part.
                metasync=False,
                sync=sync,
                create=False,
            )
        except (lmdb.Error, OSError) as error:
            raise RelayError(f"the history store in {folder} cannot be opened: {error}. {REMEDY}") from error
        try:
            _check_size(env, folder, place, max_bytes)
            # Frees the pages of readers that were killed.
            env.reader_check()
            databases = [env.open_db(name) for name in (b"meta", b"partitions", b"users", b"records", b"deleted")]
            return cls(folder, number, place, max_bytes, env, *databases)
        except (lmdb.Error, OSError) as error:
            env.close()
            raise RelayError(f"the history store in {folder} cannot be opened: {error}. {REMEDY}") from error
        except RelayError:
            env.close()
            raise

    def newer(self, txn: Any) -> int | None:
        """The number of the files that have replaced these."""
        found = txn.get(_NEWER, db=self.meta)
        return None if found is None else int(bytes(found))

    def count(self, txn: Any) -> None:
        """Makes a write transaction change something, because LMDB reuses the number of one that changes nothing."""
        txn.put(_COUNTED, b"", db=self.meta)

    def lengthen(self) -> None:
        """Call it after each write transaction. LMDB does not write pages at the end that the transaction allocated and
        freed again. The file gets their length, since a file that is too short counts as truncated.
        """
        # Another process may have replaced and deleted the files. The transaction is committed in any case.
        with contextlib.suppress(OSError):
            if _missing_bytes(self.env, self.place) > 0:
                # No other process writes meanwhile.
                with self.env.begin(write=True):
                    data = self.place / "data.mdb"
                    if (missing_bytes := _missing_bytes(self.env, self.place)) > 0:
                        os.truncate(data, data.stat().st_size + missing_bytes)

    def open_newer(self) -> Files:
        """Opens the files that have replaced these, which stay open."""
        with self.env.begin() as txn:
            newer = self.newer(txn)
        assert newer is not None
        _move_on(self.folder, newer)
        return Files.open_newest(self.folder, self.max_bytes)

    def close(self) -> None:
        """Unmaps the files. No transaction may be open."""
        self.env.close()


class Compaction:
    """The copy of one store's live records into new files. One thread uses it.

    The caller reports its own changes meanwhile: `changed`, `removed` and, after each write transaction, `committed`.
    Each transaction changes something (`Files.count`), so a gap in their numbers is a write by another process.
    """

    def __init__(self, source: Files) -> None:
        """Raises OSError or RelayError if the new files cannot be made, BlockingIOError if another process compacts."""
        self._source = source
        self._place = _place(source.folder, source.number + 1, complete=False)
        self._table = 0
        self._after = b""
        self._changed: set[tuple[int, bytes]] = set()
        self._removed_at_ms: int | None = None
        self._is_alone = True
        self._lock = os.open(source.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with source.env.begin() as txn:
                self._last_txn: int = txn.id()
            shutil.rmtree(self._place, ignore_errors=True)
            private_folder(self._place, "worker.history_path")
            # The last step syncs.
            self._target = Files._open(source.folder, source.number + 1, self._place, source.max_bytes, sync=False)
        except BaseException:
            os.close(self._lock)
            raise

    def changed(self, table: int, key: bytes) -> None:
        """A record of this key in a table (an index of `Files.tables`) was or will be stored or deleted."""
        self._changed.add((table, key))

    def removed(self, now_ms: int) -> None:
        """A user was removed, whose bytes may be in the new files."""
        if self._removed_at_ms is None:
            self._removed_at_ms = now_ms

    def committed(self, txn_id: int) -> None:
        """A write transaction of this process was committed."""
        self._is_alone &= txn_id <= self._last_txn + 1
        self._last_txn = txn_id

    def advance(self) -> bool:
        """Copies a slice, or does the last step. Returns whether the switch is made.

        After an exception, or if the store was written by another process meanwhile (lmdb.Error), call `abandon`.
        """
        if self._table < len(self._source.tables):
            self._copy_slice()
            return False
        self._finish()
        return True

    def abandon(self) -> None:
        """Deletes the new files, unless the switch is made."""
        self._target.close()
        with self._source.env.begin() as txn:
            if self._source.newer(txn) is None:
                shutil.rmtree(self._place, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Lets another process compact."""
        os.close(self._lock)

    def _copy_slice(self) -> None:
        source, target = self._source, self._target
        size_bytes = count = 0
        with source.env.begin(buffers=True) as txn, target.env.begin(write=True) as out:
            while self._table < len(source.tables):
                copy_to = target.tables[self._table]
                for key, value in records_after(txn.cursor(db=source.tables[self._table]), self._after):
                    if size_bytes >= _SLICE_BYTES or count == _SLICE_RECORDS:
                        return
                    out.put(key, value, db=copy_to, append=True)
                    self._after = bytes(key)
                    size_bytes += len(value)
                    count += 1
                self._table += 1
                self._after = b""

    def _finish(self) -> None:
        source, target = self._source, self._target
        with source.env.begin(write=True, buffers=True) as txn:
            if not self._is_alone or txn.id() > self._last_txn + 1:
                raise lmdb.Error("another process has written to the store")
            with target.env.begin(write=True) as out:
                for table, key in self._changed:
                    value = txn.get(key, db=source.tables[table])
                    if value is None:
                        out.delete(key, db=target.tables[table])
                    else:
                        out.put(key, value, db=target.tables[table])
                for key, value in txn.cursor(db=source.partitions):
                    out.put(key, value, db=target.partitions)
                for key in (LAYOUT_KEY, ORIGIN):
                    out.put(key, txn.get(key, b"", db=source.meta), db=target.meta)
                if self._removed_at_ms is not None:
                    out.put(REMOVED_AT, b"%d" % self._removed_at_ms, db=target.meta)
            target.lengthen()
            target.env.sync(True)
            target.close()
            sync_folder(self._place)
            sync_folder(source.folder)
            txn.put(_NEWER, b"%d" % target.number, db=source.meta)


def claim(folder: Path, worker_id: str) -> int:
    """Keeps workers of other ids off the store, as long as the returned file is open.

    Both processes of a worker with a standby may claim it. Raises RelayError if a worker of another id has.
    """
    file = open_private(folder / _OWNER, os.O_RDWR | os.O_CREAT)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rewrite(file, worker_id)
        # Waits only while another process writes its id.
        fcntl.flock(file, fcntl.LOCK_SH)
        owner = os.pread(file, _OWNER_BYTES, 0).decode(errors="replace")
        if owner != worker_id:
            raise RelayError(
                f"{owner} uses the history store in {folder}, and each worker deletes the histories of users that are "
                f"not its own: set another `worker.history_path` for {worker_id}."
            )
    except BaseException:
        os.close(file)
        raise
    return file


def records_after(cursor: Any, key: bytes) -> Iterator[tuple[Any, Any]]:
    """Keys and values that follow `key`; all if it is empty."""
    found = cursor.set_range(key) if key else cursor.first()
    if found and key and bytes(cursor.key()) == key:
        found = cursor.next()
    while found:
        yield cursor.item()
        found = cursor.next()


def _place(folder: Path, number: int, *, complete: bool = True) -> Path:
    if not complete:
        return folder / f"{number}.new"
    return folder / str(number) if number else folder


def _newest(folder: Path) -> int:
    return max((int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal()), default=0)


def _move_on(folder: Path, number: int) -> None:
    """Gives complete files their name. Several processes may do it at the same time."""
    place = _place(folder, number)
    with contextlib.suppress(FileNotFoundError):
        _place(folder, number, complete=False).rename(place)
        sync_folder(folder)
    if _newest(folder) < number:
        raise RelayError(f"the history store in {folder} is damaged: {place} is missing. {REMEDY}")


def _delete_before(folder: Path, number: int) -> None:
    """Files with a number exist only after all processes can see that they have replaced those before them."""
    for entry in folder.iterdir():
        if entry.name.isdecimal() and int(entry.name) < number:
            shutil.rmtree(entry, ignore_errors=True)
    if number:
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)


def _check_size(env: Any, folder: Path, place: Path, max_bytes: int) -> None:
    info = env.info()
    if info["map_size"] > max_bytes:
        raise RelayError(
            f"the history store in {folder} holds {info['map_size']} bytes, but worker.history_max_bytes is "
            f"{max_bytes}: raise it. Or {REMEDY[0].lower()}{REMEDY[1:]}"
        )
    if _missing_bytes(env, place) > 0:
        # A read past the end of a truncated file would kill the process.
        raise RelayError(f"the history store in {folder} is truncated. {REMEDY}")


def _missing_bytes(env: Any, place: Path) -> int:
    """How much the file lacks of the pages that were allocated; not positive if it has all."""
    needed_bytes: int = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    return needed_bytes - (place / "data.mdb").stat().st_size
