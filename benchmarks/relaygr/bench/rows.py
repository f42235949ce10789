"""Rows of figures: when and where they were measured, and the CSV files that they are appended to."""

from __future__ import annotations

import csv
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from relaygr.runtime.errors import RelayError
from relaygr.runtime.processor import processor_name
from relaygr.schemas import __version__

_CHECKOUT = Path(__file__).resolve().parents[3]


def machine() -> str:
    return f"{processor_name()}, Python {platform.python_version()}"


def refuse_other_machine(path: Path, made_on: str) -> None:
    """Raises RelayError if a file was made on another machine than this."""
    if made_on != machine():
        raise RelayError(f"{path} was made on {made_on}, this is {machine()}: give another folder with --out")


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@cache
def code() -> str:
    """The commit of this checkout, with a plus if its code has changed since. Without a checkout, the version."""
    if not (_CHECKOUT / ".git").exists():
        return __version__
    try:
        commit = _git("rev-parse", "--short=10", "HEAD")
        # The benchmarks write the other files themselves.
        changed = _git("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return __version__
    return f"{commit}+" if changed else commit


def _git(*arguments: str) -> str:
    command = ("git", "--no-optional-locks", "-C", str(_CHECKOUT), *arguments)
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def refuse_other_columns(path: Path, columns: Iterable[str]) -> None:
    """Raises RelayError for a file to which rows with these columns cannot be appended. Call it before a run, too."""
    wanted = list(columns)
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            if next(csv.reader(file), wanted) != wanted:
                raise RelayError(f"{path} has the columns of another version: move it away, or choose another file")


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends the rows, at least one, and the header to a new file. Raises RelayError for a file with other columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new, columns = not path.exists(), list(rows[0])
    refuse_other_columns(path, columns)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(rows)
