"""A file system that a test can fill."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def fill(folder: Path) -> Path:
    """Writes until the file system is full. Returns the file to delete."""
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler
