"""The layout of the history store: keys and values of its LMDB tables, within one transaction.

    users        user id -> partition u32
    records      partition u32, user id, 0, number of the part u8 -> head (part 0) or chunk (from 1), each with a seal
    deleted      partition u32, hash of the user id -> `Deletion`
    partitions   partition u32 -> `PartitionState`
    meta         layout, origin, and what `relaygr.worker.history.files` keeps

Keys are big-endian, values little-endian. A user's parts and a partition's users lie side by side, so a partition is
deleted without a look at another one. Digests are stored, so that a request hashes the open block alone.

LMDB does not notice a byte that changes on its disk, and a snapshot by the owner would write it into the log for all.
So a part ends with a *seal* of five bytes: the CRC-32 of its key and content, and a 1. Layouts before number 8 have no
seals. Without its seal, each part has an even number of bytes.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Container
from hashlib import blake2b
from typing import Any, Final

from relaygr.kafka.log_reader import LastRecord
from relaygr.schemas.record import record
from relaygr.worker.history.files import LAYOUT_KEY, ORIGIN, REMOVED_AT, Compaction, DamagedPartError, Files
from relaygr.worker.history.records import Head, assembled
from relaygr.worker.history.resolve import StoredHistory
from relaygr.worker.history.rules import Draft

LAYOUT: Final = b"relaygr.history-store.8"
READABLE: Final = (LAYOUT, b"relaygr.history-store.7", b"relaygr.history-store.6")
"""Layouts whose content this version reads. Number 7 has no seals; number 6 has no last records in its partition
states, either.
"""
_STATE = struct.Struct("<QQQQ")
_LAST = struct.Struct(f"<?Qiq{LastRecord.DIGEST_BYTES}s")
_NO_LAST = bytes(_LAST.size)
_PARTITION = struct.Struct(">I")
_DELETION = struct.Struct("<QQ")
_SEAL = struct.Struct("<IB")
_SEALED = 1
# User ids have no control characters, so that no other user's key lies between a head and its chunks.
_PART = tuple(b"\0" + bytes((part,)) for part in range(256))
_LAST_PART = b"\0\xff"
_HASH_BYTES: Final = 16


class Table(enum.IntEnum):
    """Indices of `Files.tables`."""

    USERS = 0
    RECORDS = 1
    DELETED = 2


@record(frozen=True, slots=True)
class PartitionState:
    """How far a partition has been read."""

    next_offset: int
    current_at_ms: int
    """Last time when the store was known to be complete; ms since the epoch, wall clock; 0: never."""
    refused: int
    """Records refused since the partition was last read from the beginning."""
    next_event: int = 0
    """The offset in the behaviours topic to continue from; 0: the beginning."""
    last: LastRecord | None = None
    """The last record that was read of the history topic; None: unknown."""
    last_event: LastRecord | None = None
    """The last record that was read of the behaviours topic; None: unknown."""

    @classmethod
    def unpack(cls, data: bytes) -> PartitionState:
        """The stored state."""
        of_history = data[_STATE.size :]
        next_offset, current_at_ms, refused, next_event = _STATE.unpack_from(data)
        last, last_event = _unpack_last(of_history), _unpack_last(of_history[_LAST.size :])
        return cls(next_offset, current_at_ms, refused, next_event, last, last_event)

    def pack(self) -> bytes:
        """The form to store."""
        numbers = _STATE.pack(self.next_offset, self.current_at_ms, self.refused, self.next_event)
        return numbers + _pack_last(self.last) + _pack_last(self.last_event)


def _pack_last(last: LastRecord | None) -> bytes:
    return _NO_LAST if last is None else _LAST.pack(True, last.offset, last.leader_epoch, last.time_ms, last.digest)


def _unpack_last(data: bytes) -> LastRecord | None:
    is_known, *values = _LAST.unpack_from(data or _NO_LAST)
    return LastRecord(*values) if is_known else None


@record(frozen=True, slots=True)
class Deletion:
    """The last deletion of a user."""

    at_ms: int
    next_snapshot: int
    """The offset after the tombstone."""


@record(frozen=True, slots=True)
class UserHead:
    """A user, and the head of the stored history."""

    partition: int
    user_id: str
    head: Head


class Tables:
    """The tables in one transaction. Values that are read are valid until its next write.

    A compaction that is under way learns of each change.
    """

    def __init__(self, files: Files, txn: Any, compaction: Compaction | None = None) -> None:
        self.files = files
        self._txn = txn
        self._compaction = compaction

    # Reads.

    @property
    def layout(self) -> bytes | None:
        return self._meta(LAYOUT_KEY)

    @property
    def origin(self) -> bytes | None:
        """The topics that the store is a copy of, encoded."""
        return self._meta(ORIGIN)

    @property
    def removed_at_ms(self) -> int | None:
        found = self._meta(REMOVED_AT)
        return None if found is None else int(found)

    @property
    def pages(self) -> int:
        """Pages that hold records."""
        stats = [self._txn.stat(table) for table in self.files.tables]
        return sum(int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) for stat in stats)

    def count(self, table: Table) -> int:
        return int(self._txn.stat(self.files.tables[table])["entries"])

    def state(self, partition: int) -> PartitionState | None:
        """None: the partition was never read."""
        found = self._txn.get(_PARTITION.pack(partition), db=self.files.partitions)
        return None if found is None else PartitionState.unpack(found)

    def partition_of(self, user_id: str) -> int | None:
        """The partition of a stored user."""
        found = self._txn.get(user_id.encode(), db=self.files.users)
        return None if found is None else int(_PARTITION.unpack(found)[0])

    def deletion(self, partition: int, user_id: str) -> Deletion | None:
        found = self._txn.get(_deleted_key(partition, user_id), db=self.files.deleted)
        return None if found is None else Deletion(*_DELETION.unpack(found))

    def head(self, user_id: str) -> Head | None:
        key = self._key(user_id)
        return None if key is None else Head.read(self._part(key, 0))

    def draft(self, user_id: str) -> Draft | None:
        """The stored history of a user, to be changed."""
        key = self._key(user_id)
        return None if key is None else Draft.read(self._part(key, 0), lambda index: self._part(key, 1 + index))

    def history(self, user_id: str) -> StoredHistory | None:
        """The stored history of a user, copied."""
        key = self._key(user_id)
        if key is None:
            return None
        # The chunks follow the head, so a cursor steps to them without a search from the root.
        parts = self._txn.cursor(db=self.files.records)
        parts.set_key(key + _PART[0])
        data = _opened(key + _PART[0], parts.value())
        head = Head.read(data)
        if head.is_deleted:
            return None
        chunks = [_opened(key + _PART[1 + index], parts.value()) for index in range(head.chunks) if parts.next()]
        if parts.key() != key + _PART[head.chunks]:
            raise DamagedPartError(_PARTITION.unpack_from(key)[0])
        return assembled(user_id, head, data, chunks)

    def heads_after(self, after: bytes, partitions: Container[int], count: int) -> tuple[list[UserHead], bytes | None]:
        """The heads of users of these partitions after a key, of `count` records at most. And the key to continue
        after; None at the end.
        """
        heads: list[UserHead] = []
        cursor = self._txn.cursor(db=self.files.records)
        for _ in range(count):
            if not cursor.set_range(after):
                return heads, None
            key = bytes(cursor.key())
            partition: int = _PARTITION.unpack_from(key)[0]
            if partition not in partitions:
                after = _PARTITION.pack(partition + 1)
                continue
            user = key[_PARTITION.size : -len(_LAST_PART)]
            after = key[: _PARTITION.size] + user + _LAST_PART
            heads.append(UserHead(partition, user.decode(), Head.read(_opened(key, cursor.value()))))
        return heads, after

    # Writes.

    def empty(self, origin: bytes) -> None:
        """Deletes everything. The store is a copy of `origin` from now on."""
        for table in (*self.files.tables, self.files.partitions):
            self._txn.drop(table, delete=False)
        self.put_layout()
        self._txn.put(ORIGIN, origin, db=self.files.meta)

    def put_layout(self) -> None:
        """The content has the layout of this version from now on."""
        self._txn.put(LAYOUT_KEY, LAYOUT, db=self.files.meta)

    def put_state(self, partition: int, state: PartitionState) -> None:
        self._txn.put(_PARTITION.pack(partition), state.pack(), db=self.files.partitions)

    def delete_state(self, partition: int) -> None:
        self._txn.delete(_PARTITION.pack(partition), db=self.files.partitions)

    def put_user(self, partition: int, user_id: str, draft: Draft) -> None:
        """Stores the history of a user who has none."""
        self._put(Table.USERS, user_id.encode(), _PARTITION.pack(partition))
        self.put_parts(partition, user_id, draft)

    def put_parts(self, partition: int, user_id: str, draft: Draft) -> None:
        """Stores the changed parts of a user's history."""
        key = _PARTITION.pack(partition) + user_id.encode()
        for part, data in ((0, draft.head_bytes()), *((1 + index, data) for index, data in draft.written.items())):
            self._put(Table.RECORDS, key + _PART[part], _sealed(key + _PART[part], data))

    def erase(self, user_id: str) -> None:
        """Deletes the history of a user, if there is one."""
        key = self._key(user_id)
        if key is None:
            return
        for part in range(1 + Head.read(self._part(key, 0)).chunks):
            self._delete(Table.RECORDS, key + _PART[part])
        self._delete(Table.USERS, user_id.encode())

    def erase_partition(self, partition: int, count: int) -> tuple[int, bool]:
        """Deletes at most `count` parts of users, and as many deletions. Returns how many users had their head among
        them, and whether nothing was left.
        """
        prefix, users = _PARTITION.pack(partition), 0
        parts = self._keys(Table.RECORDS, prefix, count)
        deletions = self._keys(Table.DELETED, prefix, count)
        for key in parts:
            self._delete(Table.RECORDS, key)
            if key.endswith(_PART[0]):
                self._delete(Table.USERS, key[_PARTITION.size : -len(_PART[0])])
                users += 1
        for key in deletions:
            self._delete(Table.DELETED, key)
        return users, not parts and not deletions

    def put_deletion(self, partition: int, user_id: str, deletion: Deletion) -> None:
        value = _DELETION.pack(deletion.at_ms, deletion.next_snapshot)
        self._put(Table.DELETED, _deleted_key(partition, user_id), value)

    def delete_deletion(self, partition: int, user_id: str) -> None:
        self._delete(Table.DELETED, _deleted_key(partition, user_id))

    def expire_deletions(self, after: bytes, before_ms: int, count: int) -> tuple[int, bytes]:
        """Deletes those deletions from before this time that are among the next `count`. Returns how many, and the key
        to continue at; empty at the end.
        """
        expired: list[bytes] = []
        cursor = self._txn.cursor(db=self.files.deleted)
        found = cursor.set_range(after) if after else cursor.first()
        for _ in range(count):
            if not found:
                break
            if Deletion(*_DELETION.unpack(cursor.value())).at_ms < before_ms:
                expired.append(bytes(cursor.key()))
            found = cursor.next()
        following = bytes(cursor.key()) if found else b""
        for key in expired:
            self._delete(Table.DELETED, key)
        return len(expired), following

    def note_removal(self, now_ms: int) -> None:
        """In the transaction of a deletion: its bytes are in the files from now on."""
        if self.removed_at_ms is None:
            self._txn.put(REMOVED_AT, b"%d" % now_ms, db=self.files.meta)
        if self._compaction is not None:
            self._compaction.removed(now_ms)

    def _meta(self, key: bytes) -> bytes | None:
        found = self._txn.get(key, db=self.files.meta)
        return None if found is None else bytes(found)

    def _key(self, user_id: str) -> bytes | None:
        """The key of a stored user's parts, without the part."""
        user = user_id.encode()
        partition = self._txn.get(user, db=self.files.users)
        return None if partition is None else bytes(partition) + user

    def _part(self, key: bytes, part: int) -> Any:
        return _opened(key + _PART[part], self._txn.get(key + _PART[part], b"", db=self.files.records))

    def _keys(self, table: Table, prefix: bytes, count: int) -> list[bytes]:
        """At most `count` keys that begin with `prefix`."""
        keys: list[bytes] = []
        cursor = self._txn.cursor(db=self.files.tables[table])
        found = cursor.set_range(prefix)
        while found and len(keys) < count:
            key = bytes(cursor.key())
            if not key.startswith(prefix):
                break
            keys.append(key)
            found = cursor.next()
        return keys

    def _put(self, table: Table, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=self.files.tables[table])
        if self._compaction is not None:
            self._compaction.changed(table, key)

    def _delete(self, table: Table, key: bytes) -> None:
        self._txn.delete(key, db=self.files.tables[table])
        if self._compaction is not None:
            self._compaction.changed(table, key)


def _deleted_key(partition: int, user_id: str) -> bytes:
    return _PARTITION.pack(partition) + blake2b(user_id.encode(), digest_size=_HASH_BYTES).digest()


def _sealed(key: bytes, part: bytes) -> bytes:
    return part + _SEAL.pack(zlib.crc32(part, zlib.crc32(key)), _SEALED)


def _opened(key: bytes, sealed: Any) -> Any:
    """A part without its seal. Raises DamagedPartError if it is not as it was stored."""
    if len(sealed) % 2 == 0 and sealed:
        return sealed
    part = sealed[: -_SEAL.size]
    if not sealed or _SEAL.unpack(sealed[-_SEAL.size :]) != (zlib.crc32(part, zlib.crc32(key)), _SEALED):
        raise DamagedPartError(_PARTITION.unpack_from(key)[0])
    return part
