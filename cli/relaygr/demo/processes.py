"""Child processes of the demo: started with a log each, stopped together, gone when the parent is."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from relaygr.devbroker.ports import free_ports
from relaygr.runtime.errors import RelayError
from relaygr.settings import ENV_PREFIX, TEST_ENV_PREFIX

STOP_TIMEOUT_S = 8.0
LOG_TAIL_LINES = 12
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Child:
    """One process of ours."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    port: int

    def log_tail(self) -> str:
        """The last lines that it wrote."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])


class Processes:
    """Starts `relaygr` commands; as a context it stops all of them at the end, whatever happened."""

    def __init__(self, folder: Path, config: Path) -> None:
        """Logs go to `folder`; every command reads `config`, and nothing of `RELAYGR_*` from here."""
        self._folder = folder
        self._config = config
        self._children: list[Child] = []
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(ENV_PREFIX) or name.startswith(TEST_ENV_PREFIX)
        }

    @property
    def running(self) -> list[Child]:
        """Those that were started and not stopped."""
        return list(self._children)

    def start(self, name: str, command: Sequence[str], section: str, settings: Sequence[str] = ()) -> Child:
        """Starts `relaygr COMMAND` with its probes on a free port of ours."""
        (port,) = free_ports(1)
        log = self._folder / f"{name}.log"
        overrides = [f"{section}.http_port={port}", *settings]
        arguments = [sys.executable, "-m", "relaygr", *command, "--config", str(self._config)]
        for override in overrides:
            arguments += ["--set", override]
        with log.open("ab") as output:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                process_group=0,  # The terminal's Ctrl-C is for us; we stop them in order.
                preexec_fn=_die_with_the_parent if sys.platform == "linux" else None,
            )
        child = Child(name, process, log, port)
        self._children.append(child)
        return child

    def await_ready(self, children: Sequence[Child], timeout_s: float) -> None:
        """Waits until all say that they are ready. Raises RelayError, with the log, if one ends or time runs out."""
        ends_s = time.monotonic() + timeout_s
        for child in children:
            while not is_ready(child.port):
                self.require_running()
                if time.monotonic() > ends_s:
                    raise RelayError(f"{child.name} was not ready after {timeout_s:.0f} s:\n{child.log_tail()}")
                time.sleep(0.1)

    def require_running(self) -> None:
        """Raises RelayError, with its log, if a child has ended with an error."""
        for child in self._children:
            code = child.process.poll()
            if code not in (None, 0):
                raise RelayError(f"{child.name} ended with exit code {code}:\n{child.log_tail()}")

    def stop(self, children: Sequence[Child]) -> None:
        """SIGTERM to all, then SIGKILL to those that did not end in time."""
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        ends_s = time.monotonic() + STOP_TIMEOUT_S
        for child in children:
            try:
                child.process.wait(max(0.0, ends_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            if child in self._children:
                self._children.remove(child)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(self.running)


def is_ready(port: int) -> bool:
    """Whether the process that serves its probes there is ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _die_with_the_parent() -> None:
    """SIGTERM when the parent is gone in any way; a clean stop is short."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
