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
    EntryWeight,
    EvictionOrder,
    EvictionPolicy,
    Lru,
    PolicyName,
    make_policy,
)
from tests.workers.policy_models import SlowArc, SlowLru, SlowOrder

VISIT_US = 100
"""Of the orders below; later uses are other visits."""


def weight(pages: int = 1, identity: int = 0) -> EntryWeight:
    return EntryWeight(pages, identity)


class BoundedTier:
    """A tier of a fixed number of pages under an order. Tests see which entries are still cached."""

    def __init__(self, order: EvictionOrder, capacity: int) -> None:
        self.order = order
        self.capacity = capacity
        self.numbers = itertools.count(1)
        self.users: dict[str, tuple[int, EntryWeight]] = {}

    def ask(self, user: str, now_us: int, pages: int = 1) -> bool:
        """One visit. Returns whether the user was cached."""
        known = self.users.get(user)
        if known is not None:
            self.order.touch(known[0], now_us)
            return True
        by_number = {number: name for name, (number, _) in self.users.items()}
        while pages > self.capacity - sum(held.pages for _, held in self.users.values()):
            victim = next(iter(self.order.victims()))
            self.order.evict(victim)
            del self.users[by_number[victim]]
        entry = (next(self.numbers), weight(pages, hash(user)))
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

    def test_arc_keeps_the_hot_set_after_the_first_scan(self) -> None:
        assert hits_of_a_hot_set_behind_scans(Arc(20, visit_us=VISIT_US)) == 200 - 5

    def test_all_uses_within_one_visit_count_once(self) -> None:
        """Job and ranking request of one impression each touch the prefix: every scan looked like a hot set."""
        tier = BoundedTier(Arc(20, visit_us=VISIT_US), 20)
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
        assert list(arc.victims()) == [2, 3, 1]
        arc.evict(2)
        arc.add(4, weight(identity=2), 2 * VISIT_US)
        # It is among the frequent ones now, and the recent ones may have a page.
        assert list(arc.victims()) == [1, 4, 3]

    def test_a_frequent_entry_that_was_evicted_too_early_takes_the_room_back(self) -> None:
        arc = Arc(10, VISIT_US)
        for number in (1, 2, 3):
            arc.add(number, weight(identity=number), 0)
        for number in (1, 2):
            arc.touch(number, VISIT_US)
        arc.evict(3)
        arc.add(4, weight(identity=3), 2 * VISIT_US)
        arc.add(5, weight(identity=5), 2 * VISIT_US)
        assert list(arc.victims()) == [1, 2, 4, 5]
        arc.evict(1)
        arc.add(6, weight(identity=1), 3 * VISIT_US)
        assert list(arc.victims()) == [5, 2, 4, 6]

    def test_a_hot_set_that_moves_on_at_once_is_cached_as_by_lru(self) -> None:
        hits = {}
        for order in (Lru(), Arc(20, VISIT_US)):
            tier, now_us = BoundedTier(order, 20), 0
            hits[type(order)] = 0
            for day in range(20):
                for _ in range(5):
                    for user in range(18):
                        now_us += VISIT_US
                        hits[type(order)] += tier.ask(f"{day} {user}", now_us)
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
        assert list(arc.victims()) == [2, 3]


@pytest.mark.parametrize("name", PolicyName)
class TestEveryPolicy:
    def test_demoted_entries_go_before_all_others_until_touched(self, name: PolicyName) -> None:
        policy = make_policy(name, 10)
        for number in (1, 2, 3, 4):
            policy.add(number, weight(identity=number), number)
        policy.demote(3)
        policy.demote(2)
        policy.demote(99)
        assert list(policy.victims()) == [3, 2, 1, 4]
        policy.touch(3, 6)
        order = list(policy.victims())
        assert (order[0], set(order), len(policy)) == (2, {1, 2, 3, 4}, 4)

    def test_a_demoted_entry_can_be_evicted_and_removed(self, name: PolicyName) -> None:
        policy = make_policy(name, 10)
        for number in (1, 2, 3):
            policy.add(number, weight(identity=number), number)
            policy.demote(number)
        policy.evict(1)
        policy.remove(2)
        policy.remove(99)
        assert (list(policy.victims()), len(policy), 1 in policy, 3 in policy) == ([3], 1, False, True)

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
        policy = make_policy(name, 12)
        now_us, there = 0, set()
        for step, number, pages, passes_us in steps:
            now_us += passes_us * 10_000
            if step == "a" or (step == "t" and number not in there):
                policy.add(number, weight(pages, number % 5), now_us)
                there.add(number)
            elif step == "t":
                policy.touch(number, now_us)
            elif step == "d":
                policy.demote(number)
            else:
                chosen = next((found for found in policy.victims() if found not in skipped), None)
                if chosen is not None:
                    policy.evict(chosen)
                    there.remove(chosen)
            assert len(policy) == len(there)
        walked = list(policy.victims())
        assert (sorted(walked), len(walked)) == (sorted(there), len(there))


Steps = list[tuple[str, int, int, int]]
_MODELS: dict[str, tuple[Callable[[], EvictionOrder], Callable[[], SlowOrder]]] = {
    "lru": (Lru, SlowLru),
    "arc": (lambda: Arc(15, VISIT_US), lambda: SlowArc(15, VISIT_US)),
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
        assert next(iter(order.victims()), None) == expected
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
            held = weight(pages, number % 6)
            order.add(number, held, now_us)
            model.add(number, held, now_us)
            there.add(number)
        else:
            order.touch(number, now_us)
            model.touch(number, now_us)
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
    policy = make_policy(name, users)
    for number in range(users):
        policy.add(Number(number), weight(1, number), number)
    return policy


def evict_one(policy: EvictionPolicy) -> None:
    policy.evict(next(iter(policy.victims())))


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
    }
    return {what: cost_of(partial(step, policy)) for what, step in steps.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PolicyName)
def test_a_step_costs_no_more_among_1e5_users_than_among_a_hundred(name: PolicyName) -> None:
    """12. LRU touches walked a list."""
    few, many = costs_among(name, 100), costs_among(name, 100_000)
    assert all(0 < many[what] <= 2 * few[what] + 10 for what in few), (few, many)
