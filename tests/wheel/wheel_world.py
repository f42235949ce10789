"""The release of this checkout, and the wheel of an earlier commit: built, and installed into environments of their own
beside the libraries of this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.promised import unavailable

ROOT = Path(__file__).parents[2]
EARLIER_COMMIT = (Path(__file__).parent / "earlier_commit").read_text(encoding="ascii").strip()
_TIMEOUT_S = 200


@dataclass(frozen=True)
class Release:
    """The files that are published."""

    source: Path
    wheel: Path


@dataclass(frozen=True)
class Environment:
    """A virtual environment with a wheel of ours: its interpreter, and where the wheel is installed."""

    python: Path
    packages: Path

    def copy(self, folder: Path) -> Environment:
        """The same, for a test that changes files. It takes a moment; an installation takes seconds."""
        shutil.copytree(self.python.parents[1], folder, symlinks=True)
        return Environment(
            *(folder / path.relative_to(self.python.parents[1]) for path in (self.python, self.packages))
        )

    def replace(self, by: Environment) -> None:
        """Puts the wheel of another environment in the place of this one's, as pip does."""
        shutil.rmtree(self.packages / "relaygr")
        shutil.copytree(by.packages / "relaygr", self.packages / "relaygr")

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


def build_release(folder: Path) -> Release:
    """Builds the source archive into `folder`, and the wheel from it, with the hatchling that is installed here."""
    _run("build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    [source], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Release(source, wheel)


def build_earlier(folder: Path) -> Path:
    """Builds the wheel of the earlier commit. Without it the test ends: as failed if the history is whole."""
    archive = folder / "source.tar"
    command = ["git", "archive", f"--output={archive}", EARLIER_COMMIT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        lack = f"this checkout lacks the commit {EARLIER_COMMIT}: {done.stderr.strip()}"
        asked = ["git", "rev-parse", "--is-shallow-repository"]
        is_shallow = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        assert is_shallow != "false", lack
        unavailable("git", lack)
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "source", filter="data")
    _run("build", "--no-isolation", "--wheel", "--outdir", str(folder), str(folder / "source"))
    [wheel] = folder.glob("*.whl")
    return wheel


def make_environment(folder: Path, wheel: Path) -> Environment:
    """Installs the wheel alone. Its libraries are those of this environment; the checkout is not to be seen."""
    venv.EnvBuilder(symlinks=True).create(folder)
    [packages] = folder.glob("lib/python*/site-packages")
    libraries = [path for path in sys.path if "site-packages" in path]
    (packages / "libraries.pth").write_text("\n".join(libraries) + "\n", encoding="utf-8")
    quiet = ("--quiet", "--disable-pip-version-check")
    _run("pip", *quiet, "install", "--no-deps", "--no-index", "--target", str(packages), str(wheel))
    return Environment(folder / "bin" / "python", packages)


def finish(process: subprocess.Popen[str]) -> str:
    """Waits for a script, whose standard output is returned. Fails with what it wrote on standard error."""
    try:
        output, errors = process.communicate(timeout=_TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output


def _run(module: str, *arguments: str) -> None:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
