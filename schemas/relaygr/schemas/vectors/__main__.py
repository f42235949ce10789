"""Checks or writes the vectors; `relaygr.schemas.vectors` describes them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from relaygr.schemas.vectors import FILE, differences, vectors, wire_file


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 if something differs, 2 if the file cannot be read."""
    parser = argparse.ArgumentParser("python -m relaygr.schemas.vectors", description="Test vectors of the wire form.")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--against", metavar="FILE", help="check this file of another implementation")
    chosen.add_argument("--write", action="store_true", help=f"add new entries to {FILE}; refuse to change one")
    options = parser.parse_args(arguments)
    ours = vectors()
    if options.write:
        return write(Path(__file__).with_name(FILE), ours)
    if options.against is None:
        theirs, what = wire_file(), FILE
    else:
        what = options.against
        try:
            theirs = json.loads(Path(what).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            sys.stderr.write(f"{what} cannot be read: {error}\n")
            return 2
    found = list(differences(theirs, ours))
    for line in found:
        sys.stdout.write(f"{line}\n")
    if not found:
        counts = ", ".join(f"{len(value)} {name}" for name, value in theirs.items() if isinstance(value, list))
        sys.stdout.write(f"{what} agrees: {counts}\n")
    return 1 if found else 0


def write(path: Path, ours: dict[str, Any]) -> int:
    """Writes the vectors, and returns 0; or returns 1, if an entry that the file has would change or go."""
    earlier = json.loads(path.read_text(encoding="utf-8"))
    now = [entry for entries in ours.values() if isinstance(entries, list) for entry in entries]
    lost = [
        f"{section}: {json.dumps(entry, ensure_ascii=False)[:120]}"
        for section, entries in earlier.items()
        if isinstance(entries, list)
        for entry in entries
        if entry not in now
    ]
    for line in lost:
        sys.stderr.write(f"would change or remove {line}\n")
    if lost:
        sys.stderr.write(
            f"{path.name} was not written: deployed programs send these bytes. For a change that the rules in "
            "relaygr.schemas.codec allow, delete the line from the file first.\n"
        )
        return 1
    text = "{\n" + ",\n".join(_lines(name, value) for name, value in ours.items()) + "\n}\n"
    path.write_text(text, encoding="utf-8")
    return 0


def _lines(name: str, value: object) -> str:
    """One entry a line, so that a change shows as the lines that it changes."""
    if not isinstance(value, list):
        return f'"{name}": {json.dumps(value)}'
    rows = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in value)
    return f'"{name}": [\n{rows}\n]'


if __name__ == "__main__":
    sys.exit(main())
