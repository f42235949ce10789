"""What is done for nobody yet: the prefixes of a warm-up, and behaviours that follow cached prefixes.

After a start, an assignment or a new model every prefix is cold at once. The process offers the users with the newest
behaviours (`relaygr.worker.process.warm_up_offers`). For each, one after the other:

    offered -> skipped: cached already, under computation, or without a history
            -> fetched from the pool into DRAM, if the pool has it
            -> no_room: HBM has too few free pages; ends the warm-up
            -> computed, and copied to DRAM | joined by a job or a request

With `worker.follow_behaviours`, users whose prefix is in HBM and whose history changed wait, each once:

    changed -> dropped: `MOST_FOLLOWED` newer users wait
            -> few | not_cached | no_room | under_way, when the device is idle
            -> appended | overtaken by a job, a request or a new model

Both evict nothing, and take no more than a part of the device's idle time (`relaygr.worker.executor.order`). They make
sense only for models whose prefixes serve later requests, and that compute a prefix in chunks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import structlog

from relaygr.worker.cache import Handle, PendingOutcome, PendingPrefix
from relaygr.worker.executor.capacity import Capacity
from relaygr.worker.executor.device_record import MOST_ENDS
from relaygr.worker.executor.order import Scheduler
from relaygr.worker.executor.parts import ExecutorParts
from relaygr.worker.executor.prefixes import Prefixes
from relaygr.worker.executor.resolver import PrefixResolver, Scored
from relaygr.worker.executor.schedulable import WorkClass
from relaygr.worker.executor.work import PrefixWork, RankingWork, ResolvedPrefix
from relaygr.worker.model.config import PrefixRules
from relaygr.worker.settings import FollowBehaviours

log = structlog.get_logger()

_NOTHING = Scored(0, 0)
_CONNECTING_US: Final = 50_000
"""How often a warm-up asks whether the pool has its first connection."""
FETCHED_WITHIN_US: Final = 60_000_000
"""So late a warm-up needs what it fetches, so that all others are served first."""
FIXED_PARTS: Final = 8
"""New behaviours are appended once that takes this many times the fixed part of a forward: each append pays it."""
MOST_FOLLOWED: Final = 4096
"""Most users whose new behaviours wait for an idle device."""


def _serves_later(rules: PrefixRules) -> bool:
    """Whether prefixes serve later requests, and are computed in chunks."""
    return rules.grows and rules.chunks and not rules.uses_query_time


class WarmUps:
    """Belongs to the device thread."""

    def __init__(
        self,
        parts: ExecutorParts,
        resolver: PrefixResolver,
        capacity: Capacity,
        scheduler: Scheduler[PrefixWork | RankingWork],
        prefixes: Prefixes,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._cache, self._pool, self._metrics, self._clock = parts.cache, parts.pool, parts.metrics, parts.clock
        self._settings, self._device_record = parts.settings, parts.device_record
        self._reserved_bytes = parts.admission_settings.footprint_reserve * parts.settings.hbm_bytes
        self._resolver = resolver
        self._capacity = capacity
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._post = post
        self._users: deque[str] = deque()
        self._tried: set[str] = set()
        self._is_full = False
        self._is_fetching = False
        self._fetch_from_us = 0
        """When the next user may be served: fetches take no more than `worker.pool.bytes_per_s` of the link."""
        self._not_fetched: set[str] = set()

    def begin(self) -> None:
        """A new warm-up: forgets the users of an earlier one."""
        self._users.clear()
        self._tried.clear()
        self._not_fetched.clear()
        self._is_full = False

    def offer(self, user_ids: Sequence[str]) -> None:
        """The users to warm up, the most likely first. They replace those that were offered before."""
        serves_later = self._settings.reuse_prefixes and _serves_later(self._resolver.engine.rules)
        self._users = deque(user_ids) if serves_later and not self._is_full else deque()

    def next_in_us(self, now_us: int) -> int | None:
        """Time until the next piece of warm-up may begin; None if nothing is left."""
        idle_in_us = self._scheduler.warm_up_in_us(now_us)
        if len(self._scheduler.warm_up):
            return idle_in_us
        if self._users and not self._is_fetching:
            return max(idle_in_us, self._fetch_from_us - now_us, _CONNECTING_US if self._is_connecting else 0)
        return None

    def begin_next(self, now_us: int) -> bool:
        """Queues the prefix of the next user if the device is idle. False if there is nothing to queue now."""
        scheduler = self._scheduler
        if not self._users or self._is_fetching or self._is_connecting or now_us < self._fetch_from_us:
            return False
        if len(scheduler.warm_up) or scheduler.warm_up_in_us(now_us):
            return False
        user_id = self._users.popleft()
        if user_id in self._tried:
            return True
        if len(self._tried) >= self._settings.warm_up_users:
            self._users.clear()
            return False
        self._tried.add(user_id)
        try:
            outcome = self._begin(user_id)
        except Exception as error:
            # A history that cannot be used must not end the process.
            log.warning("a warm-up failed", error=repr(error))
            outcome = "failed"
        if outcome is not None:
            self._metrics.warm_ups.labels(outcome).inc()
        return True

    @property
    def _is_connecting(self) -> bool:
        return self._pool is not None and self._pool.is_connecting

    def computed(self, handle: Handle) -> None:
        """The prefix was published. Its copy in DRAM stays when HBM needs the pages."""
        self._metrics.warm_ups.labels("computed").inc()
        if self._settings.dram_bytes:
            self._cache.transfers.spill(handle)

    def _begin(self, user_id: str) -> str | None:
        """Queues the user's prefix; or returns why not."""
        resolver = self._resolver
        if self._device_record.ends(user_id) >= MOST_ENDS:
            return "failed"
        history = resolver.history(user_id, None, None, 0)
        if history.history is None or user_id in self._prefixes.by_user:
            return "skipped"
        prefix = resolver.prefix(user_id, history, self._clock.wall_us() // 1000, _NOTHING)
        presence = self._cache.peek(prefix.key)
        if prefix.tokens == 0 or prefix.for_one_impression or presence.hbm_behaviours or presence.dram_behaviours:
            return "skipped"
        if self._fetch(prefix):
            return None
        if not self._has_room(prefix.tokens):
            self._is_full = True
            self._users.clear()
            return "no_room"
        prepare_us = self._capacity.compute_us(0, prefix.tokens)
        self._prefixes.compute(prefix, None, prepare_us, idle_class=WorkClass.WARM_UP)
        return None

    def _fetch(self, prefix: ResolvedPrefix) -> bool:
        """Begins to bring a prefix from the pool into free pages of DRAM, behind what jobs and requests ask for. False
        if there is none.
        """
        user_id, now_us = prefix.key.user_id, self._clock.monotonic_us()
        if self._pool is None or user_id in self._not_fetched:
            return False
        pages, stats = self._resolver.engine.geometry.pages_for(prefix.tokens), self._cache.stats()
        if pages > stats.dram.free:
            return False
        # Nobody waits for it, and it takes no device time: what the pool has is fetched, even if that takes longer than
        # computing it. The worker that wrote it found that fetching pays.
        reloads, at_us = self._prefixes.reloads, now_us + FETCHED_WITHIN_US
        fetch = reloads.fetch_missing(prefix, 0, at_us, saved_us=FETCHED_WITHIN_US / 2)
        if fetch is None:
            return False
        self._is_fetching = True
        bytes_per_us = int(self._settings.pool.bytes_per_s) / 1e6
        self._fetch_from_us = now_us + int(pages * stats.dram_page_bytes / bytes_per_us)
        fetched = partial(self._fetched, user_id, fetch.pending)
        fetch.pending.add_done_callback(lambda _: self._post(fetched))
        return True

    def _fetched(self, user_id: str, pending: PendingPrefix) -> None:
        self._is_fetching = False
        if pending.outcome is PendingOutcome.PUBLISHED:
            self._metrics.warm_ups.labels("fetched").inc()
            return
        # Next it is computed.
        self._fetch_from_us = 0
        self._not_fetched.add(user_id)
        self._tried.discard(user_id)
        self._users.appendleft(user_id)

    def _has_room(self, tokens: int) -> bool:
        """Whether free pages suffice, and leave the reserve of the admission free."""
        geometry, stats = self._resolver.engine.geometry, self._cache.stats()
        return (stats.hbm.free - geometry.pages_for(tokens)) * stats.hbm_page_bytes >= self._reserved_bytes


class Follows:
    """Behaviours that are appended to cached prefixes before anyone asks. Belongs to the device thread."""

    def __init__(
        self,
        parts: ExecutorParts,
        resolver: PrefixResolver,
        capacity: Capacity,
        scheduler: Scheduler[PrefixWork | RankingWork],
        prefixes: Prefixes,
    ) -> None:
        self._cache, self._metrics, self._clock = parts.cache, parts.metrics, parts.clock
        self._device_record = parts.device_record
        self._resolver = resolver
        self._capacity = capacity
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._is_on = parts.settings.follow_behaviours is not FollowBehaviours.OFF and parts.settings.reuse_prefixes
        self._users: OrderedDict[str, None] = OrderedDict()
        """Those that wait, the longest first."""

    def changed(self, user_ids: Iterable[str]) -> None:
        """The histories of these users changed."""
        if not self._is_on or not _serves_later(self._resolver.engine.rules):
            return
        self._users.update(dict.fromkeys(self._cache.in_hbm(user_ids)))
        while len(self._users) > MOST_FOLLOWED:
            self._users.popitem(last=False)
            self.count("dropped")

    def next_in_us(self, now_us: int) -> int | None:
        """Time until the next user's behaviours may be appended; None if no user waits."""
        return self._scheduler.warm_up_in_us(now_us) if self._users else None

    def is_due(self, now_us: int) -> bool:
        """Whether a user waits and work of an idle device may begin."""
        scheduler = self._scheduler
        return bool(self._users) and not len(scheduler.warm_up) and not scheduler.warm_up_in_us(now_us)

    def begin_next(self) -> PrefixWork | None:
        """Queues the new behaviours of the next user, who waits. None if there is nothing to compute for this one."""
        clock, (user_id, _) = self._clock, self._users.popitem(last=False)
        begun_us = clock.monotonic_us()
        try:
            outcome = self._begin(user_id)
        except Exception as error:
            # A history that cannot be used must not end the process.
            log.warning("new behaviours were not appended", error=repr(error))
            outcome = "failed"
        # To look a history up takes the device thread's time, too, and counts in its share.
        ended_us = clock.monotonic_us()
        self._scheduler.charge(WorkClass.FOLLOW, ended_us - begun_us, ended_us)
        if outcome is None:
            return self._prefixes.by_user[user_id]
        self.count(outcome)
        return None

    def count(self, outcome: str) -> None:
        """What became of one user."""
        self._metrics.follows.labels(outcome).inc()

    def _begin(self, user_id: str) -> str | None:
        """Queues the behaviours that the user's prefix in HBM lacks; or returns why not.

        The cache then extends the entry, or gives no pages if that would evict or replace anything: if the entry is
        gone, its user deleted, or its history another one.
        """
        if user_id in self._prefixes.by_user:
            return "under_way"
        if self._device_record.ends(user_id) >= MOST_ENDS:
            return "failed"
        resolver = self._resolver
        history = resolver.history(user_id, None, None, 0)
        if history.history is None:
            return "not_cached"
        prefix = resolver.prefix(user_id, history, self._clock.wall_us() // 1000, _NOTHING)
        cached = self._cache.peek(prefix.key).hbm_behaviours
        if not cached:
            return "not_cached"
        engine, latency = resolver.engine, self._capacity.latency_at(prefix.tokens)
        cached_tokens = engine.layout.tokens(cached)
        tail = prefix.tokens - cached_tokens
        if tail <= 0 or latency.append_us(cached_tokens, tail) < FIXED_PARTS * latency.cut_us(cached_tokens):
            return "few"
        pages_for = engine.geometry.pages_for
        if pages_for(prefix.tokens) - pages_for(cached_tokens) > self._cache.stats().hbm.free:
            return "no_room"
        append_us = self._capacity.compute_us(cached_tokens, prefix.tokens)
        self._prefixes.compute(prefix, None, append_us, idle_class=WorkClass.FOLLOW)
        return None
