"""The executor's loop: what was posted, what is due, then one piece of device work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from relaygr.admission.latency import Corrector, LatencyModel
from relaygr.admission.settings import AdmissionSettings
from relaygr.runtime.clock import Clock
from relaygr.worker.cache import PageCopy, PrefixCache
from relaygr.worker.executor.admission import JobAdmission
from relaygr.worker.executor.batches import BatchFlow
from relaygr.worker.executor.context import DeviceCompletions, Outbox, Shared
from relaygr.worker.executor.jobs import JobFlow
from relaygr.worker.executor.order import WorkClass
from relaygr.worker.executor.prefixes import PrefixFlow
from relaygr.worker.executor.requests import RankingFlow
from relaygr.worker.executor.resolver import HistoryReader, PrefixResolver
from relaygr.worker.executor.work import JobWork, RankingWork
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.interface import Engine
from relaygr.worker.settings import WorkerSettings

LEASE_CHECK_INTERVAL_US = 100_000


class Executor:
    """One worker's device work. Only `post` and the properties may be used from other threads."""

    def __init__(
        self,
        engine: Engine,
        cache: PrefixCache,
        scratch_pages: NDArray[np.int32],
        histories: HistoryReader,
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
        self._mailbox: deque[Callable[[], None]] = deque()
        self.mail_arrived = threading.Event()
        self._shared = Shared(
            engine=engine,
            cache=cache,
            spans=PrefixResolver(histories, engine, settings.anchor_behaviours),
            corrector=corrector,
            settings=settings,
            admission_settings=admission_settings,
            admission=admission,
            outbox=outbox,
            metrics=metrics,
            clock=clock,
            post=self.post,
        )
        self._prefixes = PrefixFlow(self._shared, scratch_pages, copy_page)
        self._requests = RankingFlow(self._shared, self._prefixes)
        self._batches = BatchFlow(self._shared, self._prefixes.pieces, self._requests)
        self._jobs = JobFlow(self._shared, self._prefixes, self._requests.answered)
        self._prefixes.connect(self._requests, self._jobs, self._batches)
        self._completions = DeviceCompletions(engine.device)
        self._expire_leases()

    # -- from any thread ---------------------------------------------------------------------------

    def post(self, call: Callable[[], None]) -> None:
        """Runs `call` on the device thread, before its next piece of work."""
        self._mailbox.append(call)
        self.mail_arrived.set()

    @property
    def has_mail(self) -> bool:
        """Whether something was posted that has not run."""
        return bool(self._mailbox)

    @property
    def last_progress_us(self) -> int:
        """When the loop last moved, monotonic."""
        return self._shared.last_progress_us

    @property
    def engine(self) -> Engine:
        """The model that answers now."""
        return self._shared.engine

    @property
    def ranking_outstanding(self) -> int:
        """Ranking requests that were taken and not answered."""
        return self._requests.outstanding

    @property
    def ranking_outstanding_bytes(self) -> int:
        """About what those hold."""
        return self._requests.outstanding_bytes

    @property
    def preinfer_backlog_us(self) -> int:
        """Predicted device time of the pre-infer work that is queued."""
        return self._prefixes.preinfer_backlog_us

    @property
    def latency_of_prefixes(self) -> LatencyModel:
        """Predictions as of now, for who sees prefixes only whole: the trigger. From any thread."""
        shared = self._shared
        longest = shared.engine.layout.tokens(shared.engine.limits.max_prefix_behaviours)
        return shared.chunking.for_whole_prefixes(shared.latency, longest)

    # -- the device thread -------------------------------------------------------------------------

    def step(self) -> int | None:
        """One round. Returns how long nothing will happen by itself, µs: 0 after device work, None for ever."""
        while self._mailbox:
            self._mailbox.popleft()()
        shared = self._shared
        now_us = shared.last_progress_us = shared.now_us()
        shared.timers.run_due(now_us)
        # All of the above went on beside the piece that the device was given last.
        self._prefixes.pieces.settle()
        now_us = shared.now_us()
        work = shared.scheduler.pick(now_us)
        if work is None:
            return shared.timers.next_in_us(now_us)
        if isinstance(work, RankingWork):
            self._batches.rank_batch(now_us)
        elif work.work_class is WorkClass.RANKING or not self._batches.rank_beside(now_us):
            self._prefixes.pieces.run(work, now_us)
        return 0

    def submit_ranking(self, work: RankingWork) -> None:
        """Takes a ranking request; its answer goes to the outbox."""
        self._requests.submit(work)

    def submit_job(self, work: JobWork) -> None:
        """Takes a pre-infer job; its outcome goes to the outbox."""
        self._jobs.submit(work)

    def histories_changed(self, user_ids: Iterable[str]) -> None:
        """Wakes what waits for these users' histories."""
        for user_id in user_ids:
            for parked in self._shared.parked.take_all(user_id):
                parked.on_change()

    def user_deleted(self, user_id: str) -> None:
        """A tombstone: what is cached of this user goes, and what is about to be is not kept."""
        self._shared.cache.invalidate_user(user_id)
        self._prefixes.forget_user(user_id)

    def serve_with(self, engine: Engine) -> None:
        """From now on this model, bound to the same arena, answers. Old prefixes no longer match.

        What is in flight begins again: every answer is of one model alone. The latency model stays, and is corrected
        as ever. Raises ValueError for a model whose K,V do not fit the pages and the tiers' books.
        """
        shared = self._shared
        now = shared.engine
        if (engine.geometry, engine.layout) != (now.geometry, now.layout):
            raise ValueError("the new model's K,V have another form than the arena")
        self._prefixes.pieces.settle()
        shared.engine, shared.spans = engine, shared.spans.for_engine(engine)
        shared.cache.admit_only(engine.namespace)
        for work in [*shared.scheduler.ranking, *shared.scheduler.preinfer]:
            if isinstance(work, RankingWork):
                shared.scheduler.remove(work)
                self._requests.start_over(work)
            else:
                self._prefixes.start_over(work)

    def _expire_leases(self) -> None:
        now_us = self._shared.now_us()
        self._shared.cache.expire_leases(now_us)
        self._shared.cache.expire_prefixes(now_us)
        self._shared.cache.revoke_overdue(now_us, self._completions.after_work())
        self._shared.timers.at(now_us + LEASE_CHECK_INTERVAL_US, self._expire_leases)
