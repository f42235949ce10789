"""Prefixes that are computed: pages are reserved, filled by the caller, and shown or given back.

Two-phase: nobody sees what is not published, and only work that is still current is. Single flight: whoever asks for
what is being filled or loaded gets the `Pending` of that work.
"""

from __future__ import annotations

from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache.entries import PrefixMatch
from relaygr.worker.cache.events import EventKind
from relaygr.worker.cache.handles import Fill, Handle
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.ledger import After, TierLedger
from relaygr.worker.cache.pending import PendingPrefix
from relaygr.worker.cache.pins import Pins
from relaygr.worker.cache.results import NoRoom, NoRoomReason, PendingKind, PendingOutcome, Purpose


class Fills:
    """Of one cache."""

    def __init__(self, ledger: TierLedger, pins: Pins) -> None:
        self._ledger = ledger
        self._pins = pins

    def reserve(
        self, key: PrefixKey, now_us: int, purpose: Purpose, own: Handle | None
    ) -> Fill | NoRoom | PendingPrefix:
        """See `PrefixCache.reserve` and, with a handle of the caller's `own`, `PrefixCache.extend`."""
        ledger, hbm = self._ledger, self._ledger.hbm
        with ledger.section(now_us) as after:
            refusal = ledger.refusal(key)
            if refusal is not None:
                return self._no_room(after, key, NoRoomReason(refusal.value))
            found, coming = hbm.index.find(key), hbm.index.find_work(key)
            covered = found.behaviours if found else 0
            if covered == key.length and found is not None:
                return PendingPrefix(PendingKind.FILL, covered, PendingOutcome.PUBLISHED)
            if coming is not None and coming.behaviours > covered:
                ledger.tell(after, EventKind.RESERVE, key, "joined")
                return ledger.pending[coming.work]
            own_pins = int(own is not None and own.pin.open and found is not None and own.pin.entry is found.entry)
            work = hbm.begin(key, PendingKind.FILL, purpose, now_us, found, own_pins)
            if isinstance(work, NoRoomReason):
                return self._no_room(after, key, work)
            ledger.counters.appends += work.base is not None
            ledger.pending[work] = PendingPrefix(PendingKind.FILL, key.length)
            ledger.tell(after, EventKind.RESERVE, key, "append" if work.base is not None else "fill")
            self._pins.begin(work)
            return Fill(self, work)

    def publish(self, fill: Fill, now_us: int) -> Handle | None:
        """See `Fill.publish`."""
        if fill.filled_tokens != fill.tokens:
            raise ValueError(f"{fill.filled_tokens} of {fill.tokens} tokens are filled: publish nothing half done")
        ledger, work = self._ledger, fill.work
        with ledger.section(now_us) as after:
            if work.forced:
                return None
            entry = ledger.hbm.publish(work, now_us, PrefixSource.COMPUTED)
            outcome = PendingOutcome.PUBLISHED if entry is not None else PendingOutcome.INVALIDATED
            ledger.counters.fills[outcome] += 1
            ledger.finish(after, work, outcome)
            ledger.tell(after, EventKind.PUBLISH, work.key, outcome)
            return self._pins.handle(PrefixMatch(entry, work.key.length), work.key) if entry is not None else None

    def abort(self, fill: Fill) -> None:
        """See `Fill.abort`."""
        ledger, work = self._ledger, fill.work
        with ledger.section() as after:
            if work.forced or not work.open:
                return
            ledger.hbm.abort(work)
            ledger.counters.fills[PendingOutcome.FAILED] += 1
            ledger.finish(after, work, PendingOutcome.FAILED)
            ledger.tell(after, EventKind.ABORT, work.key, PendingOutcome.FAILED)

    def _no_room(self, after: After, key: PrefixKey, reason: NoRoomReason) -> NoRoom:
        self._ledger.counters.no_room[reason] += 1
        self._ledger.tell(after, EventKind.RESERVE, key, reason)
        return NoRoom(reason)
