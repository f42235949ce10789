"""Cached prefixes of one tier: their states, pins, handles and work in flight, and the indexes that find them.

    EMPTY -> FILLING (computed here)      -> READY <-> SPILLING (readable, and being copied to DRAM)
    EMPTY -> LOADING (copied from DRAM)   -> READY  -> EVICTED
    FILLING, LOADING -> EMPTY             failed, aborted or invalidated

Only READY and SPILLING entries are visible. An entry that grows stays READY: its tail is a `WorkInFlight`
and becomes part of the entry when it is published. The generation of an entry changes when the entry leaves
the index. Work in flight carries the generation under which it began, and is discarded if the two differ.
Nothing here is thread-safe: the cache's lock guards it. Times are passed in.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from relaygr.schemas.messages import PrefixSource
from relaygr.schemas.record import record
from relaygr.worker.cache.copies import LayerArrival
from relaygr.worker.cache.identity import PrefixKey, common_behaviours
from relaygr.worker.cache.results import PageArray, PageCopy, PendingKind, Purpose


class EntryState(enum.StrEnum):
    """See the diagram of the module. Only `TierMetadata` changes the state of an entry."""

    EMPTY = "empty"
    FILLING = "filling"
    LOADING = "loading"
    READY = "ready"
    SPILLING = "spilling"
    EVICTED = "evicted"


class Holding(enum.StrEnum):
    """Why the pages of an entry are not free. If several apply, the first in this order counts."""

    PINNED = "pinned"
    LEASED = "leased"
    EVICTABLE = "evictable"


@dataclass(slots=True, eq=False)
class CacheEntry:
    """A cached prefix. `pages` (int32) is its page table, `tokens` the rows in it, `pins` the number of readers."""

    number: int
    key: PrefixKey
    generation: int
    pages: PageArray
    state: EntryState = EntryState.EMPTY
    is_visible: bool = False
    """Whether the state is READY or SPILLING."""
    tokens: int = 0
    pins: int = 0
    spills: int = 0
    leases: set[str] = field(default_factory=set)
    work: WorkInFlight | None = None
    source: PrefixSource = PrefixSource.COMPUTED
    unused_pre_infer: bool = False
    attached: bool = True
    """Whether the entry is in the index."""
    holding: Holding = Holding.EVICTABLE
    counted_pages: int = 0
    """Pages that the tier's `PageAccount` counts under `holding`."""
    ready_us: int = 0
    """When the entry became READY in this process."""
    used_us: int = 0
    """The latest use in this process; 0 before the first one."""


@dataclass(slots=True, eq=False)
class Pin:
    """One reader's reference to the first pages of an entry. `revoked`: the cache took it back, since it was leaked."""

    entry: CacheEntry
    pages: PageArray
    open: bool = True
    revoked: bool = False


@record(frozen=True, slots=True, eq=False)
class Handle:
    """A pinned prefix in HBM. Its pages do not change until it is released, even if the entry is removed.

    `pages` is int32 [pages_for(tokens)]: token t lies in row t % page_tokens of pages[t // page_tokens].
    The handle covers the first `behaviours` behaviours of the key; `complete` means all of them.
    `approximate` means that a part of the K,V came from a DRAM tier that stores it in fewer bits.
    With an `arrival`, the last layers may still be on their way from DRAM. The reader then calls
    `arrival.wait(layer)` before it reads each layer, and discards its results if the arrival failed.
    """

    behaviours: int
    tokens: int
    pages: PageArray
    complete: bool
    source: PrefixSource
    pin: Pin = field(repr=False)
    approximate: bool = False
    arrival: LayerArrival | None = None

    @property
    def is_held(self) -> bool:
        """False once the handle was released or revoked. Its pages may then hold other data."""
        return self.pin.open and not self.pin.revoked


@record(frozen=True, slots=True)
class Hit:
    """K,V in HBM, pinned until the caller releases the handle."""

    handle: Handle


@record(frozen=True, slots=True)
class Presence:
    """Ready behaviours of a key in each tier."""

    hbm_behaviours: int
    dram_behaviours: int


@dataclass(slots=True, eq=False)
class WorkInFlight:
    """Pages that are being filled or loaded, for a new entry or for the tail of one that grows.

    For a tail, `base` pins the rows it builds on: `start_tokens` rows are there already, and the first `kept`
    pages of the entry stay in its page table. `revoked`: the cache took the fill back, since it was leaked.
    """

    number: int
    kind: PendingKind
    purpose: Purpose
    key: PrefixKey
    tokens: int
    entry: CacheEntry
    generation: int
    new_pages: PageArray
    base: Pin | None = None
    kept: int = 0
    start_behaviours: int = 0
    start_tokens: int = 0
    copy_page: PageCopy | None = None
    arrival: LayerArrival | None = None
    open: bool = True
    revoked: bool = False

    @property
    def is_current(self) -> bool:
        """False once the entry was removed, or the work was given up."""
        return self.generation == self.entry.generation

    @property
    def table(self) -> PageArray:
        """The page table that the entry will have."""
        kept = self.base.pages[: self.kept] if self.base is not None else self.new_pages[:0]
        return np.concatenate((kept, self.new_pages))


@record(frozen=True, slots=True)
class PrefixMatch:
    """An entry that covers the first `behaviours` behaviours of the requested key."""

    entry: CacheEntry
    behaviours: int


@record(frozen=True, slots=True)
class WorkMatch:
    """Work in flight that will cover the first `behaviours` behaviours of the requested key."""

    work: WorkInFlight
    behaviours: int


class EntryIndex:
    """The entries of one tier by number, by user and by model."""

    def __init__(self) -> None:
        self.by_number: dict[int, CacheEntry] = {}
        self.by_user: dict[str, list[CacheEntry]] = {}
        self.by_namespace: dict[bytes, dict[int, CacheEntry]] = {}

    def __len__(self) -> int:
        return len(self.by_number)

    def __getitem__(self, number: int) -> CacheEntry:
        return self.by_number[number]

    def all(self) -> Iterable[CacheEntry]:
        return self.by_number.values()

    def add(self, entry: CacheEntry) -> None:
        self.by_number[entry.number] = entry
        self.by_user.setdefault(entry.key.user_id, []).append(entry)
        self.by_namespace.setdefault(entry.key.namespace, {})[entry.number] = entry

    def remove(self, entry: CacheEntry) -> None:
        """Removes the entry, and the lists that it leaves empty: there is no bound on the number of users over time."""
        del self.by_number[entry.number]
        siblings = self.by_user[entry.key.user_id]
        siblings.remove(entry)
        if not siblings:
            del self.by_user[entry.key.user_id]
        peers = self.by_namespace[entry.key.namespace]
        del peers[entry.number]
        if not peers:
            del self.by_namespace[entry.key.namespace]

    def find(self, key: PrefixKey) -> PrefixMatch | None:
        """The visible entry that covers most of `key`."""
        best: CacheEntry | None = None
        most = 0
        for entry in self.by_user.get(key.user_id, ()):
            if entry.is_visible:
                behaviours = common_behaviours(key, entry.key)
                if behaviours > most:
                    best, most = entry, behaviours
        return PrefixMatch(best, most) if best is not None else None

    def find_work(self, key: PrefixKey) -> WorkMatch | None:
        """The work in flight that will cover most of `key`."""
        best: WorkInFlight | None = None
        most = 0
        for entry in self.by_user.get(key.user_id, ()):
            if entry.work is not None:
                behaviours = common_behaviours(key, entry.work.key)
                if behaviours > most:
                    best, most = entry.work, behaviours
        return WorkMatch(best, most) if best is not None else None

    def of_user(self, user_id: str) -> list[CacheEntry]:
        return list(self.by_user.get(user_id, ()))

    def of_namespace(self, namespace: bytes, limit: int) -> list[CacheEntry]:
        """At most `limit` entries of the namespace."""
        return list(itertools.islice(self.by_namespace.get(namespace, {}).values(), limit))


_Leaser = tuple[str, str]
"""The user and the id of a request."""


@record(frozen=True, slots=True)
class Lease:
    """A request that protects an entry from eviction until a time."""

    request_id: str
    entry: CacheEntry
    until_us: int


class Leases:
    """Requests that protect entries of a tier from eviction, from the pre-infer to the ranking.

    A request of a user leases at most one entry of that user, and there are at most `limit` leases. A request of
    another user with the same id is another request: whoever knows an id cannot end its lease. A lease
    that is not ended expires at its time. The caller reclassifies the pages of every entry that a method returns.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_request: dict[_Leaser, Lease] = {}
        self._by_end: list[tuple[int, _Leaser]] = []

    def __len__(self) -> int:
        return len(self._by_request)

    def get(self, user_id: str, request_id: str) -> Lease | None:
        return self._by_request.get((user_id, request_id))

    def all(self) -> list[Lease]:
        return list(self._by_request.values())

    def begin(self, entry: CacheEntry, request_id: str, until_us: int) -> list[CacheEntry]:
        """Leases the entry to the request, in place of its previous entry. Returns both; none at `limit`."""
        leaser = entry.key.user_id, request_id
        previous = self._by_request.get(leaser)
        if previous is None and len(self._by_request) >= self._limit:
            return []
        self._by_request[leaser] = Lease(request_id, entry, until_us)
        heapq.heappush(self._by_end, (until_us, leaser))
        # Leases that ended or moved leave stale times in the heap, which is rebuilt before most of its times are stale.
        if len(self._by_end) > 2 * len(self._by_request) + 64:
            self._by_end = [(lease.until_us, leaser) for leaser, lease in self._by_request.items()]
            heapq.heapify(self._by_end)
        changed = [entry]
        if previous is not None and previous.entry is not entry:
            previous.entry.leases.discard(request_id)
            changed.append(previous.entry)
        entry.leases.add(request_id)
        return changed

    def end(self, user_id: str, request_id: str) -> CacheEntry | None:
        """Ends the request's lease. Returns the entry that it had, or None without a lease."""
        lease = self._by_request.pop((user_id, request_id), None)
        if lease is None:
            return None
        lease.entry.leases.discard(request_id)
        return lease.entry

    def expire(self, now_us: int) -> list[CacheEntry]:
        """Ends every lease whose time has come. Returns their entries, one for each lease."""
        ended = []
        while self._by_end and self._by_end[0][0] <= now_us:
            until_us, leaser = heapq.heappop(self._by_end)
            lease = self._by_request.get(leaser)
            if lease is not None and lease.until_us == until_us:
                del self._by_request[leaser]
                lease.entry.leases.discard(lease.request_id)
                ended.append(lease.entry)
        return ended

    def end_all(self, entry: CacheEntry) -> None:
        """Ends all leases of an entry that has left the index."""
        for request_id in entry.leases:
            self._by_request.pop((entry.key.user_id, request_id), None)
        entry.leases.clear()
