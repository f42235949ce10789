"""Ranking requests, from receipt to their one answer.

received -> looked up -> ready ----------------------------> ranked
               |-> waits for a history version (parked)  ^
               |-> waits for a reload from DRAM ---------|
               '-> waits for its prefix, in chunks ------'
any of them -> expired | failed(overloaded) | truncated, then ranked
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import structlog

from relaygr.admission.latency import Stage
from relaygr.schemas.messages import Behaviours, FailureReason, Path, PrefixSource
from relaygr.worker.cache import Handle, Hit, PendingPrefix, Purpose, WasteReason
from relaygr.worker.executor.context import RecentIds, Shared
from relaygr.worker.executor.plan import Route, RoutePlan, plan_ranking
from relaygr.worker.executor.prefixes import PrefixFlow
from relaygr.worker.executor.resolver import Scored
from relaygr.worker.executor.waiting import Waiting
from relaygr.worker.executor.work import PrefixWork, RankingWork, ResolvedPrefix
from relaygr.worker.history.resolve import HistoryMismatchError
from relaygr.worker.memory import is_out_of_memory
from relaygr.worker.model.interface import EngineLimits, RankOutputs, TooLongError

log = structlog.get_logger()

MAX_LOOKUPS = 3
"""A request whose prefix was lost under it this often is ranked on scratch pages."""
REMEMBERED_ANSWERS = 65_536


class RankingFlow:
    """Belongs to the device thread. `outstanding` and its bytes may be read from others."""

    def __init__(self, shared: Shared, prefixes: PrefixFlow) -> None:
        self._shared = shared
        self._prefixes = prefixes
        self._waiting = Waiting(shared, self)
        self.answered = RecentIds(REMEMBERED_ANSWERS)
        self.outstanding = 0
        self.outstanding_bytes = 0

    def submit(self, work: RankingWork) -> None:
        """Takes a ranking request; its answer goes to the outbox."""
        self.outstanding += 1
        self.outstanding_bytes += work.held_bytes
        work.scored_tokens = self._shared.spans.scored_tokens(work.request.suffix, work.request.candidates.size)
        too_long = _too_long(work, self._shared.engine.limits)
        if too_long is not None:
            return self.fail(work, FailureReason.TOO_LONG, too_long)
        self.look_up(work)

    def look_up(self, work: RankingWork) -> None:
        """Finds the request's history and prefix, and the way to serve it."""
        self.guarded(work, self._look_up)

    def guarded(self, work: RankingWork, step: Callable[[RankingWork], None]) -> None:
        """One request may not take the process, and so its neighbours, with it."""
        try:
            step(work)
        except Exception as error:
            log.exception("a ranking request failed", request_id=work.request.request_id)
            if not work.done:
                self.fail_on(work, error)

    def _look_up(self, work: RankingWork) -> None:
        now_us = self._shared.now_us()
        if now_us > work.deadline_us + self._shared.skew_us:
            return self._expire(work)
        if work.span is None or not self._shared.is_current(work.span):
            request = work.request
            try:
                resolved = self._shared.spans.resolve(
                    request.user_id, request.history_version, request.history, work.received.partition
                )
            except HistoryMismatchError as error:
                return self.fail(work, FailureReason.UNDECODABLE, str(error))
            if resolved.is_behind and self._waiting.for_history(work):
                return None
            scored = Scored(len(request.suffix), request.candidates.size)
            work.span = self._shared.spans.span(
                request.user_id, resolved, request.query_time_ms, scored, request.suffix
            )
        span = work.span
        work.lookups += 1
        work.looked_up_us = now_us
        self._rank_on(work, span.tokens, span.suffix)
        if span.tokens == 0:
            return self.ready(work)
        if not self._uses_cache(work):
            return self.plan(work, span, None, now_us)
        coming = self._prefixes.coming_for(span.key)
        if coming is not None and self._shared.cache.peek(span.key).hbm_behaviours < span.key.length:
            return self._join(work, coming)
        purpose = Purpose.RANKING if work.lookups == 1 else Purpose.AGAIN
        found = self._shared.cache.acquire(span.key, now_us, purpose=purpose, arriving=True)
        if isinstance(found, PendingPrefix):
            return self._waiting.for_prefix(work, found)
        handle = found.handle if isinstance(found, Hit) else None
        if handle is not None:
            if handle.complete:
                return self.rank_on_handle(work, handle, Path.HBM if handle.arrival is None else Path.DRAM)
            work.path, work.tokens_cached, work.prefix_source = Path.HBM, handle.tokens, handle.source
        pending = self._shared.reload_more(span, handle, work.deadline_us, work.predicted_us)
        if pending is not None:
            self._shared.release(handle)
            return self._waiting.for_prefix(work, pending)
        return self.plan(work, span, handle, now_us)

    def _rank_on(self, work: RankingWork, prefix_tokens: int, suffix: Behaviours) -> None:
        """What the ranking pass itself will be: so many tokens in pages, this suffix, and the candidates."""
        work.ranked_prefix_tokens, work.suffix = prefix_tokens, suffix
        work.scored_tokens = self._shared.spans.scored_tokens(suffix, work.request.candidates.size)
        work.predicted_us = self._shared.latency.hit_us(prefix_tokens, work.scored_tokens)

    def rank_on_handle(self, work: RankingWork, handle: Handle, path: Path) -> None:
        """Ranks on the whole prefix; the handle is the request's from here on."""
        work.path, work.tokens_cached, work.prefix_source = path, handle.tokens, handle.source
        work.handle, work.pages = handle, handle.pages
        self.ready(work)

    def _uses_cache(self, work: RankingWork) -> bool:
        return self._shared.settings.reuse_prefixes and work.lookups <= MAX_LOOKUPS

    def plan(self, work: RankingWork, span: ResolvedPrefix, handle: Handle | None, now_us: int) -> None:
        """Computes what is missing of the prefix if there is time for it, else less, else nothing."""
        plan = plan_ranking(
            span.tokens,
            work.scored_tokens,
            handle.tokens if handle is not None else 0,
            self._shared.time_left_us(work, now_us),
            self._shared.latency,
            self._shared.chunking,
            handle is not None and self._shared.spans.tail_as_suffix(span, handle.behaviours) is not None,
        )
        if handle is not None and plan.route is Route.TAIL_AS_SUFFIX:
            self.rank_with_tail(work, handle)
            return None
        if handle is None or plan.route is not Route.WHOLE:
            self._shared.release(handle)
            return self.serve_in_full(work, span, plan)
        return self._compute(work, span, handle)

    def rank_with_tail(self, work: RankingWork, handle: Handle) -> bool:
        """Ranks on what is cached, with the rest of the prefix as part of the suffix; False where that may not be.

        Exact, but nothing is kept of the tail. The handle is the request's from here on, if it may.
        """
        assert work.span is not None
        suffix = self._shared.spans.tail_as_suffix(work.span, handle.behaviours)
        if suffix is None:
            return False
        work.path, work.tokens_cached, work.prefix_source = Path.HBM, handle.tokens, handle.source
        work.handle, work.pages = handle, handle.pages
        self._rank_on(work, handle.tokens, suffix)
        self.ready(work)
        return True

    def serve_in_full(self, work: RankingWork, span: ResolvedPrefix, plan: RoutePlan) -> None:
        """Full inference, over the whole prefix or its newest part; or a refusal."""
        if plan.route is Route.REJECT:
            return self.reject(work)
        work.prefix_source, work.tokens_cached = PrefixSource.COMPUTED, 0
        on_scratch = not self._uses_cache(work)
        if plan.route is Route.TRUNCATE:
            shorter = self._shared.spans.shortened(span, plan.prefix_tokens)
            if shorter.tokens >= span.tokens:
                return self.reject(work)
            span, on_scratch = shorter, True
        work.path = Path.TRUNCATED if plan.route is Route.TRUNCATE else Path.FULL
        work.span = span
        self._rank_on(work, span.tokens, span.suffix)
        if span.tokens == 0:
            return self.ready(work)
        return self._compute(work, span, None, on_scratch)

    def _compute(self, work: RankingWork, span: ResolvedPrefix, base: Handle | None, on_scratch: bool = False) -> None:
        """Waits for what `base` lacks of the prefix, which is queued. The handle is the computation's from here on."""

        def enqueue(work: RankingWork) -> None:
            prefix = self._shared.prefix_work(span, base)
            prefix.on_scratch = on_scratch
            prefix.waiters.append(work)
            self._prefixes.enqueue(prefix)

        self.guarded(work, enqueue)

    def _join(self, work: RankingWork, coming: PrefixWork) -> None:
        """Waits for the prefix that is being computed, or takes over what has not begun.

        What is taken over is full inference, or an append where the beginning is cached.
        """
        if work.path is not Path.DRAM:
            ready = coming.base is not None and not coming.started
            work.path = Path.HBM if ready else Path.PENDING if coming.started else Path.FULL
            work.prefix_source = coming.base.source if coming.base is not None else PrefixSource.COMPUTED
            work.tokens_cached = coming.done_tokens
        if work.lookups == 1 and work.span is not None:
            # It is a look-up as any other, and counted as what the cache knows: nothing, a part, or pages being filled.
            found = self._shared.cache.acquire(work.span.key, self._shared.now_us())
            if isinstance(found, Hit):
                self._shared.cache.release(found.handle)
        coming.waiters.append(work)
        self._shared.metrics.joined(overtaken=not coming.started)
        self._shared.scheduler.push(coming)

    def start_over(self, work: RankingWork) -> None:
        """Another model serves now: nothing that was found or computed for the request counts any more."""
        work.lookups = 0
        self._look_up_again(work)

    def _look_up_again(self, work: RankingWork) -> None:
        self._let_go(work)
        work.pages, work.inputs, work.unknown_items = np.empty(0, np.int32), None, 0
        work.path, work.prefix_source, work.tokens_cached = Path.FULL, PrefixSource.COMPUTED, 0
        self.look_up(work)

    def ready(self, work: RankingWork) -> None:
        """Its prefix is in its pages: what it brings itself is looked up, and it is queued for a ranking pass."""
        self.guarded(work, self._ready)

    def _ready(self, work: RankingWork) -> None:
        assert work.span is not None
        work.ready_us = self._shared.now_us()
        try:
            work.inputs = self._shared.engine.rank_inputs(
                work.ranked_prefix_tokens,
                work.pages,
                work.suffix,
                work.request.candidates,
                query_time_ms=work.span.query_time_ms,
                prefix_timestamps_ms=work.span.behaviours.timestamps_ms,
            )
        except TooLongError as error:
            return self.fail(work, FailureReason.TOO_LONG, str(error))
        if work.handle is not None and work.handle.arrival is not None:
            work.inputs = replace(work.inputs, layer_ready=work.handle.arrival.wait)
        work.unknown_items += work.inputs.unknown_items
        self._shared.scheduler.push(work)

    def ranked(self, work: RankingWork, outputs: RankOutputs) -> None:
        """Answers with the scores, if they are numbers, and of the prefix that they should be of."""
        if _lost_its_prefix(work):
            return self._look_up_again(work)
        if not np.isfinite(outputs.scores).all():
            # What made them may be in the cached prefix, and would come again with it.
            self._shared.cache.invalidate_user(work.request.user_id)
            return self.fail(work, FailureReason.DEVICE_ERROR, "the model's scores are not finite numbers")
        self._shared.outbox.ranked(work, outputs)
        self._observe(work)
        if work.handle is not None and work.handle.approximate:
            self._shared.metrics.ranked_approximately()
        self._finish_ranking(work, ranked=True)

    def _observe(self, work: RankingWork) -> None:
        """What full inference took: triggers predict it whole. Of a batch's time, its pass is the predicted part."""
        if work.path is Path.FULL and work.pre_infer_us:
            size = work.ranked_prefix_tokens, work.scored_tokens
            took_us = work.pre_infer_us + self._shared.latency.hit_us(*size)
            corrector = self._shared.corrector
            corrector.observe(Stage.FULL, corrector.calibrated.full_us(*size), took_us)

    def reject(self, work: RankingWork) -> None:
        """Answers that nothing could serve it in its time."""
        if self._shared.now_us() > work.deadline_us:
            return self._expire(work)
        return self.fail(work, FailureReason.OVERLOADED, "no path could answer within the deadline")

    def fail_on(self, work: RankingWork, error: Exception) -> None:
        """Answers that the device failed, and how; or tries another way, if what failed was a reload."""
        if _lost_its_prefix(work):
            return self._look_up_again(work)
        reason = FailureReason.OUT_OF_MEMORY if is_out_of_memory(error) else FailureReason.DEVICE_ERROR
        self.fail(work, reason, str(error)[:500] or repr(error))

    def fail(self, work: RankingWork, reason: FailureReason, detail: str) -> None:
        self._shared.outbox.failed(work, reason, detail)
        self._finish_ranking(work, ranked=False)

    def _expire(self, work: RankingWork) -> None:
        self._shared.outbox.expired(work)
        self._finish_ranking(work, ranked=False)

    def _finish_ranking(self, work: RankingWork, ranked: bool) -> None:
        work.done = True
        self.outstanding -= 1
        self.outstanding_bytes -= work.held_bytes
        self.answered.add(work.request.request_id)
        # What was pre-inferred for it and has served nobody: the request went before it, or did not come in time.
        wasted = WasteReason.OVERTAKEN if ranked else WasteReason.REQUEST_EXPIRED
        self._shared.cache.end_lease(work.request.request_id, wasted)
        if work.handle is not None and work.span is not None and ranked:
            if work.span.for_one_impression:
                self._shared.cache.demote([work.request.user_id])
            elif self._shared.settings.dram_bytes:
                self._shared.cache.transfers.spill(work.handle)
        self._let_go(work)

    def _let_go(self, work: RankingWork) -> None:
        self._prefixes.free_scratch(work)
        self._shared.release(work.handle)
        work.handle = None


def _lost_its_prefix(work: RankingWork) -> bool:
    """Whether its handle was taken away, or the rest of its prefix did not arrive."""
    handle = work.handle
    return handle is not None and (not handle.is_held or (handle.arrival is not None and handle.arrival.failed))


def _too_long(work: RankingWork, limits: EngineLimits) -> str | None:
    """What of the request the model does not take. Said before anything is computed for it."""
    request = work.request
    for count, limit, what in (
        (int(request.candidates.size), limits.max_candidates, "candidates"),
        (len(request.suffix), limits.max_suffix_behaviours, "suffix behaviours"),
    ):
        if count > limit:
            return f"{count} {what}, the model takes {limit}"
    return None
