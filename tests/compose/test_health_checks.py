"""The health checks of Compose, image and chart, run as the container engine runs them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable

import pytest

from relaygr.runtime.probes import ProbeServer
from relaygr.runtime.readiness import Check, Readiness
from tests.worlds.compose import COMPOSE
from tests.worlds.proxy import refusing_proxy

SICK = Readiness((Check("device", False, "hangs"),))
PLACES = ["compose.yaml", "Dockerfile", "helm/relaygr/templates/worker.yaml"]


def programs_of(place: str) -> list[str]:
    """The Python programs of the health checks."""
    return re.findall(r'"(import urllib[^"]*)"', (COMPOSE / place).read_text(encoding="utf-8"))


def passes(program: str, answer: Callable[[], Readiness], environment: dict[str, str]) -> bool:
    with ProbeServer("127.0.0.1", 0, answer, answer) as probes:
        given, count = re.subn(r"(?<=//127\.0\.0\.1:)[^/]+", str(probes.port), program)
        assert count == 1
        command = ["python3", "-I", "-S", "-c", given]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, timeout=60, check=False)
    return done.returncode == 0


@pytest.mark.parametrize("place", PLACES)
def test_a_health_check_asks_the_process_and_no_proxy_of_the_environment(place: str) -> None:
    """Docker gives every container the proxies of its configuration, and Kubernetes killed healthy workers."""
    programs = programs_of(place)
    assert programs
    with refusing_proxy() as (proxies, asked):
        for program in programs:
            assert passes(program, Readiness, proxies)
            assert not passes(program, lambda: SICK, proxies)
    assert asked == []
