"""The page of the public API lists what the packages export, and nothing else."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
PACKAGES = ("relaygr.client", "relaygr.ranker", "relaygr.schemas", "relaygr.settings")


def names_in_table(package: str) -> list[str]:
    """The names in the first column of the table under the package's heading."""
    section = PAGE.partition(f"### `{package}`\n")[2].partition("\n#")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_lists_every_name_that_a_package_exports_once(package: str) -> None:
    assert sorted(names_in_table(package)) == sorted(importlib.import_module(package).__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_the_page_lists_the_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [row] = [line for line in PAGE.splitlines() if line.startswith("| extras: ")]
    assert set(re.findall(r"`(\w+)`", row.split("|")[1])) == set(project["optional-dependencies"]) - {"docs", "dev"}
