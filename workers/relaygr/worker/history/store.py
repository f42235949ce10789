"""The user histories that a worker knows: an LMDB file that several processes map.

Contract:

* One process writes (`HistoryFollower` calls `apply`), any number read. LMDB orders several writers, so
  a predecessor that is not quite dead does no harm: a record below the stored offset is skipped.
* `apply` is one transaction: the records and the partition's next offset are there together or not at
  all, whenever the process or the machine dies. The last batches may be missing then; they are read again.
* The store is a copy of a topic and trusts nothing else: it remembers the cluster and topic that it
  was read from, and `trust` empties it if they, or the layout, are not the same. Before `trust`, `get`
  answers None.
* Within one user the larger version number stays, and of equal numbers the later record. A tombstone
  deletes.
* `get` copies a record out of the map once and answers views of that copy. A lease may keep a history
  for seconds, and a read transaction held that long would keep every page freed since from being reused.
* Bounded: the file never grows past `max_bytes`. Nothing is evicted. A record that has no room is
  refused: it is counted in the outcome and in its partition's state, and the user's older version is
  deleted, so that nothing outdated is taken for the newest. A partition with refusals can be read again
  from its beginning once there is room.

One `HistoryStore` per path and process; its methods may be called from any thread.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import lmdb
import numpy as np
import structlog

from relaygr.runtime.errors import RelayError
from relaygr.schemas.digest import DIGEST_BYTES, DigestChain
from relaygr.schemas.messages import Behaviours, History, HistoryVersion
from relaygr.worker.history.resolve import StoredHistory

log = structlog.get_logger()

LAYOUT: Final = b"relaygr.history-store.1"
LEAST_BYTES: Final = 1024 * 1024
# A batch rewrites pages before the old ones are free: room that values may not take.
_RESERVE_FRACTION: Final = 8
_MAX_READERS: Final = 512
_STATE = struct.Struct("<QQQ")
_PARTITION_KEY = struct.Struct(">I")
_HEAD = struct.Struct("<QIIQII")


@dataclass(frozen=True, slots=True)
class StoreOrigin:
    """The topic that a store is a copy of."""

    cluster_id: str
    topic: str
    topic_id: str

    def encode(self) -> bytes:
        return "\n".join((self.cluster_id, self.topic, self.topic_id)).encode()


@dataclass(frozen=True, slots=True)
class HistoryRecord:
    """One record of the history topic; `history` None is a tombstone."""

    user_id: str
    offset: int
    history: History | None


@dataclass(frozen=True, slots=True)
class HistoryBatch:
    """Records of one partition in offset order, and the offset to go on from."""

    partition: int
    records: tuple[HistoryRecord, ...]
    next_offset: int


@dataclass(frozen=True, slots=True)
class PartitionState:
    """How far a partition has been read."""

    next_offset: int
    current_at_ms: int
    """No deletion since then can have been missed; ms since the epoch, wall clock; 0: not known."""
    refused: int
    """Records for which there was no room since it was last read from the beginning."""


@dataclass(frozen=True, slots=True)
class ApplyOutcome:
    """What one batch did. Users are in the order of their records; counts are of records."""

    changed: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    older: int = 0
    repeated: int = 0


class StoreFullError(Exception):
    """Not even a deletion fits: readers hold old pages, or the file is full. Try again later.

    What of the batches was stored before, offset included, is `done`.
    """

    def __init__(self, text: str, done: ApplyOutcome) -> None:
        super().__init__(text)
        self.done = done


class HistoryStore:
    """See the module's contract."""

    def __init__(self, env: Any, path: Path, max_bytes: int, readonly: bool) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.readonly = readonly
        self._env = env
        self._meta = env.open_db(b"meta", create=not readonly)
        self._partitions = env.open_db(b"partitions", create=not readonly)
        self._users = env.open_db(b"users", create=not readonly)
        self._page_bytes = int(env.stat()["psize"])
        self._value_bytes = max_bytes - max_bytes // _RESERVE_FRACTION
        self._trusted = False

    @classmethod
    def open(cls, path: Path | str, max_bytes: int, readonly: bool = False) -> HistoryStore:
        """Opens or makes the store in folder `path`.

        Raises RelayError if the folder holds something else, more than `max_bytes`, or (read-only) nothing.
        """
        folder = Path(path)
        if max_bytes < LEAST_BYTES:
            raise RelayError(f"history_max_bytes is {max_bytes}: give the history store at least {LEAST_BYTES} bytes")
        if readonly and not (folder / "data.mdb").exists():
            raise RelayError(f"no history store in {folder}: start the worker that follows the history topic first")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            env = lmdb.open(
                str(folder),
                map_size=max_bytes - max_bytes % 65536,
                max_dbs=4,
                max_readers=_MAX_READERS,
                readonly=readonly,
                # A commit survives the process at once and the machine soon after; never half of it.
                metasync=False,
            )
        except (lmdb.Error, OSError) as error:
            raise RelayError(f"the history store in {folder} does not open: {error}. {_MEND}") from error
        try:
            _check_size(env, folder, max_bytes)
            # Readers that were killed would keep their pages for good.
            env.reader_check()
            return cls(env, folder, max_bytes, readonly)
        except lmdb.Error as error:
            env.close()
            raise RelayError(f"the history store in {folder} does not open: {error}. {_MEND}") from error
        except RelayError:
            env.close()
            raise

    def close(self) -> None:
        """Unmaps the file. No call may be running."""
        self._env.close()

    def trust(self, origin: StoreOrigin) -> bool:
        """Serves what is stored if it was read from `origin`; else empties it first.

        Answers whether what was stored is kept. A read-only store that was read from elsewhere stays untrusted.
        """
        with self._env.begin() as txn:
            layout = txn.get(b"layout", db=self._meta)
            stored = txn.get(b"origin", db=self._meta)
        if layout == LAYOUT and stored == origin.encode():
            self._trusted = True
            return True
        if self.readonly:
            log.warning("history store is of another topic", path=str(self.path), **_told(stored, origin))
            return False
        if stored is not None:
            log.warning("history store rebuilt from the beginning", path=str(self.path), **_told(stored, origin))
        with self._env.begin(write=True) as txn:
            for db in (self._users, self._partitions):
                txn.drop(db, delete=False)
            txn.put(b"layout", LAYOUT, db=self._meta)
            txn.put(b"origin", origin.encode(), db=self._meta)
        self._trusted = True
        return False

    def get(self, user_id: str) -> StoredHistory | None:
        """The newest history of a user that is known here."""
        if not self._trusted:
            return None
        with self._env.begin(buffers=True) as txn:
            found = txn.get(_user_key(user_id), db=self._users)
            data = None if found is None else bytes(found)
        return None if data is None else unpack(user_id, data)

    def version(self, user_id: str) -> HistoryVersion | None:
        """The version that `get` would answer; the arrays are not touched."""
        if not self._trusted:
            return None
        with self._env.begin(buffers=True) as txn:
            found = txn.get(_user_key(user_id), db=self._users)
            return None if found is None else read_version(found)

    def apply(self, partition: int, records: Sequence[HistoryRecord], next_offset: int) -> ApplyOutcome:
        """`apply_all` of one partition."""
        return self.apply_all((HistoryBatch(partition, tuple(records), next_offset),))

    def apply_all(self, batches: Sequence[HistoryBatch]) -> ApplyOutcome:
        """Stores the batches and their next offsets in one transaction, all or nothing.

        Records below the stored offset are skipped, and the offset never goes back (`forget` does that).
        Where the batch has no room it is stored one record at a time. Raises StoreFullError if not even that is
        possible, lmdb.Error if the disk fails.
        """
        try:
            return self._apply(batches)
        except lmdb.MapFullError:
            self._env.reader_check()
        outcomes: list[ApplyOutcome] = []
        try:
            for batch in batches:
                for entry in batch.records:
                    # One by one: what was stored before an error is told.
                    outcomes.append(self._apply_one(batch.partition, entry))  # noqa: PERF401
                outcomes.append(self._apply((replace(batch, records=()),)))
        except lmdb.MapFullError as error:
            text = f"the history store in {self.path} has no free page: raise history_max_bytes"
            raise StoreFullError(text, _joined(outcomes)) from error
        return _joined(outcomes)

    def forget(self, partition: int) -> int:
        """Deletes a partition's users and its offset, to read it anew. Answers how many users."""
        with self._env.begin(write=True, buffers=True) as txn:
            keys = [bytes(key) for key, value in txn.cursor(db=self._users) if read_head(value).partition == partition]
            for key in keys:
                txn.delete(key, db=self._users)
            txn.delete(_PARTITION_KEY.pack(partition), db=self._partitions)
        return len(keys)

    def rewind(self, partition: int) -> None:
        """Lets a partition be read again from the beginning; its users stay meanwhile."""
        with self._env.begin(write=True) as txn:
            state = self._state(txn, partition)
            if state is not None:
                self._put_state(txn, partition, replace(state, next_offset=0, refused=0))

    def mark_current(self, partitions: Iterable[int], now_ms: int) -> None:
        """Notes that these partitions are, or from now on will be, read without a gap."""
        with self._env.begin(write=True) as txn:
            for partition in partitions:
                state = self._state(txn, partition) or PartitionState(0, 0, 0)
                self._put_state(txn, partition, replace(state, current_at_ms=now_ms))

    def next_offset(self, partition: int) -> int | None:
        """Where to go on reading; None: from the beginning."""
        state = self.state(partition)
        return state.next_offset if state is not None and state.next_offset > 0 else None

    def state(self, partition: int) -> PartitionState | None:
        """How far a partition has been read; None: not at all."""
        with self._env.begin() as txn:
            return self._state(txn, partition)

    def states(self) -> dict[int, PartitionState]:
        """The state of every partition that has been read."""
        with self._env.begin() as txn:
            return {
                _PARTITION_KEY.unpack(key)[0]: PartitionState(*_STATE.unpack(value))
                for key, value in txn.cursor(db=self._partitions)
            }

    @property
    def bytes_used(self) -> int:
        """Bytes of the pages that hold records; free pages are not counted."""
        with self._env.begin() as txn:
            return self._pages(txn) * self._page_bytes

    @property
    def has_room(self) -> bool:
        """A quarter is free: worth reading a partition again that had refusals."""
        return self.bytes_used < self._value_bytes * 3 // 4

    @property
    def user_count(self) -> int:
        with self._env.begin() as txn:
            return int(txn.stat(self._users)["entries"])

    def _apply(self, batches: Sequence[HistoryBatch]) -> ApplyOutcome:
        with self._env.begin(write=True, buffers=True) as txn:
            return _joined([self._apply_batch(txn, batch) for batch in batches])

    def _apply_batch(self, txn: Any, batch: HistoryBatch) -> ApplyOutcome:
        changed: list[str] = []
        deleted: list[str] = []
        refused: list[str] = []
        older = repeated = 0
        state = self._state(txn, batch.partition) or PartitionState(0, 0, 0)
        for entry in batch.records:
            key = _user_key(entry.user_id)
            if entry.offset < state.next_offset:
                repeated += 1
                continue
            if entry.history is None:
                txn.delete(key, db=self._users)
                deleted.append(entry.user_id)
                continue
            found = txn.get(key, db=self._users)
            if found is not None and read_head(found).number > entry.history.number:
                older += 1
                continue
            value = pack(entry.history, batch.partition)
            freed_bytes = 0 if found is None else len(found)
            if self._pages(txn) * self._page_bytes + len(value) - freed_bytes > self._value_bytes:
                txn.delete(key, db=self._users)
                refused.append(entry.user_id)
                continue
            txn.put(key, value, db=self._users)
            changed.append(entry.user_id)
        self._advance(txn, batch.partition, state, batch.next_offset, len(refused))
        return ApplyOutcome(tuple(changed), tuple(deleted), tuple(refused), older, repeated)

    def _apply_one(self, partition: int, entry: HistoryRecord) -> ApplyOutcome:
        """One record in its own transaction; refused if that has no room. Raises lmdb.MapFullError."""
        try:
            return self._apply((HistoryBatch(partition, (entry,), entry.offset + 1),))
        except lmdb.MapFullError:
            pass
        with self._env.begin(write=True) as txn:
            state = self._state(txn, partition) or PartitionState(0, 0, 0)
            txn.delete(_user_key(entry.user_id), db=self._users)
            self._advance(txn, partition, state, entry.offset + 1, 1)
        return ApplyOutcome(refused=(entry.user_id,))

    def _advance(self, txn: Any, partition: int, state: PartitionState, next_offset: int, refused: int) -> None:
        offset = max(next_offset, state.next_offset)
        if (offset, refused) != (state.next_offset, 0):
            self._put_state(txn, partition, replace(state, next_offset=offset, refused=state.refused + refused))

    def _state(self, txn: Any, partition: int) -> PartitionState | None:
        found = txn.get(_PARTITION_KEY.pack(partition), db=self._partitions)
        return None if found is None else PartitionState(*_STATE.unpack(found))

    def _put_state(self, txn: Any, partition: int, state: PartitionState) -> None:
        value = _STATE.pack(state.next_offset, state.current_at_ms, state.refused)
        txn.put(_PARTITION_KEY.pack(partition), value, db=self._partitions)

    def _pages(self, txn: Any) -> int:
        stat = txn.stat(self._users)
        return int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])


_MEND: Final = "Stop the workers that use it and delete the folder: it is read again from the topic"


def _check_size(env: Any, folder: Path, max_bytes: int) -> None:
    info = env.info()
    if info["map_size"] > max_bytes:
        raise RelayError(
            f"the history store in {folder} holds {info['map_size']} bytes, but history_max_bytes is {max_bytes}: "
            f"raise it. Or: {_MEND[0].lower()}{_MEND[1:]}"
        )
    needed_bytes = (info["last_pgno"] + 1) * env.stat()["psize"]
    if (folder / "data.mdb").stat().st_size < needed_bytes:
        # Reading past a cut file's end would kill the process.
        raise RelayError(f"the history store in {folder} is cut short. {_MEND}")


def _user_key(user_id: str) -> bytes:
    return user_id.encode()


def _told(stored: bytes | None, origin: StoreOrigin) -> dict[str, str]:
    before = "nothing" if stored is None else stored.decode(errors="replace").replace("\n", " ")
    return {"was_of": before, "is_of": origin.encode().decode().replace("\n", " ")}


def _joined(outcomes: Iterable[ApplyOutcome]) -> ApplyOutcome:
    parts = tuple(outcomes)
    return ApplyOutcome(
        changed=tuple(user for part in parts for user in part.changed),
        deleted=tuple(user for part in parts for user in part.deleted),
        refused=tuple(user for part in parts for user in part.refused),
        older=sum(part.older for part in parts),
        repeated=sum(part.repeated for part in parts),
    )


@dataclass(frozen=True, slots=True)
class RecordHead:
    """What a stored record says before its arrays."""

    number: int
    partition: int
    feature_count: int
    length: int
    block_count: int

    @property
    def arrays_offset(self) -> int:
        return _HEAD.size + DIGEST_BYTES * (1 + self.block_count)


def pack(history: History, partition: int) -> bytes:
    """The stored form of `history`, hashed once."""
    chain = history.chain()
    behaviours = history.behaviours
    return b"".join(
        (
            _HEAD.pack(history.number, partition, history.features.size, len(behaviours), len(chain.blocks), 0),
            chain.seed,
            *chain.blocks,
            history.features.astype("<i8", copy=False).tobytes(),
            behaviours.items.astype("<i8", copy=False).tobytes(),
            behaviours.timestamps_ms.astype("<i8", copy=False).tobytes(),
            behaviours.actions.astype("<u2", copy=False).tobytes(),
        )
    )


def read_head(record: bytes | memoryview) -> RecordHead:
    """The first fields; the arrays are not touched."""
    number, partition, feature_count, length, block_count, _ = _HEAD.unpack_from(record)
    return RecordHead(number, partition, feature_count, length, block_count)


def read_version(record: bytes | memoryview) -> HistoryVersion:
    """The version of a stored record; the arrays are not touched."""
    head = read_head(record)
    end = head.arrays_offset
    return HistoryVersion(head.number, head.length, bytes(record[end - DIGEST_BYTES : end]))


def unpack(user_id: str, record: bytes) -> StoredHistory:
    """The history in `record`; its arrays are read-only views of `record`, which they keep alive."""
    head = read_head(record)
    view = memoryview(record)
    digests = [
        bytes(view[start : start + DIGEST_BYTES]) for start in range(_HEAD.size, head.arrays_offset, DIGEST_BYTES)
    ]
    features_at = head.arrays_offset
    items_at = features_at + 8 * head.feature_count
    timestamps_at = items_at + 8 * head.length
    actions_at = timestamps_at + 8 * head.length
    history = History(
        user_id=user_id,
        number=head.number,
        features=np.frombuffer(record, "<i8", head.feature_count, features_at),
        behaviours=Behaviours(
            items=np.frombuffer(record, "<i8", head.length, items_at),
            actions=np.frombuffer(record, "<u2", head.length, actions_at),
            timestamps_ms=np.frombuffer(record, "<i8", head.length, timestamps_at),
        ),
    )
    return StoredHistory(history, DigestChain(digests[0], tuple(digests[1:]), head.length))
