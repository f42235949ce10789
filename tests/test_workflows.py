"""The workflows of `.github`: their form, what an attacker could do with them, and which tags a release refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from relaygr.schemas import __version__

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE: Any = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
VERSION_FILE = "schemas/relaygr/schemas/version.py"
CHART_FILE = "compose/helm/relaygr/Chart.yaml"


def installed(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of this environment, which the extra `dev` installs."""
    command = [str(Path(sys.executable).parent / program), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_an_audit_finds_nothing() -> None:
    """Actions by full digest, least rights, no credentials that stay, no text of others in a script."""
    done = installed("zizmor", "--offline", "--no-progress", ".github")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_files_have_the_form_that_the_forge_reads() -> None:
    for schema, files in (
        ("vendor.github-workflows", WORKFLOWS),
        ("vendor.dependabot", [ROOT / ".github" / "dependabot.yml"]),
    ):
        done = installed("check-jsonschema", "--builtin-schema", schema, *map(str, files))
        assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_published_before_what_may_still_fail() -> None:
    """PyPI never takes a version twice, and the draft says that all else is there."""

    def before(job: str) -> set[str]:
        needs = RELEASE["jobs"][job].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*(before(each) for each in direct))

    assert before("wheel") == {"build", "image", "image-index", "chart"}
    assert before("draft") == set(RELEASE["jobs"]) - {"draft"}


class TestTheTag:
    """The first step of a release, in a folder with the files that it reads."""

    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        for name in (VERSION_FILE, CHART_FILE):
            (tmp_path / name).parent.mkdir(parents=True)
            shutil.copy(ROOT / name, tmp_path / name)
        (tmp_path / "CHANGELOG.md").write_text(
            f"# Changes\n\n## Unreleased\n\n## {__version__} - 2026-12-01\n\n### Added\n\n* A relay.\n\n"
            "## 0.0.1 - 2026-01-01\n\n* Nothing.\n",
            encoding="utf-8",
        )
        return tmp_path

    @staticmethod
    def judge(folder: Path, tag: str) -> subprocess.CompletedProcess[str]:
        [script] = [
            step["run"] for step in RELEASE["jobs"]["build"]["steps"] if "GITHUB_REF_NAME" in step.get("run", "")
        ]
        environment = {**os.environ, "GITHUB_REF_NAME": tag}
        command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    def test_one_that_names_the_version_takes_the_section_of_the_changelog(self, checkout: Path) -> None:
        done = self.judge(checkout, f"v{__version__}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert (checkout / "build" / "notes.md").read_text(encoding="utf-8").strip() == "### Added\n\n* A relay."

    @pytest.mark.parametrize("tag", ["v9.9.9", f"v{__version__}.1", "v", "v.*", 'v"; exit 0; "'])
    def test_another_one_is_refused(self, checkout: Path, tag: str) -> None:
        done = self.judge(checkout, tag)
        assert done.returncode == 1
        assert f"::error::{VERSION_FILE} does not have" in done.stdout

    def test_a_chart_of_another_version_is_refused(self, checkout: Path) -> None:
        chart = checkout / CHART_FILE
        chart.write_text(chart.read_text(encoding="utf-8").replace("\nversion: ", "\nversion: 9"), encoding="utf-8")
        done = self.judge(checkout, f"v{__version__}")
        assert (done.returncode, f"::error::{CHART_FILE} does not have" in done.stdout) == (1, True)

    def test_a_changelog_without_the_section_is_refused(self, checkout: Path) -> None:
        (checkout / "CHANGELOG.md").write_text("# Changes\n\n## Unreleased\n\n* A relay.\n", encoding="utf-8")
        done = self.judge(checkout, f"v{__version__}")
        assert (done.returncode, "::error::CHANGELOG.md has no section" in done.stdout) == (1, True)
