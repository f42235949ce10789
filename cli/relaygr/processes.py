"""Runs `relaygr` commands as child processes, for the demo, benchmarks and tests.

Each has a log, all are stopped together, and they end when the parent ends. The module also writes their settings to a
file, and reads their metrics over HTTP.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from pydantic import SecretStr

from relaygr.devbroker.local import free_ports
from relaygr.runtime.direct_http import open_directly
from relaygr.runtime.errors import RelayError
from relaygr.settings import ENV_PREFIX, TEST_ENV_PREFIX, Settings, plain, values
from relaygr.ui.scrape import Reading, parse_reading

STOP_TIMEOUT_S = 20.0
"""Longer than a supervisor waits for its two processes. They would outlive a supervisor that is killed."""
LOG_TAIL_LINES = 12
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class CommandProcess:
    """A `relaygr` command that runs as a child process. `port` serves its probes and metrics."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    port: int

    def log_tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])


class Processes:
    """Starts `relaygr` commands. As a context manager it stops all of them at the end."""

    def __init__(self, folder: Path, config: Path) -> None:
        """Logs go to `folder`. Every command reads `config`, and no variable `RELAYGR_*` of this process."""
        self._folder = folder
        self._config = config
        self._children: list[CommandProcess] = []
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(ENV_PREFIX) or name.startswith(TEST_ENV_PREFIX)
        }

    @property
    def running(self) -> list[CommandProcess]:
        """The processes that were started and not stopped."""
        return list(self._children)

    def start(
        self,
        name: str,
        command: Sequence[str],
        section: str,
        settings: Sequence[str] = (),
        module: Sequence[str] = ("relaygr",),
    ) -> CommandProcess:
        """Starts `relaygr COMMAND`, with its probes on a free port. `module`: another one that runs the command, with
        arguments of its own.
        """
        (port,) = free_ports(1)
        log = self._folder / f"{name}.log"
        overrides = [f"{section}.http_port={port}", *settings]
        arguments = [sys.executable, "-m", *module, *command, "--config", str(self._config)]
        for override in overrides:
            arguments += ["--set", override]
        with log.open("ab") as output:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                process_group=0,  # Ctrl-C in the terminal reaches only this process, which stops them in order.
                preexec_fn=die_with_the_parent if sys.platform == "linux" else None,
            )
        child = CommandProcess(name, process, log, port)
        self._children.append(child)
        return child

    def await_ready(self, children: Sequence[CommandProcess], timeout_s: float) -> None:
        """Waits until all are ready. Raises RelayError, with the logs, if one ends or the time is over."""
        waiting = list(children)

        def are_ready() -> bool:
            while waiting and is_ready(waiting[0].port):
                waiting.pop(0)
            return not waiting

        self.await_so(f"{', '.join(child.name for child in children)} are ready", are_ready, timeout_s)

    def await_so(self, what: str, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Waits. Raises RelayError, with the ends of the logs, if a child ends with an error or the time is over."""
        ends_s = time.monotonic() + timeout_s
        while not is_so():
            self.require_running()
            if time.monotonic() > ends_s:
                logs = "\n".join(f"{child.name}:\n{child.log_tail()}" for child in self._children)
                raise RelayError(f"not within {timeout_s:.0f} s: {what}. The ends of the logs:\n{logs}")
            time.sleep(_POLL_S)

    def require_running(self) -> None:
        """Raises RelayError, with its log, if a child has ended with an error."""
        for child in self._children:
            code = child.process.poll()
            if code not in (None, 0):
                raise RelayError(f"{child.name} ended with exit code {code}:\n{child.log_tail()}")

    def stop(self, children: Sequence[CommandProcess]) -> None:
        """Sends SIGTERM to all, and SIGKILL to those that do not end in time."""
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
    """Whether the process with its probes on this port is ready."""
    try:
        with open_directly(f"http://127.0.0.1:{port}/readyz", timeout_s=1) as answer:
            return answer.status == 200
    except OSError:
        return False


def die_with_the_parent() -> None:
    """Has the kernel send SIGTERM when the parent ends in any way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def write_config(settings: Settings, path: Path) -> None:
    """Writes the settings that differ from the defaults, secrets included, to a file with mode 0600."""
    content = plain(settings)
    for key, value in values(settings).items():
        if isinstance(value, SecretStr):
            *sections, name = key.split(".")
            functools.reduce(dict.__getitem__, sections, content)[name] = value.get_secret_value()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        yaml.safe_dump(content, file)


def metrics_url(child: CommandProcess) -> str:
    """The page of the process's metrics."""
    return f"http://127.0.0.1:{child.port}/metrics"


def read_metrics(port: int) -> Reading:
    """The metrics of the process with its probes on this port."""
    try:
        with open_directly(f"http://127.0.0.1:{port}/metrics", timeout_s=1) as answer:
            return parse_reading(answer.read().decode())
    except OSError:
        return Reading()


def read_children(port: int) -> dict[str, dict[str, Any]]:
    """The processes of the supervisor with its probes on this port by phase, each with `pid` and `port`."""
    try:
        with open_directly(f"http://127.0.0.1:{port}/children", timeout_s=5) as answer:
            return {child["phase"]: child for child in json.load(answer)["children"]}
    except OSError:
        return {}
