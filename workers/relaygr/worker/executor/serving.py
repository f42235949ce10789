"""How a request that was looked up is served: by the route that fits its time, up to its ranking pass.

    complete prefix ------------------------------------> ready
    a part of it, or nothing -> WHOLE -> computed ------> ready
                             -> TAIL_AS_SUFFIX ---------> ready
                             -> TRUNCATE -> computed ---> ready; or diverted to another worker, or Unranked
                             -> REJECT -> diverted to another worker, or Unranked

`routes` chooses the route; this module gives it its time (`Capacity`), and begins what it needs.
"""

from __future__ import annotations

from dataclasses import replace

from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.messages import Behaviours, Path, PrefixSource
from relaygr.worker.cache import Handle, Hit, Purpose
from relaygr.worker.executor.capacity import Capacity, Price
from relaygr.worker.executor.events import PrefixComputed
from relaygr.worker.executor.impressions import ExpectedArrivals
from relaygr.worker.executor.look_up import Found, LookUps
from relaygr.worker.executor.order import Scheduler
from relaygr.worker.executor.parts import ExecutorParts
from relaygr.worker.executor.prefixes import Prefixes
from relaygr.worker.executor.resolver import PrefixResolver
from relaygr.worker.executor.routes import Route, RoutePlan, plan_ranking, plan_truncation
from relaygr.worker.executor.work import (
    NO_MEMORY,
    HeldMemory,
    PassedOn,
    PrefixWork,
    RankingWork,
    RequestState,
    Unranked,
)
from relaygr.worker.model.interface import TooLongError

KEPT_PART = 0.25
"""The part of the time of full inference that a displaced request may still take."""
LEAST_KEPT_BEHIND_OTHERS = 0.2
"""The smallest part of its prefix on which a request is ranked while others wait: an answer on less is worth little,
and in an overload it would take the device time of requests that can be ranked whole."""


class Serving:
    """Belongs to the device thread."""

    def __init__(
        self,
        parts: ExecutorParts,
        resolver: PrefixResolver,
        capacity: Capacity,
        scheduler: Scheduler[PrefixWork | RankingWork],
        arrivals: ExpectedArrivals,
        look_ups: LookUps,
        prefixes: Prefixes,
        held: HeldMemory,
    ) -> None:
        """`held`: the memory of requests."""
        self._cache, self._clock = parts.cache, parts.clock
        self._metrics, self._diverter = parts.metrics, parts.diverter
        self._resolver = resolver
        self._capacity = capacity
        self._backlog = capacity.backlog
        self._scheduler = scheduler
        self._arrivals = arrivals
        self._look_ups = look_ups
        self._prefixes = prefixes
        self._held = held

    # -- after a look-up ---------------------------------------------------------------------------

    def serve(self, work: RankingWork, found: Found) -> None:
        """Serves the request with what its look-up found."""
        price, handle = found.price, found.handle
        if not price.fits:
            return self._cut_short(work, int(self._capacity.pass_left_us(work, price)), price.now_us)
        if work.resolved.tokens == 0:
            return self._ready(work, price.now_us)
        if handle is not None and handle.complete:
            self._arrived_ready(work)
            return self._rank_on_handle(work, handle, price.now_us)
        return self.compute(work, handle, price.now_us, price if self._look_ups.uses_cache(work) else None)

    def compute(self, work: RankingWork, handle: Handle | None, now_us: int, price: Price | None = None) -> None:
        """Computes the part of the prefix that `handle` lacks if there is time for it; else less, or nothing.

        `price`: of the look-up at `now_us`; None if the request waited since.
        """
        capacity, prefix = self._capacity, work.resolved
        suffix, stays = None, False
        if handle is not None:
            suffix = self._resolver.tail_as_suffix(prefix, handle.behaviours)
            stays = suffix is not None and self._prefixes.tail_stays_in_suffix(
                prefix, handle, len(prefix.suffix), prefix.scored_tokens
            )
        plan = plan_ranking(
            prefix.tokens,
            work.scored_tokens,
            handle.tokens if handle is not None else 0,
            capacity.left_us(work, now_us, price),
            capacity.latency_at(prefix.tokens),
            capacity.chunking,
            tail_may_be_suffix=suffix is not None,
            tail_stays_in_suffix=stays,
            # Without the share of pre-infer, which a computation leaves.
            pass_remaining_us=capacity.pass_left_us(work, price) if price is not None else 0.0,
        )
        if handle is not None and suffix is not None and plan.route is Route.TAIL_AS_SUFFIX:
            self._arrived_ready(work)
            return self._rank_with_tail(work, handle, suffix, now_us)
        is_new = price is not None and price.is_new and plan.route is not Route.REJECT
        if is_new and not capacity.may_wait(work, now_us, plan.predicted_us):
            plan = replace(plan, route=Route.REJECT)
        if handle is not None and plan.route is Route.WHOLE:
            self._wait(work)
            return self._prefixes.compute(prefix, handle, plan.compute_us, request=work)
        if handle is not None:
            self._cache.release(handle)
        return self._serve_in_full(work, plan, now_us)

    def _arrived_ready(self, work: RankingWork) -> None:
        """The request needs nothing but its ranking pass: if nobody announced it, it counts for `ExpectedArrivals`."""
        if not work.was_announced and work.lookups == 1:
            self._arrivals.arrived_ready(work.received.received_us)

    # -- routes ------------------------------------------------------------------------------------

    def cut_short(self, work: RankingWork, now_us: int) -> None:
        """There is no time for the whole prefix: ranks on the newest part of the history that fits, or rejects."""
        self._cut_short(work, self._capacity.left_us(work, now_us), now_us)

    def displaced(self, work: RankingWork, now_us: int) -> None:
        """A shorter request took the place of the request's computation, of which only a part is left."""
        whole_us = self._capacity.full_us(work.resolved.tokens, work.scored_tokens)
        self._cut_short(work, min(self._capacity.left_us(work, now_us), int(KEPT_PART * whole_us)), now_us)

    def _cut_short(self, work: RankingWork, left_us: int, now_us: int) -> None:
        tokens, capacity = work.resolved.tokens, self._capacity
        plan = plan_truncation(tokens, work.scored_tokens, left_us, capacity.latency_at(tokens), capacity.chunking)
        self._serve_in_full(work, plan, now_us)

    def _serve_in_full(self, work: RankingWork, plan: RoutePlan, now_us: int) -> None:
        """Full inference over the whole prefix or its newest part. Raises Unranked if it is rejected or diverted."""
        prefix = work.resolved
        if plan.route is not Route.WHOLE and self._backlog.total_us:
            self._capacity.refused()
        if plan.route is not Route.WHOLE and self._is_diverted(work, plan):
            raise PassedOn
        if plan.route is Route.REJECT:
            raise self.rejection(work)
        work.prefix_source, work.tokens_cached = PrefixSource.COMPUTED, 0
        work.path, on_scratch, compute_us = Path.FULL, not self._look_ups.uses_cache(work), plan.compute_us
        if plan.route is Route.TRUNCATE:
            shorter = self._resolver.shortened(prefix, plan.prefix_tokens)
            if shorter.tokens >= prefix.tokens:
                raise self.rejection(work)
            if len(self._scheduler.ranking) and shorter.tokens < LEAST_KEPT_BEHIND_OTHERS * prefix.tokens:
                raise self.rejection(work)
            prefix, work.path, on_scratch = shorter, Path.TRUNCATED, True
            compute_us = self._capacity.compute_us(0, prefix.tokens)
        if plan.route is Route.TRUNCATE or now_us != work.looked_up_us:
            # The prediction of the look-up is for another prefix, or old.
            self._predict_pass(work, prefix.tokens, prefix.suffix, prefix.scored_tokens)
        if prefix is not work.held_prefix and not self._held.keep(work, prefix):
            raise Unranked(Ended.FAILED, Reason.OVERLOADED, NO_MEMORY)
        work.prefix = prefix
        if prefix.tokens == 0:
            return self._ready(work, now_us)
        self._wait(work)
        return self._prefixes.compute(prefix, None, compute_us, request=work, on_scratch=on_scratch)

    def rejection(self, work: RankingWork) -> Unranked:
        """Why the request is not ranked, since no route can serve it before its deadline."""
        if self._clock.monotonic_us() > work.deadline_us:
            return Unranked(Ended.EXPIRED)
        return Unranked(Ended.FAILED, Reason.OVERLOADED, "no path could answer within the deadline")

    def _is_diverted(self, work: RankingWork, plan: RoutePlan) -> bool:
        """Whether another worker answers the request, for which there is no time here."""
        diverter = self._diverter
        if diverter is None:
            return False
        if self._backlog.has_others:
            # Only other work makes the worker short of time; without it the request alone demands too much.
            diverter.note_short()
        if work.request.diverted is not None:
            return False
        kept_tokens = plan.prefix_tokens if plan.route is Route.TRUNCATE else 0
        return diverter.divert(work.request, work.reply, work.received, work.answer_by_us, kept_tokens)

    def _wait(self, work: RankingWork) -> None:
        work.state = RequestState.WAITS_FOR_PREFIX
        self._capacity.put(work)

    # -- ready -------------------------------------------------------------------------------------

    def continue_on(self, work: RankingWork, computed: PrefixComputed) -> bool:
        """The prefix for which the request waited is complete: ranks the request, or computes its own tail. False if
        the prefix is gone, and is to be looked up again.
        """
        at_us = computed.at_us
        if computed.handle is None:
            work.pages = computed.computation.pages
        else:
            found = self._cache.acquire(work.resolved.key, at_us, join=False, purpose=Purpose.AGAIN)
            if not isinstance(found, Hit):
                return False
            if not found.handle.complete:
                self.compute(work, found.handle, at_us)
                return True
            work.handle, work.pages = found.handle, found.handle.pages
        work.unknown_items += computed.computation.inputs.unknown_items
        self._ready(work, at_us)
        return True

    def rank_on(self, work: RankingWork, handle: Handle, now_us: int) -> None:
        """Ranks on the pages of `handle`, with what it lacks of the prefix in the suffix. Exact, but keeps no K,V of
        that tail. The request releases `handle`, of which some layers may still be on their way.
        """
        if not handle.complete:
            suffix = self._resolver.tail_as_suffix(work.resolved, handle.behaviours)
            assert suffix is not None
            return self._rank_with_tail(work, handle, suffix, now_us)
        return self._rank_on_handle(work, handle, now_us)

    def _rank_with_tail(self, work: RankingWork, handle: Handle, suffix: Behaviours, now_us: int) -> None:
        scored_tokens = self._resolver.scored_tokens(len(suffix), work.request.candidates.size)
        self._predict_pass(work, handle.tokens, suffix, scored_tokens)
        self._rank_on_handle(work, handle, now_us)

    def _rank_on_handle(self, work: RankingWork, handle: Handle, now_us: int) -> None:
        work.path = Path.HBM if handle.arrival is None else Path.DRAM
        work.tokens_cached, work.prefix_source = handle.tokens, handle.source
        work.handle, work.pages = handle, handle.pages
        self._ready(work, now_us)

    def _predict_pass(self, work: RankingWork, prefix_tokens: int, suffix: Behaviours, scored_tokens: int) -> None:
        work.ranked_prefix_tokens, work.suffix, work.scored_tokens = prefix_tokens, suffix, scored_tokens
        self._capacity.predict_pass(work)

    def _ready(self, work: RankingWork, now_us: int) -> None:
        """The request has its prefix: looks up suffix and candidates, and queues the ranking pass."""
        prefix, work.ready_us, engine = work.resolved, now_us, self._resolver.engine
        try:
            inputs = engine.rank_inputs(
                work.ranked_prefix_tokens,
                work.pages,
                work.suffix,
                work.request.candidates,
                query_time_ms=prefix.query_time_ms,
                prefix_timestamps_ms=prefix.behaviours.timestamps_ms,
            )
        except TooLongError as error:
            raise Unranked(Ended.FAILED, Reason.TOO_LONG, str(error)) from error
        if work.handle is not None and work.handle.arrival is not None:
            inputs = replace(inputs, layer_ready=work.handle.arrival.wait)
        work.inputs = inputs
        if inputs.unknown_items:
            work.unknown_items += inputs.unknown_items
            self._metrics.unknown_items.inc(inputs.unknown_items)
        work.unknown_actions = prefix.unknown_actions + engine.unknown_actions(prefix.suffix)
        work.state = RequestState.READY
        self._scheduler.ranking.push(work)
