"""The store of a pool in virtual time (docs/pool.md), and one worker's use of it.

The cut of prefixes into objects and the rule by which a fetch pays are the product's. A fetch takes the time by which
that rule counts. An object is never lost once it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import simpy

from relaygr.runtime.clock import ManualClock
from relaygr.simulate.device import SimulatedModel
from relaygr.worker.cache import PendingKind, PendingOutcome, PendingPrefix, PrefixCache, PrefixKey
from relaygr.worker.pool.link import Link
from relaygr.worker.pool.segments import Segments
from relaygr.worker.pool.settings import PoolSettings
from relaygr.worker.pool.tier import MOST_FETCHES, READERS, SETTLE_US, WAIT_FACTOR, Fetch, Visits

_ABSENT_US: Final = 250
"""The time to learn that the store has nothing: measured with Mooncake 0.3.13."""


class StoreTimes:
    """What a fetch of a prefix takes and saves. `us_per_byte`: of the network."""

    def __init__(self, model: SimulatedModel, us_per_byte: float) -> None:
        self.segments = Segments("simulated", b"", model.geometry, model.layout)
        self._link, self._latency, self._layout = Link(us_per_byte), model.latency, model.layout

    def fetch_us(self, behaviours: int, stored: int = 0) -> float:
        """A fetch of the objects of so many behaviours; or a write of those that `stored` behaviours do not fill."""
        size_bytes = self.segments.size_bytes(behaviours) - self.segments.size_bytes(stored)
        return self._link.fetch_us(size_bytes) if size_bytes else 0.0

    def computing_us(self, behaviours: int, stored: int = 0) -> float:
        """The device time of the prefix, behind what the objects of `stored` behaviours cover."""
        covered = self.segments.covered(stored)
        cached, tokens = self._layout.tokens(covered) if covered else 0, self._layout.tokens(behaviours)
        return self._latency.append_us(cached, tokens - cached) if tokens > cached else 0.0

    def pays(self, behaviours: int) -> bool:
        """Whether a worker fetches, and writes, a prefix of this length, by the rule of `PoolTier`."""
        covered = self.segments.covered(behaviours)
        return covered > 0 and self.fetch_us(behaviours) < self.computing_us(covered)


@dataclass(slots=True)
class SharedStore:
    """What all workers of a fleet have written."""

    times: StoreTimes
    behaviours: dict[str, int] = field(default_factory=dict)
    """Of each user, in objects. Histories of a user are the beginnings of one sequence (`SharedHistories`)."""

    def stored(self, user_id: str) -> int:
        return self.behaviours.get(user_id, 0)

    def put(self, user_id: str, behaviours: int) -> None:
        run = self.times.segments.behaviours
        self.behaviours[user_id] = max(self.stored(user_id), behaviours // run * run)


class SimulatedPool:
    """In the place of `PoolTier`. `wake` is called when a fetch has ended."""

    is_connecting = False

    def __init__(
        self,
        env: simpy.Environment,
        store: SharedStore,
        cache: PrefixCache,
        clock: ManualClock,
        settings: PoolSettings,
        wake: Callable[[], None],
    ) -> None:
        self._env, self._store, self._times, self._wake = env, store, store.times, wake
        self._clock, self._transfers = clock, cache.transfers
        self._visits, self._bytes_per_us = Visits(settings.visits), settings.bytes_per_s / 1e6
        self._fetches: dict[tuple[str, bytes], Fetch] = {}
        self._readers_free_us = [0.0] * READERS
        self._writer_free_us = 0.0

    def covered(self, key: PrefixKey) -> int:
        """See `PoolTier`, as for the other methods."""
        return self._times.segments.covered(key.length) if key.growable else 0

    def fetch(self, key: PrefixKey, behind: int, needed_us: int, saved_us: float, now_us: int) -> Fetch | None:
        name, expected_us = (key.user_id, key.chain.digest), self._times.fetch_us(key.length)
        if name in self._fetches or expected_us >= saved_us or len(self._fetches) >= MOST_FETCHES:
            return self._fetches.get(name)
        until_us = now_us + int(max((needed_us - saved_us - now_us) / 2, WAIT_FACTOR * expected_us))
        pending = PendingPrefix(PendingKind.LOAD, self.covered(key), longest_wait_us=WAIT_FACTOR * expected_us)
        fetch = self._fetches[name] = Fetch(key, behind, until_us, pending)
        self._read(fetch, name)
        return fetch

    def _read(self, fetch: Fetch, name: tuple[str, bytes]) -> None:
        now_us, found = self._clock.now_us, min(self._store.stored(fetch.key.user_id), fetch.key.length)
        reader = self._readers_free_us.index(min(self._readers_free_us))
        begins_us = max(float(now_us), self._readers_free_us[reader])
        covered = self._times.segments.covered(found)
        is_there = covered > fetch.behind and begins_us <= fetch.until_us
        ends_us = begins_us + (self._times.fetch_us(found) if is_there else _ABSENT_US)
        self._readers_free_us[reader] = ends_us

        def end() -> None:
            del self._fetches[name]
            target = fetch.key.head(covered) if is_there else None
            work = self._transfers.begin_fetch(target, fetch.pending) if target is not None else None
            if work is not None:
                self._transfers.end_fetch(work, True)
            fetch.pending.finish(PendingOutcome.FAILED)  # Has no effect after PUBLISHED.
            self._wake()

        self._at(ends_us, end)

    def visited(self, key: PrefixKey, now_us: int) -> None:
        if not self._visits.add(key.user_id, now_us) or not self._times.pays(key.length):
            return
        segments, stored = self._times.segments, self._store.stored(key.user_id)
        new_bytes = max(0, segments.size_bytes(key.length) - segments.size_bytes(stored))
        self._writer_free_us = max(self._writer_free_us, now_us + SETTLE_US) + new_bytes / self._bytes_per_us

        def end() -> None:
            pinned = self._transfers.pin_stored(key)
            if pinned is not None:
                self._transfers.unpin_stored(pinned[0])
                self._store.put(key.user_id, pinned[1])

        self._at(self._writer_free_us, end)

    def _at(self, at_us: float, call: Callable[[], None]) -> None:
        self._env.timeout(max(0.0, at_us - self._env.now)).callbacks.append(lambda _: call())
