"""Eviction policies: the purpose of each, its agreement with a slow model, and the cost of a step."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.worker.cache.policies import (
    Arc,
    CostAware,
    Demoting,
    EntryWeight,
    EvictionOrder,
    EvictionPolicy,
    Lru,
    PolicyName,
    PolicyOptions,
    S3Fifo,
    Slru,
    Ttl,
    make_policy,
)
from tests.workers.policy_models import SlowArc, SlowCostAware, SlowLru, SlowOrder, SlowS3Fifo, SlowSlru

VISIT_US = 100
"""Of the orders below; later uses are other visits."""


def weight(pages: int = 1, saved_us: float = 1.0, identity: int = 0) -> EntryWeight:
    return EntryWeight(pages, pages * 16, saved_us, identity)


class BoundedTier:
    """A tier of a fixed number of pages under an order. Tests see which entries are still cached."""

    def __init__(self, order: EvictionOrder, capacity: int) -> None:
        self.order = order
        self.capacity = capacity
        self.numbers = itertools.count(1)
        self.users: dict[str, tuple[int, EntryWeight]] = {}

    def ask(self, user: str, now_us: int, pages: int = 1, saved_us: float = 1.0) -> bool:
        """One visit. Returns whether the user was cached."""
        known = self.users.get(user)
        if known is not None:
            self.order.touch(known[0], now_us)
            return True
        by_number = {number: name for name, (number, _) in self.users.items()}
        while pages > self.capacity - sum(held.pages for _, held in self.users.values()):
            victim = next(iter(self.order.victims(now_us)))
            self.order.evict(victim)
            del self.users[by_number[victim]]
        entry = (next(self.numbers), weight(pages, saved_us, hash(user)))
        self.users[user] = entry
        self.order.add(*entry, now_us)
        return False


def hits_of_a_hot_set_behind_scans(order: EvictionOrder) -> int:
    """Hits of five users who return, between scans of a hundred users who come once each. Room for twenty."""
    tier = BoundedTier(order, 20)
    now_us, strangers, hits = 0, itertools.count(), 0
    for _ in range(10):
        for _ in range(4):
            for user in range(5):
                now_us += VISIT_US
                hits += tier.ask(f"hot {user}", now_us)
        for _ in range(100):
            now_us += VISIT_US
            tier.ask(f"stranger {next(strangers)}", now_us)
    return hits


class TestScans:
    """A run of users who come once must not evict the users who return."""

    def test_lru_forgets_the_hot_set_at_every_scan(self) -> None:
        assert hits_of_a_hot_set_behind_scans(Lru()) == 200 - 10 * 5

    @pytest.mark.parametrize("kind", [Arc, Slru, S3Fifo])
    def test_arc_slru_and_s3fifo_keep_the_hot_set_after_the_first_scan(self, kind: type[Arc | Slru | S3Fifo]) -> None:
        assert hits_of_a_hot_set_behind_scans(kind(20, visit_us=VISIT_US)) == 200 - 5

    @pytest.mark.parametrize("kind", [Arc, Slru, S3Fifo])
    def test_all_uses_within_one_visit_count_once(self, kind: type[Arc | Slru | S3Fifo]) -> None:
        """Job and ranking request of one impression each touch the prefix: every scan looked like a hot set."""
        tier = BoundedTier(kind(20, visit_us=VISIT_US), 20)
        for now_us in range(0, 4 * VISIT_US, VISIT_US):
            tier.ask("regular", now_us)
        for number in range(100):
            now_us = (10 + number) * VISIT_US
            for moment in range(3):
                tier.ask(f"stranger {number}", now_us + moment)
        assert "regular" in tier.users


class TestArc:
    def test_entries_of_one_visit_go_first_until_one_returns_that_was_evicted_too_early(self) -> None:
        arc = Arc(10, VISIT_US)
        for number in (1, 2, 3):
            arc.add(number, weight(identity=number), 0)
        arc.touch(1, VISIT_US)
        assert list(arc.victims(0)) == [2, 3, 1]
        arc.evict(2)
        arc.add(4, weight(identity=2), 2 * VISIT_US)
        # It is among the frequent ones now, and the recent ones may have a page.
        assert list(arc.victims(0)) == [1, 4, 3]

    def test_a_frequent_entry_that_was_evicted_too_early_takes_the_room_back(self) -> None:
        arc = Arc(10, VISIT_US)
        for number in (1, 2, 3):
            arc.add(number, weight(identity=number), 0)
        for number in (1, 2):
            arc.touch(number, VISIT_US)
        arc.evict(3)
        arc.add(4, weight(identity=3), 2 * VISIT_US)
        arc.add(5, weight(identity=5), 2 * VISIT_US)
        assert list(arc.victims(0)) == [1, 2, 4, 5]
        arc.evict(1)
        arc.add(6, weight(identity=1), 3 * VISIT_US)
        assert list(arc.victims(0)) == [5, 2, 4, 6]

    def test_a_hot_set_that_moves_on_at_once_is_cached_as_by_lru(self) -> None:
        """SLRU keeps the users of yesterday in half of its room, S3-FIFO in nine tenths."""
        hits = {}
        for order in (Lru(), Arc(20, VISIT_US), Slru(20, visit_us=VISIT_US), S3Fifo(20, VISIT_US)):
            tier, now_us = BoundedTier(order, 20), 0
            hits[type(order)] = 0
            for day in range(20):
                for _ in range(5):
                    for user in range(18):
                        now_us += VISIT_US
                        hits[type(order)] += tier.ask(f"{day} {user}", now_us)
        assert hits[Slru] < 0.8 * hits[Lru] and hits[S3Fifo] < 0.8 * hits[Lru]
        assert hits[Arc] > 0.9 * hits[Lru]

    def test_what_it_remembers_is_bounded_by_pages(self) -> None:
        arc = Arc(10, VISIT_US)
        for number in range(1, 100):
            arc.add(number, weight(2, identity=number), number)
            if number % 2:
                arc.touch(number, number + VISIT_US)
            arc.evict(number)
        assert sum(queue.ghosts.pages for queue in (arc._recent, arc._frequent)) <= 10
        assert sum(len(queue.ghosts) for queue in (arc._recent, arc._frequent)) <= 5

    def test_a_removed_entry_leaves_no_memory(self) -> None:
        arc = Arc(10, VISIT_US)
        arc.add(1, weight(identity=1), 0)
        arc.remove(1)
        arc.add(2, weight(identity=1), 1)
        arc.add(3, weight(identity=3), 2)
        assert list(arc.victims(3)) == [2, 3]


class TestSlru:
    def test_the_protected_segment_is_bounded_and_what_it_pushes_out_gets_another_chance(self) -> None:
        slru = Slru(10, protected_share=0.5, visit_us=VISIT_US)
        for number in range(1, 4):
            slru.add(number, weight(2), 0)
            slru.touch(number, number * VISIT_US)
        # 2 and 3 are protected; 1 was pushed back into the empty probation segment.
        slru.add(4, weight(2), 4 * VISIT_US)
        assert list(slru.victims(0)) == [1, 4, 2, 3]

    def test_an_entry_that_outgrows_the_segment_leaves_it(self) -> None:
        slru = Slru(10, protected_share=0.5, visit_us=VISIT_US)
        slru.add(1, weight(2), 0)
        slru.touch(1, VISIT_US)
        slru.add(2, weight(1), VISIT_US)
        slru.add(1, weight(6), VISIT_US)
        assert list(slru.victims(0)) == [2, 1]

    @pytest.mark.parametrize("share", [0.0, 1.0])
    def test_a_segment_of_nothing_or_of_all_is_refused(self, share: float) -> None:
        with pytest.raises(ValueError, match="protected"):
            Slru(10, share)


class TestS3Fifo:
    def test_an_entry_that_was_evicted_too_early_enters_main_when_it_returns(self) -> None:
        order = S3Fifo(10, visit_us=VISIT_US)
        order.add(1, weight(identity=1), 0)
        order.evict(1)
        order.add(2, weight(identity=1), 1)
        order.add(3, weight(identity=3), 2)
        assert list(order.victims(3)) == [3, 2]

    def test_a_removed_entry_leaves_no_ghost(self) -> None:
        order = S3Fifo(10, visit_us=VISIT_US)
        order.add(1, weight(identity=1), 0)
        order.remove(1)
        order.add(2, weight(identity=1), 1)
        order.add(3, weight(identity=3), 2)
        assert list(order.victims(3)) == [2, 3]

    def test_ghosts_are_bounded_by_pages(self) -> None:
        order = S3Fifo(10, visit_us=VISIT_US)
        for number in range(1, 100):
            order.add(number, weight(2, identity=number), number)
            order.evict(number)
        order.add(100, weight(identity=1), 100)
        order.add(101, weight(identity=99), 101)
        assert list(order.victims(102)) == [100, 101]

    def test_two_more_visits_lead_to_main_and_each_there_to_another_round(self) -> None:
        order = S3Fifo(10, visit_us=VISIT_US)
        for number in (1, 2):
            order.add(number, weight(identity=number), 0)
        for visit in (1, 2):
            order.touch(1, visit * VISIT_US)
        order.touch(2, VISIT_US)
        assert next(order.victims(0)) == 2
        order.evict(2)
        order.add(3, weight(identity=2), 300)
        order.touch(1, 3 * VISIT_US)
        assert list(order.victims(0)) == [3, 1]

    def test_an_entry_that_a_walk_passes_over_moves_to_the_young_end(self) -> None:
        order = S3Fifo(30, visit_us=VISIT_US)
        for number in (1, 2, 3):
            order.add(number, weight(identity=number), 0)
        walk = order.victims(0)
        assert [next(walk), next(walk)] == [1, 2]
        order.evict(2)
        assert list(order.victims(0)) == [3, 1]


class TestCostAware:
    def test_least_time_saved_per_page_goes_first(self) -> None:
        order = CostAware(VISIT_US)
        order.add(1, weight(pages=10, saved_us=100.0), 0)
        order.add(2, weight(pages=1, saved_us=5.0), 0)
        order.add(3, weight(pages=2, saved_us=100.0), 0)
        assert list(order.victims(0)) == [2, 1, 3]

    def test_frequent_entries_rank_higher_and_equal_ones_go_by_last_use(self) -> None:
        order = CostAware(VISIT_US)
        for number in (1, 2, 3):
            order.add(number, weight(), 0)
        order.touch(1, VISIT_US)
        order.touch(2, 1)
        assert list(order.victims(0)) == [3, 2, 1]

    def test_a_valuable_entry_that_is_not_used_any_more_is_evicted_in_the_end(self) -> None:
        tier = BoundedTier(CostAware(VISIT_US), 10)
        for now_us in range(0, 10 * VISIT_US, VISIT_US):
            tier.ask("once dear", now_us, saved_us=5.0)
        for number in range(1000):
            tier.ask(f"newer {number}", (20 + number) * VISIT_US, saved_us=1.0)
        assert "once dear" not in tier.users

    def test_outdated_ranks_in_the_heap_are_bounded(self) -> None:
        order = CostAware(VISIT_US)
        for number in range(10):
            order.add(number, weight(), 0)
        for now_us in range(10_000):
            order.touch(now_us % 10, now_us)
        assert len(order._heap) <= 2 * len(order) + 64
        for number in range(10):
            order.remove(number)
        assert (len(order), len(list(order.victims(0)))) == (0, 0)


class TestTtl:
    def test_unused_entries_expire_oldest_first(self) -> None:
        order = Ttl(1_000)
        for number, now_us in ((1, 0), (2, 10)):
            order.add(number, weight(), now_us)
        order.touch(1, 400)
        order.add(3, weight(), 500)
        assert list(order.expired(999)) == []
        assert list(order.expired(1_010)) == [2]
        assert list(order.expired(1_500)) == [2, 1, 3]
        assert list(order.victims(0)) == [2, 1, 3]

    def test_a_time_to_live_that_is_not_positive_is_refused(self) -> None:
        with pytest.raises(ValueError, match="positive"):
            make_policy(PolicyName.TTL, PolicyOptions(10, ttl_us=0))


@pytest.mark.parametrize("name", PolicyName)
class TestEveryPolicy:
    def test_demoted_entries_go_before_all_others_until_touched(self, name: PolicyName) -> None:
        policy = make_policy(name, PolicyOptions(10))
        for number in (1, 2, 3, 4):
            policy.add(number, weight(identity=number), number)
        policy.demote(3)
        policy.demote(2)
        policy.demote(99)
        assert list(policy.victims(5)) == [3, 2, 1, 4]
        policy.touch(3, 6)
        order = list(policy.victims(7))
        assert (order[0], set(order), len(policy)) == (2, {1, 2, 3, 4}, 4)

    def test_a_demoted_entry_can_be_evicted_and_removed(self, name: PolicyName) -> None:
        policy = make_policy(name, PolicyOptions(10))
        for number in (1, 2, 3):
            policy.add(number, weight(identity=number), number)
            policy.demote(number)
        policy.evict(1)
        policy.remove(2)
        policy.remove(99)
        assert (list(policy.victims(4)), len(policy), 1 in policy, 3 in policy) == ([3], 1, False, True)

    @pytest.mark.slow
    @given(
        steps=st.lists(
            st.tuples(st.sampled_from("attted"), st.integers(0, 12), st.integers(1, 4), st.sampled_from([1, VISIT_US])),
            max_size=60,
        ),
        skipped=st.sets(st.integers(0, 12)),
    )
    def test_a_walk_meets_every_entry_once_and_may_be_left_anywhere(
        self, name: PolicyName, steps: list[tuple[str, int, int, int]], skipped: set[int]
    ) -> None:
        policy = make_policy(name, PolicyOptions(12))
        now_us, there = 0, set()
        for step, number, pages, passes_us in steps:
            now_us += passes_us * 10_000
            if step == "a" or (step == "t" and number not in there):
                policy.add(number, weight(pages, 1.0 + number, number % 5), now_us)
                there.add(number)
            elif step == "t":
                policy.touch(number, now_us)
            elif step == "d":
                policy.demote(number)
            else:
                chosen = next((found for found in policy.victims(now_us) if found not in skipped), None)
                if chosen is not None:
                    policy.evict(chosen)
                    there.remove(chosen)
            assert len(policy) == len(there)
        walked = list(policy.victims(now_us))
        assert (sorted(walked), len(walked)) == (sorted(there), len(there))


Steps = list[tuple[str, int, int, int]]
_MODELS: dict[str, tuple[Callable[[], EvictionOrder], Callable[[], SlowOrder]]] = {
    "lru": (Lru, SlowLru),
    "ttl": (lambda: Ttl(1_000), SlowLru),
    "slru": (lambda: Slru(15, visit_us=VISIT_US), lambda: SlowSlru(15, VISIT_US)),
    "arc": (lambda: Arc(15, VISIT_US), lambda: SlowArc(15, VISIT_US)),
    "s3fifo": (lambda: S3Fifo(25, VISIT_US), lambda: SlowS3Fifo(25, VISIT_US)),
    "cost": (lambda: CostAware(VISIT_US), lambda: SlowCostAware(VISIT_US)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _MODELS)
@settings(max_examples=200)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("attteer"), st.integers(0, 9), st.integers(1, 5), st.sampled_from([1, 40, 100])),
        max_size=80,
    )
)
def test_an_order_agrees_with_its_slow_model(name: str, steps: Steps) -> None:
    """The first entry of the order is evicted at every step, down to the last."""
    order, model = (make() for make in _MODELS[name])
    now_us = 0
    there: set[int] = set()

    def evict_first() -> None:
        expected = model.first()
        assert next(iter(order.victims(now_us)), None) == expected
        if expected is not None:
            order.evict(expected)
            model.evict(expected)
            there.remove(expected)

    for step, number, pages, passes_us in steps:
        now_us += passes_us
        if step == "e":
            evict_first()
        elif step == "r":
            order.remove(number)
            model.remove(number)
            there.discard(number)
        elif step == "a" or number not in there:
            held = weight(pages, float(1 + (number * pages) % 7), number % 6)
            order.add(number, held, now_us)
            model.add(number, held, now_us)
            there.add(number)
        else:
            order.touch(number, now_us)
            model.touch(number, now_us)
        if isinstance(model, SlowLru) and isinstance(order, Ttl):
            assert list(order.expired(now_us)) == model.expired(now_us, 1_000)
    while there:
        evict_first()
    assert model.first() is None


# The cost of a step: lines of Python, and comparisons, since loops in C run no lines.


class Number(int):
    """An entry number that counts its comparisons."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Number.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def cost_of(call: Callable[[], object]) -> int:
    """Lines run and numbers compared."""
    lines = 0

    def count(frame: object, event: str, argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return count

    before, Number.compared = sys.gettrace(), 0
    gc.disable()
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return lines + Number.compared


def filled(name: PolicyName, users: int) -> EvictionPolicy:
    policy = make_policy(name, PolicyOptions(users))
    for number in range(users):
        policy.add(Number(number), weight(1, float(1 + number % 97), number), number)
    return policy


def evict_one(policy: EvictionPolicy) -> None:
    policy.evict(next(iter(policy.victims(10**9))))


def costs_among(name: PolicyName, users: int) -> dict[str, int]:
    """The cost of each step, on entries in the middle of the order."""
    policy = filled(name, users)
    first, second, third, fourth = (Number(users // 2 + place) for place in range(4))
    steps: dict[str, Callable[[EvictionPolicy], object]] = {
        "touch": lambda policy: policy.touch(first, 10**9),
        "touch again": lambda policy: policy.touch(second, 10**9),
        "demote": lambda policy: policy.demote(third),
        "evict the demoted": evict_one,
        "evict": evict_one,
        "evict the next": evict_one,
        "add": lambda policy: policy.add(Number(users), weight(), 10**9),
        "remove": lambda policy: policy.remove(fourth),
        "expire": lambda policy: next(iter(policy.expired(0)), None),
    }
    return {what: cost_of(partial(step, policy)) for what, step in steps.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PolicyName)
def test_a_step_costs_no_more_among_1e5_users_than_among_a_hundred(name: PolicyName) -> None:
    """12. LRU touches walked a list."""
    few, many = costs_among(name, 100), costs_among(name, 100_000)
    assert all(0 < many[what] <= 2 * few[what] + 10 for what in few), (few, many)


class CountedRank(float):
    """A float that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: float) -> bool:
        CountedRank.compared += 1
        return float(self) < float(other)

    def __truediv__(self, other: float) -> CountedRank:
        return CountedRank(float(self) / other)

    def __rmul__(self, other: float) -> CountedRank:
        return CountedRank(other * float(self))

    def __radd__(self, other: float) -> CountedRank:
        return CountedRank(other + float(self))


@pytest.mark.slow
def test_the_heap_of_the_cost_aware_policy_is_compared_log_n_times() -> None:
    """heapq is written in C: its work shows in comparisons, not in lines of Python."""
    users = 100_000
    policy = Demoting(CostAware(VISIT_US))
    for number in range(users):
        policy.add(number, weight(1, CountedRank(1 + number * 7919 % 9973)), number)
    CountedRank.compared = 0
    for number in range(1000):
        policy.touch(number, number + VISIT_US * 10**6)
    touches = CountedRank.compared
    for _ in range(1000):
        evict_one(policy)
    assert 1000 <= touches <= 1000 * 20
    assert 1000 <= CountedRank.compared - touches <= 1000 * 200
