"""Imports go one way, and what is heavy stays out of what is light."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("schemas", "streams", "workers", "training", "cli", "benchmarks")
"""The roots of the namespace `relaygr`. Each may import itself and those before it."""
SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
NPU_FILE = ROOT / "workers" / "relaygr" / "worker" / "device" / "__init__.py"
_IMPORT = re.compile(r"^ *(?:from ([\w.]+) import |import ([\w.]+))", re.MULTILINE)
STREAMS = ("runtime", "tracing", "kafka", "cluster", "admission", "consumer", "client", "lag", "devbroker", "trigger")
"""Packages of the root `streams`, likewise."""


def layers_by_package() -> dict[str, int]:
    """The layer of each package and module of `relaygr`, by its dotted name."""
    found = {}
    for index, layer in enumerate(LAYERS):
        for path in (ROOT / layer / "relaygr").iterdir():
            if path.name != "__pycache__":
                found[f"relaygr.{path.stem}"] = index
    return found


@functools.cache
def imported(path: Path) -> list[str]:
    """The dotted names that a file imports, anywhere in it; a relative import keeps its dots."""
    return [each[1] or each[2] for each in _IMPORT.finditer(path.read_text(encoding="utf-8"))]


def package_of(name: str) -> str:
    """The first two parts of a dotted name."""
    return ".".join(name.split(".")[:2])


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def test_the_scan_sees_every_package() -> None:
    assert {layer_of(path) for path in SOURCES} == set(LAYERS)


def test_no_package_stands_in_two_roots() -> None:
    names = [path.stem for layer in LAYERS for path in (ROOT / layer / "relaygr").iterdir() if path.stem[0] != "_"]
    assert len(names) == len(set(names))


def test_the_namespace_has_no_init() -> None:
    """With one, the roots would hide each other."""
    assert [layer for layer in LAYERS if (ROOT / layer / "relaygr" / "__init__.py").exists()] == []


def test_imports_between_roots_go_one_way() -> None:
    layers = layers_by_package()
    upward = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in SOURCES
        for name in imported(path)
        if layers.get(package_of(name), -1) > LAYERS.index(layer_of(path))
    ]
    assert upward == []


def test_imports_between_packages_of_streams_go_one_way() -> None:
    for path in (ROOT / "streams" / "relaygr").rglob("*.py"):
        own = path.relative_to(ROOT / "streams" / "relaygr").parts[0]
        for name in imported(path):
            package = package_of(name).removeprefix("relaygr.")
            assert package not in STREAMS or STREAMS.index(package) <= STREAMS.index(own), f"{path} imports {name}"


def test_imports_are_absolute() -> None:
    relative = [f"{path.relative_to(ROOT)}: {name}" for path in SOURCES for name in imported(path) if name[0] == "."]
    assert relative == []


def test_nothing_that_is_installed_imports_the_tests() -> None:
    installed = [path for path in SOURCES if "relaygr" in path.relative_to(ROOT).parts]
    assert [path for path in installed if any(name.partition(".")[0] == "tests" for name in imported(path))] == []


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


@pytest.mark.parametrize("package", ["schemas", "client", "worker.cache"])
def test_a_package_that_imports_late_has_the_names_that_it_declares_and_no_others(package: str) -> None:
    found = importlib.import_module(f"relaygr.{package}")
    assert found.__file__ is not None
    declared = {
        alias.name: getattr(importlib.import_module(str(imported.module)), alias.name)
        for block in ast.parse(Path(found.__file__).read_text(encoding="utf-8")).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for imported in block.body
        if isinstance(imported, ast.ImportFrom)
        for alias in imported.names
    }
    assert set(found.__all__) == set(declared) <= set(dir(found))
    assert [name for name, value in declared.items() if getattr(found, name) is not value] == []
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = found.no_such_name


@pytest.mark.slow
def test_relaygr_lag_runs_without_numpy_and_torch() -> None:
    """They take longer to import than Kafka takes to answer."""
    script = (
        "import sys\nfor name in ('numpy', 'torch'):\n    sys.modules[name] = None\n"
        "from relaygr.cli.__main__ import main\nmain()\n"
    )
    command = [sys.executable, "-c", script, "lag", "--bootstrap", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 3 and "127.0.0.1:1" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("relaygr.schemas", ("torch", "faust", "confluent_kafka", "aiokafka", "pydantic", "structlog", "lmdb")),
        ("relaygr.kafka.clients", ("torch", "faust", "lmdb", "matplotlib")),
        ("relaygr.admission.policy", ("torch", "faust", "confluent_kafka", "lmdb")),
        ("relaygr.admission.latency", ("torch", "faust", "confluent_kafka", "lmdb")),
        ("relaygr.client", ("torch", "faust", "aiokafka", "aiohttp", "starlette", "uvicorn", "typer", "rich", "lmdb")),
        ("relaygr.consumer.loop", ("torch", "faust", "lmdb")),
        ("relaygr.worker.settings", ("torch", "faust", "lmdb")),
        ("relaygr.worker.cache", ("torch", "faust", "confluent_kafka", "lmdb")),
        ("relaygr.cli.cache", ("torch", "faust", "aiokafka", "lmdb", "matplotlib")),
        ("relaygr.worker.executor.order", ("torch", "faust", "confluent_kafka", "lmdb")),
        ("relaygr.worker.executor.routes", ("torch", "faust", "confluent_kafka", "lmdb")),
        ("relaygr.gateway.server", ("torch", "faust", "aiokafka", "lmdb", "typer", "rich", "matplotlib")),
        ("relaygr.worker.executor.executor", ("torch", "faust", "lmdb")),
        ("relaygr.worker.calibration", ("torch", "faust", "lmdb")),
        ("relaygr.worker.process", ("torch", "faust", "lmdb")),
        ("relaygr.simulate.visit", ("torch", "faust", "lmdb", "matplotlib", "simpy", "scipy")),
        ("relaygr.simulate.plan", ("torch", "faust", "lmdb", "matplotlib")),
        ("relaygr.cli.simulate", ("torch", "faust", "lmdb", "matplotlib", "simpy")),
        ("relaygr.cli.train", ("torch", "faust", "lmdb", "matplotlib", "implicit", "torchmetrics")),
        ("relaygr.training.movielens", ("torch", "faust", "lmdb", "matplotlib", "numpy")),
        ("relaygr.ui.model", ("torch", "faust", "starlette", "uvicorn", "lmdb", "matplotlib")),
        ("relaygr.ui.server", ("torch", "faust", "aiokafka", "lmdb", "matplotlib")),
        ("relaygr.settings", ("torch", "numpy", "faust", "starlette", "uvicorn", "typer", "lmdb", "matplotlib")),
        ("relaygr.cli.lag_view", ("torch", "numpy", "faust", "aiokafka", "starlette", "uvicorn", "lmdb", "matplotlib")),
        ("relaygr.lag.monitor", ("torch", "numpy", "faust", "aiokafka", "typer", "rich", "lmdb", "matplotlib")),
    ],
)
def test_a_module_can_be_imported_without(module: str, absent: tuple[str, ...]) -> None:
    # With the names that a package exports, which it may import later.
    script = f"import sys\nfor name in {absent!r}:\n    sys.modules[name] = None\nfrom {module} import *\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
