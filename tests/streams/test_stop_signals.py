"""Waiting for SIGTERM and Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from relaygr.runtime.stop_signals import SIGNALS, StopSignals


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class RaiseAt:
    """Traces a call, and sends this process SIGTERM twice at one instruction of it."""

    def __init__(self, number: int) -> None:
        self.seen = 0
        self._number = number

    def __call__(self, frame: FrameType, event: str, _: Any) -> RaiseAt:
        frame.f_trace_opcodes = True
        if event == "opcode":
            if self.seen == self._number:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)
            self.seen += 1
        return self


def wait_traced(stopping: StopSignals, trace: RaiseAt) -> None:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        stopping.wait()
    finally:
        sys.settrace(before)


def test_a_signal_at_any_instruction_of_the_wait_ends_it() -> None:
    number = 0
    while True:
        stopping = StopSignals()
        trace = RaiseAt(number)
        # For the instructions after the wait itself, at which no signal is sent before it.
        late = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGTERM))
        late.start()
        wait_traced(stopping, trace)
        late.cancel()
        if trace.seen <= number:
            return
        number += 1


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_came_before_the_wait_counts(number: signal.Signals) -> None:
    stopping = StopSignals()
    signal.raise_signal(number)
    stopping.wait()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_during_the_wait_ends_it(number: signal.Signals) -> None:
    stopping = StopSignals()
    threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, number)).start()
    stopping.wait()
