"""The pool as a tier: objects are read into pages of the DRAM tier, and written from there.

    fetch           a job or a request asks for a prefix that DRAM lacks; a reload brings it on to HBM
    visited         a request was ranked: from the K-th visit on, its prefix is written behind
    store           a pre-infer worker waits until a prefix is written
    forget_user     a deletion

The device thread, the history follower and slots call these, and only `store` waits. One thread connects, writes and
deletes, in this order of urgency: deletions first. Two threads read. A call to the store may hang for a minute and
cannot be cancelled, so whoever waits for a fetch has a time of its own. While both readers hang in calls that nobody
waits for any more, or the store does not answer, the tier is away: `fetch` returns None at once.

A call that failed may still write into its memory after it has returned. So objects are read into a stage, memory of
the reader that nothing else uses, and copied to pages. These are published only if their seals are right.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import structlog

from relaygr.admission.corrector import Corrector
from relaygr.runtime.clock import Clock
from relaygr.runtime.errors import RelayError
from relaygr.worker.cache.cache import PrefixCache
from relaygr.worker.cache.copies import PageGuard
from relaygr.worker.cache.entries import Pin
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.ledger import PendingPrefix
from relaygr.worker.cache.results import PageArray, PendingKind, PendingOutcome
from relaygr.worker.pool import metrics
from relaygr.worker.pool.deletions import EVERYONE, Deletions
from relaygr.worker.pool.link import GUESS_US_PER_BYTE, Link
from relaygr.worker.pool.segments import SEAL_BYTES, Segment, Segments
from relaygr.worker.pool.stores.contract import (
    GetOutcome,
    Memory,
    ObjectKey,
    PutOutcome,
    Store,
    StoredObject,
    StoreDownError,
)

log = structlog.get_logger()

READERS: Final = 2
MOST_FETCHES: Final = 64
"""Fetches under way and waiting. Each has the time of one waiter, so a longer queue would end too late."""
MOST_WRITES: Final = 1024
"""Prefixes that wait to be written. They hold no pages meanwhile: what DRAM evicts before is not written."""
MOST_USERS: Final = 65_536
"""Users whose visits are counted."""
VISIT_US: Final = 1_000_000
"""All rankings of a user within a second are one visit."""
SETTLE_US: Final = 500_000
"""A prefix is written this long after its ranking, when its copy to DRAM has ended."""
WAIT_FACTOR: Final = 2.0
"""A request waits for a fetch for so many times the time that it should take. A store that hangs would else have
requests answered at the end of their time, and some of them late.
"""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
_STAGE_BYTES: Final = 8 * 1024 * 1024
"""Objects that a reader asks for in one call, but at least one."""
_PROBE_BYTES: Final = 1024 * 1024
_PROBES: Final = 8
_OLD_US: Final = 10_000_000
"""After so long without a fetch the link is measured again: while processes start, it looks slower than it is, and what
does not pay is neither fetched nor written.
"""
_MOST_BROKEN: Final = 1024


@dataclass(slots=True, eq=False)
class Fetch:
    """A prefix that is fetched: whoever wants it waits for `pending`, at most until `until_us`."""

    key: PrefixKey
    behind: int
    """Behaviours that this worker has already."""
    until_us: int
    pending: PendingPrefix
    started_us: int = 0


@dataclass(slots=True)
class Visits:
    """How often each user came lately. The least recent users are forgotten."""

    needed: int
    _counts: OrderedDict[str, tuple[int, int]] = field(default_factory=OrderedDict)

    def add(self, user_id: str, now_us: int) -> bool:
        """Counts a visit, at most one in `VISIT_US`. Whether the user has come often enough."""
        count, last_us = self._counts.pop(user_id, (0, now_us - VISIT_US))
        if now_us - last_us >= VISIT_US:
            count, last_us = count + 1, now_us
        self._counts[user_id] = count, last_us
        if len(self._counts) > MOST_USERS:
            self._counts.popitem(last=False)
        return count >= self.needed


class PoolTier:
    """See the module. `memory` is the DRAM tier, uint8 [pages, page_bytes]."""

    def __init__(
        self,
        connect: Callable[[Sequence[Memory]], Store],
        segments: Segments,
        cache: PrefixCache,
        memory: Memory,
        deletions: Deletions,
        corrector: Corrector,
        clock: Clock,
        *,
        guard: PageGuard | None,
        owns: Callable[[str], bool],
        visits: int,
        bytes_per_s: int,
        slots: int = 0,
    ) -> None:
        """`connect`: opens the store for this memory. `guard`: of pages that outlive the process. `owns`: whether this
        worker owns a user, since only the owner reads the user's deletion. `slots`: threads that call `store`.
        """
        self._connect = connect
        self._segments = segments
        self._transfers = cache.transfers
        self._memory = memory
        self._deletions = deletions
        self._corrector = corrector
        self._clock = clock
        self._guard = guard
        self._owns = owns
        self._bytes_per_s = bytes_per_s
        self._visits = Visits(visits)
        self._link = Link()
        self._store: Store | None = None
        self._changed = threading.Condition()
        self._fetches: dict[tuple[str, bytes], Fetch] = {}
        self._waiting: list[tuple[int, int, Fetch]] = []
        self._running: set[Fetch] = set()
        self._numbers = itertools.count()
        self._writes: OrderedDict[str, tuple[int, PrefixKey]] = OrderedDict()
        self._retry_s = FIRST_RETRY_S
        self._is_down, self._retry_at_us = False, 0
        self._was_tried = threading.Event()
        self._broken: OrderedDict[ObjectKey, None] = OrderedDict()
        """Keys that were removed because they could not be read."""
        self._closing = False
        # Runs differ by a page, since they need not end with one.
        largest = SEAL_BYTES + segments.size_bytes(segments.behaviours) + memory.shape[1]
        self._stages = np.zeros((READERS, max(1, _STAGE_BYTES // largest), largest), np.uint8)
        """Where the objects of one call arrive, of each reader."""
        self._seals = np.zeros((1 + slots, SEAL_BYTES), np.uint8)
        """Of the objects that the writer and each slot write."""
        self._probe = np.zeros(_PROBE_BYTES, np.uint8)
        self._threads = [threading.Thread(target=self._run_writer, name="pool-writer", daemon=True)]
        for at in range(READERS):
            reader = threading.Thread(target=self._run_reader, args=(at,), name=f"pool-reader-{at}", daemon=True)
            self._threads.append(reader)
        metrics.AWAY.set(1)
        # The metric of a worker with a pool has this outcome before its first fetch: the live page tells by it.
        metrics.FETCHES.labels("loaded")

    # -- any thread, without waiting -------------------------------------------------------------------

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    @property
    def is_connecting(self) -> bool:
        """Whether the store has neither answered nor failed to."""
        return not self._was_tried.is_set()

    def await_connection(self, timeout_s: float) -> None:
        """Waits until the store has answered or failed to, at most so long."""
        self._was_tried.wait(timeout_s)

    @property
    def is_away(self) -> bool:
        """Whether the store hangs or does not answer."""
        with self._changed:
            return self._is_away(self._clock.monotonic_us())

    def covered(self, key: PrefixKey) -> int:
        """Behaviours of `key` that the pool could have."""
        return self._segments.covered(key.length) if key.growable else 0

    def fetch(self, key: PrefixKey, behind: int, needed_us: int, saved_us: float, now_us: int) -> Fetch | None:
        """Fetches `key`, of which this worker has `behind` behaviours. None if that can not pay.

        `needed_us`: when the prefix is needed; `saved_us`: the time of computing what the pool may have. If the fetch
        ends with PUBLISHED, DRAM has more of the key.
        """
        expected_us = self._link.fetch_us(self._segments.size_bytes(key.length))
        # For half of the time until it would have to be computed instead, or for `WAIT_FACTOR`.
        until_us = now_us + int(max((needed_us - saved_us - now_us) / 2, WAIT_FACTOR * expected_us))
        with self._changed:
            known = self._fetches.get(_name(key))
            if known is not None and known.until_us >= now_us:
                known.until_us = max(known.until_us, until_us)
                return known
            declined = self._why_declined(expected_us, saved_us, now_us) if known is None else "away"
            if declined is not None:
                metrics.DECLINED.labels(declined).inc()
                return None
            pending = PendingPrefix(PendingKind.LOAD, self.covered(key), longest_wait_us=WAIT_FACTOR * expected_us)
            fetch = Fetch(key, behind, until_us, pending)
            self._fetches[_name(key)] = fetch
            heapq.heappush(self._waiting, (until_us, next(self._numbers), fetch))
            self._changed.notify_all()
            return fetch

    def visited(self, key: PrefixKey, now_us: int) -> None:
        """A request was ranked on `key`, which holds no behaviours. The device thread calls it."""
        covered = self.covered(key)
        if not self._visits.add(key.user_id, now_us) or not covered:
            return
        computing_us = self._corrector.model_at(covered).append_us(0, covered)
        # Another worker will fetch it at another time: that the link is slow now says little.
        if self._link.least_fetch_us(self._segments.size_bytes(key.length)) >= computing_us:
            metrics.DROPPED.labels("slow").inc()
            return
        with self._changed:
            if key.user_id not in self._writes and len(self._writes) >= MOST_WRITES:
                metrics.DROPPED.labels("full").inc()
                return
            # The time of the first ranking stays: a user who comes again and again would never be written.
            due_us, _ = self._writes.get(key.user_id, (now_us + SETTLE_US, key))
            self._writes[key.user_id] = due_us, key
            self._changed.notify_all()

    def store(self, key: PrefixKey, slot: int) -> bool:
        """Writes, on the calling thread, what the store lacks of a prefix in DRAM. It may take a minute.

        Whether the store has all of it now that it could have. Each thread has a `slot` of its own, from 0.
        """
        store = self._store
        if store is None or self._is_down:
            return False
        try:
            return self._write(store, key, self._seals[1 + slot], math.inf)
        except StoreDownError as error:
            self._went_down(error)
            return False

    def fetch_us(self, behaviours: int) -> float:
        """The expected time of a fetch of so many behaviours."""
        return self._link.fetch_us(self._segments.size_bytes(behaviours))

    def forget_user(self, user_id: str) -> None:
        """Deletes the user's objects as soon as the store answers. DRAM has dropped the user's prefixes already."""
        self._deletions.add(self._segments.user_part(user_id))
        with self._changed:
            self._changed.notify_all()

    def close(self, timeout_s: float = 2.0) -> bool:
        """Ends the threads. False if a call to the store hangs: its thread needs the memory until the process ends."""
        with self._changed:
            self._closing = True
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
        for _, _, fetch in waiting:
            fetch.pending.finish(PendingOutcome.FAILED)
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # -- under the condition ---------------------------------------------------------------------------

    def _is_away(self, now_us: int) -> bool:
        bound = sum(fetch.until_us < now_us for fetch in self._running)
        is_away = self._store is None or self._is_down or bound >= READERS
        metrics.AWAY.set(is_away)
        return is_away

    def _why_declined(self, expected_us: float, saved_us: float, now_us: int) -> str | None:
        if self._is_away(now_us):
            return "away"
        if expected_us >= saved_us:
            return "slow"
        return "full" if len(self._fetches) >= MOST_FETCHES else None

    # -- whether the store answers ---------------------------------------------------------------------

    def _answered(self) -> None:
        with self._changed:
            self._is_down, self._retry_s, self._retry_at_us = False, FIRST_RETRY_S, 0
            self._is_away(self._clock.monotonic_us())
        self._was_tried.set()

    def _went_down(self, error: Exception) -> None:
        with self._changed:
            self._is_down = True
            self._retry_at_us = self._clock.monotonic_us() + int(self._retry_s * 1e6)
            log.warning("the pool's store does not answer", error=str(error), again_in_s=self._retry_s)
            self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
            metrics.AWAY.set(1)
        self._was_tried.set()

    # -- the readers -----------------------------------------------------------------------------------

    def _run_reader(self, reader: int) -> None:
        while (fetch := self._next_fetch()) is not None:
            outcome = "failed"
            try:
                outcome = self._load(fetch, self._stages[reader])
            except StoreDownError as error:
                self._went_down(error)
            except Exception:
                # The thread must go on: it has other prefixes to fetch.
                log.exception("a prefix could not be fetched from the pool")
            with self._changed:
                self._running.discard(fetch)
                self._fetches.pop(_name(fetch.key), None)
                self._is_away(self._clock.monotonic_us())
            metrics.FETCHES.labels(outcome).inc()
            fetch.pending.finish(PendingOutcome.FAILED)  # Has no effect after PUBLISHED.

    def _next_fetch(self) -> Fetch | None:
        with self._changed:
            while not self._closing:
                if self._waiting:
                    fetch = heapq.heappop(self._waiting)[-1]
                    fetch.started_us = self._clock.monotonic_us()
                    self._running.add(fetch)
                    return fetch
                self._changed.wait()
            return None

    def _load(self, fetch: Fetch, stage: Memory) -> str:
        """Brings the prefix into DRAM. Returns the outcome of the fetch."""
        store, key = self._store, fetch.key
        if store is None or self._is_down:
            return "failed"
        if fetch.started_us > fetch.until_us:
            return "late"
        found = self._segments.of(key, key.length)
        there = store.has([segment.key for segment in found])
        self._answered()
        del found[there.index(False) if False in there else len(there) :]
        covered = self._segments.covered(len(found) * self._segments.behaviours)
        target = key.head(covered) if covered > fetch.behind else None
        if target is None:
            return "absent"
        if self._clock.monotonic_us() > fetch.until_us:
            return "late"
        work = self._transfers.begin_fetch(target, fetch.pending)
        if work is None:
            return "no_room"
        outcome, published = "failed", False
        try:
            outcome = self._read(store, found, work.new_pages, stage)
            if outcome == "loaded" and self._guard is not None:
                self._guard.seal(work.new_pages)
        finally:
            published = self._transfers.end_fetch(work, outcome == "loaded")
        if published:
            now_us, size_bytes = self._clock.monotonic_us(), int(work.new_pages.size) * self._memory.shape[1]
            self._link.observe(size_bytes, now_us - fetch.started_us, now_us)
            metrics.BYTES.labels("read").inc(size_bytes)
        return outcome if published or outcome != "loaded" else "late"

    def _read(self, store: Store, found: list[Segment], pages: PageArray, stage: Memory) -> str:
        """Reads the segments into their pages by way of `stage`. Returns the outcome."""
        outcome = "loaded"
        for first in range(0, len(found), len(stage)):
            segments = found[first : first + len(stage)]
            rows = [self._rows(each, pages) for each in segments]
            sizes = [SEAL_BYTES + sum(row.nbytes for row in each) for each in rows]
            staged = [StoredObject(each.key, (stage[at, : sizes[at]],)) for at, each in enumerate(segments)]
            for each, object, got in zip(rows, staged, store.get(staged), strict=True):
                if got is GetOutcome.FOUND and self._unpack(object, each):
                    continue
                outcome = "absent" if got is GetOutcome.ABSENT else "torn" if got is GetOutcome.FOUND else "unreadable"
                if got is not GetOutcome.ABSENT:
                    self._remove_once(store, object.key)
            if outcome != "loaded":
                break
        return outcome

    def _unpack(self, object: StoredObject, rows: list[Memory]) -> bool:
        """Copies what arrived to the rows, and looks at what is in them then. Whether it is what was written."""
        (arrived,) = object.parts
        for row, bytes in zip(rows, arrived[SEAL_BYTES:].reshape(len(rows), -1), strict=True):
            row[:] = bytes
        return bool((self._segments.seal(object.key, rows) == arrived[:SEAL_BYTES]).all())

    def _remove_once(self, store: Store, key: ObjectKey) -> None:
        """Removes an object that exists and can not be read, so that it is written anew; but not a second time."""
        with self._changed:
            if key in self._broken:
                return
            self._broken[key] = None
            if len(self._broken) > _MOST_BROKEN:
                self._broken.popitem(last=False)
        metrics.REMOVED.labels("unreadable").inc(store.remove(key))

    def _rows(self, segment: Segment, pages: PageArray) -> list[Memory]:
        """The segment's rows of the DRAM tier."""
        return [self._memory[page] for page in pages[segment.first_page : segment.end_page].tolist()]

    # -- the writer ------------------------------------------------------------------------------------

    def _run_writer(self) -> None:
        while not self._closing:
            try:
                if self._clock.monotonic_us() >= self._retry_at_us:
                    self._carry_out(self._store or self._begin())
            except (StoreDownError, RelayError) as error:
                self._went_down(error)
            except Exception as error:
                # The thread must go on: deletions wait for it. So must whoever waits for the connection.
                log.exception("the pool's writer failed")
                self._went_down(error)
            with self._changed:
                if not self._closing:
                    self._changed.wait(self._idle_s())

    def _idle_s(self) -> float:
        now_us = self._clock.monotonic_us()
        if self._is_down:
            return max(0, self._retry_at_us - now_us) / 1e6
        due_us = [self._deletions.due_us(), self._link.measured_us + _OLD_US]
        due_us.extend(at_us for at_us, _ in itertools.islice(self._writes.values(), 1))
        return max(0, min(due_us) - now_us) / 1e6

    def _begin(self) -> Store:
        """Connects, and measures the link."""
        store = self._connect((self._memory, self._stages, self._seals, self._probe))
        self._measure(store)
        log.info("the pool is ready", ms_per_mib=round(self._link.us_per_byte * 2**20 / 1e3, 2))
        self._store = store
        self._answered()
        return store

    def _measure(self, store: Store) -> None:
        """Measures the link with an object of its own; a full store leaves a guess."""
        key = _probe_key()
        probe, took_s = StoredObject(key, (self._probe,)), []
        if store.put(probe) is PutOutcome.STORED:
            for _ in range(_PROBES):
                began_s = time.perf_counter()
                if store.get([probe]) != [GetOutcome.FOUND]:
                    break  # It may have taken a minute, and deletions wait.
                took_s.append(time.perf_counter() - began_s)
            store.remove(key)
        us_per_byte = min(took_s) * 1e6 / _PROBE_BYTES if took_s else GUESS_US_PER_BYTE
        self._link.measured(us_per_byte, self._clock.monotonic_us())

    def _carry_out(self, store: Store) -> None:
        """Deletions, then the prefixes that are due."""
        if self._is_down:
            store.has([_probe_key()])
            self._answered()
        self._delete(store)
        if self._clock.monotonic_us() - self._link.measured_us >= _OLD_US:
            self._measure(store)
        while not self._closing and (key := self._next_write()) is not None:
            self._write(store, key, self._seals[0], self._bytes_per_s)

    def _delete(self, store: Store) -> None:
        while parts := self._deletions.take(self._clock.monotonic_us()):
            users, removed = None if EVERYONE in parts else parts.keys(), 0
            # An object may appear while the others are removed.
            while (gone := store.forget(users)) and not self._closing:
                removed += gone
            self._deletions.passed(parts, self._clock.monotonic_us())
            metrics.REMOVED.labels("deletion").inc(removed)

    def _next_write(self) -> PrefixKey | None:
        """The prefix that waits the longest, if it is due."""
        with self._changed:
            user_id, (due_us, key) = next(iter(self._writes.items()), (None, (0, None)))
            if user_id is None or due_us > self._clock.monotonic_us():
                return None
            del self._writes[user_id]
            return key

    def _write(self, store: Store, key: PrefixKey, seal: Memory, bytes_per_s: float) -> bool:
        """Writes the objects of the prefix that the store lacks. `seal`: of the thread. Whether it has all then."""
        pinned = self._transfers.pin_stored(key) if self._owns(key.user_id) else None
        if pinned is None:
            metrics.DROPPED.labels("gone").inc()
            return False
        pin, behaviours = pinned
        try:
            found = self._segments.of(key, behaviours)
            if not self._are_as_sealed(pin.pages):
                metrics.DROPPED.labels("torn").inc()
                found = []
            for segment, exists in zip(found, store.has([each.key for each in found]), strict=True):
                if not exists and (self._closing or not self._put(store, segment, pin, seal, bytes_per_s)):
                    return False
            return bool(found)
        finally:
            self._transfers.unpin_stored(pin)

    def _are_as_sealed(self, pages: PageArray) -> bool:
        """Whether pages that an earlier process left have the bytes that it left. The next reload drops them if not."""
        try:
            if self._guard is not None:
                self._guard.verify(pages)
        except Exception as error:
            log.warning("a prefix is not written to the pool", cause=str(error))
            return False
        return True

    def _put(self, store: Store, segment: Segment, pin: Pin, seal: Memory, bytes_per_s: float) -> bool:
        """Writes one object. Withdraws it if its user was deleted or left meanwhile. Whether the next may follow."""
        self._delete(store)
        if not self._may_keep(pin):
            metrics.DROPPED.labels("gone").inc()
            return False
        rows = self._rows(segment, pin.pages)
        seal[:] = self._segments.seal(segment.key, rows)
        object = StoredObject(segment.key, (seal, *rows))
        began_s = time.monotonic()
        outcome: str = store.put(object)
        if outcome == PutOutcome.STORED and not self._may_keep(pin):
            store.remove(segment.key)
            outcome = "withdrawn"
        metrics.WRITES.labels(outcome).inc()
        if outcome != PutOutcome.STORED:
            return False
        size_bytes = sum(part.nbytes for part in object.parts)
        metrics.BYTES.labels("written").inc(size_bytes)
        time.sleep(max(0.0, size_bytes / bytes_per_s - (time.monotonic() - began_s)))
        return True

    def _may_keep(self, pin: Pin) -> bool:
        """Whether the prefix was not removed, as a deletion does, and a deletion of its user would be read here."""
        return pin.entry.attached and self._owns(pin.entry.key.user_id)


def _probe_key() -> ObjectKey:
    """The key of an object that no user has."""
    return ObjectKey("probe", uuid.uuid4().hex, "0")


def _name(key: PrefixKey) -> tuple[str, bytes]:
    return key.user_id, key.chain.digest
