"""`relaygr bench`: the benchmarks of the project by name."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from relaygr.bench.engine.__main__ import SHAPE_NAMES
from relaygr.bench.engine.shapes import SHAPES
from relaygr.cli import bench
from relaygr.cli.app import app
from relaygr.cli.app import run as run_as_a_program
from relaygr.runtime.errors import RelayError

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in (ROOT / "benchmarks" / "relaygr" / "bench").glob("*/__main__.py"))


def doubled(value: Annotated[int, typer.Option(help="A number.")] = 1) -> None:
    """Print twice the number."""
    typer.echo(2 * value)


def refused() -> None:
    """Refuse to run."""
    raise RelayError("There is no broker.")


def stopped() -> None:
    """Get SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    assert callable(handler)
    handler(signal.SIGTERM, None)


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Has the handler of before at the end."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint(name, f"{__name__}:{name}", bench.GROUP) for name in ("refused", "doubled", "stopped")]
    monkeypatch.setattr(bench, "entry_points", lambda group: entries)
    monkeypatch.setattr(EntryPoint, "load", lambda entry: globals()[entry.attr])


def run(*arguments: str) -> object:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_every_benchmark_of_the_project_is_an_entry_point_that_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entries = project["entry-points"][bench.GROUP]
    assert sorted(entries) == PACKAGES
    for name, value in entries.items():
        assert value == f"relaygr.bench.{name}.__main__:main"
        assert callable(EntryPoint(name, value, bench.GROUP).load())


def test_without_a_name_the_benchmarks_are_listed_with_a_line_each(installed: None) -> None:
    done = run()
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "doubled  Print twice the number.",
        "refused  Refuse to run.",
        "stopped  Get SIGTERM.",
    ]


def test_a_benchmark_runs_by_name_with_its_options(installed: None) -> None:
    assert run("doubled", "--value", "21").stdout == "42\n"


def test_an_error_that_the_user_can_mend_is_one_sentence(installed: None) -> None:
    done = run("refused")
    assert (done.exit_code, done.stderr) == (1, "There is no broker.\n")


def test_sigterm_ends_a_benchmark_as_an_exception_so_that_it_leaves_nothing(
    installed: None, sigterm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("stopped").exit_code == 128 + signal.SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setattr(sys, "argv", ["stopped"])
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        run_as_a_program(stopped)


def test_a_name_that_is_unknown_is_refused(installed: None) -> None:
    assert run("double").exit_code == 2


def test_without_an_installed_benchmark_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "entry_points", lambda group: [])
    done = run()
    assert done.exit_code == 1
    assert "pip install 'relaygr[bench]'" in done.stderr


def test_the_help_of_the_engine_benchmark_names_its_shapes() -> None:
    assert tuple(SHAPES) == SHAPE_NAMES


@pytest.mark.slow
def test_a_benchmark_that_runs_as_a_module_tells_an_error_without_a_traceback(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    command = [sys.executable, "-m", "benchmarks.headline", "--report", "--out", str(empty)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert str(empty) in done.stderr and done.stderr.count("\n") == 1
