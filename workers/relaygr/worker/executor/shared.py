"""What the three flows of the executor share: the device's parts, its clock, and the accounts of its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from relaygr.admission.latency import Corrector, LatencyModel
from relaygr.admission.settings import AdmissionSettings
from relaygr.consumer import Received
from relaygr.runtime.clock import Clock
from relaygr.schemas.messages import FailureReason
from relaygr.worker.admission import JobAdmission
from relaygr.worker.cache import Handle, PendingPrefix, PrefixCache
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.interface import Engine, RankOutputs
from relaygr.worker.parking import ParkingLot
from relaygr.worker.scheduler.chunks import Chunking
from relaygr.worker.scheduler.order import Scheduler, WorkClass
from relaygr.worker.settings import WorkerSettings
from relaygr.worker.spans import SpanResolver
from relaygr.worker.timers import Timers
from relaygr.worker.work import JobOutcome, PrefixSpan, PrefixWork, RankingWork


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
    spans: SpanResolver
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
    parked: ParkingLot[Parked] = field(init=False)
    last_progress_us: int = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.admission_settings.preinfer_share, int(self.chunk_us))
        self.parked = ParkingLot(self.settings.parked_jobs_max)
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

    def prefix_work(self, span: PrefixSpan, base: Handle | None) -> PrefixWork:
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

    def is_current(self, span: PrefixSpan) -> bool:
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
        self, span: PrefixSpan, handle: Handle | None, deadline_us: int, rank_us: float = 0.0
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
        pending = self.cache.start_reload(span.key, deadline_us, self.now_us(), saved_us, rank_us)
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
