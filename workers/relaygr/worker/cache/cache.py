"""The prefix cache: two tiers of pages, one lock, and copies that others make.

Called by the poll thread (leases), the device thread (acquire, reserve, publish, release, spill) and the
copy threads (ends of copies). Sections under the lock are short and do no I/O; waiters, listeners and the
mover are called after it is left. Nothing here blocks on room: full under pinning answers `NoRoom`.

| operation | answers | then |
|---|---|---|
| `peek` | Presence | nothing changed |
| `acquire` | Hit, Pending, Miss | a hit is pinned until `release` |
| `reserve`, `extend` | Fill, NoRoom, Pending | compute, then `Fill.publish` or `Fill.abort` |
| `start_reload` | Pending, NoRoom, Declined | the mover copies DRAM to HBM; `acquire` when it has PUBLISHED |
| `spill` | SpillOutcome | the mover copies HBM to DRAM |
| `take_overdue` | how many | handles and fills held far too long are their holders' no more |
| `lease`, `end_lease`, `expire_leases` | | an unpinned entry stays while leased |
| `expire_prefixes` | | what is unused for a policy's time to live is gone |

Single flight: whoever asks for what is being filled or loaded gets the one `Pending` of that work. A
`Pending` that has ended well comes back from `reserve` and `start_reload` when the prefix is ready already.
All times are monotonic microseconds, passed in; what ends by itself (a copy) counts as the latest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from relaygr.worker.cache import removal
from relaygr.worker.cache.copies import Mover, NoMover, SpillGate
from relaygr.worker.cache.events import CacheListener, EventKind
from relaygr.worker.cache.fills import Fills
from relaygr.worker.cache.handles import Fill, Handle
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.journal import StoredEntry, TierJournal
from relaygr.worker.cache.ledger import TierLedger
from relaygr.worker.cache.metadata import TierMetadata
from relaygr.worker.cache.pending import PendingPrefix
from relaygr.worker.cache.pins import LONGEST_HOLD_US, Completion, Pins
from relaygr.worker.cache.policies import PolicyName, PolicyOptions, TierPolicies, make_policy
from relaygr.worker.cache.results import (
    Declined,
    Hit,
    Miss,
    NoRoom,
    PendingOutcome,
    Presence,
    Purpose,
    SpillOutcome,
    WasteReason,
)
from relaygr.worker.cache.stats import CacheStats, Counters, snapshot
from relaygr.worker.cache.tiers import Tier
from relaygr.worker.cache.transfers import TierTransfers
from relaygr.worker.kv import DramGeometry, KvGeometry, PrefixLayout

_LOOKUPS = {Purpose.RANKING: EventKind.ACQUIRE, Purpose.PRE_INFER: EventKind.PREPARE, Purpose.AGAIN: None}
"""What a look-up is told as."""


class PrefixCache:
    """See the module. `mover` copies between the tiers; without one nothing is spilled or reloaded."""

    def __init__(
        self,
        geometry: KvGeometry,
        layout: PrefixLayout,
        hbm_pages: int,
        dram_pages: int = 0,
        mover: Mover | None = None,
        policies: TierPolicies | None = None,
        spill_gate: SpillGate | None = None,
        lease_limit: int = 65_536,
        listener: CacheListener | None = None,
        dram_journal: TierJournal | None = None,
        dram_geometry: DramGeometry | None = None,
        layer_wise: bool = False,
        longest_hold_us: int = LONGEST_HOLD_US,
    ) -> None:
        """With `layer_wise`, a whole prefix on its way may be ranked on while its last layers are copied."""
        self._geometry = dram_geometry if dram_geometry is not None else DramGeometry(geometry)
        self._counters = Counters()
        policies = policies if policies is not None else TierPolicies()

        def metadata_of(tier: Tier, pages: int, policy: PolicyName, journal: TierJournal | None = None) -> TierMetadata:
            order = make_policy(policy, PolicyOptions(pages, policies.ttl_us))
            return TierMetadata(tier, pages, geometry.page_tokens, layout, order, self._counters, lease_limit, journal)

        self._hbm = metadata_of(Tier.HBM, hbm_pages, policies.hbm)
        self._dram = metadata_of(Tier.DRAM, dram_pages, policies.dram, dram_journal)
        self._ledger = TierLedger(self._hbm, self._dram, self._counters, listener)
        self._pins = Pins(self._ledger, layout, self._geometry, longest_hold_us)
        self._fills = Fills(self._ledger, self._pins)
        self._transfers = TierTransfers(
            self._ledger,
            mover if mover is not None else NoMover(),
            spill_gate if spill_gate is not None else SpillGate(20_000.0, 50_000.0),
            self._geometry,
            layer_wise,
        )

    @property
    def geometry(self) -> DramGeometry:
        """The shape of a page in both tiers."""
        return self._geometry

    def weigh_by(self, saved_us: Callable[[int], float]) -> None:
        """Policies weigh prefixes by this from now on: predicted µs of device time that a hit saves, of its tokens."""
        with self._ledger.section():
            for tier in self._ledger.tiers:
                tier.saved_us = saved_us

    # Looking and reading.

    def peek(self, key: PrefixKey) -> Presence:
        """What is there for `key`. Changes nothing, and counts nothing."""
        with self._ledger.section():
            hbm, dram = self._hbm.index.find(key), self._dram.index.find(key)
            return Presence(
                hbm_behaviours=hbm.behaviours if hbm else 0,
                dram_behaviours=dram.behaviours if dram else 0,
                hbm_state=self._hbm.state(key),
                dram_state=self._dram.state(key),
            )

    def acquire(
        self,
        key: PrefixKey,
        now_us: int,
        join: bool = True,
        purpose: Purpose = Purpose.RANKING,
        arriving: bool = False,
    ) -> Hit | PendingPrefix | Miss:
        """The longest part of `key` that is ready in HBM, pinned.

        With `join` a part under way that will be longer is answered instead; a caller that can not
        wait for it asks again without. With `arriving` the whole prefix on its way from DRAM is a hit once its
        first layer is there: the handle then has an `arrival`. Only look-ups of rankings are counted, each once;
        those and their repetitions (AGAIN) make a pre-infer used.
        """
        with self._ledger.section(now_us) as after:
            counted, used = purpose is Purpose.RANKING, purpose is not Purpose.PRE_INFER
            kind = _LOOKUPS[purpose]
            if self._ledger.refusal(key) is None:
                found = self._hbm.index.find(key)
                covered = found.behaviours if found else 0
                coming = self._hbm.index.find_work(key) if join and covered < key.length else None
                if coming is not None and coming.behaviours > covered:
                    arrival = coming.work.arrival if arriving and coming.behaviours == key.length else None
                    if arrival is not None and arrival.begun:
                        self._counters.hits += counted
                        self._ledger.tell(after, kind, key, "hit")
                        return Hit(self._pins.arriving_handle(coming.work, key, arrival))
                    self._counters.joins[coming.work.kind] += counted
                    self._ledger.tell(after, kind, key, coming.work.kind)
                    return self._ledger.pending[coming.work]
                if found is not None:
                    self._hbm.touch(found.entry, now_us)
                    found.entry.unused_pre_infer = found.entry.unused_pre_infer and not used
                    handle = self._pins.handle(found, key)
                    self._counters.hits += counted
                    self._counters.partial_hits += counted and not handle.complete
                    self._ledger.tell(after, kind, key, "hit" if handle.complete else "partial_hit")
                    return Hit(handle)
            miss = self._ledger.miss(key)
            self._counters.misses[miss.reason] += counted
            self._ledger.tell(after, kind, key, miss.reason)
            return miss

    def release(self, handle: Handle, after: Completion | None = None) -> None:
        """Unpins, at once or when the device has passed `after`. Raises ValueError the second time; does nothing,
        but count it, for a handle that was taken away.
        """
        self._pins.release(handle, after)

    def take_overdue(self, now_us: int, after: Completion | None = None) -> int:
        """Takes handles and fills that were held far too long from their holders, and says how many.

        To be called by the thread that gives the device its work, with an event after all of that work: it goes on
        reading and writing the pages, which are free when the device has passed `after`; who gives it more sees that
        the handle is not held, or the fill not current, any more.
        """
        return self._pins.take_overdue(now_us, after)

    # Computing.

    def reserve(
        self, key: PrefixKey, now_us: int, purpose: Purpose = Purpose.PRE_INFER
    ) -> Fill | NoRoom | PendingPrefix:
        """Pages to compute `key` into: only the tail's, where an entry covers its beginning."""
        return self._fills.reserve(key, now_us, purpose, None)

    def extend(
        self, handle: Handle, key: PrefixKey, now_us: int, purpose: Purpose = Purpose.RANKING
    ) -> Fill | NoRoom | PendingPrefix:
        """`reserve`, by a caller whose own handle on the entry must not make its tail page shared.

        The handle stays as it was; the caller releases it as ever.
        """
        return self._fills.reserve(key, now_us, purpose, handle)

    # Copying.

    def start_reload(
        self, key: PrefixKey, deadline_us: int, now_us: int, saved_us: float | None = None, rank_us: float = 0.0
    ) -> PendingPrefix | NoRoom | Declined:
        """Begins to copy what DRAM has of `key` to HBM; with `saved_us` (T_full - T_hit) only if that pays.

        What a ranking of `rank_us` hides of the copy, where it may begin with the first layer, costs nothing. A copy
        that fails is tried once more; if that fails too, the DRAM entry is evicted, whose bytes are in doubt, and the
        waiters get FAILED. Who gets a reload of others says when it needs it (`Pending.needed_by`).
        """
        return self._transfers.start_reload(key, deadline_us, now_us, saved_us, rank_us)

    def spill(self, what: Handle | PrefixKey) -> SpillOutcome:
        """Begins to copy an entry to DRAM, or its tail where DRAM has the beginning; never waits."""
        return self._transfers.spill(what)

    # Leases.

    def lease(self, key: PrefixKey, request_id: str, until_us: int) -> bool:
        """Keeps what HBM has or is getting of `key` from eviction until then; False if it has nothing."""
        with self._ledger.section() as after:
            found, coming = self._hbm.index.find(key), self._hbm.index.find_work(key)
            covered = found.behaviours if found else 0
            entry = found.entry if found else None
            if coming is not None and coming.behaviours > covered:
                entry = coming.work.entry
            if entry is None or not self._hbm.leasing.begin(entry, request_id, until_us):
                return False
            if found is not None and entry is found.entry:
                stale = self._hbm.give_up_truncation(found)
                if stale is not None:
                    self._ledger.finish(after, stale, PendingOutcome.INVALIDATED)
            self._counters.leases_granted += 1
            self._ledger.tell(after, EventKind.LEASE, key, "granted")
            return True

    def end_lease(self, request_id: str, wasted: WasteReason | None = None) -> bool:
        """Ends it; False if there is none. `wasted` says why the pre-infer served nothing, if it did not."""
        with self._ledger.section():
            return self._hbm.leasing.end(request_id, wasted)

    def expire_leases(self, now_us: int) -> int:
        """Ends the leases that nobody ended in time, and counts them as leaked; how many."""
        with self._ledger.section(now_us):
            leaked = self._hbm.leasing.expire(now_us)
            self._counters.leases_leaked += leaked
            return leaked

    def expire_prefixes(self, now_us: int) -> int:
        """Evicts what a policy's time to live is over for, in both tiers; how many. What is held stays."""
        with self._ledger.section(now_us):
            return sum(tier.expire(now_us) for tier in self._ledger.tiers)

    # Taking away. Readers keep their pages; work in flight is discarded when it ends.

    def invalidate_user(self, user_id: str) -> int:
        """Nothing of the user can be found any more, in either tier; how many entries that were."""
        return removal.remove_user(self._ledger, user_id)

    def drop_namespace(self, namespace: bytes) -> int:
        """Frees everything of one model; how many entries."""
        return removal.drop_namespace(self._ledger, namespace)

    def admit_only(self, namespace: bytes) -> None:
        """From now on only this model's keys match or get pages. What others have stays until `keep_only`."""
        with self._ledger.section():
            self._ledger.only_namespace = namespace

    def keep_only(self, namespace: bytes) -> int:
        """`admit_only`; then frees the others' entries, some at a time, and says how many."""
        self.admit_only(namespace)
        return removal.drop_others(self._ledger, namespace)

    def demote(self, users: Iterable[str] | Callable[[str], bool]) -> int:
        """Puts these users' entries first in the order of eviction; how many. They stay usable."""
        return removal.demote(self._ledger, users)

    def clear(self) -> None:
        """Empties both tiers and every index, some entries at a time."""
        removal.drop_others(self._ledger, None)

    def close(self) -> None:
        """Ends the copies (those that wait fail), then clears. What a journal keeps, it keeps."""
        self._transfers.close()
        with self._ledger.section():
            self._dram.end_journal()
        self.clear()

    # Taking over.

    def restore(self, stored: Sequence[StoredEntry], now_us: int) -> None:
        """Puts back into DRAM what its journal kept, the first to be evicted first, and opens the tier.

        A cache whose DRAM has a journal spills nothing before that; all else may go on meanwhile. Raises ValueError
        if two of them claim one page.
        """
        for start in range(0, len(stored), removal.BATCH):
            with self._ledger.section(now_us):
                self._dram.restore(stored[start : start + removal.BATCH], now_us)
        with self._ledger.section(now_us):
            self._dram.open()

    # Counting.

    def stats(self) -> CacheStats:
        """Pages and totals now."""
        with self._ledger.section():
            leases = len(self._hbm.leasing)
            return snapshot(self._counters, self._hbm.stats(), self._dram.stats(), self._geometry, leases)

    def check_invariants(self) -> None:
        """Recounts all books; for tests. Raises AssertionError."""
        with self._ledger.section():
            self._ledger.check_invariants()
