"""The measured part of a run: what its processes, the broker and the rest of the machine use meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from relaygr.machine import busy_s

SAMPLE_S = 0.1


class MeasuredWindow:
    """The measured part of a run: CPU time of each process, of the broker, and of the rest of the machine."""

    def __init__(
        self,
        begun: Path,
        roles: Callable[[], Mapping[int, str]],
        longest_s: float = math.inf,
    ) -> None:
        """The window begins when the file `begun` has content, and ends after `longest_s` or with the last sample.
        `roles`: the measured processes by their ids.
        """
        self._begun = begun
        self._longest_s, self._ends_s = longest_s, math.inf
        self._roles = roles
        self._processes: dict[psutil.Process, str] = {}
        self._first: dict[psutil.Process, tuple[float, float]] = {}
        self._last: dict[psutil.Process, tuple[float, float]] = {}
        self._machine: list[tuple[float, float]] = []
        self._next_s = 0.0

    def sample(self) -> None:
        """Reads the CPU time of every process, at most once a second, because reading takes CPU time too."""
        if not self._next_s <= time.monotonic() <= self._ends_s:
            return
        self._next_s = time.monotonic() + (1.0 if self._processes else SAMPLE_S)
        if not self._processes:
            if not (self._begun.exists() and self._begun.stat().st_size):
                return
            self._open()
        for process in self._processes:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            now = (time.monotonic(), times.user + times.system)
            self._first.setdefault(process, now)
            self._last[process] = now
        self._machine.append((time.monotonic(), busy_s()))

    def _open(self) -> None:
        self._ends_s = time.monotonic() + self._longest_s
        roles = self._roles()
        own = psutil.Process()
        self._processes = {process: roles.get(process.pid, _role_of_other(process)) for process in own.children(True)}
        self._processes[own] = "benchmark"

    def cpu_per_second(self) -> dict[str, float]:
        """CPU seconds in a second of wall time, by role. The longest sampled process gives the wall time."""
        wall_s = max((self._last[process][0] - self._first[process][0] for process in self._last), default=0.0)
        used: dict[str, float] = {}
        for process, last in self._last.items():
            role = self._processes[process]
            used[role] = used.get(role, 0.0) + last[1] - self._first[process][1]
        return {role: seconds / wall_s for role, seconds in used.items()} if wall_s else {}

    def foreign_cpu_per_second(self) -> float:
        """The CPU seconds a second that processes used which this one did not start."""
        if len(self._machine) < 2:
            return float("nan")
        (from_s, busy_from_s), (to_s, busy_to_s) = self._machine[0], self._machine[-1]
        return max(0.0, (busy_to_s - busy_from_s) / (to_s - from_s) - sum(self.cpu_per_second().values()))


def _role_of_other(process: psutil.Process) -> str:
    """`idle` for the Python processes that wait for their turn, else `broker`."""
    try:
        return "idle" if "python" in process.name() else "broker"
    except psutil.Error:
        return "broker"
