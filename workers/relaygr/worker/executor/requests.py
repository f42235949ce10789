"""The state machine of ranking requests, from their receipt to their one result (docs/scheduling.md).

A request waits only as long as full inference would still end before its deadline; for a reload that should end soon,
longer (`WAITED_PART`). When that time is over, or when the wait has ended, the request is looked up or planned again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import assert_never

import structlog

from relaygr.schemas.messages import (
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
from relaygr.worker.executor.events import (
    HISTORY_CHANGED,
    ComputedTooLate,
    CopyEnded,
    DeviceFailed,
    Displaced,
    FirstLayerCopied,
    HistoryChanged,
    ModelChanged,
    NoRoomToAppend,
    NoTimeLeft,
    PrefixComputed,
    PrefixLeft,
    Ranked,
    RequestEvent,
    Sent,
    Taken,
    WaitedTooLong,
)
from relaygr.worker.executor.measured import OWN_WEIGHT
from relaygr.worker.executor.observations import Observations
from relaygr.worker.executor.prefixes import Prefixes
from relaygr.worker.executor.resolver import Scored
from relaygr.worker.executor.routes import Route, RoutePlan, plan_ranking, plan_truncation
from relaygr.worker.executor.work import (
    NO_MEMORY,
    NO_PAGES,
    CopyWait,
    PrefixWork,
    RankingWork,
    RequestState,
    ResolvedPrefix,
)
from relaygr.worker.history.resolve import HistoryMismatchError, wanted_by
from relaygr.worker.memory import is_out_of_memory
from relaygr.worker.model.interface import EngineLimits, RankOutputs, TooLongError

log = structlog.get_logger()

_LACKS_ROOM = (NoRoom(NoRoomReason.FULL), Declined(DeclineReason.QUEUE_FULL))
MAX_LOOKUPS = 3
"""A request that lost its prefix this often is ranked on the scratch pages."""
WAITED_PART = 0.5
"""The part of the time from its receipt to its latest start for which a request waits for a reload that should end by
then. Full inference without time to spare ends in time less often than such a copy."""
DISPLACES_LONGER = 4
"""A request displaces the computation of a prefix that demands at least this many times as much."""
KEPT_PART = 0.25
"""The part of the time of full inference that a displaced request may still take."""
LEAST_KEPT_BEHIND_OTHERS = 0.2
"""The smallest part of its prefix on which a request is ranked while others wait: an answer on less is worth little,
and in an overload it would take the device time of requests that can be ranked whole."""


class Requests:
    """Belongs to the device thread. `outstanding` may be read from other threads."""

    def __init__(self, context: ExecutorContext, prefixes: Prefixes) -> None:
        self._context = context
        self._parts = context.parts
        self._prefixes = prefixes
        self._reloads = prefixes.reloads
        self._backlog = context.scheduler.backlog
        self._measured = context.scheduler.backlog.measured
        self._observations = Observations(context)
        settings = context.parts.settings
        self._skew_us = settings.max_clock_skew_ms * 1000
        self._chunk_us = settings.chunk_ms * 1000
        self._longest_wait_us = settings.history_wait_ms * 1000
        self.outstanding = 0
        """Requests that were taken and are not finished."""

    def advance(self, work: RankingWork, event: RequestEvent) -> None:
        """Takes the request to its next state. Its result goes to the result writer. A request that has ended stays so.

        One request that fails must not end the process and all other requests.
        """
        if work.has_ended:
            return
        try:
            self._advance(work, event)
        except Exception as error:
            log.error("a ranking request failed", request_id=work.request.request_id, exc_info=error)
            self._end_after(work, error)

    def _end_after(self, work: RankingWork, error: Exception) -> None:
        """Ends the request after an exception, or looks it up once more if a reload failed."""
        if work.state is RequestState.ANSWERED:
            # Its scores are on their way.
            return self._end(work, ranked=True)
        if work.has_ended:
            return None
        try:
            self._device_failed(work, error)
        except Exception as second:
            if not work.has_ended:
                self._fail(work, _reason_of(second), str(second)[:500] or repr(second))

    def _advance(self, work: RankingWork, event: RequestEvent) -> None:
        match event:
            case Taken():
                self._take(work)
            case Ranked(outputs):
                self._ranked(work, outputs)
            case Sent():
                self._sent(work)
            case PrefixComputed():
                self._continue_on(work, event)
            case HistoryChanged() | PrefixLeft():
                self._look_up(work)
            case CopyEnded(wait) if wait is work.wait:
                self._copy_ended(work, wait)
            case FirstLayerCopied(wait) if wait is work.wait:
                self._rank_beside_copy(work, wait)
            case WaitedTooLong(wait) if wait is work.wait:
                self._compute_instead(work, wait)
            case NoRoomToAppend(handle):
                self._rank_on_cached_part(work, handle)
            case ComputedTooLate(at_us):
                self._measured.missed()
                self._cut_short(work, self._time_left_us(work, at_us), at_us)
            case Displaced(at_us):
                whole_us = self._full_us(work.resolved.tokens, work.scored_tokens)
                self._cut_short(work, min(self._time_left_us(work, at_us), int(KEPT_PART * whole_us)), at_us)
            case ModelChanged():
                # The first look-up stays counted.
                work.lookups = min(1, work.lookups)
                self._look_up_again(work)
            case NoTimeLeft():
                self._measured.missed()
                self._reject(work)
            case DeviceFailed(error):
                self._device_failed(work, error)
            case CopyEnded() | FirstLayerCopied() | WaitedTooLong():
                pass  # Of a wait that has ended.
            case _:
                assert_never(event)

    def _take(self, work: RankingWork) -> None:
        request = work.request
        work.pages, work.suffix = NO_PAGES, request.suffix
        self._backlog.looked_up += 1
        self.outstanding += 1
        self._observations.taken(work)
        too_long = _too_long(request, self._context.engine.limits)
        if too_long is not None:
            return self._fail(work, FailureReason.TOO_LONG, too_long)
        return self._look_up(work)

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
        self._context.arrivals.announced.pop(work.impression, None)
        work.lookups += 1
        is_new = work.looked_up_us is None and work.impression not in self._context.leased
        work.looked_up_us = now_us
        backlog, measured = self._backlog, self._measured
        if not backlog.looking_up_since_us:
            backlog.looking_up_since_us = now_us
        self._rank_on(work, prefix.tokens, prefix.suffix, prefix.scored_tokens)
        # Checked before any work for the request: later steps take the device thread's time, a reload the link's.
        backlog.drop(work)
        needed_us, room_us = work.predicted_us + measured.own_us[work.path], self._room_us(work, now_us, is_new)
        if needed_us > room_us:
            longest = self._displaceable(work, needed_us, now_us, is_new)
            if longest is not None:
                self._prefixes.displace(longest, now_us)
                room_us = self._room_us(work, now_us, is_new)
        if needed_us > room_us:
            # A refused request demands its look-up only.
            measured.expected_us += OWN_WEIGHT * (measured.prepare_us - measured.expected_us)
            return self._cut_short(work, int(room_us - measured.own_us[work.path]), now_us)
        measured.expected_us += OWN_WEIGHT * (work.remaining_us - measured.expected_us)
        if prefix.tokens == 0:
            return self._ready(work, now_us)
        if not self._uses_cache(work):
            return self._plan(work, prefix, None, now_us)
        return self._find_prefix(work, prefix, now_us, is_new, room_us)

    def _room_us(self, work: RankingWork, now_us: int, is_new: bool, displacing: bool = False) -> float:
        """The time for the ranking pass and its own time; 0 for a new request that would have to wait for too long."""
        sent_us = work.sent_us if is_new else None
        return self._backlog.room_us(work.answer_by_us, now_us, sent_us=sent_us, displacing=displacing)

    def _is_ready(self, work: RankingWork) -> bool:
        """Whether the request's prefix is cached but for a short tail."""
        if not self._uses_cache(work):
            return False
        peeked = self._parts.cache.peek(work.resolved.key)
        cached = max(peeked.hbm_behaviours, peeked.dram_behaviours)
        return cached > 0 and len(work.resolved.behaviours) - cached <= self._parts.settings.longest_tail

    def _displaceable(self, work: RankingWork, needed_us: float, now_us: int, is_new: bool) -> PrefixWork | None:
        """The computation without which there is room for this request, whose prefix is ready and which demands far
        less.
        """
        longest = self._prefixes.longest() if self._backlog.displaces else None
        if longest is None or longest.remaining_us < DISPLACES_LONGER * needed_us or not self._is_ready(work):
            return None
        return longest if needed_us <= self._room_us(work, now_us, is_new, displacing=True) else None

    def _find_prefix(
        self, work: RankingWork, prefix: ResolvedPrefix, now_us: int, is_new: bool, room_us: float
    ) -> None:
        """Ranks on the cached prefix, waits for the one under way, or plans its computation. See `_plan`."""
        cache, purpose = self._parts.cache, Purpose.RANKING if work.lookups == 1 else Purpose.AGAIN
        if self._prefixes.by_user:
            coming = self._prefixes.under_way(prefix.key)
            if coming is not None and cache.peek(prefix.key).hbm_behaviours < prefix.key.length:
                return self._join(work, coming)
        found = cache.acquire(prefix.key, now_us, purpose=purpose, arriving=prefix.key.length)
        if isinstance(found, PendingPrefix):
            return self._wait_for_copy(work, prefix, found)
        handle = found.handle if isinstance(found, Hit) else None
        if handle is not None:
            if handle.complete:
                self._observations.found_ready(work)
                return self._rank_on_handle(work, handle, now_us)
            work.path, work.tokens_cached, work.prefix_source = Path.HBM, handle.tokens, handle.source
        pending = self._reload(work, prefix, found)
        if pending is not None:
            if handle is not None:
                cache.release(handle)
            return self._wait_for_copy(work, prefix, pending)
        return self._plan(work, prefix, handle, now_us, is_new, room_us)

    def _reload(self, work: RankingWork, prefix: ResolvedPrefix, found: Hit | Miss) -> PendingPrefix | None:
        """Starts a fetch from the pool or a reload from DRAM, or waits for room to start it. None if the request has to
        go without.
        """
        fetch = self._reloads.fetch(work, prefix, found, work.latest_start_us)
        if fetch is not None:
            # The look-up after it reloads the prefix.
            work.lookups = max(1, work.lookups - 1)
            return fetch.pending
        in_dram = found.dram_behaviours if isinstance(found, Miss) else 0
        if in_dram and self._reloads.has_more_urgent(work.latest_start_us):
            return self._reloads.wait_for_room(work, in_dram)
        begun = self._reloads.reload(prefix, found, work.deadline_us, work.predicted_us)
        if isinstance(begun, PendingPrefix):
            return begun
        return self._reloads.wait_for_room(work, in_dram) if in_dram and begun in _LACKS_ROOM else None

    def _resolve(self, work: RankingWork) -> ResolvedPrefix | None:
        """The request's prefix; None if the request waits for its history, or was answered."""
        request, resolver = work.request, self._context.resolver
        scored = Scored(int(request.suffix.items.size), int(request.candidates.size))
        known = self._context.resolved.take(work.impression)
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
        if history.may_arrive and self._waits_for_history(work, scored):
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
        time, own_us = self._parts.corrector.pass_time(prefix_tokens, scored_tokens), self._measured.own_us[work.path]
        work.predicted_us = time.alone_us
        # Under load a request is one of a batch, and what they share is paid once.
        work.remaining_us = time.further_us + own_us
        work.latest_start_us = work.answer_by_us - int(work.predicted_us + own_us)

    def _uses_cache(self, work: RankingWork) -> bool:
        return self._parts.settings.reuse_prefixes and work.lookups <= MAX_LOOKUPS

    def _look_up_again(self, work: RankingWork) -> None:
        self._let_go(work)
        self._backlog.drop(work)
        work.pages, work.inputs, work.unknown_items = NO_PAGES, None, 0
        work.path, work.prefix_source, work.tokens_cached = Path.FULL, PrefixSource.COMPUTED, 0
        self._look_up(work)

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
            pass_remaining_us=room_us - self._measured.own_us[work.path],
        )
        if handle is not None and suffix is not None and plan.route is Route.TAIL_AS_SUFFIX:
            self._observations.found_ready(work)
            return self._rank_with_tail(work, handle, suffix, now_us)
        if is_new and plan.route is not Route.REJECT:
            own_us = self._measured.own_us[work.path]
            ready_part = min(1.0, (work.predicted_us + own_us) / max(1.0, plan.predicted_us + own_us))
            if not self._backlog.may_wait(work.answer_by_us, now_us, work.sent_us, ready_part=ready_part):
                plan = replace(plan, route=Route.REJECT)
        if handle is not None and plan.route is Route.WHOLE:
            self._wait(work, RequestState.WAITS_FOR_PREFIX)
            return self._prefixes.compute(prefix, handle, plan.compute_us, request=work)
        if handle is not None:
            self._parts.cache.release(handle)
        return self._serve_in_full(work, prefix, plan, now_us)

    def _cut_short(self, work: RankingWork, left_us: int, now_us: int) -> None:
        """There is no time for the whole prefix: ranks on the newest part of the history that fits, or rejects."""
        prefix = work.resolved
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
            self._measured.refused()
        if plan.route is not Route.WHOLE and self._is_diverted(work, plan):
            return self._end(work, ranked=False)
        if plan.route is Route.REJECT:
            return self._reject(work)
        work.prefix_source, work.tokens_cached = PrefixSource.COMPUTED, 0
        work.path, on_scratch, compute_us = Path.FULL, not self._uses_cache(work), plan.compute_us
        if plan.route is Route.TRUNCATE:
            shorter = self._context.resolver.shortened(prefix, plan.prefix_tokens)
            if shorter.tokens >= prefix.tokens:
                return self._reject(work)
            if len(self._context.scheduler.ranking) and shorter.tokens < LEAST_KEPT_BEHIND_OTHERS * prefix.tokens:
                return self._reject(work)
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
        self._wait(work, RequestState.WAITS_FOR_PREFIX)
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
        self._wait(work, RequestState.WAITS_FOR_PREFIX)
        coming.waiters.append(work)
        self._context.scheduler.push(coming)

    def _continue_on(self, work: RankingWork, computed: PrefixComputed) -> None:
        """The prefix that the request waited for is complete: ranks the request, or computes its own tail."""
        prefix, at_us = work.resolved, computed.at_us
        if computed.handle is None:
            work.pages = computed.computation.pages
        else:
            found = self._parts.cache.acquire(prefix.key, at_us, join=False, purpose=Purpose.AGAIN)
            if not isinstance(found, Hit):
                return self._look_up(work)
            if not found.handle.complete:
                return self._plan(work, prefix, found.handle, at_us)
            work.handle, work.pages = found.handle, found.handle.pages
        work.unknown_items += computed.computation.inputs.unknown_items
        return self._ready(work, at_us)

    def _rank_on_cached_part(self, work: RankingWork, handle: Handle) -> None:
        """Ranks on the cached part, with the rest of the prefix in the suffix. The request releases `handle`."""
        suffix = self._context.resolver.tail_as_suffix(work.resolved, handle.behaviours)
        assert suffix is not None
        self._rank_with_tail(work, handle, suffix, self._parts.clock.monotonic_us())

    def _ready(self, work: RankingWork, now_us: int) -> None:
        """The request has its prefix: looks up suffix and candidates, and queues the ranking pass."""
        prefix, work.ready_us = work.resolved, now_us
        try:
            inputs = self._context.engine.rank_inputs(
                work.ranked_prefix_tokens,
                work.pages,
                work.suffix,
                work.request.candidates,
                query_time_ms=prefix.query_time_ms,
                prefix_timestamps_ms=prefix.behaviours.timestamps_ms,
            )
        except TooLongError as error:
            return self._fail(work, FailureReason.TOO_LONG, str(error))
        if work.handle is not None and work.handle.arrival is not None:
            inputs = replace(inputs, layer_ready=work.handle.arrival.wait)
        work.inputs = inputs
        work.unknown_items += inputs.unknown_items
        self._parts.metrics.looked_up(inputs.unknown_items)
        work.unknown_actions = prefix.unknown_actions + self._context.engine.unknown_actions(prefix.suffix)
        work.state = RequestState.READY
        self._context.scheduler.ranking.push(work)

    # -- waiting -------------------------------------------------------------------------------------

    def _wait(self, work: RankingWork, state: RequestState) -> None:
        """The request waits for its prefix. The backlog counts its ranking pass, so that there is room for it then."""
        work.state = state
        self._backlog.put(work, work.latest_start_us)

    def _waits_for_history(self, work: RankingWork, scored: Scored) -> bool:
        """Waits for the requested version; False if there is no time, or the queue is full."""
        resolver = self._context.resolver
        work.scored_tokens = resolver.scored_tokens(scored.suffix_behaviours, scored.candidates)
        needed_us = self._full_us(resolver.expected_tokens(wanted_by(work.request)), work.scored_tokens)
        last_start_us = work.answer_by_us - int(needed_us + self._chunk_us)
        until_us = min(last_start_us, work.received.received_us + self._longest_wait_us)
        again = partial(self.advance, work, HISTORY_CHANGED)
        self._context.arrivals.wait(work.impression, work.received.received_us, until_us)
        if not self._context.wait_for_history(work.request.user_id, until_us, again, again):
            return False
        work.state = RequestState.WAITS_FOR_HISTORY
        return True

    def _wait_for_copy(self, work: RankingWork, prefix: ResolvedPrefix, pending: PendingPrefix) -> None:
        """Waits for a copy or a fill, as long as full inference would end in time even behind another chunk.

        For a reload that should end soon it waits longer, for `WAITED_PART`. If full inference does not fit after that,
        the request is ranked truncated or rejected.
        """
        has_lease = False
        if pending.kind is PendingKind.LOAD:
            work.path, work.prefix_source = Path.DRAM, PrefixSource.DRAM
            work.tokens_cached = self._context.engine.layout.tokens(pending.behaviours)
            # A request that waits for room gets no lease, since there is no entry yet.
            has_lease = self._parts.cache.lease(prefix.key, work.request.request_id, work.deadline_us)
            self._reloads.awaited += has_lease
        else:
            work.path, work.prefix_source = Path.PENDING, PrefixSource.COMPUTED
        now_us = self._parts.clock.monotonic_us()
        wait = work.wait = CopyWait(pending, now_us, has_lease)
        self._context.arrivals.wait(work.impression, now_us, work.deadline_us)
        pending.needed_by(work.deadline_us)
        # The calls come from any thread.
        if pending.arrival is not None:
            copied = partial(self.advance, work, FirstLayerCopied(wait))
            pending.arrival.add_begun_callback(partial(self._context.post, copied))
        ended = partial(self.advance, work, CopyEnded(wait))
        pending.add_done_callback(lambda _: self._context.post(ended))
        until_us = self._waits_until_us(work, prefix, pending, now_us)
        self._wait(work, RequestState.WAITS_FOR_COPY)
        wait.timer = self._context.timers.at(until_us, partial(self.advance, work, WaitedTooLong(wait)))

    def _waits_until_us(self, work: RankingWork, prefix: ResolvedPrefix, pending: PendingPrefix, now_us: int) -> int:
        spare_us = self._time_left_us(work, now_us) - int(
            self._full_us(prefix.tokens, work.scored_tokens) + self._chunk_us
        )
        if pending.longest_wait_us is not None:
            spare_us = min(spare_us, int(pending.longest_wait_us))
        until_us, received_us = now_us + max(0, spare_us), work.received.received_us
        # Counted from the receipt: a request that has given up does not wait again.
        longest_us = received_us + WAITED_PART * (work.latest_start_us - received_us)
        # A copy that is overdue may hang.
        if pending.expected_us is not None and now_us <= pending.expected_us <= longest_us:
            until_us = max(until_us, int(longest_us))
        return until_us

    def _end_wait(self, work: RankingWork, wait: CopyWait) -> None:
        work.wait = None
        if wait.timer is not None:
            wait.timer.cancel()
        self._reloads.awaited -= wait.has_lease
        self._context.arrivals.announced.pop(work.impression, None)

    def _copy_ended(self, work: RankingWork, wait: CopyWait) -> None:
        """Looks the request up again, whatever became of the copy."""
        self._end_wait(work, wait)
        waited_for = work.path
        if wait.pending.kind is PendingKind.LOAD:
            work.reloaded_us = self._parts.clock.monotonic_us()
            work.reload_us += work.reloaded_us - wait.started_us
        self._look_up(work)
        if work.path is Path.HBM:
            work.path = waited_for

    def _rank_beside_copy(self, work: RankingWork, wait: CopyWait) -> None:
        """If the reload covers the prefix, but for a tail that stays in the suffix, ranks while the layers after the
        first are copied.
        """
        prefix, suffix = work.resolved, None
        if prefix.revision != self._context.engine.revision:
            return
        now_us, arriving = self._parts.clock.monotonic_us(), wait.pending.behaviours
        found = self._parts.cache.acquire(prefix.key, now_us, purpose=Purpose.AGAIN, arriving=arriving)
        if not isinstance(found, Hit):
            return
        handle = found.handle
        if not handle.complete:
            if self._context.tail_stays_in_suffix(prefix, handle, len(prefix.suffix), prefix.scored_tokens):
                suffix = self._context.resolver.tail_as_suffix(prefix, handle.behaviours)
            if suffix is None:
                self._parts.cache.release(handle)
                return
        self._end_wait(work, wait)
        work.reloaded_us = now_us
        work.reload_us += now_us - wait.started_us
        if suffix is not None:
            self._rank_with_tail(work, handle, suffix, now_us)
        else:
            self._rank_on_handle(work, handle, now_us)

    def _compute_instead(self, work: RankingWork, wait: CopyWait) -> None:
        """There is no time left to wait."""
        self._end_wait(work, wait)
        self._reloads.end_wait_for_room(wait.pending)
        if work.resolved.revision != self._context.engine.revision:
            return self._look_up(work)
        return self._plan(work, work.resolved, None, self._parts.clock.monotonic_us())

    def _time_left_us(self, work: RankingWork, now_us: int) -> int:
        """The device time that the request may take, without being late or making admitted requests late.

        The request gives back the time that it was promised, until it is queued or waits again.
        """
        self._backlog.drop(work)
        # Jobs that wait get their share of the device time meanwhile.
        room_us = self._backlog.room_us(work.answer_by_us, now_us, preinfer_share=self._backlog.preinfer_share)
        return int(room_us - self._measured.own_us[work.path])

    def _full_us(self, prefix_tokens: int, scored_tokens: int) -> float:
        """Predicted time of full inference in this worker: the chunks of the prefix, then the ranking pass."""
        latency = self._parts.corrector.model_at(prefix_tokens)
        computed_us = self._context.chunking.duration_us(0, prefix_tokens, latency)
        return computed_us + latency.hit_us(prefix_tokens, scored_tokens)

    # -- ends ----------------------------------------------------------------------------------------

    def _ranked(self, work: RankingWork, outputs: RankOutputs) -> None:
        """Writes the scores as the result, if they are finite and the request still had its prefix. They are sent with
        those of the whole batch.
        """
        if work.handle is not None and _lost_its_prefix(work.handle):
            return self._look_up_again(work)
        work.backlog_us = self._backlog.queued_us or None
        if self._parts.results.ranked(work, outputs):
            work.state = RequestState.ANSWERED
            return None
        # The cause may be the cached prefix: the next request would fail, too.
        self._parts.cache.invalidate_user(work.request.user_id)
        return self._end(work, ranked=False)

    def _sent(self, work: RankingWork) -> None:
        self._observations.sent(work)
        self._end(work, ranked=True)

    def _reject(self, work: RankingWork) -> None:
        """Fails the request, since no route can serve it before its deadline."""
        if self._parts.clock.monotonic_us() > work.deadline_us:
            return self._expire(work)
        return self._fail(work, FailureReason.OVERLOADED, "no path could answer within the deadline")

    def _device_failed(self, work: RankingWork, error: Exception) -> None:
        """Fails the request with the device's error. If a reload failed, looks the request up again instead."""
        if work.handle is not None and _lost_its_prefix(work.handle):
            return self._look_up_again(work)
        return self._fail(work, _reason_of(error), str(error)[:500] or repr(error))

    def _fail(self, work: RankingWork, reason: FailureReason, detail: str) -> None:
        if reason is FailureReason.OVERLOADED:
            self._observations.unranked(work)
            work.backlog_us = self._backlog.predicted_us + int(work.remaining_us)
        self._parts.results.failed(work, reason, detail)
        self._end(work, ranked=False)

    def _expire(self, work: RankingWork) -> None:
        self._observations.unranked(work)
        self._parts.results.expired(work)
        self._end(work, ranked=False)

    def _end(self, work: RankingWork, ranked: bool) -> None:
        work.state = RequestState.ENDED
        self._backlog.drop(work)
        if work.wait is not None:
            self._end_wait(work, work.wait)
        self.outstanding -= 1
        self._observations.ended(work, ranked)
        self._context.held_by_requests.end(work)
        cache, (user_id, request_id) = self._parts.cache, work.impression
        # The time of receipt is close enough, and saves a look at the clock.
        self._context.answered.add(work.impression, work.received.received_us)
        self._context.arrivals.announced.pop(work.impression, None)
        # Counts a wasted pre-infer: the request was ranked before it, or was not ranked in time.
        cache.end_lease(user_id, request_id, WasteReason.OVERTAKEN if ranked else WasteReason.REQUEST_EXPIRED)
        if ranked and work.handle is not None and work.prefix is not None:
            if work.prefix.for_one_impression:
                cache.demote([user_id])
            elif self._parts.settings.dram_bytes:
                cache.transfers.spill(work.handle)
                if self._parts.pool is not None:
                    self._parts.pool.visited(work.handle.pin.entry.key, work.received.received_us)
        self._let_go(work)

    def refused(self, user_id: str, request_id: str) -> None:
        """Notes that the poll thread has refused this request: its prefix is not needed any more."""
        self._measured.refused()
        self._context.resolved.take((user_id, request_id))
        self._context.answered.add((user_id, request_id), self._parts.clock.monotonic_us())
        self._parts.cache.end_lease(user_id, request_id, WasteReason.REQUEST_EXPIRED)

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


def _reason_of(error: Exception) -> FailureReason:
    return FailureReason.OUT_OF_MEMORY if is_out_of_memory(error) else FailureReason.DEVICE_ERROR


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
