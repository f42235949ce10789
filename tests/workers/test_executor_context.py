"""The queue of work that waits for a history, and the timers of a loop that reads the clock itself."""

from __future__ import annotations

import weakref

from relaygr.worker.executor.context import WaitQueue
from relaygr.worker.executor.timers import Timers


def test_waiting_work_is_found_by_user_in_order_of_arrival() -> None:
    queue: WaitQueue[str] = WaitQueue(10)
    for user, work in (("u", "a"), ("v", "b"), ("u", "c")):
        queue.put(user, work)
    assert queue.take_all("u") == ["a", "c"]
    assert queue.take_all("u") == []
    assert len(queue) == 1


def test_a_full_queue_takes_no_more_until_something_leaves() -> None:
    queue: WaitQueue[str] = WaitQueue(2)
    queue.put("u", "a")
    assert not queue.is_full
    queue.put("v", "b")
    assert queue.is_full
    assert queue.take("u", "a")
    assert not queue.is_full


def test_a_queue_without_room_takes_nothing() -> None:
    assert WaitQueue[str](0).is_full


def test_a_piece_of_work_is_taken_once() -> None:
    queue: WaitQueue[str] = WaitQueue(5)
    queue.put("u", "a")
    assert queue.take("u", "a")
    assert not queue.take("u", "a")
    assert not queue.take("nobody", "a")
    assert len(queue) == 0


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
