"""Prefixes that are computed: pages are reserved, filled by the caller, and shown or given back.

Two-phase: nobody sees what is not published, and only work that is still current is. Single flight: whoever asks for
what is being filled or loaded gets the `Pending` of that work.
"""

from __future__ import annotations

from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache.books import After, Books
from relaygr.worker.cache.entries import Match
from relaygr.worker.cache.events import EventKind
from relaygr.worker.cache.handles import Fill, Handle
from relaygr.worker.cache.holds import Holds
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.pending import Pending
from relaygr.worker.cache.results import NoRoom, NoRoomReason, PendingKind, PendingOutcome, Purpose


class Fills:
    """Of one cache."""

    def __init__(self, books: Books, holds: Holds) -> None:
        self._books = books
        self._holds = holds

    def reserve(self, key: PrefixKey, now_us: int, purpose: Purpose, own: Handle | None) -> Fill | NoRoom | Pending:
        """See `PrefixCache.reserve` and, with a handle of the caller's `own`, `PrefixCache.extend`."""
        books, hbm = self._books, self._books.hbm
        with books.section(now_us) as after:
            refusal = books.refusal(key)
            if refusal is not None:
                return self._no_room(after, key, NoRoomReason(refusal.value))
            found, coming = hbm.index.find(key), hbm.index.find_work(key)
            covered = found.behaviours if found else 0
            if covered == key.length and found is not None:
                return Pending(PendingKind.FILL, covered, PendingOutcome.PUBLISHED)
            if coming is not None and coming.behaviours > covered:
                books.tell(after, EventKind.RESERVE, key, "joined")
                return books.pending[coming.work]
            own_pins = int(own is not None and own.pin.open and found is not None and own.pin.entry is found.entry)
            work = hbm.begin(key, PendingKind.FILL, purpose, now_us, found, own_pins)
            if isinstance(work, NoRoomReason):
                return self._no_room(after, key, work)
            books.counters.appends += work.base is not None
            books.pending[work] = Pending(PendingKind.FILL, key.length)
            books.tell(after, EventKind.RESERVE, key, "append" if work.base is not None else "fill")
            self._holds.begin(work)
            return Fill(self, work)

    def publish(self, fill: Fill, now_us: int) -> Handle | None:
        """See `Fill.publish`."""
        if fill.filled_tokens != fill.tokens:
            raise ValueError(f"{fill.filled_tokens} of {fill.tokens} tokens are filled: publish nothing half done")
        books, work = self._books, fill.work
        with books.section(now_us) as after:
            if work.forced:
                return None
            entry = books.hbm.publish(work, now_us, PrefixSource.COMPUTED)
            outcome = PendingOutcome.PUBLISHED if entry is not None else PendingOutcome.INVALIDATED
            books.counters.fills[outcome] += 1
            books.finish(after, work, outcome)
            books.tell(after, EventKind.PUBLISH, work.key, outcome)
            return self._holds.handle(Match(entry, work.key.length), work.key) if entry is not None else None

    def abort(self, fill: Fill) -> None:
        """See `Fill.abort`."""
        books, work = self._books, fill.work
        with books.section() as after:
            if work.forced or not work.open:
                return
            books.hbm.abort(work)
            books.counters.fills[PendingOutcome.FAILED] += 1
            books.finish(after, work, PendingOutcome.FAILED)
            books.tell(after, EventKind.ABORT, work.key, PendingOutcome.FAILED)

    def _no_room(self, after: After, key: PrefixKey, reason: NoRoomReason) -> NoRoom:
        self._books.counters.no_room[reason] += 1
        self._books.tell(after, EventKind.RESERVE, key, reason)
        return NoRoom(reason)
