"""A proxy in the environment, as Docker and companies set it: nothing on this machine is asked through it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from relaygr.ingest.registry import SchemaRegistry
from relaygr.ingest.settings import RegistrySettings
from relaygr.runtime.errors import RelayError
from relaygr.runtime.probes import ProbeServer
from relaygr.runtime.readiness import Readiness
from tests.worlds.proxy import refusing_proxy
from tests.worlds.registry import served_registry

# A process of its own, since urllib reads the environment once.
READER = """
import sys
from relaygr.processes import is_ready, read_children, read_metrics
from relaygr.ui.scrape import read_page
port = int(sys.argv[1])
print(is_ready(port), *read_children(port), bool(read_metrics(port).samples))
print(read_page(f"http://127.0.0.1:{port}/metrics") is not None)
"""
STANDBY = {"phase": "standby", "pid": 7, "port": 8}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The addresses for which the proxy was asked."""
    with refusing_proxy() as (proxies, addresses):
        for name, value in proxies.items():
            monkeypatch.setenv(name, value)
        yield addresses


def test_the_demo_and_the_live_page_read_processes_that_serve(asked: list[str]) -> None:
    """The demo waited for 120 s for processes that were ready."""
    with ProbeServer("127.0.0.1", 0, Readiness, documents={"/children": lambda: {"children": [STANDBY]}}) as probes:
        command = [sys.executable, "-c", READER, str(probes.port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "standby", "True", "True"]
    assert asked == []


def test_a_schema_registry_is_asked_through_the_proxy_unless_it_is_on_this_machine(asked: list[str]) -> None:
    with served_registry() as registry:
        registry.schemas[5] = "string"
        assert SchemaRegistry(registry.url, RegistrySettings()).schema(5).content == b'"string"'
    assert asked == []
    with pytest.raises(RelayError, match="did not give schema 5"):
        SchemaRegistry("http://registry.example", RegistrySettings()).schema(5)
    assert asked == ["http://registry.example/schemas/ids/5"]
