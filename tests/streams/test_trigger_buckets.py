"""The buckets: their bounds over every window and for any offered work."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.admission.buckets import (
    LOAD_BURSTS,
    ONE_SHARE,
    SET_BACK_US,
    BucketLimits,
    FleetBuckets,
    OwnerBuckets,
    SharedBucket,
)
from relaygr.admission.latency import LatencyModel
from relaygr.admission.policy import Estimate, OwnerView, Refusal
from relaygr.schemas.messages import LatencyCoefficients

LIMITS = BucketLimits(footprint_reserve=0.1, load_limit=0.8, preinfer_share=0.3, burst_us=500_000)
CAPACITY_BYTES = 1_000_000
HOUR_US = 3_600_000_000


def offer(
    new_bytes: int = 1000, alive_us: int = 100_000, prepare_us: float = 0.0, saved_us: float = 1000.0
) -> Estimate:
    return Estimate(
        prefix_tokens=100,
        scored_tokens=10,
        full_us=saved_us,
        hit_us=0.0,
        prepare_us=prepare_us,
        new_bytes=new_bytes,
        alive_us=alive_us,
    )


def room_of(account: SharedBucket, now_us: int) -> int:
    """The largest charge that there is room for."""
    return max(amount for amount in range(10_000) if account.has_room("default", amount, now_us))


offers = st.lists(
    st.tuples(
        st.integers(0, 300_000),
        st.builds(
            offer,
            new_bytes=st.integers(0, 2 * CAPACITY_BYTES),
            alive_us=st.integers(0, 2_000_000),
            prepare_us=st.floats(0, 400_000),
            saved_us=st.floats(0, 1e6),
        ),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(offers, st.floats(0.05, 1.0))
def test_admitted_bytes_times_time_and_device_time_stay_within_the_budget_over_every_window(
    arrivals: list[tuple[int, Estimate]], share: float
) -> None:
    buckets = OwnerBuckets(LIMITS, CAPACITY_BYTES, share, 0)
    admitted, now_us = [], 0
    for gap_us, estimate in arrivals:
        now_us += gap_us
        if buckets.admit(estimate, now_us) is None:
            admitted.append((now_us, estimate))
    footprint_rate = 0.9 * CAPACITY_BYTES * share
    for first in range(len(admitted)):
        byte_us = device_us = largest_byte_us = largest_device_us = 0.0
        for at_us, estimate in admitted[first:]:
            byte_us += estimate.footprint_byte_us
            device_us += estimate.prepare_us
            largest_byte_us = max(largest_byte_us, estimate.footprint_byte_us)
            largest_device_us = max(largest_device_us, estimate.prepare_us)
            window_us = at_us - admitted[first][0] + LIMITS.burst_us
            assert byte_us <= (footprint_rate * window_us + largest_byte_us) * (1 + 1e-9)
            load_window_us = window_us + (LOAD_BURSTS - 1) * LIMITS.burst_us
            assert device_us <= (LIMITS.load_limit * share * load_window_us + largest_device_us) * (1 + 1e-9)


@pytest.mark.slow
@given(offers)
def test_two_halves_of_a_budget_admit_no_more_than_the_whole_and_its_burst(
    arrivals: list[tuple[int, Estimate]],
) -> None:
    halves = [OwnerBuckets(LIMITS, CAPACITY_BYTES, 0.5, 0) for _ in range(2)]
    now_us, byte_us, largest = 0, 0.0, [0.0, 0.0]
    for index, (gap_us, estimate) in enumerate(arrivals):
        now_us += gap_us
        if halves[index % 2].admit(estimate, now_us) is None:
            byte_us += estimate.footprint_byte_us
            largest[index % 2] = max(largest[index % 2], estimate.footprint_byte_us)
    assert byte_us <= (0.9 * CAPACITY_BYTES * (now_us + LIMITS.burst_us) + sum(largest)) * (1 + 1e-9)


def test_a_prefix_larger_than_the_whole_share_of_the_cache_is_refused_for_good() -> None:
    buckets = OwnerBuckets(LIMITS, CAPACITY_BYTES, 1.0, 0)
    assert buckets.admit(offer(new_bytes=900_001), 0) is Refusal.FOOTPRINT
    assert buckets.admit(offer(new_bytes=900_000), 0) is None


def test_a_charge_beyond_the_burst_is_taken_when_the_account_is_empty_and_paid_off_after() -> None:
    account = SharedBucket(ONE_SHARE, rate_per_us=1.0, burst_us=100, now_us=0)
    assert account.has_room("default", 250, 0)
    account.charge("default", 250, 0)
    assert not account.has_room("default", 1, 150)
    assert account.has_room("default", 1, 151)


def test_an_account_without_a_rate_takes_nothing() -> None:
    account = SharedBucket(ONE_SHARE, rate_per_us=0.0, burst_us=100, now_us=0)
    assert not account.has_room("default", 1, 10**9)
    assert account.has_room("default", 0, 10**9)


def test_a_clock_that_goes_back_neither_drains_nor_fills() -> None:
    account = SharedBucket(ONE_SHARE, rate_per_us=1.0, burst_us=100, now_us=1000)
    account.charge("default", 50, 1000)
    assert room_of(account, 0) == 50
    assert room_of(account, 1025) == 75


@pytest.mark.parametrize("step_us", [1, 1000, SET_BACK_US - 1])
def test_a_clock_that_steps_back_and_forth_drains_only_the_time_that_passes(step_us: int) -> None:
    account = SharedBucket(ONE_SHARE, rate_per_us=1.0, burst_us=10_000, now_us=SET_BACK_US)
    account.charge("default", 5000, SET_BACK_US)
    for now_us in range(SET_BACK_US, SET_BACK_US + 1000):
        account.has_room("default", 1, now_us - step_us)
        account.has_room("default", 1, now_us)
    assert room_of(account, SET_BACK_US + 1000) == 6000


def test_a_clock_that_was_set_back_drains_from_the_earlier_time_on() -> None:
    account = SharedBucket(ONE_SHARE, rate_per_us=1.0, burst_us=100, now_us=HOUR_US)
    account.charge("default", 50, HOUR_US)
    assert room_of(account, 1000) == 50
    assert room_of(account, 1025) == 75


@pytest.mark.parametrize("step_us", [2 * SET_BACK_US, HOUR_US])
def test_as_many_jobs_are_admitted_after_the_clock_was_set_back(step_us: int) -> None:
    buckets = OwnerBuckets(LIMITS, CAPACITY_BYTES, 1.0, HOUR_US)

    def admitted(start_us: int) -> int:
        count = 0
        for now_us in range(start_us, start_us + 20_000_000, 10_000):
            buckets.count_ranking(4_000, now_us)
            count += buckets.admit(offer(new_bytes=90_000, prepare_us=10_000), now_us) is None
        return count

    admitted(HOUR_US)
    end_us = HOUR_US + 20_000_000
    before = admitted(end_us)
    assert before > 500
    assert admitted(end_us + 20_000_000 - step_us) == pytest.approx(before, rel=0.02)


def test_the_ranking_load_stays_the_same_after_the_clock_was_set_back() -> None:
    buckets = OwnerBuckets(LIMITS, CAPACITY_BYTES, 1.0, HOUR_US)
    for start_us in (HOUR_US, 0):
        for now_us in range(start_us, start_us + 5_000_000, 10_000):
            buckets.count_ranking(4_000, now_us)
        assert buckets.ranking_load(start_us + 5_000_000) == pytest.approx(0.4, rel=0.02)


def test_a_ranking_pass_that_is_counted_late_lets_the_load_fall_once_only() -> None:
    late, at_once = (OwnerBuckets(LIMITS, CAPACITY_BYTES, 1.0, 0) for _ in range(2))
    for buckets in (late, at_once):
        buckets.count_ranking(500_000, 1_000_000)
    for now_us in range(1_000_000, 2_000_000, 10_000):
        late.count_ranking(0, now_us - 500_000)
        late.ranking_load(now_us)
    assert late.ranking_load(2_000_000) == pytest.approx(at_once.ranking_load(2_000_000))


def test_the_load_bucket_leaves_ranking_its_time() -> None:
    buckets = OwnerBuckets(LIMITS, CAPACITY_BYTES, 1.0, 0)
    for now_us in range(0, 5_000_000, 10_000):
        buckets.count_ranking(4_000, now_us)
    assert buckets.ranking_load(5_000_000) == pytest.approx(0.4, rel=0.02)
    now_us = 5_000_000
    # rho - 0.4 leaves 0.4 of a device: 400 ms of two bursts.
    assert buckets.admit(offer(prepare_us=350_000), now_us) is None
    assert buckets.admit(offer(prepare_us=60_000), now_us) is Refusal.LOAD


def test_an_overload_of_ranking_never_shuts_pre_infer_out() -> None:
    buckets = OwnerBuckets(LIMITS, CAPACITY_BYTES, 1.0, 0)
    admitted_us = 0.0
    for now_us in range(0, 10_000_000, 10_000):
        buckets.count_ranking(20_000, now_us)
        if buckets.admit(offer(new_bytes=1, prepare_us=10_000), now_us) is None:
            admitted_us += 10_000
    assert admitted_us / 10_000_000 == pytest.approx(0.3, abs=0.05)


def test_offers_are_admitted_until_the_bucket_is_full() -> None:
    buckets = OwnerBuckets(LIMITS, CAPACITY_BYTES, 1.0, 0)
    # The burst is 0.9 MB for half a second; each takes a tenth of that.
    answers = [buckets.admit(offer(new_bytes=90_000, alive_us=500_000), 0) for _ in range(11)]
    assert answers == [None] * 10 + [Refusal.FOOTPRINT]


MODEL = LatencyModel(LatencyCoefficients(0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0))


def view(worker_id: str, partitions: set[int], capacity_bytes: int = CAPACITY_BYTES) -> OwnerView:
    return OwnerView(worker_id, frozenset(partitions), MODEL, 10, 0, 1, 1000, capacity_bytes, 0, 0, 0)


def admitted_at_once(buckets: OwnerBuckets) -> int:
    count = 0
    while buckets.admit(offer(new_bytes=1000, alive_us=500_000), 0) is None:
        count += 1
    return count


def test_several_processes_add_up_to_one_budget() -> None:
    owner = view("worker-00", {0, 1, 2, 3})
    whole, first, second = (FleetBuckets(LIMITS) for _ in range(3))
    whole.reassign(frozenset(range(8)))
    first.reassign(frozenset({0, 5}))
    second.reassign(frozenset({1, 2, 3}))
    parts = admitted_at_once(first.of(owner, 0)) + admitted_at_once(second.of(owner, 0))
    assert parts == admitted_at_once(whole.of(owner, 0)) == 900


def test_a_new_assignment_changes_the_share_but_forgets_no_charge() -> None:
    owner = view("worker-00", {0, 1})
    fleet = FleetBuckets(LIMITS)
    fleet.reassign(frozenset({0, 1}))
    assert admitted_at_once(fleet.of(owner, 0)) == 900
    fleet.reassign(frozenset({0}))
    assert admitted_at_once(fleet.of(owner, 0)) == 0


def test_a_worker_with_more_memory_gets_more() -> None:
    fleet = FleetBuckets(LIMITS)
    fleet.reassign(frozenset({0, 1}))
    assert admitted_at_once(fleet.of(view("worker-00", {0}), 0)) == 900
    assert admitted_at_once(fleet.of(view("worker-00", {0}, 2 * CAPACITY_BYTES), 0)) == 900


class Processes:
    """Trigger processes that share one owner's partitions, on a virtual clock. Every event wants a pre-infer."""

    def __init__(self, owner: OwnerView) -> None:
        self._owner = owner
        self._all: dict[str, FleetBuckets] = {}
        self._reader: dict[int, str] = {}
        self.admitted_us = 0.0
        self.admitted_byte_us = 0.0

    def rebalance(self, *names: str) -> None:
        """These processes read the topic from now on, each a range of the partitions."""
        partitions = sorted(self._owner.partitions)
        for name in names:
            self._all.setdefault(name, FleetBuckets(LIMITS))
        parts = [partitions[place :: len(names)] for place in range(len(names))]
        self._reader = {each: name for name, part in zip(names, parts, strict=True) for each in part}
        for name, buckets in self._all.items():
            buckets.reassign(frozenset(each for each, reader in self._reader.items() if reader == name))

    def offer(self, partition: int, estimate: Estimate, ranking_us: float, now_us: int) -> None:
        buckets = self._all[self._reader[partition]].of(self._owner, now_us)
        if buckets.admit(estimate, now_us) is None:
            self.admitted_us += estimate.prepare_us
            self.admitted_byte_us += estimate.footprint_byte_us
        buckets.count_ranking(ranking_us, now_us)


CHANGES = {
    "one process": {0: ("a",)},
    "two processes": {0: ("a", "b")},
    "three processes": {0: ("a", "b", "c")},
    "processes join, leave and restart": {
        0: ("a",), 8: ("a", "b"), 20: ("a", "b", "c"), 31: ("b", "c"), 40: ("b",), 47: ("b", "d"),
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("bound_by", ["load", "footprint"])
def test_what_several_processes_admit_adds_up_to_one_budget_also_while_they_rebalance(
    changes: dict[int, tuple[str, ...]], bound_by: str
) -> None:
    processes, random, seconds, rate_per_s = Processes(view("worker-00", set(range(12)))), Random(7), 60, 200
    small = bound_by == "load"
    for number in range(seconds * rate_per_s):
        now_us = number * 1_000_000 // rate_per_s
        if now_us % 1_000_000 == 0 and now_us // 1_000_000 in changes:
            processes.rebalance(*changes[now_us // 1_000_000])
        wanted = offer(1 if small else 40_000, 200_000, 5_000 if small else 1, 1_000)
        processes.offer(random.randrange(12), wanted, 1_000, now_us)
    # Ranking takes 0.2 of the device, and rho is 0.8. One burst of half a second may come on top.
    if small:
        assert processes.admitted_us == pytest.approx(0.6e6 * seconds, rel=0.05)
    else:
        assert processes.admitted_byte_us == pytest.approx(0.9e6 * CAPACITY_BYTES * seconds, rel=0.05)


def test_a_lost_partition_takes_its_ranking_load_with_it() -> None:
    buckets = OwnerBuckets(LIMITS, CAPACITY_BYTES, 1.0, 0)
    for now_us in range(0, 5_000_000, 10_000):
        buckets.count_ranking(4_000, now_us)
    buckets.configure(CAPACITY_BYTES, 0.5, 5_000_000)
    assert buckets.ranking_load(5_000_000) == pytest.approx(0.4, rel=0.02)


THREE = {"home": 0.5, "search": 0.3, "ads": 0.2}
charges = st.lists(
    st.tuples(st.integers(0, 200), st.sampled_from(sorted(THREE)), st.floats(0, 150)), min_size=1, max_size=120
)


@given(charges)
def test_scenarios_together_never_take_more_than_the_whole_bucket_over_any_window(
    wanted: list[tuple[int, str, float]],
) -> None:
    account = SharedBucket(THREE, rate_per_us=1.0, burst_us=100, now_us=0)
    taken: list[tuple[int, str, float]] = []
    now_us = 0
    for gap_us, scenario, amount in wanted:
        now_us += gap_us
        if account.has_room(scenario, amount, now_us):
            account.charge(scenario, amount, now_us)
            taken.append((now_us, scenario, amount))
    for first in range(len(taken)):
        total, largest = 0.0, dict.fromkeys(THREE, 0.0)
        for at_us, scenario, amount in taken[first:]:
            total += amount
            largest[scenario] = max(largest[scenario], amount)
            assert total <= at_us - taken[first][0] + 100 + sum(largest.values()) + 1e-6


@given(charges, st.sampled_from(sorted(THREE)))
def test_a_scenario_gets_its_share_whatever_the_others_take(
    others: list[tuple[int, str, float]], scenario: str
) -> None:
    account = SharedBucket(THREE, rate_per_us=1.0, burst_us=100, now_us=0)
    now_us = 0
    for gap_us, other, amount in others:
        now_us += 10 + gap_us
        if other != scenario and account.has_room(other, amount, now_us):
            account.charge(other, amount, now_us)
        # Nearly its share of what drained since the last time, and no more than its part of the burst.
        own = 0.99 * THREE[scenario] * min(10 + gap_us, 50)
        assert account.has_room(scenario, own, now_us)
        account.charge(scenario, own, now_us)


@pytest.mark.parametrize("scenario", sorted(THREE))
def test_a_scenario_takes_all_while_the_others_are_idle_and_each_gets_its_share_when_all_want_more(
    scenario: str,
) -> None:
    alone = SharedBucket(THREE, rate_per_us=1.0, burst_us=200, now_us=0)
    taken = dict.fromkeys(THREE, 0)
    for now_us in range(20_000):
        if alone.has_room(scenario, 1, now_us):
            alone.charge(scenario, 1, now_us)
            taken[scenario] += 1
    assert taken[scenario] == pytest.approx(20_000, rel=0.02)
    for now_us in range(20_000, 40_000):
        for name in THREE:
            if alone.has_room(name, 1, now_us):
                alone.charge(name, 1, now_us)
                taken[name] += 1
    taken[scenario] -= 20_000
    assert {name: taken[name] / 20_000 for name in THREE} == pytest.approx(THREE, abs=0.02)


def test_the_budget_of_an_owner_is_shared_by_scenario() -> None:
    buckets = OwnerBuckets(LIMITS, CAPACITY_BYTES, 1.0, 0, {"home": 0.75, "ads": 0.25})
    admitted = {"home": 0, "ads": 0}
    for now_us in range(0, 22_000_000, 1_000):
        for scenario in admitted:
            is_taken = buckets.admit(offer(new_bytes=1, prepare_us=2_000), now_us, scenario) is None
            # The first two seconds take the burst.
            admitted[scenario] += is_taken and now_us >= 2_000_000
    # rho is 0.8 of the device: 400 jobs of 2 ms each a second.
    assert admitted["home"] == pytest.approx(0.75 * 8_000, rel=0.05)
    assert admitted["ads"] == pytest.approx(0.25 * 8_000, rel=0.05)
