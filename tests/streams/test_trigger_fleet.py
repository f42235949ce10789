"""The view of the fleet: the owner of each partition, and how long an owner is fresh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relaygr.schemas.fields import Other
from relaygr.schemas.messages import LatencyCoefficients, PreInferSlots, WorkerState, WorkerStatus
from relaygr.trigger.fleet import Fleet, FleetSummary

NOW_US = 1_700_000_000_000_000
LATENCY = LatencyCoefficients(300, 2, 0.001, 200, 1.5, 0.0008, 250, 3, 0.002, 20, 0.0001)


def status(
    worker_id: str = "worker-00",
    partitions: tuple[int, ...] = (0, 1),
    written_at_us: int = NOW_US,
    epoch: int = 1,
    state: WorkerState | Other = WorkerState.READY,
    latency: LatencyCoefficients = LATENCY,
) -> WorkerStatus:
    return WorkerStatus(
        worker_id=worker_id,
        state=state,
        written_at_us=written_at_us,
        assignment_epoch=epoch,
        partitions=partitions,
        model_revision="abc",
        kv_bytes_per_token=1024,
        contextual_tokens=1,
        tokens_per_behaviour=1,
        max_prefix_behaviours=8192,
        hbm_capacity_bytes=2**30,
        hbm_free_bytes=2**30,
        dram_capacity_bytes=2**30,
        dram_free_bytes=2**30,
        ranking_queue_p99_us=1000,
        preinfer_queue_us=2000,
        latency=latency,
    )


def fleet_of(*statuses: WorkerStatus) -> Fleet:
    fleet = Fleet(status_stale_ms=3000)
    for each in statuses:
        fleet.apply(each.worker_id, each, NOW_US)
    return fleet


def owner(fleet: Fleet, partition: int, now_us: int = NOW_US) -> str | None:
    view = fleet.owner_of(partition, now_us)
    return None if view is None else view.worker_id


def test_a_ready_worker_owns_what_it_claims_and_nothing_else() -> None:
    fleet = fleet_of(status())
    assert [owner(fleet, partition) for partition in range(3)] == ["worker-00", "worker-00", None]


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.STOPPING, Other("draining")])
def test_a_worker_that_is_not_ready_owns_nothing(state: WorkerState | Other) -> None:
    assert owner(fleet_of(status(state=state)), 0) is None


def test_a_stopping_worker_gives_its_partitions_to_who_claims_them_too() -> None:
    fleet = fleet_of(status("worker-00"), status("worker-01", written_at_us=NOW_US + 1))
    fleet.apply("worker-01", status("worker-01", state=WorkerState.STOPPING), NOW_US)
    assert owner(fleet, 0) == "worker-00"


def test_a_silent_worker_stops_counting_after_the_stale_time_and_counts_again_when_heard() -> None:
    fleet = fleet_of(status())
    assert owner(fleet, 0, NOW_US + 3_000_000) == "worker-00"
    assert owner(fleet, 0, NOW_US + 3_000_001) is None
    later = NOW_US + 10_000_000
    fleet.apply("worker-00", status(written_at_us=later), later)
    assert owner(fleet, 0, later) == "worker-00"


def test_an_old_status_of_a_compacted_topic_is_stale_when_read() -> None:
    assert owner(fleet_of(status(written_at_us=NOW_US - 3_000_001)), 0) is None


def test_a_writer_whose_clock_runs_ahead_goes_stale_all_the_same() -> None:
    fleet = fleet_of(status(written_at_us=NOW_US + 3_600_000_000))
    assert owner(fleet, 0, NOW_US + 3_000_001) is None


def test_the_newer_claim_wins_though_the_older_owner_still_writes() -> None:
    fleet = fleet_of(status("worker-00", (0, 1)))
    later = NOW_US + 1_000_000
    fleet.apply("worker-01", status("worker-01", (1,), later, epoch=1), later)
    fleet.apply("worker-00", status("worker-00", (0, 1), later + 1), later + 1)
    assert (owner(fleet, 0, later), owner(fleet, 1, later)) == ("worker-00", "worker-01")


def test_one_status_of_a_dead_claimant_takes_the_partitions_only_until_it_is_stale() -> None:
    """The owner was looked up by the claim alone: the live owner counted again only after a rebalance."""
    fleet = fleet_of(status("worker-00", (0, 1)))
    fleet.apply("worker-09", status("worker-09", (0, 1), NOW_US + 1), NOW_US + 1)
    later = NOW_US + 3_000_002
    fleet.apply("worker-00", status("worker-00", (0, 1), later), later)
    assert (owner(fleet, 0, later), owner(fleet, 1, later)) == ("worker-00", "worker-00")
    assert fleet.summary(later) == FleetSummary(workers=2, fresh_workers=1, owned_partitions=2)


def test_a_new_epoch_takes_a_partition_back() -> None:
    fleet = fleet_of(status("worker-00", (0, 1)))
    fleet.apply("worker-01", status("worker-01", (1,), NOW_US + 1), NOW_US + 1)
    fleet.apply("worker-00", status("worker-00", (0, 1), NOW_US + 2, epoch=2), NOW_US + 2)
    assert owner(fleet, 1, NOW_US + 2) == "worker-00"


def test_a_shrunk_assignment_lets_the_rest_go() -> None:
    fleet = fleet_of(status("worker-00", (0, 1)))
    fleet.apply("worker-00", status("worker-00", (0,), epoch=2), NOW_US)
    assert (owner(fleet, 0), owner(fleet, 1)) == ("worker-00", None)


def test_a_tombstone_forgets_a_worker_and_an_unknown_one_is_no_matter() -> None:
    fleet = fleet_of(status())
    fleet.apply("worker-00", None, NOW_US)
    fleet.apply("worker-77", None, NOW_US)
    assert owner(fleet, 0) is None
    assert fleet.summary(NOW_US) == FleetSummary(0, 0, 0)


def test_a_status_whose_latency_model_is_none_is_refused_and_the_earlier_one_stays() -> None:
    fleet = fleet_of(status())
    bad = LatencyCoefficients(300, -2, 0.001, 200, 1.5, 0.0008, 250, 3, 0.002, 20, 0.0001)
    with pytest.raises(ValueError, match="a1"):
        fleet.apply("worker-00", status(latency=bad), NOW_US)
    assert owner(fleet, 0) == "worker-00"


def test_the_summary_tells_fresh_from_silent() -> None:
    fleet = fleet_of(status("worker-00", (0,)), status("worker-01", (1, 2), NOW_US - 5_000_000))
    assert fleet.summary(NOW_US) == FleetSummary(workers=2, fresh_workers=1, owned_partitions=1)


def pre_infer(refused: int = 0, slots: int = 2, written_at_us: int = NOW_US, since_us: int = 1) -> WorkerStatus:
    own = PreInferSlots(slots, slots, 0, refused)
    return replace(status("pre-00", (), written_at_us), pre_infer=own, active_since_us=since_us)


def test_a_pre_infer_worker_owns_nothing_and_counts_as_no_owner() -> None:
    fleet = fleet_of(pre_infer())
    assert fleet.pool_takes(NOW_US)
    assert fleet.summary(NOW_US) == FleetSummary(0, 0, 0)


def test_without_a_live_pre_infer_worker_with_slots_nothing_goes_to_the_pool() -> None:
    assert not fleet_of(status()).pool_takes(NOW_US)
    assert not fleet_of(pre_infer(slots=0)).pool_takes(NOW_US)
    assert not fleet_of(pre_infer()).pool_takes(NOW_US + 3_000_001)
    fleet = fleet_of(pre_infer())
    fleet.apply("pre-00", replace(pre_infer(), state=WorkerState.STOPPING), NOW_US)
    assert not fleet.pool_takes(NOW_US)


def test_nothing_goes_to_the_pool_while_a_worker_refuses_jobs() -> None:
    fleet = fleet_of(pre_infer(refused=5))
    assert fleet.pool_takes(NOW_US)
    for refused, takes in ((6, False), (9, False), (9, True)):
        fleet.apply("pre-00", pre_infer(refused), NOW_US)
        assert fleet.pool_takes(NOW_US) is takes
    # A new process counts from 0.
    fleet.apply("pre-00", pre_infer(refused=12, since_us=2), NOW_US)
    assert fleet.pool_takes(NOW_US)
