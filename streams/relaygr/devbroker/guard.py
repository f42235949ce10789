"""Runs commands one after the other, and kills them when the parent process ends.

It is run as a script, by its path and with the standard library alone:

    python guard.py FOLDER LOG COMMAND [ARGUMENT ...] [--then-- COMMAND [ARGUMENT ...]]...

Every command but the last must succeed; the last one keeps running. The guard writes "started PID" for each command and
"exited CODE" when a command fails or the last one ends. For a line "kill", "stop" or "freeze" on standard input the
guard sends SIGKILL, SIGTERM or SIGSTOP to the running command; for a line "start" it starts the last command again.

When standard input ends, the guard kills the process group of the running command, removes FOLDER and ends. Standard
input ends when the parent closes the pipe or dies, even by kill -9. Killing loses nothing, because all data is in
FOLDER.
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
KILL = b"kill\n"
STOP = b"stop\n"
FREEZE = b"freeze\n"
START = b"start\n"
_SIGNALS = {KILL: signal.SIGKILL, STOP: signal.SIGTERM, FREEZE: signal.SIGSTOP}
_PR_SET_PDEATHSIG = 1


class _Guarded:
    """The running command."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def run(self, command: Sequence[str], log: str) -> int:
        """Runs a command to its end. Returns the exit code."""
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

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the running command."""
        with self._lock:
            self._send(number)

    def end(self) -> None:
        """Kills the running command. No command starts after that."""
        with self._lock:
            self._ended = True
            self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def _die_with_the_guard() -> None:
    """Has the kernel kill the command if the guard itself is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _say(line: str) -> None:
    # The write fails if the parent has died. Standard input then ends as well.
    with contextlib.suppress(OSError):
        print(line, flush=True)  # noqa: T201 (its protocol)


def main(arguments: list[str]) -> None:
    folder, log, *rest = arguments
    commands = [list(group) for is_then, group in itertools.groupby(rest, lambda word: word == THEN) if not is_then]
    guarded = _Guarded()

    def run(commands: Sequence[Sequence[str]]) -> None:
        for command in commands:
            code = guarded.run(command, log)
            if code != 0 or command is commands[-1]:
                _say(f"exited {code}")
                return

    runner = threading.Thread(target=run, args=(commands,))
    runner.start()
    for line in sys.stdin.buffer:
        if line in _SIGNALS:
            guarded.send(_SIGNALS[line])
        elif line == START:
            runner.join()
            runner = threading.Thread(target=run, args=(commands[-1:],))
            runner.start()
    guarded.end()
    runner.join()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
