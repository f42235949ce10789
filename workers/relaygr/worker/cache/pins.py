"""What the cache's users hold: handles, to read a prefix, and fills, to compute one. Each is given back by its holder.

What is held far too long was leaked, and is taken back by force. Its holder sees that it holds nothing any more
(`Handle.is_held`, `Fill.is_current`), and whoever waits for its prefix learns that it failed. The pages stay what
they are until the device has passed all that it was given before: until then it may read them, and write to them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog

from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache.arrival import LayerArrival
from relaygr.worker.cache.entries import Pin, PrefixMatch, WorkInFlight
from relaygr.worker.cache.events import EventKind
from relaygr.worker.cache.handles import Handle
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.ledger import TierLedger
from relaygr.worker.cache.results import PendingOutcome
from relaygr.worker.kv import DramGeometry, PrefixLayout

_log = structlog.get_logger()

LONGEST_HOLD_US = 180_000_000
"""What was not given back by then is leaked. Far beyond any request's, job's or forward's life: a job may wait 60 s
with a handle or a fill, and a device that takes 10 s for a forward is stuck."""


class Completion(Protocol):
    """An event of the device, seen from the host."""

    def add_done_callback(self, callback: Callable[[], None]) -> object:
        """Calls `callback()` once it is complete, from any thread; at once if it is."""


class Pins:
    """Of one cache. What it says of sections is about the lock of `books`."""

    def __init__(self, ledger: TierLedger, layout: PrefixLayout, geometry: DramGeometry, longest_hold_us: int) -> None:
        self._ledger = ledger
        self._layout = layout
        self._is_exact = geometry.is_exact
        self._longest_hold_us = longest_hold_us

    # Inside a section.

    def handle(self, match: PrefixMatch, key: PrefixKey) -> Handle:
        """On a part of `key`, or all of it, that is ready."""
        pin = self._ledger.hbm.readers.pin(match.entry, match.behaviours)
        return self._handle(pin, match.behaviours, key, match.entry.source, None)

    def arriving_handle(self, work: WorkInFlight, key: PrefixKey, arrival: LayerArrival) -> Handle:
        """On the whole of `key`, whose layers are on their way."""
        pin = self._ledger.hbm.readers.pin_work(work, key.length)
        return self._handle(pin, key.length, key, PrefixSource.DRAM, arrival)

    def begin(self, held: Pin | WorkInFlight) -> None:
        """From now on somebody holds this."""
        self._ledger.hbm.hold(held, self._ledger.latest_us + self._longest_hold_us)

    # Outside.

    def release(self, handle: Handle, after: Completion | None) -> None:
        """See `PrefixCache.release`."""
        _when_passed(after, partial(self._unpin, handle.pin))

    def take_overdue(self, now_us: int, after: Completion | None) -> int:
        """See `PrefixCache.take_overdue`."""
        ledger = self._ledger
        with ledger.section(now_us) as calls:
            overdue = ledger.hbm.take_overdue(now_us)
            for held in overdue:
                if isinstance(held, Pin):
                    ledger.counters.forced_unpins += 1
                    continue
                ledger.counters.forced_aborts += 1
                ledger.counters.fills[PendingOutcome.FAILED] += 1
                ledger.finish(calls, held, PendingOutcome.FAILED)
                ledger.tell(calls, EventKind.ABORT, held.key, PendingOutcome.FAILED)
        for held in overdue:
            if isinstance(held, Pin):
                _log.error("a handle was never released", pages=held.pages.size, tokens=held.entry.tokens)
            else:
                _log.error("a fill was never ended", pages=held.new_pages.size, tokens=held.tokens)
            _when_passed(after, partial(self._free, held))
        return len(overdue)

    def _handle(
        self, pin: Pin, behaviours: int, key: PrefixKey, source: PrefixSource, arrival: LayerArrival | None
    ) -> Handle:
        self.begin(pin)
        return Handle(
            behaviours=behaviours,
            tokens=self._layout.tokens(behaviours),
            pages=pin.pages,
            complete=behaviours == key.length,
            source=source,
            pin=pin,
            approximate=source is PrefixSource.DRAM and not self._is_exact,
            arrival=arrival,
        )

    def _unpin(self, pin: Pin) -> None:
        with self._ledger.section():
            if pin.forced:
                self._ledger.counters.late_releases += 1
            else:
                self._ledger.hbm.readers.unpin(pin)

    def _free(self, forced: Pin | WorkInFlight) -> None:
        with self._ledger.section():
            if isinstance(forced, Pin):
                self._ledger.hbm.readers.unpin(forced)
            else:
                self._ledger.hbm.abort(forced)


def _when_passed(after: Completion | None, call: Callable[[], None]) -> None:
    if after is None:
        call()
    else:
        after.add_done_callback(call)
