"""One worker: the product's executor, cache and policies in virtual time.

Its device thread is a chain of events: a step of the executor, then the next when the time that it took is over, or
when a message or a timer wakes it up. Messages that arrive during a step wait in the mailbox. The poll thread is free:
it takes a message when it arrives, and refuses at once what cannot be answered in time, as `WorkerHandler` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import simpy
from prometheus_client import CollectorRegistry

from relaygr.admission.corrector import Corrector
from relaygr.consumer.interface import Received, Token
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.ended import Ended, Reason, in_simulation
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import PreInferJob, RankingRequest, WorkerState, WorkerStatus
from relaygr.simulate.case import Case
from relaygr.simulate.device import (
    EPOCH_US,
    SharedHistories,
    SimulatedDevice,
    SimulatedEngine,
    SimulatedLink,
)
from relaygr.simulate.store import SharedStore, SimulatedPool
from relaygr.simulate.times import Draws, MeasuredTimes
from relaygr.worker.cache import (
    CacheConfig,
    Hit,
    Miss,
    MissReason,
    PendingPrefix,
    PrefixCache,
    PrefixKey,
    Purpose,
    Tier,
)
from relaygr.worker.cache.policies import TierPolicies
from relaygr.worker.executor.device_record import DeviceRecord
from relaygr.worker.executor.executor import Executor
from relaygr.worker.executor.job_admission import JobAdmission
from relaygr.worker.executor.parts import ExecutorParts
from relaygr.worker.executor.schedulable import WorkClass
from relaygr.worker.executor.status import status_of
from relaygr.worker.executor.work import JobOutcome, JobWork, RankingWork, Unranked
from relaygr.worker.history.resolve import StoredHistory
from relaygr.worker.latest_answers import QueueWaits
from relaygr.worker.metrics import WorkerMetrics

_REFUSED: Final = in_simulation(Ended.FAILED, Reason.OVERLOADED)
_JOBS, _RANKINGS = "preinfer", "ranking"
_EPOCH: Final = 1
"""The partitions never move."""


OnRanked = Callable[[int, int, str], None]
"""The number of the impression, the time of its result in µs, and its end: one of `ENDINGS`."""
OnJob = Callable[[int, JobOutcome], None]
OnLookUp = Callable[[Purpose, str, Tier | None], None]
"""The purpose of a look-up in the cache, its user, and where it found the prefix or its beginning."""


@dataclass(slots=True)
class _Histories:
    """The histories as one worker reads them. `is_loading` takes the time of a look-up: the executor calls it in each,
    also where it reads no history because the request's job has read it.
    """

    shared: SharedHistories
    clock: ManualClock
    look_up_us: int

    def get(self, user_id: str) -> StoredHistory | None:
        return self.shared.get(user_id)

    def is_loading(self, partition: int) -> bool:  # noqa: ARG002
        self.clock.now_us += self.look_up_us
        return False

    def is_settling(self, partition: int) -> bool:  # noqa: ARG002
        return False

    def deleted_at_ms(self, user_id: str) -> int:  # noqa: ARG002
        return 0


class _Results:
    """In the place of `ResultWriter`."""

    def __init__(self, clock: ManualClock, times: MeasuredTimes, on_ranked: OnRanked, on_job: OnJob) -> None:
        self.waits = QueueWaits()
        self.unsent = ()
        self._clock, self._on_ranked, self._on_job = clock, on_ranked, on_job
        self._answer_us, self._refuse_us = round(times.answer_us), round(times.refuse_us)

    def ranked(self, work: RankingWork, outputs: object) -> bool:  # noqa: ARG002
        self._clock.now_us += self._answer_us
        started_us = work.started_us if work.started_us is not None else self._clock.now_us
        self.waits.observe(max(0, started_us - work.received.received_us))
        self._on_ranked(work.received.offset, self._clock.now_us, work.path.value)
        return True

    def count_ranked(self, work: RankingWork) -> None:
        """Does nothing: there are no metrics."""

    def unranked(self, reply: RankingHeaders, received: Received, end: Unranked, work: RankingWork) -> None:  # noqa: ARG002
        self._clock.now_us += self._refuse_us
        self._on_ranked(received.offset, self._clock.now_us, in_simulation(end.ended, end.reason))

    def send(self) -> None:
        """Does nothing: a simulated result is sent when it is written."""

    def job_done(self, received: Received, outcome: JobOutcome, work: JobWork | None = None) -> None:  # noqa: ARG002
        self._on_job(received.offset, outcome)


class _WatchedCache(PrefixCache):
    """Passes on what each look-up found."""

    def __init__(self, config: CacheConfig, mover: SimulatedLink | None, on_look_up: OnLookUp) -> None:
        super().__init__(config, mover)
        self._on_look_up = on_look_up

    def acquire(
        self,
        key: PrefixKey,
        now_us: int,
        join: bool = True,
        purpose: Purpose = Purpose.RANKING,
        arriving: int | None = None,
    ) -> Hit | PendingPrefix | Miss:
        found = super().acquire(key, now_us, join, purpose, arriving)
        in_dram = isinstance(found, Miss) and found.reason is MissReason.IN_DRAM
        tier = Tier.HBM if isinstance(found, Hit) else Tier.DRAM if in_dram else None
        self._on_look_up(purpose, key.user_id, tier)
        return found

    def count_look_up(self, key: PrefixKey, now_us: int) -> Tier | None:
        tier = super().count_look_up(key, now_us)
        self._on_look_up(Purpose.RANKING, key.user_id, tier)
        return tier


class SimulatedWorker:
    """See the module. `on_ranked` and `on_job` may name times that the simulation has not reached yet."""

    def __init__(
        self,
        env: simpy.Environment,
        worker_id: str,
        partitions: frozenset[int],
        case: Case,
        histories: SharedHistories,
        random: np.random.Generator,
        on_ranked: OnRanked,
        on_job: OnJob,
        on_look_up: OnLookUp,
        store: SharedStore | None = None,
        admission: type[JobAdmission] = JobAdmission,
    ) -> None:
        self.worker_id = worker_id
        self.partitions = partitions
        self.thread_us = 0
        """Time in which the device thread was busy: device work, and the worker's own."""
        self._env, self._case, self._on_ranked = env, case, on_ranked
        self._ticket, self._is_idle = 0, True
        settings, model, times = case.settings.worker, case.model, case.times
        clock = self._clock = ManualClock(int(env.now), EPOCH_US + int(env.now))
        self.device = SimulatedDevice(clock, model.is_cpu)
        engine: Any = SimulatedEngine(
            model, self.device, Draws(times.hit_noise, random), Draws(times.pre_noise, random)
        )
        kv = model.geometry.kv
        hbm_pages = int(settings.hbm_bytes) // kv.page_bytes
        dram_pages = int(settings.dram_bytes) // model.geometry.page_bytes
        policies = TierPolicies(settings.hbm_policy, settings.dram_policy)
        self._link = SimulatedLink(model.geometry.page_bytes, model.latency, clock)
        config = CacheConfig(model.geometry, model.layout, hbm_pages, dram_pages, policies)
        self.cache = _WatchedCache(config, self._link if dram_pages else None, on_look_up)
        self._active_since_us = EPOCH_US + int(env.now)
        corrector = Corrector(model.latency)
        self._results = _Results(clock, times, on_ranked, on_job)
        longest = kv.pages_for(model.layout.tokens(model.limits.max_prefix_behaviours))
        self._registry = CollectorRegistry()
        results: Any = self._results
        self._engine: SimulatedEngine = engine
        pool: Any = None
        if store is not None:
            pool = SimulatedPool(env, store, self.cache, clock, settings.pool, self._wake)
        self.executor = Executor(
            engine,
            ExecutorParts(
                cache=self.cache,
                scratch_pages=np.arange(hbm_pages, hbm_pages + longest, dtype=np.int32),
                copy_page=lambda _copy: None,
                histories=_Histories(histories, clock, round(times.look_up_us)),
                corrector=corrector,
                settings=settings,
                admission_settings=case.settings.admission,
                admission=admission(case.settings.admission, int(settings.hbm_bytes), kv, clock),
                results=results,
                device_record=DeviceRecord(),
                metrics=WorkerMetrics(self._registry),
                clock=clock,
                pool=pool,
            ),
        )
        self._schedule(0)

    # -- the poll thread ---------------------------------------------------------------------------

    def receive_job(self, number: int, job: PreInferJob, partition: int) -> None:
        """Takes a job that arrived now."""
        now_us = int(self._env.now)
        received = self._received(_JOBS, number, partition, now_us)
        wall_us = EPOCH_US + now_us
        if wall_us > job.expires_at_us:
            self._results.job_done(received, JobOutcome.EXPIRED)
            return
        work = JobWork(job, received, job.expected_ranking_at_us - EPOCH_US, job.expires_at_us - EPOCH_US)
        if not self.executor.take_job(work):
            self._results.job_done(received, JobOutcome.SHED)
        self._wake()

    def receive_ranking(self, number: int, request: RankingRequest, partition: int) -> None:
        """Takes a ranking request that arrived now."""
        now_us = int(self._env.now)
        received = self._received(_RANKINGS, number, partition, now_us)
        settings = self._case.settings.worker
        deadline_us = request.deadline_us - EPOCH_US + round(settings.grace_ms * 1000)
        answer_by_us = deadline_us - round(settings.reply_margin_ms * 1000)
        sent_us = request.sent_at_us - EPOCH_US
        if now_us > deadline_us + settings.max_clock_skew_ms * 1000:
            return self._refuse(number, request, now_us, in_simulation(Ended.EXPIRED))
        if self.executor.backlog.is_busy and now_us <= deadline_us:
            user_id, request_id = request.user_id, request.request_id
            if self.executor.is_hopeless(user_id, request_id, answer_by_us, now_us, sent_us):
                return self._refuse(number, request, now_us, _REFUSED)
        reply = RankingHeaders(request.request_id, "simulated", "results", 0, request.deadline_us)
        work = RankingWork(request, reply, received, EPOCH_US + now_us, deadline_us, answer_by_us)
        if not self.executor.take_ranking(work):
            return self._on_ranked(number, now_us, _REFUSED)
        return self._wake()

    def _refuse(self, number: int, request: RankingRequest, now_us: int, ending: str) -> None:
        self.executor.note_no_time(request.user_id, request.request_id)
        self._on_ranked(number, now_us + round(self._case.times.refuse_us), ending)
        self._wake()

    def _received(self, topic: str, number: int, partition: int, now_us: int) -> Received:
        token = Token(topic, partition, number, 0)
        return Received(topic, partition, number, None, None, [], now_us, _EPOCH, token, None)  # type: ignore[arg-type]

    # -- the device thread -------------------------------------------------------------------------

    def warm_up(self, users: list[str]) -> None:
        """Offers these users to the warm-up."""
        self.executor.post(self.executor.begin_warm_up)
        self.executor.post(partial(self.executor.offer_warm_ups, users))
        self._wake()

    def take_new_weights(self, users: list[str]) -> None:
        """Replaces the model, which empties the cache, and offers these users to the warm-up."""
        self.executor.post(partial(self._replace_model, users))
        self._wake()

    def _replace_model(self, users: list[str]) -> None:
        engine: Any = self._engine.with_new_weights()
        self._engine = engine
        self.executor.serve_with(engine)
        self.cache.keep_only(engine.namespace)
        if users:
            self.executor.begin_warm_up()
            self.executor.offer_warm_ups(users)

    def histories_changed(self, users: list[str]) -> None:
        """The store has new behaviours of these users."""
        self.executor.post(partial(self.executor.histories_changed, users))
        self._wake()

    def _wake(self) -> None:
        if self._is_idle:
            self._schedule(0)

    def _schedule(self, delay_us: float, is_idle: bool = False) -> None:
        self._ticket += 1
        self._is_idle = is_idle
        timeout = self._env.timeout(delay_us)
        timeout.callbacks.append(partial(self._step, self._ticket))

    def _step(self, ticket: int, _event: simpy.Event) -> None:
        if ticket != self._ticket:
            return
        clock, now_us = self._clock, int(self._env.now)
        clock.now_us = max(clock.now_us, now_us)
        self._link.advance(clock.now_us)
        idle_us: int | None = 0
        while clock.now_us == now_us and idle_us == 0:
            idle_us = self.executor.step()
        if clock.now_us > now_us:
            self.thread_us += clock.now_us - now_us
            return self._schedule(clock.now_us - now_us)
        ends_us = self._link.next_end_us
        waits = [each for each in (idle_us, None if ends_us is None else ends_us - now_us) if each is not None]
        if waits:
            return self._schedule(max(1, min(waits)), is_idle=True)
        self._ticket += 1
        self._is_idle = True
        return None

    # -- figures -----------------------------------------------------------------------------------

    @property
    def now_us(self) -> int:
        """Until when the device thread has worked. It may lie ahead of the simulation's time."""
        return self._clock.now_us

    def device_s(self) -> float:
        """Device time of all work."""
        name = "relaygr_worker_device_seconds_total"
        return sum(self._registry.get_sample_value(name, {"work_class": each.value}) or 0.0 for each in WorkClass)

    def status(self) -> WorkerStatus:
        """The status that the worker would publish now."""
        return status_of(
            self.executor,
            self.cache.stats(),
            self._case.settings.worker,
            worker_id=self.worker_id,
            state=WorkerState.READY,
            written_at_us=EPOCH_US + int(self._env.now),
            assignment_epoch=_EPOCH,
            partitions=self.partitions,
            ranking_queue_p99_us=self._results.waits.p99_us(),
            active_since_us=self._active_since_us,
        )
