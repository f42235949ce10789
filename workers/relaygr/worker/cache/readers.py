"""Who reads the pages of a tier: pins. The cache's lock guards it.

A pin holds its pages whatever becomes of their entry, and of the work that fills them.
"""

from __future__ import annotations

from relaygr.worker.cache.entries import CacheEntry, EntryState, Pin, WorkInFlight
from relaygr.worker.cache.pages import PageArray
from relaygr.worker.cache.tier_state import TierState


class Readers:
    """Of one tier."""

    def __init__(self, state: TierState) -> None:
        self._state = state

    def pin(self, entry: CacheEntry, behaviours: int) -> Pin:
        """Holds the pages of the entry's first `behaviours` behaviours."""
        return self._pin(entry, entry.pages, behaviours)

    def pin_work(self, work: WorkInFlight, behaviours: int) -> Pin:
        """Holds the pages of a prefix under way. They stay the reader's when the work ends, well or not."""
        return self._pin(work.entry, work.table, behaviours)

    def unpin(self, pin: Pin) -> None:
        """Ends a hold. Raises ValueError if it has ended."""
        if not pin.open:
            raise ValueError("a handle was released twice")
        pin.open = False
        state = self._state
        state.pins.remove(pin)
        state.held_until_us.pop(pin, None)
        pin.entry.pins -= 1
        # What becomes free here had no entry any more.
        state.account.orphaned -= state.pool.drop(pin.pages)
        state.account.reclassify(pin.entry)

    def begin_spill(self, entry: CacheEntry) -> Pin:
        """Pins the whole entry for a copy to DRAM."""
        if entry.state is EntryState.READY:
            entry.step(EntryState.SPILLING)
        entry.spills += 1
        return self.pin(entry, entry.key.length)

    def end_spill(self, pin: Pin) -> None:
        """The copy ended, well or not."""
        entry = pin.entry
        entry.spills -= 1
        if entry.spills == 0 and entry.state is EntryState.SPILLING:
            entry.step(EntryState.READY)
        self.unpin(pin)

    def _pin(self, entry: CacheEntry, table: PageArray, behaviours: int) -> Pin:
        state = self._state
        pages = table[: state.pages_for(state.layout.tokens(behaviours))]
        state.pool.share(pages)
        pin = Pin(entry, pages)
        state.pins.add(pin)
        entry.pins += 1
        state.account.reclassify(entry)
        return pin
