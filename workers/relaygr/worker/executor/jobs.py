"""Pre-infer jobs, from receipt to how they ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog

from relaygr.worker.cache import Handle, Hit, PendingPrefix, Purpose, WasteReason
from relaygr.worker.executor.context import RecentIds, Shared
from relaygr.worker.executor.prefixes import PrefixFlow
from relaygr.worker.executor.resolver import Scored
from relaygr.worker.executor.work import JobOutcome, JobWork, PrefixWork, ResolvedPrefix
from relaygr.worker.history.resolve import HistoryMismatchError

log = structlog.get_logger()

LONGEST_LIFE_US = 60_000_000
"""A publisher whose clock runs ahead, or counts in other units, may not park or lease for longer."""


class JobFlow:
    """Belongs to the device thread."""

    def __init__(self, shared: Shared, prefixes: PrefixFlow, answered: RecentIds) -> None:
        """`answered`: ids of impressions that have been ranked, whose jobs come too late."""
        self._shared = shared
        self._prefixes = prefixes
        self._answered = answered

    def submit(self, work: JobWork) -> None:
        """Takes a pre-infer job; its outcome goes to the outbox."""
        self._guarded(work, self._submit)

    def _guarded(self, work: JobWork, step: Callable[[JobWork], None]) -> None:
        """One job may not take the process, and so its neighbours, with it."""
        try:
            step(work)
        except Exception:
            log.exception("a pre-infer job failed", request_id=work.job.request_id)
            self._end(work, JobOutcome.FAILED)

    def _submit(self, work: JobWork) -> None:
        now_us = self._shared.now_us()
        job = work.job
        work.expires_us = min(work.expires_us, work.received.received_us + LONGEST_LIFE_US)
        if not self._shared.settings.reuse_prefixes:
            return self._end(work, JobOutcome.DISABLED)
        if job.request_id in self._answered:
            return self._end(work, JobOutcome.OVERTAKEN)
        if now_us > work.expires_us:
            return self._end(work, JobOutcome.EXPIRED)
        if job.expected_suffix and not self._shared.engine.rules.grows:
            return self._end(work, JobOutcome.NOT_USABLE)
        try:
            resolved = self._shared.spans.resolve(
                job.user_id, job.history_version, job.history, work.received.partition
            )
        except HistoryMismatchError:
            return self._end(work, JobOutcome.UNDECODABLE)
        if resolved.is_behind:
            again, in_vain = partial(self.submit, work), partial(self._end, work, JobOutcome.NO_HISTORY)
            if not self._shared.park(job.user_id, work.expires_us, again, in_vain):
                in_vain()
            return None
        if resolved.history is None:
            return self._end(work, JobOutcome.NO_HISTORY)
        expected = Scored(job.expected_suffix, job.expected_candidates)
        query_time_ms = job.retrieval_at_us // 1000
        return self._pre_infer(work, self._shared.spans.span(job.user_id, resolved, query_time_ms, expected))

    def pre_infer(self, work: JobWork, span: ResolvedPrefix) -> None:
        """Sees to it that the prefix is, or will be, in HBM; or ends the job."""
        self._guarded(work, lambda work: self._pre_infer(work, span))

    def _pre_infer(self, work: JobWork, span: ResolvedPrefix) -> None:
        if not self._shared.is_current(span):
            return self.submit(work)
        now_us = self._shared.now_us()
        if span.tokens == 0:
            return self._end(work, JobOutcome.ALREADY_CACHED)
        coming = self._prefixes.coming_of(span.key.user_id)
        if coming is not None and coming.span.key.chain.digest == span.key.chain.digest:
            return self._join(work, coming)
        found = self._shared.cache.acquire(span.key, now_us, purpose=Purpose.PRE_INFER)
        if isinstance(found, PendingPrefix):
            return self._lease_after_reload(work, span, found)
        handle = found.handle if isinstance(found, Hit) else None
        if handle is not None and handle.complete:
            self.begin(work)
            self.lease(work, span)
            self._shared.cache.release(handle)
            return self._end(work, JobOutcome.ALREADY_CACHED)
        # A job for a prefix in DRAM is the signal to reload it.
        pending = self._shared.reload_more(span, handle, work.expected_ranking_us)
        if pending is not None:
            copied = self._shared.engine.layout.tokens(pending.behaviours) - (
                handle.tokens if handle is not None else 0
            )
            self._shared.admission.charge_reload(work, copied, self._shared.latency)
            self._shared.release(handle)
            return self._lease_after_reload(work, span, pending)
        return self._queue_job(work, span, now_us, handle)

    def begin(self, work: JobWork) -> None:
        """The job is being served: computed, reloaded, or found ready."""
        if not work.begun:
            work.begun = True
            self._shared.metrics.job_started(self._shared.clock.wall_us() - work.job.retrieval_at_us)

    def _lease_after_reload(self, work: JobWork, span: ResolvedPrefix, pending: PendingPrefix) -> None:
        self.begin(work)

        def arrived(work: JobWork) -> None:
            if not self._shared.is_current(span):
                return self.submit(work)
            now_us = self._shared.now_us()
            found = self._shared.cache.acquire(span.key, now_us, purpose=Purpose.PRE_INFER)
            if not isinstance(found, Hit):
                return self._queue_job(work, span, now_us, None)
            if not found.handle.complete:
                return self._queue_job(work, span, now_us, found.handle)
            self.lease(work, span)
            self._shared.cache.release(found.handle)
            self._end(work, JobOutcome.RELOADED)

        pending.add_done_callback(lambda _: self._shared.post(partial(self._guarded, work, arrived)))

    def _queue_job(self, work: JobWork, span: ResolvedPrefix, now_us: int, base: Handle | None) -> None:
        """Queues the computation of what is missing, if footprint and load allow."""
        coming = self._prefixes.coming_of(span.key.user_id)
        if coming is not None:
            # Another version of this user's prefix is on its way: what it leaves is the better start.
            self._shared.release(base)
            coming.then.append(partial(self.pre_infer, work, span))
            return None
        refusal = self._refusal(work, span, now_us, base.tokens if base is not None else 0)
        if refusal is not None:
            self._shared.release(base)
            return self._end(work, refusal)
        prefix = self._shared.prefix_work(span, base)
        prefix.jobs.append(work)
        self._prefixes.enqueue(prefix)
        return self._shed()

    def _refusal(self, work: JobWork, span: ResolvedPrefix, now_us: int, done_tokens: int) -> JobOutcome | None:
        if work.job.request_id in self._answered:
            return JobOutcome.OVERTAKEN
        if now_us > work.expires_us:
            return JobOutcome.EXPIRED
        shared, job = self._shared, work.job
        scored_tokens = shared.engine.layout.tokens_per_behaviour * job.expected_suffix + job.expected_candidates
        prepare_us = shared.chunking.duration_us(done_tokens, span.tokens, shared.latency)
        return shared.admission.refuse(work, span, done_tokens, scored_tokens, prepare_us, shared.latency)

    def lease(self, work: JobWork, span: ResolvedPrefix) -> None:
        """Keeps the prefix until its request has come, or should have."""
        cache, request_id = self._shared.cache, work.job.request_id
        until_us = work.expires_us + self._shared.admission_settings.lease_margin_ms * 1000
        leased = cache.lease(span.key, request_id, until_us)
        if leased and request_id in self._answered:
            # It was ranked without: unless somebody else uses it, computing it was for nothing.
            cache.end_lease(request_id, WasteReason.OVERTAKEN)

    def _shed(self) -> None:
        """At the bound of the pre-infer queue: expired jobs go first, then the one with the least time saved."""
        queue = self._shared.scheduler.preinfer
        if len(queue) <= self._shared.settings.preinfer_queue_max:
            return
        now_us = self._shared.now_us()
        waiting = [work for work in queue if isinstance(work, PrefixWork) and not work.started]
        if not waiting:
            return
        expired = [work for work in waiting if all(job.expires_us < now_us for job in work.jobs)]
        for work in expired:
            self._prefixes.abandon(work, JobOutcome.EXPIRED)
        if not expired:
            self._prefixes.abandon(min(waiting, key=lambda work: work.remaining_us), JobOutcome.SHED)

    def _join(self, work: JobWork, coming: PrefixWork) -> None:
        coming.jobs.append(work)
        self._shared.scheduler.push(coming)

    def _end(self, work: JobWork, outcome: JobOutcome) -> None:
        self._shared.outbox.job_done(work.received, outcome)
