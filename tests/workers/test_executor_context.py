"""The parking lot, and the timers of a loop that looks at the clock itself."""

from __future__ import annotations

from relaygr.worker.executor.context import Timers, WaitQueue


def test_parked_work_is_found_by_user_in_order_of_arrival() -> None:
    lot: WaitQueue[str] = WaitQueue(10)
    for user, work in (("u", "a"), ("v", "b"), ("u", "c")):
        assert lot.park(user, work)
    assert lot.take_all("u") == ["a", "c"]
    assert lot.take_all("u") == []
    assert len(lot) == 1


def test_a_full_lot_takes_no_more_until_something_leaves() -> None:
    lot: WaitQueue[str] = WaitQueue(2)
    assert lot.park("u", "a") and lot.park("v", "b")
    assert not lot.park("w", "c")
    assert lot.take("u", "a")
    assert lot.park("w", "c")
    assert len(lot) == 2


def test_a_lot_without_room_parks_nothing() -> None:
    assert not WaitQueue[str](0).park("u", "a")


def test_a_piece_of_work_is_taken_once() -> None:
    lot: WaitQueue[str] = WaitQueue(5)
    lot.park("u", "a")
    assert lot.take("u", "a")
    assert not lot.take("u", "a")
    assert not lot.take("nobody", "a")
    assert len(lot) == 0


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


def test_the_next_call_is_told() -> None:
    timers = Timers()
    assert timers.next_in_us(0) is None
    timers.at(50, lambda: None)
    assert timers.next_in_us(20) == 30
    assert timers.next_in_us(80) == 0
