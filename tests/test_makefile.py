"""The Makefile makes environments of Pythons that can run the code, and of no other."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python_of(folder: Path, version: tuple[int, ...]) -> Path:
    """A Python that says that it has this version, and makes a folder in place of an environment."""
    python = folder / "bin" / "python-of-the-test"
    python.parent.mkdir()
    python.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys\n"
        f"sys.version_info = {version}\n"
        "match sys.argv[1:]:\n"
        "    case ['-c', code]: exec(code)\n"
        "    case ['-m', 'venv', folder]: pathlib.Path(folder).mkdir()\n"
        "    case _: sys.exit('unexpected')\n",
        encoding="utf-8",
    )
    python.chmod(0o755)
    return python


def make(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version", [(3, 8, 20), (3, 10, 0), None])
def test_a_python_that_is_too_old_or_missing_makes_no_environment(
    version: tuple[int, ...] | None, tmp_path: Path
) -> None:
    python = python_of(tmp_path, version) if version is not None else tmp_path / "nowhere"
    environment = tmp_path / "environment"
    done = make(environment / ".made", f"VENV={environment}", f"PYTHON={python}")
    assert done.returncode != 0 and "Python 3.11 or newer" in done.stderr
    assert not environment.exists()


def test_a_python_that_is_new_enough_makes_one(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    done = make(environment / ".made", f"VENV={environment}", f"PYTHON={python_of(tmp_path, (3, 11, 0))}")
    assert done.returncode == 0, done.stderr
    assert (environment / ".made").exists()


def test_the_folder_of_transformers_has_the_versions_that_the_extra_allows() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    [allowed] = [each for each in extras["transformers"] if each.startswith("transformers")]
    assert f"'{allowed}'" in (ROOT / "Makefile").read_text(encoding="utf-8")
