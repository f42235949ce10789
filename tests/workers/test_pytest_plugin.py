"""The plug-in of pytest, as a team's CI has it: found by its entry point, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from relaygr.worker.model.rankers import RECORD_FILE
from relaygr.worker.model_check import Rule
from tests.worlds.toy_rankers import MODULE, write_folder

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rankers.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.slow


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    """With the tests that lie in the folder. The plug-in is found as if this state of it were installed."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    installed = folder / "installed" / "relaygr_plugin-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: relaygr-plugin\nVersion: 1\n")
    lines = [f"{name} = {target}" for name, target in entry_points["pytest11"].items()]
    (installed / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines]) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-rA", "-p", "no:cacheprovider", "--rootdir", str(folder), *arguments],
        capture_output=True, text=True, timeout=240, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{installed.parent}{os.pathsep}{ROOT}", "COLUMNS": "400"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def results(printed: str) -> dict[str, str]:
    """What became of each rule, by its name."""
    return dict(reversed(found) for found in re.findall(r"^([A-Z]+) \S+::relaygr\[(\w+)\]", printed, re.MULTILINE))


def test_a_right_ranker_passes_each_rule_and_nothing_is_written(tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    assert "\npytest --relaygr-ranker model --relaygr-module ours\n" in PAGE
    code, printed = run_pytest(tmp_path, "--relaygr-ranker", "model", "--relaygr-module", MODULE)
    assert code == 0, printed
    assert set(results(printed).values()) == {"PASSED"} and f"{len(Rule)} passed" in printed
    assert not (tmp_path / "model" / RECORD_FILE).exists()


def test_a_broken_rule_fails_with_its_sentence_and_smallest_case_or_is_expected(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "CountsFromTheEnd")
    expected = ("--relaygr-may-break", "suffix")
    code, printed = run_pytest(tmp_path, "--relaygr-ranker", "model", "--relaygr-module", MODULE, *expected)
    assert code == 1, printed
    found = results(printed)
    assert (found.pop("grows"), found.pop("suffix")) == ("FAILED", "XFAIL")
    assert set(found.values()) == {"PASSED"}
    sentence = (
        r"FAILED model::relaygr\[grows\] - Failed: It is not so that a history that grew keeps its K,V: with \d "
        r"behaviours? scores differ by \d+\.\d\d% of their spread\. What it costs: no append"
    )
    assert re.search(sentence, printed), printed
    assert "Traceback" not in printed


def test_a_ranker_whose_code_may_not_run_fails_with_the_sentence_that_says_so(tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    code, printed = run_pytest(tmp_path, "--relaygr-ranker", "model", "-k", "relaygr and finite")
    assert code == 1, printed
    assert (
        f"which is code: it runs only if worker.ranker_modules (for commands --ranker-module) has '{MODULE}'" in printed
    )
    assert f"{len(Rule) - 1} deselected" in printed


def test_a_rule_that_is_none_is_named(tmp_path: Path) -> None:
    code, printed = run_pytest(tmp_path, "--relaygr-ranker", "model", "--relaygr-may-break", "speed")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--relaygr-may-break speed is no rule: name one of finite, deterministic, history, chunks," in printed


def test_without_the_option_nothing_else_is_imported_and_nothing_is_added(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import sys\n\n\n"
        "def test_theirs():\n"
        "    ours = {name for name in sys.modules if name.startswith('relaygr')}\n"
        "    assert ours == {'relaygr', 'relaygr.pytest_plugin'}\n"
        "    assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    code, printed = run_pytest(tmp_path)
    assert code == 0, printed
    assert "1 passed" in printed
