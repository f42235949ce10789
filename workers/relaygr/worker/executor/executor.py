"""The executor's loop: runs what was posted and the timers that are due, then one piece of device work."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from relaygr.admission.corrector import PredictionQuality
from relaygr.admission.latency import LatencyModel, Stage
from relaygr.admission.lead import LeadQuantiles
from relaygr.schemas.messages import FullPathReport, LeadTimeReport, LengthRatios
from relaygr.worker.cache import Tier
from relaygr.worker.executor.batches import Batches
from relaygr.worker.executor.capacity import Capacity
from relaygr.worker.executor.events import TAKEN, ModelChanged, PrefixComputed
from relaygr.worker.executor.impressions import ExpectedArrivals, Impressions
from relaygr.worker.executor.jobs import Jobs
from relaygr.worker.executor.order import Scheduler
from relaygr.worker.executor.parts import ExecutorParts
from relaygr.worker.executor.prefixes import ChunkReadiness, Prefixes
from relaygr.worker.executor.reloads import ROOM_INTERVAL_US
from relaygr.worker.executor.requests import Requests
from relaygr.worker.executor.resolver import Deletions, PrefixResolver
from relaygr.worker.executor.schedulable import WorkClass
from relaygr.worker.executor.waits import FailedWaits, HistoryWaits, Timers
from relaygr.worker.executor.warm_up import Follows, WarmUps
from relaygr.worker.executor.work import HeldMemory, JobWork, PrefixWork, RankingWork
from relaygr.worker.model.interface import Engine

if TYPE_CHECKING:
    # The simulation runs the executor without torch.
    from relaygr.worker.device import Device, Event

CACHE_UPKEEP_US = 100_000
"""Time between two rounds of upkeep of the cache: a lease ends at most this late, and a round costs next to nothing."""
CLEANED_BYTES = 2 * 1024 * 1024
"""Bytes of free pages of each tier that are zeroed every CACHE_UPKEEP_US: a fraction of a millisecond."""
POSTED_TO_WAKE: Final = 8
"""With more messages in the mailbox the device thread begins before the poll thread has read all of them. Fewer take
the poll thread no longer than the change of threads."""
LONG_US: Final = 1_000.0
"""On a CPU, requests that take less on average are left to the poll thread (`thread.SHORT_US`)."""
POSTED_PER_STEP: Final = 32
"""Most look-ups between two pieces of device work. Without a bound, requests that arrive without a pause would keep
ready requests from being ranked."""
WORK_TOO_LONG: Final = -1
"""`step` did not begin a piece of device work, because it would take too long."""


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


class Executor:
    """One worker's device work. Both poll threads call `take_ranking`, `is_hopeless` and `note_no_time`; the poll
    thread of jobs calls `take_job`. A poll thread then runs or wakes the executor (`DeviceThread.run_short_work`,
    `work_arrived`). Any thread may call `post` and the properties. Only the thread that runs the executor calls the
    other methods.
    """

    def __init__(self, engine: Engine, parts: ExecutorParts) -> None:
        self._mailbox: deque[Callable[[], None]] = deque()
        self.work_arrived = threading.Event()
        self._parts = parts
        settings, clock = parts.settings, parts.clock
        timers = self._timers = Timers()
        scheduler = self._scheduler = Scheduler[PrefixWork | RankingWork](
            parts.admission_settings.preinfer_share, int(settings.chunk_ms * 1000), settings.warm_up_share
        )
        self.backlog = scheduler.backlog
        """The admitted ranking work. Any thread may ask it."""
        arrivals = ExpectedArrivals()
        impressions = self._impressions = Impressions()
        failed_waits = FailedWaits()
        waits = self._waits = HistoryWaits(timers, failed_waits, clock, settings.parked_jobs_max)
        for_requests = self._held_by_requests = HeldMemory(int(settings.ranking_queue_bytes))
        for_jobs = self._held_by_jobs = HeldMemory(int(settings.preinfer_queue_bytes))
        resolver = self._resolver = PrefixResolver(
            parts.histories, engine, settings.anchor_behaviours, Deletions(), failed_waits
        )
        capacity = self._capacity = Capacity(
            engine, settings, parts.corrector, scheduler, arrivals, parts.admission, parts.metrics, clock
        )
        prefixes = self._prefixes = Prefixes(parts, resolver, capacity, scheduler, for_requests, for_jobs, self.post)
        self._requests = Requests(
            parts,
            resolver,
            capacity,
            scheduler,
            impressions,
            arrivals,
            waits,
            timers,
            prefixes,
            for_requests,
            self.post,
        )
        self._batches = Batches(parts, resolver, capacity, scheduler, prefixes, self._requests)
        self._jobs = Jobs(
            parts, resolver, capacity, scheduler, impressions, arrivals, waits, timers, prefixes, for_jobs,
            self.post,
        )  # fmt: skip
        self._warm_ups = WarmUps(parts, resolver, capacity, scheduler, prefixes, self.post)
        self._follows = Follows(parts, resolver, capacity, scheduler, prefixes)
        self._completions = DeviceCompletions(engine.device)
        self._cleans_scratch = False
        self._taking = threading.Lock()
        self._keep_cache()

    # -- any thread ----------------------------------------------------------------------------------

    def take_ranking(self, work: RankingWork) -> bool:
        """Takes a ranking request; its result goes to the result writer. False, without a result, if the memory of
        unanswered requests has reached its bound.
        """
        request = work.request
        with self._taking:
            if not self._held_by_requests.post(work, request.candidates.size + request.suffix.items.size):
                return False
            self.backlog.hand_over()
            self._mailbox.append(partial(self._requests.advance, work, TAKEN))
        self._wake_early()
        return True

    def is_hopeless(self, user_id: str, request_id: str, must_end_us: int, now_us: int, sent_us: int) -> bool:
        """Whether a ranking request that is still undecoded cannot be answered in time, however cheap it is, or would
        have to wait for too long. A request whose prefix a job has prepared may wait longer, because that device time
        is already spent.
        """
        is_prepared = self._impressions.is_leased(user_id, request_id)
        return self.backlog.is_hopeless(must_end_us, now_us, None if is_prepared else sent_us)

    def note_no_time(self, user_id: str, request_id: str) -> None:
        """Notes, at the next step, that a ranking request was answered without work, since there was no time for it."""
        self._mailbox.append(partial(self._requests.ends.no_time, user_id, request_id))

    def take_job(self, work: JobWork) -> bool:
        """Takes a pre-infer job; its outcome goes to the result writer. False as for `take_ranking`."""
        if not self._held_by_jobs.post(work):
            return False
        self._mailbox.append(partial(self._jobs.advance, work, TAKEN))
        self._wake_early()
        return True

    def _wake_early(self) -> None:
        """Wakes the device thread while the poll thread still reads. On a CPU, short work stays on the poll thread."""
        if len(self._mailbox) <= POSTED_TO_WAKE:
            return
        is_short = self.engine.device.is_cpu and self.backlog.measured.expected_us <= LONG_US
        if not is_short:
            self.work_arrived.set()

    def post(self, call: Callable[[], None]) -> None:
        """Runs `call` on the device thread, before its next piece of work."""
        self._mailbox.append(call)
        self.work_arrived.set()

    @property
    def last_progress_us(self) -> int:
        """Monotonic time of the loop's last progress."""
        return self._capacity.last_progress_us

    @property
    def engine(self) -> Engine:
        """The model that serves now."""
        return self._resolver.engine

    @property
    def ranking_outstanding(self) -> int:
        """Ranking requests that were taken and have no result yet."""
        # In this order, so that another thread never sees less than none.
        ended = self._requests.ends.ended
        return self.backlog.looked_up - ended

    @property
    def ranking_outstanding_bytes(self) -> int:
        """The memory of these requests and of those in the mailbox."""
        return self._held_by_requests.outstanding_bytes

    @property
    def preinfer_backlog_us(self) -> int:
        """Predicted device time of the pre-infer work that is queued."""
        return self._prefixes.preinfer_backlog_us

    @property
    def latency_of_prefixes(self) -> LatencyModel:
        """The present latency model for the trigger, which predicts whole prefixes and no chunks."""
        engine = self.engine
        longest = engine.layout.tokens(engine.limits.max_prefix_behaviours)
        return self._capacity.chunking.for_whole_prefixes(self._capacity.latency, longest)

    def full_path_report(self, latency: LatencyModel) -> FullPathReport:
        """How full inference ends here, with predictions of `latency`. For one thread, which sends it to triggers."""
        report = self._requests.ends.full_path.report(latency, self._parts.clock.monotonic_us())
        self._parts.metrics.set_needless(sum(report.needless))
        self._parts.metrics.set_full_path_ratios(report.ratios)
        return report

    def prediction_quality(self, stage: Stage) -> PredictionQuality | None:
        """How good the predictions of a stage were lately. From any thread."""
        return self._parts.corrector.quality(stage)

    def length_ratios(self) -> LengthRatios:
        """Measured / predicted device times by length. From any thread."""
        corrector = self._parts.corrector
        return LengthRatios(*(corrector.length_ratios(stage) for stage in (Stage.FULL, Stage.PRE, Stage.HIT)))

    def lead_time_report(self) -> LeadTimeReport | None:
        """The lead times of recent jobs. For the thread that sends it to triggers."""
        return self._requests.lead_times.report(self._parts.clock.monotonic_us())

    def lead_times(self) -> Mapping[str, LeadQuantiles]:
        """The lead times of the last report, by scenario. From any thread."""
        return self._requests.lead_times.latest

    # -- the device thread ---------------------------------------------------------------------------

    def step(self, longest_us: float = math.inf) -> int | None:
        """One round. Returns the µs until the next timer: 0 if there is work or a posted call, None without a timer.

        WORK_TOO_LONG: the next piece of device work may take longer than `longest_us`, and was not begun.
        """
        now_us = self._run_what_is_due()
        work = self._scheduler.pick(now_us)
        if work is None:
            if self._mailbox:
                return 0
            self._capacity.rest(now_us)
            if self._warm_ups.begin_next(now_us):
                return 0
            return self._follow(longest_us, now_us)
        if longest_us < math.inf and self._device_us(work) > longest_us:
            return WORK_TOO_LONG
        self._run_piece(work, now_us)
        return 0

    def _run_what_is_due(self) -> int:
        """Posted calls, timers, the changes of prefixes, and the results of all these. Returns the time."""
        prefixes = self._prefixes
        taken = self._run_posted_and_measure()
        now_us = self._capacity.last_progress_us
        if now_us >= self._timers.next_at_us:
            self._timers.run_due(now_us)
        if prefixes.reloads.waits and prefixes.reloads.find_room():
            self.run_posted()
        if prefixes.changes:
            self._hand_on_changes()
        if prefixes.running is not None:
            # Posted calls and timers ran while the device computed the last chunk. A request that came during the wait
            # need not wait for the next chunk, too.
            prefixes.settle()
            self.run_posted(POSTED_PER_STEP - taken)
            self._hand_on_changes()
            now_us = self._parts.clock.monotonic_us()
        if self._parts.results.unsent:
            self._parts.results.send()
        return now_us

    def _run_posted_and_measure(self) -> int:
        """Runs the posted calls, and measures the time of the look-ups among them. Returns how many calls ran."""
        self._capacity.begins_step()
        before = self.backlog.looked_up
        taken = self.run_posted()
        self._capacity.looked_up(self.backlog.looked_up - before, self._parts.clock.monotonic_us())
        return taken

    def _follow(self, longest_us: float, now_us: int) -> int | None:
        """Nothing else waits: begins to append the behaviours of the next user, or says how long to wait, as `step`."""
        if not self._follows.is_due(now_us):
            return self._idle_us(now_us)
        if longest_us < math.inf:
            return WORK_TOO_LONG
        # Begun at once: a computation that waits for its first chunk would be joined, and its prefix evicted meanwhile.
        work = self._follows.begin_next()
        if work is not None:
            self._run_chunk(work, now_us)
        return 0

    def _device_us(self, work: PrefixWork | RankingWork) -> float:
        """The longest time that the next piece may take, if it is this work."""
        if not isinstance(work, RankingWork):
            return work.remaining_us
        # The pass may include other requests of the queue.
        return work.predicted_us * min(len(self._scheduler.ranking), self._parts.settings.max_batch_requests)

    def _run_piece(self, work: PrefixWork | RankingWork, now_us: int) -> None:
        """Runs a batch with this request, or the next chunk of this prefix."""
        self._capacity.begins(work, now_us)
        if isinstance(work, RankingWork):
            self._rank(now_us, work)
            if self._parts.results.unsent:
                self._parts.results.send()
        elif work.work_class is WorkClass.RANKING or not self._rank_beside_chunk(now_us):
            self._run_chunk(work, now_us)

    def _idle_us(self, now_us: int) -> int | None:
        """Time until the next timer, work of an idle device or search for room; None without any."""
        waits_us = [
            self._timers.next_in_us(now_us),
            self._warm_ups.next_in_us(now_us),
            self._follows.next_in_us(now_us),
            ROOM_INTERVAL_US if self._prefixes.reloads.waits else None,
        ]
        return min((each for each in waits_us if each is not None), default=None)

    def begin_warm_up(self) -> None:
        """Begins a new warm-up of prefixes."""
        self._warm_ups.begin()

    def offer_warm_ups(self, user_ids: Sequence[str]) -> None:
        """The users to warm up, the most likely first. They replace those that were offered before."""
        self._warm_ups.offer(user_ids)

    def run_posted(self, most: int = POSTED_PER_STEP) -> int:
        """Runs the posted calls, at most this many. Returns how many they were."""
        taken = min(len(self._mailbox), most)
        for _ in range(taken):
            self._mailbox.popleft()()
        return taken

    def histories_changed(self, user_ids: Iterable[str]) -> None:
        """Wakes the work that waits for these users' histories, and may append what is new to cached prefixes."""
        self._waits.histories_changed(user_ids)
        self._follows.changed(user_ids)

    def partitions_read(self, partitions: Collection[int]) -> None:
        """Wakes the work that waits for these partitions: their store was opened, or has caught up."""
        self._waits.partitions_read(partitions)

    def user_deleted(self, user_id: str) -> None:
        """Handles a tombstone: removes the user's cached prefixes, whose pages are zeroed soon. None that was resolved
        before is cached from now on: its requests are ranked without the cache, and its jobs end.
        """
        self._resolver.forget(user_id)
        self._impressions.forget_prefix(user_id)
        self._cleans_scratch = True
        self._parts.cache.invalidate_user(user_id)
        self._prefixes.forget_user(user_id)

    def serve_with(self, engine: Engine) -> None:
        """Serves with this model, bound to the same arena, from now on. Old prefixes no longer match.

        All work in flight starts over, so that no result mixes two models. The latency model stays, and is corrected
        as before. Raises ValueError for a model whose K,V do not fit the pages and the tiers' ledgers.
        """
        now, scheduler = self.engine, self._scheduler
        if (engine.geometry, engine.layout) != (now.geometry, now.layout):
            raise ValueError("the new model's K,V have another shape than the arena's pages")
        self._prefixes.settle()
        self._hand_on_changes()
        self._resolver.use(engine)
        self._capacity.use(engine)
        self._parts.cache.admit_only(engine.namespace)
        for work in [*scheduler.ranking, *scheduler.preinfer, *scheduler.warm_up]:
            if isinstance(work, RankingWork):
                scheduler.remove(work)
                self._requests.advance(work, ModelChanged())
                continue
            self._prefixes.discard(work)
            for waiter in work.waiters:
                self._requests.advance(waiter, ModelChanged())
            for job in work.jobs:
                self._jobs.advance(job, TAKEN)

    # -- pieces of device work -----------------------------------------------------------------------

    def _rank(self, now_us: int, first: RankingWork | None = None) -> None:
        alone = self._batches.rank(now_us, first)
        if self._prefixes.changes:
            self._hand_on_changes()
        if alone is not None:
            self._run_chunk(alone, self._parts.clock.monotonic_us())

    def _rank_beside_chunk(self, now_us: int) -> bool:
        """Ranks ready requests in the forward of the pre-infer chunk that is next. False if none is ready."""
        if not self._batches.can_rank_beside_chunk():
            return False
        has_ranked, alone = self._batches.rank_beside_chunk(now_us)
        self._hand_on_changes()
        if alone is not None:
            self._run_chunk(alone, self._parts.clock.monotonic_us())
        return has_ranked

    def _run_chunk(self, work: PrefixWork, now_us: int) -> None:
        """Starts the next chunk of the prefix on the device, if the prefix is still needed and has its pages."""
        prepared = self._prefixes.prepare(work, now_us)
        self._hand_on_changes()
        if prepared is ChunkReadiness.REQUESTS_LEFT:
            prepared = self._prefixes.prepare(work, now_us)
            self._hand_on_changes()
        if prepared is ChunkReadiness.READY:
            self._prefixes.run(work, now_us)
            self._hand_on_changes()
        elif prepared is ChunkReadiness.SCRATCH_BUSY:
            self._run_scratch_user(now_us)

    def _run_scratch_user(self, now_us: int) -> None:
        """Runs the next piece of the request that uses the scratch pages, which serve one request at a time."""
        user = self._prefixes.scratch_user
        if isinstance(user, PrefixWork):
            self._run_chunk(user, now_us)
        elif user is not None:
            self._rank(now_us, user)

    def _hand_on_changes(self) -> None:
        """Continues the requests and jobs whose prefixes changed."""
        changes = self._prefixes.changes
        while changes:
            change = changes.popleft()
            # Requests use the prefix first. A job whose request is then answered may count it as wasted.
            for request in change.requests:
                self._requests.advance(request, change.event)
            for job in change.jobs:
                self._jobs.advance(job, change.event)
            if isinstance(change.event, PrefixComputed) and change.event.handle is not None:
                work, handle = change.event.computation, change.event.handle
                if work.work_class is WorkClass.WARM_UP:
                    self._warm_ups.computed(handle)
                elif work.work_class is WorkClass.FOLLOW:
                    self._follows.count("appended")
                self._parts.cache.release(handle)

    def _keep_cache(self) -> None:
        """Upkeep of the cache: ends what is overdue, and zeroes free pages."""
        now_us, cache = self._parts.clock.monotonic_us(), self._parts.cache
        cache.expire_leases(now_us)
        cache.revoke_overdue(now_us, self._completions.after_work())
        for tier in Tier:
            self._clean(tier)
        if self._cleans_scratch and self._prefixes.scratch_user is None:
            self._cleans_scratch = False
            self._parts.zero_pages(Tier.HBM, self._parts.scratch_pages)
        self._timers.at(now_us + CACHE_UPKEEP_US, self._keep_cache)

    def _clean(self, tier: Tier) -> None:
        """Zeroes some free pages of removed prefixes, so that the bytes of a deleted user do not stay."""
        pages = self._parts.cache.begin_cleaning(tier, CLEANED_BYTES)
        if pages.size:
            self._parts.zero_pages(tier, pages)
            done = partial(self._parts.cache.end_cleaning, tier)
            self._completions.after_work().add_done_callback(done)
