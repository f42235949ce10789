"""When a worker offers users for a warm-up."""

from __future__ import annotations

from collections.abc import Callable

from relaygr.worker.process.warm_up_offers import WarmUpOffers
from relaygr.worker.settings import WorkerSettings

SECOND_US = 1_000_000


class FakeStore:
    user_count = 2

    def recent_users(self, partitions: frozenset[int], count: int, is_wanted: Callable[[], bool]) -> list[str]:
        assert is_wanted()
        return [f"user-of-{partition}" for partition in sorted(partitions)][:count]


class FakeExecutor:
    """Records the calls that are posted to the device thread."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def post(self, call: Callable[[], None]) -> None:
        call()

    def begin_warm_up(self) -> None:
        self.calls.append("begin")

    def offer_warm_ups(self, users: list[str]) -> None:
        self.calls.append(list(users))


class Offers:
    def __init__(self, **settings: object) -> None:
        self.store, self.executor = FakeStore(), FakeExecutor()
        values = {"warm_up_users": 10, "warm_up_s": 5.0, **settings}
        self.offers = WarmUpOffers(WorkerSettings(**values), self.executor, self.store)  # type: ignore[arg-type]

    def tick(self, now_s: float) -> list[object]:
        """The calls of one tick, with its scan."""
        self.executor.calls.clear()
        self.offers.tick(int(now_s * SECOND_US))
        if self.offers._thread is not None:
            self.offers._thread.join()
        return [*self.executor.calls]


def test_an_assignment_begins_a_warm_up_with_the_users_of_its_partitions() -> None:
    world = Offers()
    assert world.tick(1) == []
    world.offers.begin(frozenset({3, 1}))
    assert world.tick(2) == ["begin", ["user-of-1", "user-of-3"]]


def test_the_store_is_scanned_again_only_when_its_users_change_and_until_the_warm_up_ends() -> None:
    world = Offers()
    world.offers.begin(frozenset({1}))
    world.tick(1)
    assert world.tick(1.5) == world.tick(2.5) == []
    world.store.user_count = 3
    assert world.tick(3.6) == [["user-of-1"]]
    assert world.tick(6) == [[]]
    world.store.user_count = 4
    assert world.tick(7) == []


def test_a_new_model_begins_again_with_the_same_partitions() -> None:
    world = Offers()
    world.offers.begin(frozenset({1}))
    world.tick(1)
    world.offers.begin()
    assert world.tick(2) == ["begin", ["user-of-1"]]


def test_a_warm_up_is_off_by_its_setting_and_stops_with_the_worker() -> None:
    world = Offers(warm_up_users=0)
    world.offers.begin(frozenset({1}))
    assert world.tick(1) == []
    world = Offers()
    world.offers.begin(frozenset({1}))
    world.offers.stop()
    assert world.tick(1) == ["begin"]
