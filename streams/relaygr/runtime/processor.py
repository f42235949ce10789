"""The processor of this machine."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path


def processor_name() -> str:
    """The model of the processor, where the system tells it, and the number of cores."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {os.cpu_count()} cores"
