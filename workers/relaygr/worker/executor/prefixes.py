"""Prefixes being computed, in chunks: single flight, shared by all who need them.

A prefix is computed into cache pages, and published; where there is no room, into the scratch pages,
which serve one request at a time. Between two chunks anything more urgent may run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from relaygr.schemas.messages import Path, PrefixSource
from relaygr.worker.cache import Fill, Handle, Hit, PageCopy, PendingPrefix, PrefixKey, Purpose
from relaygr.worker.cache.identity import common_behaviours
from relaygr.worker.executor.context import Shared
from relaygr.worker.executor.pieces import PieceFlow
from relaygr.worker.executor.plan import RoutePlan, plan_truncation
from relaygr.worker.executor.work import JobOutcome, JobWork, PrefixWork, RankingWork, ResolvedPrefix

log = structlog.get_logger()


class Requests(Protocol):
    """Ranking requests, as the prefixes that they wait for see them (`relaygr.worker.executor.requests`)."""

    def look_up(self, work: RankingWork) -> None: ...
    def plan(self, work: RankingWork, span: ResolvedPrefix, handle: Handle | None, now_us: int) -> None: ...
    def serve_in_full(self, work: RankingWork, span: ResolvedPrefix, plan: RoutePlan) -> None: ...
    def ready(self, work: RankingWork) -> None: ...
    def rank_with_tail(self, work: RankingWork, handle: Handle) -> bool: ...
    def start_over(self, work: RankingWork) -> None: ...
    def fail_on(self, work: RankingWork, error: Exception) -> None: ...


class Jobs(Protocol):
    """Pre-infer jobs, likewise (`relaygr.worker.executor.jobs`)."""

    def submit(self, work: JobWork) -> None: ...
    def pre_infer(self, work: JobWork, span: ResolvedPrefix) -> None: ...
    def begin(self, work: JobWork) -> None: ...
    def lease(self, work: JobWork, span: ResolvedPrefix) -> None: ...


class Batches(Protocol):
    """The ranking pass, likewise (`relaygr.worker.executor.batches`)."""

    def rank_batch(self, now_us: int, first: RankingWork | None = None) -> None: ...


class PrefixFlow:
    """Belongs to the device thread."""

    _requests: Requests
    _jobs: Jobs
    _batches: Batches

    def __init__(self, shared: Shared, scratch_pages: NDArray[np.int32], copy_page: Callable[[PageCopy], None]) -> None:
        """`scratch_pages` are arena pages outside the cache, enough for the longest prefix."""
        self._shared = shared
        self._scratch_pages = scratch_pages
        self._copy_page = copy_page
        self._scratch_user: PrefixWork | RankingWork | None = None
        self._coming: dict[str, PrefixWork] = {}
        self._pieces = PieceFlow(shared, self)

    def connect(self, requests: Requests, jobs: Jobs, batches: Batches) -> None:
        """Who waits for prefixes. Once, before any work."""
        self._requests, self._jobs, self._batches = requests, jobs, batches

    @property
    def pieces(self) -> PieceFlow:
        """Their pieces, on the device."""
        return self._pieces

    @property
    def preinfer_backlog_us(self) -> int:
        """Predicted device time of the prefixes that no request waits for yet. From any thread."""
        return int(sum(work.remaining_us for work in list(self._coming.values()) if not work.waiters))

    def coming_for(self, key: PrefixKey) -> PrefixWork | None:
        """The computation under way, or queued, that gives a part of `key`, or all of it and more."""
        coming = self._coming.get(key.user_id)
        if coming is None:
            return None
        common = common_behaviours(key, coming.span.key)
        return coming if 0 < common in (coming.span.key.length, key.length) else None

    def coming_of(self, user_id: str) -> PrefixWork | None:
        """The user's computation under way or queued, of whatever history."""
        return self._coming.get(user_id)

    def free_scratch(self, work: PrefixWork | RankingWork) -> None:
        """The work needs the scratch pages no more, if it had them."""
        if self._scratch_user is work:
            self._scratch_user = None

    def forget_user(self, user_id: str) -> None:
        """The user was deleted: a prefix that has not begun is computed for its requests alone."""
        coming = self._coming.get(user_id)
        if coming is None or coming.started:
            return
        if coming.waiters:
            self._leave_cache(coming)
            self._shared.scheduler.push(coming)
        else:
            self.abandon(coming, JobOutcome.NO_HISTORY)

    def enqueue(self, prefix: PrefixWork) -> None:
        self._predict(prefix)
        if not prefix.on_scratch and prefix.span.key.user_id not in self._coming:
            self._coming[prefix.span.key.user_id] = prefix
        elif not prefix.on_scratch:
            # Another version of this user's prefix is being computed; this one is not shared.
            self._begin_anew_on_scratch(prefix)
        self._shared.scheduler.push(prefix)

    def begin(self, prefix: PrefixWork, now_us: int) -> bool:
        """Before each piece: False if it is lost, if nobody wants it any more, or if there is no place; that is then
        settled.
        """
        if prefix.fill is not None and not prefix.fill.is_current:
            self._lost(prefix)
            return False
        self._drop_hopeless(prefix, now_us)
        if not prefix.waiters and all(job.expires_us < now_us for job in prefix.jobs):
            self.abandon(prefix, JobOutcome.EXPIRED)
            return False
        if not prefix.started and not self._take_pages(prefix, now_us):
            return False
        for job in prefix.jobs:
            self._jobs.begin(job)
        for waiter in prefix.waiters:
            waiter.started_us = waiter.started_us or now_us
        return True

    def advance(self, prefix: PrefixWork, now_us: int) -> None:
        """After each piece: queues the next one, or hands the prefix over."""
        if prefix.fill is not None:
            prefix.fill.progress(prefix.done_tokens)
        if prefix.done_tokens < prefix.total_tokens:
            self._predict(prefix)
            self._shared.scheduler.push(prefix)
        else:
            self._complete(prefix, now_us)

    def _take_pages(self, prefix: PrefixWork, now_us: int) -> bool:
        """Reserves cache pages, or the scratch pages if there is no room; False if it cannot run now."""
        if not prefix.on_scratch:
            purpose = Purpose.RANKING if prefix.waiters else Purpose.PRE_INFER
            if prefix.base is not None:
                reserved = self._shared.cache.extend(prefix.base, prefix.span.key, now_us, purpose)
            else:
                reserved = self._shared.cache.reserve(prefix.span.key, now_us, purpose)
            if isinstance(reserved, Fill):
                prefix.fill, prefix.pages, prefix.done_tokens = reserved, reserved.pages, reserved.start_tokens
                if reserved.copy_page is not None:
                    self._copy_page(reserved.copy_page)
                return True
            if isinstance(reserved, PendingPrefix):
                self._look_again(prefix)
                return False
            self._rank_on_what_is_cached(prefix, now_us)
            if not prefix.waiters:
                self.abandon(prefix, JobOutcome.NO_ROOM)
                return False
            self._leave_cache(prefix)
        if self._scratch_user is not None:
            # The scratch pages serve one request at a time: help that one along.
            self._shared.scheduler.push(prefix)
            if isinstance(self._scratch_user, PrefixWork):
                self._pieces.run(self._scratch_user, now_us)
            else:
                self._batches.rank_batch(now_us, self._scratch_user)
            return False
        for extra in prefix.waiters[1:]:
            self._requests.look_up(extra)
        del prefix.waiters[1:]
        self._scratch_user = prefix
        prefix.pages = self._scratch_pages[: self._shared.engine.geometry.pages_for(prefix.total_tokens)]
        return True

    def _rank_on_what_is_cached(self, prefix: PrefixWork, now_us: int) -> None:
        """There is no room to append: requests whose tail may be a suffix need none."""
        if prefix.base is None:
            return
        kept = []
        for waiter in prefix.waiters:
            assert waiter.span is not None
            found = self._shared.cache.acquire(waiter.span.key, now_us, join=False, purpose=Purpose.AGAIN)
            if isinstance(found, Hit) and not self._requests.rank_with_tail(waiter, found.handle):
                self._shared.cache.release(found.handle)
                kept.append(waiter)
            elif not isinstance(found, Hit):
                kept.append(waiter)
        prefix.waiters[:] = kept

    def _leave_cache(self, prefix: PrefixWork) -> None:
        self._forget(prefix)
        for job in prefix.jobs:
            self._shared.outbox.job_done(job.received, JobOutcome.NO_ROOM)
        prefix.jobs.clear()
        self._begin_anew_on_scratch(prefix)

    def _begin_anew_on_scratch(self, prefix: PrefixWork) -> None:
        """Nothing cached can serve it there: it is full inference from now on, and its requests say so."""
        self._shared.release(prefix.base)
        prefix.base = None
        prefix.on_scratch = True
        prefix.done_tokens = 0
        for waiter in prefix.waiters:
            if waiter.path is not Path.TRUNCATED:
                waiter.path = Path.FULL
            waiter.prefix_source, waiter.tokens_cached = PrefixSource.COMPUTED, 0
        self._predict(prefix)

    def _look_again(self, prefix: PrefixWork) -> None:
        """The prefix has come, or is coming, by another way: everybody who waits here asks the cache again."""
        self._discard(prefix)
        for waiter in prefix.waiters:
            self._requests.look_up(waiter)
        for job in prefix.jobs:
            self._jobs.pre_infer(job, prefix.span)

    def _complete(self, prefix: PrefixWork, now_us: int) -> None:
        self._shared.scheduler.remove(prefix)
        self._forget(prefix)
        if prefix.on_scratch:
            (waiter,) = prefix.waiters
            self._scratch_user = waiter
            waiter.pages = prefix.pages
            waiter.unknown_items += prefix.inputs.unknown_items
            return self._requests.ready(waiter)
        assert prefix.fill is not None
        handle = prefix.fill.publish(now_us)
        if handle is None:
            return self._lost(prefix)
        self._shared.release(prefix.base)
        prefix.base = None
        # Those that wait use it first: a job whose request has gone by then may else count it as wasted.
        for waiter in prefix.waiters:
            self._continue_on(waiter, prefix, now_us)
        for job in prefix.jobs:
            self._jobs.lease(job, prefix.span)
            self._shared.outbox.job_done(job.received, JobOutcome.COMPUTED)
        self._shared.cache.release(handle)
        return None

    def _lost(self, prefix: PrefixWork) -> None:
        """It was invalidated, or its pages were taken away: its jobs were in vain, its requests are looked up again."""
        self._discard(prefix)
        for job in prefix.jobs:
            self._shared.outbox.job_done(job.received, JobOutcome.FAILED)
        for waiter in prefix.waiters:
            waiter.path = Path.FULL
            self._requests.look_up(waiter)

    def _continue_on(self, waiter: RankingWork, prefix: PrefixWork, now_us: int) -> None:
        """What a request does once the prefix that it waited for is there: rank, or compute its own tail."""
        assert waiter.span is not None
        found = self._shared.cache.acquire(waiter.span.key, now_us, join=False, purpose=Purpose.AGAIN)
        if not isinstance(found, Hit):
            return self._requests.look_up(waiter)
        if not found.handle.complete:
            return self._requests.plan(waiter, waiter.span, found.handle, now_us)
        waiter.handle, waiter.pages = found.handle, found.handle.pages
        waiter.unknown_items += prefix.inputs.unknown_items
        return self._requests.ready(waiter)

    def _drop_hopeless(self, prefix: PrefixWork, now_us: int) -> None:
        """Requests that would be answered late get the newest part of the history that fits, or a refusal."""
        kept = []
        for waiter in prefix.waiters:
            ends_us = now_us + prefix.remaining_us + waiter.predicted_us
            if ends_us <= waiter.answer_by_us:
                kept.append(waiter)
                continue
            assert waiter.span is not None
            plan = plan_truncation(
                waiter.span.tokens,
                waiter.scored_tokens,
                waiter.answer_by_us - now_us,
                self._shared.latency,
                self._shared.chunking,
            )
            self.free_scratch(prefix)
            self._requests.serve_in_full(waiter, waiter.span, plan)
        prefix.waiters[:] = kept

    def start_over(self, prefix: PrefixWork) -> None:
        """Another model serves now: all who wait here begin again, with that one."""
        self._discard(prefix)
        for waiter in prefix.waiters:
            self._requests.start_over(waiter)
        for job in prefix.jobs:
            self._jobs.submit(job)

    def abandon(self, prefix: PrefixWork, outcome: JobOutcome) -> None:
        self._discard(prefix)
        for job in prefix.jobs:
            self._shared.outbox.job_done(job.received, outcome)

    def fail(self, prefix: PrefixWork, error: Exception) -> None:
        self._discard(prefix)
        for job in prefix.jobs:
            self._shared.outbox.job_done(job.received, JobOutcome.FAILED)
        for waiter in prefix.waiters:
            self._requests.fail_on(waiter, error)

    def _discard(self, prefix: PrefixWork) -> None:
        self._shared.scheduler.remove(prefix)
        self._forget(prefix)
        if prefix.fill is not None:
            prefix.fill.abort()
        self._shared.release(prefix.base)
        self.free_scratch(prefix)

    def _forget(self, prefix: PrefixWork) -> None:
        if self._coming.get(prefix.span.key.user_id) is prefix:
            del self._coming[prefix.span.key.user_id]
            for call in prefix.then:
                self._shared.post(call)
            prefix.then.clear()

    def _predict(self, prefix: PrefixWork) -> None:
        shared = self._shared
        prefix.remaining_us = shared.chunking.duration_us(prefix.done_tokens, prefix.total_tokens, shared.latency)
