"""The memory and the cores that this process may use: those of the machine, within the limits of its container.

A container is a control group (cgroup) with limits, of version 1 or 2. `/proc/meminfo` and the number of cores do not
show them: the kernel kills a process that exceeds the memory limit, and pauses one that exceeds the CPU quota. The
limits of every group above the process hold too.

    memory    memory.max, memory.high (v2)        memory.limit_in_bytes (v1)
    used      memory.current                      memory.usage_in_bytes, both without the page cache of files
    cores     cpu.max                             cpu.cfs_quota_us, cpu.cfs_period_us
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/")
_MEMORY: Final = "memory"
_CPU: Final = "cpu"


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that this process can still take, and all that it may have."""

    available_bytes: int
    total_bytes: int


def available_memory(root: Path = _ROOT) -> Memory:
    """The host memory that is left for this process. `root`: where `/proc` and the control groups are found."""
    # A gateway's machine need not have it.
    import psutil

    host = psutil.virtual_memory()
    left, total = [int(host.available)], [int(host.total)]
    for group in _groups(root, _MEMORY):
        limits = [_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        limit = min((each for each in limits if each is not None), default=None)
        if limit is not None:
            left.append(max(0, limit - _used_bytes(group)))
            total.append(limit)
    return Memory(min(left), min(total))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """The cores that the container may use on average; None: no quota."""
    quotas = [quota for group in _groups(root, _CPU) if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def usable_cores(root: Path = _ROOT) -> int:
    """The number of cores that this process keeps busy without being paused, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(cores, cpu_quota(root) or cores)))


def _used_bytes(group: Path) -> int:
    used = next((u for name in ("memory.current", "memory.usage_in_bytes") if (u := _number(group / name))), 0)
    # The kernel drops cached pages of files before it kills a process. Memory on tmpfs is not among these.
    stat = _fields(group / "memory.stat")
    prefix = "total_" if "total_inactive_file" in stat else ""
    return max(0, used - sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active")))


def _quota(group: Path) -> float | None:
    words = _text(group / "cpu.max").split()
    if not words:
        words = [_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return None
    return int(words[0]) / int(words[1])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups for a controller, and of those above them."""
    paths = _paths(root)
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields, _, described = line.partition(" - ")
        kind, *rest = described.split()
        of_v1 = kind == "cgroup" and bool(rest) and controller in rest[-1].split(",")
        path = paths.get(controller) if of_v1 else paths.get("") if kind == "cgroup2" else None
        if path is None:
            continue
        shown, place = fields.split()[3:5]
        top = root / place.lstrip("/")
        folder = top / os.path.relpath(path, shown) if path.startswith(shown) else top
        # A container may show another path than the one that it has mounted.
        folder = folder if folder.is_dir() and ".." not in folder.parts else top
        while True:
            yield folder
            if folder == top:
                break
            folder = folder.parent


def _paths(root: Path) -> dict[str, str]:
    """Controller -> path of this process's group; "" is version 2."""
    paths: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _fields(path: Path) -> dict[str, int]:
    words = (line.split() for line in _text(path).splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) == 2 and word[1].isdecimal()}


def _number(path: Path) -> int | None:
    """The number in a file; None without one (`max`)."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
