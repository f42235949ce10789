"""Warm-up: prefixes of users who will probably return are computed while the device is idle.

After a start, an assignment or a new model every prefix is cold at once. The process then offers the users with the
newest behaviours (`relaygr.worker.process.warm_up_offers`). For each, one after the other:

    offered -> skipped: cached already, under computation, or without a history
            -> no_room: HBM has too few free pages; ends the warm-up
            -> computed, and copied to DRAM | joined by a job or a request

Warm-up evicts nothing, and takes no more than a part of the device's idle time (`relaygr.worker.executor.order`). It
makes sense only for models whose prefixes serve later requests, and that compute a prefix in chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import structlog

from relaygr.worker.cache import Handle
from relaygr.worker.executor.context import ExecutorContext
from relaygr.worker.executor.prefixes import Prefixes
from relaygr.worker.executor.resolver import Scored

log = structlog.get_logger()

_NOTHING = Scored(0, 0)


class WarmUps:
    """Belongs to the device thread."""

    def __init__(self, context: ExecutorContext, prefixes: Prefixes) -> None:
        self._context = context
        self._parts = context.parts
        self._prefixes = prefixes
        self._users: deque[str] = deque()
        self._tried: set[str] = set()
        self._is_full = False

    def begin(self) -> None:
        """A new warm-up: forgets the users of an earlier one."""
        self._users.clear()
        self._tried.clear()
        self._is_full = False

    def offer(self, user_ids: Sequence[str]) -> None:
        """The users to warm up, the most likely first. They replace those that were offered before."""
        usable = self._parts.settings.reuse_prefixes and self._is_useful() and not self._is_full
        self._users = deque(user_ids) if usable else deque()

    def next_in_us(self, now_us: int) -> int | None:
        """Time until the next piece of warm-up may begin; None if nothing is left."""
        scheduler = self._context.scheduler
        return scheduler.warm_up_in_us(now_us) if self._users or len(scheduler.warm_up) else None

    def begin_next(self, now_us: int) -> bool:
        """Queues the prefix of the next user if the device is idle. False if there is nothing to queue now."""
        scheduler = self._context.scheduler
        if not self._users or len(scheduler.warm_up) or scheduler.warm_up_in_us(now_us):
            return False
        user_id = self._users.popleft()
        if user_id in self._tried:
            return True
        if len(self._tried) >= self._parts.settings.warm_up_users:
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
            self._parts.metrics.warm_ups.labels(outcome).inc()
        return True

    def computed(self, handle: Handle) -> None:
        """The prefix was published. Its copy in DRAM stays when HBM needs the pages."""
        self._parts.metrics.warm_ups.labels("computed").inc()
        if self._parts.settings.dram_bytes:
            self._parts.cache.transfers.spill(handle)

    def _begin(self, user_id: str) -> str | None:
        """Queues the user's prefix; or returns why not."""
        context = self._context
        history = context.resolver.history(user_id, None, None, 0)
        if history.history is None or user_id in self._prefixes.by_user:
            return "skipped"
        prefix = context.resolver.prefix(user_id, history, self._parts.clock.wall_us() // 1000, _NOTHING)
        presence = self._parts.cache.peek(prefix.key)
        if prefix.tokens == 0 or prefix.for_one_impression or presence.hbm_behaviours or presence.dram_behaviours:
            return "skipped"
        if not self._has_room(prefix.tokens):
            self._is_full = True
            self._users.clear()
            return "no_room"
        latency = self._parts.corrector.model_at(prefix.tokens)
        prepare_us = context.chunking.duration_us(0, prefix.tokens, latency)
        self._prefixes.compute(prefix, None, prepare_us)
        return None

    def _has_room(self, tokens: int) -> bool:
        """Whether free pages suffice, and leave the reserve of the admission free."""
        geometry, stats = self._context.engine.geometry, self._parts.cache.stats()
        reserve = self._parts.admission_settings.footprint_reserve * self._parts.settings.hbm_bytes
        return (stats.hbm.free - geometry.pages_for(tokens)) * stats.hbm_page_bytes >= reserve

    def _is_useful(self) -> bool:
        engine = self._context.engine
        return engine.rules.grows and engine.rules.chunks and not engine.rules.uses_query_time
