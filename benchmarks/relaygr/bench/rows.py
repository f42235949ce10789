"""Rows of figures: when and where they were measured, and the CSV files that they are appended to."""

from __future__ import annotations

import csv
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relaygr.runtime.processor import processor_name


def machine() -> str:
    return f"{processor_name()}, Python {platform.python_version()}"


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends the rows, at least one, and the header to a new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)
