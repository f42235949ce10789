"""Prefixes under computation: their waiting requests and jobs, their pages, and their chunks on the device.

A prefix is computed once for all requests and jobs that need it (single flight), in chunks into cache pages, and then
published. If the cache has no room, it is computed into the scratch pages, which serve one request at a time.

    compute -> (prepare -> run -> settle) for each chunk -> published | lost | failed | abandoned

An accelerator works on a chunk by itself while the host goes on with look-ups. `settle` waits for the chunk before the
next piece of device work; then the chunk's K,V are written and its duration is known. On the CPU a chunk is complete
when its call returns.

This module never calls the requests and jobs that wait for a prefix: it appends changes, which the executor hands on.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from relaygr.admission.latency import LatencyModel
from relaygr.schemas.messages import Path, PrefixSource
from relaygr.schemas.record import record
from relaygr.worker.cache import (
    Fill,
    Handle,
    Hit,
    Miss,
    MissReason,
    PendingPrefix,
    PrefixKey,
    Purpose,
)
from relaygr.worker.cache.identity import common_behaviours
from relaygr.worker.executor.capacity import Capacity
from relaygr.worker.executor.chunks import Chunking
from relaygr.worker.executor.events import (
    Change,
    ComputedTooLate,
    DeviceFailed,
    Displaced,
    NoRoomToAppend,
    PrefixComputed,
    PrefixLeft,
)
from relaygr.worker.executor.order import Scheduler
from relaygr.worker.executor.parts import ExecutorParts
from relaygr.worker.executor.reloads import Reloads
from relaygr.worker.executor.resolver import PrefixResolver
from relaygr.worker.executor.schedulable import IDLE_CLASSES, WorkClass
from relaygr.worker.executor.work import HeldMemory, JobOutcome, JobWork, PrefixWork, RankingWork, ResolvedPrefix
from relaygr.worker.model.interface import PrefixChunk

if TYPE_CHECKING:
    # The simulation runs the executor without torch.
    from relaygr.worker.device import Event

log = structlog.get_logger()


class ChunkReadiness(enum.Enum):
    """Whether the next chunk of a prefix can run."""

    READY = enum.auto()
    DROPPED = enum.auto()
    """The prefix was lost, failed, or is not needed any more."""
    REQUESTS_LEFT = enum.auto()
    """It has no pages yet, and late requests left it. Hand on the changes, which may end leases, and prepare again."""
    SCRATCH_BUSY = enum.auto()
    """Another prefix or request uses the scratch pages, and has to end first."""


@record(frozen=True, slots=True)
class Chunk:
    """The tokens of `work` from `done_tokens` up to `end_tokens`."""

    work: PrefixWork
    end_tokens: int

    @property
    def inputs(self) -> PrefixChunk:
        """The chunk as input of the engine."""
        return PrefixChunk(self.work.inputs, self.work.done_tokens, self.end_tokens, self.work.pages)

    def predicted_us(self, latency: LatencyModel) -> float:
        """Device time of the chunk by itself."""
        return latency.append_us(self.work.done_tokens, self.end_tokens - self.work.done_tokens)


@record(frozen=True, slots=True)
class _Running:
    """A chunk that was started on the device, and the event that completes with it."""

    chunk: Chunk
    started_us: int
    event: Event


class Prefixes:
    """The prefixes under computation, at most one of each user in the cache. Belongs to the device thread."""

    def __init__(
        self,
        parts: ExecutorParts,
        resolver: PrefixResolver,
        capacity: Capacity,
        scheduler: Scheduler[PrefixWork | RankingWork],
        held_by_requests: HeldMemory,
        held_by_jobs: HeldMemory,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._cache, self._scratch_pages, self._copy_page = parts.cache, parts.scratch_pages, parts.copy_page
        self._results, self._metrics, self._clock = parts.results, parts.metrics, parts.clock
        self._device_record = parts.device_record
        self._chunk_us = parts.settings.chunk_ms * 1000
        self._longest_tail = parts.settings.longest_tail
        self._resolver = resolver
        self._capacity = capacity
        self._scheduler = scheduler
        self._held_by_requests = held_by_requests
        self._held_by_jobs = held_by_jobs
        self._post = post
        self.reloads = Reloads(parts, resolver, capacity)
        self.changes: deque[Change] = deque()
        self.by_user: dict[str, PrefixWork] = {}
        """Computations into cache pages, queued or under way."""
        self.scratch_user: PrefixWork | RankingWork | None = None
        """The user of the scratch pages: a computation, and after it its request."""
        self.running: _Running | None = None
        """The chunk that was started on the device and is not settled."""

    @property
    def preinfer_backlog_us(self) -> int:
        """Predicted device time of the prefixes that only jobs wait for. From any thread."""
        return int(
            sum(work.remaining_us for work in list(self.by_user.values()) if work.work_class is WorkClass.PREINFER)
        )

    def under_way(self, key: PrefixKey) -> PrefixWork | None:
        """The computation, queued or begun, that will cover a part of `key`, or all of `key` and more."""
        work = self.by_user.get(key.user_id)
        if work is None:
            return None
        common = common_behaviours(key, work.prefix.key)
        return work if 0 < common in (work.prefix.key.length, key.length) else None

    def compute(
        self,
        prefix: ResolvedPrefix,
        base: Handle | None,
        predicted_us: float,
        *,
        request: RankingWork | None = None,
        job: JobWork | None = None,
        on_scratch: bool = False,
        idle_class: WorkClass | None = None,
    ) -> None:
        """Queues the computation of the tokens that `base` lacks, for a request or a job; for neither, as work of an
        idle device. The computation releases `base`. `predicted_us`: its device time.

        Passes on the engine's error if it cannot look the prefix up, and releases `base`.
        """
        try:
            inputs = self._resolver.engine.prefix_inputs(
                prefix.features, prefix.behaviours, query_time_ms=prefix.query_time_ms
            )
        except Exception:
            self._release(base)
            raise
        if inputs.unknown_items:
            # Items of a prefix count once, here, and not for each later hit.
            self._metrics.unknown_items.inc(inputs.unknown_items)
        work = PrefixWork(prefix, inputs, prefix.tokens, base.tokens if base is not None else 0, base=base)
        work.on_scratch, work.remaining_us = on_scratch, predicted_us
        work.idle_class = idle_class
        if request is not None:
            work.waiters.append(request)
            self._held_by_requests.keep(work, prefix)
        if job is not None:
            work.jobs.append(job)
            self._held_by_jobs.keep(work, prefix)
        user_id = prefix.key.user_id
        if not on_scratch and (user_id in self.by_user or self._resolver.is_forgotten(prefix)):
            # Another version of this user's prefix is being computed, or the user was deleted. This one is not shared.
            self._begin_anew_on_scratch(work)
        elif not on_scratch:
            self.by_user[user_id] = work
        self._scheduler.push(work)

    def tail_stays_in_suffix(
        self, prefix: ResolvedPrefix, cached: Handle, suffix_behaviours: int, scored_tokens: int
    ) -> bool:
        """Whether a request with this suffix is ranked on the `cached` part, with the rest of the prefix in the suffix,
        although there is time to append it.
        """
        tail = len(prefix.behaviours) - cached.behaviours
        if tail > self._longest_tail:
            return False
        if not self._resolver.tail_may_be_suffix(prefix, cached.behaviours, suffix_behaviours):
            return False
        latency = self._capacity.latency_at(prefix.tokens)
        return latency.tail_stays_in_suffix(cached.tokens, prefix.tokens - cached.tokens, scored_tokens)

    def displace(self, work: PrefixWork, now_us: int) -> None:
        """Takes its request away from a computation, which goes on for its jobs, or ends."""
        (request,) = work.waiters
        self.changes.append(Change([request], [], Displaced(now_us)))
        self._capacity.drop(request)
        work.waiters.clear()
        if work.jobs:
            self._scheduler.push(work)
        else:
            self.discard(work)

    def longest(self) -> PrefixWork | None:
        """The longest computation that may be displaced, if no chunk of it runs."""
        work = self._scheduler.ranking.longest()
        is_running = self.running is not None and self.running.chunk.work is work
        return work if isinstance(work, PrefixWork) and not is_running else None

    # -- chunks ------------------------------------------------------------------------------------

    def prepare(self, work: PrefixWork, now_us: int) -> ChunkReadiness:
        """Before each chunk: checks that the prefix is still needed, and takes its pages before the first."""
        try:
            return self._prepare(work, now_us)
        except Exception as error:
            # The failure of one prefix must not end the process and the requests of all others.
            self._resolver.engine.device.settle()
            self._fail(work, error)
            return ChunkReadiness.DROPPED

    def run(self, work: PrefixWork, now_us: int) -> None:
        """Starts the next chunk of a prefix that is READY."""
        engine = self._resolver.engine
        try:
            chunking = self._capacity.chunking
            if work.remaining_us > self._chunk_us:
                chunking = self._capacity.next_chunking(work, now_us)
            latency = self._capacity.latency_at(work.total_tokens)
            chunk = self._next_chunk(work, chunking, latency)
            self._results.send()
            self._capacity.chunk_begins(work, chunk.predicted_us(latency), now_us)
            ids = work.record_ids
            self._device_record.note(ids)
            engine.pre_infer(chunk.inputs)
            if not engine.device.is_cpu:
                self.running = _Running(chunk, now_us, engine.device.current_stream().record())
                if self._device_record.has_accused(ids):
                    self.settle()
                return None
        except Exception as error:
            engine.device.settle()
            self._device_record.clear()
            return self._fail(work, error)
        self._device_record.clear()
        return self._observe(chunk, now_us)

    def settle(self) -> None:
        """Waits for the chunk on the device, and counts it."""
        running, self.running = self.running, None
        if running is None:
            return
        chunk = running.chunk
        # If the event is complete already, the time of its completion is unknown.
        is_timed = not running.event.done()
        try:
            running.event.wait()
        except Exception as error:
            return self._fail(chunk.work, error)
        finally:
            self._device_record.clear()
        if is_timed:
            return self._observe(chunk, running.started_us)
        ended_us = self._clock.monotonic_us()
        return self.count(chunk, ended_us - running.started_us, ended_us)

    def _observe(self, chunk: Chunk, started_us: int) -> None:
        """The chunk ended now: counts it, and corrects the predictions by its time, that of the counting included."""
        work, begun_tokens, ended_us = chunk.work, chunk.work.done_tokens, self._clock.monotonic_us()
        self.count(chunk, ended_us - started_us, ended_us)
        took_us = self._clock.monotonic_us() - started_us
        self._capacity.observe_chunk(begun_tokens, chunk.end_tokens, work.total_tokens, took_us)

    @property
    def next_runs_alone(self) -> bool:
        """Whether the next pre-infer chunk was on the device when a process ended, so that nothing runs beside it."""
        work = self._scheduler.preinfer.peek() if self._device_record.any_accused else None
        return isinstance(work, PrefixWork) and self._device_record.has_accused(work.record_ids)

    def chunk_within(self, slack_us: float, now_us: int) -> Chunk | None:
        """The next chunk of the most urgent pre-infer work that is predicted to fit into `slack_us`, with its pages."""
        work = self._scheduler.preinfer.peek()
        if not isinstance(work, PrefixWork):
            return None
        latency, chunking = self._capacity.latency_at(work.total_tokens), self._capacity.chunking
        chunking = chunking.within(min(self._chunk_us, slack_us))
        if self._next_chunk(work, chunking, latency).predicted_us(latency) > slack_us:
            return None
        if self.prepare(work, now_us) is not ChunkReadiness.READY:
            return None
        chunk = self._next_chunk(work, chunking, latency)
        return chunk if chunk.predicted_us(latency) <= slack_us else None

    def count(self, chunk: Chunk, duration_us: int, now_us: int) -> None:
        """The chunk is written and took `duration_us`: queues the next chunk, or publishes the prefix."""
        work = chunk.work
        self._capacity.chunk_took(work, duration_us, now_us)
        work.ran_ahead = work.ran_ahead or not work.waiters
        for waiter in work.waiters:
            waiter.pre_infer_us += duration_us
        work.spent_us += duration_us
        work.done_tokens = chunk.end_tokens
        if work.fill is not None:
            work.fill.progress(work.done_tokens)
        if work.done_tokens < work.total_tokens:
            self._predict(work)
            self._scheduler.push(work)
        else:
            self._complete(work, now_us)

    def _next_chunk(self, work: PrefixWork, chunking: Chunking, latency: LatencyModel) -> Chunk:
        return Chunk(work, chunking.end(work.done_tokens, work.total_tokens, latency))

    # -- before a chunk ----------------------------------------------------------------------------

    def _prepare(self, work: PrefixWork, now_us: int) -> ChunkReadiness:
        if work.fill is not None and not work.fill.is_current:
            self._lose(work)
            return ChunkReadiness.DROPPED
        waiting = len(work.waiters)
        self._drop_late(work, now_us)
        over = self._why_over(work, now_us)
        if over is not None:
            self.abandon(work, over)
            return ChunkReadiness.DROPPED
        if len(work.waiters) < waiting:
            # Without these requests the work may be pre-infer, which demands less.
            self._scheduler.push(work)
        if not work.started:
            if len(work.waiters) < waiting:
                return ChunkReadiness.REQUESTS_LEFT
            prepared = self._take_pages(work, now_us)
            if prepared is not ChunkReadiness.READY:
                return prepared
        for job in work.jobs:
            self.begin_job(job)
        for waiter in work.waiters:
            waiter.started_us = waiter.started_us or now_us
        return ChunkReadiness.READY

    def _why_over(self, work: PrefixWork, now_us: int) -> JobOutcome | None:
        """The outcome of the jobs if nobody needs this prefix any more; None if it is needed.

        A prefix whose request was answered without it may still serve the user's next visit. It is begun only if no
        other work waits: otherwise an overloaded worker would save nothing by refusing requests.
        """
        if work.waiters or work.work_class in IDLE_CLASSES:
            return None
        if all(job.expires_us < now_us for job in work.jobs):
            return JobOutcome.EXPIRED
        others_wait = len(self._scheduler.ranking) + len(self._scheduler.preinfer) > 1
        if (
            not work.started
            and others_wait
            and all(job.expires_us < now_us or job.impression.is_answered for job in work.jobs)
        ):
            return JobOutcome.OVERTAKEN
        return None

    def end_job(self, job: JobWork, outcome: JobOutcome) -> None:
        """Ends the job: its memory is free, and its offset is finished."""
        self._held_by_jobs.end(job)
        self._results.job_done(job.received, outcome, job)

    def begin_job(self, job: JobWork) -> None:
        """Counts, once, that the job's prefix is computed, reloaded, or was found ready."""
        if not job.begun_wall_us:
            job.begun_wall_us = self._clock.wall_us()
            waited_us = job.begun_wall_us - job.job.retrieval_at_us
            self._metrics.job_start_seconds.observe(max(0, waited_us) / 1e6)

    def _drop_late(self, work: PrefixWork, now_us: int) -> None:
        """Removes the requests for which the prefix would be complete too late."""
        kept = []
        for waiter in work.waiters:
            if self._capacity.is_too_late(waiter, now_us + work.remaining_us):
                self.free_scratch(work)
                self.changes.append(Change([waiter], [], ComputedTooLate(now_us)))
            else:
                kept.append(waiter)
        work.waiters[:] = kept

    def _take_pages(self, work: PrefixWork, now_us: int) -> ChunkReadiness:
        """Reserves cache pages, or the scratch pages if the cache has no room."""
        if not work.on_scratch:
            if self._reloads_instead(work):
                self.discard(work)
                self.changes.append(Change(work.waiters, work.jobs, PrefixLeft(work.prefix)))
                return ChunkReadiness.DROPPED
            reserved = self._reserve(work, now_us)
            if isinstance(reserved, Fill):
                work.fill, work.pages, work.done_tokens = reserved, reserved.pages, reserved.start_tokens
                if reserved.copy_page is not None:
                    self._copy_page(reserved.copy_page)
                return ChunkReadiness.READY
            if isinstance(reserved, PendingPrefix):
                # The prefix is cached meanwhile, or another fill or reload brings it.
                self.discard(work)
                self.changes.append(Change(work.waiters, work.jobs, PrefixLeft(work.prefix)))
                return ChunkReadiness.DROPPED
            self._rank_on_cached_part(work, now_us)
            if not work.waiters:
                self.abandon(work, JobOutcome.NO_ROOM)
                return ChunkReadiness.DROPPED
            self._leave_cache(work)
        if self.scratch_user is not None:
            self._scheduler.push(work)
            return ChunkReadiness.SCRATCH_BUSY
        # A request that joined may have a longer prefix. From the cache it would take this part and compute the rest.
        work.waiters.sort(key=lambda waiter: _is_longer(waiter, work))
        if _is_longer(work.waiters[0], work):
            self.discard(work)
            self.changes.append(Change(work.waiters, [], PrefixLeft(work.prefix)))
            return ChunkReadiness.DROPPED
        if len(work.waiters) > 1:
            # The scratch pages serve one request.
            self.changes.append(Change(work.waiters[1:], [], PrefixLeft(work.prefix)))
            del work.waiters[1:]
        self.scratch_user = work
        work.pages = self._scratch_pages[: self._resolver.engine.geometry.pages_for(work.total_tokens)]
        return ChunkReadiness.READY

    def _reloads_instead(self, work: PrefixWork) -> bool:
        """Starts a reload of a prefix that DRAM holds by now, or for which HBM had no room when it was queued."""
        if work.base is not None or not (work.waiters or work.jobs):
            return False
        in_dram = self._cache.dram_behaviours(work.prefix.key)
        if not in_dram:
            return False
        deadline_us = min(
            [waiter.deadline_us for waiter in work.waiters] or [job.expected_ranking_us for job in work.jobs]
        )
        found = Miss(MissReason.IN_DRAM, in_dram)
        return isinstance(self.reloads.reload(work.prefix, found, deadline_us), PendingPrefix)

    def _reserve(self, work: PrefixWork, now_us: int) -> object:
        purpose = Purpose.RANKING if work.waiters else Purpose.PRE_INFER
        if work.work_class is WorkClass.FOLLOW:
            purpose = Purpose.FOLLOW
        if work.base is not None:
            return self._cache.extend(work.base, work.prefix.key, now_us, purpose)
        return self._cache.reserve(work.prefix.key, now_us, purpose)

    def _rank_on_cached_part(self, work: PrefixWork, now_us: int) -> None:
        """Without room to append, requests whose tail may be a suffix are ranked on the cached part."""
        if work.base is None:
            return
        kept = []
        for waiter in work.waiters:
            assert waiter.prefix is not None
            found = self._cache.acquire(waiter.prefix.key, now_us, join=False, purpose=Purpose.AGAIN)
            if not isinstance(found, Hit):
                kept.append(waiter)
            elif self._resolver.tail_as_suffix(waiter.prefix, found.handle.behaviours) is None:
                self._cache.release(found.handle)
                kept.append(waiter)
            else:
                self.changes.append(Change([waiter], [], NoRoomToAppend(found.handle)))
        work.waiters[:] = kept

    def _leave_cache(self, work: PrefixWork) -> None:
        self._forget(work)
        for job in work.jobs:
            self.end_job(job, JobOutcome.NO_ROOM)
        work.jobs.clear()
        self._begin_anew_on_scratch(work)

    def _begin_anew_on_scratch(self, work: PrefixWork) -> None:
        """No cached part can serve a computation on the scratch pages, so this is full inference, and its requests get
        that path.
        """
        self._release(work.base)
        work.base = None
        work.on_scratch = True
        work.done_tokens = 0
        for waiter in work.waiters:
            if waiter.path is not Path.TRUNCATED:
                waiter.path = Path.FULL
            waiter.prefix_source, waiter.tokens_cached = PrefixSource.COMPUTED, 0
        self._predict(work)

    # -- ends --------------------------------------------------------------------------------------

    def _complete(self, work: PrefixWork, now_us: int) -> None:
        self._scheduler.remove(work)
        self._forget(work)
        self._held_by_requests.end(work)
        if work.on_scratch:
            (self.scratch_user,) = work.waiters
            self.changes.append(Change(work.waiters, work.jobs, PrefixComputed(work, None, now_us)))
            return
        assert work.fill is not None
        handle = work.fill.publish(now_us)
        if handle is None:
            return self._lose(work)
        if work.base is not None:
            self._release(work.base)
            work.base = None
        self.changes.append(Change(work.waiters, work.jobs, PrefixComputed(work, handle, now_us)))

    def _lose(self, work: PrefixWork) -> None:
        """The prefix was invalidated, or its fill was revoked. Its jobs fail, and its requests are looked up again."""
        self._end(work, JobOutcome.FAILED)
        for waiter in work.waiters:
            waiter.path = Path.FULL
        self.changes.append(Change(work.waiters, [], PrefixLeft(work.prefix)))

    def _fail(self, work: PrefixWork, error: Exception) -> None:
        log.warning("pre-infer failed", tokens=work.total_tokens, error=repr(error))
        self._capacity.chunk_failed(self._clock.monotonic_us())
        self._end(work, JobOutcome.FAILED)
        self.changes.append(Change(work.waiters, [], DeviceFailed(error)))

    def abandon(self, work: PrefixWork, outcome: JobOutcome) -> None:
        """Ends a computation that only jobs wait for, with this outcome."""
        self._end(work, outcome)

    def forget_user(self, user_id: str) -> None:
        """The user was deleted. A prefix whose computation has not begun is computed for its requests only."""
        work = self.by_user.get(user_id)
        if work is None or work.started:
            return
        if work.waiters:
            self._leave_cache(work)
            self._scheduler.push(work)
        else:
            self.abandon(work, JobOutcome.NO_HISTORY)

    def discard(self, work: PrefixWork, outcome: JobOutcome = JobOutcome.OVERTAKEN) -> None:
        """Gives back all that the computation holds. The caller answers its requests and jobs."""
        if work.work_class is WorkClass.FOLLOW:
            self._metrics.follows.labels(outcome.value).inc()
        self._scheduler.remove(work)
        self._forget(work)
        self._held_by_requests.end(work)
        if work.fill is not None:
            work.fill.abort()
        self._release(work.base)
        self.free_scratch(work)

    def free_scratch(self, work: PrefixWork | RankingWork) -> None:
        """Frees the scratch pages if this work uses them."""
        if self.scratch_user is work:
            self.scratch_user = None

    def _end(self, work: PrefixWork, outcome: JobOutcome) -> None:
        self.discard(work, outcome)
        for job in work.jobs:
            self.end_job(job, outcome)

    def _forget(self, work: PrefixWork) -> None:
        if self.by_user.get(work.prefix.key.user_id) is work:
            del self.by_user[work.prefix.key.user_id]
            for call in work.then:
                self._post(call)
            work.then.clear()

    def _release(self, handle: Handle | None) -> None:
        if handle is not None:
            self._cache.release(handle)

    def _predict(self, work: PrefixWork) -> None:
        work.remaining_us = self._capacity.compute_us(work.done_tokens, work.total_tokens)


def _is_longer(waiter: RankingWork, work: PrefixWork) -> bool:
    """Whether the request needs more than this computation of a part of its prefix."""
    return waiter.prefix is not None and waiter.prefix.tokens > work.total_tokens
