"""The processor of this machine."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path


def processor_name() -> str:
    """The model of the processor, where the system tells it, and the number of cores."""
    model = _told("model name") or platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def instruction_sets() -> frozenset[str]:
    """The instruction sets that processor and system have, by Linux's names. Empty where the system does not tell."""
    return frozenset(_told("flags").split())


def _told(name: str) -> str:
    """The value of a line of the first processor in Linux's list; empty without one."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(name):
                return line.split(":", 1)[1].strip()
    return ""
