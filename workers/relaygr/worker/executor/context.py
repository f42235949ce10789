"""What the three flows of the executor share: the device's parts, its clock, and the accounts of its time."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from relaygr.admission.latency import Corrector, LatencyModel
from relaygr.admission.settings import AdmissionSettings
from relaygr.consumer import Received
from relaygr.runtime.clock import Clock
from relaygr.schemas.messages import FailureReason
from relaygr.worker.cache import Handle, PendingPrefix, PrefixCache
from relaygr.worker.device import Device, Event
from relaygr.worker.executor.admission import JobAdmission
from relaygr.worker.executor.order import Scheduler, WorkClass
from relaygr.worker.executor.plan import Chunking
from relaygr.worker.executor.resolver import PrefixResolver
from relaygr.worker.executor.work import JobOutcome, PrefixWork, RankingWork, ResolvedPrefix
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.interface import Engine, RankOutputs
from relaygr.worker.settings import WorkerSettings

W = TypeVar("W")


class WaitQueue(Generic[W]):
    """At most `capacity` pieces of work, found by user."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_user: dict[str, list[W]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def park(self, user_id: str, work: W) -> bool:
        """False if the place is full."""
        if self._count >= self._capacity:
            return False
        self._by_user.setdefault(user_id, []).append(work)
        self._count += 1
        return True

    def take_all(self, user_id: str) -> list[W]:
        """Everything parked for the user, in order of arrival."""
        parked = self._by_user.pop(user_id, [])
        self._count -= len(parked)
        return parked

    def take(self, user_id: str, work: W) -> bool:
        """Takes one piece out; False if it has been taken already."""
        parked = self._by_user.get(user_id, [])
        if work not in parked:
            return False
        parked.remove(work)
        self._count -= 1
        if not parked:
            del self._by_user[user_id]
        return True


class Timers:
    """Calls in order of their time; those of the same time in order of entry."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = itertools.count()

    def at(self, when_us: int, call: Callable[[], None]) -> None:
        """Calls `call` at the first `run_due` from `when_us` on."""
        heapq.heappush(self._heap, (when_us, next(self._sequence), call))

    def run_due(self, now_us: int) -> None:
        """Makes all calls that are due."""
        while self._heap and self._heap[0][0] <= now_us:
            heapq.heappop(self._heap)[2]()

    def next_in_us(self, now_us: int) -> int | None:
        """How long until the next call, 0 if it is due; None if there is none."""
        return max(0, self._heap[0][0] - now_us) if self._heap else None


class RecentIds:
    """The last `capacity` ids that were added. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self._capacity = capacity
        # A plain dict whose oldest are deleted is searched past all their places for the next one.
        self._ids: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, identity: str) -> bool:
        return identity in self._ids

    def add(self, identity: str) -> None:
        """Remembers the id as the newest, and forgets the oldest beyond the capacity."""
        self._ids[identity] = None
        self._ids.move_to_end(identity)
        if len(self._ids) > self._capacity:
            self._ids.popitem(last=False)


class DeviceCompletion:
    """One event. `poll` calls back once it is complete."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._callbacks: list[Callable[[], None]] = []

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback()` at once if the event is complete, else at the `poll` that finds it so."""
        if self._event.done():
            callback()
        else:
            self._callbacks.append(callback)

    def poll(self) -> bool:
        """Calls back if the event is complete; whether nobody waits any more."""
        if self._callbacks and self._event.done():
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()
        return not self._callbacks


class DeviceCompletions:
    """Of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._waiting: list[DeviceCompletion] = []

    def after_work(self) -> DeviceCompletion:
        """Completes with all work that the calling thread has given to its current stream."""
        self.poll()
        completion = DeviceCompletion(self._device.current_stream().record())
        self._waiting.append(completion)
        return completion

    def poll(self) -> None:
        """Calls back what is complete by now."""
        self._waiting = [each for each in self._waiting if not each.poll()]


class Outbox(Protocol):
    """Where answers go. Called on the device thread; must not block."""

    def ranked(self, work: RankingWork, outputs: RankOutputs) -> None: ...
    def expired(self, work: RankingWork) -> None: ...
    def failed(self, work: RankingWork, reason: FailureReason, detail: str) -> None: ...
    def job_done(self, received: Received, outcome: JobOutcome) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """Work that waits for a version of its user's history."""

    on_change: Callable[[], None]


@dataclass(slots=True, eq=False)
class Shared:
    """One executor's parts. Belongs to the device thread; only `post` may be called from others."""

    engine: Engine
    cache: PrefixCache
    spans: PrefixResolver
    corrector: Corrector
    settings: WorkerSettings
    admission_settings: AdmissionSettings
    admission: JobAdmission
    outbox: Outbox
    metrics: WorkerMetrics
    clock: Clock
    post: Callable[[Callable[[], None]], None]
    timers: Timers = field(default_factory=Timers)
    scheduler: Scheduler[PrefixWork | RankingWork] = field(init=False)
    parked: WaitQueue[Parked] = field(init=False)
    last_progress_us: int = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.admission_settings.preinfer_share, int(self.chunk_us))
        self.parked = WaitQueue(self.settings.parked_jobs_max)
        self.last_progress_us = self.now_us()

    @property
    def chunk_us(self) -> float:
        """The longest uninterrupted piece of pre-infer."""
        return self.settings.chunk_ms * 1000

    @property
    def skew_us(self) -> int:
        """Grace past a deadline before a request counts as expired."""
        return self.settings.max_clock_skew_ms * 1000

    @property
    def latency(self) -> LatencyModel:
        """Predictions as of now."""
        return self.corrector.model

    @property
    def chunking(self) -> Chunking:
        """How prefixes are cut."""
        return Chunking(
            self.chunk_us,
            self.settings.max_chunk_tokens,
            self.engine.geometry.page_tokens,
            in_one_piece=not self.engine.rules.chunks,
        )

    def full_us(self, prefix_tokens: int, scored_tokens: int) -> float:
        """Predicted time of full inference as it is done here: the pieces of the prefix, then ranking."""
        computed_us = self.chunking.duration_us(0, prefix_tokens, self.latency)
        return computed_us + self.latency.hit_us(prefix_tokens, scored_tokens)

    def prefix_work(self, span: ResolvedPrefix, base: Handle | None) -> PrefixWork:
        """The computation of what `base` lacks of the prefix. The handle is the work's from here on.

        Raises what the engine does when it looks the prefix up; the handle is released then.
        """
        try:
            inputs = self.engine.prefix_inputs(span.features, span.behaviours, query_time_ms=span.query_time_ms)
        except Exception:
            self.release(base)
            raise
        return PrefixWork(span, inputs, base.tokens if base is not None else 0, base=base)

    def release(self, handle: Handle | None) -> None:
        """Lets go of what a look-up found, if it found something."""
        if handle is not None:
            self.cache.release(handle)

    def is_current(self, span: ResolvedPrefix) -> bool:
        """Whether the span is cut for the model that serves now."""
        return span.revision == self.engine.revision

    def now_us(self) -> int:
        """Monotonic."""
        return self.clock.monotonic_us()

    def charge(self, work_class: WorkClass, duration_us: int, now_us: int) -> None:
        """Counts device time just used, for whom."""
        self.scheduler.charge(work_class, duration_us, now_us)
        self.metrics.device_time(work_class, duration_us)
        if work_class is WorkClass.RANKING:
            self.admission.count_ranking(duration_us)
        self.last_progress_us = now_us

    def time_left_us(self, work: RankingWork, now_us: int) -> int:
        """Time to the deadline, less the device time of what is more urgent (and of pre-infer's share of it)."""
        ahead_us = 0.0
        for other in self.scheduler.ranking:
            if other.latest_start_us <= work.latest_start_us:
                ahead_us += other.remaining_us if isinstance(other, PrefixWork) else other.predicted_us
        if ahead_us and len(self.scheduler.preinfer):
            ahead_us /= 1 - self.admission_settings.preinfer_share
        return int(work.answer_by_us - now_us - ahead_us)

    def reload_more(
        self, span: ResolvedPrefix, handle: Handle | None, deadline_us: int, rank_us: float = 0.0
    ) -> PendingPrefix | None:
        """Starts a reload if DRAM holds more of the prefix than HBM, and copying it beats computing it.

        A ranking that takes `rank_us` may go on beside the copy.
        """
        in_hbm = handle.behaviours if handle is not None else 0
        in_dram = self.cache.peek(span.key).dram_behaviours
        if in_dram <= in_hbm:
            return None
        layout = self.engine.layout
        cached, stored = (layout.tokens(in_hbm) if in_hbm else 0), layout.tokens(in_dram)
        saved_us = self.chunking.duration_us(cached, stored, self.latency)
        pending = self.cache.transfers.start_reload(span.key, deadline_us, self.now_us(), saved_us, rank_us)
        return pending if isinstance(pending, PendingPrefix) else None

    def park(self, user_id: str, until_us: int, on_change: Callable[[], None], on_timeout: Callable[[], None]) -> bool:
        """Waits for the user's history to change, at most until then. False if there is no time or no place."""
        parked = Parked(on_change)
        if until_us <= self.now_us() or not self.parked.park(user_id, parked):
            return False

        def over() -> None:
            if self.parked.take(user_id, parked):
                on_timeout()

        self.timers.at(until_us, over)
        return True
