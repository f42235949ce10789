"""The shared arena: the DRAM tier and its index in shared memory.

    attach      with or without the lock: maps and pins the pages and the index, changes no data
    read_ahead  with or without the lock: decodes the index, so that `adopt` decodes only what has changed since
    adopt       with the lock: returns the valid prefixes and drops all others from the index

| found                                                      | result                                            |
|------------------------------------------------------------|---------------------------------------------------|
| index of another format, worker id, K,V shape or DRAM file | the whole index is dropped, with a log message    |
| two prefixes with the same page                            | the whole index is dropped: no holder writes this |
| a torn record, or one of this or a later epoch             | the record is dropped                             |
| a record of another model                                  | the record is dropped                             |
| any other record                                           | the prefix is restored; its pages are unverified  |

After `adopt` the `ArenaJournal` keeps the index equal to the DRAM tier. The order of its calls keeps the index valid
after a kill at any moment: `removed` drops a record before its pages may be written; `seal` computes the checksums of
pages that a copy has filled, and only then `published` stores the record. `verify` compares a restored page with its
checksum when a copy first reads the page, which takes 0.25 ms a MiB, once. A mismatch fails the copy, and the cache
drops the prefix.

On tmpfs a file with holes allocates memory when it is written, and a process that writes without free memory dies by
SIGBUS. So a file is allocated as a whole when it is mapped, and a lack of memory raises an error. Mapping does not
disturb other users of the file: a file of full size is not changed, a shorter file grows by zeros. The bytes outlive
the process.

File names contain the shape, so a process with other settings does not disturb the owner. The files of earlier settings
are deleted when no process holds the lock (`make_room`). A start that lacks memory also deletes the arenas of other
workers that do not run any more (`delete_abandoned`): nobody else frees the memory of a killed worker.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import mmap
import os
import zlib
from collections import Counter as Tally
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from prometheus_client import Counter

from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import open_private
from relaygr.worker.cache.entries import CacheEntry
from relaygr.worker.cache.journal import StoredEntry
from relaygr.worker.cache.results import PageArray
from relaygr.worker.device import Device
from relaygr.worker.kv import DramGeometry, PrefixLayout
from relaygr.worker.shared.index import ArenaIndex, Identity, IndexFault, IndexMismatch, index_bytes, slot_bytes
from relaygr.worker.shared.lock import ArenaLock
from relaygr.worker.shared.record import IndexRecord, TornRecordError, most_bytes_per_page, pack, unpack

log = structlog.get_logger()

_DRAM: Final = "dram-"
_INDEX: Final = "index-"

_PREFIXES = Counter(
    "relaygr_arena_prefixes_total",
    "Prefixes found in the arena at start: restored, or the reason why they were dropped",
    ["outcome"],
)
_PAGES = Counter(
    "relaygr_arena_pages_verified_total",
    "Restored pages that were compared with their checksums before their first use",
    ["outcome"],
)


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """The facts that two processes must have in common to use the same K,V."""

    worker_id: str
    num_pages: int
    geometry: DramGeometry
    layout: PrefixLayout

    @property
    def page_bytes(self) -> int:
        return self.geometry.page_bytes

    @property
    def slot_bytes(self) -> int:
        return slot_bytes(most_bytes_per_page(self.geometry.kv.page_tokens))

    @property
    def dram_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def index_bytes(self) -> int:
        return index_bytes(self.num_pages, self.slot_bytes)

    def identity(self, dram_inode: int) -> Identity:
        """The identity in the index's header."""
        return {
            "worker_id": self.worker_id,
            "num_pages": self.num_pages,
            "page_bytes": self.page_bytes,
            "slot_bytes": self.slot_bytes,
            "geometry": repr(self.geometry),
            "layout": repr(self.layout),
            "dram_file": dram_inode,
        }

    @property
    def name(self) -> str:
        """The part of the file names that depends on the shape."""
        digest = hashlib.blake2b(repr(sorted(self.identity(0).items())).encode(), digest_size=4).hexdigest()
        return f"{self.num_pages}x{self.page_bytes}-{digest}"


class AdoptOutcome(enum.StrEnum):
    """The outcome for one prefix in the index: a metric label."""

    RESTORED = "restored"
    TORN = "torn"
    FOREIGN = "foreign"
    OTHER_MODEL = "other_model"
    OVERLAPPING = "overlapping"


@dataclass(frozen=True, slots=True)
class _Decoded:
    """The record whose head is a page, and its stamp. `record` None: torn, or not of this arena."""

    stamp: int
    record: IndexRecord | None


class TornPageError(Exception):
    """A page of the arena does not match its checksum."""


class NotTheWriterError(Exception):
    """This process does not hold the arena's lock."""


class ArenaJournal:
    """A `TierJournal` and a `PageGuard`. Has no effect without the lock. `pages` uint8 [num_pages, page_bytes]."""

    def __init__(self, index: ArenaIndex, pages: NDArray[np.uint8], lock: ArenaLock) -> None:
        self._index = index
        self._pages = pages
        self._lock = lock
        self._checksums = np.zeros(len(pages), np.uint32)
        self._unverified = np.zeros(len(pages), np.bool_)
        self._torn = np.zeros(len(pages), np.bool_)
        self._records = 0
        self._ended = False

    def restored(self, records: Sequence[IndexRecord]) -> None:
        """The cache holds these prefixes of the index from now on. Their pages are unverified."""
        if records:
            pages = np.concatenate([record.entry.pages for record in records])
            self._checksums[pages] = np.concatenate([record.checksums for record in records])
            self._unverified[pages] = True

    # The cache calls these methods under its lock.

    def published(self, entry: CacheEntry, now_us: int) -> None:
        if self._ended or not self._lock.is_held():
            return
        stored = StoredEntry(entry.key, entry.pages, entry.tokens, entry.source)
        record = pack(IndexRecord(stored, self._checksums[entry.pages], self._lock.arena_epoch))
        self._records += 1
        # Unique within an index: epochs count the writers.
        stamp = (self._lock.arena_epoch << 40) + self._records
        # A successor does not find a prefix that the index has no room for.
        self._index.put(record, entry.pages, now_us, stamp)

    def touched(self, entry: CacheEntry, now_us: int) -> None:
        if not self._ended:
            self._index.use(int(entry.pages[0]), now_us)

    def removed(self, entry: CacheEntry) -> None:
        if not self._ended:
            self._index.drop(int(entry.pages[0]))

    def end(self) -> None:
        self._ended = True

    # The copy threads call these methods.

    def seal(self, pages: PageArray) -> None:
        """Computes checksums. Raises NotTheWriterError without the lock: another process may own the pages by now."""
        if not self._lock.is_held():
            raise NotTheWriterError("this process no longer holds the arena's lock")
        self._checksums[pages] = [zlib.crc32(self._pages[page]) for page in pages]
        self._unverified[pages] = self._torn[pages] = False

    def verify(self, pages: PageArray) -> None:
        """Compares unverified pages with their checksums. Raises TornPageError."""
        unverified = pages[self._unverified[pages]]
        for page in unverified:
            if zlib.crc32(self._pages[page]) != self._checksums[page]:
                if not self._torn[page]:
                    # Counted once, although the failed copy is retried.
                    self._torn[page] = True
                    _PAGES.labels("torn").inc()
                    log.warning("a page of the arena is torn: its prefix will be dropped", page=int(page))
                raise TornPageError(f"page {page}")
            self._unverified[page] = False
            _PAGES.labels("whole").inc()


class SharedArena:
    """Created by `attach`. `tensor` uint8 [num_pages, page_bytes]; `journal` is for the cache."""

    def __init__(self, shape: ArenaShape, lock: ArenaLock, dram: MappedFile, index: MappedFile) -> None:
        self._shape = shape
        self._lock = lock
        self._pages = dram.bytes.reshape(shape.num_pages, shape.page_bytes)
        self._identity = shape.identity(dram.inode)
        self._index = ArenaIndex(index.bytes, shape.num_pages, shape.slot_bytes)
        self._decoded: dict[int, _Decoded] = {}
        self.tensor = torch.from_numpy(self._pages)
        self.journal = ArenaJournal(self._index, self._pages, lock)

    @classmethod
    def attach(cls, folder: Path, shape: ArenaShape, device: Device, lock: ArenaLock) -> SharedArena:
        """Maps the arena, which is created if needed. Raises RelayError without memory for it."""
        dram = map_file(folder / f"{_DRAM}{shape.name}", shape.dram_bytes)
        arena = cls(shape, lock, dram, map_file(folder / f"{_INDEX}{shape.name}", shape.index_bytes))
        if not device.pin_host(arena.tensor):
            log.warning("the arena's memory is not pinned: copies to the device are slower", device=device.name)
        return arena

    def read_ahead(self) -> int:
        """Decodes the present index, which an owner may be writing. Returns the number of prefixes."""
        if self._index.mismatch(self._identity) is None:
            # A record that is torn now may be complete soon: the owner may be writing it.
            found = self._read()
            self._decoded = {head: known for head, known in found.items() if known.record is not None}
        return len(self._decoded)

    def adopt(self, namespace: bytes) -> tuple[StoredEntry, ...]:
        """The prefixes of this model that earlier holders left, least recently used first.

        The journal writes from now on. Raises ValueError without the lock.
        """
        if not self._lock.is_held():
            raise ValueError("only the holder of the lock may adopt an arena")
        arena_epoch = self._lock.arena_epoch
        mismatch = self._index.mismatch(self._identity)
        if mismatch is not None:
            self._drop_index(mismatch)
        outcomes: Tally[AdoptOutcome] = Tally()
        records = []
        for head, known in self._read().items():
            record = known.record
            if record is None:
                found = AdoptOutcome.TORN
            elif record.arena_epoch >= arena_epoch:
                found = AdoptOutcome.FOREIGN
            elif record.entry.key.namespace != namespace:
                found = AdoptOutcome.OTHER_MODEL
            else:
                found = AdoptOutcome.RESTORED
                records.append(record)
            outcomes[found] += 1
            if found is not AdoptOutcome.RESTORED:
                self._index.drop(head)
        self._decoded.clear()
        if not _are_disjoint(records):
            # No holder writes such an index, so no record in it can be trusted.
            self._index.format(self._identity)
            outcomes[AdoptOutcome.OVERLAPPING] = outcomes.pop(AdoptOutcome.RESTORED)
            records.clear()
        for outcome, count in outcomes.items():
            _PREFIXES.labels(outcome.value).inc(count)
        kept = [record.entry.pages for record in records]
        self._index.clear_all_but(np.concatenate(kept) if kept else np.empty(0, np.int32))
        self.journal.restored(records)
        counts = {outcome.value: count for outcome, count in outcomes.items()}
        log.info("arena adopted", arena_epoch=arena_epoch, **counts)
        return tuple(record.entry for record in records)

    def _drop_index(self, mismatch: IndexMismatch) -> None:
        self._index.format(self._identity)
        if mismatch.reason is not IndexFault.NEW:
            log.warning("the arena's index is dropped as a whole", reason=mismatch.reason.value, fields=mismatch.fields)

    def _read(self) -> dict[int, _Decoded]:
        """All records by head page, least recently used first. Records that were read ahead are not decoded again."""
        heads = self._index.heads()
        found = {}
        for head, stamp in zip(heads.tolist(), self._index.stamps(heads).tolist(), strict=True):
            known = self._decoded.get(head)
            found[head] = known if known is not None and known.stamp == stamp else self._decode(head, stamp)
        return found

    def _decode(self, head: int, stamp: int) -> _Decoded:
        packed = self._index.get(head)
        try:
            record = unpack(packed) if packed is not None else None
        except TornRecordError:
            record = None
        return _Decoded(stamp, record if record is not None and self._fits(head, record.entry) else None)

    def _fits(self, head: int, entry: StoredEntry) -> bool:
        """Whether the entry is possible in this arena."""
        pages, shape = entry.pages, self._shape
        return (
            entry.key.is_known
            and entry.key.length > 0
            and entry.tokens == shape.layout.tokens(entry.key.length)
            and pages.size == shape.geometry.kv.pages_for(entry.tokens)
            and int(pages[0]) == head
            and int(pages.view("<u4").max()) < shape.num_pages
        )


def make_room(folder: Path, shape: ArenaShape | None, lock: ArenaLock) -> int:
    """Deletes files of other shapes unless a process may use them. Returns the allocated bytes of `shape`'s files.

    `shape` None: this start uses no arena.
    """
    with lock.unclaimed() as nobody_holds_it:
        if nobody_holds_it or lock.is_held():
            _delete_arenas(folder, shape)
    if shape is None:
        return 0
    return sum(allocated_bytes(folder / f"{prefix}{shape.name}") for prefix in (_DRAM, _INDEX))


def lacks_space(folder: Path, wanted_bytes: int) -> bool:
    """Whether the file system of the arena has less than this left."""
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize < wanted_bytes


def delete_abandoned(folder: Path) -> None:
    """Deletes the arenas of the workers beside this folder's that no process runs. Their folders are
    `<group>/<worker_id>`, as this one.
    """
    for other in {path.parent for path in folder.parent.parent.glob(f"*/*/{_DRAM}*")} - {folder}:
        # Another user may own the folder, or it may be deleted meanwhile.
        with contextlib.suppress(OSError, RelayError), ArenaLock(other).unclaimed() as nobody_holds_it:
            if nobody_holds_it:
                _delete_arenas(other)


def _are_disjoint(records: list[IndexRecord]) -> bool:
    if not records:
        return True
    return int(np.bincount(np.concatenate([record.entry.pages for record in records])).max()) == 1


def _delete_arenas(folder: Path, but: ArenaShape | None = None) -> None:
    for path in folder.iterdir():
        if path.name.startswith((_DRAM, _INDEX)) and not (but is not None and path.name.endswith(f"-{but.name}")):
            log.info("an arena that no worker uses is deleted", path=str(path))
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class MappedFile:
    """`bytes` uint8 [size] is the content; `inode` distinguishes the file from another one of the same name."""

    path: Path
    bytes: NDArray[np.uint8]
    inode: int


def map_file(path: Path, size_bytes: int) -> MappedFile:
    """Maps the first `size_bytes` of `path`, which is created if needed. Raises RelayError without memory for it."""
    try:
        file = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            _allocate(file, size_bytes)
            # Pages are mapped in advance, so that the first reload after a take-over causes no page faults.
            mapped = mmap.mmap(file, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            inode = os.fstat(file).st_ino
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise RelayError(_too_large(path, size_bytes)) from error
        raise RelayError(f"{path} cannot be mapped ({error.strerror}): check `worker.shared_path`.") from error
    return MappedFile(path, np.frombuffer(mapped, np.uint8), inode)


def allocated_bytes(path: Path) -> int:
    """Bytes that the file has allocated; 0 if it does not exist."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _allocate(file: int, size_bytes: int) -> None:
    before = os.fstat(file).st_size
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except OSError:
        # Gives back the memory of a partial allocation.
        if os.fstat(file).st_size != before:
            os.ftruncate(file, before)
        raise


def _too_large(path: Path, size_bytes: int) -> str:
    system = os.statvfs(path.parent)
    return (
        f"{path} needs {size_bytes / 2**30:.2f} GiB, but its file system has "
        f"{system.f_bavail * system.f_frsize / 2**30:.2f} GiB left: lower `worker.dram_bytes`, or enlarge the file "
        "system (`mount -o remount,size=...`; in a container `shm_size`)."
    )
