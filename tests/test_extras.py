"""Each extra of the package installs what its modules import: nothing less is listed, nothing more is imported."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from relaygr.cli import COMMANDS
from relaygr.cli.app import OPTIONAL

ROOT = Path(__file__).parents[1]
ROOTS = ("schemas", "streams", "workers", "training", "cli", "benchmarks")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SHIPPED_WITH = {"annotated_types": "pydantic", "pydantic_core": "pydantic"}
"""Imported libraries that belong to another one, which is listed."""

NOT_LISTED = {*OPTIONAL, "llvmlite", "triton"}
"""Libraries that our modules do without, or that a command asks for when one of its options needs them."""

ASKED_FOR = (
    "relaygr.traffic.held_out.",
    "relaygr.demo.quality.",
    "relaygr.training.pipeline.",
    "relaygr.training.runs.",
)
"""Modules that one option or setting of a command needs. Where they cannot be imported, an error names `training`."""


@dataclass(frozen=True)
class Use:
    """What is imported and done with some extras and no others."""

    modules: tuple[str, ...]
    script: str = ""


USES: dict[str, Use] = {
    "": Use(
        ("relaygr.schemas", "relaygr.schemas.headers", "relaygr.schemas.reference"),
        """
        import numpy as np
        from relaygr.schemas import Behaviours, RetrievalEvent, decode, digest_chain, encode
        from relaygr.schemas import RankingHeaders, partition_for

        event = RetrievalEvent("r", "user", 1, 2, 50, 10, 0)
        assert decode(RetrievalEvent, encode(event)) == event
        assert len(digest_chain(np.arange(3), Behaviours.empty()).digest) == 16
        assert 0 <= partition_for(b"user", 48) < 48
        assert RankingHeaders.decode(RankingHeaders("r", "gw", "relaygr.results", 0, 1).encode()).request_id == "r"
        """,
    ),
    "client": Use(
        ("relaygr.client", "relaygr.settings", "relaygr.settings_reference", "relaygr.cluster.admin"),
        """
        from relaygr.client import AsyncRelayClient, EventPublisher, RelayClient, __version__
        from relaygr.settings import load_settings

        settings = load_settings(bootstrap="kafka-1:9092", environment={"RELAYGR_PARTITIONS": "12"})
        assert (settings.bootstrap, settings.partitions) == ("kafka-1:9092", 12)
        RelayClient(settings, "gw-0", settings.client)
        AsyncRelayClient(settings, "gw-1")
        EventPublisher(settings, "publisher")
        """,
    ),
    "cli": Use(("relaygr.cli.app", "relaygr.cli.topics", "relaygr.cli.publish", "relaygr.cli.settings")),
    "cli,http": Use(("relaygr.cli.traffic", "relaygr.runtime.probes", "relaygr.traffic.player")),
    "gateway": Use(("relaygr.cli.gateway", "relaygr.gateway.server")),
    "tracing": Use(
        ("relaygr.tracing.otlp", "relaygr.client.tracing"),
        """
        from relaygr.client import RelayClient
        from relaygr.settings import load_settings
        from relaygr.tracing import TracingSettings, start_tracing

        settings = load_settings(environment={})
        tracer = start_tracing(TracingSettings(enabled=True), "gateway", "gw-0")
        RelayClient(settings, "gw-0", settings.client, tracer=tracer)
        tracer.close(0)
        """,
    ),
    "lag": Use(
        (
            "relaygr.cli.lag",
            "relaygr.cli.ui",
            "relaygr.ui.live",
            "relaygr.ui.server",
            "relaygr.lag.exporter",
            "relaygr.lag.monitor",
            "relaygr.runtime.probes",
        )
    ),
    "trigger": Use(("relaygr.cli.trigger", "relaygr.trigger.app", "relaygr.trigger.faust_stream")),
    "worker": Use(
        (
            "relaygr.cli.worker",
            "relaygr.cli.model",
            "relaygr.cli.cache",
            "relaygr.cli.calibrate",
            "relaygr.cli.doctor",
            "relaygr.cli.vectors",
            "relaygr.worker.model.engine",
            "relaygr.worker.calibration",
            "relaygr.worker.process",
            "relaygr.worker.process.lifecycle",
        )
    ),
    "training": Use(
        (
            "relaygr.cli.data",
            "relaygr.cli.train",
            "relaygr.ingest.parquet",
            "relaygr.training.collect",
            "relaygr.training.lengths",
            "relaygr.training.pipeline",
        ),
    ),
    "bench": Use(
        (
            "relaygr.cli.demo",
            "relaygr.demo.run",
            "relaygr.bench.engine.__main__",
            "relaygr.bench.events.run",
            "relaygr.bench.headline.run",
            "relaygr.bench.overload.run",
            "relaygr.bench.pipeline.__main__",
            "relaygr.simulate.plan",
        )
    ),
}


def requirements(extras: str) -> list[Requirement]:
    """The requirements of the package with these extras, extras of its own resolved."""
    found = [Requirement(text) for text in PROJECT["dependencies"]]
    pending = [extra for extra in extras.split(",") if extra]
    for extra in pending:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
            if requirement.name == "relaygr":
                pending.extend(requirement.extras - set(pending))
            else:
                found.append(requirement)
    return found


def with_dependencies(wanted: list[Requirement]) -> set[str]:
    """The names of the distributions that an installer would bring for these requirements."""
    names: set[str] = set()
    pending = list(wanted)
    for requirement in pending:
        name = canonicalize_name(requirement.name)
        if name in names:
            continue
        names.add(name)
        try:
            texts = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        environments = [{"extra": extra} for extra in ("", *requirement.extras)]
        pending += [
            needed
            for needed in map(Requirement, texts)
            if needed.marker is None or any(needed.marker.evaluate(environment) for environment in environments)
        ]
    return names


@functools.cache
def distributions() -> dict[str, set[str]]:
    """The distributions behind each name that can be imported here."""
    return {name: set(map(canonicalize_name, found)) for name, found in metadata.packages_distributions().items()}


def blocked_names(extras: str) -> set[str]:
    """Names of installed libraries that these extras would not bring."""
    brought = with_dependencies(requirements(extras))
    return {name for name, behind in distributions().items() if not behind & brought} - {"relaygr"}


def source_of(module: str) -> Path | None:
    """The file of a module of ours."""
    for root in ROOTS:
        place = ROOT.joinpath(root, *module.split("."))
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None


@functools.cache
def imports_of(path: Path) -> tuple[str, ...]:
    """The modules that a file imports, in functions as well, but for those that only its annotations need.

    What a package imports for its annotations it also imports when one of its names is asked for (`lazy_names`).
    """
    return tuple(_imports_in(ast.parse(path.read_text(encoding="utf-8")), path.name == "__init__.py"))


def _imports_in(node: ast.AST, in_package: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module is not None:
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif in_package or not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _imports_in(child, in_package)


def libraries_of(modules: tuple[str, ...]) -> dict[str, str]:
    """The libraries that these modules import, directly or by way of other modules of ours, and a file that does."""
    found: dict[str, str] = {}
    pending = list(modules)
    for module in pending:
        parts = module.split(".")
        for length in range(2, len(parts) + 1):
            path = source_of(".".join(parts[:length]))
            for name in imports_of(path) if path is not None else ():
                library = name.partition(".")[0]
                if library == "relaygr":
                    if name not in pending and not f"{name}.".startswith(ASKED_FOR):
                        pending.append(name)
                elif library not in sys.stdlib_module_names:
                    found.setdefault(library, str(path))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("extras", USES)
def test_with_an_extra_its_modules_need_no_other_library(extras: str) -> None:
    use = USES[extras]
    script = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked_names(extras)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import {", ".join(use.modules)}
{textwrap.dedent(use.script)}"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("extras", USES)
def test_an_extra_lists_every_library_that_its_modules_import(extras: str) -> None:
    listed = {canonicalize_name(requirement.name) for requirement in requirements(extras)}
    absent = {
        library: path
        for library, path in libraries_of(USES[extras].modules).items()
        if library not in NOT_LISTED and not distributions().get(SHIPPED_WITH.get(library, library), set()) & listed
    }
    assert absent == {}


@pytest.mark.slow
def test_the_search_for_libraries_follows_imports_of_our_own_modules() -> None:
    assert libraries_of(("relaygr.schemas",)).keys() == {"msgpack", "numpy"}
    assert {"confluent_kafka", "pydantic", "starlette", "typer"} <= libraries_of(("relaygr.cli.lag",)).keys()


@pytest.mark.slow
@pytest.mark.parametrize("library", ["faust", "aiokafka", "aiohttp", "starlette", "uvicorn", "typer", "torch", "lmdb"])
def test_a_gateway_installs_no_library_of_the_processes(library: str) -> None:
    assert library in blocked_names("client")


@pytest.mark.parametrize("library", ["confluent_kafka", "structlog", "typer", "pydantic", "yaml", "prometheus_client"])
def test_the_package_without_extras_installs_no_library_of_a_gateway(library: str) -> None:
    assert library in blocked_names("")


def test_every_command_names_extras_that_exist() -> None:
    known = set(PROJECT["optional-dependencies"])
    assert {name for name, command in COMMANDS.items() if not set(command.extras.split(",")) <= known} == set()


def test_all_is_every_extra_of_the_program_but_npu_pool_and_transformers() -> None:
    extras = PROJECT["optional-dependencies"]
    everything = {
        str(requirement)
        for extra in extras.keys() - {"npu", "pool", "transformers", "docs", "dev"}
        for requirement in requirements(extra)
    }
    assert {str(requirement) for requirement in requirements("all")} == everything


def constrained() -> dict[str, Requirement]:
    """Each line of constraints.txt that is not a comment, by the library's name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(each.name): each for each in found}


def test_constraints_name_one_version_of_each_library_and_no_source_of_it() -> None:
    """An index, a hash or a local version (+cpu) would fit only one build of torch."""
    for name, each in constrained().items():
        assert str(each) == f"{each.name}{each.specifier}" and str(each.specifier).startswith("=="), name
        assert "+" not in str(each.specifier) and len(each.specifier) == 1, name
    assert not {"triton", "torch-npu"} & set(constrained())


@pytest.mark.parametrize("extra", sorted(set(PROJECT["optional-dependencies"]) - {"npu"}))
def test_constraints_lie_within_the_ranges_of_every_extra(extra: str) -> None:
    known = constrained()
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]:
        wanted = Requirement(text)
        if wanted.name not in ("relaygr", "triton"):
            [version] = [each.version for each in known[canonicalize_name(wanted.name)].specifier]
            assert version in wanted.specifier, text


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        "from relaygr.traffic.population import population_of; from relaygr.traffic.settings import TrafficSettings\n"
        "population_of(TrafficSettings(held_out='run'))",
        "from relaygr.demo.data import trained_run; from pathlib import Path; from rich.console import Console\n"
        "trained_run(Console(), Path('data'))",
    ],
    ids=["traffic", "demo"],
)
def test_what_an_option_needs_is_named_with_its_extra(asked: str) -> None:
    script = f"import sys\nsys.modules['torchmetrics'] = None\n{asked}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "pip install 'relaygr[training]'" in done.stderr, done.stderr
