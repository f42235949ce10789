"""The fleet: the owner of each partition, by the workers' statuses. Pure: `fleet_reader` reads the topic.

* The owner of a partition is the fresh worker with the newest claim. The time of a claim is the time of the first
  status seen with this assignment epoch of the worker; the epochs of two workers cannot be compared. When the worker
  with the newest claim falls silent, the partition goes back to the next fresh claimant.
* An owner is fresh while it is READY and its last status is at most `status_stale_ms` old. The age is computed from
  `written_at_us`, because a compacted topic delivers old statuses late. If the writer's clock is ahead, the age
  is computed from the time of receipt.
* A tombstone, or the state STOPPING, gives up all partitions of a worker.
* A pre-infer worker owns nothing. While fresh ones refuse no jobs, `pool_takes` says that jobs may go to them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from relaygr.admission.policy import OwnerView
from relaygr.schemas.fields import Other
from relaygr.schemas.messages import FullPathReport, PreInferSlots, WorkerState, WorkerStatus

MAX_WORKERS = 4096


@dataclass(frozen=True, slots=True)
class FleetMember:
    """A worker by its last status. Each status replaces the whole object."""

    view: OwnerView
    state: WorkerState | Other
    assignment_epoch: int
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

    def __init__(self, status_stale_ms: int) -> None:
        self._stale_us = status_stale_ms * 1000
        self._members: dict[str, FleetMember] = {}
        self._claimants: dict[int, tuple[str, ...]] = {}
        """By partition, the newest claim first."""
        self._pool: dict[str, PoolMember] = {}
        self.reports: deque[tuple[str, FullPathReport]] = deque(maxlen=MAX_WORKERS)
        """The reports of full inference, with their workers' ids, that the deciding thread has not taken yet."""

    def apply(self, worker_id: str, status: WorkerStatus | None, now_us: int) -> None:
        """Takes the latest status of a worker; None is its tombstone. Raises ValueError for an unusable status."""
        before = self._members.get(worker_id)
        if status is None or status.state is WorkerState.STOPPING:
            self._remove(worker_id)
            self._pool.pop(worker_id, None)
            return
        if status.pre_infer is not None:
            self._apply_pool(worker_id, status, status.pre_infer, now_us)
            return
        view = OwnerView.of(status)
        if before is None and len(self._members) >= MAX_WORKERS:
            self._remove(min(self._members, key=lambda name: self._members[name].written_at_us))
        if status.full_path is not None:
            self.reports.append((worker_id, status.full_path))
        written_at_us = min(status.written_at_us, now_us)
        same_claim = (
            before is not None
            and before.assignment_epoch == status.assignment_epoch
            and before.view.partitions == view.partitions
        )
        claimed_at_us = before.claimed_at_us if before is not None and same_claim else written_at_us
        self._members[worker_id] = FleetMember(
            view, status.state, status.assignment_epoch, claimed_at_us, written_at_us
        )
        if not same_claim:
            touched = view.partitions if before is None else view.partitions | before.view.partitions
            self._update_claimants(touched)

    def _apply_pool(self, worker_id: str, status: WorkerStatus, slots: PreInferSlots, now_us: int) -> None:
        before = self._pool.get(worker_id)
        if before is None and len(self._pool) >= MAX_WORKERS:
            del self._pool[min(self._pool, key=lambda name: self._pool[name].written_at_us)]
        same_process = before is not None and before.active_since_us == status.active_since_us
        is_refusing = same_process and before is not None and slots.refused > before.slots.refused
        written_at_us = min(status.written_at_us, now_us)
        self._pool[worker_id] = PoolMember(status.state, written_at_us, status.active_since_us, slots, is_refusing)

    def pool_takes(self, now_us: int) -> bool:
        """Whether jobs may go to the pre-infer workers: there are fresh ones, and none has refused jobs lately."""
        live = [each for each in dict(self._pool).values() if each.slots.slots and self._fresh(each, now_us)]
        return bool(live) and not any(each.is_refusing for each in live)

    def owner_of(self, partition: int, now_us: int) -> OwnerView | None:
        """The owner of the partition; None if no fresh worker claims it."""
        for worker_id in self._claimants.get(partition, ()):
            member = self._members.get(worker_id)
            if member is not None and self._fresh(member, now_us):
                return member.view
        return None

    def summary(self, now_us: int) -> FleetSummary:
        """The counts for gauges and the log."""
        members = dict(self._members)
        fresh = {name for name, member in members.items() if self._fresh(member, now_us)}
        owned = sum(1 for claimants in dict(self._claimants).values() if not fresh.isdisjoint(claimants))
        return FleetSummary(len(members), len(fresh), owned)

    def _fresh(self, member: FleetMember | PoolMember, now_us: int) -> bool:
        return member.state is WorkerState.READY and now_us - member.written_at_us <= self._stale_us

    def _remove(self, worker_id: str) -> None:
        gone = self._members.pop(worker_id, None)
        if gone is not None:
            self._update_claimants(gone.view.partitions)

    def _update_claimants(self, partitions: frozenset[int]) -> None:
        claims = [(member.claimed_at_us, name, member.view.partitions) for name, member in self._members.items()]
        claims.sort(reverse=True)
        for partition in partitions:
            claimants = tuple(name for _, name, claimed in claims if partition in claimed)
            if claimants:
                self._claimants[partition] = claimants
            else:
                self._claimants.pop(partition, None)
