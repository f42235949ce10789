"""Ranking requests, from their receipt to their one result.

    received -> looked up -> ready ------------------------------> ranked
                   |-> waits for a version of its history ----^
                   |-> waits for room in HBM, and for a reload from DRAM
                   '-> waits for its prefix to be computed ---'
    in any state  -> expired | failed | truncated, then ranked

A request waits only as long as full inference would still end before its deadline; for a reload that should end soon,
longer (`WAITED_PART`). When that time is over, or when the wait has ended, the request is looked up or planned again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import structlog

from relaygr.admission.latency import Stage
from relaygr.schemas.messages import (
    DEFAULT_SCENARIO,
    Behaviours,
    Diverted,
    FailureReason,
    Path,
    PrefixSource,
    RankingRequest,
)
from relaygr.worker.cache import (
    Declined,
    DeclineReason,
    Handle,
    Hit,
    Miss,
    NoRoom,
    NoRoomReason,
    PendingKind,
    PendingPrefix,
    Purpose,
    WasteReason,
)
from relaygr.worker.executor.context import ExecutorContext
from relaygr.worker.executor.order import OWN_WEIGHT
from relaygr.worker.executor.plan import Route, RoutePlan, plan_ranking, plan_truncation
from relaygr.worker.executor.prefixes import Computed, Prefixes
from relaygr.worker.executor.resolver import Scored
from relaygr.worker.executor.work import NO_MEMORY, NO_PAGES, PrefixWork, RankingWork, ResolvedPrefix
from relaygr.worker.history.resolve import HistoryMismatchError, wanted_by
from relaygr.worker.memory import is_out_of_memory
from relaygr.worker.metrics import DiscardedWork, DivertedEnd
from relaygr.worker.model.interface import EngineLimits, RankOutputs, TooLongError

log = structlog.get_logger()

_FULL_PATHS = (Path.FULL, Path.TRUNCATED)
_PATHS_WITHOUT_WAIT = (Path.FULL, Path.HBM)
_LACKS_ROOM = (NoRoom(NoRoomReason.FULL), Declined(DeclineReason.QUEUE_FULL))
MAX_LOOKUPS = 3
"""A request that lost its prefix this often is ranked on the scratch pages."""
WAITED_PART = 0.5
"""The part of the time from its receipt to its latest start for which a request waits for a reload that should end by
then. Full inference without time to spare ends in time less often than such a copy."""
GIVES_WAY_TO = 4
"""A request gives way to one that demands at most a fourth of what it still does."""
KEPT_PART = 0.25
"""The part of the time of full inference that a request which gave way may still take."""
LEAST_KEPT_BEHIND_OTHERS = 0.2
"""The smallest part of its prefix on which a request is ranked while others wait: an answer on less is worth little,
and in an overload it would take the device time of requests that can be ranked whole."""


@dataclass(slots=True, eq=False)
class _PrefixWait:
    """A request that waits for a prefix under way. The wait ends once: the prefix or its first layer came, or the
    time is over.
    """

    work: RankingWork
    pending: PendingPrefix
    started_us: int
    has_lease: bool
    """Whether the request leases the prefix, so that nothing evicts it between its reload's end and the look-up."""
    ended: bool = False


class Requests:
    """Belongs to the device thread. `outstanding` may be read from other threads."""

    def __init__(self, context: ExecutorContext, prefixes: Prefixes) -> None:
        self._context = context
        self._parts = context.parts
        self._prefixes = prefixes
        self._backlog = context.scheduler.backlog
        settings = context.parts.settings
        self._skew_us = settings.max_clock_skew_ms * 1000
        self._chunk_us = settings.chunk_ms * 1000
        self._longest_wait_us = settings.history_wait_ms * 1000
        self.outstanding = 0
        """Requests that were taken and are not finished."""

    # -- entry points: one request that fails must not end the process and all other requests --------

    def submit(self, work: RankingWork) -> None:
        """Takes a request; its result goes to the result writer."""
        request = work.request
        work.pages, work.suffix = NO_PAGES, request.suffix
        self._backlog.looked_up += 1
        self.outstanding += 1
        arrivals = self._context.arrivals
        announcement = arrivals.announced.pop((request.user_id, request.request_id), None)
        work.was_announced = announcement is not None
        if announcement is not None:
            arrivals.seen.append((announcement, work.received.received_us))
        if announcement is not None and announcement[3] is not None:
            measured = work.received.received_us, request.sent_at_us, *announcement[3]
            self._context.lead_times.arrived[request.scenario or DEFAULT_SCENARIO].append(measured)
        too_long = _too_long(request, self._context.engine.limits)
        if too_long is not None:
            return self._fail(work, FailureReason.TOO_LONG, too_long)
        return self.look_up(work)

    def look_up(self, work: RankingWork) -> None:
        """Finds the request's history and prefix, and plans its route."""
        try:
            self._look_up(work)
        except Exception as error:
            self._failed(work, error)

    def start_over(self, work: RankingWork) -> None:
        """Another model serves now: looks the request up again from the start. Its first look-up stays counted."""
        work.lookups = min(1, work.lookups)
        self._look_up_again(work)

    def prefix_computed(self, work: RankingWork, computed: Computed) -> None:
        """The prefix that the request waited for is complete: ranks the request, or computes its own tail."""
        try:
            self._continue_on(work, computed)
        except Exception as error:
            self._failed(work, error)

    def cut_short(self, work: RankingWork, now_us: int) -> None:
        """The whole prefix would come too late: ranks on the newest part of the history that fits, or rejects."""
        assert work.prefix is not None
        self._backlog.missed()
        try:
            self._cut_short(work, work.prefix, self._time_left_us(work, now_us), now_us)
        except Exception as error:
            self._failed(work, error)

    def give_way(self, work: RankingWork, now_us: int) -> None:
        """A shorter request has taken the time of this one: ranks on a small part of the history, or rejects."""
        assert work.prefix is not None
        try:
            whole_us = self._full_us(work.prefix.tokens, work.scored_tokens)
            left_us = min(self._time_left_us(work, now_us), int(KEPT_PART * whole_us))
            self._cut_short(work, work.prefix, left_us, now_us)
        except Exception as error:
            self._failed(work, error)

    def rank_on_cached_part(self, work: RankingWork, handle: Handle) -> None:
        """Ranks on the cached part, with the rest of the prefix in the suffix. The request releases `handle`."""
        assert work.prefix is not None
        suffix = self._context.resolver.tail_as_suffix(work.prefix, handle.behaviours)
        assert suffix is not None
        try:
            self._rank_with_tail(work, handle, suffix, self._parts.clock.monotonic_us())
        except Exception as error:
            self._failed(work, error)

    # -- looking up ----------------------------------------------------------------------------------

    def _look_up(self, work: RankingWork) -> None:
        now_us = self._parts.clock.monotonic_us()
        # A step may have thousands of look-ups, which the watchdog of a busy machine would take for a hang.
        self._context.last_progress_us = now_us
        if now_us > work.deadline_us + self._skew_us:
            return self._expire(work)
        prefix = work.prefix
        if prefix is None or prefix.revision != self._context.engine.revision:
            prefix = self._resolve(work)
            if prefix is None:
                return None
        self._context.arrivals.announced.pop((work.request.user_id, work.request.request_id), None)
        work.lookups += 1
        is_new = (
            work.looked_up_us is None and (work.request.user_id, work.request.request_id) not in self._context.leased
        )
        work.looked_up_us = now_us
        if not self._backlog.looking_up_since_us:
            self._backlog.looking_up_since_us = now_us
        self._rank_on(work, prefix.tokens, prefix.suffix, prefix.scored_tokens)
        # Checked before any work for the request: later steps take the device thread's time, a reload the link's.
        if work.is_promised:
            self._backlog.drop(work)
        sent_us = work.sent_us if is_new else None
        room_us = self._backlog.room_us(work.answer_by_us, now_us, sent_us=sent_us)
        own_us = self._backlog.own_us[work.path]
        if work.predicted_us + own_us > room_us and self._finds_way(work, prefix, now_us, sent_us):
            room_us = self._backlog.room_us(work.answer_by_us, now_us, sent_us=sent_us)
        if work.predicted_us + own_us > room_us:
            # A refused request demands its look-up only.
            self._backlog.expected_us += OWN_WEIGHT * (self._backlog.prepare_us - self._backlog.expected_us)
            return self._cut_short(work, prefix, int(room_us - own_us), now_us)
        self._backlog.expected_us += OWN_WEIGHT * (work.remaining_us - self._backlog.expected_us)
        if prefix.tokens == 0:
            return self._ready(work, now_us)
        if not self._uses_cache(work):
            return self._plan(work, prefix, None, now_us)
        cache, purpose = self._parts.cache, Purpose.RANKING if work.lookups == 1 else Purpose.AGAIN
        if self._prefixes.by_user:
            coming = self._prefixes.under_way(prefix.key)
            if coming is not None and cache.peek(prefix.key).hbm_behaviours < prefix.key.length:
                return self._join(work, coming)
        found = cache.acquire(prefix.key, now_us, purpose=purpose, arriving=prefix.key.length)
        if isinstance(found, PendingPrefix):
            return self._wait_for_prefix(work, prefix, found)
        handle = found.handle if isinstance(found, Hit) else None
        if handle is not None:
            if handle.complete:
                self._note_ready(work)
                return self._rank_on_handle(work, handle, now_us)
            work.path, work.tokens_cached, work.prefix_source = Path.HBM, handle.tokens, handle.source
        pending = self._reload(work, prefix, found)
        if pending is not None:
            if handle is not None:
                cache.release(handle)
            return self._wait_for_prefix(work, prefix, pending)
        return self._plan(work, prefix, handle, now_us, is_new, room_us)

    def _finds_way(self, work: RankingWork, prefix: ResolvedPrefix, now_us: int, sent_us: int | None) -> bool:
        """Whether another request, which demands far more, gave way to this one, whose prefix is cached but for a short
        tail.
        """
        longest = self._prefixes.longest() if self._backlog.lets_give_way else None
        if longest is None or not self._uses_cache(work):
            return False
        peeked = self._parts.cache.peek(prefix.key)
        cached = max(peeked.hbm_behaviours, peeked.dram_behaviours)
        if not cached or len(prefix.behaviours) - cached > self._parts.settings.longest_tail:
            return False
        needed_us = work.predicted_us + self._backlog.own_us[work.path]
        if longest.remaining_us < GIVES_WAY_TO * needed_us:
            return False
        if self._backlog.room_us(work.answer_by_us, now_us, sent_us=sent_us, without=longest) < needed_us:
            return False
        self._prefixes.give_way(longest, now_us)
        return True

    def _reload(self, work: RankingWork, prefix: ResolvedPrefix, found: Hit | Miss) -> PendingPrefix | None:
        """Starts a reload from DRAM, or waits for room to start it. None if the request has to go without."""
        in_dram = found.dram_behaviours if isinstance(found, Miss) else 0
        if in_dram and self._prefixes.is_behind(work.latest_start_us):
            return self._prefixes.wait_for_room(work, in_dram)
        begun = self._prefixes.reload(prefix, found, work.deadline_us, work.predicted_us)
        if isinstance(begun, PendingPrefix):
            return begun
        return self._prefixes.wait_for_room(work, in_dram) if in_dram and begun in _LACKS_ROOM else None

    def _resolve(self, work: RankingWork) -> ResolvedPrefix | None:
        """The request's prefix; None if the request waits for its history, or was answered."""
        request, resolver = work.request, self._context.resolver
        scored = Scored(int(request.suffix.items.size), int(request.candidates.size))
        known = self._context.resolved.take((request.user_id, request.request_id))
        if known is not None:
            known = resolver.again(known, request, scored, work.received.partition)
        if known is not None:
            return self._keep(work, known)
        try:
            history = resolver.history(
                request.user_id, request.history_version or wanted_by(request), request.history, work.received.partition
            )
        except HistoryMismatchError as error:
            self._fail(work, FailureReason.UNDECODABLE, str(error))
            return None
        if history.is_behind and self._waits_for_history(work, scored):
            return None
        prefix = resolver.prefix(request.user_id, history, request.query_time_ms, scored, request.suffix)
        if request.diverted is not None:
            _describe_as(prefix, request.diverted)
        return self._keep(work, prefix)

    def _keep(self, work: RankingWork, prefix: ResolvedPrefix) -> ResolvedPrefix | None:
        """The request holds the prefix from now on. None, and the request was answered, if there is no memory."""
        if not self._context.held_by_requests.keep(work, prefix):
            self._fail(work, FailureReason.OVERLOADED, NO_MEMORY)
            return None
        work.prefix = prefix
        return prefix

    def _rank_on(self, work: RankingWork, prefix_tokens: int, suffix: Behaviours, scored_tokens: int) -> None:
        """Sets the ranking pass: this many tokens in pages, this suffix, and the candidates."""
        work.ranked_prefix_tokens, work.suffix, work.scored_tokens = prefix_tokens, suffix, scored_tokens
        time, own_us = self._parts.corrector.pass_time(prefix_tokens, scored_tokens), self._backlog.own_us[work.path]
        work.predicted_us = time.alone_us
        # Under load a request is one of a batch, and what they share is paid once.
        work.remaining_us = time.further_us + own_us
        work.latest_start_us = work.answer_by_us - int(work.predicted_us + own_us)

    def _uses_cache(self, work: RankingWork) -> bool:
        return self._parts.settings.reuse_prefixes and work.lookups <= MAX_LOOKUPS

    def _look_up_again(self, work: RankingWork) -> None:
        self._let_go(work)
        if work.is_promised:
            self._backlog.drop(work)
        work.pages, work.inputs, work.unknown_items = NO_PAGES, None, 0
        work.path, work.prefix_source, work.tokens_cached = Path.FULL, PrefixSource.COMPUTED, 0
        self.look_up(work)

    # -- routes ----------------------------------------------------------------------------

    def _plan(
        self,
        work: RankingWork,
        prefix: ResolvedPrefix,
        handle: Handle | None,
        now_us: int,
        is_new: bool = False,
        room_us: float = 0.0,
    ) -> None:
        """Computes the missing part of the prefix if there is time for it; else less, or nothing.

        `is_new`: no time was spent on the request before. `room_us`: time that its look-up found for a ranking pass.
        """
        suffix, stays = None, False
        if handle is not None:
            suffix = self._context.resolver.tail_as_suffix(prefix, handle.behaviours)
            stays = self._context.tail_stays_in_suffix(prefix, handle, len(prefix.suffix), prefix.scored_tokens)
        plan = plan_ranking(
            prefix.tokens,
            work.scored_tokens,
            handle.tokens if handle is not None else 0,
            self._time_left_us(work, now_us),
            self._parts.corrector.model_at(prefix.tokens),
            self._context.chunking,
            tail_may_be_suffix=suffix is not None,
            tail_stays_in_suffix=stays,
            # Without the share of pre-infer, which a computation leaves.
            pass_remaining_us=room_us - self._backlog.own_us[work.path],
        )
        if handle is not None and suffix is not None and plan.route is Route.TAIL_AS_SUFFIX:
            self._note_ready(work)
            return self._rank_with_tail(work, handle, suffix, now_us)
        if is_new and self._backlog.patience < 1.0 and plan.route is not Route.REJECT:
            own_us = self._backlog.own_us[work.path]
            ready_part = min(1.0, (work.predicted_us + own_us) / max(1.0, plan.predicted_us + own_us))
            if self._backlog.room_us(work.answer_by_us, now_us, sent_us=work.sent_us, ready_part=ready_part) < 0:
                plan = replace(plan, route=Route.REJECT)
        if handle is not None and plan.route is Route.WHOLE:
            work.is_promised = True
            self._backlog.put(work, work.latest_start_us)
            return self._prefixes.compute(prefix, handle, plan.compute_us, request=work)
        if handle is not None:
            self._parts.cache.release(handle)
        return self._serve_in_full(work, prefix, plan, now_us)

    def _note_ready(self, work: RankingWork) -> None:
        """The request needs nothing but its ranking pass: if nobody announced it, it counts for `ExpectedArrivals`."""
        if not work.was_announced and work.lookups == 1:
            self._context.arrivals.seen.append((None, work.received.received_us))

    def _cut_short(self, work: RankingWork, prefix: ResolvedPrefix, left_us: int, now_us: int) -> None:
        """There is no time for the whole prefix: ranks on the newest part of the history that fits, or rejects."""
        latency = self._parts.corrector.model_at(prefix.tokens)
        plan = plan_truncation(prefix.tokens, work.scored_tokens, left_us, latency, self._context.chunking)
        self._serve_in_full(work, prefix, plan, now_us)

    def _rank_on_handle(self, work: RankingWork, handle: Handle, now_us: int) -> None:
        """Ranks on the pages of `handle`, which the request releases. Some layers may still be on their way."""
        work.path = Path.HBM if handle.arrival is None else Path.DRAM
        work.tokens_cached, work.prefix_source = handle.tokens, handle.source
        work.handle, work.pages = handle, handle.pages
        self._ready(work, now_us)

    def _rank_with_tail(self, work: RankingWork, handle: Handle, suffix: Behaviours, now_us: int) -> None:
        """Ranks on the cached part, with the tail of the prefix in `suffix`. Exact, but keeps no K,V of the tail."""
        scored_tokens = self._context.resolver.scored_tokens(len(suffix), work.request.candidates.size)
        self._rank_on(work, handle.tokens, suffix, scored_tokens)
        self._rank_on_handle(work, handle, now_us)

    def _serve_in_full(self, work: RankingWork, prefix: ResolvedPrefix, plan: RoutePlan, now_us: int) -> None:
        """Full inference over the whole prefix or its newest part; or a rejection."""
        if plan.route is not Route.WHOLE and self._backlog.total_us:
            self._backlog.refused()
        if plan.route is not Route.WHOLE and self._is_diverted(work, plan):
            return self._finish(work, ranked=False)
        if plan.route is Route.REJECT:
            return self.reject(work)
        work.prefix_source, work.tokens_cached = PrefixSource.COMPUTED, 0
        work.path, on_scratch, compute_us = Path.FULL, not self._uses_cache(work), plan.compute_us
        if plan.route is Route.TRUNCATE:
            shorter = self._context.resolver.shortened(prefix, plan.prefix_tokens)
            if shorter.tokens >= prefix.tokens:
                return self.reject(work)
            if len(self._context.scheduler.ranking) and shorter.tokens < LEAST_KEPT_BEHIND_OTHERS * prefix.tokens:
                return self.reject(work)
            prefix, work.path, on_scratch = shorter, Path.TRUNCATED, True
            latency = self._parts.corrector.model_at(prefix.tokens)
            compute_us = self._context.chunking.duration_us(0, prefix.tokens, latency)
        if plan.route is Route.TRUNCATE or now_us != work.looked_up_us:
            # The prediction of the look-up is for another prefix, or old.
            self._rank_on(work, prefix.tokens, prefix.suffix, prefix.scored_tokens)
        if prefix is not work.held_prefix and not self._context.held_by_requests.keep(work, prefix):
            return self._fail(work, FailureReason.OVERLOADED, NO_MEMORY)
        work.prefix = prefix
        if prefix.tokens == 0:
            return self._ready(work, now_us)
        work.is_promised = True
        self._backlog.put(work, work.latest_start_us)
        return self._prefixes.compute(prefix, None, compute_us, request=work, on_scratch=on_scratch)

    def _is_diverted(self, work: RankingWork, plan: RoutePlan) -> bool:
        """Whether another worker answers the request, for which there is no time here."""
        diverter = self._parts.diverter
        if diverter is None:
            return False
        if self._backlog.total_us or self._backlog.handed_over > self._backlog.looked_up:
            # Only other work makes the worker short of time; without it the request alone demands too much.
            diverter.note_short()
        if work.request.diverted is not None:
            return False
        kept_tokens = plan.prefix_tokens if plan.route is Route.TRUNCATE else 0
        return diverter.divert(work.request, work.reply, work.received, work.answer_by_us, kept_tokens)

    def _join(self, work: RankingWork, coming: PrefixWork) -> None:
        """Waits for the prefix under computation, or takes the computation over if it has not begun.

        A computation that is taken over is full inference, or an append where a part of the prefix is cached.
        """
        if work.path is not Path.DRAM:
            ready = coming.base is not None and not coming.started
            work.path = Path.HBM if ready else Path.PENDING if coming.started else Path.FULL
            work.prefix_source = coming.base.source if coming.base is not None else PrefixSource.COMPUTED
            work.tokens_cached = coming.done_tokens
        if work.lookups == 1 and work.prefix is not None:
            # The cache counts this look-up like any other: a miss, a partial hit, or a join.
            found = self._parts.cache.acquire(work.prefix.key, self._parts.clock.monotonic_us())
            if isinstance(found, Hit):
                self._parts.cache.release(found.handle)
        work.is_promised = True
        self._backlog.put(work, work.latest_start_us)
        coming.waiters.append(work)
        self._parts.metrics.joined(overtaken=not coming.started)
        self._context.scheduler.push(coming)

    def _continue_on(self, work: RankingWork, computed: Computed) -> None:
        assert work.prefix is not None
        if computed.handle is None:
            work.pages = computed.work.pages
        else:
            found = self._parts.cache.acquire(work.prefix.key, computed.at_us, join=False, purpose=Purpose.AGAIN)
            if not isinstance(found, Hit):
                return self.look_up(work)
            if not found.handle.complete:
                return self._plan(work, work.prefix, found.handle, computed.at_us)
            work.handle, work.pages = found.handle, found.handle.pages
        work.unknown_items += computed.work.inputs.unknown_items
        return self._ready(work, computed.at_us)

    def _ready(self, work: RankingWork, now_us: int) -> None:
        """The request has its prefix: looks up suffix and candidates, and queues the ranking pass."""
        assert work.prefix is not None
        work.ready_us = now_us
        try:
            inputs = self._context.engine.rank_inputs(
                work.ranked_prefix_tokens,
                work.pages,
                work.suffix,
                work.request.candidates,
                query_time_ms=work.prefix.query_time_ms,
                prefix_timestamps_ms=work.prefix.behaviours.timestamps_ms,
            )
        except TooLongError as error:
            return self._fail(work, FailureReason.TOO_LONG, str(error))
        if work.handle is not None and work.handle.arrival is not None:
            inputs = replace(inputs, layer_ready=work.handle.arrival.wait)
        work.inputs = inputs
        work.unknown_items += inputs.unknown_items
        work.is_promised = False
        self._context.scheduler.ranking.push(work)

    # -- waiting -------------------------------------------------------------------------------------

    def _waits_for_history(self, work: RankingWork, scored: Scored) -> bool:
        """Waits for the requested version; False if there is no time, or the queue is full."""
        resolver = self._context.resolver
        work.scored_tokens = resolver.scored_tokens(scored.suffix_behaviours, scored.candidates)
        needed_us = self._full_us(resolver.expected_tokens(wanted_by(work.request)), work.scored_tokens)
        last_start_us = work.answer_by_us - int(needed_us + self._chunk_us)
        until_us = min(last_start_us, work.received.received_us + self._longest_wait_us)
        again = partial(self.look_up, work)
        self._context.arrivals.wait(
            (work.request.user_id, work.request.request_id), work.received.received_us, until_us
        )
        return self._context.wait_for_history(work.request.user_id, until_us, again, again)

    def _wait_for_prefix(self, work: RankingWork, prefix: ResolvedPrefix, pending: PendingPrefix) -> None:
        """Waits for a reload or a fill, as long as full inference would end in time even behind another chunk.

        For a reload that should end soon it waits longer, for `WAITED_PART`. If full inference does not fit after that,
        the request is ranked truncated or rejected.
        """
        has_lease = False
        if pending.kind is PendingKind.LOAD:
            work.path, work.prefix_source = Path.DRAM, PrefixSource.DRAM
            work.tokens_cached = self._context.engine.layout.tokens(pending.behaviours)
            # A request that waits for room gets no lease, since there is no entry yet.
            has_lease = self._parts.cache.lease(prefix.key, work.request.request_id, work.deadline_us)
            self._prefixes.reloads_awaited += has_lease
        else:
            work.path, work.prefix_source = Path.PENDING, PrefixSource.COMPUTED
        now_us = self._parts.clock.monotonic_us()
        wait = _PrefixWait(work, pending, now_us, has_lease)
        self._context.arrivals.wait((work.request.user_id, work.request.request_id), now_us, work.deadline_us)
        pending.needed_by(work.deadline_us)
        if pending.arrival is not None:
            pending.arrival.add_begun_callback(self._posted(self._wait_first_layer, wait))
        pending.add_done_callback(lambda _: self._context.post(partial(self._wait_done, wait)))
        spare_us = self._time_left_us(work, now_us) - int(
            self._full_us(prefix.tokens, work.scored_tokens) + self._chunk_us
        )
        until_us, received_us = now_us + max(0, spare_us), work.received.received_us
        # Counted from the receipt: a request that has given up does not wait again.
        patient_until_us = received_us + WAITED_PART * (work.latest_start_us - received_us)
        # A copy that is overdue may hang.
        if pending.expected_us is not None and now_us <= pending.expected_us <= patient_until_us:
            until_us = max(until_us, int(patient_until_us))
        work.is_promised = True
        self._backlog.put(work, work.latest_start_us)
        self._context.timers.at(until_us, partial(self._wait_overdue, wait))

    def _posted(self, step: Callable[[_PrefixWait], None], wait: _PrefixWait) -> Callable[[], None]:
        """A call, from any thread, that runs the step on the device thread."""
        return partial(self._context.post, partial(step, wait))

    def _wait_done(self, wait: _PrefixWait) -> None:
        """The wait ended with any outcome: looks the request up again."""
        if wait.ended:
            return
        self._end_wait(wait)
        work, waited_for = wait.work, wait.work.path
        if wait.pending.kind is PendingKind.LOAD:
            work.reloaded_us = self._parts.clock.monotonic_us()
            work.reload_us += work.reloaded_us - wait.started_us
        self.look_up(work)
        if work.path is Path.HBM:
            work.path = waited_for

    def _end_wait(self, wait: _PrefixWait) -> None:
        wait.ended = True
        self._prefixes.reloads_awaited -= wait.has_lease
        request = wait.work.request
        self._context.arrivals.announced.pop((request.user_id, request.request_id), None)

    def _wait_first_layer(self, wait: _PrefixWait) -> None:
        """The first layer of a reload has arrived. If the reload covers the prefix, but for a tail that stays in the
        suffix, ranks while the other layers are copied.
        """
        work = wait.work
        if wait.ended or work.prefix is None or work.prefix.revision != self._context.engine.revision:
            return
        now_us = self._parts.clock.monotonic_us()
        found = self._parts.cache.acquire(
            work.prefix.key, now_us, purpose=Purpose.AGAIN, arriving=wait.pending.behaviours
        )
        if not isinstance(found, Hit):
            return
        handle, prefix, suffix = found.handle, work.prefix, None
        if not handle.complete:
            if self._context.tail_stays_in_suffix(prefix, handle, len(prefix.suffix), prefix.scored_tokens):
                suffix = self._context.resolver.tail_as_suffix(prefix, handle.behaviours)
            if suffix is None:
                self._parts.cache.release(handle)
                return
        self._end_wait(wait)
        work.reloaded_us = now_us
        work.reload_us += now_us - wait.started_us
        try:
            if suffix is not None:
                self._rank_with_tail(work, handle, suffix, now_us)
            else:
                self._rank_on_handle(work, handle, now_us)
        except Exception as error:
            self._failed(work, error)

    def _wait_overdue(self, wait: _PrefixWait) -> None:
        """There is no time left to wait: computes instead."""
        work = wait.work
        if wait.ended:
            return
        self._end_wait(wait)
        self._prefixes.end_wait_for_room(wait.pending)
        if work.prefix is None or work.prefix.revision != self._context.engine.revision:
            return self.look_up(work)
        try:
            self._plan(work, work.prefix, None, self._parts.clock.monotonic_us())
        except Exception as error:
            self._failed(work, error)

    def _time_left_us(self, work: RankingWork, now_us: int) -> int:
        """The device time that the request may take, without being late or making admitted requests late.

        The request gives back the time that it was promised, until it is queued or waits again.
        """
        if work.is_promised:
            self._backlog.drop(work)
        # Jobs that wait get their share of the device time meanwhile.
        room_us = self._backlog.room_us(work.answer_by_us, now_us, self._backlog.preinfer_share)
        return int(room_us - self._backlog.own_us[work.path])

    def _full_us(self, prefix_tokens: int, scored_tokens: int) -> float:
        """Predicted time of full inference in this worker: the chunks of the prefix, then the ranking pass."""
        latency = self._parts.corrector.model_at(prefix_tokens)
        computed_us = self._context.chunking.duration_us(0, prefix_tokens, latency)
        return computed_us + latency.hit_us(prefix_tokens, scored_tokens)

    # -- ends ----------------------------------------------------------------------------------------

    def ranked(self, work: RankingWork, outputs: RankOutputs) -> bool:
        """Writes the scores as the result, if they are finite and the request still had its prefix.

        Returns whether it did. Then the caller sends the result, and calls `sent`.
        """
        if work.handle is not None and _lost_its_prefix(work.handle):
            self._look_up_again(work)
            return False
        backlog = self._backlog
        work.backlog_us = int(backlog.total_us * backlog.caution * backlog.pace / backlog.patience) or None
        if self._parts.results.ranked(work, outputs):
            return True
        # The cause may be the cached prefix: the next request would fail, too.
        self._parts.cache.invalidate_user(work.request.user_id)
        self._finish(work, ranked=False)
        return False

    def sent(self, work: RankingWork) -> None:
        """Counts a request whose scores were sent at `answered_us`, and lets go of what it held."""
        self._parts.results.count_ranked(work)
        if work.path is Path.FULL and work.pre_infer_us:
            self._observe_full(work)
        if work.handle is not None and work.handle.approximate:
            self._parts.metrics.ranked_approximately()
        if work.request.diverted is None:
            self._note_ranked(work)
        if work.answered_us > work.deadline_us:
            self._parts.metrics.discarded(DiscardedWork.LATE, int(work.pre_infer_us + work.predicted_us))
        self._finish(work, ranked=True)

    def _note_ranked(self, work: RankingWork) -> None:
        """Notes how full inference ended, or would have ended, for the triggers' test of the risk."""
        now_us, observer = work.answered_us, self._context.full_path
        assert work.prefix is not None
        tokens, request = work.prefix.tokens, work.request
        impression = request.user_id, request.request_id
        has_job = impression in self._context.with_job
        if impression in self._context.computed and work.path not in _FULL_PATHS and work.started_us is not None:
            observer.prepared.append((tokens, work.scored_tokens, work.answer_by_us - work.started_us))
        way_us = work.way_us
        # One wrong time of sending among a few samples would be their P99, and put every user at risk.
        if work.path in _PATHS_WITHOUT_WAIT and way_us is not None:
            inside_us = now_us - work.received.received_us - work.pre_infer_us - work.rank_us
            outside = now_us, way_us + inside_us + work.deadline_us - work.answer_by_us
            observer.outside.append(outside)
            if work.path is Path.FULL and work.pre_infer_us:
                observer.outside_full.append(outside)
        if work.path in _FULL_PATHS and work.pre_infer_us:
            observer.ran(tokens, work.scored_tokens, work.pre_infer_us + work.rank_us, now_us)
        if has_job:
            return
        if work.path is Path.TRUNCATED or (work.path is Path.FULL and now_us > work.answer_by_us):
            observer.missed(request.request_id, now_us)

    def _note_unranked(self, work: RankingWork) -> None:
        """Notes a request that was rejected or expired. That is the trigger's mistake only if it sent no job."""
        request = work.request
        if (request.user_id, request.request_id) not in self._context.with_job and request.diverted is None:
            self._context.full_path.missed(request.request_id, self._parts.clock.monotonic_us())

    def _observe_full(self, work: RankingWork) -> None:
        """Corrects the predictions of full inference. The ranking pass counts with its predicted time, since its
        forward may have served other requests too.
        """
        size = work.ranked_prefix_tokens, work.scored_tokens
        corrector = self._parts.corrector
        took_us = work.pre_infer_us + corrector.model_at(size[0]).hit_us(*size)
        corrector.observe(Stage.FULL, corrector.calibrated.full_us(*size), took_us, size[0])

    def reject(self, work: RankingWork) -> None:
        """Fails the request, since no route can serve it before its deadline."""
        if self._parts.clock.monotonic_us() > work.deadline_us:
            return self._expire(work)
        return self._fail(work, FailureReason.OVERLOADED, "no path could answer within the deadline")

    def fail_on(self, work: RankingWork, error: Exception) -> None:
        """Fails the request with the device's error. If a reload failed, looks the request up again instead."""
        if work.handle is not None and _lost_its_prefix(work.handle):
            return self._look_up_again(work)
        reason = FailureReason.OUT_OF_MEMORY if is_out_of_memory(error) else FailureReason.DEVICE_ERROR
        return self._fail(work, reason, str(error)[:500] or repr(error))

    def refused(self, user_id: str, request_id: str) -> None:
        """Notes that the poll thread has refused this request: its prefix is not needed any more."""
        self._backlog.refused()
        self._context.resolved.take((user_id, request_id))
        self._context.answered.add((user_id, request_id), self._parts.clock.monotonic_us())
        self._parts.cache.end_lease(user_id, request_id, WasteReason.REQUEST_EXPIRED)

    def _failed(self, work: RankingWork, error: Exception) -> None:
        """Fails the request after an exception in an entry point."""
        log.error("a ranking request failed", request_id=work.request.request_id, exc_info=error)
        if not work.done:
            self.fail_on(work, error)

    def _fail(self, work: RankingWork, reason: FailureReason, detail: str) -> None:
        if reason is FailureReason.OVERLOADED:
            self._note_unranked(work)
            work.backlog_us = self._backlog.predicted_us + int(work.remaining_us)
        self._parts.results.failed(work, reason, detail)
        self._finish(work, ranked=False)

    def _expire(self, work: RankingWork) -> None:
        self._note_unranked(work)
        self._parts.results.expired(work)
        self._finish(work, ranked=False)

    def _finish(self, work: RankingWork, ranked: bool) -> None:
        work.done = True
        if work.is_promised:
            self._backlog.drop(work)
        self.outstanding -= 1
        if work.request.diverted is not None:
            self._note_diverted(work, ranked)
        self._context.held_by_requests.end(work)
        cache, user_id, request_id = self._parts.cache, work.request.user_id, work.request.request_id
        # The time of receipt is close enough, and saves a look at the clock.
        self._context.answered.add((user_id, request_id), work.received.received_us)
        self._context.arrivals.announced.pop((user_id, request_id), None)
        # Counts a wasted pre-infer: the request was ranked before it, or was not ranked in time.
        cache.end_lease(user_id, request_id, WasteReason.OVERTAKEN if ranked else WasteReason.REQUEST_EXPIRED)
        if ranked and work.handle is not None and work.prefix is not None:
            if work.prefix.for_one_impression:
                cache.demote([work.request.user_id])
            elif self._parts.settings.dram_bytes:
                cache.transfers.spill(work.handle)
        self._let_go(work)

    def _note_diverted(self, work: RankingWork, ranked: bool) -> None:
        end = DivertedEnd.RANKED if ranked else DivertedEnd.UNRANKED
        if ranked and work.answered_us > work.deadline_us:
            end = DivertedEnd.LATE
        self._parts.metrics.diverted_received[end].inc()

    def _let_go(self, work: RankingWork) -> None:
        if work.handle is not None:
            self._parts.cache.release(work.handle)
            work.handle = None
        if self._prefixes.scratch_user is work:
            self._prefixes.scratch_user = None


def _describe_as(prefix: ResolvedPrefix, diverted: Diverted) -> None:
    """Makes the result of a diverted request describe the history as the first worker resolved it. A cut prefix counts
    as for one impression, so it is evicted first: the next request is probably cut elsewhere. A whole prefix is kept as
    any other, because the user's next diverted requests come here, too.
    """
    prefix.version, prefix.stale = diverted.history_version, diverted.history_stale
    prefix.loading = diverted.history_loading
    prefix.for_one_impression = prefix.for_one_impression or diverted.left_out > 0


def _lost_its_prefix(handle: Handle) -> bool:
    """Whether the handle was revoked, or the rest of its prefix did not arrive."""
    return not handle.is_held or (handle.arrival is not None and handle.arrival.failed)


def _too_long(request: RankingRequest, limits: EngineLimits) -> str | None:
    """The limit of the model that the request exceeds. Checked before anything is computed for the request."""
    for count, limit, what in (
        (int(request.candidates.size), limits.max_candidates, "candidates"),
        (int(request.suffix.items.size), limits.max_suffix_behaviours, "suffix behaviours"),
    ):
        if count > limit:
            return f"{count} {what}, the model takes {limit}"
    return None
