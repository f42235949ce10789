"""The watchdog of the device thread detects a hang, and does not mistake a stop of the whole process for one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from relaygr.runtime.clock import ManualClock, SystemClock
from relaygr.worker.executor.thread import DeviceThread

WATCHDOG_S = 2.0
LOOK_US = 250_000


class Executor:
    """An executor without work. It makes progress when `step` is called, or when the test sets its time."""

    def __init__(self, clock: ManualClock | SystemClock) -> None:
        self.clock = clock
        self.last_progress_us = clock.monotonic_us()
        self.mail_arrived = threading.Event()
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        self.last_progress_us = self.clock.monotonic_us()


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
def idle() -> Iterator[Executor]:
    executor = Executor(SystemClock())
    device = DeviceThread(executor, lambda: None, SystemClock(), watchdog_s=1.0, on_death=lambda: None)  # type: ignore[arg-type]
    device.start()
    yield executor
    assert device.stop(10)


@pytest.mark.slow
def test_an_idle_thread_makes_progress_often_enough_for_its_watchdog(idle: Executor) -> None:
    ends_s = time.monotonic() + 30
    while idle.steps < 4:
        assert time.monotonic() < ends_s, "it sleeps"
        time.sleep(0.02)
