"""A memory limit, as a container has it: a real control group around a command."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_GROUPS = Path("/sys/fs/cgroup")


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[list[str]]:
    """The words to put before a command, so that it runs within the limit. Skips where this user may not make a group.

    The group is deleted at the end.
    """
    is_v2 = "memory" in (_read(_GROUPS / "cgroup.controllers") or "").split()
    group = (_GROUPS if is_v2 else _GROUPS / "memory") / f"relaygr-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
        (group / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"this user may not limit memory: {error}")
    yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    group.rmdir()


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
