"""The prefix cache: two tiers of pages, one lock, and copies that others make.

Called by the poll thread (leases), the device thread (acquire, reserve, publish, release, spill) and the
copy threads (ends of copies). Sections under the lock are short and do no I/O; waiters, listeners and the
mover are called after it is left. Nothing here blocks on room: full under pinning answers `NoRoom`.

| operation | answers | then |
|---|---|---|
| `peek` | Presence | nothing changed |
| `acquire` | Hit, Pending, Miss | a hit is pinned until `release` |
| `reserve`, `extend` | Fill, NoRoom, Pending | compute, `publish` or `abort` |
| `start_reload` | Pending, NoRoom, Declined | the mover copies DRAM to HBM; `acquire` when it has PUBLISHED |
| `spill` | SpillOutcome | the mover copies HBM to DRAM |
| `lease`, `end_lease`, `expire_leases` | | an unpinned entry stays while leased |

Single flight: whoever asks for what is being filled or loaded gets the one `Pending` of that work. A
`Pending` that has ended well comes back from `reserve` and `start_reload` when the prefix is ready already.
All times are monotonic microseconds, passed in; what ends by itself (a copy) counts as the latest of them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from schemas.messages import PrefixSource
from workers.cache.entries import Entry, Match, Pin, Work
from workers.cache.events import CacheEvent, CacheListener, EventKind
from workers.cache.handles import Fill, Handle
from workers.cache.identity import PrefixKey
from workers.cache.metadata import TierMetadata
from workers.cache.pending import Pending
from workers.cache.policy import make_policy
from workers.cache.results import (
    Declined,
    DeclineReason,
    Hit,
    Miss,
    MissReason,
    NoRoom,
    NoRoomReason,
    PendingKind,
    PendingOutcome,
    Presence,
    Purpose,
    SpillOutcome,
    WasteReason,
)
from workers.cache.stats import CacheStats, Counters, snapshot
from workers.cache.tiers import Tier
from workers.cache.transfer import CopyPriority, CopyRequest, Mover, NoMover, SpillGate, reload_pays
from workers.kv import KvGeometry, PrefixLayout

# How many entries one section under the lock handles when very many are dropped or demoted.
_BATCH = 256
_FAR_FUTURE_US = 2**62

_After = list[Callable[[], None]]


class Completion(Protocol):
    """An event of the device, seen from the host."""

    def add_done_callback(self, callback: Callable[[], None]) -> object:
        """Calls `callback()` once it is complete, from any thread; at once if it is."""


class PrefixCache:
    """See the module. `mover` copies between the tiers; without one nothing is spilled or reloaded."""

    def __init__(
        self,
        geometry: KvGeometry,
        layout: PrefixLayout,
        hbm_pages: int,
        dram_pages: int = 0,
        mover: Mover | None = None,
        hbm_policy: str = "lru",
        dram_policy: str = "lru",
        spill_gate: SpillGate | None = None,
        lease_limit: int = 65_536,
        listener: CacheListener | None = None,
    ) -> None:
        self._page_bytes = geometry.page_bytes
        self._layout = layout
        self._mover: Mover = mover if mover is not None else NoMover()
        self._spill_gate = spill_gate if spill_gate is not None else SpillGate(20_000.0, 50_000.0)
        self._listener = listener
        self._counters = Counters()
        self._lock = threading.Lock()
        self._sequence = itertools.count()
        self._latest_us = 0
        self._pending: dict[Work, Pending] = {}
        self._only_namespace: bytes | None = None
        page_tokens = geometry.page_tokens
        self._hbm = TierMetadata(
            Tier.HBM, hbm_pages, page_tokens, layout, make_policy(hbm_policy), self._counters, lease_limit
        )
        self._dram = TierMetadata(
            Tier.DRAM, dram_pages, page_tokens, layout, make_policy(dram_policy), self._counters, lease_limit
        )

    # Looking and reading.

    def peek(self, key: PrefixKey) -> Presence:
        """What is there for `key`. Changes nothing, and counts nothing."""
        with self._lock:
            hbm, dram = self._hbm.find(key), self._dram.find(key)
            return Presence(
                hbm_behaviours=hbm.behaviours if hbm else 0,
                dram_behaviours=dram.behaviours if dram else 0,
                hbm_state=self._hbm.state(key),
                dram_state=self._dram.state(key),
            )

    def acquire(
        self, key: PrefixKey, now_us: int, join: bool = True, purpose: Purpose = Purpose.RANKING
    ) -> Hit | Pending | Miss:
        """The longest part of `key` that is ready in HBM, pinned.

        With `join` a part under way that will be longer is answered instead; a caller that can not
        wait for it asks again without. Only look-ups of rankings are counted, and make a pre-infer used.
        """
        with self._section(now_us) as after:
            counted = purpose is Purpose.RANKING
            if self._refusal(key) is None:
                found = self._hbm.find(key)
                covered = found.behaviours if found else 0
                coming = self._hbm.find_work(key) if join and covered < key.length else None
                if coming is not None and coming.behaviours > covered:
                    self._counters.joins[coming.work.kind] += counted
                    self._tell(after, EventKind.ACQUIRE, key, coming.work.kind)
                    return self._pending[coming.work]
                if found is not None:
                    self._hbm.touch(found.entry, now_us)
                    found.entry.unused_pre_infer = found.entry.unused_pre_infer and not counted
                    handle = self._handle(found, key)
                    self._counters.hits += counted
                    self._counters.partial_hits += counted and not handle.complete
                    self._tell(after, EventKind.ACQUIRE, key, "hit" if handle.complete else "partial_hit")
                    return Hit(handle)
            miss = self._miss(key)
            self._counters.misses[miss.reason] += counted
            self._tell(after, EventKind.ACQUIRE, key, miss.reason)
            return miss

    def release(self, handle: Handle, after: Completion | None = None) -> None:
        """Unpins, at once or when the device has passed `after`. Raises ValueError the second time."""
        if after is None:
            self._unpin(handle.pin)
        else:
            after.add_done_callback(partial(self._unpin, handle.pin))

    # Computing.

    def reserve(self, key: PrefixKey, now_us: int, purpose: Purpose = Purpose.PRE_INFER) -> Fill | NoRoom | Pending:
        """Pages to compute `key` into: only the tail's, where an entry covers its beginning."""
        return self._reserve(key, now_us, purpose, None)

    def extend(
        self, handle: Handle, key: PrefixKey, now_us: int, purpose: Purpose = Purpose.RANKING
    ) -> Fill | NoRoom | Pending:
        """`reserve`, by a caller whose own handle on the entry must not make its tail page shared.

        The handle stays as it was; the caller releases it as ever.
        """
        return self._reserve(key, now_us, purpose, handle)

    def publish(self, fill: Fill, now_us: int) -> Handle | None:
        """See `Fill.publish`."""
        if fill.filled_tokens != fill.tokens:
            raise ValueError(f"{fill.filled_tokens} of {fill.tokens} tokens are filled: publish nothing half done")
        work = fill.work
        with self._section(now_us) as after:
            entry = self._hbm.publish(work, now_us, PrefixSource.COMPUTED)
            outcome = PendingOutcome.PUBLISHED if entry is not None else PendingOutcome.INVALIDATED
            self._counters.fills[outcome] += 1
            self._finish(after, work, outcome)
            self._tell(after, EventKind.PUBLISH, work.key, outcome)
            return self._handle(Match(entry, work.key.length), work.key) if entry is not None else None

    def abort(self, fill: Fill) -> None:
        """See `Fill.abort`."""
        work = fill.work
        with self._section() as after:
            if work.open:
                self._hbm.abort(work)
                self._counters.fills[PendingOutcome.FAILED] += 1
                self._finish(after, work, PendingOutcome.FAILED)
                self._tell(after, EventKind.ABORT, work.key, PendingOutcome.FAILED)

    # Copying.

    def start_reload(
        self, key: PrefixKey, deadline_us: int, now_us: int, saved_us: float | None = None
    ) -> Pending | NoRoom | Declined:
        """Begins to copy what DRAM has of `key` to HBM; with `saved_us` (T_full - T_hit) only if that pays.

        A copy that fails evicts the DRAM entry: its bytes are in doubt. The waiters then get FAILED.
        """
        with self._section(now_us) as after:
            begun = self._begin_reload(key, deadline_us, now_us, saved_us)
            if isinstance(begun, Declined):
                self._counters.declined[begun.reason] += 1
                self._tell(after, EventKind.RELOAD, key, begun.reason)
                return begun
            if isinstance(begun, NoRoom):
                self._counters.no_room[begun.reason] += 1
                self._tell(after, EventKind.RELOAD, key, begun.reason)
                return begun
            if isinstance(begun, Pending):
                self._tell(after, EventKind.RELOAD, key, "joined")
                return begun
            work, pin, request = begun
            pending = self._pending[work]
            self._tell(after, EventKind.RELOAD, key, "started")
        if not self._mover.submit(request):
            with self._section() as after:
                self._dram.unpin(pin)
                self._hbm.abort(work)
                self._counters.declined[DeclineReason.QUEUE_FULL] += 1
                self._finish(after, work, PendingOutcome.FAILED)
            return Declined(DeclineReason.QUEUE_FULL)
        return pending

    def spill(self, what: Handle | PrefixKey) -> SpillOutcome:
        """Begins to copy an entry to DRAM, or its tail where DRAM has the beginning; never waits."""
        with self._section() as after:
            begun = self._begin_spill(what)
            if isinstance(begun, SpillOutcome):
                self._counters.spills[begun] += 1
                return begun
            work, pin, request = begun
            self._tell(after, EventKind.SPILL, work.key, SpillOutcome.STARTED)
        started = self._mover.submit(request)
        outcome = SpillOutcome.STARTED if started else SpillOutcome.QUEUE_FULL
        with self._section():
            self._counters.spills[outcome] += 1
            if not started:
                self._hbm.end_spill(pin)
                self._dram.abort(work)
        return outcome

    # Leases.

    def lease(self, key: PrefixKey, request_id: str, until_us: int) -> bool:
        """Keeps what HBM has or is getting of `key` from eviction until then; False if it has nothing."""
        with self._section() as after:
            found, coming = self._hbm.find(key), self._hbm.find_work(key)
            covered = found.behaviours if found else 0
            entry = found.entry if found else None
            if coming is not None and coming.behaviours > covered:
                entry = coming.work.entry
            if entry is None or not self._hbm.lease(entry, request_id, until_us):
                return False
            self._counters.leases_granted += 1
            self._tell(after, EventKind.LEASE, key, "granted")
            return True

    def end_lease(self, request_id: str, wasted: WasteReason | None = None) -> bool:
        """Ends it; False if there is none. `wasted` says why the pre-infer served nothing, if it did not."""
        with self._lock:
            return self._hbm.end_lease(request_id, wasted)

    def expire_leases(self, now_us: int) -> int:
        """Ends the leases that nobody ended in time, and counts them as leaked; how many."""
        with self._section(now_us):
            leaked = self._hbm.expire_leases(now_us)
            self._counters.leases_leaked += leaked
            return leaked

    # Taking away. Readers keep their pages; work in flight is discarded when it ends.

    def invalidate_user(self, user_id: str) -> int:
        """Nothing of the user can be found any more, in either tier; how many entries that were."""
        with self._section() as after:
            entries = [(tier, entry) for tier in self._tiers for entry in tier.entries_of(user_id)]
            self._remove(after, entries)
            return len(entries)

    def drop_namespace(self, namespace: bytes) -> int:
        """Frees everything of one model; how many entries."""
        dropped = 0
        while True:
            with self._section() as after:
                entries = [(tier, entry) for tier in self._tiers for entry in tier.entries_in(namespace)[:_BATCH]]
                if not entries:
                    return dropped
                self._remove(after, entries)
                dropped += len(entries)

    def keep_only(self, namespace: bytes) -> int:
        """From now on only this model's keys match or get pages; then frees the others' entries, and says how many."""
        with self._lock:
            self._only_namespace = namespace
            others = {other for tier in self._tiers for other in tier.namespaces()} - {namespace}
        return sum(self.drop_namespace(other) for other in others)

    def demote(self, users: Iterable[str] | Callable[[str], bool]) -> int:
        """Puts these users' entries first in the order of eviction; how many. They stay usable."""
        if callable(users):
            with self._lock:
                known = {user_id for tier in self._tiers for user_id in tier.users()}
            users = filter(users, known)
        demoted = 0
        remaining = iter(users)
        while batch := list(itertools.islice(remaining, _BATCH)):
            with self._lock:
                for tier, user_id in itertools.product(self._tiers, batch):
                    for entry in tier.entries_of(user_id):
                        tier.demote(entry)
                        demoted += 1
        return demoted

    def clear(self) -> None:
        """Empties both tiers and every index."""
        with self._section() as after:
            entries = [
                (tier, entry) for tier in self._tiers for user_id in tier.users() for entry in tier.entries_of(user_id)
            ]
            self._remove(after, entries)

    def close(self) -> None:
        """Ends the copies (those that wait fail), then clears."""
        self._mover.close()
        self.clear()

    # Counting.

    def stats(self) -> CacheStats:
        """Pages and totals now."""
        with self._lock:
            return snapshot(
                self._counters, self._hbm.stats(), self._dram.stats(), self._page_bytes, self._hbm.lease_count
            )

    def check_invariants(self) -> None:
        """Recounts all books; for tests. Raises AssertionError."""
        with self._lock:
            self._hbm.check_invariants()
            self._dram.check_invariants()
            if any(not work.open or work.entry.work is not work for work in self._pending):
                raise AssertionError("a pending outlived its work")

    # How it is done. Everything below but `_unpin` and the ends of copies runs under the lock.

    @property
    def _tiers(self) -> tuple[TierMetadata, TierMetadata]:
        return self._hbm, self._dram

    @contextmanager
    def _section(self, now_us: int = 0) -> Iterator[_After]:
        """The lock, and what is to be called once it is left."""
        after: _After = []
        with self._lock:
            self._latest_us = max(self._latest_us, now_us)
            yield after
        for call in after:
            call()

    def _tell(self, after: _After, kind: EventKind, key: PrefixKey, outcome: str) -> None:
        if self._listener is not None:
            sequence = next(self._sequence)
            event = CacheEvent(sequence, kind, key.user_id, key.namespace, key.chain.digest, key.length, str(outcome))
            after.append(partial(self._listener.on_event, event))

    def _finish(self, after: _After, work: Work, outcome: PendingOutcome) -> None:
        pending = self._pending.pop(work, None)
        if pending is not None:
            after.append(partial(pending.finish, outcome))

    def _refusal(self, key: PrefixKey) -> MissReason | None:
        if not key.is_known:
            return MissReason.UNKNOWN_IDENTITY
        if self._only_namespace is not None and key.namespace != self._only_namespace:
            return MissReason.OTHER_MODEL
        return None

    def _miss(self, key: PrefixKey) -> Miss:
        refusal = self._refusal(key)
        if refusal is not None:
            return Miss(refusal)
        dram = self._dram.find(key)
        if dram is not None:
            return Miss(MissReason.IN_DRAM, dram.behaviours)
        if any(tier.holds_user(key.user_id, key.namespace) for tier in self._tiers):
            return Miss(MissReason.OTHER_HISTORY)
        if any(tier.holds_user(key.user_id) for tier in self._tiers):
            return Miss(MissReason.OTHER_MODEL)
        return Miss(MissReason.ABSENT)

    def _handle(self, match: Match, key: PrefixKey) -> Handle:
        pin = self._hbm.pin(match.entry, match.behaviours)
        return Handle(
            behaviours=match.behaviours,
            tokens=self._layout.tokens(match.behaviours),
            pages=pin.pages,
            complete=match.behaviours == key.length,
            source=match.entry.source,
            pin=pin,
        )

    def _unpin(self, pin: Pin) -> None:
        with self._lock:
            self._hbm.unpin(pin)

    def _reserve(self, key: PrefixKey, now_us: int, purpose: Purpose, own: Handle | None) -> Fill | NoRoom | Pending:
        with self._section(now_us) as after:
            refusal = self._refusal(key)
            if refusal is not None:
                return self._no_room(after, key, NoRoomReason(refusal.value))
            found = self._hbm.find(key)
            covered = found.behaviours if found else 0
            if found is not None and covered == key.length:
                return Pending(PendingKind.FILL, covered, PendingOutcome.PUBLISHED)
            coming = self._hbm.find_work(key)
            if coming is not None and coming.behaviours > covered:
                self._tell(after, EventKind.RESERVE, key, "joined")
                return self._pending[coming.work]
            own_pins = int(own is not None and own.pin.open and found is not None and own.pin.entry is found.entry)
            work = self._hbm.begin(key, PendingKind.FILL, purpose, now_us, found, own_pins)
            if isinstance(work, NoRoomReason):
                return self._no_room(after, key, work)
            self._counters.appends += work.base is not None
            self._pending[work] = Pending(PendingKind.FILL, key.length)
            self._tell(after, EventKind.RESERVE, key, "append" if work.base is not None else "fill")
            return Fill(self, work)

    def _no_room(self, after: _After, key: PrefixKey, reason: NoRoomReason) -> NoRoom:
        self._counters.no_room[reason] += 1
        self._tell(after, EventKind.RESERVE, key, reason)
        return NoRoom(reason)

    def _begin_reload(
        self, key: PrefixKey, deadline_us: int, now_us: int, saved_us: float | None
    ) -> tuple[Work, Pin, CopyRequest] | Pending | NoRoom | Declined:
        stored = self._dram.find(key) if self._refusal(key) is None else None
        found, coming = self._hbm.find(key), self._hbm.find_work(key)
        wanted = stored.behaviours if stored else 1
        if coming is not None and coming.behaviours >= wanted:
            return self._pending[coming.work]
        if found is not None and found.behaviours >= wanted:
            return Pending(PendingKind.LOAD, found.behaviours, PendingOutcome.PUBLISHED)
        target = stored.entry.key.head(stored.behaviours) if stored is not None else None
        if stored is None or target is None:
            return Declined(DeclineReason.NOT_IN_DRAM)
        if saved_us is not None:
            size_bytes = self._hbm.pages_needed(target, found) * self._page_bytes
            if not reload_pays(self._mover.forecast(size_bytes, CopyPriority.RELOAD), saved_us):
                return Declined(DeclineReason.NOT_WORTH_IT)
        work = self._hbm.begin(target, PendingKind.LOAD, Purpose.RANKING, now_us, found)
        if isinstance(work, NoRoomReason):
            return NoRoom(work)
        self._dram.touch(stored.entry, now_us)
        pin = self._dram.pin(stored.entry, stored.behaviours)
        self._pending[work] = Pending(PendingKind.LOAD, target.length)
        request = CopyRequest(
            source=Tier.DRAM,
            target=Tier.HBM,
            source_pages=pin.pages[work.kept :],
            target_pages=work.new_pages,
            priority=CopyPriority.RELOAD,
            deadline_us=deadline_us,
            on_done=partial(self._reloaded, work, pin),
        )
        return work, pin, request

    def _reloaded(self, work: Work, pin: Pin, copied: bool) -> None:
        with self._section() as after:
            self._dram.unpin(pin)
            outcome = PendingOutcome.FAILED
            if copied:
                entry = self._hbm.publish(work, self._latest_us, PrefixSource.DRAM)
                outcome = PendingOutcome.PUBLISHED if entry is not None else PendingOutcome.INVALIDATED
            else:
                self._hbm.abort(work)
                if pin.entry.attached:
                    self._remove(after, [(self._dram, pin.entry)])
            self._counters.reloads[outcome] += 1
            self._finish(after, work, outcome)
            self._tell(after, EventKind.RELOADED, work.key, outcome)

    def _begin_spill(self, what: Handle | PrefixKey) -> tuple[Work, Pin, CopyRequest] | SpillOutcome:
        entry = self._entry_of(what)
        if entry is None:
            return SpillOutcome.NOT_READY
        stored = self._dram.find(entry.key)
        if stored is not None and stored.behaviours == entry.key.length:
            self._dram.touch(stored.entry, self._latest_us)
            return SpillOutcome.ALREADY_THERE
        if self._dram.find_work(entry.key) is not None:
            return SpillOutcome.UNDER_WAY
        size_bytes = self._dram.pages_needed(entry.key, stored) * self._page_bytes
        if not self._spill_gate.admits(self._mover.forecast(size_bytes, CopyPriority.SPILL).wait_us):
            return SpillOutcome.SLOW
        work = self._dram.begin(entry.key, PendingKind.LOAD, Purpose.RANKING, self._latest_us, stored)
        if isinstance(work, NoRoomReason):
            return SpillOutcome.NO_ROOM
        pin = self._hbm.begin_spill(entry)
        request = CopyRequest(
            source=Tier.HBM,
            target=Tier.DRAM,
            source_pages=pin.pages[work.kept :],
            target_pages=work.new_pages,
            priority=CopyPriority.SPILL,
            deadline_us=_FAR_FUTURE_US,
            on_done=partial(self._spilled, work, pin),
        )
        return work, pin, request

    def _spilled(self, work: Work, pin: Pin, copied: bool) -> None:
        with self._section() as after:
            outcome = PendingOutcome.FAILED
            if copied:
                entry = self._dram.publish(work, self._latest_us, pin.entry.source)
                outcome = PendingOutcome.PUBLISHED if entry is not None else PendingOutcome.INVALIDATED
            else:
                self._dram.abort(work)
            self._hbm.end_spill(pin)
            self._counters.spills_ended[outcome] += 1
            self._tell(after, EventKind.SPILLED, work.key, outcome)

    def _entry_of(self, what: Handle | PrefixKey) -> Entry | None:
        if isinstance(what, Handle):
            return what.pin.entry if what.pin.entry.attached else None
        match = self._hbm.find(what)
        return match.entry if match is not None else None

    def _remove(self, after: _After, entries: list[tuple[TierMetadata, Entry]]) -> None:
        for tier, entry in entries:
            stale = tier.remove(entry, WasteReason.INVALIDATED)
            if stale is not None:
                self._finish(after, stale, PendingOutcome.INVALIDATED)
            self._tell(after, EventKind.INVALIDATE, entry.key, tier.tier)
