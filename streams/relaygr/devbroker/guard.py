"""Runs commands one after the other, and ends them with the process that asked for them.

Run as a script, by path and with the standard library alone:

    python guard.py FOLDER LOG COMMAND [ARGUMENT ...] [--then-- COMMAND [ARGUMENT ...]]...

The last command stays, the ones before must succeed. "started PID" is written for each, "exited CODE"
when one ended too soon. When standard input ends, because the parent closed it or died (a closed pipe
is the one signal that outlives kill -9), the running command's process group is killed, FOLDER is
removed, and the guard ends. Killing is right here: all data is in FOLDER.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

THEN = "--then--"
_PR_SET_PDEATHSIG = 1


class _Guarded:
    """The command that runs now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def run(self, command: Sequence[str], log: str) -> int:
        """Runs to its end; the exit code."""
        with self._lock:
            if self._ended:
                return -signal.SIGKILL
            with open(log, "ab") as output:  # noqa: PTH123 (no imports beyond need: this starts with each broker)
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                    preexec_fn=_die_with_the_guard if sys.platform == "linux" else None,
                )
            self._process = process
        _say(f"started {process.pid}")
        return process.wait()

    def end(self) -> None:
        """Kills what runs, and lets nothing start after."""
        with self._lock:
            self._ended = True
            if self._process is not None and self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)


def _die_with_the_guard() -> None:
    """For the case that the guard itself is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _say(line: str) -> None:
    # Without a parent nobody reads it; the end of standard input says that too.
    with contextlib.suppress(OSError):
        print(line, flush=True)  # noqa: T201 (its protocol)


def main(arguments: list[str]) -> None:
    folder, log, *rest = arguments
    commands = [list(group) for is_then, group in itertools.groupby(rest, lambda word: word == THEN) if not is_then]
    guarded = _Guarded()

    def run_all() -> None:
        for command in commands:
            code = guarded.run(command, log)
            if code != 0 or command is commands[-1]:
                _say(f"exited {code}")
                return

    runner = threading.Thread(target=run_all)
    runner.start()
    sys.stdin.buffer.read()
    guarded.end()
    runner.join()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
