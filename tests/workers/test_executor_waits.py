"""The work that waits for a history, and the timers of a loop that reads the clock itself."""

from __future__ import annotations

import weakref
from functools import partial

from relaygr.runtime.clock import ManualClock
from relaygr.schemas.messages import HistoryVersion
from relaygr.worker.executor.waits import FailedWaits, HistoryWaits, Timers
from relaygr.worker.history.resolve import WantedLength


class WaitsWorld:
    """Work that waits until 100 µs, by its name."""

    def __init__(self, most: int) -> None:
        self.clock, self.timers, self.failed = ManualClock(0, 0), Timers(), FailedWaits()
        self.waits = HistoryWaits(self.timers, self.failed, self.clock, most)
        self.woken: list[str] = []

    def wait(self, user: str, work: str, until_us: int = 100, partition: int = 0, *, is_settling: bool = False) -> bool:
        wanted = HistoryVersion(1, 5, b"0" * 16)
        wake = partial(self.woken.append, work)
        return self.waits.wait(user, partition, wanted, until_us, wake, is_settling=is_settling)


def test_waiting_work_is_woken_by_user_in_order_of_arrival() -> None:
    world = WaitsWorld(10)
    for user, work in (("u", "a"), ("v", "b"), ("u", "c")):
        assert world.wait(user, work)
    world.waits.histories_changed(["u", "nobody"])
    assert world.woken == ["a", "c"]
    world.waits.histories_changed(["u"])
    assert world.woken == ["a", "c"]
    assert len(world.waits) == 1


def test_when_as_much_work_waits_as_may_no_more_waits_until_something_leaves() -> None:
    world = WaitsWorld(2)
    assert world.wait("u", "a")
    assert world.wait("v", "b")
    assert not world.wait("w", "c")
    assert world.wait("w", "of a partition that settles", is_settling=True)
    world.waits.histories_changed(["u", "w"])
    assert world.wait("w", "c")


def test_where_nothing_may_wait_nothing_does() -> None:
    assert not WaitsWorld(0).wait("u", "a")


def test_nothing_waits_until_a_time_that_has_passed() -> None:
    world = WaitsWorld(2)
    world.clock.advance_us(100)
    assert not world.wait("u", "a", until_us=100)
    assert world.wait("u", "a", until_us=101)


def test_each_piece_of_work_is_woken_once() -> None:
    world = WaitsWorld(5)
    world.wait("u", "in time")
    world.waits.histories_changed(["u"])
    world.wait("u", "late")
    world.timers.run_due(100)
    world.waits.histories_changed(["u"])
    assert world.woken == ["in time", "late"]
    assert len(world.waits) == 0


def test_only_a_wait_that_times_out_in_a_settled_partition_is_remembered_as_in_vain() -> None:
    world, wanted = WaitsWorld(5), HistoryVersion(1, 5, b"0" * 16)
    world.wait("in time", "a")
    world.waits.histories_changed(["in time"])
    world.wait("settling", "b", is_settling=True)
    world.wait("late", "c")
    world.timers.run_due(100)
    found = [world.failed.cover(user, wanted, None) for user in ("in time", "settling", "late")]
    assert found == [False, False, True]


def test_a_wait_in_vain_for_a_false_version_ends_no_waits_for_true_ones() -> None:
    """One request with a number that no version ever reaches switched off the waits of its user for good."""
    failed = FailedWaits()
    false = HistoryVersion(2**50, 1, b"0" * 16)
    failed.add("u", false)
    assert failed.cover("u", false, None) and failed.cover("u", HistoryVersion(2**50, 9, b"1" * 16), None)
    for wanted in (HistoryVersion(7, 300, b"2" * 16), HistoryVersion(8, 1, b"3" * 16), WantedLength(4, is_exact=False)):
        assert not failed.cover("u", wanted, None)
    failed.add("u", WantedLength(2**17, is_exact=False))
    assert failed.cover("u", WantedLength(2**17, is_exact=True), None)
    for wanted in (HistoryVersion(7, 2**17, b"2" * 16), WantedLength(300, is_exact=False)):
        assert not failed.cover("u", wanted, None)


def test_the_work_of_partitions_that_are_read_is_woken() -> None:
    world = WaitsWorld(5)
    for number, user in enumerate(("u", "v", "w")):
        world.wait(user, user, partition=number)
    world.waits.partitions_read([0, 2])
    assert world.woken == ["u", "w"]


def test_calls_come_in_order_of_their_time_and_then_of_entry() -> None:
    timers, made = Timers(), []
    for name, when_us in (("late", 30), ("first", 10), ("second", 10)):
        timers.at(when_us, lambda name=name: made.append(name))  # type: ignore[misc]
    timers.run_due(9)
    assert made == []
    timers.run_due(10)
    assert made == ["first", "second"]
    timers.run_due(100)
    assert made == ["first", "second", "late"]


def test_a_call_may_set_another_that_is_due_at_once() -> None:
    timers, made = Timers(), []
    timers.at(1, lambda: timers.at(1, lambda: made.append("nested")))
    timers.run_due(1)
    assert made == ["nested"]


def test_the_time_until_the_next_call_is_known() -> None:
    timers = Timers()
    assert timers.next_in_us(0) is None
    timers.at(50, lambda: None)
    assert timers.next_in_us(20) == 30
    assert timers.next_in_us(80) == 0


def test_a_cancelled_call_is_not_made_and_keeps_nothing_in_memory() -> None:
    class Work:
        def late(self) -> None:
            raise AssertionError

    timers, work = Timers(), Work()
    kept = weakref.ref(work)
    timers.at(10, work.late).cancel()
    del work
    assert kept() is None
    timers.run_due(10)
    assert timers.next_in_us(10) is None


def test_a_call_that_was_made_keeps_nothing_in_memory() -> None:
    class Work:
        def late(self) -> None:
            pass

    timers, work = Timers(), Work()
    kept = weakref.ref(work)
    timer = timers.at(10, work.late)
    del work
    timers.run_due(10)
    assert kept() is None
    timer.cancel()
