"""The processor cores that a measurement can use: those that this process may run on, less those that others use."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from types import TracebackType

import psutil

from relaygr.runtime.limits import usable_cores

BUSY_SHARE = 0.25
"""If other processes use more than this share of the cores, measured times and late shares say nothing."""


@dataclass(frozen=True, slots=True)
class Cores:
    """The machine during a measurement."""

    usable: int
    """Cores that this process and its children may use: the CPU quota of a container may be less than its cores."""
    foreign: float
    """Those of them that other processes used, other virtual machines on the same hardware included."""

    @property
    def free(self) -> float:
        """At least a tenth of a core, so that a plan can be made."""
        return max(0.1, self.usable - self.foreign)

    @property
    def is_busy(self) -> bool:
        return self.foreign > BUSY_SHARE * self.usable

    @property
    def said(self) -> str:
        """What makes it busy, as the beginning of a sentence."""
        return f"other processes use {self.foreign:.1f} of {self.usable} {'core' if self.usable == 1 else 'cores'}"


class CoreWatch:
    """Measures the cores while the block runs. Children of this process count as others."""

    def __enter__(self) -> CoreWatch:
        self._own = own_cores()
        self._begin = time.monotonic(), busy_s(self._own), _own_s()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from_s, busy_from_s, own_from_s = self._begin
        took_s = max(time.monotonic() - from_s, 1e-9)
        others_s = busy_s(self._own) - busy_from_s - (_own_s() - own_from_s)
        cores, usable = len(self._own), usable_cores()
        idle = cores - min(max(others_s / took_s, 0.0), float(cores))
        self.cores = Cores(usable, usable - min(idle, usable))


def own_cores() -> frozenset[int]:
    """The numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def busy_s(cores: frozenset[int] | None = None) -> float:
    """The CPU time that these cores, or the whole machine, have spent, other virtual machines' included."""
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    measured = psutil.cpu_times(percpu=True)
    chosen = [times for number, times in enumerate(measured) if cores is None or number in cores]
    return float(sum(getattr(times, name, 0.0) for times in chosen for name in names))


def _own_s() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)
