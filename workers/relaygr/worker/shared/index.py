"""The index of an arena: a file with one slot for each page, and a header that identifies the arena.

No two prefixes share a page, so the record of a prefix lies in the slots of its own pages. The slot of the first page
is the record's *head*; a record that does not fit there continues in the slots of the next pages. So the index needs no
allocation and no transaction, and it has space for every prefix in the arena.

    header   magic, the arena's identity as a JSON object, and its CRC-32
    slot     kind u32 (0 none, HEAD, MORE) | next page i32 (-1: last) | length u32 | CRC-32 u32 |
             used_us u64 | stamp u64 | bytes

`put` writes the kind of the head last, `drop` clears it first. Each is one aligned store, so after a death at any
moment the record is in the index or not. `length` and CRC-32 cover the whole record. A record whose CRC-32 differs is
torn, which no death of a writer can cause, and is not returned. The writer gives each `put` a new `stamp`, so a reader
can tell whether a record has changed.

The index is plain memory without locks: one process writes. Others may read at the same time, and may see a record that
is being written as torn.
"""

from __future__ import annotations

import enum
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relaygr.worker.cache.results import PageArray

HEADER_BYTES: Final = 4096
_HEADER: Final = struct.Struct("<16sII")
_MAGIC: Final = b"relaygr.arena.1\0"
_SLOT_HEAD: Final = struct.Struct("<IIII")
_SLOT_HEAD_BYTES: Final = 32
_NONE, _HEAD, _MORE = 0, 0x64616568, 0x65726F6D
_KIND, _NEXT, _LENGTH, _CRC = range(4)
_LAST: Final = 0xFFFFFFFF

Identity = Mapping[str, str | int]
"""The identity of an arena in the header: a flat JSON object."""


def slot_bytes(record_bytes_per_page: int) -> int:
    """Bytes of a slot for this many bytes of a record, in whole cache lines."""
    return -(-(record_bytes_per_page + _SLOT_HEAD_BYTES) // 64) * 64


def index_bytes(num_pages: int, one_slot_bytes: int) -> int:
    """Size of the index file."""
    return HEADER_BYTES + num_pages * one_slot_bytes


class IndexFault(enum.StrEnum):
    """Why an index cannot be used."""

    NEW = "new"
    OTHER_FORMAT = "other_format"
    TORN_HEADER = "torn_header"
    OTHER_ARENA = "other_arena"


@dataclass(frozen=True, slots=True)
class IndexMismatch:
    """Why an index cannot be used. `fields`: the parts of the identity that differ."""

    reason: IndexFault
    fields: tuple[str, ...] = ()


class ArenaIndex:
    """Reads and writes the file's bytes, uint8 [index_bytes(num_pages, one_slot_bytes)]."""

    def __init__(self, file: NDArray[np.uint8], num_pages: int, one_slot_bytes: int) -> None:
        self._header = file[:HEADER_BYTES]
        self._slots = file[HEADER_BYTES:].reshape(num_pages, one_slot_bytes)
        self._slot_bytes = one_slot_bytes
        self._bytes = file.data[HEADER_BYTES:]
        """The slots as bytes: reading one record is faster from bytes, reading all heads is faster from arrays."""
        self._words = self._slots.view("<u4")
        self._used_us = self._slots.view("<u8")[:, 2]
        self._stamps = self._slots.view("<u8")[:, 3]
        self._room = one_slot_bytes - _SLOT_HEAD_BYTES

    # The whole index.

    def mismatch(self, identity: Identity) -> IndexMismatch | None:
        """None if this is the index of `identity`, otherwise the reason why it is not."""
        magic, length, crc = _HEADER.unpack(self._header[: _HEADER.size].tobytes())
        if magic != _MAGIC:
            return IndexMismatch(IndexFault.OTHER_FORMAT if magic.strip(b"\0") else IndexFault.NEW)
        text = self._header[_HEADER.size : _HEADER.size + length].tobytes()
        found = _object_in(text) if zlib.crc32(text) == crc else None
        if found is None:
            return IndexMismatch(IndexFault.TORN_HEADER)
        others = sorted(name for name in {*found, *identity} if found.get(name) != identity.get(name))
        return IndexMismatch(IndexFault.OTHER_ARENA, tuple(others)) if others else None

    def format(self, identity: Identity) -> None:
        """Clears the index and writes a header with `identity`."""
        text = json.dumps(dict(identity)).encode()
        self._header[:] = 0
        self._words[:, _KIND] = _NONE
        self._slots[:] = 0
        body = _HEADER.size + len(text)
        self._header[_HEADER.size : body] = np.frombuffer(text, np.uint8)
        self._header[16 : _HEADER.size] = np.frombuffer(struct.pack("<II", len(text), zlib.crc32(text)), np.uint8)
        self._header[:16] = np.frombuffer(_MAGIC, np.uint8)

    # One record.

    def heads(self) -> PageArray:
        """Pages whose slots are heads, least recently used first."""
        heads = np.flatnonzero(self._words[:, _KIND] == _HEAD).astype(np.int32)
        return heads[np.argsort(self._used_us[heads], kind="stable")]

    def get(self, head: int) -> bytes | None:
        """The record whose head is this page's slot; None if the record is torn."""
        _, _, left, crc = _SLOT_HEAD.unpack_from(self._bytes, head * self._slot_bytes)
        if left > self._room * len(self._slots):
            return None
        parts, page, kind = [], head, _HEAD
        while left > 0:
            if page >= len(self._slots):
                return None
            at = page * self._slot_bytes
            found, following, _, _ = _SLOT_HEAD.unpack_from(self._bytes, at)
            if found != kind:
                return None
            at += _SLOT_HEAD_BYTES
            parts.append(self._bytes[at : at + min(left, self._room)])
            left, page, kind = left - self._room, following, _MORE
        record = b"".join(parts)
        return record if record and zlib.crc32(record) == crc else None

    def stamps(self, heads: PageArray) -> NDArray[np.uint64]:
        """The stamp of each record."""
        return self._stamps[heads].copy()

    def put(self, record: bytes, pages: PageArray, used_us: int, stamp: int) -> bool:
        """Stores the record of the prefix in `pages`. False if it does not fit; then no record is stored."""
        head = int(pages[0])
        self.drop(head)
        chain = [int(page) for page in pages[: -(-len(record) // self._room)]]
        if len(record) > self._room * len(chain):
            return False
        for number, page in enumerate(chain):
            part = record[number * self._room : (number + 1) * self._room]
            words = self._words[page]
            words[_KIND] = _NONE if page == head else _MORE
            words[_NEXT] = chain[number + 1] if number + 1 < len(chain) else _LAST
            self._slots[page, _SLOT_HEAD_BYTES : _SLOT_HEAD_BYTES + len(part)] = np.frombuffer(part, np.uint8)
        words = self._words[head]
        words[_LENGTH] = len(record)
        words[_CRC] = zlib.crc32(record)
        self._used_us[head] = used_us
        self._stamps[head] = stamp
        words[_KIND] = _HEAD
        return True

    def use(self, head: int, used_us: int) -> None:
        """Records the last use of a prefix; monotonic µs, which all processes of a machine share."""
        self._used_us[head] = used_us

    def drop(self, head: int) -> None:
        """Removes the record whose head is this page's slot, if there is one, and zeroes its bytes."""
        if self._words[head, _KIND] != _HEAD:
            return
        left, page = int(self._words[head, _LENGTH]), head
        # First: a reader must not see a part of the record.
        self._words[head, _KIND] = _NONE
        while True:
            following = int(self._words[page, _NEXT])
            self._slots[page, _SLOT_HEAD_BYTES:] = 0
            left -= self._room
            if left <= 0 or following >= len(self._slots) or self._words[following, _KIND] != _MORE:
                return
            page = following
            self._words[page, _KIND] = _NONE

    def clear_all_but(self, pages: PageArray) -> None:
        """Zeroes the slots of all other pages. No record of these pages may continue there."""
        others = np.ones(len(self._slots), np.bool_)
        others[pages] = False
        self._slots[others] = 0


def _object_in(text: bytes) -> dict[str, object] | None:
    """The JSON object in the text, or None. The checksum alone is no proof: the checksum of an empty text is 0."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
