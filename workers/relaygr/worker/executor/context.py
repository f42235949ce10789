"""The parts that requests, jobs, prefixes and batches share, with their wait queue and timers.

Everything here belongs to the device thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from relaygr.admission.corrector import Corrector
from relaygr.admission.lead import LeadTimes
from relaygr.admission.risk import FullPathObserver
from relaygr.admission.settings import AdmissionSettings
from relaygr.runtime.clock import Clock
from relaygr.schemas.record import record
from relaygr.worker.cache import Handle, PageCopy, PrefixCache, Tier
from relaygr.worker.cache.results import PageArray
from relaygr.worker.executor.accounts import Deletions, HeldMemory, JobPrefixes, RecentIds
from relaygr.worker.executor.arrivals import ExpectedArrivals
from relaygr.worker.executor.chunks import Chunking, chunk_bound_us
from relaygr.worker.executor.job_admission import JobAdmission
from relaygr.worker.executor.order import Scheduler
from relaygr.worker.executor.resolver import HistoryReader, PrefixResolver
from relaygr.worker.executor.schedulable import WorkClass
from relaygr.worker.executor.timers import Timer, Timers
from relaygr.worker.executor.work import JobOutcome, JobWork, PrefixWork, RankingWork, ResolvedPrefix
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.interface import Engine
from relaygr.worker.results import ResultWriter
from relaygr.worker.settings import WorkerSettings

if TYPE_CHECKING:
    # The simulation runs the executor without torch.
    from relaygr.worker.device import Device, Event
    from relaygr.worker.divert import Diverter
    from relaygr.worker.pool.tier import PoolTier

W = TypeVar("W")

REMEMBERED_ANSWERS = 65_536
REMEMBERED_DELETIONS = 65_536
REMEMBERED_US = 120_000_000
"""Twice the longest life of a job."""
JOB_PREFIXES_BYTES = 16 * 1024 * 1024
"""Most memory of the resolved prefixes that are kept between a job and its request."""
MAX_UNCOUNTED_PASSES = 1024
UNCUT_US = 1e12
CHUNK_WEIGHT = 0.05
"""Weight of one chunk in the size that predictions assume."""


class WaitQueue(Generic[W]):
    """At most `capacity` pieces of work that wait for a change of their user's history."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_user: dict[str, list[W]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        return self._count >= self._capacity

    def put(self, user_id: str, work: W) -> None:
        """Adds the work. Only while the queue is not full."""
        self._by_user.setdefault(user_id, []).append(work)
        self._count += 1

    def take_all(self, user_id: str) -> list[W]:
        """Takes all work of the user, in order of arrival."""
        taken = self._by_user.pop(user_id, [])
        self._count -= len(taken)
        return taken

    def take(self, user_id: str, work: W) -> bool:
        """Takes one piece of work; False if it is not there any more."""
        waiting = self._by_user.get(user_id, [])
        if work not in waiting:
            return False
        waiting.remove(work)
        self._count -= 1
        if not waiting:
            del self._by_user[user_id]
        return True


class DeviceCompletion:
    """One device event. `poll` calls back once the event is complete."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._callbacks: list[Callable[[], None]] = []

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback()` at once if the event is complete, else at the `poll` that finds it complete."""
        if self._event.done():
            callback()
        else:
            self._callbacks.append(callback)

    def poll(self) -> bool:
        """Calls back if the event is complete. Returns whether no callback is left."""
        if self._callbacks and self._event.done():
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()
        return not self._callbacks


class DeviceCompletions:
    """The events of one device that the cache waits for. The device thread records and polls them; nothing blocks."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._waiting: list[DeviceCompletion] = []

    def after_work(self) -> DeviceCompletion:
        """An event that completes after all work that the calling thread has enqueued on its current stream."""
        self.poll()
        completion = DeviceCompletion(self._device.current_stream().record())
        self._waiting.append(completion)
        return completion

    def poll(self) -> None:
        """Calls back for every event that is complete by now."""
        self._waiting = [each for each in self._waiting if not each.poll()]


@record(frozen=True, slots=True, eq=False)
class _HistoryWait:
    """One piece of work in the wait queue. `on_change` is called when its user's history has changed, or else `timer`
    makes its call.
    """

    on_change: Callable[[], None]
    timer: Timer


@record(frozen=True, slots=True, kw_only=True)
class ExecutorParts:
    """The parts of an executor without the model. `scratch_pages` are arena pages outside the cache, enough for the
    longest prefix; `copy_page` copies one page of the arena, and `zero_pages` zeroes pages of a tier.
    """

    cache: PrefixCache
    scratch_pages: NDArray[np.int32]
    copy_page: Callable[[PageCopy], None]
    zero_pages: Callable[[Tier, PageArray], None] = lambda _tier, _pages: None
    histories: HistoryReader
    corrector: Corrector
    settings: WorkerSettings
    admission_settings: AdmissionSettings
    admission: JobAdmission
    results: ResultWriter
    metrics: WorkerMetrics
    clock: Clock
    diverter: Diverter | None = None
    """Passes requests on to other workers; None without `worker.divert`."""
    pool: PoolTier | None = None
    """A third tier of prefixes; None without `worker.pool`."""


@dataclass(slots=True, eq=False)
class ExecutorContext:
    """One executor's parts. `engine`, `is_cpu` (its device), `resolver` and `chunking` change with the model."""

    engine: Engine
    parts: ExecutorParts
    post: Callable[[Callable[[], None]], None]
    """Runs a call on the device thread, before the next piece of work. May be called from any thread."""
    is_cpu: bool = field(init=False)
    resolver: PrefixResolver = field(init=False)
    chunking: Chunking = field(init=False)
    """The chunking that predictions assume: chunks of the recent mean size."""
    scheduler: Scheduler[PrefixWork | RankingWork] = field(init=False)
    waiting: WaitQueue[_HistoryWait] = field(init=False)
    timers: Timers = field(default_factory=Timers)
    arrivals: ExpectedArrivals = field(default_factory=ExpectedArrivals)
    held_by_requests: HeldMemory = field(init=False)
    held_by_jobs: HeldMemory = field(init=False)
    answered: RecentIds = field(default_factory=lambda: RecentIds(REMEMBERED_ANSWERS, REMEMBERED_US))
    """Impressions that were answered. A job for one of them is dropped."""
    with_job: RecentIds = field(default_factory=lambda: RecentIds(REMEMBERED_ANSWERS, REMEMBERED_US))
    """Impressions whose job was received."""
    computed: RecentIds = field(default_factory=lambda: RecentIds(REMEMBERED_ANSWERS, REMEMBERED_US))
    """Impressions whose job has computed their prefix or its tail."""
    leased: RecentIds = field(default_factory=lambda: RecentIds(REMEMBERED_ANSWERS, REMEMBERED_US))
    """Impressions whose job has prepared their prefix. The poll thread reads it."""
    resolved: JobPrefixes = field(default_factory=lambda: JobPrefixes(JOB_PREFIXES_BYTES))
    """Prefixes that jobs resolved, for their requests."""
    deletions: Deletions = field(default_factory=lambda: Deletions(REMEMBERED_DELETIONS))
    full_path: FullPathObserver = field(default_factory=FullPathObserver)
    lead_times: LeadTimes = field(default_factory=LeadTimes)
    last_progress_us: int = 0
    _ranking_passes: list[tuple[int, int]] = field(default_factory=list)
    """Device time and end of each ranking pass that the job admission has not counted yet."""

    def __post_init__(self) -> None:
        settings = self.parts.settings
        self.scheduler = Scheduler(
            self.parts.admission_settings.preinfer_share, int(settings.chunk_ms * 1000), settings.warm_up_share
        )
        self.waiting = WaitQueue(settings.parked_jobs_max)
        self.held_by_requests = HeldMemory(int(settings.ranking_queue_bytes))
        self.held_by_jobs = HeldMemory(int(settings.preinfer_queue_bytes))
        self.last_progress_us = self.parts.clock.monotonic_us()
        self.use(self.engine)

    def use(self, engine: Engine) -> None:
        """Serves with this model from now on."""
        settings = self.parts.settings
        self.engine, self.is_cpu = engine, engine.device.is_cpu
        self.resolver = PrefixResolver(
            self.parts.histories,
            engine,
            settings.anchor_behaviours,
            self.deletions,
        )
        self.chunking = Chunking(
            # Without reuse there is no pre-infer, so a cut would only cost time.
            max(settings.chunk_ms, settings.longest_chunk_ms) * 1000 if settings.reuse_prefixes else UNCUT_US,
            settings.max_chunk_tokens,
            engine.geometry.page_tokens,
            in_one_chunk=not engine.rules.chunks,
        )

    def next_chunking(self, work: PrefixWork, now_us: int) -> Chunking:
        """The bounds of the next chunk of this prefix, by the requests that wait or may arrive."""
        shortest_us, longest_us = self.parts.settings.chunk_ms * 1000, self.parts.settings.longest_chunk_ms * 1000
        if longest_us <= shortest_us or not self.parts.settings.reuse_prefixes:
            return self.chunking
        first = self.scheduler.ranking.peek()
        slack_us = first.latest_start_us - now_us if first is not None and first is not work else math.inf
        cut_us = self.parts.corrector.cut_us(work.done_tokens)
        own = {(job.job.user_id, job.job.request_id) for job in work.jobs}
        arrival_us, others_us = self.arrivals.next_us(now_us, own)
        # This one is in that queue, too, unless a request waits for it, or nobody.
        prefixes = len(self.scheduler.preinfer) + (work.work_class is not WorkClass.PREINFER)
        bound_us = chunk_bound_us(shortest_us, longest_us, cut_us, slack_us, arrival_us, others_us, prefixes)
        # The time of a prefix grows with the number of chunks, that is with the mean of 1 / bound.
        mean = 1 / self.chunking.chunk_us + CHUNK_WEIGHT * (1 / bound_us - 1 / self.chunking.chunk_us)
        self.chunking = self.chunking.within(1 / mean)
        return self.chunking.within(bound_us)

    def tail_stays_in_suffix(
        self, prefix: ResolvedPrefix, cached: Handle, suffix_behaviours: int, scored_tokens: int
    ) -> bool:
        """Whether a request with this suffix is ranked on the `cached` part, with the rest of the prefix in the suffix,
        although there is time to append it.
        """
        tail = len(prefix.behaviours) - cached.behaviours
        if tail > self.parts.settings.longest_tail:
            return False
        if not self.resolver.tail_may_be_suffix(prefix, cached.behaviours, suffix_behaviours):
            return False
        latency = self.parts.corrector.model_at(prefix.tokens)
        return latency.tail_stays_in_suffix(cached.tokens, prefix.tokens - cached.tokens, scored_tokens)

    def charge(self, work_class: WorkClass, duration_us: int, now_us: int, *, had_job: bool = False) -> None:
        """Counts device time that was just used for work of this class. `had_job`: it computed a prefix, and a job had
        come for it. The job admission counts such work as no ranking load, as the trigger does.
        """
        self.scheduler.charge(work_class, duration_us, now_us)
        self.parts.metrics.device_seconds[work_class].inc(duration_us / 1e6)
        self.last_progress_us = now_us
        if work_class is WorkClass.RANKING and not had_job:
            self._ranking_passes.append((duration_us, now_us))
            if len(self._ranking_passes) >= MAX_UNCOUNTED_PASSES:
                self.count_ranking_passes()

    def end_job(self, job: JobWork, outcome: JobOutcome) -> None:
        """Ends the job: its memory is free, and its offset is finished."""
        self.held_by_jobs.end(job)
        self.parts.results.job_done(job.received, outcome, job)

    def count_ranking_passes(self) -> None:
        """Adds the ranking passes since the last call to the job admission. Call it before each admission."""
        for duration_us, at_us in self._ranking_passes:
            self.parts.admission.count_ranking(duration_us, at_us)
        self._ranking_passes.clear()

    def wait_for_history(
        self, user_id: str, until_us: int, on_change: Callable[[], None], on_timeout: Callable[[], None]
    ) -> bool:
        """Calls `on_change` when the user's history changes, or else `on_timeout` at `until_us`. Returns False, and
        calls neither, if the time has passed or the queue is full.
        """
        if until_us <= self.parts.clock.monotonic_us() or self.waiting.is_full:
            return False

        def timed_out() -> None:
            self.waiting.take(user_id, wait)
            on_timeout()

        wait = _HistoryWait(on_change, self.timers.at(until_us, timed_out))
        self.waiting.put(user_id, wait)
        return True

    def histories_changed(self, user_ids: Iterable[str]) -> None:
        """Wakes the work that waits for these users' histories."""
        for user_id in user_ids:
            for wait in self.waiting.take_all(user_id):
                wait.timer.cancel()
                wait.on_change()
