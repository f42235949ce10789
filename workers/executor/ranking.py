"""Ranking requests, from receipt to their one answer.

received -> looked up -> ready ----------------------------> ranked
               |-> waits for a history version (parked)  ^
               |-> waits for a reload from DRAM ---------|
               '-> waits for its prefix, in chunks ------'
any of them -> expired | failed(overloaded) | truncated, then ranked
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import structlog

from schemas.messages import FailureReason, Path, PrefixSource
from streams.latency import Stage
from workers.cache import Handle, Hit, Pending, PendingKind, WasteReason
from workers.executor.prefixes import PrefixFlow
from workers.executor.shared import Shared
from workers.history.resolve import HistoryMismatchError
from workers.model.interface import EngineLimits, RankOutputs, TooLongError
from workers.remembered import Remembered
from workers.scheduler.order import WorkClass
from workers.scheduler.plan import Route, RoutePlan, plan_ranking
from workers.work import PrefixSpan, PrefixWork, RankingWork

log = structlog.get_logger()

MAX_LOOKUPS = 3
"""A request whose prefix was lost under it this often is ranked on scratch pages."""
REMEMBERED_ANSWERS = 65_536


class RankingFlow:
    """Belongs to the device thread. `outstanding` and its bytes may be read from others."""

    def __init__(self, shared: Shared, prefixes: PrefixFlow) -> None:
        self._shared = shared
        self._prefixes = prefixes
        self.answered = Remembered(REMEMBERED_ANSWERS)
        self.outstanding = 0
        self.outstanding_bytes = 0

    def submit(self, work: RankingWork) -> None:
        """Takes a ranking request; its answer goes to the outbox."""
        self.outstanding += 1
        self.outstanding_bytes += work.held_bytes
        too_long = _too_long(work, self._shared.engine.limits)
        if too_long is not None:
            return self.fail(work, FailureReason.TOO_LONG, too_long)
        self.look_up(work)

    def look_up(self, work: RankingWork) -> None:
        """Finds the request's history and prefix, and the way to serve it."""
        self._guarded(work, self._look_up)

    def _guarded(self, work: RankingWork, step: Callable[[RankingWork], None]) -> None:
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
        if work.span is None:
            request = work.request
            try:
                resolved = self._shared.spans.resolve(
                    request.user_id, request.history_version, request.history, work.received.partition
                )
            except HistoryMismatchError as error:
                return self.fail(work, FailureReason.UNDECODABLE, str(error))
            if resolved.is_behind and self._wait_for_history(work):
                return None
            work.span = self._shared.spans.span(work.request.user_id, resolved)
        span = work.span
        work.lookups += 1
        work.looked_up_us = now_us
        work.predicted_us = self._shared.latency.hit_us(span.tokens, work.scored_tokens)
        if span.tokens == 0:
            return self.ready(work)
        if not self._uses_cache(work):
            return self.plan(work, span, None, now_us)
        coming = self._prefixes.coming_for(span.key)
        if coming is not None and self._shared.cache.peek(span.key).hbm_behaviours < span.key.length:
            return self._join(work, coming)
        found = self._shared.cache.acquire(span.key, now_us)
        if isinstance(found, Pending):
            return self._wait_for(work, found)
        handle = found.handle if isinstance(found, Hit) else None
        if handle is not None:
            work.path, work.tokens_cached, work.prefix_source = Path.HBM, handle.tokens, handle.source
            if handle.complete:
                work.handle, work.pages = handle, handle.pages
                return self.ready(work)
        pending = self._shared.reload_more(span, handle, work.deadline_us)
        if pending is not None:
            if handle is not None:
                self._shared.cache.release(handle)
            return self._wait_for(work, pending)
        return self.plan(work, span, handle, now_us)

    def _uses_cache(self, work: RankingWork) -> bool:
        return self._shared.settings.reuse_prefixes and work.lookups <= MAX_LOOKUPS

    def plan(self, work: RankingWork, span: PrefixSpan, handle: Handle | None, now_us: int) -> None:
        """Computes what is missing of the prefix if there is time for it, else less, else nothing."""
        plan = plan_ranking(
            span.tokens,
            work.scored_tokens,
            handle.tokens if handle is not None else 0,
            self._remaining_us(work, now_us),
            self._shared.latency,
            self._shared.chunking,
        )
        if handle is None or plan.route is not Route.WHOLE:
            if handle is not None:
                self._shared.cache.release(handle)
            return self.serve_in_full(work, span, plan)
        prefix = PrefixWork(
            span, self._shared.engine.prefix_inputs(span.features, span.behaviours), handle.tokens, base=handle
        )
        prefix.waiters.append(work)
        self._prefixes.enqueue(prefix)

    def serve_in_full(self, work: RankingWork, span: PrefixSpan, plan: RoutePlan) -> None:
        """Full inference, over the whole prefix or its newest part; or a refusal."""
        if plan.route is Route.REJECT:
            return self._reject(work)
        work.prefix_source, work.tokens_cached = PrefixSource.COMPUTED, 0
        on_scratch = not self._uses_cache(work)
        if plan.route is Route.TRUNCATE:
            shorter = self._shared.spans.shortened(span, plan.prefix_tokens)
            if shorter.tokens >= span.tokens:
                return self._reject(work)
            span, on_scratch = shorter, True
        work.path = Path.TRUNCATED if plan.route is Route.TRUNCATE else Path.FULL
        work.span = span
        work.predicted_us = self._shared.latency.hit_us(span.tokens, work.scored_tokens)
        if span.tokens == 0:
            return self.ready(work)
        prefix = PrefixWork(
            span, self._shared.engine.prefix_inputs(span.features, span.behaviours), on_scratch=on_scratch
        )
        prefix.waiters.append(work)
        self._prefixes.enqueue(prefix)

    def _join(self, work: RankingWork, coming: PrefixWork) -> None:
        """Waits for the prefix that is being computed, or takes over what has not begun.

        What is taken over is full inference, or an append where the beginning is cached.
        """
        if work.path is not Path.DRAM:
            ready = coming.base is not None and not coming.started
            work.path = Path.HBM if ready else Path.PENDING if coming.started else Path.FULL
            work.prefix_source = coming.base.source if coming.base is not None else PrefixSource.COMPUTED
            work.tokens_cached = coming.done_tokens
        coming.waiters.append(work)
        self._shared.metrics.joined(overtaken=not coming.started)
        self._shared.scheduler.push(coming)

    def _wait_for(self, work: RankingWork, pending: Pending) -> None:
        """Waits at most until full inference would still end in time."""
        assert work.span is not None
        if pending.kind is PendingKind.LOAD:
            work.path, work.prefix_source = Path.DRAM, PrefixSource.DRAM
            work.tokens_cached = self._shared.engine.layout.tokens(pending.behaviours)
        else:
            work.path, work.prefix_source = Path.PENDING, PrefixSource.COMPUTED
        started_us = self._shared.now_us()
        full_us = self._shared.full_us(work.span.tokens, work.scored_tokens)
        state = {"waiting": True}

        def arrived() -> None:
            if state.pop("waiting", False):
                if pending.kind is PendingKind.LOAD:
                    work.reload_us += self._shared.now_us() - started_us
                self._after_waiting(work)

        def overdue() -> None:
            if state.pop("waiting", False):
                self._guarded(work, self._compute_instead)

        pending.add_done_callback(lambda _: self._shared.post(arrived))
        spare_us = self._remaining_us(work, started_us) - int(full_us)
        self._shared.timers.at(started_us + max(0, spare_us), overdue)

    def _compute_instead(self, work: RankingWork) -> None:
        assert work.span is not None
        self.plan(work, work.span, None, self._shared.now_us())

    def _after_waiting(self, work: RankingWork) -> None:
        waited_for = work.path
        self.look_up(work)
        if work.path is Path.HBM:
            work.path = waited_for

    def ready(self, work: RankingWork) -> None:
        assert work.span is not None
        now_us = self._shared.now_us()
        work.ready_us = now_us
        try:
            work.inputs = self._shared.engine.rank_inputs(
                work.span.tokens, work.pages, work.request.suffix, work.request.candidates
            )
        except TooLongError as error:
            return self.fail(work, FailureReason.TOO_LONG, str(error))
        work.unknown_items += work.inputs.unknown_items
        self._shared.scheduler.push(work)

    def rank_batch(self, now_us: int, first: RankingWork | None = None) -> None:
        batch = self._take_batch(now_us, first)
        if not batch:
            return
        started_us = self._shared.now_us()
        predicted_us = 0.0
        for work in batch:
            assert work.span is not None
            work.started_us = work.started_us or started_us
            predicted_us += self._shared.corrector.calibrated.hit_us(work.span.tokens, work.scored_tokens)
        outputs = self._rank(batch)
        ended_us = self._shared.now_us()
        self._shared.corrector.observe(Stage.HIT, predicted_us, ended_us - started_us)
        self._shared.charge(WorkClass.RANKING, ended_us - started_us, ended_us)
        for work, output in zip(batch, outputs, strict=True):
            work.rank_us = ended_us - started_us
            if not isinstance(output, RankOutputs):
                self.fail_on(work, output)
            elif not np.isfinite(output.scores).all():
                # What made them may be in the cached prefix, and would come again with it.
                self._shared.cache.invalidate_user(work.request.user_id)
                self.fail(work, FailureReason.DEVICE_ERROR, "the model's scores are not finite numbers")
            else:
                self._shared.outbox.ranked(work, output)
                self._finish_ranking(work, ranked=True)

    def _take_batch(self, now_us: int, first: RankingWork | None) -> list[RankingWork]:
        """`first`, then ready requests in laxity order, as long as none misses its deadline for company."""
        settings = self._shared.settings
        batch: list[RankingWork] = []
        passed_over: list[PrefixWork | RankingWork] = []
        ends_us, earliest_deadline_us, rows = float(now_us), float("inf"), 0
        queue = self._shared.scheduler.ranking
        while max(len(batch), len(passed_over)) < settings.max_batch_requests:
            work: PrefixWork | RankingWork | None = first if first is not None else queue.pop()
            if first is not None:
                queue.remove(first)
                first = None
            if work is None:
                break
            if isinstance(work, PrefixWork):
                passed_over.append(work)
                if work.latest_start_us < ends_us:
                    break
                continue
            if now_us + work.predicted_us > work.deadline_us:
                self._reject(work)
                continue
            ends_us += work.predicted_us
            rows += work.scored_tokens
            earliest_deadline_us = min(earliest_deadline_us, work.answer_by_us)
            if batch and (ends_us > earliest_deadline_us or rows > settings.max_batch_rows):
                passed_over.append(work)
                break
            batch.append(work)
        for other in passed_over:
            queue.push(other)
        return batch

    def _rank(self, batch: list[RankingWork]) -> list[RankOutputs | Exception]:
        """One forward; if it fails, each request alone, so that one cannot fail its neighbours."""
        try:
            return list(self._shared.engine.rank([work.inputs for work in batch if work.inputs is not None]))
        except Exception as error:
            log.warning("a ranking batch failed", requests=len(batch), error=repr(error))
            if len(batch) == 1:
                return [error]
        return [output for work in batch for output in self._rank([work])]

    def _reject(self, work: RankingWork) -> None:
        if self._shared.now_us() > work.deadline_us:
            return self._expire(work)
        return self.fail(work, FailureReason.OVERLOADED, "no path could answer within the deadline")

    def fail_on(self, work: RankingWork, error: Exception) -> None:
        """Answers that the device failed, and how."""
        out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        reason = FailureReason.OUT_OF_MEMORY if out_of_memory else FailureReason.DEVICE_ERROR
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
        self._shared.cache.end_lease(work.request.request_id, None if ranked else WasteReason.REQUEST_EXPIRED)
        self._prefixes.free_scratch(work)
        if work.handle is not None:
            if ranked and self._shared.settings.dram_bytes:
                self._shared.cache.spill(work.handle)
            self._shared.cache.release(work.handle)
            work.handle = None

    def _wait_for_history(self, work: RankingWork) -> bool:
        """Waits for the version asked for while full inference over it would still fit."""
        tokens = self._shared.spans.expected_tokens(work.request.history_version)
        needed_us = self._shared.full_us(tokens, work.scored_tokens) + self._shared.chunk_us
        again = partial(self.look_up, work)
        return self._shared.park(work.request.user_id, work.answer_by_us - int(needed_us), again, again)

    def _remaining_us(self, work: RankingWork, now_us: int) -> int:
        """Time to the deadline, less the device time of what is more urgent (and of pre-infer's share of it)."""
        ahead_us = 0.0
        for other in self._shared.scheduler.ranking:
            if other.latest_start_us <= work.latest_start_us:
                ahead_us += other.remaining_us if isinstance(other, PrefixWork) else other.predicted_us
        if ahead_us and len(self._shared.scheduler.preinfer):
            ahead_us /= 1 - self._shared.admission_settings.preinfer_share
        return int(work.answer_by_us - now_us - ahead_us)


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
