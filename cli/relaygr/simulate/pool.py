"""Workers that take the pre-infer jobs of owners without the prefix, in virtual time.

A worker takes a job only with a free slot, and the oldest first. A job that cannot end in time is dropped. The slot is
taken until the store has the K,V. Then the owner is told: it gets the job, and fetches what the store has.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import simpy

from relaygr.schemas.messages import PreInferJob
from relaygr.simulate.device import EPOCH_US
from relaygr.simulate.store import SharedStore
from relaygr.simulate.worker import SimulatedWorker
from relaygr.worker.executor.work import JobOutcome

SLOTS: Final = 2
"""Jobs at once: the K,V of one are written while the device computes the other."""
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
    """See the module. `tell` gets each job whose K,V the store has."""

    def __init__(
        self,
        env: simpy.Environment,
        store: SharedStore,
        make: Callable[..., SimulatedWorker],
        count: int,
        tell: Callable[[PoolJob], None],
    ) -> None:
        """`make`: makes a worker of this id, with `on_job`."""
        self._env, self._store, self._tell = env, store, tell
        self._waiting: deque[PoolJob] = deque()
        self._taken: dict[int, PoolJob] = {}
        self._free = [SLOTS] * count
        self.jobs: Counter[str] = Counter()
        self.workers = [make(f"pool-{place:05d}", on_job=partial(self._ended, place)) for place in range(count)]

    def offer(self, job: PoolJob) -> None:
        """A job arrived."""
        self._waiting.append(job)
        self._take()

    def _take(self) -> None:
        while self._waiting and any(self._free):
            job, place = self._waiting.popleft(), self._free.index(max(self._free))
            if self._ends_us(job) > job.job.expires_at_us - EPOCH_US:
                self.jobs[JobOutcome.EXPIRED.value] += 1
                continue
            self._free[place] -= 1
            self._taken[job.number] = job
            self.workers[place].receive_job(job.number, job.job, job.partition)

    def _ends_us(self, job: PoolJob) -> float:
        """When the owner could have the K,V."""
        times, stored = self._store.times, self._store.stored(job.job.user_id)
        moved_us = times.fetch_us(stored) + times.fetch_us(job.behaviours, stored) + times.fetch_us(job.behaviours)
        return self._env.now + times.computing_us(job.behaviours, stored) + moved_us

    def _ended(self, place: int, number: int, outcome: JobOutcome) -> None:
        """The worker's clock may be ahead of the simulation's."""
        job, times = self._taken.pop(number), self._store.times
        self.jobs[outcome.value] += 1
        ends_us = float(self.workers[place].now_us)
        if outcome in _PREPARED and times.pays(job.behaviours):
            ends_us += times.fetch_us(job.behaviours, min(self._store.stored(job.job.user_id), job.behaviours))

        def end() -> None:
            self._free[place] += 1
            if outcome in _PREPARED:
                if times.pays(job.behaviours):
                    self._store.put(job.job.user_id, job.behaviours)
                self.workers[place].cache.end_lease(job.job.user_id, job.job.request_id)
                self._tell(job)
            self._take()

        self._env.timeout(max(0.0, ends_us - self._env.now)).callbacks.append(lambda _: end())
