"""The executor: carries pre-infer jobs and ranking requests through history, cache and device.

It belongs to one thread, the device thread, which calls `step`; everything else reaches it through
`post`. A step takes what was posted, fires what is due, and runs one piece of device work: a chunk of
one prefix, or a batch of ranking requests. So no request waits behind more than one piece.

Full inference is not a second code path: it is the chunks of a prefix followed by a ranking pass, and
its K,V is published if there is room. Without room it runs on the scratch pages, which serve one
request at a time.

What becomes of a ranking request:

    received -> looked up -> ready ----------------------------> ranked
                   |-> waits for a history version (parked)  ^
                   |-> waits for a reload from DRAM ---------|
                   '-> waits for its prefix, in chunks ------'
    any of them -> expired | failed(overloaded) | truncated, then ranked
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from schemas.messages import FailureReason, Path, PrefixSource
from streams.clock import Clock
from streams.consumer import Received
from streams.latency import Corrector, LatencyModel, Stage
from streams.trigger.settings import AdmissionSettings
from workers.admission import JobAdmission
from workers.cache import Fill, Handle, Hit, PageCopy, Pending, PendingKind, PrefixCache, PrefixKey, Purpose
from workers.cache.identity import common_behaviours
from workers.history.resolve import HistoryMismatchError
from workers.metrics import WorkerMetrics
from workers.model.interface import Engine, PrefixChunk, RankOutputs, TooLongError
from workers.parking import ParkingLot
from workers.remembered import Remembered
from workers.scheduler.order import Scheduler, WorkClass
from workers.scheduler.plan import Route, RoutePlan, chunk_end, plan_ranking, plan_truncation
from workers.settings import WorkerSettings
from workers.spans import Histories, SpanResolver
from workers.timers import Timers
from workers.work import JobOutcome, JobWork, PrefixSpan, PrefixWork, RankingWork

log = structlog.get_logger()

MAX_LOOKUPS = 3
"""A request whose prefix was lost under it this often is ranked on scratch pages."""
LEASE_CHECK_INTERVAL_US = 100_000


class Outbox(Protocol):
    """Where answers go. Called on the device thread; must not block."""

    def ranked(self, work: RankingWork, outputs: RankOutputs) -> None: ...
    def expired(self, work: RankingWork) -> None: ...
    def failed(self, work: RankingWork, reason: FailureReason, detail: str) -> None: ...
    def job_done(self, received: Received, outcome: JobOutcome) -> None: ...


class Executor:
    """One worker's device work. Only `post` and the counters may be used from other threads."""

    def __init__(
        self,
        engine: Engine,
        cache: PrefixCache,
        scratch_pages: NDArray[np.int32],
        histories: Histories,
        copy_page: Callable[[PageCopy], None],
        corrector: Corrector,
        settings: WorkerSettings,
        admission_settings: AdmissionSettings,
        outbox: Outbox,
        metrics: WorkerMetrics,
        clock: Clock,
        admission: JobAdmission,
    ) -> None:
        """`scratch_pages` are arena pages outside the cache, enough for the longest prefix."""
        self._engine = engine
        self._cache = cache
        self._scratch_pages = scratch_pages
        self._scratch_user: PrefixWork | RankingWork | None = None
        self._spans = SpanResolver(histories, engine, settings.anchor_behaviours)
        self._copy_page = copy_page
        self._corrector = corrector
        self._settings = settings
        self._outbox = outbox
        self._metrics = metrics
        self._clock = clock
        self._admission = admission
        self._chunk_us = settings.chunk_ms * 1000
        self._lease_margin_ms = admission_settings.lease_margin_ms
        self._preinfer_share = admission_settings.preinfer_share
        self._skew_us = settings.max_clock_skew_ms * 1000
        self._scheduler: Scheduler[PrefixWork | RankingWork] = Scheduler(
            admission_settings.preinfer_share, int(self._chunk_us)
        )
        self._mailbox: deque[Callable[[], None]] = deque()
        self.mail_arrived = threading.Event()
        self._timers = Timers()
        self._prefixes: dict[str, PrefixWork] = {}
        self._parked: ParkingLot[RankingWork | JobWork] = ParkingLot(settings.parked_jobs_max)
        self._answered = Remembered(capacity=65_536)
        self.ranking_outstanding = 0
        self.last_progress_us = clock.monotonic_us()
        self._expire_leases()

    # -- from any thread ---------------------------------------------------------------------------

    def post(self, call: Callable[[], None]) -> None:
        """Runs `call` on the device thread, before its next piece of work."""
        self._mailbox.append(call)
        self.mail_arrived.set()

    @property
    def has_mail(self) -> bool:
        return bool(self._mailbox)

    @property
    def has_device_work(self) -> bool:
        return len(self._scheduler) > 0

    @property
    def preinfer_backlog_us(self) -> int:
        """Predicted device time of the pre-infer work that is queued."""
        return int(sum(work.remaining_us for work in list(self._prefixes.values()) if not work.waiters))

    # -- the device thread -------------------------------------------------------------------------

    def step(self) -> int | None:
        """One round. Returns how long nothing will happen by itself, µs: 0 after device work, None for ever."""
        while self._mailbox:
            self._mailbox.popleft()()
        now_us = self.last_progress_us = self._clock.monotonic_us()
        self._timers.run_due(now_us)
        work = self._scheduler.pick(now_us)
        if work is None:
            return self._timers.next_in_us(now_us)
        if isinstance(work, RankingWork):
            self._rank_batch(now_us)
        else:
            self._run_chunk(work, now_us)
        return 0

    def _expire_leases(self) -> None:
        now_us = self._clock.monotonic_us()
        self._cache.expire_leases(now_us)
        self._timers.at(now_us + LEASE_CHECK_INTERVAL_US, self._expire_leases)

    # -- ranking requests --------------------------------------------------------------------------

    def submit_ranking(self, work: RankingWork) -> None:
        """Takes a ranking request; its answer goes to the outbox."""
        self.ranking_outstanding += 1
        try:
            self._look_up(work)
        except Exception as error:
            # One request may not take the process, and so its neighbours, with it.
            log.exception("a ranking request failed", request_id=work.request.request_id)
            if not work.done:
                self._fail(work, FailureReason.DEVICE_ERROR, repr(error)[:500])

    def _look_up(self, work: RankingWork) -> None:
        now_us = self._clock.monotonic_us()
        if now_us > work.deadline_us + self._skew_us:
            return self._expire(work)
        if work.span is None:
            request = work.request
            try:
                resolved = self._spans.resolve(
                    request.user_id, request.history_version, request.history, work.received.partition
                )
            except HistoryMismatchError as error:
                return self._fail(work, FailureReason.UNDECODABLE, str(error))
            if resolved.is_behind and self._park(work, work.request.user_id, self._parking_ends_us(work)):
                return None
            work.span = self._spans.span(work.request.user_id, resolved)
        span = work.span
        work.lookups += 1
        work.looked_up_us = now_us
        work.predicted_us = self._latency.hit_us(span.tokens, work.scored_tokens)
        if span.tokens == 0:
            return self._ready(work)
        if not self._uses_cache(work):
            return self._plan(work, span, None, now_us)
        shared = self._prefixes.get(span.key.user_id)
        if shared is not None and _serves(shared.span.key, span.key):
            return self._join(work, shared)
        found = self._cache.acquire(span.key, now_us)
        if isinstance(found, Pending):
            return self._wait_for(work, found)
        handle = found.handle if isinstance(found, Hit) else None
        if handle is not None:
            work.path, work.tokens_cached, work.prefix_source = Path.HBM, handle.tokens, handle.source
            if handle.complete:
                work.handle, work.pages = handle, handle.pages
                return self._ready(work)
        pending = self._reload_more(span, handle, work.deadline_us, now_us)
        if pending is not None:
            if handle is not None:
                self._cache.release(handle)
            return self._wait_for(work, pending)
        return self._plan(work, span, handle, now_us)

    def _uses_cache(self, work: RankingWork) -> bool:
        return self._settings.reuse_prefixes and work.lookups <= MAX_LOOKUPS

    def _reload_more(self, span: PrefixSpan, handle: Handle | None, deadline_us: int, now_us: int) -> Pending | None:
        """Starts a reload if DRAM holds more of the prefix than HBM, and copying it beats computing it."""
        in_hbm = handle.behaviours if handle is not None else 0
        in_dram = self._cache.peek(span.key).dram_behaviours
        if in_dram <= in_hbm:
            return None
        layout = self._engine.layout
        cached, stored = (layout.tokens(in_hbm) if in_hbm else 0), layout.tokens(in_dram)
        pending = self._cache.start_reload(
            span.key, deadline_us, now_us, saved_us=self._latency.append_us(cached, stored - cached)
        )
        return pending if isinstance(pending, Pending) else None

    def _plan(self, work: RankingWork, span: PrefixSpan, handle: Handle | None, now_us: int) -> None:
        """Computes what is missing of the prefix if there is time for it, else less, else nothing."""
        plan = plan_ranking(
            span.tokens,
            work.scored_tokens,
            handle.tokens if handle is not None else 0,
            self._remaining_us(work, now_us),
            self._latency,
            self._engine.geometry.page_tokens,
        )
        if handle is None or plan.route is not Route.WHOLE:
            if handle is not None:
                self._cache.release(handle)
            return self._serve_in_full(work, span, plan)
        prefix = PrefixWork(
            span, self._engine.prefix_inputs(span.features, span.behaviours), handle.tokens, base=handle
        )
        prefix.waiters.append(work)
        self._enqueue_prefix(prefix)

    def _serve_in_full(self, work: RankingWork, span: PrefixSpan, plan: RoutePlan) -> None:
        """Full inference, over the whole prefix or its newest part; or a refusal."""
        if plan.route is Route.REJECT:
            return self._reject(work)
        work.prefix_source, work.tokens_cached = PrefixSource.COMPUTED, 0
        on_scratch = not self._uses_cache(work)
        if plan.route is Route.TRUNCATE:
            span, on_scratch = self._spans.shortened(span, plan.prefix_tokens), True
        work.path = Path.TRUNCATED if plan.route is Route.TRUNCATE else Path.FULL
        work.span = span
        work.predicted_us = self._latency.hit_us(span.tokens, work.scored_tokens)
        if span.tokens == 0:
            return self._ready(work)
        prefix = PrefixWork(span, self._engine.prefix_inputs(span.features, span.behaviours), on_scratch=on_scratch)
        prefix.waiters.append(work)
        self._enqueue_prefix(prefix)

    def _join(self, work: RankingWork, shared: PrefixWork) -> None:
        """Waits for the prefix that is being computed; one that has not begun is taken over, and counts as full."""
        if work.path is not Path.DRAM:
            work.path = Path.PENDING if shared.started else Path.FULL
            work.tokens_cached = shared.done_tokens
            work.prefix_source = PrefixSource.COMPUTED
        shared.waiters.append(work)
        self._metrics.joined(overtaken=not shared.started)
        self._scheduler.push(shared)

    def _wait_for(self, work: RankingWork, pending: Pending) -> None:
        """Waits at most until full inference would still end in time."""
        assert work.span is not None
        if pending.kind is PendingKind.LOAD:
            work.path, work.prefix_source = Path.DRAM, PrefixSource.DRAM
            work.tokens_cached = self._engine.layout.tokens(pending.behaviours)
        else:
            work.path, work.prefix_source = Path.PENDING, PrefixSource.COMPUTED
        started_us = self._clock.monotonic_us()
        full_us = self._latency.pre_us(work.span.tokens) + work.predicted_us
        state = {"waiting": True}

        def arrived() -> None:
            if state.pop("waiting", False):
                if pending.kind is PendingKind.LOAD:
                    work.reload_us += self._clock.monotonic_us() - started_us
                self._after_waiting(work)

        def overdue() -> None:
            if state.pop("waiting", False):
                assert work.span is not None
                self._plan(work, work.span, None, self._clock.monotonic_us())

        pending.add_done_callback(lambda _: self.post(arrived))
        self._timers.at(max(started_us, work.deadline_us - int(full_us)), overdue)

    def _after_waiting(self, work: RankingWork) -> None:
        waited_for = work.path
        self._look_up(work)
        if work.path is Path.HBM:
            work.path = waited_for

    def _ready(self, work: RankingWork) -> None:
        assert work.span is not None
        now_us = self._clock.monotonic_us()
        work.ready_us = now_us
        try:
            work.inputs = self._engine.rank_inputs(
                work.span.tokens, work.pages, work.request.suffix, work.request.candidates
            )
        except TooLongError as error:
            return self._fail(work, FailureReason.TOO_LONG, str(error))
        work.unknown_items += work.inputs.unknown_items
        self._scheduler.push(work)

    def _rank_batch(self, now_us: int) -> None:
        batch = self._take_batch(now_us)
        if not batch:
            return
        started_us = self._clock.monotonic_us()
        predicted_us = 0.0
        for work in batch:
            assert work.span is not None
            work.started_us = work.started_us or started_us
            predicted_us += self._corrector.calibrated.hit_us(work.span.tokens, work.scored_tokens)
        outputs = self._rank(batch)
        ended_us = self._clock.monotonic_us()
        self._corrector.observe(Stage.HIT, predicted_us, ended_us - started_us)
        self._charge(WorkClass.RANKING, ended_us - started_us, ended_us)
        for work, output in zip(batch, outputs, strict=True):
            work.rank_us = ended_us - started_us
            if isinstance(output, RankOutputs):
                self._outbox.ranked(work, output)
                self._finish_ranking(work, spill=True)
            else:
                self._fail(work, _reason_of(output), str(output)[:500] or repr(output))

    def _take_batch(self, now_us: int) -> list[RankingWork]:
        """Ready requests in laxity order, as long as none of them misses its deadline for company."""
        batch: list[RankingWork] = []
        passed_over: list[PrefixWork | RankingWork] = []
        ends_us = float(now_us)
        earliest_deadline_us = float("inf")
        queue = self._scheduler.ranking
        while len(batch) < self._settings.max_batch_requests and len(passed_over) < self._settings.max_batch_requests:
            work = queue.pop()
            if work is None:
                break
            if isinstance(work, PrefixWork):
                passed_over.append(work)
                if work.latest_start_us < ends_us:
                    break
                continue
            if now_us + work.predicted_us > work.deadline_us + self._skew_us:
                self._reject(work)
                continue
            ends_us += work.predicted_us
            earliest_deadline_us = min(earliest_deadline_us, work.deadline_us)
            if batch and ends_us > earliest_deadline_us:
                passed_over.append(work)
                break
            batch.append(work)
        for other in passed_over:
            queue.push(other)
        return batch

    def _rank(self, batch: list[RankingWork]) -> list[RankOutputs | Exception]:
        """One forward; if it fails, each request alone, so that one cannot fail its neighbours."""
        try:
            return list(self._engine.rank([work.inputs for work in batch if work.inputs is not None]))
        except Exception as error:
            log.warning("a ranking batch failed", requests=len(batch), error=repr(error))
            if len(batch) == 1:
                return [error]
        return [output for work in batch for output in self._rank([work])]

    def _reject(self, work: RankingWork) -> None:
        if self._clock.monotonic_us() > work.deadline_us:
            return self._expire(work)
        return self._fail(work, FailureReason.OVERLOADED, "no path could answer within the deadline")

    def _fail(self, work: RankingWork, reason: FailureReason, detail: str) -> None:
        self._outbox.failed(work, reason, detail)
        self._finish_ranking(work, spill=False)

    def _expire(self, work: RankingWork) -> None:
        self._outbox.expired(work)
        self._finish_ranking(work, spill=False)

    def _finish_ranking(self, work: RankingWork, spill: bool) -> None:
        work.done = True
        self.ranking_outstanding -= 1
        self._answered.add(work.request.request_id)
        self._cache.end_lease(work.request.request_id)
        if self._scratch_user is work:
            self._scratch_user = None
        if work.handle is not None:
            if spill and self._settings.dram_bytes:
                self._cache.spill(work.handle)
            self._cache.release(work.handle)
            work.handle = None

    # -- pre-infer jobs ----------------------------------------------------------------------------

    def submit_job(self, work: JobWork) -> None:
        """Takes a pre-infer job; its outcome goes to the outbox."""
        now_us = self._clock.monotonic_us()
        job = work.job
        if not self._settings.reuse_prefixes:
            return self._outbox.job_done(work.received, JobOutcome.DISABLED)
        if job.request_id in self._answered:
            return self._outbox.job_done(work.received, JobOutcome.OVERTAKEN)
        if now_us > work.expires_us:
            return self._outbox.job_done(work.received, JobOutcome.EXPIRED)
        try:
            resolved = self._spans.resolve(job.user_id, job.history_version, job.history, work.received.partition)
        except HistoryMismatchError:
            return self._outbox.job_done(work.received, JobOutcome.UNDECODABLE)
        if resolved.is_behind:
            if not self._park(work, job.user_id, work.expires_us):
                self._outbox.job_done(work.received, JobOutcome.NO_HISTORY)
            return None
        if resolved.history is None:
            return self._outbox.job_done(work.received, JobOutcome.NO_HISTORY)
        self._pre_infer(work, self._spans.span(job.user_id, resolved), now_us)

    def _pre_infer(self, work: JobWork, span: PrefixSpan, now_us: int) -> None:
        if span.tokens == 0:
            return self._outbox.job_done(work.received, JobOutcome.ALREADY_CACHED)
        shared = self._prefixes.get(span.key.user_id)
        if shared is not None and shared.span.key.chain.digest == span.key.chain.digest:
            shared.jobs.append(work)
            self._scheduler.push(shared)
            return None
        found = self._cache.acquire(span.key, now_us, purpose=Purpose.PRE_INFER)
        if isinstance(found, Pending):
            return self._lease_after_reload(work, span, found)
        handle = found.handle if isinstance(found, Hit) else None
        if handle is not None and handle.complete:
            self._begin(work)
            self._lease(work, span)
            self._cache.release(handle)
            return self._outbox.job_done(work.received, JobOutcome.ALREADY_CACHED)
        # A job for a prefix in DRAM is the signal to reload it.
        pending = self._reload_more(span, handle, work.expected_ranking_us, now_us)
        if pending is not None:
            if handle is not None:
                self._cache.release(handle)
            return self._lease_after_reload(work, span, pending)
        self._queue_job(work, span, now_us, handle)
        return None

    def _begin(self, work: JobWork) -> None:
        """The job is being served: computed, reloaded, or found ready."""
        if not work.begun:
            work.begun = True
            self._metrics.job_started(self._clock.wall_us() - work.job.retrieval_at_us)

    def _lease_after_reload(self, work: JobWork, span: PrefixSpan, pending: Pending) -> None:
        self._begin(work)

        def arrived() -> None:
            now_us = self._clock.monotonic_us()
            found = self._cache.acquire(span.key, now_us, purpose=Purpose.PRE_INFER)
            if not isinstance(found, Hit):
                return self._queue_job(work, span, now_us, None)
            if not found.handle.complete:
                return self._queue_job(work, span, now_us, found.handle)
            self._lease(work, span)
            self._cache.release(found.handle)
            self._outbox.job_done(work.received, JobOutcome.RELOADED)

        pending.add_done_callback(lambda _: self.post(arrived))

    def _queue_job(self, work: JobWork, span: PrefixSpan, now_us: int, base: Handle | None) -> None:
        """Queues the computation of what is missing, if footprint and load allow."""
        done = base.tokens if base is not None else 0
        refused = (
            JobOutcome.OVERTAKEN
            if work.job.request_id in self._answered
            else JobOutcome.EXPIRED
            if now_us > work.expires_us
            else self._admission.refuse(work, span, done, self._latency)
        )
        if refused is not None:
            if base is not None:
                self._cache.release(base)
            return self._outbox.job_done(work.received, refused)
        shared = self._prefixes.get(span.key.user_id)
        if shared is not None:
            if base is not None:
                self._cache.release(base)
            if shared.span.key.chain.digest == span.key.chain.digest:
                shared.jobs.append(work)
                self._scheduler.push(shared)
                return None
            return self._outbox.job_done(work.received, JobOutcome.NO_ROOM)
        inputs = self._engine.prefix_inputs(span.features, span.behaviours)
        self._enqueue_prefix(PrefixWork(span, inputs, done, jobs=[work], base=base))
        self._shed()

    def _lease(self, work: JobWork, span: PrefixSpan) -> None:
        until_us = work.expires_us + self._lease_margin_ms * 1000
        self._cache.lease(span.key, work.job.request_id, until_us)

    def _shed(self) -> None:
        """At the bound of the pre-infer queue: expired jobs go first, then the one with the least time saved."""
        queue = self._scheduler.preinfer
        if len(queue) <= self._settings.preinfer_queue_max:
            return
        now_us = self._clock.monotonic_us()
        waiting = [work for work in queue if isinstance(work, PrefixWork) and not work.started]
        if not waiting:
            return
        expired = [work for work in waiting if all(job.expires_us < now_us for job in work.jobs)]
        for work in expired:
            self._abandon(work, JobOutcome.EXPIRED)
        if not expired:
            self._abandon(min(waiting, key=lambda work: work.remaining_us), JobOutcome.SHED)

    # -- prefixes ----------------------------------------------------------------------------------

    def _enqueue_prefix(self, prefix: PrefixWork) -> None:
        self._predict(prefix)
        if not prefix.on_scratch and prefix.span.key.user_id not in self._prefixes:
            self._prefixes[prefix.span.key.user_id] = prefix
        elif not prefix.on_scratch:
            # Another version of this user's prefix is being computed; this one is not shared.
            prefix.on_scratch = True
            prefix.done_tokens = 0
            if prefix.base is not None:
                self._cache.release(prefix.base)
                prefix.base = None
            self._predict(prefix)
        self._scheduler.push(prefix)

    def _run_chunk(self, prefix: PrefixWork, now_us: int) -> None:
        self._drop_hopeless(prefix, now_us)
        if not prefix.waiters and not prefix.jobs:
            return self._abandon(prefix, JobOutcome.OVERTAKEN)
        if not prefix.waiters and all(job.expires_us < now_us for job in prefix.jobs):
            return self._abandon(prefix, JobOutcome.EXPIRED)
        if not prefix.started and not self._take_pages(prefix, now_us):
            return
        for job in prefix.jobs:
            self._begin(job)
        for waiter in prefix.waiters:
            waiter.started_us = waiter.started_us or now_us
        end = chunk_end(
            prefix.done_tokens, prefix.total_tokens, self._chunk_us, self._latency, self._engine.geometry.page_tokens
        )
        predicted_us = self._corrector.calibrated.append_us(prefix.done_tokens, end - prefix.done_tokens)
        try:
            self._engine.pre_infer(PrefixChunk(prefix.inputs, prefix.done_tokens, end, prefix.pages))
        except Exception as error:
            log.warning("pre-infer failed", tokens=prefix.total_tokens, error=repr(error))
            return self._fail_prefix(prefix, error)
        ended_us = self._clock.monotonic_us()
        duration_us = ended_us - now_us
        self._corrector.observe(Stage.PRE, predicted_us, duration_us)
        self._charge(prefix.work_class, duration_us, ended_us)
        for waiter in prefix.waiters:
            waiter.pre_infer_us += duration_us
        prefix.done_tokens = end
        if prefix.fill is not None:
            prefix.fill.progress(end)
        if prefix.done_tokens < prefix.total_tokens:
            self._predict(prefix)
            self._scheduler.push(prefix)
        else:
            self._complete(prefix, ended_us)

    def _take_pages(self, prefix: PrefixWork, now_us: int) -> bool:
        """Reserves cache pages, or the scratch pages if there is no room; False if it cannot run now."""
        if not prefix.on_scratch:
            purpose = Purpose.RANKING if prefix.waiters else Purpose.PRE_INFER
            if prefix.base is not None:
                reserved = self._cache.extend(prefix.base, prefix.span.key, now_us, purpose)
            else:
                reserved = self._cache.reserve(prefix.span.key, now_us, purpose)
            if isinstance(reserved, Fill):
                prefix.fill, prefix.pages, prefix.done_tokens = reserved, reserved.pages, reserved.start_tokens
                if reserved.copy_page is not None:
                    self._copy_page(reserved.copy_page)
                return True
            if isinstance(reserved, Pending):
                self._look_again(prefix)
                return False
            if not prefix.waiters:
                self._abandon(prefix, JobOutcome.NO_ROOM)
                return False
            self._leave_cache(prefix)
        if self._scratch_user is not None:
            # The scratch pages serve one request at a time: help that one along.
            self._scheduler.push(prefix)
            if isinstance(self._scratch_user, PrefixWork):
                self._run_chunk(self._scratch_user, now_us)
            else:
                self._rank_batch(now_us)
            return False
        for extra in prefix.waiters[1:]:
            self._look_up(extra)
        del prefix.waiters[1:]
        self._scratch_user = prefix
        prefix.pages = self._scratch_pages[: self._engine.geometry.pages_for(prefix.total_tokens)]
        return True

    def _leave_cache(self, prefix: PrefixWork) -> None:
        self._forget(prefix)
        for job in prefix.jobs:
            self._outbox.job_done(job.received, JobOutcome.NO_ROOM)
        prefix.jobs.clear()
        if prefix.base is not None:
            self._cache.release(prefix.base)
            prefix.base = None
        prefix.on_scratch = True
        prefix.done_tokens = 0

    def _look_again(self, prefix: PrefixWork) -> None:
        """The prefix has come, or is coming, by another way: everybody who waits here asks the cache again."""
        self._discard(prefix)
        for waiter in prefix.waiters:
            self._look_up(waiter)
        for job in prefix.jobs:
            self._pre_infer(job, prefix.span, self._clock.monotonic_us())

    def _complete(self, prefix: PrefixWork, now_us: int) -> None:
        self._scheduler.remove(prefix)
        self._forget(prefix)
        if prefix.on_scratch:
            (waiter,) = prefix.waiters
            self._scratch_user = waiter
            waiter.pages = prefix.pages
            waiter.unknown_items += prefix.inputs.unknown_items
            return self._ready(waiter)
        assert prefix.fill is not None
        handle = prefix.fill.publish(now_us)
        if prefix.base is not None:
            self._cache.release(prefix.base)
            prefix.base = None
        if handle is None:
            for job in prefix.jobs:
                self._outbox.job_done(job.received, JobOutcome.FAILED)
            for waiter in prefix.waiters:
                waiter.path = Path.FULL
                self._look_up(waiter)
            return None
        for job in prefix.jobs:
            self._lease(job, prefix.span)
            self._outbox.job_done(job.received, JobOutcome.COMPUTED)
        for waiter in prefix.waiters:
            self._continue_on(waiter, prefix, now_us)
        self._cache.release(handle)
        return None

    def _continue_on(self, waiter: RankingWork, prefix: PrefixWork, now_us: int) -> None:
        """What a request does once the prefix that it waited for is there: rank, or compute its own tail."""
        assert waiter.span is not None
        found = self._cache.acquire(waiter.span.key, now_us, join=False)
        if not isinstance(found, Hit):
            return self._look_up(waiter)
        if not found.handle.complete:
            return self._plan(waiter, waiter.span, found.handle, now_us)
        waiter.handle, waiter.pages = found.handle, found.handle.pages
        waiter.unknown_items += prefix.inputs.unknown_items
        return self._ready(waiter)

    def _drop_hopeless(self, prefix: PrefixWork, now_us: int) -> None:
        """Requests that would be answered late get the newest part of the history that fits, or a refusal."""
        kept = []
        for waiter in prefix.waiters:
            ends_us = now_us + prefix.remaining_us + waiter.predicted_us
            if ends_us <= waiter.deadline_us + self._skew_us:
                kept.append(waiter)
                continue
            plan = plan_truncation(
                prefix.total_tokens,
                waiter.scored_tokens,
                waiter.deadline_us - now_us,
                self._latency,
                self._engine.geometry.page_tokens,
            )
            if prefix is self._scratch_user:
                self._scratch_user = None
            self._serve_in_full(waiter, prefix.span, plan)
        prefix.waiters[:] = kept

    def _abandon(self, prefix: PrefixWork, outcome: JobOutcome) -> None:
        self._discard(prefix)
        for job in prefix.jobs:
            self._outbox.job_done(job.received, outcome)

    def _fail_prefix(self, prefix: PrefixWork, error: Exception) -> None:
        self._discard(prefix)
        for job in prefix.jobs:
            self._outbox.job_done(job.received, JobOutcome.FAILED)
        for waiter in prefix.waiters:
            self._fail(waiter, _reason_of(error), str(error)[:500] or repr(error))

    def _discard(self, prefix: PrefixWork) -> None:
        self._scheduler.remove(prefix)
        self._forget(prefix)
        if prefix.fill is not None:
            prefix.fill.abort()
        if prefix.base is not None:
            self._cache.release(prefix.base)
        if self._scratch_user is prefix:
            self._scratch_user = None

    def _forget(self, prefix: PrefixWork) -> None:
        if self._prefixes.get(prefix.span.key.user_id) is prefix:
            del self._prefixes[prefix.span.key.user_id]

    def _predict(self, prefix: PrefixWork) -> None:
        prefix.remaining_us = self._latency.append_us(prefix.done_tokens, prefix.total_tokens - prefix.done_tokens)

    # -- history -----------------------------------------------------------------------------------

    def histories_changed(self, user_ids: Iterable[str]) -> None:
        """Wakes what waits for these users' histories."""
        for user_id in user_ids:
            for work in self._parked.take_all(user_id):
                self._resume(work)

    def user_deleted(self, user_id: str) -> None:
        """A tombstone: what is cached of this user goes."""
        self._cache.invalidate_user(user_id)

    def _park(self, work: RankingWork | JobWork, user_id: str, until_us: int) -> bool:
        """Waits for a version that is not here yet, at most until then. False if there is no time or place."""
        if until_us <= self._clock.monotonic_us() or not self._parked.park(user_id, work):
            return False

        def over() -> None:
            if self._parked.take(user_id, work):
                self._resume(work, in_vain=True)

        self._timers.at(until_us, over)
        return True

    def _resume(self, work: RankingWork | JobWork, in_vain: bool = False) -> None:
        if isinstance(work, RankingWork):
            self._look_up(work)
        elif in_vain:
            self._outbox.job_done(work.received, JobOutcome.NO_HISTORY)
        else:
            self.submit_job(work)

    def _parking_ends_us(self, work: RankingWork) -> int:
        """Until when full inference over the version asked for would still fit."""
        tokens = self._spans.expected_tokens(work.request.history_version)
        needed_us = self._latency.pre_us(tokens) + self._latency.hit_us(tokens, work.scored_tokens)
        return work.deadline_us - int(needed_us + self._chunk_us)

    # -- small things ------------------------------------------------------------------------------

    @property
    def _latency(self) -> LatencyModel:
        return self._corrector.model

    def _remaining_us(self, work: RankingWork, now_us: int) -> int:
        """Time to the deadline, less the device time of what is more urgent (and of pre-infer's share of it)."""
        ahead_us = 0.0
        for other in self._scheduler.ranking:
            if other.latest_start_us <= work.latest_start_us:
                ahead_us += other.remaining_us if isinstance(other, PrefixWork) else other.predicted_us
        if ahead_us and len(self._scheduler.preinfer):
            ahead_us /= 1 - self._preinfer_share
        return int(work.deadline_us - now_us - ahead_us)

    def _charge(self, work_class: WorkClass, duration_us: int, now_us: int) -> None:
        self._scheduler.charge(work_class, duration_us, now_us)
        self._metrics.device_time(work_class, duration_us)
        if work_class is WorkClass.RANKING:
            self._admission.count_ranking(duration_us)
        self.last_progress_us = now_us


def _serves(computed: PrefixKey, wanted: PrefixKey) -> bool:
    """Whether the prefix being computed is a part of the one wanted, or the other way round."""
    return 0 < common_behaviours(wanted, computed) in (computed.length, wanted.length)


def _reason_of(error: Exception) -> FailureReason:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return FailureReason.OUT_OF_MEMORY
    return FailureReason.DEVICE_ERROR
