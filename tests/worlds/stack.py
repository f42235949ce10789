"""The local stack of `compose/`, started by Docker Compose from a copy of the checkout, as a new user starts it.

On a machine that reaches no image registry, `tests/compose/stand_ins/make.sh` makes the base images, and prints the
variables that name them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaygr.devbroker.local import free_ports
from relaygr.ui.scrape import Reading, parse_reading
from tests.promised import unavailable
from tests.worlds.compose import ROOT, dot_env

OF_THIS_MACHINE = ("settings.env", "pool-secret", "compose.override.yaml", "__pycache__")
"""What a checkout has beside the repository's files."""
_READ = "import sys, urllib.request as u; print(u.build_opener(u.ProxyHandler({})).open(sys.argv[1]).read().decode())"
PROJECT_LABEL = "com.docker.compose.project"


def needs_docker() -> None:
    """Ends the test on a machine without a Docker daemon or without Compose."""
    for words in (["docker", "version"], ["docker", "compose", "version"]):
        if shutil.which("docker") is None:
            unavailable("docker", "docker is not installed")
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            unavailable("docker", f"`{' '.join(words)}` says: {done.stderr.strip()}")


def docker(*words: str, timeout_s: float = 120.0) -> str:
    """What the command prints. Raises AssertionError if it fails."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr}"
    return done.stdout


def say(figures: str) -> None:
    """A line of the lane's report, which `pytest -rP` shows."""
    sys.stdout.write(f"{figures}\n")


def fresh_checkout(folder: Path) -> Path:
    """Copies into the folder what the image is built from, and `compose/` without the files of this machine."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for name in (".dockerignore", "compose", *(line[1:] for line in lines if line.startswith("!"))):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*OF_THIS_MACHINE))
        elif not name.startswith("compose/"):
            shutil.copy2(ROOT / name, folder / name)
    return folder


@dataclass(frozen=True)
class Stack:
    """A project of Compose with a name and ports of its own. Words are those of `docker compose`."""

    project: str
    folder: Path
    """The `compose/` of a copy of the checkout."""
    ports: Mapping[str, int]
    """By the name of the variable of `.env`."""
    environment: Mapping[str, str]

    def compose(self, *words: str, timeout_s: float = 600.0) -> str:
        """What the command prints. Raises AssertionError, with what it says, if it fails."""
        return self.typed(["docker", "compose", *words], timeout_s)

    def typed(self, line: str | Sequence[str], timeout_s: float = 600.0) -> str:
        """A command, or a line of a page in a shell, in `compose/`. What it prints; AssertionError if it fails."""
        done = subprocess.run(
            line, shell=isinstance(line, str), cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stdout[-3000:]}{done.stderr[-6000:]}"
        return done.stdout

    def containers(self) -> dict[str, dict[str, Any]]:
        """Service -> what Docker knows of its container, those that have ended included."""
        found = docker("ps", "--all", "--quiet", "--filter", f"label={PROJECT_LABEL}={self.project}").split()
        inspected = json.loads(docker("inspect", *found)) if found else []
        return {each["Config"]["Labels"]["com.docker.compose.service"]: each for each in inspected}

    def states(self) -> dict[str, str]:
        """Service -> `healthy`, `starting`, `unhealthy`, `running` (without a check), or `exited CODE`."""

        def state(container: dict[str, Any]) -> str:
            found = container["State"]
            if found["Status"] != "running":
                return f"{found['Status']} {found['ExitCode']}"
            return str(found.get("Health", {}).get("Status", "running"))

        return {name: state(container) for name, container in self.containers().items()}

    def logs(self, service: str) -> str:
        """Both streams. Compose puts escape sequences before lines, so Docker is asked."""
        done = subprocess.run(
            ["docker", "logs", self.containers()[service]["Id"]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=120, check=True,
        )  # fmt: skip
        return done.stdout

    def page(self, service: str, path: str) -> str:
        """A page of the service's own probes."""
        return self.compose("exec", "-T", service, "python3", "-I", "-S", "-c", _READ, f"http://127.0.0.1:8080/{path}")

    def reading(self, service: str) -> Reading:
        return parse_reading(self.page(service, "metrics"))

    def port(self, name: str) -> int:
        """The port on this machine: `UI` for `UI_PORT`."""
        return self.ports[f"{name}_PORT"]

    def left(self) -> list[str]:
        """Names of containers, volumes and networks of the project."""
        label = f"label={PROJECT_LABEL}={self.project}"
        return [
            *docker("ps", "--all", "--filter", label, "--format", "{{.Names}}").split(),
            *docker("volume", "ls", "--filter", label, "--format", "{{.Name}}").split(),
            *docker("network", "ls", "--filter", label, "--format", "{{.Name}}").split(),
        ]


@contextmanager
def stack(project: str, checkout: Path, **variables: str) -> Iterator[Stack]:
    """A project that is not started yet. At the end all of it is removed. `variables` take the place of `.env`'s."""
    names = [name for name in dot_env() if name.endswith("_PORT")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    environment = {**os.environ, **variables, **{name: str(port) for name, port in ports.items()}}
    made = Stack(project, checkout / "compose", ports, {**environment, "COMPOSE_PROJECT_NAME": project})
    try:
        yield made
    finally:
        made.compose("--profile", "*", "down", "--volumes", "--remove-orphans")
