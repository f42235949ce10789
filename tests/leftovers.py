"""What a test leaves behind: threads that still run, and child processes that nobody has waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 30.0
LASTING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes that Python starts once and keeps."""
LASTING_THREADS = ("tqdm_monitor",)
"""Threads that libraries start once and keep: `implicit` makes progress bars, shown or not."""
PER_THREAD = Path("/proc/self/task")
_owned: list[Callable[[], set[int]]] = []


@contextmanager
def owned_by_a_fixture(process_ids: Callable[[], set[int]]) -> Iterator[None]:
    """Within it, these processes are no leftovers: a fixture of a module owns them, and its tests restart them."""
    _owned.append(process_ids)
    yield
    _owned.remove(process_ids)


def running_threads() -> set[threading.Thread]:
    """All threads that Python knows, but the calling one."""
    return set(threading.enumerate()) - {threading.current_thread()}


def child_processes() -> set[int]:
    """Process ids of the children, dead ones that were not waited for included. Empty where /proc cannot tell."""
    found: set[int] = set()
    for thread in PER_THREAD.iterdir() if PER_THREAD.exists() else ():
        try:
            found.update(map(int, (thread / "children").read_text(encoding="ascii").split()))
        except OSError:
            continue  # The thread has ended.
    return found


def _command_of(process_id: int) -> str | None:
    """None: the process is gone. A dead process that was not waited for has no command any more."""
    try:
        raw = Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return None
    return raw.replace(b"\0", b" ").decode(errors="replace").strip() or "dead, not waited for"


class Leftovers:
    """Compares with the moment at which it was made."""

    def __init__(self) -> None:
        self._threads = running_threads()
        self._processes = child_processes()

    def found(self) -> list[str]:
        """Each new thread and child process, in words."""
        started = running_threads() - self._threads
        threads = [f"thread {thread.name}" for thread in started if thread.name not in LASTING_THREADS]
        owned = set[int]().union(*(process_ids() for process_ids in _owned))
        commands = {process: _command_of(process) for process in child_processes() - self._processes - owned}
        processes = [
            f"process {process}: {command[:200]}"
            for process, command in commands.items()
            if command is not None and not any(word in command for word in LASTING)
        ]
        return sorted(threads) + sorted(processes)

    def found_after(self, wait_s: float = WAIT_S) -> list[str]:
        """As `found`, once what is about to end had `wait_s` to do so."""
        ends_s = time.monotonic() + wait_s
        while (found := self.found()) and time.monotonic() < ends_s:
            time.sleep(0.01)
        return found
