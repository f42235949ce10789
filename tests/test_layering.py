"""Imports go one way, and what is heavy stays out of what is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("schemas", "streams", "workers", "relaygr", "benchmarks")
"""Each may import itself and those before it."""
SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
NPU_FILE = ROOT / "workers" / "device" / "opening.py"


def imported(path: Path) -> list[str]:
    """The dotted names that a file imports, anywhere in it; a relative import keeps its dots."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return names


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def test_the_scan_sees_every_package() -> None:
    assert {layer_of(path) for path in SOURCES} == set(LAYERS)


def test_imports_between_packages_go_one_way() -> None:
    upward = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in SOURCES
        for name in imported(path)
        if (top := name.partition(".")[0]) in LAYERS and LAYERS.index(top) > LAYERS.index(layer_of(path))
    ]
    assert upward == []


def test_imports_are_absolute() -> None:
    relative = [f"{path.relative_to(ROOT)}: {name}" for path in SOURCES for name in imported(path) if name[0] == "."]
    assert relative == []


def test_no_package_imports_the_tests() -> None:
    assert [path for path in SOURCES if any(name.partition(".")[0] == "tests" for name in imported(path))] == []


def test_only_the_device_layer_imports_torch_npu() -> None:
    """A torch_npu without its CANN libraries breaks `import torch`."""
    assert [
        path
        for path in SOURCES
        if path != NPU_FILE and any(name.partition(".")[0] == "torch_npu" for name in imported(path))
    ] == []


def test_streams_has_no_torch() -> None:
    offenders = [
        path
        for path in SOURCES
        if layer_of(path) in ("schemas", "streams")
        and any(name.partition(".")[0] in ("torch", "torch_npu", "lmdb") for name in imported(path))
    ]
    assert offenders == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("schemas", ("torch", "faust", "confluent_kafka", "aiokafka", "pydantic", "structlog", "lmdb")),
        ("streams", ("torch", "faust", "lmdb", "matplotlib")),
        ("streams.trigger.policy", ("torch", "faust", "confluent_kafka", "lmdb")),
        ("streams.latency", ("torch", "faust", "confluent_kafka", "lmdb")),
        ("streams.client", ("torch", "faust", "lmdb")),
        ("streams.consumer", ("torch", "faust", "lmdb")),
        ("workers.settings", ("torch", "faust", "lmdb")),
        ("workers.cache", ("torch", "faust", "confluent_kafka", "lmdb")),
        ("workers.scheduler", ("torch", "faust", "confluent_kafka", "lmdb")),
        ("relaygr.settings", ("torch", "faust", "lmdb", "matplotlib")),
    ],
)
def test_a_module_can_be_imported_without(module: str, absent: tuple[str, ...]) -> None:
    script = f"import sys\nfor name in {absent!r}:\n    sys.modules[name] = None\nimport {module}\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
