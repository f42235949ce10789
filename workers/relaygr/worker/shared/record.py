"""The binary form of one prefix in the index: its key, its page table, and a checksum of each page.

All little-endian:

    arena_epoch u64 | length u64 | tokens u64 | pages u32 | blocks u32 | marks u16 | user bytes u16
    namespace bytes u16 | growable u8 | source u8
    user | namespace | seed 16 bytes | block digests 16 bytes each | marks (length u64, digest 16 bytes) each
    page table i32 | page checksums u32 (CRC-32 of the page's bytes)

The index adds a checksum of the record.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas.digest import BLOCK, DIGEST_BYTES, DigestChain
from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache.identity import MAX_MARKS, Mark, PrefixKey
from relaygr.worker.cache.journal import StoredEntry

_HEAD: Final = struct.Struct("<QQQIIHHHBB")
_MARK: Final = struct.Struct(f"<Q{DIGEST_BYTES}s")
_SOURCES: Final = tuple(PrefixSource)
_MOST_USER_BYTES: Final = 256
_MOST_NAMESPACE_BYTES: Final = 64


class TornRecordError(ValueError):
    """The bytes are not a record."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexRecord:
    """`checksums` uint32 [pages]; `arena_epoch` of the writer."""

    entry: StoredEntry
    checksums: NDArray[np.uint32]
    arena_epoch: int


def most_bytes_per_page(page_tokens: int) -> int:
    """Most bytes of a record, divided by the pages of its prefix."""
    blocks = -(-page_tokens // BLOCK)
    fixed = _HEAD.size + _MOST_USER_BYTES + _MOST_NAMESPACE_BYTES + DIGEST_BYTES + MAX_MARKS * _MARK.size
    return fixed + (blocks + 1) * DIGEST_BYTES + 8


def pack(record: IndexRecord) -> bytes:
    """The record's bytes."""
    entry, key = record.entry, record.entry.key
    user = key.user_id.encode()
    head = _HEAD.pack(
        record.arena_epoch,
        key.length,
        entry.tokens,
        entry.pages.size,
        len(key.chain.packed) // DIGEST_BYTES,
        len(key.marks),
        len(user),
        len(key.namespace),
        key.growable,
        _SOURCES.index(entry.source),
    )
    return b"".join(
        (
            head,
            user,
            key.namespace,
            key.chain.seed,
            key.chain.packed,
            *(_MARK.pack(mark.length, mark.digest) for mark in key.marks),
            entry.pages.astype("<i4", copy=False).tobytes(),
            record.checksums.astype("<u4", copy=False).tobytes(),
        )
    )


def unpack(packed: bytes) -> IndexRecord:
    """The record in `packed`. Raises TornRecordError if `packed` is not exactly one record."""
    try:
        epoch, length, tokens, pages, blocks, marks, user_bytes, namespace_bytes, growable, source = _HEAD.unpack_from(
            packed
        )
        user_at = _HEAD.size
        namespace_at = user_at + user_bytes
        seed_at = namespace_at + namespace_bytes
        blocks_at = seed_at + DIGEST_BYTES
        marks_at = blocks_at + DIGEST_BYTES * blocks
        pages_at = marks_at + _MARK.size * marks
        if pages_at + 8 * pages != len(packed):
            raise TornRecordError(f"{len(packed)} bytes instead of {pages_at + 8 * pages}")
        chain = DigestChain(packed[seed_at:blocks_at], packed[blocks_at:marks_at], length)
        key = PrefixKey(
            user_id=packed[user_at:namespace_at].decode(),
            namespace=packed[namespace_at:seed_at],
            chain=chain,
            marks=tuple(Mark(*_MARK.unpack_from(packed, at)) for at in range(marks_at, pages_at, _MARK.size)),
            growable=bool(growable),
        )
        return IndexRecord(
            StoredEntry(key, np.frombuffer(packed, "<i4", pages, pages_at), tokens, _SOURCES[source]),
            np.frombuffer(packed, "<u4", pages, pages_at + 4 * pages),
            epoch,
        )
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise TornRecordError(str(error)) from error
