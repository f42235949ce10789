"""The relay of one part of a fleet as a discrete-event model: gateway, trigger, hops over Kafka, and workers.

    retrieval event --hop--> trigger --hop--> worker: pre-infer job
    ranking request ---------hop-----------> worker --hop--> result

A worker that dies loses its HBM. With a standby its successor takes the same partitions and the DRAM tier over; without
one its partitions move to the other workers after the session time-out, and it comes back, empty, after a restart. What
it had not answered is delivered again.

Every request ends exactly once: a later result for it is a duplicate, which the client drops. The time is in µs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import simpy

from relaygr.schemas.messages import PreInferJob, RankingRequest, RetrievalEvent
from relaygr.schemas.partitioner import users_in
from relaygr.simulate.case import Autoscale, Case
from relaygr.simulate.device import EPOCH_US, SharedHistories, behaviours_of
from relaygr.simulate.figures import CODE, NO_LATENCY, Ending, PartOutcome, Requests
from relaygr.simulate.times import Draws
from relaygr.simulate.worker import SimulatedWorker
from relaygr.traffic.schedule import Impression
from relaygr.trigger.fleet import Fleet
from relaygr.trigger.handler import EventHandler, job_of
from relaygr.worker.cache import Hit, Miss, MissReason, PendingPrefix, Purpose
from relaygr.worker.cache.journal import StoredEntry
from relaygr.worker.executor.work import JobOutcome

TAKEOVER_S: Final = 0.3
"""From a death to the first message of the standby."""
REBALANCE_S: Final = 0.1
_DRAIN_S: Final = 3.0
_OPEN: Final = 255


@dataclass(slots=True, eq=False)
class _Member:
    """A worker of the group, and the messages that it has not finished."""

    number: int
    worker: SimulatedWorker
    requests: dict[int, tuple[RankingRequest, int]] = field(default_factory=dict)
    jobs: dict[int, tuple[PreInferJob, int]] = field(default_factory=dict)
    seen_device_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Used:
    """What all workers have used up to a time."""

    worker_us: float
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
    """One part of a fleet: `workers` workers that own `partitions` together."""

    def __init__(self, case: Case, partitions: range, workers: int) -> None:
        self._case = case
        self._env = simpy.Environment()
        self._partitions = partitions
        self._part = case.demand.part(frozenset(partitions))
        traffic = self._traffic = case.demand.traffic
        self._histories = SharedHistories(traffic.history_max + traffic.suffix)
        self._random = np.random.default_rng((case.demand.seed, 5, partitions.start))
        self._hops = Draws(case.times.hop_us, self._random)
        self._suffix = behaviours_of(traffic.suffix)
        self._candidates = np.zeros(traffic.candidates, "<i8")
        settings = case.settings
        self._fleet = Fleet(settings.trigger.status_stale_ms)
        self._handler = EventHandler(
            settings.trigger, settings.admission, self._fleet, case.demand.partitions, _TriggerClock(self._env)
        )
        self._handler.reassign(frozenset(partitions))
        self._budget_us = traffic.budget_ms * 1000
        self._ranking_us: list[int] = []
        self._hops_us: list[float] = []
        """The one hop of each request, there and back."""
        self._latencies_us: list[int] = []
        self._endings = bytearray()
        self.duplicates = 0
        self._jobs: Counter[str] = Counter()
        self._found: Counter[str] = Counter()
        self._prepared: Counter[str] = Counter()
        self._owners: dict[int, _Member | None] = dict.fromkeys(partitions)
        self._waiting: dict[int, list[Callable[[_Member], None]]] = {each: [] for each in partitions}
        self._members: list[_Member] = []
        self._gone: list[_Member] = []
        self._started = 0
        self._coming = 0
        """Workers that start now, or take the place of a dead one later."""
        self._worker_us = self._counted_us = 0.0
        self._used_before = self._used_after = _Used(0.0, 0.0, 0.0)
        self._most_workers = 0
        warms_up = settings.worker.warm_up_users and settings.worker.reuse_prefixes
        self._begins_us = round(traffic.settle_s * 1e6) if warms_up else 0
        self._ends_us = self._begins_us + traffic.duration_s * 1e6
        for _ in range(workers):
            self._start_member()
        self._assign(at_once=True)

    def run(self) -> PartOutcome:
        """Plays the impressions. A part whose partitions have no user has none."""
        began_s = time.process_time()
        env = self._env
        for member in self._members:
            self._warm_up(member)
        if self._case.relay:
            # Only the trigger reads statuses.
            env.process(self._report_statuses())
        for at_s in self._case.changes.kills_s:
            self._after(self._begins_us + round(at_s * 1e6), self._kill_one)
        if self._case.changes.autoscale is not None:
            env.process(self._autoscale(self._case.changes.autoscale))
        cold_us = self._begins_us + self._case.demand.cold_s * 1e6
        self._after(cold_us, self._begin_counting)
        self._after(self._ends_us, self._end_counting)
        ended = env.process(self._play())
        env.run(until=ended)
        return self._outcome(cold_us, time.process_time() - began_s)

    # -- the gateway -------------------------------------------------------------------------------

    def _play(self) -> Generator[simpy.Event, None, None]:
        env, latest_us = self._env, 0
        for impression in self._part.impressions:
            wait_us = self._begins_us + impression.retrieval_us - env.now
            if wait_us > 0:
                yield env.timeout(wait_us)
            latest_us = max(latest_us, self._begin(impression))
        yield env.timeout(max(0, latest_us - env.now, self._ends_us - env.now))
        changes = self._case.changes
        drain_s = self._budget_us / 1e6 + _DRAIN_S
        if changes.kills_s:
            # Requests wait until the dead worker's partitions have an owner.
            drain_s += changes.session_timeout_s + changes.start_s
        yield env.timeout(drain_s * 1e6)

    def _begin(self, impression: Impression) -> int:
        """Publishes the history and the retrieval event. Returns the time of the ranking request."""
        env, traffic = self._env, self._traffic
        number, user_id = len(self._endings), self._part.user_id(impression.user)
        self._endings.append(_OPEN)
        self._latencies_us.append(NO_LATENCY)
        before, length = self._histories.lengths.get(user_id, 0), impression.history_length
        self._histories.lengths[user_id] = length
        partition = self._part.partition_of[impression.user]
        if length < before:
            self._delete(user_id, partition)
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
        self._after(ranking_us - now_us + hop_us, partial(self._deliver_ranking, number, request, partition))
        return ranking_us

    def _delete(self, user_id: str, partition: int) -> None:
        member = self._owners[partition]
        if member is not None:
            member.worker.executor.post(partial(member.worker.executor.user_deleted, user_id))

    # -- the trigger -------------------------------------------------------------------------------

    def _decide(self, number: int, event: RetrievalEvent, partition: int) -> None:
        wall_us = EPOCH_US + int(self._env.now)
        decision = self._handler.admit(event, partition, wall_us)
        if decision.admit:
            self._after(self._hops.next(), partial(self._deliver_job, number, job_of(event, wall_us), partition))

    def _report_statuses(self) -> Generator[simpy.Event, None, None]:
        interval_us = self._case.settings.worker.status_interval_ms * 1000
        while True:
            wall_us = EPOCH_US + int(self._env.now)
            for member in self._members:
                self._fleet.apply(member.worker.worker_id, member.worker.status(), wall_us)
            self._handler.take_reports()
            yield self._env.timeout(interval_us)

    # -- deliveries --------------------------------------------------------------------------------

    def _deliver_ranking(self, number: int, request: RankingRequest, partition: int) -> None:
        self._deliver(partition, partial(self._hand_ranking, number, request, partition))

    def _deliver_job(self, number: int, job: PreInferJob, partition: int) -> None:
        self._deliver(partition, partial(self._hand_job, number, job, partition))

    def _deliver(self, partition: int, hand: Callable[[_Member], None]) -> None:
        """To the owner of the partition, or to its next owner."""
        owner = self._owners[partition]
        if owner is None:
            self._waiting[partition].append(hand)
        else:
            hand(owner)

    def _hand_ranking(self, number: int, request: RankingRequest, partition: int, member: _Member) -> None:
        member.requests[number] = request, partition
        member.worker.receive_ranking(number, request, partition)

    def _hand_job(self, number: int, job: PreInferJob, partition: int, member: _Member) -> None:
        member.jobs[number] = job, partition
        member.worker.receive_job(number, job, partition)

    def _on_ranked(self, member: _Member, number: int, at_us: int, ending: Ending) -> None:
        """The result is sent when the simulation has reached its time."""
        self._after(max(0.0, at_us - self._env.now), partial(self._end, member, number, at_us, ending))

    def _end(self, member: _Member, number: int, at_us: int, ending: Ending) -> None:
        if not member.worker.is_alive:
            return  # It died before, and another one gets the request.
        member.requests.pop(number, None)
        if self._endings[number] != _OPEN:
            self.duplicates += 1
            return
        self._endings[number] = CODE[ending]
        self._latencies_us[number] = at_us + round(self._hops_us[number]) - self._ranking_us[number]

    def _on_job(self, member: _Member, number: int, outcome: JobOutcome) -> None:
        member.jobs.pop(number, None)
        self._jobs[outcome.value] += 1

    def _on_look_up(self, purpose: Purpose, user_id: str, found: Hit | PendingPrefix | Miss) -> None:
        """Counts where the first look-up of an impression found its prefix."""
        if purpose is Purpose.PRE_INFER:
            self._prepared[user_id] += 1
        elif purpose is Purpose.AGAIN:
            return
        elif self._prepared[user_id] > 0:
            self._prepared[user_id] -= 1
            return
        in_dram = isinstance(found, Miss) and found.reason is MissReason.IN_DRAM
        self._found["hbm" if isinstance(found, Hit) else "dram" if in_dram else "nowhere"] += 1

    # -- workers -----------------------------------------------------------------------------------

    def _start_member(self, number: int | None = None, dram: list[StoredEntry] | None = None) -> _Member:
        if number is None:
            number = self._started
            self._started += 1
        # The worker calls back only after its first step.
        holder: list[_Member] = []
        worker = SimulatedWorker(
            self._env,
            f"worker-{self._partitions.start:05d}-{number:03d}",
            self._case,
            self._histories,
            self._random,
            lambda *ended: self._on_ranked(holder[0], *ended),
            lambda *ended: self._on_job(holder[0], *ended),
            self._on_look_up,
            dram,
        )
        member = _Member(number, worker)
        holder.append(member)
        self._count_workers()
        self._members.append(member)
        self._members.sort(key=lambda each: each.number)
        self._most_workers = max(self._most_workers, len(self._members))
        return member

    def _leave(self, member: _Member) -> None:
        self._count_workers()
        self._members.remove(member)
        self._gone.append(member)
        self._fleet.apply(member.worker.worker_id, None, EPOCH_US + int(self._env.now))

    def _count_workers(self) -> None:
        now_us = self._env.now
        self._worker_us += len(self._members) * (now_us - self._counted_us)
        self._counted_us = now_us

    def _assign(self, at_once: bool = False) -> None:
        """Gives the partitions to the present members in ranges. Those that move wait for the rebalance."""
        if not self._members:
            return
        ranges = np.array_split(np.array(self._partitions), len(self._members))
        for member, places in zip(self._members, ranges, strict=True):
            self._own(member, frozenset(places.tolist()), 0.0 if at_once else REBALANCE_S)

    def _own(self, member: _Member, partitions: frozenset[int], after_s: float) -> None:
        worker = member.worker
        if partitions == worker.partitions and all(self._owners[each] is member for each in partitions):
            return
        if worker.partitions - partitions:
            mine = users_in(partitions, self._case.demand.partitions)
            worker.cache.demote(lambda user_id: not mine(user_id))
        worker.partitions = partitions
        worker.epoch += 1
        for partition in partitions:
            if self._owners[partition] is not member:
                self._owners[partition] = None
        if after_s:
            self._after(after_s * 1e6, partial(self._take_over, member, worker.epoch))
        else:
            self._take_over(member, worker.epoch)

    def _take_over(self, member: _Member, epoch: int) -> None:
        """The member owns its partitions, and gets what waits in them."""
        if member not in self._members or member.worker.epoch != epoch:
            return
        for partition in member.worker.partitions:
            self._owners[partition] = member
            waiting, self._waiting[partition] = self._waiting[partition], []
            for hand in waiting:
                hand(member)
        self._fleet.apply(member.worker.worker_id, member.worker.status(), EPOCH_US + int(self._env.now))

    def _warm_up(self, member: _Member) -> None:
        most = self._case.settings.worker.warm_up_users
        if not self._begins_us:
            return
        owned = member.worker.partitions
        users = [user for user in self._part.users.tolist() if self._part.partition_of[user] in owned][:most]
        names = [self._part.user_id(user) for user in users]
        for user, name in zip(users, names, strict=True):
            self._histories.lengths[name] = self._part.first_length(user)
        member.worker.warm_up(names)

    # -- failures and autoscaling ------------------------------------------------------------------

    def _kill_one(self) -> None:
        """The worker with the most partitions dies."""
        if self._members:
            self._kill(max(self._members, key=lambda each: len(each.worker.partitions)))

    def _kill(self, member: _Member) -> None:
        worker, changes = member.worker, self._case.changes
        worker.stop()
        self._leave(member)
        for partition, owner in self._owners.items():
            if owner is member:
                self._owners[partition] = None
        # A partition that moved before has another owner: it reads what its predecessor had not finished.
        for number, (job, partition) in sorted(member.jobs.items()):
            self._deliver_job(number, job, partition)
        for number, (request, partition) in sorted(member.requests.items()):
            self._deliver_ranking(number, request, partition)
        self._coming += 1
        if changes.standby:
            self._after(TAKEOVER_S * 1e6, partial(self._succeed, member, worker.left_in_dram()))
            return
        self._after(changes.session_timeout_s * 1e6, self._assign)
        self._after(max(changes.start_s, changes.session_timeout_s) * 1e6, self._join)

    def _succeed(self, member: _Member, dram: list[StoredEntry]) -> None:
        """The standby takes over the partitions and the DRAM tier."""
        self._coming -= 1
        partitions = member.worker.partitions
        moved = any(partitions & each.worker.partitions for each in self._members)
        successor = self._start_member(member.number, dram)
        if moved:
            self._assign()
        else:
            self._own(successor, partitions, 0.0)

    def _join(self) -> None:
        self._coming -= 1
        self._start_member()
        self._assign()

    def _autoscale(self, rule: Autoscale) -> Generator[simpy.Event, None, None]:
        while True:
            yield self._env.timeout(rule.interval_s * 1e6)
            used_s = 0.0
            for member in self._members:
                device_s = member.worker.device_s()
                used_s += device_s - member.seen_device_s
                member.seen_device_s = device_s
            present = len(self._members) + self._coming
            wanted = min(max(int(np.ceil(used_s / rule.interval_s / rule.target)), rule.least), rule.most)
            for _ in range(wanted - present):
                self._coming += 1
                self._after(self._case.changes.start_s * 1e6, self._join)
            if wanted < present and not self._coming:
                # One at a time: each leaves its users' prefixes behind. It still answers what it has.
                self._leave(self._members[-1])
                self._assign()

    # -- helpers -----------------------------------------------------------------------------------

    def _after(self, delay_us: float, call: Callable[[], None]) -> None:
        self._env.timeout(delay_us).callbacks.append(lambda _: call())

    def _begin_counting(self) -> None:
        """The cold beginning is over."""
        self._used_before = self._used()
        self._jobs.clear()
        self._found.clear()

    def _end_counting(self) -> None:
        """The time of impressions is over. The last ones are ranked later, and not counted."""
        self._used_after = self._used()

    def _used(self) -> _Used:
        self._count_workers()
        workers = [each.worker for each in (*self._members, *self._gone)]
        return _Used(
            self._worker_us,
            sum(each.device_s() for each in workers),
            sum(each.thread_us for each in workers) / 1e6,
        )

    def _outcome(self, cold_us: float, took_s: float) -> PartOutcome:
        endings = np.frombuffer(bytes(self._endings), np.uint8).copy()
        endings[endings == _OPEN] = CODE[Ending.LOST]
        ranking_us = np.array(self._ranking_us, np.int64)
        counted = (ranking_us >= cold_us) & (ranking_us < self._ends_us)
        before, after = self._used_before, self._used_after
        return PartOutcome(
            requests=Requests(np.array(self._latencies_us, np.int64)[counted], endings[counted]),
            found=dict(self._found),
            jobs=dict(self._jobs),
            device_s=after.device_s - before.device_s,
            thread_s=after.thread_s - before.thread_s,
            seconds=(self._ends_us - cold_us) / 1e6,
            worker_s=(after.worker_us - before.worker_us) / 1e6,
            most_workers=self._most_workers,
            impressions=endings.size,
            took_s=took_s,
        )
