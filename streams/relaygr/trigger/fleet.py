"""The fleet: the owner of each partition, by the workers' statuses. Pure: `fleet_reader` reads the topic.

* The owner of a partition is the fresh worker with the newest claim. The time of a claim is the time of the first
  status seen with this assignment epoch of the worker; the epochs of two workers cannot be compared. When the worker
  with the newest claim falls silent, the partition goes back to the next fresh claimant.
* An owner is fresh while it is READY and its last status is at most `status_stale_ms` old. The age is computed from
  `written_at_us`, because a compacted topic delivers old statuses late. If the writer's clock is ahead, the age
  is computed from the time of receipt.
* A tombstone, or the state STOPPING, gives up all partitions of a worker.
* Workers may be made up. Their number is bounded (`WorkerTable`), and so are the claimants of a partition: a silent one
  goes when another comes, and while none is silent the status of another is refused. Workers without partitions have a
  table of their own: any number of them may join before one that owns some. The cost of a status grows with the
  partitions that it names, and not with the number of workers.
* A pre-infer worker owns nothing. While fresh ones refuse no jobs, `pool_takes` says that jobs may go to them. If they
  neither take nor refuse jobs for `POOL_SILENCE_US`, only one job each `POOL_TRIAL_US` goes to them, as a trial.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Final

from relaygr.admission.policy import OwnerView
from relaygr.admission.worker_table import NoRoomError, WorkerTable
from relaygr.schemas.fields import Other
from relaygr.schemas.messages import FullPathReport, PreInferSlots, WorkerState, WorkerStatus

MAX_WORKERS: Final = 4096
MAX_POOL_WORKERS: Final = 1024
"""Fewer, since `Fleet.pool_takes` asks each of them."""
MAX_CLAIMANTS: Final = 8
"""Of one partition. While it moves, the old and the new owner claim it."""
POOL_SILENCE_US: Final = 5_000_000
"""Longer than a free slot takes to take a job, and to tell so in a status."""
POOL_TRIAL_US: Final = 10_000_000


def most_workers(partitions: int) -> int:
    """How many workers with partitions are kept: twice as many as can own one, and some more."""
    return min(MAX_WORKERS, 2 * partitions + 64)


@dataclass(frozen=True, slots=True)
class FleetMember:
    """A worker by its last status. Each status replaces the whole object."""

    view: OwnerView
    state: WorkerState | Other
    claim: int
    """A hash of its assignment epoch and its partitions."""
    claimed_at_us: int
    written_at_us: int


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A pre-infer worker by its last status."""

    state: WorkerState | Other
    written_at_us: int
    active_since_us: int | None
    slots: PreInferSlots
    is_refusing: bool
    """Whether it has refused jobs between its last two statuses."""


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """The fleet at one moment."""

    workers: int
    """Workers with a status."""
    fresh_workers: int
    owned_partitions: int
    """Partitions with a fresh owner."""


class Fleet:
    """Statuses in, owners out. One thread calls `apply`; any thread may read, because entries are replaced whole."""

    def __init__(self, status_stale_ms: int, most: int = MAX_WORKERS) -> None:
        """`most`: workers with partitions that are kept, beside `MAX_WORKERS` without and `MAX_POOL_WORKERS` pre-infer
        workers.
        """
        self._stale_us = status_stale_ms * 1000
        self._members: WorkerTable[FleetMember] = WorkerTable(most, self._stale_us)
        self._spare: WorkerTable[FleetMember] = WorkerTable(MAX_WORKERS, self._stale_us)
        """Those without partitions."""
        self._claimants: defaultdict[int, set[str]] = defaultdict(set)
        """By partition: the members that name it."""
        self._pool: WorkerTable[PoolMember] = WorkerTable(MAX_POOL_WORKERS, self._stale_us)
        self._pool_waits_us: int | None = None
        """The time of the first job that was sent to the pool since it took or refused one."""
        self._pool_sent_us = 0
        self.reports: deque[tuple[str, FullPathReport]] = deque(maxlen=MAX_WORKERS)
        """The reports of full inference, with their workers' ids, that the deciding thread has not taken yet."""

    def apply(self, worker_id: str, status: WorkerStatus | None, now_us: int) -> None:
        """Takes the latest status of a worker; None is its tombstone.

        Raises ValueError for an unusable status, and NoRoomError, a ValueError, for one without room. The worker's
        earlier status then stays, unless the new one gives up all its partitions.
        """
        if status is None or status.state is WorkerState.STOPPING:
            self._remove(worker_id)
            self._pool.pop(worker_id, None)
            return
        if status.pre_infer is not None:
            self._remove(worker_id)
            self._apply_pool(worker_id, status, status.pre_infer, now_us)
            return
        self._pool.pop(worker_id, None)
        view = OwnerView.of(status)
        before = self._members.get(worker_id)
        held = frozenset[int]() if before is None else before.view.partitions
        written_at_us = min(status.written_at_us, now_us)
        claim = hash((status.assignment_epoch, status.partitions))
        claimed_at_us = before.claimed_at_us if before is not None and before.claim == claim else written_at_us
        member = FleetMember(view, status.state, claim, claimed_at_us, written_at_us)
        if view.partitions:
            self._make_room(worker_id, view.partitions - held, now_us)
            self._spare.pop(worker_id, None)
            self._members.put(worker_id, member)
        else:
            self._remove(worker_id)
            self._spare.make_room(worker_id, now_us)
            self._spare.put(worker_id, member)
            held = frozenset()
        if status.full_path is not None:
            self.reports.append((worker_id, status.full_path))
        for partition in view.partitions - held:
            self._claimants[partition].add(worker_id)
        self._unclaim(worker_id, held - view.partitions)

    def _apply_pool(self, worker_id: str, status: WorkerStatus, slots: PreInferSlots, now_us: int) -> None:
        self._pool.make_room(worker_id, now_us)
        before = self._pool.get(worker_id)
        if before is not None and before.active_since_us != status.active_since_us:
            before = None
        is_refusing = before is not None and slots.refused > before.slots.refused
        # A process that was not heard before may be made up, or start again and again. If it works it takes a trial.
        if before is not None and _ended(slots) > _ended(before.slots):
            self._pool_waits_us = None
        written_at_us = min(status.written_at_us, now_us)
        self._pool.put(worker_id, PoolMember(status.state, written_at_us, status.active_since_us, slots, is_refusing))

    def pool_takes(self, now_us: int) -> bool:
        """Whether a job may go to the pre-infer workers: there are fresh ones, none has refused jobs lately, and either
        they are not silent, or it is time for a trial.
        """
        live = [each for each in [*self._pool.values()] if each.slots.slots and self._fresh(each, now_us)]
        if not live or any(each.is_refusing for each in live):
            return False
        return not self.pool_is_silent(now_us) or now_us - self._pool_sent_us >= POOL_TRIAL_US

    def pool_is_silent(self, now_us: int) -> bool:
        """Whether jobs were sent to the pool, and nobody has taken or refused any since."""
        return self._pool_waits_us is not None and now_us - self._pool_waits_us >= POOL_SILENCE_US

    def sent_to_pool(self, now_us: int) -> None:
        """A job goes to the pre-infer workers."""
        self._pool_sent_us = now_us
        if self._pool_waits_us is None:
            self._pool_waits_us = now_us

    def owner_of(self, partition: int, now_us: int) -> OwnerView | None:
        """The owner of the partition; None if no fresh worker claims it."""
        newest: FleetMember | None = None
        for worker_id in [*self._claimants.get(partition, ())]:
            member = self._members.get(worker_id)
            if member is not None and self._fresh(member, now_us) and (newest is None or _is_newer(member, newest)):
                newest = member
        return None if newest is None else newest.view

    def summary(self, now_us: int) -> FleetSummary:
        """The counts for gauges and the log."""
        members = [*self._members.items(), *self._spare.items()]
        fresh = {name for name, member in members if self._fresh(member, now_us)}
        owned = sum(not fresh.isdisjoint([*claimants]) for claimants in [*self._claimants.values()])
        return FleetSummary(len(members), len(fresh), owned)

    def _fresh(self, member: FleetMember | PoolMember, now_us: int) -> bool:
        return member.state is WorkerState.READY and now_us - member.written_at_us <= self._stale_us

    def _remove(self, worker_id: str) -> None:
        self._spare.pop(worker_id, None)
        gone = self._members.pop(worker_id, None)
        if gone is not None:
            self._unclaim(worker_id, gone.view.partitions)

    def _make_room(self, worker_id: str, partitions: frozenset[int], now_us: int) -> None:
        """For the worker, and for its claims of these partitions. Raises NoRoomError."""
        silent: set[str] = set()
        for partition in partitions:
            claimants = self._claimants.get(partition, ())
            if len(claimants) < MAX_CLAIMANTS or not silent.isdisjoint(claimants):
                continue
            gone = [each for each in claimants if not self._fresh(self._members[each], now_us)]
            if not gone:
                raise NoRoomError(f"partition {partition} has {MAX_CLAIMANTS} live claimants already")
            silent.update(gone)
        displaced = self._members.make_room(worker_id, now_us)
        if displaced is not None:
            self._unclaim(displaced[0], displaced[1].view.partitions)
        # Altogether, so that what is kept of silent workers is bounded, too.
        for each in silent:
            self._remove(each)

    def _unclaim(self, worker_id: str, partitions: frozenset[int]) -> None:
        for partition in partitions:
            claimants = self._claimants[partition]
            claimants.discard(worker_id)
            if not claimants:
                del self._claimants[partition]


def _is_newer(member: FleetMember, other: FleetMember) -> bool:
    return (member.claimed_at_us, member.view.worker_id) > (other.claimed_at_us, other.view.worker_id)


def _ended(slots: PreInferSlots) -> int:
    """Jobs that the worker has taken or refused."""
    return slots.accepted + slots.refused
