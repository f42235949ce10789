"""Reloads and spills: which pages are copied between the tiers, whether that pays, and the effect of a copy's end.

The mover copies the bytes; this module calls it outside the lock. Only a copy that has succeeded is published, and
only if its work is still current. A copy that fails frees its pages.

A reload that fails is tried once more. If it fails again, the DRAM entry is evicted, since its bytes may be damaged.
A reload that was not tried twice (the queue was full or closed, or the entry was removed) is no sign of damaged
bytes, so it evicts nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache.copies import (
    CopyForecast,
    CopyPriority,
    CopyRequest,
    Deadline,
    LayerArrival,
    Mover,
    layer_groups,
)
from relaygr.worker.cache.entries import CacheEntry, Handle, Pin, WorkInFlight
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.ledger import PendingPrefix, TierLedger
from relaygr.worker.cache.results import (
    Declined,
    DeclineReason,
    NoRoom,
    NoRoomReason,
    PendingKind,
    PendingOutcome,
    Purpose,
    SpillOutcome,
    Tier,
)

FAR_FUTURE_US = 2**62


def reload_pays(forecast: CopyForecast, saved_us: float, groups: int = 1, rank_us: float = 0.0) -> bool:
    """Whether `wait + copy < T_full - T_hit`. Otherwise full inference is as fast; equal times do not pay.

    A copy in `groups` of layers runs beside a ranking that takes `rank_us` by itself. Only the part of the copy counts
    for which the ranking waits: the first group, and the excess of each other group over its share of the ranking.
    """
    exposed_us = forecast.copy_us / groups + (1 - 1 / groups) * max(0.0, forecast.copy_us - rank_us)
    return forecast.wait_us + exposed_us < saved_us


class SpillGate:
    """Admits spills while copies are fast, judged by an average of the predicted wait, with hysteresis.

    Closes above `close_above_us` and opens below `open_below_us`. Raises ValueError unless
    0 < open_below_us <= close_above_us and 0 < weight <= 1.
    """

    def __init__(self, open_below_us: float, close_above_us: float, weight: float = 0.2) -> None:
        if not 0 < open_below_us <= close_above_us:
            raise ValueError(f"a gate cannot close at {close_above_us} µs and open at {open_below_us} µs")
        if not 0 < weight <= 1:
            raise ValueError(f"the newest wait cannot weigh {weight}")
        self._open_below_us = open_below_us
        self._close_above_us = close_above_us
        self._weight = weight
        self._average_us = 0.0
        self._is_open = True

    def admits(self, wait_us: float) -> bool:
        """Adds the wait that a spill would have now to the average. Returns whether the spill may start."""
        self._average_us += self._weight * (wait_us - self._average_us)
        if self._average_us > self._close_above_us:
            self._is_open = False
        elif self._average_us < self._open_below_us:
            self._is_open = True
        return self._is_open


class TierTransfers:
    """See the module. A page takes `page_bytes` on the link between the tiers.

    With `num_layers` above 0, reloads arrive layer by layer (`LayerArrival`).
    """

    def __init__(
        self, ledger: TierLedger, mover: Mover, spill_gate: SpillGate, page_bytes: int, num_layers: int
    ) -> None:
        self._ledger = ledger
        self._mover = mover
        self._spill_gate = spill_gate
        self._page_bytes = page_bytes
        self._num_layers = num_layers

    def start_reload(
        self, key: PrefixKey, deadline_us: int, now_us: int, saved_us: float | None = None, rank_us: float = 0.0
    ) -> PendingPrefix | NoRoom | Declined:
        """Starts to copy the part of `key` that DRAM has to HBM.

        With `saved_us` (T_full - T_hit) the copy starts only if it is faster than that. If a ranking may begin on
        the first layer, the part of the copy that a ranking of `rank_us` hides costs nothing. If the copy fails
        twice, the waiters get FAILED. A caller that joins an earlier reload calls `PendingPrefix.needed_by`.
        """
        ledger = self._ledger
        with ledger.lock:
            ledger.pass_time(now_us)
            begun = self._begin_reload(key, deadline_us, now_us, saved_us, rank_us)
            if isinstance(begun, Declined):
                ledger.counters.declined[begun.reason] += 1
                return begun
            if isinstance(begun, NoRoom):
                ledger.counters.no_room[begun.reason] += 1
                return begun
            if isinstance(begun, PendingPrefix):
                return begun
            work, pin, request = begun
            pending = ledger.pending[work]
        if not self._mover.submit(request):
            with ledger.section as after:
                ledger.dram.unpin(pin)
                ledger.hbm.abort(work)
                ledger.counters.declined[DeclineReason.QUEUE_FULL] += 1
                ledger.finish(after, work, PendingOutcome.FAILED)
            return Declined(DeclineReason.QUEUE_FULL)
        return pending

    def spill(self, source: Handle | PrefixKey) -> SpillOutcome:
        """Starts to copy an entry to DRAM, or only its tail if DRAM has the beginning. Never waits."""
        ledger = self._ledger
        with ledger.lock:
            begun = self._begin_spill(source)
            if isinstance(begun, SpillOutcome):
                ledger.counters.spills[begun] += 1
                return begun
            work, pin, request = begun
        started = self._mover.submit(request)
        outcome = SpillOutcome.STARTED if started else SpillOutcome.QUEUE_FULL
        with ledger.lock:
            ledger.counters.spills[outcome] += 1
            if not started:
                ledger.hbm.end_spill(pin)
                ledger.dram.abort(work)
        return outcome

    def begin_fetch(self, key: PrefixKey, pending: PendingPrefix) -> WorkInFlight | None:
        """Takes DRAM pages for bytes of `key` from another source than HBM; None without room, or if DRAM has them.

        `pending` ends with the work, or when the prefix is removed meanwhile. The pages stay the caller's until
        `end_fetch`.
        """
        ledger, dram = self._ledger, self._ledger.dram
        with ledger.lock:
            stored = dram.index.find(key)
            if ledger.refusal(key) is not None or (stored is not None and stored.behaviours == key.length):
                return None
            if dram.index.find_work(key) is not None:
                return None
            work = dram.begin(key, PendingKind.LOAD, Purpose.RANKING, None)
            if isinstance(work, NoRoomReason):
                return None
            ledger.pending[work] = pending
            return work

    def end_fetch(self, work: WorkInFlight, is_filled: bool) -> bool:
        """Publishes the pages if they hold every row and the prefix was not removed meanwhile, else frees them.
        Returns whether they were published.
        """
        ledger = self._ledger
        with ledger.section as after:
            entry = None
            if is_filled:
                entry = ledger.dram.publish(work, ledger.latest_us, PrefixSource.DRAM)
            else:
                ledger.dram.abort(work)
            ledger.finish(after, work, PendingOutcome.PUBLISHED if entry is not None else PendingOutcome.FAILED)
            return entry is not None

    def pin_stored(self, key: PrefixKey) -> tuple[Pin, int] | None:
        """Pins what DRAM has of `key`, and returns the number of its behaviours. None if it has nothing."""
        dram = self._ledger.dram
        with self._ledger.lock:
            stored = dram.index.find(key)
            if stored is None:
                return None
            tokens = dram.shape.layout.tokens(stored.behaviours)
            return dram.pin(stored.entry, stored.entry.pages, tokens), stored.behaviours

    def unpin_stored(self, pin: Pin) -> None:
        """Ends a pin of `pin_stored`."""
        with self._ledger.lock:
            self._ledger.dram.unpin(pin)

    def close(self) -> None:
        """Completes the copies under way; those in the queue fail."""
        self._mover.close()

    # The methods below are called under the lock. Only `_reloaded` and `_spilled`, the ends of copies, take it.

    def _begin_reload(
        self, key: PrefixKey, deadline_us: int, now_us: int, saved_us: float | None, rank_us: float
    ) -> tuple[WorkInFlight, Pin, CopyRequest] | PendingPrefix | NoRoom | Declined:
        hbm, dram = self._ledger.hbm, self._ledger.dram
        stored = dram.index.find(key) if self._ledger.refusal(key) is None else None
        found, coming = hbm.index.find(key), hbm.index.find_work(key)
        wanted = stored.behaviours if stored else 1
        if coming is not None and coming.behaviours >= wanted:
            return self._ledger.pending[coming.work]
        if found is not None and found.behaviours >= wanted:
            return PendingPrefix(PendingKind.LOAD, found.behaviours, PendingOutcome.PUBLISHED)
        target = stored.entry.key.head(stored.behaviours) if stored is not None else None
        if stored is None or target is None:
            return Declined(DeclineReason.NOT_IN_DRAM)
        pages = hbm.pages_needed(hbm.shape.layout.tokens(target.length), found)
        forecast = self._mover.forecast(pages * self._page_bytes, CopyPriority.RELOAD)
        if saved_us is not None:
            # A ranking can begin on the first layer only if the whole prefix is reloaded.
            overlaps = self._num_layers > 0 and target.length == key.length
            groups = layer_groups(self._num_layers, pages) if overlaps else 1
            if not reload_pays(forecast, saved_us, groups, rank_us):
                return Declined(DeclineReason.NOT_WORTH_IT)
        work = hbm.begin(target, PendingKind.LOAD, Purpose.RANKING, found)
        if isinstance(work, NoRoomReason):
            return NoRoom(work)
        dram.touch(stored.entry, now_us)
        pin = dram.pin(stored.entry, stored.entry.pages, dram.shape.layout.tokens(stored.behaviours))
        work.arrival = LayerArrival(self._num_layers) if self._num_layers else None
        deadline = Deadline(deadline_us)
        self._ledger.pending[work] = PendingPrefix(
            PendingKind.LOAD,
            target.length,
            arrival=work.arrival,
            deadline=deadline,
            expected_us=now_us + forecast.wait_us + forecast.copy_us,
        )
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

    def _reloaded(self, work: WorkInFlight, pin: Pin, again: CopyRequest | None, copied: bool) -> None:
        ledger = self._ledger
        if not copied and work.arrival is not None:
            work.arrival.fail()
        if not copied and again is not None and self._retries(work, pin, again):
            return
        with ledger.section as after:
            ledger.dram.unpin(pin)
            outcome = PendingOutcome.FAILED
            if copied:
                entry = ledger.hbm.publish(work, ledger.latest_us, PrefixSource.DRAM)
                outcome = PendingOutcome.PUBLISHED if entry is not None else PendingOutcome.INVALIDATED
            else:
                ledger.hbm.abort(work)
                if again is None and pin.entry.attached:
                    ledger.remove(after, [(ledger.dram, pin.entry)])
            ledger.counters.reloads[outcome] += 1
            ledger.finish(after, work, outcome)

    def _retries(self, work: WorkInFlight, pin: Pin, again: CopyRequest) -> bool:
        """Tries a failed copy once more if its work is current. False if it is not, or if the queue is full."""
        with self._ledger.lock:
            if not (work.is_current and pin.entry.attached):
                return False
        if not self._mover.submit(again):
            return False
        with self._ledger.lock:
            self._ledger.counters.reload_retries += 1
        return True

    def _begin_spill(self, source: Handle | PrefixKey) -> tuple[WorkInFlight, Pin, CopyRequest] | SpillOutcome:
        hbm, dram, now_us = self._ledger.hbm, self._ledger.dram, self._ledger.latest_us
        entry = self._entry_of(source)
        if entry is None:
            return SpillOutcome.NOT_READY
        stored = dram.index.find(entry.key)
        if stored is not None and stored.behaviours == entry.key.length:
            dram.touch(stored.entry, now_us)
            return SpillOutcome.ALREADY_THERE
        if dram.index.find_work(entry.key) is not None:
            return SpillOutcome.UNDER_WAY
        # A page has the same tokens in both tiers.
        pages = dram.pages_needed(entry.tokens, stored) if stored is not None else entry.pages.size
        if not self._spill_gate.admits(self._mover.forecast(pages * self._page_bytes, CopyPriority.SPILL).wait_us):
            return SpillOutcome.SLOW
        work = dram.begin(entry.key, PendingKind.LOAD, Purpose.RANKING, stored)
        if isinstance(work, NoRoomReason):
            return SpillOutcome.NO_ROOM
        pin = hbm.begin_spill(entry)
        request = CopyRequest(
            source=Tier.HBM,
            target=Tier.DRAM,
            source_pages=pin.pages[work.kept :],
            target_pages=work.new_pages,
            priority=CopyPriority.SPILL,
            deadline=Deadline(FAR_FUTURE_US),
            on_done=partial(self._spilled, work, pin),
        )
        return work, pin, request

    def _spilled(self, work: WorkInFlight, pin: Pin, copied: bool) -> None:
        ledger = self._ledger
        with ledger.lock:
            outcome = PendingOutcome.FAILED
            if copied:
                entry = ledger.dram.publish(work, ledger.latest_us, pin.entry.source)
                outcome = PendingOutcome.PUBLISHED if entry is not None else PendingOutcome.INVALIDATED
            else:
                ledger.dram.abort(work)
            ledger.hbm.end_spill(pin)
            ledger.counters.spills_ended[outcome] += 1

    def _entry_of(self, source: Handle | PrefixKey) -> CacheEntry | None:
        if isinstance(source, Handle):
            entry = source.pin.entry
            return entry if entry.attached and entry.is_visible else None
        match = self._ledger.hbm.index.find(source)
        return match.entry if match is not None else None
