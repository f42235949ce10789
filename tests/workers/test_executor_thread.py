"""The watchdog of the device thread detects a hang, and does not mistake a stop of the whole process for one.

The poll thread runs short work itself, if the executor is free.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from relaygr.runtime.clock import ManualClock, SystemClock
from relaygr.worker.executor.executor import WORK_TOO_LONG
from relaygr.worker.executor.thread import SHORT_US, TURN_US, DeviceThread
from tests.waiting import becomes

WATCHDOG_S = 2.0
LOOK_US = 250_000


class Executor:
    """An executor with pieces of work of these lengths. It makes progress when `step` is called, or when the test sets
    its time.
    """

    def __init__(self, clock: ManualClock | SystemClock) -> None:
        self.clock = clock
        self.last_progress_us = clock.monotonic_us()
        self.work_arrived = threading.Event()
        self.steps = 0
        self.work_us: list[int] = []
        self.ran_on: list[str] = []
        self.timer_at_us: int | None = None

    def step(self, longest_us: float = math.inf) -> int | None:
        self.steps += 1
        self.last_progress_us = self.clock.monotonic_us()
        if not self.work_us:
            return None if self.timer_at_us is None else max(0, self.timer_at_us - self.last_progress_us)
        if self.work_us[0] > longest_us:
            return WORK_TOO_LONG
        took_us = self.work_us.pop(0)
        self.ran_on.append(threading.current_thread().name)
        if isinstance(self.clock, ManualClock):
            self.clock.advance_us(took_us)
        return 0


class WatchedDevice:
    """A device thread that was not started, checked four times a second."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.executor = Executor(self.clock)
        self.device = DeviceThread(self.executor, lambda: None, self.clock, WATCHDOG_S, on_death=lambda: None)  # type: ignore[arg-type]

    def look_for(self, seconds: float) -> bool:
        """Whether any check finds it stuck."""
        found = False
        for _ in range(int(seconds * 1e6 / LOOK_US)):
            self.clock.advance_us(LOOK_US)
            found |= self.device.is_stuck()
        return found


@pytest.fixture
def world() -> WatchedDevice:
    return WatchedDevice()


def test_a_device_without_progress_is_stuck_even_if_nothing_more_is_queued(world: WatchedDevice) -> None:
    """A single request hung on the device, and the hang was not detected until another request came."""
    assert not world.look_for(WATCHDOG_S)
    assert world.look_for(0.25)


def test_a_device_that_makes_progress_is_not_stuck(world: WatchedDevice) -> None:
    for _ in range(100):
        assert not world.look_for(WATCHDOG_S / 2)
        world.executor.last_progress_us = world.clock.monotonic_us()


def test_the_watchdog_starts_again_after_a_stop_of_the_whole_process(world: WatchedDevice) -> None:
    """After Exit.STUCK a supervisor would restart the process, although another process may have its id by now."""
    world.look_for(1)
    world.clock.advance_us(3600 * 10**6)
    assert not world.device.is_stuck()
    assert not world.look_for(WATCHDOG_S)
    assert world.look_for(0.25)


@pytest.fixture
def idle() -> Executor:
    """Its clock stands, so that work takes no longer on a busy machine."""
    return Executor(ManualClock())


@contextmanager
def running(executor: Executor, watchdog_s: float = 60.0) -> Iterator[DeviceThread]:
    device = DeviceThread(
        executor,  # type: ignore[arg-type]
        lambda: None,
        executor.clock,
        watchdog_s,
        on_death=lambda: None,
        shares=True,
    )
    device.start()
    yield device
    assert device.stop(10)


@pytest.mark.slow
def test_an_idle_thread_makes_progress_often_enough_for_its_watchdog() -> None:
    idle = Executor(SystemClock())
    with running(idle, watchdog_s=1.0):
        assert becomes(lambda: idle.steps >= 4)


class SharedDevice:
    """A device thread that was not started. The test's thread is the poll thread."""

    def __init__(self, shares: bool = True) -> None:
        self.executor = Executor(ManualClock())
        self.device = DeviceThread(
            self.executor,  # type: ignore[arg-type]
            lambda: None,
            self.executor.clock,
            WATCHDOG_S,
            on_death=lambda: None,
            shares=shares,
        )
        self.has_work = False
        """Whether the poll thread has work left for its next turn."""

    def receive(self, *work_us: int) -> bool:
        """The poll thread received this work. Whether it woke the device thread."""
        self.executor.work_us += work_us
        self.has_work = self.device.run_short_work()
        return self.executor.work_arrived.is_set()


def test_short_work_runs_on_the_thread_that_received_it() -> None:
    shared = SharedDevice()
    assert not shared.receive(100, 200)
    assert len(shared.executor.ran_on) == 2


def test_long_work_wakes_the_device_thread() -> None:
    shared = SharedDevice()
    assert shared.receive(100, SHORT_US + 1)
    assert shared.executor.work_us == [SHORT_US + 1]


def test_the_poll_thread_does_much_short_work_in_turns() -> None:
    """The device thread took over after a millisecond. Both threads then waited for the interpreter lock of the other
    one, and with three times the load that it could carry a worker answered a seventh of what it could.
    """
    shared = SharedDevice()
    assert not shared.receive(*[SHORT_US // 2] * 25)
    assert shared.has_work and len(shared.executor.ran_on) == 2 * TURN_US // SHORT_US
    while shared.has_work:
        assert not shared.receive()
    assert not shared.executor.work_us


def test_long_work_behind_short_work_wakes_the_device_thread() -> None:
    shared = SharedDevice()
    assert shared.receive(*[SHORT_US] * 3, 2 * SHORT_US)
    assert not shared.has_work


def test_an_accelerator_s_work_never_runs_on_the_poll_thread() -> None:
    shared = SharedDevice(shares=False)
    assert shared.receive(100)
    assert not shared.executor.ran_on


def test_mail_of_other_threads_is_left_to_the_device_thread() -> None:
    """A swap of models took the poll thread's time."""
    shared = SharedDevice()
    shared.executor.work_arrived.set()
    assert shared.receive(100)
    assert not shared.executor.ran_on


def test_the_poll_thread_does_not_wait_for_an_executor_that_computes() -> None:
    shared = SharedDevice()
    with shared.device._running:
        assert shared.receive(100)
    assert not shared.executor.ran_on


def test_short_work_does_not_wake_a_device_thread_that_knows_the_next_timer(idle: Executor) -> None:
    """Each piece of short work woke it: the time until the same timer, computed twice, differed by microseconds."""
    idle.timer_at_us = idle.clock.monotonic_us() + 60_000_000
    with running(idle) as device:
        assert becomes(lambda: idle.steps > 0 and not device._running.locked())
        idle.work_us = [1] * 3
        device.run_short_work()
        assert not idle.work_arrived.is_set()
        assert idle.ran_on == [threading.current_thread().name] * 3


def test_an_earlier_timer_wakes_the_device_thread(idle: Executor) -> None:
    with running(idle) as device:
        assert becomes(lambda: idle.steps > 0 and not device._running.locked())
        idle.timer_at_us, idle.work_us = idle.clock.monotonic_us() + 1_000, [1]
        device.run_short_work()
        steps = idle.steps
        assert becomes(lambda: idle.steps > steps)


def test_both_threads_run_all_work_once(idle: Executor) -> None:
    with running(idle) as device:
        for number in range(2_000):
            idle.work_us.append(SHORT_US + 1 if number % 3 else 1)
            device.run_short_work()
        assert becomes(lambda: not idle.work_us)
    assert len(idle.ran_on) == 2_000
