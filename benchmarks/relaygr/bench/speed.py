"""How fast the machine was during a run.

Guests of a shared host slow each other down, by a half and for seconds at a time where they share a core's two threads.
No counter of a guest shows it, but the CPU time of fixed work does. It is compared with its quiet time, the lowest
tenth of some seconds. Its mean on a quiet machine is a little longer.
"""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from relaygr.bench.rows import machine, refuse_other_machine
from relaygr.runtime.errors import RelayError

INTERVAL_S = 0.05
QUIET_S = 5.0
"""How long the fixed work is repeated for its quiet time."""
QUIET_LIMIT = 1.15
"""The slowdown up to which an idle machine counts as quiet."""
WINDOW_S = 2.0
"""How long a look at an idle machine takes."""
LEAST_PATIENCE = 1 / 8
"""The part of the longest time that is always waited."""
_WIDTH, _PRODUCTS = 96, 16
"""A fifth of a millisecond, in a core's own caches. With its thread it takes about 1 % of a core."""


class FixedWork:
    """Products of small matrices, on one thread."""

    def __init__(self) -> None:
        self._left, self._right, self._product = torch.randn(3, _WIDTH, _WIDTH).unbind()

    def cpu_us(self) -> float:
        """The CPU time that it takes now. Waiting for a core does not count."""
        torch.set_num_threads(1)  # Each thread has a number of its own.
        torch.mm(self._left, self._right, out=self._product)
        began_ns = time.thread_time_ns()
        for _ in range(_PRODUCTS):
            torch.mm(self._left, self._right, out=self._product)
        return (time.thread_time_ns() - began_ns) / 1000

    def repeated_us(self, seconds: float) -> list[float]:
        """Its CPU times within this time."""
        times_us, ends_s = [self.cpu_us()], time.monotonic() + seconds
        while time.monotonic() < ends_s:
            time.sleep(INTERVAL_S)
            times_us.append(self.cpu_us())
        return times_us


class MachineSpeed:
    """The speed of the machine, compared with the quiet machine of a folder of results."""

    def __init__(self, out: Path) -> None:
        """Measures the quiet time if the folder has none. Raises RelayError for that of another machine."""
        self._work = FixedWork()
        self._quiet_us = _quiet_us_in(out, self._work)
        self._patience = 1.0

    def slowdown(self, seconds: float) -> float:
        """The time of fixed work within this time, as a multiple of its quiet time."""
        return statistics.mean(self._work.repeated_us(seconds)) / self._quiet_us

    def wait_until_quiet(self, at_most_s: float, on_wait: Callable[[float], None] = lambda _: None) -> None:
        """Waits until the idle machine is quiet, or for this time. `on_wait` gets each slowdown of one that is not.

        Each wait in vain halves the longest time of the next one, down to an eighth, since some hosts are never quiet.
        """
        if at_most_s <= 0:
            return
        ends_s = time.monotonic() + self._patience * at_most_s
        while time.monotonic() < ends_s:
            slowdown = self.slowdown(WINDOW_S)
            if slowdown <= QUIET_LIMIT:
                self._patience = 1.0
                return
            on_wait(slowdown)
        self._patience = max(self._patience / 2, LEAST_PATIENCE)

    def watch(self) -> SpeedWatch:
        """Measures while it is entered."""
        return SpeedWatch(self._work, self._quiet_us)


class SpeedWatch:
    """Repeats fixed work on a thread of its own."""

    def __init__(self, work: FixedWork, quiet_us: float) -> None:
        self._work, self._quiet_us = work, quiet_us
        self._times_us: list[tuple[float, float]] = []
        """When, on the monotonic clock in seconds, and how long."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="speed")

    def __enter__(self) -> SpeedWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def slowdown_since(self, begin_s: float) -> float:
        """The mean time of the fixed work since then (monotonic), as a multiple of its quiet time. NaN if it did not
        run.
        """
        times_us = [took_us for at_s, took_us in self._times_us if at_s >= begin_s]
        return statistics.mean(times_us) / self._quiet_us if times_us else math.nan

    def _run(self) -> None:
        while True:
            self._times_us.append((time.monotonic(), self._work.cpu_us()))
            if self._stopping.wait(INTERVAL_S):
                return


def _quiet_us_in(out: Path, work: FixedWork) -> float:
    path = out / "speed.json"
    if not path.exists():
        # The lowest tenth: others may use the machine now and then.
        quiet_us = statistics.quantiles(work.repeated_us(QUIET_S), n=10)[0]
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "quiet_us": round(quiet_us, 3)}) + "\n", "utf-8")
    try:
        found = json.loads(path.read_text("utf-8"))
        where, quiet_us = found["machine"], float(found["quiet_us"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RelayError(
            f"{path} does not have the speed of a machine: {error!r}. Remove it to measure anew"
        ) from error
    refuse_other_machine(path, where)
    return quiet_us
