"""The DRAM tier in shared memory: attached ahead by whoever may need it, adopted by who holds the lock.

    attach      maps (and pins) the pages and the index; changes nothing that another process relies on
    read_ahead  decodes the index, as often as one likes, so that adopting decodes only what changed since
    adopt       under the lock: answers the prefixes that are there and may be trusted, drops all others

Trusted is what was written by this format, for this worker id, shape of K,V and DRAM file, by an earlier holder,
and matches its checksum; anything else in the header drops the index as a whole, with a reason in the log. So do
two prefixes that claim one page, which no holder writes. A record that is torn is dropped alone, and so are
those of other models. What the pages hold is verified later, by the `journal`.

Files carry the shape in their name, so a process with other settings never disturbs a live owner; what earlier
settings left is deleted when nobody holds the lock.
"""

from __future__ import annotations

import enum
import hashlib
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
from prometheus_client import Counter, Gauge

from relaygr.worker.cache.entries import CacheEntry
from relaygr.worker.cache.events import StoredEntry
from relaygr.worker.cache.results import PageArray
from relaygr.worker.device import Device
from relaygr.worker.kv import DramGeometry, PrefixLayout
from relaygr.worker.shared.index import ArenaIndex, Difference, Distrust, Identity, index_bytes, slot_bytes
from relaygr.worker.shared.lock import ArenaLock
from relaygr.worker.shared.mapped_file import MappedFile, allocated_bytes, map_file
from relaygr.worker.shared.record import IndexRecord, TornRecordError, most_bytes_per_page, pack, unpack

log = structlog.get_logger()

_DRAM: Final = "dram-"
_INDEX: Final = "index-"

_EPOCH = Gauge("relaygr_arena_epoch", "Counts the holders of this worker id's arena; 0: none is held")
_PREFIXES = Counter(
    "relaygr_arena_prefixes_total",
    "Prefixes found in the arena at start: restored, or dropped and why",
    ["outcome"],
)
_INDEX_DROPPED = Counter(
    "relaygr_arena_index_dropped_total", "Whole indexes that were not trusted at start, by reason", ["reason"]
)
_PAGES = Counter(
    "relaygr_arena_pages_verified_total",
    "Restored pages held against their checksums before their first use",
    ["outcome"],
)
_UNRECORDED = Counter("relaygr_arena_unrecorded_total", "Prefixes in DRAM that a successor will not find")


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """What must be equal for K,V of one process to mean anything to another."""

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
        """For the index's header."""
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
        """Tells the files of one shape from another's."""
        digest = hashlib.blake2b(repr(sorted(self.identity(0).items())).encode(), digest_size=4).hexdigest()
        return f"{self.num_pages}x{self.page_bytes}-{digest}"


class Found(enum.StrEnum):
    """What becomes of a prefix in the index."""

    RESTORED = "restored"
    TORN = "torn"
    FOREIGN = "foreign"
    OTHER_MODEL = "other_model"
    OVERLAPPING = "overlapping"


@dataclass(frozen=True, slots=True)
class _Decoded:
    """What lies in the slots of a page, None if it is no record of this arena, and its stamp."""

    stamp: int
    record: IndexRecord | None


class TornPageError(Exception):
    """A page of the arena does not hold what was sealed."""


class NotTheWriterError(Exception):
    """This process does not hold the arena's lock."""


class ArenaJournal:
    """A `TierJournal` and a `PageGuard`, of no effect before `lock` is held. `pages` uint8 [num_pages, page_bytes]."""

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
        """These are in the index, and in the books from now on; their pages are unverified."""
        if records:
            pages = np.concatenate([record.entry.pages for record in records])
            self._checksums[pages] = np.concatenate([record.checksums for record in records])
            self._unverified[pages] = True

    # The books, under the cache's lock.

    def published(self, entry: CacheEntry, now_us: int) -> None:
        if self._ended or not self._lock.is_held():
            return
        stored = StoredEntry(entry.key, entry.pages, entry.tokens, entry.source)
        record = pack(IndexRecord(stored, self._checksums[entry.pages], self._lock.arena_epoch))
        self._records += 1
        # No two records of an index have it: epochs count the writers.
        stamp = (self._lock.arena_epoch << 40) + self._records
        if not self._index.put(record, entry.pages, now_us, stamp):
            _UNRECORDED.inc()

    def touched(self, entry: CacheEntry, now_us: int) -> None:
        if not self._ended:
            self._index.use(int(entry.pages[0]), now_us)

    def removed(self, entry: CacheEntry) -> None:
        if not self._ended:
            self._index.drop(int(entry.pages[0]))

    def end(self) -> None:
        self._ended = True

    # The copy threads.

    def seal(self, pages: PageArray) -> None:
        """Raises NotTheWriterError: another process may have the arena, and these pages, by now."""
        if not self._lock.is_held():
            raise NotTheWriterError("the arena's lock is not this process's any more")
        self._checksums[pages] = [zlib.crc32(self._pages[page]) for page in pages]
        self._unverified[pages] = self._torn[pages] = False

    def verify(self, pages: PageArray) -> None:
        """Raises TornPageError."""
        unverified = pages[self._unverified[pages]]
        for page in unverified:
            if zlib.crc32(self._pages[page]) != self._checksums[page]:
                if not self._torn[page]:
                    # Once, though a copy that failed is tried again.
                    self._torn[page] = True
                    _PAGES.labels("torn").inc()
                    log.warning("a page of the arena is torn: its prefix will be dropped", page=int(page))
                raise TornPageError(f"page {page}")
            self._unverified[page] = False
            _PAGES.labels("whole").inc()


class SharedArena:
    """See the module. Made by `attach`. `tensor` uint8 [num_pages, page_bytes]; `journal` is the cache's."""

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
        """Maps the arena, which is made if it is not there. Raises RelayError if there is no room for it."""
        dram = map_file(folder / f"{_DRAM}{shape.name}", shape.dram_bytes)
        arena = cls(shape, lock, dram, map_file(folder / f"{_INDEX}{shape.name}", shape.index_bytes))
        if not device.pin_host(arena.tensor):
            log.warning("the arena's memory is not pinned: copies to the device are slower", device=device.name)
        return arena

    def read_ahead(self) -> int:
        """Decodes what is in the index now, written by a live owner or not; how many prefixes."""
        if self._index.difference(self._identity) is None:
            # Whatever is torn now may be in the middle of being written.
            found = self._read()
            self._decoded = {head: known for head, known in found.items() if known.record is not None}
        return len(self._decoded)

    def adopt(self, namespace: bytes) -> tuple[StoredEntry, ...]:
        """The prefixes of this model that earlier holders left, used longest ago first.

        From now on the journal records. Raises ValueError unless this process holds the lock.
        """
        if not self._lock.is_held():
            raise ValueError("only the holder of the lock may adopt an arena")
        arena_epoch = self._lock.arena_epoch
        _EPOCH.set(arena_epoch)
        difference = self._index.difference(self._identity)
        if difference is not None:
            self._start_anew(difference)
        outcomes: Tally[Found] = Tally()
        records = []
        for head, known in self._read().items():
            record = known.record
            if record is None:
                found = Found.TORN
            elif record.arena_epoch >= arena_epoch:
                found = Found.FOREIGN
            elif record.entry.key.namespace != namespace:
                found = Found.OTHER_MODEL
            else:
                found = Found.RESTORED
                records.append(record)
            outcomes[found] += 1
            if found is not Found.RESTORED:
                self._index.drop(head)
        self._decoded.clear()
        if not _are_disjoint(records):
            # No holder writes that, so nothing that is there can be believed.
            self._index.format(self._identity)
            outcomes[Found.OVERLAPPING] = outcomes.pop(Found.RESTORED)
            records.clear()
        for outcome, count in outcomes.items():
            _PREFIXES.labels(outcome.value).inc(count)
        self.journal.restored(records)
        counts = {outcome.value: count for outcome, count in outcomes.items()}
        log.info("arena adopted", arena_epoch=arena_epoch, **counts)
        return tuple(record.entry for record in records)

    def _start_anew(self, difference: Difference) -> None:
        self._index.format(self._identity)
        if difference.reason is not Distrust.NEW:
            _INDEX_DROPPED.labels(difference.reason.value).inc()
            log.warning(
                "the arena's index is dropped as a whole", reason=difference.reason.value, fields=difference.fields
            )

    def _read(self) -> dict[int, _Decoded]:
        """All that is in the index by page, used longest ago first; what was read ahead is not decoded again."""
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
        """Whether a prefix of this arena can look like that."""
        pages, shape = entry.pages, self._shape
        return (
            entry.key.is_known
            and entry.key.length > 0
            and entry.tokens == shape.layout.tokens(entry.key.length)
            and pages.size == shape.geometry.kv.pages_for(entry.tokens)
            and int(pages[0]) == head
            and int(pages.view("<u4").max()) < shape.num_pages
        )


def make_room(folder: Path, shape: ArenaShape, lock: ArenaLock) -> int:
    """Deletes what earlier settings left, unless a live process may use it; bytes that `shape`'s files take already."""
    with lock.unclaimed() as nobody_holds_it:
        if nobody_holds_it or lock.is_held():
            _delete_other_shapes(folder, shape)
    return sum(allocated_bytes(folder / f"{prefix}{shape.name}") for prefix in (_DRAM, _INDEX))


def _are_disjoint(records: list[IndexRecord]) -> bool:
    if not records:
        return True
    return int(np.bincount(np.concatenate([record.entry.pages for record in records])).max()) == 1


def _delete_other_shapes(folder: Path, shape: ArenaShape) -> None:
    for path in folder.iterdir():
        if path.name.startswith((_DRAM, _INDEX)) and not path.name.endswith(f"-{shape.name}"):
            log.info("an arena of other settings is deleted", path=str(path))
            path.unlink(missing_ok=True)
