"""The command line: it imports little until a command is called, and prints one sentence for each error."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import typer
from typer.testing import CliRunner

import relaygr.client
from relaygr.cli import COMMANDS, CommandSpec
from relaygr.cli.app import OPTIONAL, LazyGroup
from relaygr.runtime.errors import RelayError
from tests.waiting import until

HEAVY = ("torch", "faust", "confluent_kafka", "aiokafka", "matplotlib", "lmdb")
"""Modules that `relaygr --help` does not import."""
FORBIDDEN = ("torch", "matplotlib", "faust", "scipy", "lmdb")
"""Modules that `--help` of no command imports."""
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BENCHMARKS: dict[str, str] = PROJECT["entry-points"]["relaygr.benchmarks"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RELAYGR_")}
    command = [sys.executable, "-m", "relaygr", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=clean, check=False)


AS_FIRST_PROCESS = ("unshare", "--pid", "--fork", "--kill-child")


def can_make_a_pid_namespace() -> bool:
    return (
        shutil.which("unshare") is not None and not subprocess.run([*AS_FIRST_PROCESS, "true"], check=False).returncode
    )


def has_handler(pid: int, number: int) -> bool:
    [caught] = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module whose function `run` is the command `probe`; a test replaces the function."""
    module = ModuleType("probe_command")
    monkeypatch.setitem(sys.modules, "probe_command", module)
    monkeypatch.setitem(COMMANDS, "probe", CommandSpec("probe_command:run", "For tests.", "worker"))
    return module


def invoke_probe(module: ModuleType, failure: BaseException) -> object:
    def fail() -> None:
        raise failure

    module.run = fail  # type: ignore[attr-defined]
    # Built anew, since the group reads the table when it is made.
    fresh = typer.Typer(cls=LazyGroup, pretty_exceptions_enable=False)
    fresh.callback()(lambda: None)
    return CliRunner().invoke(fresh, ["probe"])


@pytest.mark.slow
def test_help_lists_every_command_and_imports_none() -> None:
    script = (
        "import sys\n"
        "from relaygr.__main__ import main\n"
        "sys.argv = ['relaygr', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not heavy, heavy\n"
        "from relaygr.cli import COMMANDS\n"
        "modules = {command.target.partition(':')[0] for command in COMMANDS.values()}\n"
        "commands = [name for name in modules if name in sys.modules]\n"
        "assert not commands, commands\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert [name for name in COMMANDS if name not in done.stdout] == []


# Runs `--help` of all commands and subcommands, and names the first one that imported something heavy.
EVERY_HELP = f"""
import sys
from importlib.metadata import EntryPoint
from relaygr.cli import COMMANDS, bench
from relaygr.cli.app import app, load_command

bench.entry_points = lambda group: [EntryPoint(name, value, group) for name, value in {BENCHMARKS!r}.items()]

def paths(command, path):
    yield path
    for name, subcommand in getattr(command, "commands", {{}}).items():
        yield from paths(subcommand, [*path, name])

for name in COMMANDS:
    for path in paths(load_command(name), [name]):
        try:
            app([*path, "--help"], prog_name="relaygr", standalone_mode=False)
        except SystemExit as end:
            assert not end.code, (path, end.code)
        heavy = [library for library in {FORBIDDEN!r} if library in sys.modules]
        assert not heavy, (path, heavy)
        print("answered:", *path)
"""


@pytest.mark.slow
def test_every_command_is_where_the_table_says_and_its_helps_import_nothing_heavy() -> None:
    command = [sys.executable, "-c", EVERY_HELP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answered = [line.removeprefix("answered: ") for line in done.stdout.splitlines() if line.startswith("answered:")]
    assert [name for name in COMMANDS if name not in answered or f"Usage: relaygr {name}" not in done.stdout] == []
    of_bench = [name.removeprefix("bench ") for name in answered if name.startswith("bench ")]
    assert of_bench == sorted(BENCHMARKS)


@pytest.mark.slow
def test_the_version_is_printed() -> None:
    assert run("--version").stdout == f"relaygr {relaygr.client.__version__}\n"


@pytest.mark.slow
def test_a_misspelt_command_is_refused_with_a_suggestion() -> None:
    done = run("settigns")
    assert done.returncode == 2
    assert "Did you mean 'settings'?" in done.stderr


@pytest.mark.slow
def test_settings_are_printed_with_their_origin_and_no_secret() -> None:
    sasl = ("protocol=SASL_SSL", "sasl_mechanism=PLAIN", "sasl_username=me", "sasl_password=hunter2")
    done = run("settings", *(part for option in sasl for part in ("--set", f"security.{option}")))
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert lines["worker.hbm_bytes"] == ["512MiB", "default"]
    assert lines["security.sasl_username"] == ["me", "--set"]
    assert "hunter2" not in done.stdout


def test_an_error_that_the_user_can_mend_is_one_sentence(command: ModuleType) -> None:
    done = invoke_probe(command, RelayError("The topic [x] is not there. Run: relaygr topics create"))
    assert done.exit_code == 1
    assert done.stderr == "The topic [x] is not there. Run: relaygr topics create\n"
    assert done.stdout == ""


@pytest.mark.parametrize(("library", "extra"), [("torch", "worker"), ("starlette", "worker"), *OPTIONAL.items()])
def test_a_missing_library_names_the_extra_to_install(command: ModuleType, library: str, extra: str) -> None:
    done = invoke_probe(command, ModuleNotFoundError(f"No module named '{library}.x'", name=f"{library}.x"))
    assert done.exit_code == 1
    assert f"pip install 'relaygr[{extra}]'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [("lag",), ("trigger",), ("traffic", "--out", "records.jsonl")])
def test_a_folder_of_metrics_that_is_missing_is_one_sentence(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Servers of several processes set the variable, for all that they start."""
    done = subprocess.run(
        [sys.executable, "-m", "relaygr", *words, "--bootstrap", "127.0.0.1:1"],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "gone")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    [line] = done.stderr.splitlines()
    assert line.startswith(f"PROMETHEUS_MULTIPROC_DIR is {tmp_path / 'gone'}, which is no folder: make the folder")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("words", [("settings",), ("settings", "--json"), ("topics", "--help")])
def test_a_full_disk_under_what_is_printed_is_one_sentence(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "relaygr", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("No space left on device") and len(done.stderr.splitlines()) == 1


def test_a_missing_module_of_our_own_is_a_bug_and_stays_one(command: ModuleType) -> None:
    done = invoke_probe(command, ModuleNotFoundError("No module named 'relaygr.x'", name="relaygr.x"))
    assert isinstance(done.exception, ModuleNotFoundError)


def test_an_interrupt_ends_without_a_traceback(command: ModuleType) -> None:
    done = invoke_probe(command, KeyboardInterrupt())
    assert done.exit_code == 130
    assert done.output == ""


@pytest.mark.skipif(not can_make_a_pid_namespace(), reason="this user may not make a namespace of processes")
def test_the_first_process_of_a_container_ends_by_sigterm_while_it_starts() -> None:
    """Nobody listens at the address, so that the command still waits."""
    words = ["topics", "create", "--bootstrap", "127.0.0.1:1", "--set", "connect_timeout_s=200"]
    outer = subprocess.Popen([*AS_FIRST_PROCESS, sys.executable, "-m", "relaygr", *words])
    try:
        until(lambda: len(psutil.Process(outer.pid).children()) == 1, "a process in the namespace")
        [inner] = psutil.Process(outer.pid).children()
        until(lambda: has_handler(inner.pid, signal.SIGTERM), "a handler of SIGTERM", 20)
        inner.send_signal(signal.SIGTERM)
        assert outer.wait(60) == 128 + signal.SIGTERM
    finally:
        outer.kill()
        outer.wait()


def test_without_the_command_lines_own_libraries_it_says_what_to_install() -> None:
    script = "import sys\nsys.modules['typer'] = None\nfrom relaygr.__main__ import main\nmain()\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert done.stderr == "typer is not installed: pip install 'relaygr[cli]'.\n"


def test_a_machine_without_a_temporary_folder_is_one_sentence(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(FileNotFoundError) as found:
        tempfile._get_default_tempdir()  # type: ignore[attr-defined]
    done = invoke_probe(command, found.value)
    assert done.exit_code == 1
    assert "No usable temporary directory found in []: set TMPDIR to a folder" in done.output
