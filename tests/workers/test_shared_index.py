"""The arena's index: records in the slots of their own pages, and damaged records."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.schemas.digest import BLOCK, DigestChain
from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache.identity import MAX_MARKS, Mark, PrefixKey
from relaygr.worker.cache.journal import StoredEntry
from relaygr.worker.shared.dram_tier import allocated_bytes, map_file
from relaygr.worker.shared.index import ArenaIndex, IndexFault, IndexMismatch, index_bytes, slot_bytes
from relaygr.worker.shared.record import IndexRecord, TornRecordError, most_bytes_per_page, pack, unpack

PAGES = 12
SLOT = slot_bytes(100)
IDENTITY: dict[str, str | int] = {"worker_id": "worker-00", "num_pages": PAGES}


def make_index() -> tuple[ArenaIndex, NDArray[np.uint8]]:
    file = np.zeros(index_bytes(PAGES, SLOT), np.uint8)
    index = ArenaIndex(file, PAGES, SLOT)
    index.format(IDENTITY)
    return index, file


def pages(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)


digests = st.binary(min_size=16, max_size=16)


@st.composite
def records(draw: st.DrawFn) -> IndexRecord:
    length = draw(st.integers(0, 300))
    blocks = tuple(draw(digests) for _ in range(-(-length // BLOCK)))
    marks = draw(st.lists(st.builds(Mark, st.integers(0, 2**40), digests), max_size=MAX_MARKS))
    key = PrefixKey(
        user_id=draw(st.text(min_size=1, max_size=60)),
        namespace=draw(st.binary(min_size=1, max_size=32)),
        chain=DigestChain(draw(digests), b"".join(blocks), length),
        marks=tuple(marks),
        growable=draw(st.booleans()),
    )
    table = np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)), np.int32)
    checksums = np.array(draw(st.lists(st.integers(0, 2**32 - 1), min_size=table.size, max_size=table.size)), "<u4")
    source = draw(st.sampled_from(PrefixSource))
    return IndexRecord(
        StoredEntry(key, table, draw(st.integers(0, 2**40)), source), checksums, draw(st.integers(0, 2**63))
    )


@given(records())
def test_a_record_comes_back_as_it_was(record: IndexRecord) -> None:
    found = unpack(pack(record))
    assert found.entry.key.user_id == record.entry.key.user_id
    assert found.entry.key.namespace == record.entry.key.namespace
    assert found.entry.key.chain == record.entry.key.chain
    assert found.entry.key.marks == record.entry.key.marks
    assert found.entry.key.growable is record.entry.key.growable
    assert (found.entry.tokens, found.entry.source, found.arena_epoch) == (
        record.entry.tokens,
        record.entry.source,
        record.arena_epoch,
    )
    assert np.array_equal(found.entry.pages, record.entry.pages)
    assert np.array_equal(found.checksums, record.checksums)


@given(st.binary(max_size=400))
def test_bytes_that_are_not_a_record_are_torn(garbage: bytes) -> None:
    with pytest.raises(TornRecordError):
        unpack(garbage)


@pytest.mark.parametrize("page_tokens", [1, 16, 64, 100, 4096])
@pytest.mark.parametrize("page_count", [1, 2, 7])
def test_the_largest_record_of_a_prefix_fits_its_pages(page_tokens: int, page_count: int) -> None:
    """One behaviour for each token, the longest ids, and the largest number of marks."""
    length = page_tokens * page_count
    key = PrefixKey(
        user_id="u" * 256,
        namespace=b"n" * 64,
        chain=DigestChain(bytes(16), bytes(16) * -(-length // BLOCK), length),
        marks=tuple(Mark(number, bytes(16)) for number in range(MAX_MARKS)),
    )
    entry = StoredEntry(key, np.arange(page_count, dtype=np.int32), length, PrefixSource.COMPUTED)
    record = pack(IndexRecord(entry, np.zeros(page_count, np.uint32), 1))
    assert len(record) <= page_count * most_bytes_per_page(page_tokens)


@given(
    stored=st.dictionaries(st.integers(0, 3), st.binary(min_size=1, max_size=300), min_size=1),
    dropped=st.sets(st.integers(0, 3)),
)
def test_a_record_is_in_the_index_until_it_is_dropped(stored: dict[int, bytes], dropped: set[int]) -> None:
    index, _ = make_index()
    for number, record in stored.items():
        # Four prefixes of three pages each; the head is not the lowest.
        assert index.put(record, pages(number + 8, number, number + 4), used_us=100 - number, stamp=number)
    for number in dropped:
        index.drop(number + 8)
    left = [number for number in stored if number not in dropped]
    assert [head - 8 for head in index.heads()] == sorted(left, reverse=True), "least recently used first"
    assert all(index.get(number + 8) == stored[number] for number in left)


def test_a_use_changes_the_order_and_not_the_record() -> None:
    index, _ = make_index()
    index.put(b"ann", pages(0), used_us=1, stamp=1)
    index.put(b"bob", pages(1), used_us=2, stamp=2)
    index.use(0, 3)
    assert index.heads().tolist() == [1, 0]
    assert index.get(0) == b"ann"


def test_a_record_that_does_not_fit_its_slots_is_not_stored() -> None:
    index, _ = make_index()
    index.put(b"before", pages(3), 1, 1)
    assert not index.put(bytes(1000), pages(3), 2, 2)
    assert index.heads().size == 0


@given(at=st.integers(0, 400), bit=st.integers(0, 7))
def test_a_flipped_bit_never_gives_another_record(at: int, bit: int) -> None:
    index, file = make_index()
    record = bytes(range(250))
    index.put(record, pages(0, 1, 2), 1, 1)
    file[4096 + at] ^= 1 << bit
    assert index.get(0) in (None, record)


@pytest.mark.parametrize(
    ("identity", "mismatch"),
    [
        (IDENTITY, None),
        ({**IDENTITY, "num_pages": 13}, IndexMismatch(IndexFault.OTHER_ARENA, ("num_pages",))),
        ({**IDENTITY, "layout": "x"}, IndexMismatch(IndexFault.OTHER_ARENA, ("layout",))),
    ],
)
def test_an_index_matches_only_its_own_identity(identity: dict[str, str | int], mismatch: IndexMismatch | None) -> None:
    index, _ = make_index()
    assert index.mismatch(identity) == mismatch


def test_a_torn_header_or_one_of_another_format_is_a_fault() -> None:
    index, file = make_index()
    file[30] ^= 1
    assert index.mismatch(IDENTITY) == IndexMismatch(IndexFault.TORN_HEADER)
    file[:4096] = 65
    assert index.mismatch(IDENTITY) == IndexMismatch(IndexFault.OTHER_FORMAT)
    file[:4096] = 0
    assert index.mismatch(IDENTITY) == IndexMismatch(IndexFault.NEW)


@pytest.mark.parametrize("text", [b"", b"[]", b"7", b"{", b"\xff\xfe", b"[" * 4000])
def test_a_header_with_a_valid_checksum_whose_text_is_no_identity_is_torn(text: bytes) -> None:
    index, file = make_index()
    written = struct.pack("<II", len(text), zlib.crc32(text)) + text
    file[16 : 16 + len(written)] = np.frombuffer(written, np.uint8)
    assert index.mismatch(IDENTITY) == IndexMismatch(IndexFault.TORN_HEADER)


def test_formatting_clears_the_index() -> None:
    index, _ = make_index()
    index.put(b"ann", pages(0), 1, 1)
    index.format(IDENTITY)
    assert index.heads().size == 0


def test_a_mapped_file_keeps_its_bytes_and_its_whole_size(tmp_path: Path) -> None:
    first = map_file(tmp_path / "dram", 10_000)
    first.bytes[9_999] = 7
    second = map_file(tmp_path / "dram", 10_000)
    assert second.bytes[9_999] == 7
    assert second.inode == first.inode
    assert allocated_bytes(tmp_path / "dram") >= 10_000


def test_a_truncated_file_gets_its_full_size_before_it_is_mapped(tmp_path: Path) -> None:
    """An access to a missing page would end the process by SIGBUS."""
    map_file(tmp_path / "dram", 10_000).bytes[:] = 7
    with (tmp_path / "dram").open("r+b") as file:
        file.truncate(100)
    again = map_file(tmp_path / "dram", 10_000)
    assert again.bytes[99] == 7
    assert again.bytes[100:].max() == 0


def test_a_file_behind_a_link_is_not_mapped(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "dram").symlink_to(tmp_path / "victim")
    with pytest.raises(RelayError, match="is a symbolic link"):
        map_file(tmp_path / "dram", 10_000)
    assert (tmp_path / "victim").read_text() == "precious"


def test_too_little_memory_is_reported_and_nothing_is_allocated(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match=r"lower `worker\.dram_bytes`|cannot be mapped"):
        map_file(tmp_path / "dram", 2**60)
    assert allocated_bytes(tmp_path / "dram") == 0
