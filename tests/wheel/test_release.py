"""What a release consists of: a source archive, the wheel that is built from it, and their description."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from relaygr.schemas import __version__
from tests.wheel.wheel_world import Environment, Release

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_the_files_carry_the_version(release: Release) -> None:
    assert release.wheel.name == f"relaygr-{__version__}-py3-none-any.whl"
    assert release.source.name == f"relaygr-{__version__}.tar.gz"


def test_a_registry_would_take_both_files(release: Release) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", str(release.source), str(release.wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_source_archive_has_what_is_tracked_and_nothing_else(release: Release) -> None:
    """A machine's own settings, such as `compose/settings.env`, would be published with it."""
    with tarfile.open(release.source) as archive:
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    assert packed - tracked == {"PKG-INFO"}
    assert {"LICENSE", "constraints.txt", "Makefile", "compose/Dockerfile", "tests/conftest.py"} <= packed


def test_what_holds_secrets_of_a_machine_is_not_packed() -> None:
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"compose/settings.env", "compose/compose.override.yaml"} <= set(ignored)


def test_the_installed_command_runs_without_the_checkout(installed: Environment, tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RELAYGR_", "PYTHON"))}

    def relaygr(*arguments: str) -> str:
        command = [str(installed.python), str(installed.packages / "bin" / "relaygr"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=clean)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert relaygr("--version").split() == ["relaygr", __version__]
    relaygr("model", "init", "model", "--vocabulary", "100", "--layers", "1", "--dim", "32")
    assert {path.name for path in (tmp_path / "model").iterdir()} >= {"config.json", "model.safetensors"}
