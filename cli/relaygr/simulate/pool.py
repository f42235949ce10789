"""Workers that take the pre-infer jobs of owners without the prefix, in virtual time.

A worker takes a job only with a free slot, and the oldest first. The verdicts are the product's: a job that the workers
have no time for goes to its owner. The slot is taken until the store has the K,V. Then the owner is told: it gets the
job, and fetches what the store has.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import simpy

from relaygr.schemas.messages import PreInferJob, PreInferSlots, WorkerStatus
from relaygr.simulate.device import EPOCH_US
from relaygr.simulate.store import SharedStore
from relaygr.simulate.worker import SimulatedWorker
from relaygr.worker.executor.work import JobOutcome
from relaygr.worker.preinfer.decision import MOST_TRIES, Slowness, Verdict, decide

_PREPARED: Final = (JobOutcome.COMPUTED, JobOutcome.ALREADY_CACHED, JobOutcome.RELOADED)


@dataclass(frozen=True, slots=True)
class PoolJob:
    """A job of an impression, and the partition of its owner."""

    number: int
    job: PreInferJob
    partition: int

    @property
    def behaviours(self) -> int:
        return self.job.history_length or 0


class PreInferWorkers:
    """See the module. `tell` gets each job whose K,V the store has, and `pass_on` each that no worker has time for."""

    def __init__(
        self,
        env: simpy.Environment,
        store: SharedStore,
        make: Callable[..., SimulatedWorker],
        count: int,
        slots: int,
        tell: Callable[[PoolJob], None],
        pass_on: Callable[[PoolJob], None],
    ) -> None:
        """`make`: makes a worker of this id, with `on_job`. `slots`: of each worker."""
        self._env, self._store, self._tell, self._pass_on = env, store, tell, pass_on
        self._waiting: deque[PoolJob] = deque()
        self._taken: dict[int, tuple[PoolJob, float, float]] = {}
        """Jobs under way, the predicted time of each, and when it was taken."""
        self._slots = slots
        self._free, self._accepted, self._refused = [slots] * count, [0] * count, [0] * count
        self._slowness = [Slowness() for _ in range(count)]
        self.jobs: Counter[str] = Counter()
        self.workers = [make(f"pool-{place:05d}", on_job=partial(self._ended, place)) for place in range(count)]

    def statuses(self) -> list[WorkerStatus]:
        """What the workers would publish now."""
        slots = [
            PreInferSlots(self._slots, free, accepted, refused)
            for free, accepted, refused in zip(self._free, self._accepted, self._refused, strict=True)
        ]
        return [replace(each.status(), pre_infer=own) for each, own in zip(self.workers, slots, strict=True)]

    def offer(self, job: PoolJob) -> None:
        """A job arrived."""
        self._waiting.append(job)
        self._take()

    def _take(self) -> None:
        while self._waiting and any(self._free):
            self._serve(self._waiting.popleft())

    def _serve(self, job: PoolJob) -> None:
        """Offers the job to the worker with the most free slots, and, if that gives it back, to the next one."""
        places = sorted((place for place, free in enumerate(self._free) if free), key=lambda place: -self._free[place])
        for tries, place in enumerate(places[:MOST_TRIES], 1):
            predicted_us, verdict = self._judge(job, place, may_release=tries < min(MOST_TRIES, len(places)))
            if verdict is Verdict.ACCEPT:
                self._free[place] -= 1
                self._accepted[place] += 1
                self._taken[job.number] = job, predicted_us, self._env.now
                return self.workers[place].receive_job(job.number, job.job, job.partition)
            if verdict is not Verdict.RELEASE:
                self._refused[place] += 1
                self.jobs[verdict.value] += 1
                return self._pass_on(job) if verdict is Verdict.PASS_ON else None
        return None

    def _judge(self, job: PoolJob, place: int, *, may_release: bool) -> tuple[float, Verdict]:
        """The predicted time of the job with those before it, and the verdict, as in `SlotLoop`."""
        now_us, times, executor = int(self._env.now), self._store.times, self.workers[place].executor
        compute_us, wait_us = times.computing_us(job.behaviours), executor.preinfer_backlog_us
        factor = self._slowness[place].factor(now_us)
        needed_us, due_us = (
            factor * compute_us + times.fetch_us(job.behaviours),
            job.job.expected_ranking_at_us - EPOCH_US,
        )
        return wait_us + compute_us, decide(now_us, due_us, needed_us, factor * wait_us, may_release=may_release)

    def _ended(self, place: int, number: int, outcome: JobOutcome) -> None:
        """The worker's clock may be ahead of the simulation's."""
        (job, predicted_us, began_us), times = self._taken.pop(number), self._store.times
        self.jobs[outcome.value] += 1
        ends_us = float(self.workers[place].now_us)
        if outcome in _PREPARED and times.pays(job.behaviours):
            ends_us += times.fetch_us(job.behaviours, min(self._store.stored(job.job.user_id), job.behaviours))

        def end() -> None:
            self._free[place] += 1
            if outcome is JobOutcome.COMPUTED:
                self._slowness[place].observe(predicted_us, ends_us - began_us, int(self._env.now))
            if outcome in _PREPARED:
                if times.pays(job.behaviours):
                    self._store.put(job.job.user_id, job.behaviours)
                self.workers[place].cache.end_lease(job.job.user_id, job.job.request_id)
                self._tell(job)
            self._take()

        self._env.timeout(max(0.0, ends_us - self._env.now)).callbacks.append(lambda _: end())
