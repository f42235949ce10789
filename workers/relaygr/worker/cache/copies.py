"""Reloads and spills: what is copied between the tiers, when that pays, and what its end changes.

The bytes are the mover's. All-or-nothing: only an ended copy is published, under the generation that it
began with; one that fails gives its pages back. A reload that fails is tried once more; if that fails too it
evicts what it read, whose bytes are in doubt. One that was not tried twice (the queue was full or closed, or nobody
had use for it) says nothing about them, and evicts nothing. The mover is called outside the lock.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache.arrival import LayerArrival
from relaygr.worker.cache.books import Books
from relaygr.worker.cache.entries import Entry, Pin, Work
from relaygr.worker.cache.events import EventKind
from relaygr.worker.cache.handles import Handle
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.pending import Pending
from relaygr.worker.cache.results import (
    Declined,
    DeclineReason,
    NoRoom,
    NoRoomReason,
    PendingKind,
    PendingOutcome,
    Purpose,
    SpillOutcome,
)
from relaygr.worker.cache.tiers import Tier
from relaygr.worker.cache.transfer import (
    CopyPriority,
    CopyRequest,
    Deadline,
    Mover,
    SpillGate,
    layer_groups,
    reload_pays,
)
from relaygr.worker.kv import DramGeometry

_FAR_FUTURE_US = 2**62


class Copies:
    """Of one cache. A page of the DRAM tier, as `geometry` says, is what crosses the link.

    With `layer_wise` a reload has a `LayerArrival`.
    """

    def __init__(
        self, books: Books, mover: Mover, spill_gate: SpillGate, geometry: DramGeometry, layer_wise: bool
    ) -> None:
        self._books = books
        self._mover = mover
        self._spill_gate = spill_gate
        self._page_bytes = geometry.page_bytes
        self._num_layers = geometry.kv.num_layers if layer_wise else 0

    def start_reload(
        self, key: PrefixKey, deadline_us: int, now_us: int, saved_us: float | None, rank_us: float
    ) -> Pending | NoRoom | Declined:
        """See `PrefixCache.start_reload`."""
        books = self._books
        with books.section(now_us) as after:
            begun = self._begin_reload(key, deadline_us, now_us, saved_us, rank_us)
            if isinstance(begun, Declined):
                books.counters.declined[begun.reason] += 1
                books.tell(after, EventKind.RELOAD, key, begun.reason)
                return begun
            if isinstance(begun, NoRoom):
                books.counters.no_room[begun.reason] += 1
                books.tell(after, EventKind.RELOAD, key, begun.reason)
                return begun
            if isinstance(begun, Pending):
                books.tell(after, EventKind.RELOAD, key, "joined")
                return begun
            work, pin, request = begun
            pending = books.pending[work]
            books.tell(after, EventKind.RELOAD, key, "started")
        if not self._mover.submit(request):
            with books.section() as after:
                books.dram.readers.unpin(pin)
                books.hbm.abort(work)
                books.counters.declined[DeclineReason.QUEUE_FULL] += 1
                books.finish(after, work, PendingOutcome.FAILED)
            return Declined(DeclineReason.QUEUE_FULL)
        return pending

    def spill(self, what: Handle | PrefixKey) -> SpillOutcome:
        """See `PrefixCache.spill`."""
        books = self._books
        with books.section() as after:
            begun = self._begin_spill(what)
            if isinstance(begun, SpillOutcome):
                books.counters.spills[begun] += 1
                return begun
            work, pin, request = begun
            books.tell(after, EventKind.SPILL, work.key, SpillOutcome.STARTED)
        started = self._mover.submit(request)
        outcome = SpillOutcome.STARTED if started else SpillOutcome.QUEUE_FULL
        with books.section():
            books.counters.spills[outcome] += 1
            if not started:
                books.hbm.readers.end_spill(pin)
                books.dram.abort(work)
        return outcome

    def close(self) -> None:
        """Ends the copies; those that wait fail."""
        self._mover.close()

    # Everything below runs under the lock, but for the two ends of copies, which take it.

    def _begin_reload(
        self, key: PrefixKey, deadline_us: int, now_us: int, saved_us: float | None, rank_us: float
    ) -> tuple[Work, Pin, CopyRequest] | Pending | NoRoom | Declined:
        hbm, dram = self._books.hbm, self._books.dram
        stored = dram.index.find(key) if self._books.refusal(key) is None else None
        found, coming = hbm.index.find(key), hbm.index.find_work(key)
        wanted = stored.behaviours if stored else 1
        if coming is not None and coming.behaviours >= wanted:
            return self._books.pending[coming.work]
        if found is not None and found.behaviours >= wanted:
            return Pending(PendingKind.LOAD, found.behaviours, PendingOutcome.PUBLISHED)
        target = stored.entry.key.head(stored.behaviours) if stored is not None else None
        if stored is None or target is None:
            return Declined(DeclineReason.NOT_IN_DRAM)
        if saved_us is not None:
            pages = hbm.pages_needed(target, found)
            forecast = self._mover.forecast(pages * self._page_bytes, CopyPriority.RELOAD)
            # Only a whole prefix can be ranked on while it arrives.
            overlaps = self._num_layers > 0 and target.length == key.length
            groups = layer_groups(self._num_layers, pages) if overlaps else 1
            if not reload_pays(forecast, saved_us, groups, rank_us):
                return Declined(DeclineReason.NOT_WORTH_IT)
        work = hbm.begin(target, PendingKind.LOAD, Purpose.RANKING, now_us, found)
        if isinstance(work, NoRoomReason):
            return NoRoom(work)
        dram.touch(stored.entry, now_us)
        pin = dram.readers.pin(stored.entry, stored.behaviours)
        work.arrival = LayerArrival(self._num_layers) if self._num_layers else None
        deadline = Deadline(deadline_us)
        self._books.pending[work] = Pending(PendingKind.LOAD, target.length, arrival=work.arrival, deadline=deadline)
        again = CopyRequest(
            source=Tier.DRAM,
            target=Tier.HBM,
            source_pages=pin.pages[work.kept :],
            target_pages=work.new_pages,
            priority=CopyPriority.RELOAD,
            deadline=deadline,
            on_done=partial(self._reloaded, work, pin, None),
        )
        first = replace(again, on_done=partial(self._reloaded, work, pin, again), arrival=work.arrival)
        return work, pin, first

    def _reloaded(self, work: Work, pin: Pin, again: CopyRequest | None, copied: bool) -> None:
        books = self._books
        if not copied and work.arrival is not None:
            work.arrival.fail()
        if not copied and again is not None and self._retries(work, pin, again):
            return
        with books.section() as after:
            books.dram.readers.unpin(pin)
            outcome = PendingOutcome.FAILED
            if copied:
                entry = books.hbm.publish(work, books.latest_us, PrefixSource.DRAM)
                outcome = PendingOutcome.PUBLISHED if entry is not None else PendingOutcome.INVALIDATED
            else:
                books.hbm.abort(work)
                if again is None and pin.entry.attached:
                    books.remove(after, [(books.dram, pin.entry)])
            books.counters.reloads[outcome] += 1
            books.finish(after, work, outcome)
            books.tell(after, EventKind.RELOADED, work.key, outcome)

    def _retries(self, work: Work, pin: Pin, again: CopyRequest) -> bool:
        """Whether a copy that failed is made once more: somebody may still have use for it, and there is room."""
        with self._books.section():
            if not (work.is_current and pin.entry.attached):
                return False
        if not self._mover.submit(again):
            return False
        with self._books.section():
            self._books.counters.reload_retries += 1
        return True

    def _begin_spill(self, what: Handle | PrefixKey) -> tuple[Work, Pin, CopyRequest] | SpillOutcome:
        hbm, dram, now_us = self._books.hbm, self._books.dram, self._books.latest_us
        entry = self._entry_of(what)
        if entry is None:
            return SpillOutcome.NOT_READY
        stored = dram.index.find(entry.key)
        if stored is not None and stored.behaviours == entry.key.length:
            dram.touch(stored.entry, now_us)
            return SpillOutcome.ALREADY_THERE
        if dram.index.find_work(entry.key) is not None:
            return SpillOutcome.UNDER_WAY
        size_bytes = dram.pages_needed(entry.key, stored) * self._page_bytes
        if not self._spill_gate.admits(self._mover.forecast(size_bytes, CopyPriority.SPILL).wait_us):
            return SpillOutcome.SLOW
        work = dram.begin(entry.key, PendingKind.LOAD, Purpose.RANKING, now_us, stored)
        if isinstance(work, NoRoomReason):
            return SpillOutcome.NO_ROOM
        pin = hbm.readers.begin_spill(entry)
        request = CopyRequest(
            source=Tier.HBM,
            target=Tier.DRAM,
            source_pages=pin.pages[work.kept :],
            target_pages=work.new_pages,
            priority=CopyPriority.SPILL,
            deadline=Deadline(_FAR_FUTURE_US),
            on_done=partial(self._spilled, work, pin),
        )
        return work, pin, request

    def _spilled(self, work: Work, pin: Pin, copied: bool) -> None:
        books = self._books
        with books.section() as after:
            outcome = PendingOutcome.FAILED
            if copied:
                entry = books.dram.publish(work, books.latest_us, pin.entry.source)
                outcome = PendingOutcome.PUBLISHED if entry is not None else PendingOutcome.INVALIDATED
            else:
                books.dram.abort(work)
            books.hbm.readers.end_spill(pin)
            books.counters.spills_ended[outcome] += 1
            books.tell(after, EventKind.SPILLED, work.key, outcome)

    def _entry_of(self, what: Handle | PrefixKey) -> Entry | None:
        if isinstance(what, Handle):
            entry = what.pin.entry
            return entry if entry.attached and entry.is_visible else None
        match = self._books.hbm.index.find(what)
        return match.entry if match is not None else None
