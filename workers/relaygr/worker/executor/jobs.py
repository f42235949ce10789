"""Pre-infer jobs, from their receipt to their outcome.

received -> refused: disabled | overtaken | expired | not_usable | undecodable | no_history
         -> waits for its history; without it, goes on with the newest
         -> already_cached
         -> waits for the pool to bring it into DRAM
         -> reloaded from DRAM
         -> queued (or over_footprint | over_load | shed) -> computed | joined | overtaken | expired | no_room | failed
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog

from relaygr.admission.policy import MAX_JOB_LIFETIME_US
from relaygr.worker.cache import Handle, Hit, Miss, PendingPrefix, Purpose, WasteReason
from relaygr.worker.executor.capacity import Capacity
from relaygr.worker.executor.device_record import MOST_ENDS
from relaygr.worker.executor.events import (
    TAKEN,
    JobEvent,
    PrefixComputed,
    PrefixLeft,
    PrefixReloaded,
    Taken,
)
from relaygr.worker.executor.impressions import ExpectedArrivals, Impressions
from relaygr.worker.executor.order import Scheduler
from relaygr.worker.executor.parts import ExecutorParts
from relaygr.worker.executor.prefixes import Prefixes
from relaygr.worker.executor.resolver import PrefixResolver, Scored
from relaygr.worker.executor.waits import HistoryWaits, Timers
from relaygr.worker.executor.work import HeldMemory, JobOutcome, JobWork, PrefixWork, RankingWork, ResolvedPrefix
from relaygr.worker.history.resolve import HistoryMismatchError, chosen_at_ms, wanted_by

log = structlog.get_logger()


class Jobs:
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
    ) -> None:
        """`held`: the memory of jobs."""
        self._cache, self._clock, self._settings = parts.cache, parts.clock, parts.settings
        self._admission, self._device_record = parts.admission, parts.device_record
        self._lease_margin_us = parts.admission_settings.lease_margin_ms * 1000
        self._longest_wait_us = parts.settings.history_wait_ms * 1000
        self._resolver = resolver
        self._capacity = capacity
        self._scheduler = scheduler
        self._impressions = impressions
        self._arrivals = arrivals
        self._waits = waits
        self._timers = timers
        self._prefixes = prefixes
        self._held = held
        self._post = post

    def advance(self, work: JobWork, event: JobEvent) -> None:
        """Takes the job to its next state. Its outcome goes to the result writer.

        One job that fails must not end the process, and with it all others.
        """
        try:
            match event:
                case Taken():
                    self._take(work)
                case PrefixLeft(prefix):
                    self._look_up(work, prefix)
                case PrefixReloaded(prefix):
                    self._after_reload(work, prefix)
                case PrefixComputed(computation):
                    self._computed(work, computation)
        except Exception as error:
            log.error("a pre-infer job failed", request_id=work.job.request_id, exc_info=error)
            self._prefixes.end_job(work, JobOutcome.FAILED)

    # -- looking up ----------------------------------------------------------------------------------

    def _take(self, work: JobWork) -> None:
        now_us = self._clock.monotonic_us()
        job, resolver = work.job, self._resolver
        work.expires_us = min(work.expires_us, work.received.received_us + MAX_JOB_LIFETIME_US)
        if not self._settings.reuse_prefixes:
            return self._prefixes.end_job(work, JobOutcome.DISABLED)
        impression = work.impression = self._impressions.of(job.user_id, job.request_id, now_us)
        if impression.is_answered:
            return self._prefixes.end_job(work, JobOutcome.OVERTAKEN)
        if now_us > work.expires_us:
            return self._prefixes.end_job(work, JobOutcome.EXPIRED)
        impression.has_job = True
        stated = job.retrieval_at_us, job.expected_ranking_at_us
        self._arrivals.announce(impression, now_us, work.expected_ranking_us, work.expires_us, stated)
        if self._device_record.ends(job.user_id, job.request_id) >= MOST_ENDS:
            return self._prefixes.end_job(work, JobOutcome.FAILED)
        if job.expected_suffix and not self._resolver.engine.rules.grows:
            return self._prefixes.end_job(work, JobOutcome.NOT_USABLE)
        try:
            history = resolver.history(
                job.user_id, wanted_by(job), job.history, work.received.partition, chosen_at_ms(job)
            )
        except HistoryMismatchError:
            return self._prefixes.end_job(work, JobOutcome.UNDECODABLE)
        if history.may_arrive or history.is_settling:
            # The request itself waits for what is not there when it comes.
            until_us = work.expected_ranking_us
            if not history.is_settling:
                until_us = min(until_us, work.received.received_us + self._longest_wait_us)
            wanted, partition, is_settling = wanted_by(job), work.received.partition, history.is_settling
            again = partial(self.advance, work, TAKEN)
            if self._waits.wait(job.user_id, partition, wanted, until_us, again, is_settling=is_settling):
                return None
        if history.history is None:
            return self._prefixes.end_job(work, JobOutcome.NO_HISTORY)
        expected = Scored(job.expected_suffix, job.expected_candidates)
        prefix = resolver.prefix(job.user_id, history, job.retrieval_at_us // 1000, expected)
        if not self._held.keep(work, prefix):
            return self._prefixes.end_job(work, JobOutcome.SHED)
        if job.history is None and resolver.serves_all_that_name(prefix, job.history_version):
            self._impressions.keep_prefix(impression, prefix)
        return self._look_up(work, prefix)

    def _look_up(self, work: JobWork, prefix: ResolvedPrefix) -> None:
        """Finds, reloads or queues the prefix; or ends the job."""
        if self._is_outdated(work, prefix):
            return None
        now_us, cache = self._clock.monotonic_us(), self._cache
        if prefix.tokens == 0:
            return self._prefixes.end_job(work, JobOutcome.ALREADY_CACHED)
        coming = self._prefixes.by_user.get(prefix.key.user_id)
        if coming is not None and coming.prefix.key.chain.digest == prefix.key.chain.digest:
            return self._join(work, coming)
        found = cache.acquire(prefix.key, now_us, purpose=Purpose.PRE_INFER)
        if isinstance(found, PendingPrefix):
            return self._wait_for_reload(work, prefix, found)
        handle = found.handle if isinstance(found, Hit) else None
        if handle is not None and self._is_ready(work, prefix, handle):
            self._prefixes.begin_job(work)
            self._lease(work, prefix)
            cache.release(handle)
            return self._prefixes.end_job(work, JobOutcome.ALREADY_CACHED)
        if self._fetch(work, prefix, found):
            if handle is not None:
                cache.release(handle)
            return None
        # A job for a prefix in DRAM triggers its reload.
        pending = self._prefixes.reloads.reload(prefix, found, work.expected_ranking_us)
        if not isinstance(pending, PendingPrefix):
            return self._queue(work, prefix, now_us, handle)
        in_hbm = handle.tokens if handle is not None else 0
        copied = self._resolver.engine.layout.tokens(pending.behaviours) - in_hbm
        self._admission.charge_reload(work, copied, self._capacity.latency)
        if handle is not None:
            cache.release(handle)
        return self._wait_for_reload(work, prefix, pending)

    def _is_outdated(self, work: JobWork, prefix: ResolvedPrefix) -> bool:
        """Whether the prefix is not to be computed any more: its user was deleted, and the job ends; or another model
        serves now, and the job is taken anew.
        """
        if self._resolver.is_forgotten(prefix):
            self._prefixes.end_job(work, JobOutcome.NO_HISTORY)
            return True
        if prefix.revision != self._resolver.engine.revision:
            self._take(work)
            return True
        return False

    def _is_ready(self, work: JobWork, prefix: ResolvedPrefix, handle: Handle) -> bool:
        """Whether the request can be ranked on `handle` as it is: on the whole prefix, or with its tail as suffix."""
        return handle.complete or self._prefixes.tail_stays_in_suffix(
            prefix, handle, work.job.expected_suffix, self._scored_tokens(work)
        )

    def _scored_tokens(self, work: JobWork) -> int:
        """Suffix tokens and candidates of the expected request."""
        return self._resolver.scored_tokens(work.job.expected_suffix, work.job.expected_candidates)

    # -- waiting -------------------------------------------------------------------------------------

    def _wait_for_reload(self, work: JobWork, prefix: ResolvedPrefix, pending: PendingPrefix) -> None:
        self._prefixes.begin_job(work)
        reloaded = partial(self.advance, work, PrefixReloaded(prefix))
        pending.add_done_callback(lambda _: self._post(reloaded))

    def _fetch(self, work: JobWork, prefix: ResolvedPrefix, found: Hit | Miss) -> bool:
        """Waits for the prefix from the pool, until it is time to compute it. Then the job is looked up again."""
        fetch = self._prefixes.reloads.fetch(work, prefix, found, work.expected_ranking_us)
        if fetch is None:
            return False
        goes_on = [partial(self.advance, work, PrefixLeft(prefix))]

        def go_on() -> None:
            timer.cancel()
            if goes_on:
                goes_on.pop()()

        timer = self._timers.at(min(fetch.until_us, work.expires_us), go_on)
        fetch.pending.add_done_callback(lambda _: self._post(go_on))
        return True

    def _after_reload(self, work: JobWork, prefix: ResolvedPrefix) -> None:
        if self._is_outdated(work, prefix):
            return None
        now_us = self._clock.monotonic_us()
        found = self._cache.acquire(prefix.key, now_us, purpose=Purpose.PRE_INFER)
        if not isinstance(found, Hit):
            return self._queue(work, prefix, now_us, None)
        if not self._is_ready(work, prefix, found.handle):
            return self._queue(work, prefix, now_us, found.handle)
        self._lease(work, prefix)
        self._cache.release(found.handle)
        return self._prefixes.end_job(work, JobOutcome.RELOADED)

    def _join(self, work: JobWork, coming: PrefixWork) -> None:
        self._held.keep(work, None)
        coming.jobs.append(work)
        self._scheduler.push(coming)

    # -- computing -----------------------------------------------------------------------------------

    def _queue(self, work: JobWork, prefix: ResolvedPrefix, now_us: int, base: Handle | None) -> None:
        """Queues the computation of the tokens that `base` lacks, if footprint and load allow it."""
        coming = self._prefixes.by_user.get(prefix.key.user_id)
        if coming is not None:
            # Another version of this user's prefix is being computed. The job waits, and begins from that result.
            if base is not None:
                self._cache.release(base)
            coming.then.append(partial(self.advance, work, PrefixLeft(prefix)))
            return None
        done_tokens = base.tokens if base is not None else 0
        prepare_us = self._capacity.compute_us(done_tokens, prefix.tokens)
        refusal = self._refusal(work, prefix, now_us, done_tokens, prepare_us)
        if refusal is not None:
            if base is not None:
                self._cache.release(base)
            return self._prefixes.end_job(work, refusal)
        self._prefixes.compute(prefix, base, prepare_us, job=work)
        return self._shed()

    def _refusal(
        self, work: JobWork, prefix: ResolvedPrefix, now_us: int, done_tokens: int, prepare_us: float
    ) -> JobOutcome | None:
        """Why the job is not admitted, or None. `prepare_us`: device time of the tokens after `done_tokens`."""
        if work.impression.is_answered:
            return JobOutcome.OVERTAKEN
        if now_us > work.expires_us:
            return JobOutcome.EXPIRED
        latency = self._capacity.latency_at(prefix.tokens)
        return self._admission.refuse(work, prefix, done_tokens, self._scored_tokens(work), prepare_us, latency)

    def _shed(self) -> None:
        """If the pre-infer queue is full, drops expired jobs, then the job that saves the least time."""
        queue = self._scheduler.preinfer
        if len(queue) <= self._settings.preinfer_queue_max:
            return
        now_us = self._clock.monotonic_us()
        waiting = [work for work in queue if isinstance(work, PrefixWork) and not work.started]
        if not waiting:
            return
        expired = [work for work in waiting if all(job.expires_us < now_us for job in work.jobs)]
        for work in expired:
            self._prefixes.abandon(work, JobOutcome.EXPIRED)
        if not expired:
            self._prefixes.abandon(min(waiting, key=lambda work: work.remaining_us), JobOutcome.SHED)

    # -- ends ----------------------------------------------------------------------------------------

    def _lease(self, work: JobWork, prefix: ResolvedPrefix) -> None:
        """Leases the prefix until its request is answered or overdue."""
        cache, impression = self._cache, work.impression
        work.prepared = prefix.key
        until_us = work.expires_us + self._lease_margin_us
        if not cache.lease(prefix.key, impression.request_id, until_us):
            return
        impression.is_leased = True
        if impression.is_answered:
            # The request was ranked without the prefix. Unless another request uses it, the pre-infer was wasted.
            cache.end_lease(impression.user_id, impression.request_id, WasteReason.OVERTAKEN)

    def _computed(self, work: JobWork, computation: PrefixWork) -> None:
        if computation.ran_ahead:
            work.impression.is_computed = True
        self._lease(work, computation.prefix)
        self._prefixes.end_job(work, JobOutcome.COMPUTED if computation.ran_ahead else JobOutcome.JOINED)
