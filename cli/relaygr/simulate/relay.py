"""The relay of one worker, or of several, as a discrete-event model: gateway, trigger, hops over Kafka, and workers.

    retrieval event --hop--> trigger --hop--> worker: pre-infer job
    ranking request ---------hop-----------> worker --hop--> result

A worker owns some partitions of the fleet, and shares nothing with the others, but for a pool. The time is in µs.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import simpy

from relaygr.runtime.errors import RelayError
from relaygr.schemas.ended import Ended, in_simulation
from relaygr.schemas.messages import Path, RankingRequest, RetrievalEvent
from relaygr.simulate.case import Case
from relaygr.simulate.device import EPOCH_US, SharedHistories, behaviours_of
from relaygr.simulate.figures import CODE, NO_LATENCY, PartOutcome, Requests
from relaygr.simulate.pool import PoolJob, PreInferWorkers
from relaygr.simulate.store import SharedStore, StoreTimes
from relaygr.simulate.times import Draws
from relaygr.simulate.worker import SimulatedWorker
from relaygr.traffic.schedule import Impression
from relaygr.trigger.fleet import Fleet
from relaygr.trigger.handler import EventHandler, job_of
from relaygr.worker.cache import Purpose, Tier
from relaygr.worker.executor.job_admission import SlotAdmission
from relaygr.worker.executor.work import JobOutcome
from relaygr.worker.settings import FollowBehaviours

_DRAIN_S: Final = 3.0
_OPEN: Final = 255


@dataclass(frozen=True, slots=True)
class _Used:
    """What the worker has used up to a time."""

    device_s: float
    thread_s: float


class _TriggerClock:
    """The trigger works in no time: its clock is that of the simulation."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env

    def monotonic_us(self) -> int:
        return int(self._env.now)

    def wall_us(self) -> int:
        return EPOCH_US + int(self._env.now)


class RelaySimulation:
    """One worker of a fleet, which owns `partitions`; or all workers, which own these parts of them."""

    def __init__(self, case: Case, partitions: range, owned: Sequence[range] = ()) -> None:
        self._case = case
        self._env = simpy.Environment()
        self._part = case.demand.part(frozenset(partitions))
        traffic = self._traffic = case.demand.traffic
        self._histories = SharedHistories(traffic.history_max + traffic.suffix)
        random = np.random.default_rng((case.demand.seed, 5, partitions.start))
        self._hops = Draws(case.times.hop_us, random)
        self._suffix = behaviours_of(traffic.suffix)
        self._candidates = np.zeros(traffic.candidates, "<i8")
        settings = case.settings
        self._fleet = Fleet(settings.trigger.status_stale_ms)
        self._handler = EventHandler(
            settings.trigger, settings.admission, self._fleet, case.demand.partitions, _TriggerClock(self._env),
            scenarios=case.scenarios,
        )  # fmt: skip
        self._handler.reassign(frozenset(partitions))
        self._budget_us = traffic.budget_ms * 1000
        self._ranking_us: list[int] = []
        self._hops_us: list[float] = []
        """The one hop of each request, there and back."""
        self._latencies_us: list[int] = []
        self._endings = bytearray()
        self._has_job = bytearray()
        """Whether a job was sent for each request."""
        self._jobs: Counter[str] = Counter()
        self._told: set[int] = set()
        """Jobs of the pool that their owners were told of: the pool counts them."""
        self._found: Counter[str] = Counter()
        self._prepared: Counter[str] = Counter()
        self._used_before = self._used_after = _Used(0.0, 0.0)
        warms_up = settings.worker.warm_up_users and settings.worker.reuse_prefixes
        self._begins_us = round(traffic.settle_s * 1e6) if warms_up else 0
        self._ends_us = self._begins_us + traffic.duration_s * 1e6
        if case.refresh_s is not None and case.refresh_s * 1e6 >= self._ends_us:
            raise RelayError(
                f"--refresh {case.refresh_s:g}: no weights change within {self._ends_us / 1e6:g} s: raise --seconds."
            )
        pool = case.pool
        store = self._store = None if pool is None else SharedStore(StoreTimes(case.model, pool.us_per_byte))
        make: Any = partial(
            SimulatedWorker,
            self._env,
            case=case,
            histories=self._histories,
            random=random,
            on_ranked=self._on_ranked,
            store=store,
        )
        owner = partial(make, on_job=self._on_job, on_look_up=self._on_look_up)
        self._owners: list[SimulatedWorker] = [
            owner(f"worker-{each.start:05d}", frozenset(each)) for each in owned or [partitions]
        ]
        self._owner_of = {number: owner for owner in self._owners for number in owner.partitions}
        self._pool: PreInferWorkers | None = None
        if pool is not None and store is not None and pool.workers:
            in_pool = partial(make, partitions=frozenset(), on_look_up=_ignore, admission=SlotAdmission)
            pass_on = partial(self._after_hop, self._tell)
            slots = settings.worker.pre_infer_slots
            self._pool = PreInferWorkers(self._env, store, in_pool, pool.workers, slots, self._stored, pass_on)
        self._workers = [*self._owners, *(self._pool.workers if self._pool is not None else ())]
        self._take_statuses()

    def run(self) -> PartOutcome:
        """Plays the impressions. A part whose partitions have no user has none."""
        began_s = time.process_time()
        env = self._env
        self._warm_up()
        if self._case.relay:
            # Only the trigger reads statuses.
            env.process(self._report_statuses())
        if self._case.refresh_s is not None:
            env.process(self._refresh(self._case.refresh_s))
        cold_us = self._begins_us + self._case.demand.cold_s * 1e6
        self._after(cold_us, self._begin_counting)
        self._after(self._ends_us, self._end_counting)
        ended = env.process(self._play())
        env.run(until=ended)
        return self._outcome(cold_us, time.process_time() - began_s)

    # -- the gateway -------------------------------------------------------------------------------

    def _play(self) -> Generator[simpy.Event, None, None]:
        env, latest_us = self._env, 0
        played = self._part.impressions
        if self._case.settings.worker.follow_behaviours is not FollowBehaviours.OFF:
            known = list(played)
            played = iter(known)
            env.process(self._play_behaviours(self._behaviours(known)))
        for impression in played:
            wait_us = self._begins_us + impression.retrieval_us - env.now
            if wait_us > 0:
                yield env.timeout(wait_us)
            latest_us = max(latest_us, self._begin(impression))
        yield env.timeout(max(0, latest_us - env.now, self._ends_us - env.now))
        yield env.timeout(self._budget_us + _DRAIN_S * 1e6)

    def _begin(self, impression: Impression) -> int:
        """Publishes the history and the retrieval event. Returns the time of the ranking request."""
        env, traffic = self._env, self._traffic
        number, user_id = len(self._endings), self._part.user_id(impression.user)
        self._endings.append(_OPEN)
        self._has_job.append(False)
        self._latencies_us.append(NO_LATENCY)
        # The last one in the order of the dictionary is the last one who came: `_refresh` warms up for those.
        before, length = self._histories.lengths.pop(user_id, 0), impression.history_length
        self._histories.lengths[user_id] = length
        partition = self._part.partition_of[impression.user]
        owner = self._owner_of[partition]
        if length < before:
            if self._store is not None:
                self._store.behaviours.pop(user_id, None)
            owner.executor.post(partial(owner.executor.user_deleted, user_id))
        version = self._histories.version(length)
        now_us = int(env.now)
        request_id = str(number)
        if self._case.relay:
            wall_us = EPOCH_US + now_us
            event = RetrievalEvent(
                request_id,
                user_id,
                wall_us,
                wall_us + round(traffic.lead_median_ms) * 1000,
                traffic.budget_ms,
                traffic.candidates,
                traffic.suffix,
                version,
            )
            self._after(self._hops.next(), partial(self._decide, number, event, partition))
        ranking_us = now_us + impression.ranking_us - impression.retrieval_us
        self._ranking_us.append(ranking_us)
        sent_us = EPOCH_US + ranking_us
        request = RankingRequest(
            request_id,
            user_id,
            sent_us,
            sent_us + self._budget_us,
            (EPOCH_US + now_us) // 1000,
            self._candidates,
            self._suffix,
            version,
        )
        # A learnt hop is half of a request's time outside the worker. Two draws would even each other out: fewer short
        # and fewer long times than were measured.
        hop_us = self._hops.next()
        self._hops_us.append(hop_us)
        self._after(ranking_us - now_us + hop_us, partial(owner.receive_ranking, number, request, partition))
        return ranking_us

    def _behaviours(self, known: list[Impression]) -> list[tuple[float, str, int]]:
        """When each behaviour between the impressions of one user comes, and the length of the history with it.

        They are spread evenly. The next impression of a user may lie after the end.
        """
        traffic, found = self._traffic, list[tuple[float, str, int]]()
        random = np.random.default_rng((self._case.demand.seed, 7))
        returning = frozenset(self._part.users.tolist())
        visits: dict[int, list[Impression]] = {}
        for impression in known:
            if impression.user in returning:
                visits.setdefault(impression.user, []).append(impression)
        for user, own in visits.items():
            gap_us = random.exponential(1e6 * traffic.duration_s / len(own))
            ends = [(each.retrieval_us, each.history_length) for each in own]
            last_us, longest = ends[-1][0], self._histories.longest - traffic.suffix
            ends.append((round(last_us + gap_us), min(ends[-1][1] + traffic.growth, longest)))
            for (begins_us, before), (ends_us, after) in itertools.pairwise(ends):
                times_us = np.sort(random.uniform(begins_us, ends_us, max(0, after - before)))
                name = self._part.user_id(user)
                found += [(at_us, name, before + place) for place, at_us in enumerate(times_us.tolist(), 1)]
        return sorted(found)

    def _play_behaviours(self, behaviours: list[tuple[float, str, int]]) -> Generator[simpy.Event, None, None]:
        for at_us, user_id, length in behaviours:
            yield self._env.timeout(max(0.0, self._begins_us + at_us - self._env.now))
            self._histories.lengths[user_id] = max(length, self._histories.lengths[user_id])
            for owner in self._owners:
                owner.histories_changed([user_id])

    def _warm_up(self) -> None:
        if not self._begins_us:
            return
        names: dict[SimulatedWorker, list[str]] = {owner: [] for owner in self._owners}
        for user in self._part.users.tolist()[: self._case.settings.worker.warm_up_users]:
            name = self._part.user_id(user)
            self._histories.lengths[name] = self._part.first_length(user)
            names[self._owner_of[self._part.partition_of[user]]].append(name)
        for owner, own in names.items():
            owner.warm_up(own)

    def _refresh(self, every_s: float) -> Generator[simpy.Event, None, None]:
        while True:
            yield self._env.timeout(every_s * 1e6)
            recent = itertools.islice(reversed(self._histories.lengths), self._case.settings.worker.warm_up_users)
            (owner,) = self._owners  # A pool is not simulated with new weights.
            owner.take_new_weights(list(recent))

    # -- the trigger -------------------------------------------------------------------------------

    def _decide(self, number: int, event: RetrievalEvent, partition: int) -> None:
        wall_us = EPOCH_US + int(self._env.now)
        decision = self._handler.decide_event(event, partition, wall_us)
        if decision.admit:
            job = PoolJob(number, job_of(event, wall_us), partition)
            self._has_job[number] = True
            receive = self._pool.offer if self._pool is not None and decision.by_pool else self._tell
            self._after(self._hops.next(), partial(receive, job))

    def _tell(self, job: PoolJob) -> None:
        """Gives the job to the owner of its user."""
        self._owner_of[job.partition].receive_job(job.number, job.job, job.partition)

    def _stored(self, job: PoolJob) -> None:
        self._told.add(job.number)
        self._after_hop(self._tell, job)

    def _after_hop(self, receive: Callable[[PoolJob], None], job: PoolJob) -> None:
        self._after(self._hops.next(), partial(receive, job))

    def _report_statuses(self) -> Generator[simpy.Event, None, None]:
        interval_us = self._case.settings.worker.status_interval_ms * 1000
        while True:
            self._take_statuses()
            self._handler.take_reports()
            yield self._env.timeout(interval_us)

    def _take_statuses(self) -> None:
        for owner in self._owners:
            self._fleet.apply(owner.worker_id, owner.status(), EPOCH_US + int(self._env.now))
        for status in self._pool.statuses() if self._pool is not None else ():
            self._fleet.apply(status.worker_id, status, EPOCH_US + int(self._env.now))

    # -- results -----------------------------------------------------------------------------------

    def _on_ranked(self, number: int, at_us: int, ending: str) -> None:
        """The result is sent when the simulation has reached its time."""
        self._after(max(0.0, at_us - self._env.now), partial(self._end, number, at_us, ending))

    def _end(self, number: int, at_us: int, ending: str) -> None:
        """Raises RuntimeError for a second result of a request."""
        if self._endings[number] != _OPEN:
            raise RuntimeError(f"request {number} has two results")
        self._endings[number] = CODE[ending]
        self._latencies_us[number] = at_us + round(self._hops_us[number]) - self._ranking_us[number]

    def _on_job(self, number: int, outcome: JobOutcome) -> None:
        if number not in self._told:
            self._jobs[outcome.value] += 1

    def _on_look_up(self, purpose: Purpose, user_id: str, tier: Tier | None) -> None:
        """Counts where the first look-up of an impression found its prefix."""
        if purpose is Purpose.PRE_INFER:
            if self._store is not None and self._prepared[user_id]:
                return  # A job looks again after its fetch.
            self._prepared[user_id] += 1
        elif purpose is Purpose.AGAIN:
            return
        elif self._prepared[user_id] > 0:
            self._prepared[user_id] -= 1
            return
        self._found["nowhere" if tier is None else tier.value] += 1

    # -- helpers -----------------------------------------------------------------------------------

    def _after(self, delay_us: float, call: Callable[[], None]) -> None:
        self._env.timeout(delay_us).callbacks.append(lambda _: call())

    def _begin_counting(self) -> None:
        """The cold beginning is over."""
        self._used_before = self._used()
        self._jobs.clear()
        if self._pool is not None:
            self._pool.jobs.clear()
        self._found.clear()

    def _end_counting(self) -> None:
        """The time of impressions is over. The last ones are ranked later, and not counted."""
        self._used_after = self._used()

    def _used(self) -> _Used:
        return _Used(
            sum(each.device_s() for each in self._workers), sum(each.thread_us for each in self._workers) / 1e6
        )

    def _outcome(self, cold_us: float, took_s: float) -> PartOutcome:
        endings = np.frombuffer(bytes(self._endings), np.uint8).copy()
        endings[endings == _OPEN] = CODE[in_simulation(Ended.TIMED_OUT)]
        ranking_us = np.array(self._ranking_us, np.int64)
        counted = (ranking_us >= cold_us) & (ranking_us < self._ends_us)
        has_job = np.frombuffer(bytes(self._has_job), np.bool_)[counted]
        before, after = self._used_before, self._used_after
        return PartOutcome(
            requests=Requests(np.array(self._latencies_us, np.int64)[counted], endings[counted]),
            found=dict(self._found),
            jobs=dict(self._jobs if self._pool is None else self._jobs + self._pool.jobs),
            asked=int(has_job.sum()),
            ready=int((has_job & (endings[counted] == CODE[Path.HBM])).sum()),
            device_s=after.device_s - before.device_s,
            thread_s=after.thread_s - before.thread_s,
            worker_s=len(self._workers) * (self._ends_us - cold_us) / 1e6,
            impressions=endings.size,
            took_s=took_s,
        )


def _ignore(*_: object) -> None:
    """Of the look-ups in the cache of a worker for jobs."""
