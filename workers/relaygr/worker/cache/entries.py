"""One cached prefix in one tier, its states, and work in flight.

    EMPTY -> FILLING (computed here)      -> READY <-> SPILLING (readable, being copied to DRAM)
    EMPTY -> LOADING (copied in)          -> READY  -> EVICTED
    FILLING, LOADING -> EMPTY             failed, aborted or invalidated

Only READY and SPILLING entries are visible. An entry that grows stays READY: its tail is `Work` in
flight beside it, and becomes part of it on publish. `generation` changes when an entry is taken out of
the index; work carries the generation it began under, and is discarded when they differ.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache.arrival import LayerArrival
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.pages import PageArray
from relaygr.worker.cache.results import PageCopy, PendingKind, Purpose


class EntryState(enum.StrEnum):
    """See the module's drawing."""

    EMPTY = "empty"
    FILLING = "filling"
    LOADING = "loading"
    READY = "ready"
    SPILLING = "spilling"
    EVICTED = "evicted"


VISIBLE = frozenset({EntryState.READY, EntryState.SPILLING})

_STEPS: dict[EntryState, frozenset[EntryState]] = {
    EntryState.EMPTY: frozenset({EntryState.FILLING, EntryState.LOADING}),
    EntryState.FILLING: frozenset({EntryState.READY, EntryState.EMPTY}),
    EntryState.LOADING: frozenset({EntryState.READY, EntryState.EMPTY}),
    EntryState.READY: frozenset({EntryState.SPILLING, EntryState.EVICTED}),
    # A prefix invalidated during its spill goes at once; the copy's own pin keeps the pages.
    EntryState.SPILLING: frozenset({EntryState.READY, EntryState.EVICTED}),
    EntryState.EVICTED: frozenset(),
}


class Holding(enum.StrEnum):
    """What keeps an entry's pages from being free; the first that applies, in this order."""

    PINNED = "pinned"
    LEASED = "leased"
    EVICTABLE = "evictable"


@dataclass(slots=True, eq=False)
class CacheEntry:
    """A prefix. `pages` (int32) is its page table, `tokens` the rows in it; `pins` counts readers."""

    number: int
    key: PrefixKey
    generation: int
    state: EntryState = EntryState.EMPTY
    pages: PageArray = field(default_factory=lambda: np.empty(0, np.int32))
    tokens: int = 0
    pins: int = 0
    spills: int = 0
    leases: set[str] = field(default_factory=set)
    work: WorkInFlight | None = None
    source: PrefixSource = PrefixSource.COMPUTED
    unused_pre_infer: bool = False
    attached: bool = True
    holding: Holding = Holding.EVICTABLE
    counted_pages: int = 0

    def step(self, state: EntryState) -> None:
        """Moves to `state`. Raises ValueError where the drawing has no such arrow."""
        if state not in _STEPS[self.state]:
            raise ValueError(f"an entry can not go from {self.state} to {state}")
        self.state = state

    @property
    def is_visible(self) -> bool:
        return self.state in VISIBLE


@dataclass(slots=True, eq=False)
class Pin:
    """One reader's hold on the first `pages` of an entry. `forced`: it was leaked, and taken from its holder."""

    entry: CacheEntry
    pages: PageArray
    open: bool = True
    forced: bool = False


@dataclass(slots=True, eq=False)
class WorkInFlight:
    """Pages being filled or loaded: a new entry's, or the tail of one that grows.

    `kept` leading pages of the entry stay in the table; `base` pins what the tail builds on.
    `start_tokens` rows are there already. `forced`: its fill was leaked, and taken from its holder.
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
    forced: bool = False

    @property
    def is_current(self) -> bool:
        """Whether its entry is still the one that it began for."""
        return self.generation == self.entry.generation

    @property
    def table(self) -> PageArray:
        """The page table as it will be."""
        kept = self.base.pages[: self.kept] if self.base is not None else self.new_pages[:0]
        return np.concatenate((kept, self.new_pages))


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """An entry, and how many leading behaviours of the key asked for it covers."""

    entry: CacheEntry
    behaviours: int


@dataclass(frozen=True, slots=True)
class WorkMatch:
    """Work in flight that will cover `behaviours` of the key."""

    work: WorkInFlight
    behaviours: int
