"""The wheel of this checkout: built, and installed into environments of its own beside the libraries of this one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 110


@dataclass(frozen=True)
class Environment:
    """A virtual environment with a wheel of ours: its interpreter, and where the wheel is installed."""

    python: Path
    packages: Path

    def start(self, script: Path, *arguments: str) -> subprocess.Popen[str]:
        """Starts a script in its own folder."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RELAYGR_", "PYTHON"))}
        return subprocess.Popen(
            [str(self.python), str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=script.parent,
            env=clean,
        )


def build_wheel(folder: Path) -> Path:
    """Builds the wheel into `folder`, with the hatchling that is installed here if there is one."""
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") is not None else []
    _pip("wheel", "--no-deps", *isolation, "--wheel-dir", str(folder), str(ROOT))
    [wheel] = folder.glob("*.whl")
    return wheel


def make_environment(folder: Path, wheel: Path) -> Environment:
    """Installs the wheel alone. Its libraries are those of this environment; the checkout is not to be seen."""
    venv.EnvBuilder(symlinks=True).create(folder)
    [packages] = folder.glob("lib/python*/site-packages")
    libraries = [path for path in sys.path if "site-packages" in path]
    (packages / "libraries.pth").write_text("\n".join(libraries) + "\n", encoding="utf-8")
    _pip("install", "--no-deps", "--no-index", "--target", str(packages), str(wheel))
    return Environment(folder / "bin" / "python", packages)


def finish(process: subprocess.Popen[str]) -> str:
    """Waits for a script, whose standard output is returned. Fails with what it wrote on standard error."""
    try:
        output, errors = process.communicate(timeout=_TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
