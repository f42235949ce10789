"""The look-up of a request: its history, its price, and its prefix in the cache.

    history:  resolved -> price | waits for its version, or for the store
    price:    fits -> cache | fits without the longest computation -> displaces it -> cache | does not fit: cut short
    cache:    ready | a part of it, or nothing | under computation, by a copy or for others: waits

A look-up that waits returns None, and the request's next event continues it. A request waits only as long as full
inference would still end before its deadline; for a reload that should end soon, longer (`WAITED_PART`), for a version
of its history shorter (`WAITED_FOR_HISTORY_PART`). When that time is over, or when the wait has ended, it is looked up
again, or computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.messages import Diverted, Path, PrefixSource
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
)
from relaygr.worker.executor.capacity import Capacity, Price
from relaygr.worker.executor.events import (
    HISTORY_CHANGED,
    CopyEnded,
    FirstLayerCopied,
    RequestEvent,
    WaitedTooLong,
)
from relaygr.worker.executor.impressions import ExpectedArrivals, Impressions
from relaygr.worker.executor.order import Scheduler
from relaygr.worker.executor.parts import ExecutorParts
from relaygr.worker.executor.prefixes import Prefixes
from relaygr.worker.executor.resolver import PrefixResolver, Scored
from relaygr.worker.executor.waits import HistoryWaits, Timers
from relaygr.worker.executor.work import (
    NO_MEMORY,
    CopyWait,
    HeldMemory,
    PrefixWork,
    RankingWork,
    RequestState,
    ResolvedPrefix,
    Unranked,
)
from relaygr.worker.history.resolve import HistoryMismatchError, ResolvedHistory, chosen_at_ms, wanted_by

_LACKS_ROOM = (NoRoom(NoRoomReason.FULL), Declined(DeclineReason.QUEUE_FULL))
MAX_LOOKUPS = 3
"""A request that lost its prefix this often is ranked on the scratch pages."""
WAITED_PART = 0.5
"""The part of the time from its receipt to its latest start for which a request waits for a reload that should end by
then. Full inference without time to spare ends in time less often than such a copy."""
WAITED_FOR_HISTORY_PART = 0.25
"""The part of the time from its sending to its answer for which a request waits for a version of its history. A record
on its way takes tens of ms; with the rest, the request is ranked on the newest history, as any other."""
DISPLACES_LONGER = 4
"""A request displaces the computation of a prefix that demands at least this many times as much."""


@dataclass(slots=True)
class Found:
    """What a look-up found for a request. `handle` pins the part of its prefix that is cached; None: nothing is, or the
    cache was not asked.
    """

    handle: Handle | None
    price: Price


class LookUps:
    """Belongs to the device thread."""

    def __init__(
        self,
        parts: ExecutorParts,
        resolver: PrefixResolver,
        capacity: Capacity,
        scheduler: Scheduler[PrefixWork | RankingWork],
        impressions: Impressions,
        arrivals: ExpectedArrivals,
        waits: HistoryWaits,
        timers: Timers,
        prefixes: Prefixes,
        held: HeldMemory,
        post: Callable[[Callable[[], None]], None],
        advance: Callable[[RankingWork, RequestEvent], None],
    ) -> None:
        """`held`: the memory of requests. `advance`: takes a request that waited to its next state."""
        self._cache, self._clock, self._settings = parts.cache, parts.clock, parts.settings
        self._skew_us = parts.settings.max_clock_skew_ms * 1000
        self._chunk_us = parts.settings.chunk_ms * 1000
        self._longest_wait_us = parts.settings.history_wait_ms * 1000
        self._resolver = resolver
        self._capacity = capacity
        self._backlog = capacity.backlog
        self._scheduler = scheduler
        self._impressions = impressions
        self._arrivals = arrivals
        self._waits = waits
        self._timers = timers
        self._prefixes = prefixes
        self._reloads = prefixes.reloads
        self._held = held
        self._post = post
        self._advance = advance

    def look_up(self, work: RankingWork) -> Found | None:
        """Looks the request up; None if it waits. Raises Unranked if it is too late, or cannot be resolved.

        Without time for its ranking pass nothing is looked up in the cache: later steps take the device thread's time,
        a reload that of the link.
        """
        now_us = self._clock.monotonic_us()
        # A step may have thousands of look-ups, which the watchdog of a busy machine would take for a hang.
        self._capacity.progressed(now_us)
        if now_us > work.deadline_us + self._skew_us:
            raise Unranked(Ended.EXPIRED)
        prefix = work.prefix
        if prefix is None or prefix.revision != self._resolver.engine.revision:
            prefix = self._resolve(work)
            if prefix is None:
                return None
        if work.impression.announced is not None:
            self._arrivals.withdraw(work.impression)
        price = self._price(work, prefix, now_us)
        if not price.fits or prefix.tokens == 0 or not self.uses_cache(work):
            return Found(None, price)
        return self._find(work, prefix, price)

    def uses_cache(self, work: RankingWork) -> bool:
        """Whether the request may be ranked on cached prefixes."""
        return self._settings.reuse_prefixes and work.lookups <= MAX_LOOKUPS

    # -- history -----------------------------------------------------------------------------------

    def _resolve(self, work: RankingWork) -> ResolvedPrefix | None:
        """The request's prefix, which it holds from now on; None if the request waits for its history."""
        request, resolver, partition = work.request, self._resolver, work.received.partition
        scored = Scored(int(request.suffix.items.size), int(request.candidates.size))
        known = self._impressions.take_prefix(work.impression)
        prefix = resolver.again(known, request, scored, partition) if known is not None else None
        if prefix is None:
            try:
                history = resolver.history(
                    request.user_id, wanted_by(request), request.history, partition, chosen_at_ms(request)
                )
            except HistoryMismatchError as error:
                raise Unranked(Ended.FAILED, Reason.UNDECODABLE, str(error)) from error
            if (history.may_arrive or history.is_settling) and self._waits_for_history(work, scored, history):
                return None
            prefix = resolver.prefix(request.user_id, history, request.query_time_ms, scored, request.suffix)
            if request.diverted is not None:
                _describe_as(prefix, request.diverted)
        if not self._held.keep(work, prefix):
            raise Unranked(Ended.FAILED, Reason.OVERLOADED, NO_MEMORY)
        work.prefix = prefix
        return prefix

    def _waits_for_history(self, work: RankingWork, scored: Scored, history: ResolvedHistory) -> bool:
        """Waits for the requested version, or for the store; False if there is no time, or the queue is full.

        The wait leaves time for the queue as it is now and for full inference. For a version it is shorter, since the
        version may never come.
        """
        resolver, sent_us, wanted = self._resolver, work.sent_us, wanted_by(work.request)
        work.scored_tokens = resolver.scored_tokens(scored.suffix_behaviours, scored.candidates)
        known = history.chain.length if history.chain is not None else 0
        needed_us = self._capacity.full_us(resolver.expected_tokens(wanted, known), work.scored_tokens)
        until_us = work.answer_by_us - int(needed_us + self._chunk_us) - self._backlog.predicted_us
        if not history.is_settling:
            part_us = int(WAITED_FOR_HISTORY_PART * (work.answer_by_us - sent_us))
            until_us = min(until_us, sent_us + min(part_us, self._longest_wait_us))
        user_id, partition, is_settling = work.request.user_id, work.received.partition, history.is_settling
        again = partial(self._advance, work, HISTORY_CHANGED)
        if not self._waits.wait(user_id, partition, wanted, until_us, again, is_settling=is_settling):
            return False
        work.state, work.waits_since_us = RequestState.WAITS_FOR_HISTORY, self._clock.monotonic_us()
        self._arrivals.wait(work.impression, work.received.received_us, until_us)
        return True

    def end_history_wait(self, work: RankingWork) -> None:
        """The history may be there, or the time to wait for it is over."""
        if work.waits_since_us is not None:
            work.history_waited_us = self._clock.monotonic_us()
            work.history_wait_us += work.history_waited_us - work.waits_since_us
            work.waits_since_us = None

    # -- price -------------------------------------------------------------------------------------

    def _price(self, work: RankingWork, prefix: ResolvedPrefix, now_us: int) -> Price:
        """Counts the look-up, and prices a ranking pass on the whole prefix. For a request whose prefix is ready, the
        longest computation may have to make room.
        """
        capacity = self._capacity
        work.lookups += 1
        is_new = work.looked_up_us is None and not work.impression.is_leased
        work.looked_up_us = now_us
        work.ranked_prefix_tokens, work.suffix, work.scored_tokens = prefix.tokens, prefix.suffix, prefix.scored_tokens
        capacity.predict_pass(work)
        price = capacity.price(work, now_us, is_new)
        if not price.fits:
            longest = self._displaceable(work, price)
            if longest is not None:
                self._prefixes.displace(longest, now_us)
                capacity.price_again(work, price)
        if price.fits:
            capacity.admitted(work)
        else:
            capacity.turned_away()
        return price

    def _displaceable(self, work: RankingWork, price: Price) -> PrefixWork | None:
        """The computation without which there is room for this request, whose prefix is ready and which demands far
        less.
        """
        longest = self._prefixes.longest() if self._backlog.displaces else None
        if longest is None or longest.remaining_us < DISPLACES_LONGER * price.needed_us or not self._is_ready(work):
            return None
        return longest if self._capacity.fits_without_longest(work, price) else None

    def _is_ready(self, work: RankingWork) -> bool:
        """Whether the request's prefix is cached but for a short tail."""
        if not self.uses_cache(work):
            return False
        peeked = self._cache.peek(work.resolved.key)
        cached = max(peeked.hbm_behaviours, peeked.dram_behaviours)
        return cached > 0 and len(work.resolved.behaviours) - cached <= self._settings.longest_tail

    # -- cache -------------------------------------------------------------------------------------

    def _find(self, work: RankingWork, prefix: ResolvedPrefix, price: Price) -> Found | None:
        """The cached part of the prefix; None if the request waits for more."""
        cache, key, now_us = self._cache, prefix.key, price.now_us
        if self._prefixes.by_user:
            coming = self._prefixes.under_way(key)
            if coming is not None and cache.peek(key).hbm_behaviours < key.length:
                self._join(work, coming)
                return None
        purpose = Purpose.RANKING if work.lookups == 1 else Purpose.AGAIN
        found = cache.acquire(key, now_us, purpose=purpose, arriving=key.length)
        if isinstance(found, PendingPrefix):
            self._wait_for_copy(work, prefix, found)
            return None
        handle = found.handle if isinstance(found, Hit) else None
        if handle is not None:
            if handle.complete:
                return Found(handle, price)
            work.path, work.tokens_cached, work.prefix_source = Path.HBM, handle.tokens, handle.source
        pending = self._bring(work, prefix, found)
        if pending is None:
            return Found(handle, price)
        if handle is not None:
            cache.release(handle)
        self._wait_for_copy(work, prefix, pending)
        return None

    def _bring(self, work: RankingWork, prefix: ResolvedPrefix, found: Hit | Miss) -> PendingPrefix | None:
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

    def _join(self, work: RankingWork, coming: PrefixWork) -> None:
        """Waits for the prefix under computation, or takes the computation over if it has not begun.

        A computation that is taken over is full inference, or an append where a part of the prefix is cached.
        """
        if work.path is not Path.DRAM:
            ready = coming.base is not None and not coming.started
            work.path = Path.HBM if ready else Path.PENDING if coming.started else Path.FULL
            work.prefix_source = coming.base.source if coming.base is not None else PrefixSource.COMPUTED
            work.tokens_cached = coming.done_tokens
        if work.lookups == 1:
            self._cache.count_look_up(work.resolved.key, self._clock.monotonic_us())
        work.state = RequestState.WAITS_FOR_PREFIX
        self._capacity.put(work)
        coming.waiters.append(work)
        self._scheduler.push(coming)

    # -- waiting for a copy ------------------------------------------------------------------------

    def _wait_for_copy(self, work: RankingWork, prefix: ResolvedPrefix, pending: PendingPrefix) -> None:
        """Waits for a copy or a fill, as long as full inference would end in time even behind another chunk.

        For a reload that should end soon it waits longer, for `WAITED_PART`. If full inference does not fit after that,
        the request is ranked truncated or rejected.
        """
        has_lease = False
        if pending.kind is PendingKind.LOAD:
            work.path, work.prefix_source = Path.DRAM, PrefixSource.DRAM
            work.tokens_cached = self._resolver.engine.layout.tokens(pending.behaviours)
            # A request that waits for room gets no lease, since there is no entry yet.
            has_lease = self._reloads.lease(work, prefix)
        else:
            work.path, work.prefix_source = Path.PENDING, PrefixSource.COMPUTED
        now_us = self._clock.monotonic_us()
        wait = work.wait = CopyWait(pending, now_us, has_lease)
        self._arrivals.wait(work.impression, now_us, work.deadline_us)
        pending.needed_by(work.deadline_us)
        # The calls come from any thread.
        if pending.arrival is not None:
            copied = partial(self._advance, work, FirstLayerCopied(wait))
            pending.arrival.add_begun_callback(partial(self._post, copied))
        ended = partial(self._advance, work, CopyEnded(wait))
        pending.add_done_callback(lambda _: self._post(ended))
        until_us = self._waits_until_us(work, prefix, pending, now_us)
        work.state = RequestState.WAITS_FOR_COPY
        self._capacity.put(work)
        wait.timer = self._timers.at(until_us, partial(self._advance, work, WaitedTooLong(wait)))

    def _waits_until_us(self, work: RankingWork, prefix: ResolvedPrefix, pending: PendingPrefix, now_us: int) -> int:
        spare_us = self._capacity.left_us(work, now_us) - int(
            self._capacity.full_us(prefix.tokens, work.scored_tokens) + self._chunk_us
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

    def arriving(self, work: RankingWork, wait: CopyWait) -> Handle | None:
        """The prefix whose first layer is in HBM, if the copy covers it, but for a tail that stays in the suffix. Then
        the wait has ended.
        """
        prefix, resolver = work.resolved, self._resolver
        if prefix.revision != resolver.engine.revision:
            return None
        now_us, behaviours = self._clock.monotonic_us(), wait.pending.behaviours
        found = self._cache.acquire(prefix.key, now_us, purpose=Purpose.AGAIN, arriving=behaviours)
        if not isinstance(found, Hit):
            return None
        if not found.handle.complete and not self._tail_stays(prefix, found.handle):
            self._cache.release(found.handle)
            return None
        self.end_copy_wait(work)
        work.reloaded_us = now_us
        work.reload_us += now_us - wait.started_us
        return found.handle

    def _tail_stays(self, prefix: ResolvedPrefix, cached: Handle) -> bool:
        return self._prefixes.tail_stays_in_suffix(prefix, cached, len(prefix.suffix), prefix.scored_tokens)

    def end_copy_wait(self, work: RankingWork) -> None:
        """The request waits for its copy no more."""
        self._reloads.end_wait(work)
        self._arrivals.withdraw(work.impression)


def _describe_as(prefix: ResolvedPrefix, diverted: Diverted) -> None:
    """Makes the result of a diverted request describe the history as the first worker resolved it. A cut prefix counts
    as for one impression, so it is evicted first: the next request is probably cut elsewhere. A whole prefix is kept as
    any other, because the user's next diverted requests come here, too.
    """
    prefix.version, prefix.loading = diverted.history_version, diverted.history_loading
    prefix.stale, prefix.stale_cause = diverted.history_stale, diverted.history_stale_cause
    prefix.for_one_impression = prefix.for_one_impression or diverted.left_out > 0
