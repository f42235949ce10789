"""The view of the fleet: the owner of each partition, and how long an owner is fresh."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from relaygr.admission.worker_table import NoRoomError
from relaygr.schemas.fields import Other
from relaygr.schemas.messages import LatencyCoefficients, PreInferSlots, WorkerState, WorkerStatus
from relaygr.trigger.fleet import MAX_CLAIMANTS, MAX_POOL_WORKERS, MAX_WORKERS, Fleet, FleetSummary, most_workers

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


def pre_infer(
    refused: int = 0, slots: int = 2, written_at_us: int = NOW_US, since_us: int = 1, accepted: int = 0
) -> WorkerStatus:
    own = PreInferSlots(slots, slots, accepted, refused)
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


def test_a_pool_that_neither_takes_nor_refuses_jobs_gets_trials_only_until_it_does() -> None:
    fleet = fleet_of(pre_infer())

    def sent(at_us: int) -> bool:
        """Whether a job goes to the pool. Its workers are alive."""
        fleet.apply("pre-00", pre_infer(written_at_us=at_us, accepted=accepted), at_us)
        takes = fleet.pool_takes(at_us)
        if takes:
            fleet.sent_to_pool(at_us)
        return takes

    accepted, second = 0, 1_000_000
    assert sum(sent(NOW_US + number * second) for number in range(45)) == 5 + 4
    assert fleet.pool_is_silent(NOW_US + 45 * second)
    accepted = 1
    assert all(sent(NOW_US + number * second) for number in range(46, 50))
    # As long as it goes on to take them.
    for number in range(50, 80):
        accepted += number % 3 == 0
        assert sent(NOW_US + number * second)


def test_a_process_that_was_never_heard_opens_no_closed_pool_and_gets_trials() -> None:
    """Each new status of a made-up worker, or start of a real one, opened the pool for jobs that nobody took."""
    fleet, second = fleet_of(pre_infer()), 1_000_000
    fleet.sent_to_pool(NOW_US - 9 * second)
    for number in range(9):
        fleet.apply(f"made-up-{number}", pre_infer(accepted=number), NOW_US)
        fleet.apply("pre-00", pre_infer(since_us=2 + number, accepted=number), NOW_US)
        assert not fleet.pool_takes(NOW_US)
    fleet.apply("pre-00", pre_infer(written_at_us=NOW_US + second), NOW_US + second)
    assert fleet.pool_takes(NOW_US + second) and fleet.pool_is_silent(NOW_US + second)
    fleet.sent_to_pool(NOW_US + second)
    assert not fleet.pool_takes(NOW_US + second)
    fleet.apply("pre-00", pre_infer(written_at_us=NOW_US + second, accepted=1), NOW_US + second)
    assert fleet.pool_takes(NOW_US + second) and not fleet.pool_is_silent(NOW_US + second)


def test_nothing_goes_to_the_pool_while_a_worker_refuses_jobs() -> None:
    fleet = fleet_of(pre_infer(refused=5))
    assert fleet.pool_takes(NOW_US)
    for refused, takes in ((6, False), (9, False), (9, True)):
        fleet.apply("pre-00", pre_infer(refused), NOW_US)
        assert fleet.pool_takes(NOW_US) is takes
    # A new process counts from 0.
    fleet.apply("pre-00", pre_infer(refused=12, since_us=2), NOW_US)
    assert fleet.pool_takes(NOW_US)


# -- made-up workers


def steps(work: Callable[[], object]) -> int:
    """The calls that it makes, of Python and of C."""
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    # A collection calls what libraries have registered for it.
    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.slow
def test_a_status_costs_as_many_steps_among_3000_workers_as_among_ten() -> None:
    """Each new claim sorted all workers, and each new worker looked for the oldest among all."""
    counts = []
    for others in (10, 3_000):
        fleet = fleet_of(status("real", tuple(range(40))))
        for number in range(others):
            fleet.apply(f"made-up-{number}", status(f"made-up-{number}", ()), NOW_US)
        moved, newcomer = status("real", tuple(range(20, 60)), epoch=2), status("other", tuple(range(100, 140)))
        counts.append(
            (
                steps(lambda fleet=fleet, moved=moved: fleet.apply("real", moved, NOW_US)),
                steps(lambda fleet=fleet, newcomer=newcomer: fleet.apply("other", newcomer, NOW_US)),
            )
        )
    assert counts[0] == counts[1]


def test_made_up_workers_do_not_displace_one_that_still_writes() -> None:
    fleet = Fleet(3000, most=20)
    fleet.apply("real", status("real"), NOW_US)
    refused = 0
    for number in range(200):
        now_us = NOW_US + 10_000 * number
        fleet.apply("real", status("real", written_at_us=now_us), now_us)
        try:
            fleet.apply(f"made-up-{number}", status(f"made-up-{number}", (7,), now_us), now_us)
        except NoRoomError:
            refused += 1
        assert owner(fleet, 0, now_us) == "real"
    assert refused == 200 - MAX_CLAIMANTS
    for number in range(MAX_WORKERS + 200):
        with suppress(NoRoomError):
            fleet.apply(f"made-up-{number}", status(f"made-up-{number}", (), now_us), now_us)
    assert fleet.summary(now_us) == FleetSummary(MAX_WORKERS + 1, MAX_WORKERS + 1, 2)


@pytest.mark.parametrize(("workers", "partitions"), [(1, 4), (90, 3), (300, 64)])
def test_real_workers_that_join_at_once_are_all_known_whoever_owns_the_partitions(
    workers: int, partitions: int
) -> None:
    """More than can own a partition: those that were heard first must not keep out the owners."""
    fleet = Fleet(3000, most_workers(partitions))
    owned: dict[int, tuple[int, ...]] = {}
    for partition in range(partitions):
        place = workers - 1 - partition % workers
        owned[place] = (*owned.get(place, ()), partition)
    for epoch in range(3):
        for number in range(workers):
            has = owned.get((number + epoch) % workers, ()) if epoch else ()
            fleet.apply(f"worker-{number}", status(f"worker-{number}", has, NOW_US + epoch, epoch), NOW_US + epoch)
    assert fleet.summary(NOW_US + 2) == FleetSummary(workers, workers, partitions)


def test_a_worker_that_gives_up_its_partitions_owns_none_even_if_there_is_no_room_for_it() -> None:
    fleet = fleet_of(status("real"))
    for number in range(MAX_WORKERS):
        fleet.apply(f"made-up-{number}", status(f"made-up-{number}", ()), NOW_US)
    with pytest.raises(NoRoomError):
        fleet.apply("real", status("real", ()), NOW_US)
    assert owner(fleet, 0) is None
    fleet.apply("real", status("real"), NOW_US)
    assert owner(fleet, 0) == "real"


def test_a_new_worker_takes_the_place_of_the_one_that_was_silent_longest() -> None:
    fleet = Fleet(3000, most=3)
    for number, name in enumerate(("worker-00", "worker-01", "worker-02")):
        fleet.apply(name, status(name, (number,)), NOW_US)
    later = NOW_US + 3_000_001
    fleet.apply("worker-00", status("worker-00", (0,), later), later)
    fleet.apply("worker-03", status("worker-03", (3,), later), later)
    assert fleet.summary(later).workers == 3
    fleet.apply("worker-02", status("worker-02", (2,), later), later)
    assert [owner(fleet, each, later) for each in range(4)] == ["worker-00", None, "worker-02", "worker-03"]
    with pytest.raises(NoRoomError):
        fleet.apply("worker-01", status("worker-01", (1,), later), later)


def test_a_partition_has_few_live_claimants_and_silent_ones_give_way() -> None:
    fleet = fleet_of(status("real", (5,)))
    for number in range(1, MAX_CLAIMANTS):
        fleet.apply(f"made-up-{number}", status(f"made-up-{number}", (5, 6), NOW_US + number), NOW_US + number)
    with pytest.raises(NoRoomError, match="partition 5 has 8 live claimants"):
        fleet.apply("made-up-99", status("made-up-99", (4, 5)), NOW_US)
    assert owner(fleet, 4) is None, "nothing of the status is taken"
    later = NOW_US + 4_000_000
    fleet.apply("real", status("real", (5,), later), later)
    assert owner(fleet, 5, later) == "real"
    fleet.apply("worker-01", status("worker-01", (5,), later, epoch=3), later)
    assert owner(fleet, 5, later) == "worker-01"
    assert fleet.summary(later).workers == 2, "what is kept of silent workers is bounded, too"


def test_made_up_pre_infer_workers_are_bounded_and_do_not_displace_a_real_one() -> None:
    fleet = fleet_of(pre_infer())
    for number in range(MAX_POOL_WORKERS + 40):
        name = f"made-up-{number}"
        with suppress(NoRoomError):
            fleet.apply(name, replace(pre_infer(), worker_id=name), NOW_US)
    assert len(fleet._pool) == MAX_POOL_WORKERS
    fleet.apply("pre-00", pre_infer(refused=1), NOW_US)
    assert not fleet.pool_takes(NOW_US), "the real one is still heard"


def test_a_worker_is_of_the_kind_that_its_last_status_says() -> None:
    fleet = fleet_of(status("pre-00"))
    fleet.apply("pre-00", pre_infer(), NOW_US)
    assert owner(fleet, 0) is None and fleet.pool_takes(NOW_US)
    fleet.apply("pre-00", status("pre-00"), NOW_US)
    assert owner(fleet, 0) == "pre-00" and not fleet.pool_takes(NOW_US)


def test_as_many_workers_are_kept_as_can_own_partitions_and_more() -> None:
    assert most_workers(1) > 2 and most_workers(64) >= 128 and most_workers(4096) == MAX_WORKERS
